"""How long do the first item, an early break and the end of an epoch take, and what is left running?

    python benchmarks/start_stop.py [--all-peers] [--json FILE]

First: from `iter()` to the first item, with everything made anew. Break: dropping the iterator after one item, its
buffer full. End: from the last item to StopIteration. Left: threads and processes, of 20 breaks, one second later.

Last table: 2026-11-29 · 2 cores, AMD EPYC, Linux · load average 1.3 at the start · device: simulated, not a GPU · torch threads: 1 · python 3.11.7, torch 2.14.1, torchdata 0.9.0, prefetch_generator 1.0.3, spdl-core 0.8.0, grain 0.2.18

| contender            | first item [ms] | break [ms] | end [ms] | left of 20 |
| -------------------- | --------------- | ---------- | -------- | ---------- |
| sidestream           | 0.24            | 0.08       | 0.00     | 0          |
| queue.Queue          | 0.20            | 0.02       | 0.07     | 20         |
| prefetch_generator   | 0.17            | 0.02       | 0.02     | 20         |
| torchdata prefetch   | 0.17            | 1.33       | 1.29     | 0          |
| DataLoader, 1 worker | 28.8            | 15.9       | 0.23     | 0          |
| SPDL                 | 1.65            | 81.6       | 102      | 0          |
| Grain                | 0.42            | 0.31       | 0.10     | 0          |
| torchdata.nodes      | 0.33            | 0.01       | 0.08     | 6          |
"""  # noqa: E501

from __future__ import annotations

import multiprocessing
import statistics
import threading
import time
from typing import Any

import common
from handoff import Numbers
from peers import LOADERS, OTHER_LOADERS, Build


def ms_since(start: float) -> float:
    return (time.perf_counter() - start) * 1e3


def first(build: Build) -> float:
    """From `iter()` to the first item [milliseconds]."""
    start = time.perf_counter()
    iterator = iter(build(Numbers(10), 2))
    next(iterator)
    took = ms_since(start)
    list(iterator)
    return took


def early_break(build: Build) -> float:
    """To drop the iterator [milliseconds]."""
    pipe = build(Numbers(10**6), 2)
    iterator = iter(pipe)
    next(iterator)
    time.sleep(0.02)  # the buffer fills
    start = time.perf_counter()
    del iterator, pipe
    return ms_since(start)


def end(build: Build) -> float:
    """From the last item to StopIteration [milliseconds]."""
    iterator = iter(build(Numbers(10), 2))
    for _ in range(10):
        next(iterator)
    start = time.perf_counter()
    next(iterator, None)
    return ms_since(start)


def measure(contender: str, options: dict[str, Any]) -> dict[str, Any]:
    build = {**LOADERS, **OTHER_LOADERS}[contender]
    n = 3 if options["quick"] else 20
    times = {what.__name__: [what(build) for _ in range(n)] for what in (first, end)}
    before = threading.active_count() + len(multiprocessing.active_children())
    times["early_break"] = [early_break(build) for _ in range(n)]
    time.sleep(0.01 if options["quick"] else 1)
    left = threading.active_count() + len(multiprocessing.active_children()) - before
    return {**{name: statistics.median(took) for name, took in times.items()}, "left": left}


def columns(one: dict[str, Any]) -> list[object]:
    return [one["first"], one["early_break"], one["end"], one["left"]]


def table(results: common.Results) -> str:
    header = ["contender", "first item [ms]", "break [ms]", "end [ms]", "left of 20"]
    return common.markdown(header, common.rows(results, columns, 4))


if __name__ == "__main__":
    contenders = [name for name in LOADERS if name != "plain"]
    common.main(__file__, __doc__, contenders, table, others=OTHER_LOADERS)
