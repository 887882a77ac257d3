"""How close does a training step come to max(load, copy, compute)?

    python benchmarks/overlap.py [--full] [--all-peers] [--json FILE]

Batches of 2 MB; loading sleeps, computing occupies the device; a copy runs at 1 GB/s on the simulated device. 200
batches a cell, and the clock starts at the request for the first one, with empty buffers. "Ahead": the host queues work
and does not wait until the end; "waits": it waits for the device after each step. A cell is wall time over 200 times
the longest of the three; 1.00 is perfect. "Wrong": batches, of 50, whose values are not the source's on a device that
runs work as late as it may.

Last table: 2026-11-29 · 2 cores, AMD EPYC, Linux · load average 1.2 at the start · device: simulated, not a GPU · torch threads: 1 · python 3.11.7, torch 2.14.1, torchdata 0.9.0, prefetch_generator 1.0.3, spdl-core 0.8.0, grain 0.2.18

Wall / max(load, copy, compute)

| contender                        | ahead: worst | mean | waits: worst | mean | wrong    |
| -------------------------------- | ------------ | ---- | ------------ | ---- | -------- |
| plain                            | 2.31         | 1.72 | 3.39         | 2.15 | 0 of 50  |
| sidestream                       | 1.08         | 1.04 | 1.16         | 1.07 | 0 of 50  |
| prefetch_generator               | 2.08         | 1.44 | 2.29         | 1.52 | 0 of 50  |
| torchdata prefetch               | 2.06         | 1.42 | 2.18         | 1.48 | 0 of 50  |
| torchdata prefetch, pin_memory   | 2.01         | 1.39 | 2.14         | 1.46 | 0 of 50  |
| DataLoader, 1 worker, pin_memory | 2.03         | 1.46 | 2.23         | 1.53 | 0 of 50  |
| side stream without event        | 1.20         | 1.08 | 1.21         | 1.09 | 50 of 50 |
| SPDL                             | 2.28         | 1.59 | 2.53         | 1.72 | 0 of 50  |
| Grain                            | 2.05         | 1.42 | 2.20         | 1.49 | 0 of 50  |
| torchdata.nodes, PinMemory       | 2.01         | 1.42 | 2.15         | 1.48 | 0 of 50  |

sidestream, cell by cell

| load/compute [ms] | ahead | waits |
| ----------------- | ----- | ----- |
| 0.2/0.2           | 1.04  | 1.00  |
| 0.2/2             | 1.01  | 1.11  |
| 0.2/5             | 1.00  | 1.07  |
| 2/0.2             | 1.07  | 1.09  |
| 2/2               | 1.08  | 1.16  |
| 2/5               | 1.01  | 1.07  |
| 5/0.2             | 1.05  | 1.04  |
| 5/2               | 1.05  | 1.04  |
| 5/5               | 1.05  | 1.07  |
"""  # noqa: E501

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterDataPipe

import common
import device
from peers import MOVERS, OTHER_MOVERS, Build, Pipe

BATCH = 2_000_000  # [bytes]
BANDWIDTH = 1e9  # of the simulated device [bytes/second]
SIZE = 2  # of every buffer
TIMES = [0.0002, 0.002, 0.005]  # [seconds]
FULL = [0.0002, 0.001, 0.002, 0.005]


class Loading(IterDataPipe):
    """`n` times the same batch, each after `load` seconds."""

    def __init__(self, n: int, load: float) -> None:
        self.n, self.load = n, load
        self.batch = torch.ones(BATCH // 4)

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(self.n):
            time.sleep(self.load)
            yield self.batch


class Numbered(IterDataPipe):
    """Batch i holds nothing but i."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[torch.Tensor]:
        for i in range(self.n):
            yield torch.full((1 << 16,), float(i + 1))


def copy_seconds() -> float:
    """How long the copy of a batch takes from pinned memory."""
    host = torch.ones(BATCH // 4).pin_memory()
    host.to("cuda", non_blocking=True)
    return min(device.seconds_between(lambda: host.to("cuda", non_blocking=True)) for _ in range(5))


def wall(pipe: Pipe, compute: float, *, waits: bool) -> float:
    """An epoch, from the request for the first batch to the end of the last step [seconds]."""
    start = time.perf_counter()
    for batch in pipe:
        device.compute(compute)
        if waits:
            torch.cuda.current_stream().synchronize()
        del batch
    torch.cuda.synchronize()
    return time.perf_counter() - start


def wrong(build: Build, n: int) -> int | str:
    """How many of `n` batches are not what the source made, where the device runs nothing before it has to."""
    if device.simulator() is None:
        return "only simulated"
    device.reset("late")
    return sum(bool((batch.cpu() != i + 1).any()) for i, batch in enumerate(build(Numbered(n), SIZE)))


def measure(contender: str, options: dict[str, Any]) -> dict[str, Any]:
    build = {**MOVERS, **OTHER_MOVERS}[contender]
    n, times = (5, [0.001]) if options["quick"] else (200, FULL if options["full"] else TIMES)
    device.calibrate()
    device.reset("timed", bandwidth=BANDWIDTH)
    copy = BATCH / BANDWIDTH if device.simulator() else copy_seconds()
    cells: dict[str, Any] = {"ahead": {}, "waits": {}}
    for load in times:
        pipe = build(Loading(n, load), SIZE)
        for compute in times:
            for mode, found in cells.items():
                device.reset("timed", bandwidth=BANDWIDTH)
                took = wall(pipe, compute, waits=mode == "waits")
                found[f"{load * 1e3:g}/{compute * 1e3:g}"] = took / n / max(load, copy, compute)
    read = 10 if options["quick"] else 50
    return {**cells, "wrong": wrong(build, read), "read": read, "copy [ms]": copy * 1e3}


def columns(one: dict[str, Any]) -> list[object]:
    spread = [(max(one[mode].values()), sum(one[mode].values()) / len(one[mode])) for mode in ("ahead", "waits")]
    return [*spread[0], *spread[1], f"{one['wrong']} of {one['read']}"]


def table(results: common.Results) -> str:
    header = ["contender", "ahead: worst", "mean", "waits: worst", "mean", "wrong"]
    text = "Wall / max(load, copy, compute)\n\n" + common.markdown(header, common.rows(results, columns, 5))
    ours = results.get("sidestream", {}).get("median")
    if ours:
        cells = [[cell, ours["ahead"][cell], ours["waits"][cell]] for cell in ours["ahead"]]
        text += "\n\nsidestream, cell by cell\n\n" + common.markdown(["load/compute [ms]", "ahead", "waits"], cells)
    return text


if __name__ == "__main__":
    common.main(__file__, __doc__, MOVERS, table, others=OTHER_MOVERS, extra=["--full"])
