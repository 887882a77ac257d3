"""What does a sample of many tensors cost on its way to the device?

    python benchmarks/small_tensors.py [--all-peers] [--json FILE]

CPU time, of all threads and worker processes, and host-to-device copies, a sample; samples lie ready in memory, so
moving them is all that costs. "One by one" pins and copies each tensor by itself, in the training loop; in brackets,
the CPU over that of "one by one" in the same process. Simulated copies cost no more than the call, so on a GPU the gain
of fewer copies is larger. The last rows: what the consumer's thread spends in `next()` on a sample that waits.

Last table: 2026-11-29 · 2 cores, AMD EPYC, Linux · load average 1.0 at the start · device: simulated, not a GPU · torch threads: 1 · python 3.11.7, torch 2.14.1, torchdata 0.9.0, prefetch_generator 1.0.3

| CPU [µs] (over one by one) / copies | one by one               | sidestream, mover alone  | sidestream, both stages  | torchdata prefetch, pin_memory |
| ----------------------------------- | ------------------------ | ------------------------ | ------------------------ | ------------------------------ |
| 1 x 1 KB                            | 21 (1.01) / 1            | 170 (6.68) / 1           | 255 (9.85) / 1           | 85 (3.94) / 1                  |
| 1 x 1 MB                            | 78 (1.00) / 1            | 247 (2.99) / 1           | 285 (3.50) / 1           | 159 (2.04) / 1                 |
| 10 x 1 KB                           | 80 (1.00) / 10           | 271 (2.47) / 1           | 361 (3.27) / 1           | 246 (3.02) / 10                |
| 50 x 1 KB                           | 356 (1.00) / 50          | 453 (0.90) / 1           | 570 (1.15) / 1           | 1,081 (2.99) / 50              |
| 200 x 256 B                         | 1,396 (1.00) / 200       | 970 (0.50) / 1           | 1,123 (0.58) / 1         | 4,384 (3.09) / 200             |
| 200 x 1 KB                          | 1,429 (1.00) / 200       | 998 (0.50) / 1           | 1,138 (0.58) / 1         | 4,504 (3.14) / 200             |
| 200 x 1 KB, four dtypes             | 1,444 (1.00) / 200       | 1,050 (0.52) / 1         | 1,173 (0.59) / 1         | 4,337 (3.00) / 200             |
| 200 x 1 KB, nested                  | 1,541 (1.00) / 200       | 1,212 (0.57) / 1         | 1,532 (0.72) / 1         | 4,943 (3.14) / 200             |
| 200 x 64 KB                         | 3,754 (1.02) / 200       | 7,091 (1.47) / 200       | 7,453 (1.51) / 200       | 8,360 (2.05) / 200             |
| 1000 x 256 B                        | 7,862 (1.01) / 1000      | 3,890 (0.35) / 1         | 4,220 (0.38) / 1         | 25,763 (3.32) / 1000           |
| 1000 x 1 KB                         | 8,705 (1.04) / 1000      | 4,259 (0.35) / 1         | 4,449 (0.39) / 1         | 23,956 (2.92) / 1000           |
| 1000 x 1 MB                         | not run: 1.0 GB a sample | not run: 1.0 GB a sample | not run: 1.0 GB a sample | not run: 1.0 GB a sample       |
| next(), 1 MB                        | 147                      | 91                       | 87                       | 68                             |
| next(), 16 MB                       | 1,967                    | 306                      | 304                      | 248                            |
"""  # noqa: E501

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterDataPipe

import common
import device
from handoff import cpu, step
from peers import MOVERS, OTHER_MOVERS, Behind, Build, Pipe, Unable, mover, pinned, plain, to_device

KIB, MIB = 1 << 10, 1 << 20
DTYPES = [torch.float32, torch.int64, torch.uint8, torch.float64]
PASSES, RUN = 8, 0.3  # runs of one cell; how long one takes at most [seconds]
BETWEEN = 0.005  # of computing between two calls of `next()` [seconds]
LARGEST = 256 * MIB  # of a sample [bytes]: a few have to fit into the memory of a small machine
Case = tuple[int, int, int, bool]  # tensors, bytes of each, dtypes, nested
CASES: dict[str, Case] = {
    "1 x 1 KB": (1, KIB, 1, False),
    "1 x 1 MB": (1, MIB, 1, False),
    "10 x 1 KB": (10, KIB, 1, False),
    "50 x 1 KB": (50, KIB, 1, False),
    "200 x 256 B": (200, 256, 1, False),
    "200 x 1 KB": (200, KIB, 1, False),
    "200 x 1 KB, four dtypes": (200, KIB, 4, False),
    "200 x 1 KB, nested": (200, KIB, 1, True),
    "200 x 64 KB": (200, 64 * KIB, 1, False),
    "1000 x 256 B": (1000, 256, 1, False),
    "1000 x 1 KB": (1000, KIB, 1, False),
    "1000 x 1 MB": (1000, MIB, 1, False),
}


class Ready(IterDataPipe):
    """`n` times the same sample."""

    def __init__(self, n: int, sample: Any) -> None:
        self.n, self.sample = n, sample

    def __iter__(self) -> Iterator[Any]:
        return iter([self.sample] * self.n)


def make(count: int, nbytes: int, dtypes: int, nested: bool) -> Any:  # noqa: FBT001 - a row of CASES
    """A dict of tensors; nested, five in each inner dict."""
    if count * nbytes > LARGEST:
        raise Unable(f"not run: {count * nbytes / 1e9:.1f} GB a sample")
    kinds = [DTYPES[i % dtypes] for i in range(count)]
    flat = {f"x{i}": torch.ones(nbytes // kind.itemsize, dtype=kind) for i, kind in enumerate(kinds)}
    if not nested:
        return flat
    names = list(flat)
    return {names[i]: {"group": [{name: flat[name] for name in names[i : i + 5]}]} for i in range(0, count, 5)}


def one_by_one(source: Pipe, _size: int) -> Pipe:
    return Behind(plain(source, 0), lambda pipe: (to_device(pinned(one), non_blocking=True) for one in pipe))


CONTENDERS: dict[str, Build] = {
    "one by one": one_by_one,
    "sidestream, mover alone": mover,
    "sidestream, both stages": MOVERS["sidestream"],
    "plain": MOVERS["plain"],
    **{name: MOVERS[name] for name in ("torchdata prefetch, pin_memory", "DataLoader, 1 worker, pin_memory")},
}


def run(pipe: Pipe) -> float:
    """CPU of an epoch [seconds]. The wait for each sample sleeps: spinning would count as work."""
    start = cpu()
    for sample in pipe:
        done = torch.cuda.Event(blocking=True)
        done.record()
        done.synchronize()
        del sample
    return cpu() - start


def cell(build: Build, case: Case, most: int) -> dict[str, Any] | str:
    """Runs alternate with those of "one by one": a core is not equally fast all the time. Slow ones are shorter."""
    try:
        sample = make(*case)
    except Unable as reason:
        return str(reason)
    start = time.perf_counter()
    run(build(Ready(3, sample), 2))
    n = max(3, min(most, 256 * MIB // (case[0] * case[1]), int(3 * RUN / (time.perf_counter() - start))))
    pipe, reference = build(Ready(n, sample), 2), one_by_one(Ready(n, sample), 2)
    used: list[tuple[float, float]] = []
    for _ in range(2 if most < PASSES else PASSES):
        device.reset("ahead")
        took = run(pipe) / n * 1e6
        copies = device.simulator().counters().h2d / n if device.simulator() else "unknown"
        used.append((took, run(reference) / n * 1e6))
    ours, theirs = (min(column) for column in zip(*used[1:], strict=True))
    return {"cpu": ours, "ratio": ours / theirs, "copies": copies}


def consumers_share(build: Build, nbytes: int, n: int) -> float:
    """CPU of the consumer's thread for a `next()` whose sample of one tensor waits for it [microseconds].

    Between two calls it computes, as long for small samples as for large ones: what a core has in its caches, and how
    deep it sleeps, would make more of a difference than the bytes.
    """
    device.reset("timed", bandwidth=1e12)
    iterator = iter(build(Ready(n + 1, torch.ones(nbytes // 4)), 2))
    next(iterator)
    took = []
    for _ in range(n):
        until = time.perf_counter() + BETWEEN
        while time.perf_counter() < until:
            step()
        start = time.thread_time()
        sample = next(iterator)
        took.append(time.thread_time() - start)
        del sample
    return statistics.median(took) * 1e6


def measure(contender: str, options: dict[str, Any]) -> dict[str, Any]:
    build = {**CONTENDERS, **OTHER_MOVERS}[contender]
    cases = {name: case for name, case in CASES.items() if not options["quick"] or case[0] <= 50}
    cells = {name: cell(build, case, 3 if options["quick"] else 200) for name, case in cases.items()}
    n = 3 if options["quick"] else 50
    return cells | {f"next(), {mb} MB": consumers_share(build, mb << 20, n) for mb in (1, 16)}


def shown(one: Any) -> str:
    if not isinstance(one, dict):
        return f"{one:,.0f}" if isinstance(one, float) else str(one)
    copies = one["copies"] if isinstance(one["copies"], str) else f"{one['copies']:.4g}"
    return f"{one['cpu']:,.0f} ({one['ratio']:.2f}) / {copies}"


def table(results: common.Results) -> str:
    """A row a case, since there are more of them."""
    medians = {name: one["median"] for name, one in results.items() if "median" in one}
    cases = list(next(iter(medians.values()), {}))
    rows = [[case, *(shown(one[case]) for one in medians.values())] for case in cases]
    missing = [f"\n{name}: {one['cannot']}" for name, one in results.items() if "median" not in one]
    return common.markdown(["CPU [µs] (over one by one) / copies", *medians], rows) + "".join(missing)


if __name__ == "__main__":
    common.main(__file__, __doc__, CONTENDERS, table, others=OTHER_MOVERS)
