"""What is gained with real files and a real model?

    python benchmarks/images.py [--all-peers] [--json FILE]

JPEG files, cut from the photographs that scikit-learn ships, decoded by Pillow, flipped at random and batched; a
small convolutional network is trained on them: on the GPU where there is one, else on the CPU, on one thread. Gain:
over plain iteration, whose runs alternate with the contender's. Best: what a perfect overlap would gain, from loading
alone and computing alone.

Last table: 2026-11-29 · 2 cores, AMD EPYC, Linux · load average 1.2 at the start · device: simulated, not a GPU · torch threads: 1 · python 3.11.7, torch 2.14.1, torchdata 0.9.0, prefetch_generator 1.0.3, spdl-core 0.8.0, grain 0.2.18

| contender            | images/s | gain over plain | best | load / compute | model on |
| -------------------- | -------- | --------------- | ---- | -------------- | -------- |
| plain                | 1,189    | 1.01            | 2.15 | 1.13           | cpu      |
| sidestream           | 2,076    | 1.75            | 1.98 | 1.16           | cpu      |
| queue.Queue          | 2,091    | 1.79            | 2.04 | 1.12           | cpu      |
| prefetch_generator   | 2,094    | 1.74            | 1.97 | 1.20           | cpu      |
| torchdata prefetch   | 2,148    | 1.77            | 2.03 | 1.20           | cpu      |
| DataLoader, 1 worker | 1,388    | 1.11            | 1.93 | 1.18           | cpu      |
| SPDL                 | 1,500    | 1.22            | 1.94 | 1.10           | cpu      |
| Grain                | 2,099    | 1.73            | 1.99 | 1.13           | cpu      |
| torchdata.nodes      | 2,085    | 1.67            | 2.28 | 1.14           | cpu      |
"""  # noqa: E501

from __future__ import annotations

import io
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import IterDataPipe

import common
import device
from peers import LOADERS, MOVERS, OTHER_LOADERS, OTHER_MOVERS, Build

SIDE = 160  # [pixels]
BATCH = 16


def write_files(folder: Path, n: int) -> None:
    """Cut `n` squares out of two photographs."""
    from sklearn.datasets import load_sample_images

    photos = [Image.fromarray(photo) for photo in load_sample_images().images]
    draw = random.Random(0)
    for i in range(n):
        photo = photos[i % len(photos)]
        left, top = draw.randrange(photo.width - SIDE), draw.randrange(photo.height - SIDE)
        data = io.BytesIO()
        photo.crop((left, top, left + SIDE, top + SIDE)).save(data, "JPEG", quality=90)
        (folder / f"{i:05}-{i % len(photos)}.jpg").write_bytes(data.getvalue())


class Photos(IterDataPipe):
    """Batches of decoded, flipped images, as floats, and their labels."""

    def __init__(self, folder: Path) -> None:
        self.files = sorted(folder.iterdir())

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        draw = random.Random(0)
        for i in range(0, len(self.files), BATCH):
            files = self.files[i : i + BATCH]
            images = torch.stack([decoded(file, flip=draw.random() < 0.5) for file in files])
            yield images, torch.tensor([int(file.stem[-1]) for file in files])


def decoded(file: Path, *, flip: bool) -> torch.Tensor:
    with Image.open(file) as image:
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    return (pixels.flip(2) if flip else pixels).float() / 255


class Trainer:
    """A network, its optimizer, and one step."""

    def __init__(self, where: str) -> None:
        layers: list[nn.Module] = []
        for inputs, outputs, kernel, stride in ((3, 8, 4, 4), (8, 16, 3, 2), (16, 32, 3, 2)):
            layers += [nn.Conv2d(inputs, outputs, kernel, stride), nn.BatchNorm2d(outputs), nn.ReLU()]
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 2)]
        self.net = nn.Sequential(*layers).to(where)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.net(images), labels).backward()
        self.optimizer.step()


def train(pipe: Iterable[Any], trainer: Trainer | None) -> float:
    """An epoch; without a trainer, loading alone [seconds]."""
    start = time.perf_counter()
    for images, labels in pipe:
        if trainer is not None:
            trainer.step(images, labels)
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def contenders(*, on_gpu: bool) -> tuple[dict[str, Build], dict[str, Build]]:
    """Those of this environment, and those that need one of their own."""
    return (MOVERS, OTHER_MOVERS) if on_gpu else (LOADERS, OTHER_LOADERS)


def measure(contender: str, options: dict[str, Any]) -> dict[str, Any]:
    on_gpu = device.have_gpu(simulated=options["simulated"])
    where = "cuda" if on_gpu else "cpu"
    here, others = contenders(on_gpu=on_gpu)
    build, plain = {**here, **others}[contender], here["plain"]
    n, repeats = (BATCH, 1) if options["quick"] else (640, 5)
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder), n)
        source, trainer = Photos(Path(folder)), Trainer(where)
        pipe, bare = build(source, 2), plain(source, 2)
        ready = list(bare)
        train(pipe, trainer)
        took = [(train(pipe, trainer), train(bare, trainer)) for _ in range(repeats)]
        parts = [(train(source, None), train(ready, trainer)) for _ in range(repeats)]
    ours, without = (statistics.median(column) for column in zip(*took, strict=True))
    load, compute = (statistics.median(column) for column in zip(*parts, strict=True))
    gains = {"gain": without / ours, "best": without / max(load, compute), "load/compute": load / compute}
    return {"images/s": n / ours, **gains, "where": where}


def columns(one: dict[str, Any]) -> list[object]:
    return [one["images/s"], one["gain"], one["best"], one["load/compute"], one["where"]]


def table(results: common.Results) -> str:
    header = ["contender", "images/s", "gain over plain", "best", "load / compute", "model on"]
    return common.markdown(header, common.rows(results, columns, 5))


if __name__ == "__main__":
    here, others = contenders(on_gpu=device.have_gpu(simulated="--simulated" in sys.argv))
    common.main(__file__, __doc__, here, table, others=others)
