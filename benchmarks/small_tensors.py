"""What does a sample of many tensors cost on its way to the device?

    python benchmarks/small_tensors.py [--all-peers] [--json FILE]

CPU time, of all threads and worker processes, and host-to-device copies, a sample; samples lie ready in memory, so
moving them is all that costs. "One by one" pins and copies each tensor by itself, in the training loop; in brackets,
the CPU over that of "one by one" in the same process. Simulated copies cost no more than the call, so on a GPU the gain
of fewer copies is larger. The last rows: what the consumer's thread spends in `next()` on a sample that waits.

Last table: 2026-11-29 · 2 cores, AMD EPYC, Linux · load average 0.3 at the start · device: simulated, not a GPU · torch threads: 1 · python 3.11.7, torch 2.14.1, torchdata 0.9.0, prefetch_generator 1.0.3, spdl-core 0.8.0, grain 0.2.18

| CPU [µs] (over one by one) / copies | one by one               | sidestream, mover alone  | sidestream, both stages  | plain                    | torchdata prefetch, pin_memory | DataLoader, 1 worker, pin_memory | SPDL                     | Grain                    | torchdata.nodes, PinMemory |
| ----------------------------------- | ------------------------ | ------------------------ | ------------------------ | ------------------------ | ------------------------------ | -------------------------------- | ------------------------ | ------------------------ | -------------------------- |
| 1 x 1 KB                            | 20 (1.00) / 1            | 180 (6.43) / 1           | 259 (9.60) / 1           | 16 (0.77) / 1            | 147 (4.96) / 1                 | 567 (20.36) / 1                  | 657 (8.41) / 1           | 101 (3.70) / 1           | 156 (7.35) / 1             |
| 1 x 1 MB                            | 78 (1.01) / 1            | 209 (2.55) / 1           | 269 (3.30) / 1           | 70 (0.91) / 1            | 154 (2.01) / 1                 | 802 (9.49) / 1                   | 580 (4.28) / 1           | 107 (1.39) / 1           | 226 (2.94) / 1             |
| 10 x 1 KB                           | 79 (1.00) / 10           | 233 (2.12) / 1           | 317 (2.90) / 1           | 52 (0.65) / 10           | 257 (3.15) / 10                | 4,359 (49.21) / 10               | 549 (4.42) / 10          | 105 (1.31) / 10          | 225 (2.83) / 10            |
| 50 x 1 KB                           | 355 (1.00) / 50          | 390 (0.78) / 1           | 570 (1.13) / 1           | 211 (0.59) / 50          | 1,123 (3.08) / 50              | 19,344 (50.52) / 50              | 750 (1.87) / 50          | 274 (0.77) / 50          | 718 (2.03) / 50            |
| 200 x 256 B                         | 1,383 (1.00) / 200       | 895 (0.46) / 1           | 1,118 (0.56) / 1         | 829 (0.60) / 200         | 4,239 (3.02) / 200             | 78,194 (51.87) / 200             | 1,424 (0.97) / 200       | 910 (0.65) / 200         | 2,365 (1.70) / 200         |
| 200 x 1 KB                          | 1,409 (1.00) / 200       | 908 (0.45) / 1           | 1,146 (0.58) / 1         | 838 (0.60) / 200         | 4,271 (3.00) / 200             | 78,188 (50.46) / 200             | 1,416 (0.95) / 200       | 916 (0.65) / 200         | 2,412 (1.68) / 200         |
| 200 x 1 KB, four dtypes             | 1,435 (1.00) / 200       | 949 (0.48) / 1           | 1,186 (0.59) / 1         | 840 (0.59) / 200         | 4,692 (3.24) / 200             | 77,979 (50.67) / 200             | 1,456 (0.96) / 200       | 926 (0.65) / 200         | 2,521 (1.77) / 200         |
| 200 x 1 KB, nested                  | 1,536 (1.00) / 200       | 1,137 (0.55) / 1         | 1,496 (0.71) / 1         | 901 (0.59) / 200         | 4,972 (3.17) / 200             | 78,141 (46.93) / 200             | 1,505 (0.93) / 200       | 983 (0.64) / 200         | 2,714 (1.76) / 200         |
| 200 x 64 KB                         | 3,385 (1.00) / 200       | 6,432 (1.66) / 200       | 6,932 (1.67) / 200       | 2,412 (0.71) / 200       | 7,504 (2.11) / 200             | 91,312 (23.86) / 200             | 3,069 (0.88) / 200       | 2,521 (0.77) / 200       | 4,944 (1.50) / 200         |
| 1000 x 256 B                        | 7,624 (1.00) / 1000      | 3,580 (0.36) / 1         | 4,075 (0.39) / 1         | 4,423 (0.57) / 1000      | 22,559 (2.96) / 1000           | 393,544 (51.25) / 1000           | 4,995 (0.68) / 1000      | 4,446 (0.61) / 1000      | 13,538 (1.77) / 1000       |
| 1000 x 1 KB                         | 8,150 (1.01) / 1000      | 3,604 (0.35) / 1         | 4,236 (0.38) / 1         | 4,594 (0.55) / 1000      | 22,617 (2.75) / 1000           | 398,488 (49.47) / 1000           | 5,311 (0.67) / 1000      | 4,634 (0.60) / 1000      | 14,836 (1.78) / 1000       |
| 1000 x 1 MB                         | not run: 1.0 GB a sample | not run: 1.0 GB a sample | not run: 1.0 GB a sample | not run: 1.0 GB a sample | not run: 1.0 GB a sample       | not run: 1.0 GB a sample         | not run: 1.0 GB a sample | not run: 1.0 GB a sample | not run: 1.0 GB a sample   |
| next(), 1 MB                        | 128                      | 59                       | 58                       | 150                      | 71                             | 189                              | 168                      | 151                      | 107                        |
| next(), 16 MB                       | 1,257                    | 73                       | 89                       | 1,623                    | 105                            | 334                              | 1,464                    | 1,439                    | 136                        |
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
