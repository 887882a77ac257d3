"""Small trainings as people write them, run as they are and then with `prefetch` around their loader.

    python -m sidestream.examples.tabular
    python -m sidestream.examples.images --data DIR

Both loaders meet the same loop, seed and model, so the losses are the same. Here is what the examples share.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import pairwise
from statistics import median
from typing import Any, Protocol

import torch

from sidestream.cli import BAD_INPUT, DEMO_NEEDS, INTERRUPTED, _positive

__all__ = ["Loader", "compare", "make_parser", "run"]

if missing := [name for name in DEMO_NEEDS if find_spec(name) is None]:
    raise SystemExit(f"the examples need {', '.join(missing)}: pip install 'sidestream[demo]'")


class Loader(Protocol):
    """What a training loop asks of a loader."""

    def __iter__(self) -> Iterator[Any]: ...

    def __len__(self) -> int: ...


Train = Callable[[Loader, torch.device, int, Callable[[], None]], list[float]]


def make_parser(about: str | None, epochs: int) -> argparse.ArgumentParser:
    """Return a parser of the options that all examples have."""
    parser = argparse.ArgumentParser(description=(about or "").partition("\n")[0])
    parser.add_argument("--device", help="where to train (default: CUDA where there is one)")
    parser.add_argument("--epochs", type=_positive, default=epochs, help="(default: %(default)s)")
    return parser


def run(main: Callable[[argparse.Namespace], None], parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> int:
    """Run `main` with its options and return the exit code: 0, 2 for input that cannot be used, 130 after Ctrl-C."""
    from sidestream.demo import DemoError, pick_device

    options = parser.parse_args(argv)
    try:
        options.device = pick_device(options.device)
        main(options)
    except DemoError as error:
        return _fail(parser.prog, str(error), BAD_INPUT)
    except KeyboardInterrupt:
        return _fail(parser.prog, "stopped by Ctrl-C", INTERRUPTED)
    return 0


def _fail(name: str, message: str, code: int) -> int:
    sys.stderr.write(f"{name}: {message}\n")
    return code


def compare(train: Train, loaders: Mapping[str, Loader], device: torch.device, epochs: int) -> None:
    """Train with each of two loaders, and print the loss of each epoch and the time that each took."""
    from rich.console import Console

    from sidestream.demo import make_progress, where

    console = Console(highlight=False, markup=False, soft_wrap=True)
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(max(1, cores - 1))  # the core that is left loads
    medians = []
    train(next(iter(loaders.values())), device, 1, lambda: None)  # pays for what libraries and device set up once
    with make_progress(console) as progress:
        for name, loader in loaders.items():
            task = progress.add_task(name, total=epochs * len(loader))
            steps = [_clock(device)]

            def advance(task: Any = task, steps: list[float] = steps) -> None:
                steps.append(time.perf_counter())
                progress.advance(task)

            losses = " ".join(f"{loss:.4f}" for loss in train(loader, device, epochs, advance))
            seconds = _clock(device) - steps[0]
            medians.append(median(after - before for before, after in pairwise(steps[:: len(loader)])))
            console.print(f"{name}: losses {losses}; {seconds:.3f} s, the median epoch {medians[-1]:.3f} s")
    torch_has = f"torch with {torch.get_num_threads()} of {cores} cores"
    console.print(f"{medians[0] / medians[1]:.2f} x as fast by the median epoch, {torch_has}")
    console.print(where(device))


def _clock(device: torch.device) -> float:
    """The time when the device has done all that it was given [seconds]."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
