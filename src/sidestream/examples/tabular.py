"""`python -m sidestream.examples.tabular`: a linear model on rows of numbers, as it is and then with `prefetch`.

There is next to nothing to load here, and a thread has its price: this shows the one line, not a gain.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from sidestream import prefetch
from sidestream.examples import Loader, compare, make_parser, run

SEED = 0
ROWS, FEATURES, BATCH_SIZE, EPOCHS = 1000, 10, 32, 5


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Rows of numbers between 0 and 1; the label says whether their sum is above 5."""

    def __init__(self) -> None:
        self.x = np.random.default_rng(SEED).random((ROWS, FEATURES), dtype=np.float32)
        self.y = (self.x.sum(axis=1) > FEATURES / 2).astype(np.float32)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(self.x[i]), torch.tensor(self.y[i])

    def __len__(self) -> int:
        return len(self.x)


def make_loader() -> DataLoader[tuple[Tensor, Tensor]]:
    """The loader as people write it."""
    return DataLoader(Rows(), batch_size=BATCH_SIZE, shuffle=True)


def train(loader: Loader, device: torch.device, epochs: int, advance: Callable[[], None]) -> list[float]:
    """Train as people write it; `advance` hears of each step. Returns the mean loss of each epoch."""
    torch.manual_seed(SEED)
    model = nn.Linear(FEATURES, 1).to(device)
    loss_of = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(epochs):
        total = torch.zeros((), device=device)
        for batch in loader:
            x, y = batch[0].to(device), batch[1].to(device)  # does nothing to what is there already
            loss = loss_of(model(x).squeeze(1), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
            advance()
        losses.append(total.item() / len(loader))
    return losses


def both(options: argparse.Namespace) -> None:
    """Train with the loader as it is, and with one line around it."""
    loaders: dict[str, Loader] = {
        "as people write it": make_loader(),
        "with prefetch": prefetch(make_loader(), options.device),
    }
    compare(train, loaders, options.device, options.epochs)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example; return the exit code."""
    return run(both, make_parser(__doc__, EPOCHS), argv)


if __name__ == "__main__":
    sys.exit(main())
