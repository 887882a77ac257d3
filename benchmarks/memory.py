"""How much memory do the buffers take, on the host and on the device, where the consumer never waits for the device?

    python benchmarks/memory.py [--all-peers] [--json FILE]

Batches of 4 MB, buffers of 2, all counted in batches. Device: the allocator's peak, while the host runs ahead and the
device is as late as it may be. Bound of the mover: buffer + 3 = 5. Host: the most batches that were loaded and not yet
freed; pinned: the pinned allocator's peak. Bound of the two stages: buffer + 1 each, and one in the mover's hand.

Last table: not run.
"""

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
    return [one["device"], one["host"], one["pinned"]]


def table(results: common.Results) -> str:
    header = ["contender", "device [batches]", "host [batches]", "pinned [batches]"]
    return common.markdown(header, common.rows(results, columns, 3))


if __name__ == "__main__":
    common.main(__file__, __doc__, MOVERS, table, others=OTHER_MOVERS, rounds=1)
