"""`python -m sidestream.examples.images`: a small network on a folder of pictures, as it is and then with `prefetch`.

Each picture is opened and decoded when its batch is loaded, work that a thread can do while the model computes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from sidestream import prefetch
from sidestream.demo import SIZE, Data, decode, read_folder, write_digits
from sidestream.examples import Loader, compare, make_parser, run

SEED = 0
BATCH_SIZE, EPOCHS = 64, 3


class Pictures(Dataset[tuple[Tensor, int]]):
    """The pictures of a folder with a sub-folder for each class; a part of them is held out."""

    def __init__(self, folder: Path) -> None:
        self.found: Data = read_folder(folder)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return decode(self.found.train[i])

    def __len__(self) -> int:
        return len(self.found.train)


def make_loader(pictures: Pictures) -> DataLoader[tuple[Tensor, int]]:
    """The loader as people write it."""
    return DataLoader(pictures, batch_size=BATCH_SIZE, shuffle=True)


def make_model(classes: int) -> nn.Module:
    """Two convolutions and a linear layer."""
    return nn.Sequential(
        *(nn.Conv2d(1, 24, 5, stride=2, padding=2), nn.ReLU()),
        *(nn.Conv2d(24, 48, 5, stride=2, padding=2), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(SIZE // 8), nn.Flatten(), nn.Linear(48 * (SIZE // 8) ** 2, classes)),
    )


def train(loader: Loader, device: torch.device, epochs: int, advance: Callable[[], None]) -> list[float]:
    """Train as people write it; `advance` hears of each step. Returns the mean loss of each epoch."""
    torch.manual_seed(SEED)
    model = make_model(len(loader.dataset.found.classes)).to(device)  # type: ignore[attr-defined]
    loss_of = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters())
    losses = []
    for _ in range(epochs):
        total = torch.zeros((), device=device)
        for batch in loader:
            x, y = batch[0].to(device), batch[1].to(device)  # does nothing to what is there already
            loss = loss_of(model(x.float() / 255), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
            advance()
        losses.append(total.item() / len(loader))
    return losses


def both(options: argparse.Namespace) -> None:
    """Train with the loader as it is, and with one line around it."""
    with tempfile.TemporaryDirectory(prefix="sidestream-images-") as folder:
        if options.data is None:
            write_digits(Path(folder))
        pictures = Pictures(options.data or Path(folder))
        loaders: dict[str, Loader] = {
            "as people write it": make_loader(pictures),
            "with prefetch": prefetch(make_loader(pictures), options.device),
        }
        compare(train, loaders, options.device, options.epochs)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example; return the exit code."""
    parser = make_parser(__doc__, EPOCHS)
    parser.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="a folder with one sub-folder of images for each class (default: handwritten digits)",
    )
    return run(both, parser, argv)


if __name__ == "__main__":
    sys.exit(main())
