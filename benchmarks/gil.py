"""When does a thread help? Which work runs side by side on threads, and what each kind of source gains from a stage.

    python benchmarks/gil.py [--quick] [--json FILE]

Needs the extra `demo`. torch and BLAS have one thread each, but for the row that says otherwise. All cases take turns
in each round; a number is the median over the rounds of the ratio within a round. Pairs run in two processes as well,
which need no GIL: what those reach is what the machine had to give.

Last table:

| side by side, as a share of one after the other | two threads | two processes |
| --- | --- | --- |
| Python loop, Python loop | 1.00 (1.00) | 0.70 (0.68) |
| Python loop, NumPy products of 1024 | 0.83 (0.81) | 0.72 (0.71) |
| Python loop, NumPy products of 256 | 1.01 (0.99) | 0.70 (0.69) |
| NumPy products of 1024, the same | 0.76 (0.72) | 0.69 (0.65) |
| the same, BLAS with 2 threads each | 1.07 (1.04) | 1.83 (1.58) |

Median (by the least times); 1 is taking turns, 0.5 is both at once.

| source | consumer waits, as for a GPU | consumer computes in torch | consumer computes in Python |
| --- | --- | --- | --- |
| pure Python | 1.77 (1.01); 1.70 (1.00) | 1.02 (1.96); 1.67 (1.01) | 1.09 (1.89); 1.76 (0.99) |
| NumPy products | 1.91 (1.01); 1.88 (1.00) | 1.89 (0.99); 1.79 (1.02) | 1.02 (1.00); 1.80 (1.04) |
| file read, cached | 1.89 (1.01); 1.72 (1.01) | 1.91 (1.00); 1.67 (1.01) | 1.00 (0.95); 1.69 (1.01) |
| PIL decode | 1.38 (1.01); 1.88 (1.00) | 1.93 (0.99); 1.86 (1.01) | 1.01 (0.87); 1.97 (0.90) |
| sleep (network, disk) | 1.91 (1.00); 1.87 (1.00) | 1.93 (0.97); 1.89 (1.00) | 1.89 (0.97); 1.81 (1.02) |

A cell: with a thread, x as fast (x the consumer's step); with a worker process in front of the thread. On 2026-11-29,
two cores (AMD EPYC), load average 1.3: Python 3.11.7, torch 2.14.1, NumPy 2.4.6 with OpenBLAS 0.3.31, 30 items of 5 ms.
"""

from __future__ import annotations

import argparse
import datetime as dt
import io
import json
import multiprocessing
import os
import platform
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import threadpoolctl
import torch
from PIL import Image
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.datapipes.iter import IterableWrapper

import sidestream

ITEM = 0.005  # [seconds] what one item takes to load, and one step to compute, each alone
PAIR_ROUNDS = 5  # of pairs, for one round of sources: they are short
ALONE = 0.1  # [seconds] what each side of a pair takes alone
Work = Callable[[], object]


def python_loop() -> int:
    total = 0
    for number in range(2000):
        total += number * number
    return total


LARGE = np.random.default_rng(0).random((1024, 1024), dtype=np.float32)
SMALL = np.ascontiguousarray(LARGE[:256, :256])
T = torch.from_numpy(SMALL)


def product() -> np.ndarray:
    return SMALL @ SMALL


def large_product() -> np.ndarray:
    return LARGE @ LARGE


def tensor_product() -> torch.Tensor:
    return T @ T


def read_file(path: Path) -> int:
    return len(path.read_bytes())


def decode(data: bytes) -> None:
    Image.open(io.BytesIO(data)).load()


def picture() -> bytes:
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).resize((192, 192)).save(file, "JPEG")
    return file.getvalue()


def lasting(unit: Work, seconds: float) -> Work:
    """Repeat `unit` so often that it takes `seconds`, by the fastest of some calls: others disturb the machine."""
    unit()
    repeats = max(1, round(seconds / min(timed(unit) for _ in range(30))))

    def work() -> None:
        for _ in range(repeats):
            unit()

    return work


def timed(work: Work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def together(kind: Any, first: Work, second: Work) -> float:
    """The time until both have ended, side by side on two threads or in two processes."""
    both = [kind(target=work) for work in (first, second)]
    return timed(lambda: [[one.start() for one in both], [one.join() for one in both]])


# --- Pairs -----------------------------------------------------------------------------------------------------------


def measure_pairs(rounds: int, alone: float) -> dict[str, dict[str, dict[str, float]]]:
    """The time side by side as a share of the time one after the other: 1 is taking turns, 0.5 is both at once.

    Processes need no GIL: what two of them reach in the same round is what the machine had to give.
    """
    loop, small, large = (lasting(unit, alone) for unit in (python_loop, product, large_product))
    cores = len(os.sched_getaffinity(0))
    pairs = {
        "Python loop, Python loop": (loop, loop, 1),
        "Python loop, NumPy products of 1024": (loop, large, 1),
        "Python loop, NumPy products of 256": (loop, small, 1),
        "NumPy products of 1024, the same": (large, large, 1),
        f"the same, BLAS with {cores} threads each": (large, large, cores),
    }
    kinds = {"threads": threading.Thread, "processes": multiprocessing.get_context("fork").Process}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in pairs}
    for _ in range(PAIR_ROUNDS * rounds):
        for name, (first, second, blas) in pairs.items():
            with threadpoolctl.threadpool_limits(blas, user_api="blas"):
                seconds = {kind: together(make, first, second) for kind, make in kinds.items()}
                found[name].append({"one by one": timed(first) + timed(second), **seconds})
    return {name: {kind: shares(taken, kind) for kind in kinds} for name, taken in found.items()}


def shares(taken: list[dict[str, float]], kind: str) -> dict[str, float]:
    """The median share; and that of the least times, which tells less of the machine's neighbours."""
    least = min(one[kind] for one in taken) / min(one["one by one"] for one in taken)
    return {"median": median(one[kind] / one["one by one"] for one in taken), "least": least}


# --- Sources ---------------------------------------------------------------------------------------------------------


class Source(IterableDataset[int]):
    """Numbers that take `work` each. Small, so that what a worker process has to send is not in the time."""

    def __init__(self, work: Work, n: int) -> None:
        self.work, self.n = work, n

    def __iter__(self) -> Iterator[int]:
        for number in range(self.n):
            self.work()
            yield number


def make_sources(folder: Path, item: float) -> dict[str, Work]:
    path, data = folder / "data", picture()
    path.write_bytes(bytes(1 << 20))
    return {
        "pure Python": lasting(python_loop, item),
        "NumPy products": lasting(product, item),
        "file read, cached": lasting(lambda: read_file(path), item),
        "PIL decode": lasting(lambda: decode(data), item),
        "sleep (network, disk)": lambda: time.sleep(item),
    }


def make_consumers(item: float) -> dict[str, Work]:
    return {
        "waits, as for a GPU": lambda: time.sleep(item),
        "computes in torch": lasting(tensor_product, item),
        "computes in Python": lasting(python_loop, item),
    }


WAYS = ("plain", "thread", "process and thread")


def loaders(work: Work, n: int) -> dict[str, Iterable[int]]:
    """The same source: as it is, behind a thread, and in one worker process with a thread behind it."""
    source = Source(work, n)
    options: dict[str, Any] = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "fork"}
    return {
        "plain": source,
        "thread": IterableWrapper(source, deepcopy=False).thread_prefetch(),
        "process and thread": sidestream.prefetch(DataLoader(source, batch_size=None, **options), "cpu"),
    }


def epoch(loader: Iterable[int], step: Work) -> tuple[float, float]:
    """The time of an epoch without its first item, which starts what has to start, and the median step of it."""
    iterator = iter(loader)
    next(iterator)
    steps: list[float] = []
    seconds = timed(lambda: [steps.append(timed(step)) for _ in iterator])
    return seconds, median(steps)


def measure_source(
    work: Work, consumers: dict[str, Work], n: int, rounds: int
) -> dict[str, dict[str, dict[str, float]]]:
    """For each consumer and way: how many times as fast as plain, and how many times as long a step of the consumer."""
    found: dict[str, dict[str, list[tuple[float, float]]]] = {name: {way: [] for way in WAYS} for name in consumers}
    made = loaders(work, n)
    for _ in range(rounds):
        for name, step in consumers.items():
            taken = {way: epoch(loader, step) for way, loader in made.items()}
            for way, (seconds, one) in taken.items():
                found[name][way].append((taken["plain"][0] / seconds, one / taken["plain"][1]))
    return {
        name: {
            way: {"gain": median(g for g, _ in all_), "step": median(s for _, s in all_)} for way, all_ in ways.items()
        }
        for name, ways in found.items()
    }


# --- Report ----------------------------------------------------------------------------------------------------------


def where() -> dict[str, Any]:
    """What the numbers were measured on."""
    blas = [
        f"{one['internal_api']} {one['version']}"
        for one in threadpoolctl.threadpool_info()
        if one["user_api"] == "blas"
    ]
    return {
        "cores": len(os.sched_getaffinity(0)),
        "load average before": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "blas": sorted(set(blas)),
        "torch threads": torch.get_num_threads(),
        "blas threads": 1,
    }


def table(result: dict[str, Any]) -> str:
    lines = ["| side by side, as a share of one after the other | two threads | two processes |", "| --- | --- | --- |"]
    for name, by_kind in result["pairs"].items():
        cells = [f"{one['median']:.2f} ({one['least']:.2f})" for one in by_kind.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines.append("\nMedian (by the least times); 1 is taking turns, 0.5 is both at once.")
    consumers = list(next(iter(result["sources"].values())))
    lines += ["", "| source | " + " | ".join(f"consumer {name}" for name in consumers) + " |"]
    lines += ["| --- |" + " --- |" * len(consumers)]
    for source, by_consumer in result["sources"].items():
        lines.append(f"| {source} | " + " | ".join(cell(by_consumer[name]) for name in consumers) + " |")
    told = ", ".join(f"{name} {value}" for name, value in result["about"].items())
    read = "A cell: with a thread, x as fast (x the consumer's step); with a worker process in front of the thread."
    return "\n".join([*lines, "", read, told])


def cell(ways: dict[str, dict[str, float]]) -> str:
    return "; ".join(f"{ways[way]['gain']:.2f} ({ways[way]['step']:.2f})" for way in WAYS[1:])


def measure(n: int, rounds: int, item: float, alone: float) -> dict[str, Any]:
    torch.set_num_threads(1)
    about = {**where(), "items": n, "rounds": rounds, "item [ms]": item * 1e3}
    with threadpoolctl.threadpool_limits(1, user_api="blas"), tempfile.TemporaryDirectory() as folder:
        pairs = measure_pairs(rounds, alone)
        consumers = make_consumers(item)
        kinds = make_sources(Path(folder), item)
        sources = {kind: measure_source(work, consumers, n, rounds) for kind, work in kinds.items()}
    about["load average after"] = round(os.getloadavg()[0], 1)
    return {"about": about, "pairs": pairs, "sources": sources}


def main() -> None:
    question = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=question)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--quick", action="store_true", help="a smoke run: few items, no meaning")
    options = parser.parse_args()
    result = measure(3, 1, ITEM / 10, ALONE / 10) if options.quick else measure(30, 5, ITEM, ALONE)
    report = {"question": question, "date": dt.datetime.now(dt.timezone.utc).strftime("%Y-%m-%d"), **result}
    print(f"{question}\n\n{table(report)}")
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
