"""`sidestream demo`: one small training, first without the two stages and then with them.

Both runs have the same graph, seeds and loop, so they learn the same. They differ in who loads and moves a
batch: the loop itself, or the two stages while the loop computes.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper

with warnings.catch_warnings():
    # torchdata warns whoever imports it that DataLoader2 will go; the demo's user can do nothing about it.
    warnings.filterwarnings("ignore", message="\n#+\nWARNING!", category=UserWarning)
    from torchdata.dataloader2 import DataLoader2, InProcessReadingService

SEED = 0
DIGIT_SIZE = 224  # a digit's file [pixels a side]: large enough that decoding is real work
SIZE = 64  # what the network sees [pixels a side]
SHIFT = 3  # the largest shift that augmentation makes [pixels]
WIDTH = 20  # of the network's first layer [channels]: makes computing take about as long as loading
PLAIN_EPOCHS = 3  # at most, without the stages; the other run is compared over the same epochs
WARM_UP_BATCHES = 4  # before each run: the first batches pay for what libraries and device set up once

Example = tuple[Path, int]  # an image file and the index of its class


class DemoError(Exception):
    """Input that the demo cannot use. The message says it all, so no traceback is shown."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return self.message  # `args` is longer by now: torch adds the name of the DataPipe that raised


@dataclass
class Data:
    """The examples, split once for both runs."""

    classes: list[str]
    train: list[Example]
    held_out: list[Example]


@dataclass
class Setup:
    """What a run is made of."""

    data: Data
    batch_size: int
    device: torch.device
    stages: bool


@dataclass
class Time:
    """What training took."""

    samples: int = 0
    seconds: float = 0.0
    waiting: float = 0.0  # the part of it in the loader's next() [seconds]

    def __str__(self) -> str:
        return f"{self.rate:,.0f} samples/s, {self.share:.0%} waiting for data"

    @property
    def rate(self) -> float:
        """Speed [samples/second]."""
        return self.samples / self.seconds

    @property
    def share(self) -> float:
        """The part of each step that is spent waiting for data."""
        return self.waiting / self.seconds


def run(epochs: int, batch_size: int, device_name: str | None, folder: Path | None) -> None:
    """Train without the stages and with them, and print what came of it.

    Args:
        epochs: How long to train with the two stages [epochs].
        batch_size: The size of a batch [images].
        device_name: Where to train; `None` takes CUDA where there is one.
        folder: A folder with a sub-folder of images for each class; `None` takes scikit-learn's digits.

    Raises:
        DemoError: If the device or the images cannot be used.
    """
    device = pick_device(device_name)
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(max(1, cores - 1))  # the core that is left loads
    console = Console(highlight=False, markup=False, soft_wrap=True)
    with contextlib.ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sidestream-demo-")))
            console.print("Writing scikit-learn's handwritten digits as PNG files ...")
            write_digits(folder)
        data = read_folder(folder)
        console.print(f"{len(data.classes)} classes, {len(data.train):,} images, {len(data.held_out):,} more held out")
        console.print(f"Computing on {device}, torch with {torch.get_num_threads()} of {cores} cores")
        plain = train(Setup(data, batch_size, device, stages=False), min(PLAIN_EPOCHS, (epochs + 1) // 2), console)
        staged = train(Setup(data, batch_size, device, stages=True), epochs, console)
    summarize(plain, staged[: len(plain)], device, console)


def pick_device(name: str | None) -> torch.device:
    """The device to train on, checked before any work is done."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        IterableWrapper([]).to_cuda_stream(name)  # the stage knows which devices it takes
    except ValueError as error:
        raise DemoError(f"--device {name}: {error}") from error
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise DemoError(f"--device {name}: CUDA devices here: {torch.cuda.device_count()}")
    return device


def write_digits(folder: Path) -> None:
    """Write scikit-learn's 1,797 digits as PNG files, one sub-folder for each class."""
    from sklearn.datasets import load_digits  # here: it takes a second that `--data` need not wait for

    digits = load_digits()
    for label in range(10):
        (folder / str(label)).mkdir()
    for number, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        image = Image.fromarray((pixels * (255 / 16)).astype(np.uint8))
        image = image.resize((DIGIT_SIZE, DIGIT_SIZE), Image.Resampling.BICUBIC)
        image.save(folder / str(label) / f"{number:04}.png", compress_level=1)


def read_folder(folder: Path) -> Data:
    """List the images of each sub-folder, and hold a part of them out: seeded, one image at least."""
    found = find_images(folder)
    if not found:
        raise DemoError(f"--data {folder}: no images in its sub-folders (one sub-folder for each class)")
    if len(found) == 1:
        raise DemoError(f"--data {folder}: one class only ({next(iter(found))}), at least two are needed")
    examples = [(path, label) for label, paths in enumerate(found.values()) for path in paths]
    order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(SEED)).tolist()
    held_out = max(1, len(examples) // 5)
    shuffled = [examples[place] for place in order]
    return Data(list(found), shuffled[held_out:], shuffled[:held_out])


def find_images(folder: Path) -> dict[str, list[Path]]:
    """The files that Pillow opens, going by their names, for each sub-folder that has some."""
    kinds = {suffix for suffix, kind in Image.registered_extensions().items() if kind in Image.OPEN}
    try:
        names = sorted(path.name for path in folder.iterdir() if path.is_dir())
        files = {name: sorted(path for path in (folder / name).rglob("*") if path.is_file()) for name in names}
    except OSError as error:
        raise DemoError(f"--data {folder}: {error.strerror}") from error
    images = {name: [path for path in files[name] if path.suffix.lower() in kinds] for name in names}
    return {name: paths for name, paths in images.items() if paths}


def decode(example: Example) -> tuple[Tensor, int]:
    """Open one file: gray, `SIZE` x `SIZE`, a byte for each pixel, so that there is little to move."""
    path, label = example
    try:
        with Image.open(path) as image:
            gray = to_gray(image).resize((SIZE, SIZE), Image.Resampling.BILINEAR)
    except Exception as error:  # Pillow raises many kinds for broken files, SyntaxError among them
        raise DemoError(f"cannot read the image {path}: {error}") from error
    return torch.from_numpy(np.array(gray)).unsqueeze(0), label


def to_gray(image: Image.Image) -> Image.Image:
    """`image` with a byte for each pixel."""
    if image.mode == "P":
        image = image.convert("RGBA")  # on the direct way Pillow warns of transparent colours
    if image.mode[0] not in "IF":
        return image.convert("L")
    values = np.asarray(image, dtype=np.float32)  # more than a byte for each: convert() would cut at 255
    return Image.fromarray((values * (255 / max(1.0, values.max()))).clip(0, 255).astype(np.uint8))


class Shift:
    """Shifts an image by a few pixels; what moves in is black.

    It has a generator of its own. Draws from torch's global one would fall between the training loop's draws,
    from another thread and in an order that differs from run to run.
    """

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(SEED)

    def __call__(self, example: tuple[Tensor, int]) -> tuple[Tensor, int]:
        image, label = example
        down, right = torch.randint(2 * SHIFT + 1, (2,), generator=self.generator).tolist()
        padded = functional.pad(image, (SHIFT, SHIFT, SHIFT, SHIFT))
        return padded[:, down : down + SIZE, right : right + SIZE], label


def make_loader(setup: Setup, examples: list[Example], *, training: bool) -> DataLoader2[Any]:
    """The one graph of the demo, with the two stages at its end or without them."""
    pipe: IterDataPipe[Any] = IterableWrapper(examples, deepcopy=False)
    if training:
        pipe = pipe.shuffle(buffer_size=len(examples))
    pipe = pipe.map(decode)
    if training:
        pipe = pipe.map(Shift())
    pipe = pipe.batch(setup.batch_size).collate()
    if setup.stages:
        pipe = pipe.thread_prefetch().to_cuda_stream(setup.device)
    with warnings.catch_warnings():
        # DataLoader2 forks torch's random state when built, which warns wherever there are several GPUs.
        warnings.filterwarnings("ignore", message="CUDA reports that you have", category=UserWarning)
        loader = DataLoader2(pipe, reading_service=InProcessReadingService())
    loader.seed(SEED)  # the reading service hands it on to shuffle()
    return loader


def timed(loader: DataLoader2[Any], time_taken: Time) -> Generator[list[Tensor], None, None]:
    """Yield the loader's batches, add up the waiting, and end what the loader runs however the loop ends."""
    with contextlib.closing(iter(loader)) as batches:  # DataLoader2 alone would leave the stages at work
        while True:
            asked = time.perf_counter()
            batch = next(batches, None)
            time_taken.waiting += time.perf_counter() - asked
            if batch is None:
                return
            yield batch


class Trainer:
    """A small convolutional network and its optimizer."""

    def __init__(self, setup: Setup) -> None:
        torch.manual_seed(SEED)
        layers: list[nn.Module] = []
        for inputs, outputs in itertools.pairwise((1, WIDTH, 2 * WIDTH, 4 * WIDTH)):
            layers.append(nn.Conv2d(inputs, outputs, kernel_size=3, stride=2, padding=1))
            layers += [nn.BatchNorm2d(outputs), nn.ReLU()]
        layers += [nn.AdaptiveAvgPool2d(4), nn.Flatten()]
        layers.append(nn.Linear(4 * WIDTH * 16, len(setup.data.classes)))
        self.net = nn.Sequential(*layers).to(setup.device)
        self.optimizer = torch.optim.Adam(self.net.parameters())
        self.device = setup.device

    def train_epoch(self, loader: DataLoader2[Any], advance: Callable[[int], None]) -> Time:
        """Train on each batch once, and tell `advance` how many samples it had."""
        self.net.train()
        taken, start = Time(), self.clock()
        with contextlib.closing(timed(loader, taken)) as batches:
            for batch in batches:
                scores, labels = self.apply(batch)
                self.optimizer.zero_grad()
                functional.cross_entropy(scores, labels).backward()
                self.optimizer.step()
                taken.samples += len(labels)
                advance(len(labels))
        taken.seconds = self.clock() - start
        return taken

    @torch.no_grad()
    def evaluate(self, loader: DataLoader2[Any]) -> tuple[float, float]:
        """Mean loss and accuracy."""
        self.net.eval()
        samples, sums = 0, torch.zeros(2, device=self.device)
        with contextlib.closing(timed(loader, Time())) as batches:
            for batch in batches:
                scores, labels = self.apply(batch)
                loss = functional.cross_entropy(scores, labels, reduction="sum")
                sums += torch.stack([loss, (scores.argmax(1) == labels).sum()])
                samples += len(labels)
        loss_sum, correct = sums.tolist()
        return loss_sum / samples, correct / samples

    def apply(self, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Scores and labels. The plain run moves its batch here; with the stages it is there already."""
        images, labels = (tensor.to(self.device) for tensor in batch)
        return self.net(images.float() / 255), labels

    def clock(self) -> float:
        """The time when the device has done all that it was given [seconds]."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def train(setup: Setup, epochs: int, console: Console) -> list[Time]:
    """Train a network; print loss and accuracy on the held-out part after each epoch."""
    warm_up = setup.data.train[: WARM_UP_BATCHES * setup.batch_size]
    Trainer(setup).train_epoch(make_loader(setup, warm_up, training=True), lambda _: None)
    trainer, times = Trainer(setup), []
    loader = make_loader(setup, setup.data.train, training=True)
    held_out = make_loader(setup, setup.data.held_out, training=False)
    name = "with stages" if setup.stages else "plain"
    with make_progress(console) as progress:
        task = progress.add_task(name, total=epochs * len(setup.data.train))
        for epoch in range(1, epochs + 1):
            times.append(trainer.train_epoch(loader, lambda samples: progress.advance(task, samples)))
            loss, accuracy = trainer.evaluate(held_out)
            result = f"held-out loss {loss:.3f}, accuracy {accuracy:.1%}"
            console.print(f"{name}, epoch {epoch} of {epochs}: {result}; {times[-1]}")
    return times


def make_progress(console: Console) -> Progress:
    """A bar that goes away when it is done; none where the output is no terminal."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def summarize(plain: list[Time], staged: list[Time], device: torch.device, console: Console) -> None:
    """Print the medians over the same epochs of both runs side by side, and what they ran on."""
    table = Table("", "samples/s", "waiting for data", title=f"Training, epochs 1 to {len(plain)} of both runs")
    for name, times in (("plain", plain), ("with stages", staged)):
        table.add_row(name, f"{median_rate(times):,.0f}", f"{median(taken.share for taken in times):.0%} of each step")
    console.print(table)
    console.print(f"{median_rate(staged) / median_rate(plain):.2f} x the samples per second with the stages")
    console.print(where(device))


def median_rate(times: list[Time]) -> float:
    """Speed [samples/second]; other programs disturb an epoch now and then."""
    return median(taken.rate for taken in times)


def where(device: torch.device) -> str:
    """What the demo ran on."""
    if device.type == "cuda":
        return f"ran on {device} ({torch.cuda.get_device_name(device)})"
    return "ran on the CPU" if torch.cuda.is_available() else "no CUDA here: ran on the CPU"
