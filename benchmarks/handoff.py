"""What does it cost to hand an item from the loading thread to the consumer?

    python benchmarks/handoff.py [--all-peers] [--json FILE]

Items are small numbers, so nothing but the hand-off is seen. Cost: an epoch's time an item, less that of the bare pipe
in the same process, runs interleaved; every contender stands behind the same pipe. Ready: `next()` on an item that
waits, buffer 10, with 1 ms between. Idle: the CPU of a process whose buffer is full and whose consumer is away. Nothing
to hide: wall time over that of plain iteration where only one side has work, 1 ms of computing or of loading.

Last table: 2026-11-29 · 2 cores, AMD EPYC, Linux · load average 0.7 at the start · device: simulated, not a GPU · torch threads: 1 · python 3.11.7, torch 2.14.1, torchdata 0.9.0, prefetch_generator 1.0.3, spdl-core 0.8.0, grain 0.2.18

| contender            | cost at 1 [µs] | cost at 2 [µs] | cost at 10 [µs] | cost at 64 [µs] | ready p50 [µs] | p99 [µs] | idle [% of a core] | computing only / plain | loading only / plain |
| -------------------- | -------------- | -------------- | --------------- | --------------- | -------------- | -------- | ------------------ | ---------------------- | -------------------- |
| sidestream           | 39.7           | 14.2           | 6.95            | 3.14            | 10.5           | 46.5     | 0.0                | 1.02                   | 1.01                 |
| queue.Queue          | 41.4           | 13.1           | 8.73            | 4.03            | 10.5           | 42.2     | 0.0                | 1.02                   | 1.02                 |
| prefetch_generator   | 40.7           | 13.0           | 9.11            | 4.07            | 10.5           | 50.0     | 0.0                | 1.03                   | 1.01                 |
| torchdata prefetch   | 256            | 125            | 23.8            | 3.36            | 4.51           | 27.8     | 11.2               | 1.01                   | 0.99                 |
| DataLoader, 1 worker | 173            | 115            | 57.0            | 54.5            | 104            | 215      | 0.1                | 1.13                   | 1.07                 |
| SPDL                 | 185            | 170            | 164             | 165             | 19.5           | 57.9     | 0.3                | 1.99                   | 1.55                 |
| Grain                | 61.7           | 25.7           | 14.1            | 8.80            | 20.3           | 78.3     | 0.0                | 1.05                   | 1.02                 |
| torchdata.nodes      | 70.5           | 36.8           | 24.3            | 18.8            | 16.2           | 64.0     | 0.2                | 1.04                   | 1.04                 |

The bare pipe: 1.31 µs an item
"""  # noqa: E501

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterDataPipe

import common
from peers import LOADERS, OTHER_LOADERS, Build, Pipe

BUFFERS = [1, 2, 10, 64]
BUDGET = 3  # [seconds] for one cost


class Numbers(IterDataPipe):
    """The bare pipe."""

    def __init__(self, n: int, load: float = 0) -> None:
        self.n, self.load = n, load

    def __iter__(self) -> Iterator[int]:
        return map(self.loaded, range(self.n)) if self.load else iter(range(self.n))

    def loaded(self, i: int) -> int:
        time.sleep(self.load)
        return i


def epoch(pipe: Pipe) -> float:
    """How long an epoch takes [seconds]."""
    start = time.perf_counter()
    for _ in pipe:
        pass
    return time.perf_counter() - start


def cost(build: Build, n: int, size: int, repeats: int) -> list[float]:
    """Of one item: over the bare pipe, and of the bare pipe itself [microseconds]. Slow ones are repeated less."""
    bare, pipe = Numbers(n), build(Numbers(n), size)
    epoch(pipe)
    pairs: list[tuple[float, float]] = []
    while len(pairs) < min(3, repeats) or (len(pairs) < repeats and sum(map(sum, pairs)) < BUDGET):
        pairs.append((epoch(pipe), epoch(bare)))
    through, alone = (statistics.median(column) / n * 1e6 for column in zip(*pairs, strict=True))
    return [through - alone, alone]


def ready(build: Build, n: int) -> list[float]:
    """p50 and p99 of `next()` on an item that waits [microseconds]."""
    iterator = iter(build(Numbers(n + 10), 10))
    next(iterator)
    took = []
    for _ in range(n):
        time.sleep(0.001)
        start = time.perf_counter()
        next(iterator)
        took.append((time.perf_counter() - start) * 1e6)
    took.sort()
    return [took[n // 2], took[n * 99 // 100]]


def cpu() -> float:
    """Used by this process and those that it started and that still run [seconds]."""
    own = time.process_time()
    children = f"/proc/self/task/{os.getpid()}/children"
    with open(children, encoding="ascii") as file:  # noqa: PTH123 - not a real file
        pids = file.read().split()
    ticks = os.sysconf("SC_CLK_TCK")
    for pid in pids:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:  # noqa: PTH123
            own += sum(map(int, file.read().rsplit(")", 1)[1].split()[11:13])) / ticks
    return own


def idle(build: Build, seconds: float) -> float:
    """CPU of a stage whose buffer is full [% of a core]."""
    iterator = iter(build(Numbers(10**6), 10))
    next(iterator)
    time.sleep(min(0.5, seconds))
    before = cpu()
    time.sleep(seconds)
    used = cpu() - before
    del iterator
    return 100 * used / seconds


def step() -> None:
    """A millisecond or so of this thread's CPU, in torch."""
    matrix = step.__dict__.setdefault("matrix", torch.ones(192, 192))
    for _ in range(4):
        matrix @ matrix


def train(pipe: Pipe, *, compute: bool) -> float:
    start = time.perf_counter()
    for _ in pipe:
        if compute:
            step()
    return time.perf_counter() - start


def nothing_to_hide(build: Build, n: int, repeats: int, *, compute: bool) -> float:
    """Wall time over that of plain iteration; the runs alternate, and the order in a pair too."""
    source = Numbers(n, load=0 if compute else 0.001)
    pipe = build(source, 2)
    train(pipe, compute=compute)
    took: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(repeats):
        for staged in (turn % 2 == 0, turn % 2 != 0):
            took[staged].append(train(pipe if staged else source, compute=compute))
    return statistics.median(took[True]) / statistics.median(took[False])


def measure(contender: str, options: dict[str, Any]) -> dict[str, Any]:
    build = {**LOADERS, **OTHER_LOADERS}[contender]
    n, repeats, seconds = (50, 2, 0.02) if options["quick"] else (4000, 15, 2.0)
    costs = {str(size): cost(build, n, size, repeats) for size in BUFFERS}
    return {
        "cost": {size: over for size, (over, _) in costs.items()},
        "bare": statistics.median(alone for _, alone in costs.values()),
        "ready": ready(build, 20 if options["quick"] else 500),
        "idle": idle(build, seconds),
        "computing only": nothing_to_hide(build, n // 20, repeats, compute=True),
        "loading only": nothing_to_hide(build, n // 20, repeats, compute=False),
    }


def columns(one: dict[str, Any]) -> list[object]:
    return [*one["cost"].values(), *one["ready"], f"{one['idle']:.1f}", one["computing only"], one["loading only"]]


def table(results: common.Results) -> str:
    header = ["contender", *(f"cost at {size} [µs]" for size in BUFFERS), "ready p50 [µs]", "p99 [µs]"]
    header += ["idle [% of a core]", "computing only / plain", "loading only / plain"]
    bare = [one["median"]["bare"] for one in results.values() if "median" in one]
    text = f"\n\nThe bare pipe: {statistics.median(bare):.2f} µs an item" if bare else ""
    return common.markdown(header, common.rows(results, columns, len(header) - 1)) + text


if __name__ == "__main__":
    contenders = [name for name in LOADERS if name != "plain"]  # the bare pipe is what all are compared with
    common.main(__file__, __doc__, contenders, table, others=OTHER_LOADERS)
