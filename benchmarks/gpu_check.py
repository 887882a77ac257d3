"""What holds on a real GPU?

    python benchmarks/gpu_check.py --json FILE                 # less than five minutes; needs torch alone
    python benchmarks/gpu_check.py --simulated --json FILE     # the same script, numbers without meaning

One process a row: the stream tests; wrong batches; bandwidth of 64 MB batches against a raw pinned copy; the share of
copy time that computing hides, from CUDA events; 200 small tensors; the memory bound, the host running ahead; steps of
two models, against `DataLoader(pin_memory=True)` and plain `.to`. On the simulated device kernels do not run: there a
model's step only takes time.

Last table: not run on a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterDataPipe

import common
import device
import memory
import small_tensors
from peers import MOVERS, Build, Pipe, Unable, both_stages, mover

LIMIT = 240  # no row is begun later [seconds]
SIZE = 2  # of every buffer
PEERS = {"plain .to": "plain", "DataLoader": "DataLoader, 1 worker, pin_memory", "sidestream": "sidestream"}


def real() -> bool:
    return device.simulator() is None


class Cycle(IterDataPipe):
    """`n` samples, from a few that lie ready."""

    def __init__(self, n: int, samples: list[Any]) -> None:
        self.n, self.samples = n, samples

    def __iter__(self) -> Iterator[Any]:
        return (self.samples[i % len(self.samples)] for i in range(self.n))


# --- Are batches right? ---------------------------------------------------------------------------------------------


def stream_tests(options: dict[str, Any]) -> dict[str, Any]:
    """The project's own tests of stream order, in a process of their own, without the project's pytest settings."""
    where = {"SIDESTREAM_TEST_DEVICE": "real" if real() else "simulated"}
    path = {"PYTHONPATH": os.pathsep.join([str(device.ROOT / "src"), str(device.ROOT / "tests")])}
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "-p", "no:cacheprovider", "--tb=line"]
    command += [str(device.ROOT / "tests" / "test_streams.py")]
    command += ["-k", "share_one_copy_stream"] if options["quick"] else ["-k", "not random and not any_point"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=device.ROOT / "tests",
        env={**os.environ, **where, **path},
    )
    lines = (done.stdout + done.stderr).strip().splitlines()
    failed = [line.partition("::")[2].partition(" - ")[0] for line in lines if line.startswith(("FAILED", "ERROR"))]
    return {"outcome": lines[-1], **{f"failed {i}": name for i, name in enumerate(failed[:10], 1)}}


def wrong(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Reads the last values of large batches, at once, on the current stream."""
    n, length = (5, 1 << 16) if options["quick"] or not real() else (100, 1 << 24)
    device.reset("late")
    source = Cycle(n, [torch.full((length,), float(i + 1)) for i in range(4)])
    seen = [batch[-8:].cpu() for batch in MOVERS[name](source, SIZE)]
    return {f"wrong of {n}": sum(bool((one != i % 4 + 1).any()) for i, one in enumerate(seen))}


# --- Speed of copies ------------------------------------------------------------------------------------------------


def large_batches(options: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor, float]]:
    """One in pinned and one in pageable memory, and how long a raw copy of it takes [seconds]."""
    megabytes = 1 if options["quick"] else 64 if real() else 8
    batch = torch.ones(megabytes << 20, dtype=torch.uint8)
    for kind, one in (("pinned", batch.pin_memory()), ("pageable", batch)):
        yield kind, one, raw_seconds(one)


def raw_seconds(batch: torch.Tensor, n: int = 10) -> float:
    """A copy of `batch` from pinned memory into memory that is there already, by events [seconds]."""
    host, target = batch.pin_memory(), torch.empty_like(batch, device="cuda")

    def copies() -> None:
        for _ in range(n):
            target.copy_(host, non_blocking=True)

    copies()
    return device.seconds_between(copies) / n


def epoch(pipe: Any, step: Callable[[Any], object]) -> float:
    """An epoch, from the request for the first batch to the end of the last step [seconds]."""
    start = time.perf_counter()
    for batch in pipe:
        step(batch)
        del batch
    torch.cuda.synchronize()
    return time.perf_counter() - start


def bandwidth(name: str, options: dict[str, Any]) -> dict[str, Any]:
    device.reset("timed")
    n = 4 if options["quick"] else 100 if real() else 10
    found: dict[str, Any] = {}
    for kind, batch, raw in large_batches(options):
        each = seconds_each(MOVERS[name](Cycle(n, [batch]), SIZE), n)
        found |= {f"{kind} source [GB/s]": batch.nbytes / each / 1e9, f"{kind} source, of raw": raw / each}
    return {"raw [GB/s]": batch.nbytes / raw / 1e9, **found}


def seconds_each(pipe: Pipe, n: int) -> float:
    """Time a sample, in an epoch of `n`, the second one [seconds]."""
    epoch(pipe, id)
    return epoch(pipe, id) / n


def hidden(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Of the time that copies take, the part that does not show, computing 1.2 and 2 times as long as loading takes."""
    device.reset("timed")
    n = 4 if options["quick"] else 200 if real() else 15
    found: dict[str, Any] = {}
    for kind, batch, copy in large_batches(options):
        pipe, resident = MOVERS[name](Cycle(n, [batch]), SIZE), Cycle(n, [batch])
        each = copy if kind == "pinned" else seconds_each(pipe, n)
        for factor in (1.2, 2):
            took = [device.seconds_between(partial(steps, one, factor * each)) for one in (pipe, resident)]
            found[f"hidden, {kind}, computing {factor:g} times"] = 1 - (took[0] - took[1]) / n / copy
    return found


def steps(pipe: Pipe, compute: float) -> None:
    """Queue the steps of an epoch; wait for nothing."""
    for batch in pipe:
        device.compute(compute)
        del batch


# --- Steps of a model -----------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.around = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.relu(self.body(x) + self.around(x))


class Convolutions(nn.Module):
    """Of the size of ResNet-18."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [
            nn.Conv2d(3, 64, 7, 2, 3),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
        ]
        for inputs, outputs, stride in ((64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)):
            layers += [Block(inputs, outputs, stride), Block(outputs, outputs, 1)]
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layers(batch["images"]), batch["labels"])


class Embeddings(nn.Module):
    """200 small inputs, a large table, a small network."""

    def __init__(self, inputs: int = 200, rows: int = 2000, width: int = 64) -> None:
        super().__init__()
        self.table = nn.Embedding(inputs * rows, width)
        self.register_buffer("offsets", rows * torch.arange(inputs)[:, None])
        self.head = nn.Sequential(nn.Linear(inputs * width, 512), nn.ReLU(), nn.Linear(512, 1))

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        rows = self.table(torch.stack(list(batch.values())) + self.offsets)
        return self.head(rows.permute(1, 0, 2).flatten(1)).square().mean()


def image_batch(n: int) -> dict[str, torch.Tensor]:
    return {"images": torch.rand(n, 3, 224, 224), "labels": torch.randint(1000, (n,))}


def id_batch(n: int) -> dict[str, torch.Tensor]:
    return {f"feature {i}": torch.randint(2000, (n,)) for i in range(200)}


class Trainer:
    """A model and its step; on the simulated device, so many seconds."""

    def __init__(self, model: nn.Module, where: str) -> None:
        self.model, self.where = model.to(where), where
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def step(self, batch: Any) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.where, torch.bfloat16):
            loss = self.model(batch)
        loss.backward()
        self.optimizer.step()


def model_steps(model: str, name: str, options: dict[str, Any]) -> dict[str, Any]:
    """The step's time with a loader, and with batches that lie on the device already: the limit."""
    device.reset("timed")
    n = 4 if options["quick"] else 100 if real() else 30
    make, kind, length = MODELS[model]
    samples = [make(length if real() else 4) for _ in range(2 if options["quick"] else 4)]
    step: Callable[[Any], object] = Trainer(kind(), "cuda").step if real() else lambda _: device.compute(0.002)
    pipe = MOVERS[name](Cycle(n, samples), SIZE)
    resident = Cycle(n, list(MOVERS["plain"](Cycle(2, samples), SIZE)))
    epoch(pipe, step)
    took = [(epoch(pipe, step), epoch(resident, step)) for _ in range(1 if options["quick"] else 3)]
    ours, least = (min(column) / n * 1e3 for column in zip(*took, strict=True))
    return {"step [ms]": ours, "batches on the device [ms]": least, "ratio": ours / least}


MODELS: dict[str, tuple[Callable[[int], Any], Callable[[], nn.Module], int]] = {
    "convolutions": (image_batch, Convolutions, 128),
    "embeddings": (id_batch, Embeddings, 128),
}


# --- The rows -------------------------------------------------------------------------------------------------------


def small(build: Build, options: dict[str, Any]) -> dict[str, Any]:
    names = ("50 x 1 KB",) if options["quick"] else ("200 x 1 KB", "200 x 1 KB, four dtypes", "200 x 1 KB, nested")
    cells = {
        name: small_tensors.cell(build, small_tensors.CASES[name], 3 if options["quick"] else 200) for name in names
    }
    found = {f"CPU, {name} [µs]": one["cpu"] for name, one in cells.items() if isinstance(one, dict)}
    return found | {f"{name}, over one by one": one["ratio"] for name, one in cells.items() if isinstance(one, dict)}


ROWS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "stream tests": stream_tests,
    **{f"wrong, {name}": partial(wrong, name) for name in ("sidestream", "side stream without event")},
    "memory bound (5), sidestream": partial(memory.measure, "sidestream"),
    **{f"bandwidth, {short}": partial(bandwidth, PEERS[short]) for short in ("sidestream", "plain .to")},
    "hidden, sidestream": partial(hidden, "sidestream"),
    "small, sidestream": partial(small, mover),
    "small, sidestream, both stages": partial(small, both_stages),
    "small, DataLoader": partial(small, MOVERS[PEERS["DataLoader"]]),
    **{f"{model}, {short}": partial(model_steps, model, name) for model in MODELS for short, name in PEERS.items()},
}


def measure(contender: str, options: dict[str, Any]) -> dict[str, Any]:
    if not torch.cuda.is_available():
        raise Unable(f"not run: {device.name()}")
    device.calibrate()
    try:
        return ROWS[contender](options)
    except (RuntimeError, subprocess.SubprocessError) as error:  # the other rows are wanted all the same
        raise Unable(f"failed: {str(error).splitlines()[0]}") from error


def table(results: common.Results) -> str:
    rows = []
    for name, one in results.items():
        rows += [[name, *pair] for pair in one.get("median", {"": one.get("cannot")}).items()]
    return common.markdown(["row", "what", "value"], rows)


if __name__ == "__main__":
    common.main(__file__, __doc__, ROWS, table, rounds=1, limit=LIMIT)
