"""How much memory do the buffers take, on the host and on the device, where the consumer never waits for the device?

    python benchmarks/memory.py [--all-peers] [--json FILE]

Batches of 4 MB, buffers of 2, all counted in batches; in brackets, over the bound of the two stages. Device: the
allocator's peak, while the host runs ahead and the device is as late as it may be; bound: buffer + 3 = 5. Host: the most
batches that were loaded and not yet freed; bound: the buffer, one in each thread's hand = 4. Pinned: the pinned
allocator's peak; bound: what is on the device = 5.

Last table: 2026-11-29 · 2 cores, AMD EPYC, Linux · load average 0.8 at the start · device: simulated, not a GPU · torch threads: 1 · python 3.11.7, torch 2.14.1, torchdata 0.9.0, prefetch_generator 1.0.3, spdl-core 0.8.0, grain 0.2.18

| contender                        | device [batches] (over 5) | host [batches] (over 4) | pinned [batches] (over 5) |
| -------------------------------- | ------------------------- | ----------------------- | ------------------------- |
| plain                            | 1.0 (0.20)                | 2.0 (0.50)              | 0.0 (0.00)                |
| sidestream                       | 4.0 (0.80)                | 4.0 (1.00)              | 4.0 (0.80)                |
| prefetch_generator               | 1.0 (0.20)                | 5.0 (1.25)              | 0.0 (0.00)                |
| torchdata prefetch               | 1.0 (0.20)                | 3.0 (0.75)              | 0.0 (0.00)                |
| torchdata prefetch, pin_memory   | 1.0 (0.20)                | 3.0 (0.75)              | 60.0 (12.00)              |
| DataLoader, 1 worker, pin_memory | 1.0 (0.20)                | in another process      | 60.0 (12.00)              |
| side stream without event        | 4.0 (0.80)                | 2.0 (0.50)              | 60.0 (12.00)              |
| SPDL                             | 1.0 (0.20)                | 8.0 (2.00)              | 0.0 (0.00)                |
| Grain                            | 1.0 (0.20)                | 5.0 (1.25)              | 0.0 (0.00)                |
| torchdata.nodes, PinMemory       | 1.0 (0.20)                | 1.0 (0.25)              | 60.0 (12.00)              |
"""  # noqa: E501

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterDataPipe

import common
import device
from peers import MOVERS, OTHER_MOVERS

BATCH = 4 << 20  # [bytes] the allocators round to less than this
SIZE = 2
BOUNDS = {"device": SIZE + 3, "host": SIZE + 2, "pinned": SIZE + 3}


class Counted(IterDataPipe):
    """Makes a batch each time, and counts those that are alive in this process."""

    def __init__(self, n: int) -> None:
        self.n, self.peak = n, 0
        self.alive: set[int] = set()  # its methods are atomic: batches are freed on any thread

    def __iter__(self) -> Iterator[torch.Tensor]:
        return map(self.made, range(self.n))

    def made(self, i: int) -> torch.Tensor:
        batch = torch.ones(BATCH // 4)
        self.alive.add(i)
        self.peak = max(self.peak, len(self.alive))
        weakref.finalize(batch.untyped_storage(), self.alive.discard, i)
        return batch


def pinned_peak() -> float:
    """Of the pinned allocator [bytes]."""
    return float(torch.cuda.memory.host_memory_stats().get("allocated_bytes.peak", 0))


def measure(contender: str, options: dict[str, Any]) -> dict[str, Any]:
    """The buffers fill at each step; the device's work piles up as far as it is let."""
    source = Counted(5 if options["quick"] else 60)
    pipe = {**MOVERS, **OTHER_MOVERS}[contender](source, SIZE)
    device.calibrate()
    device.reset("late")
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.memory.reset_peak_host_memory_stats()
    for batch in pipe:
        device.compute(0.02)
        time.sleep(0.001 if options["quick"] else 0.01)
        del batch
    result = {"device": torch.cuda.max_memory_allocated() / BATCH, "pinned": pinned_peak() / BATCH}
    return {**result, "host": source.peak or "in another process"}


def columns(one: dict[str, Any]) -> list[object]:
    return [shown(one[what], bound) for what, bound in BOUNDS.items()]


def shown(batches: float | str, bound: int) -> str:
    return batches if isinstance(batches, str) else f"{batches:.1f} ({batches / bound:.2f})"


def table(results: common.Results) -> str:
    header = ["contender", *(f"{what} [batches] (over {bound})" for what, bound in BOUNDS.items())]
    return common.markdown(header, common.rows(results, columns, 3))


if __name__ == "__main__":
    common.main(__file__, __doc__, MOVERS, table, others=OTHER_MOVERS, rounds=1)
