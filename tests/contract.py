"""What the tests of the stages' contract share: the chains under test, sources, gates, and the bare pipe as oracle.

`STAGES` maps a name to something that chains one or two stages onto a pipe. A rule of the contract is one test over
all of them. Child processes import this file too, so it needs no pytest.
"""

from __future__ import annotations

import textwrap
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.graph import traverse_dps

import sidestream  # noqa: F401 - registers the two stages
from helpers import run_child

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torchdata announces its own end when it is imported
    from torchdata.dataloader2 import (
        DataLoader2,
        InProcessReadingService,
        MultiProcessingReadingService,
    )
    from torchdata.dataloader2.graph.settings import set_graph_random_seed
    from torchdata.dataloader2.random import SeedGenerator

__all__ = [
    "BOTH_ORDERS",
    "HANG",
    "STAGES",
    "Chain",
    "DataLoader2",
    "Gate",
    "InProcessReadingService",
    "Item",
    "Items",
    "IterableWrapper",
    "MultiProcessingReadingService",
    "Numbers",
    "SeedGenerator",
    "Watched",
    "always",
    "drain",
    "observe",
    "scenario",
    "set_graph_random_seed",
    "stands_still",
    "traverse_dps",
    "within",
]

HANG = 60.0  # [seconds] a child process that takes longer hangs


@dataclass(frozen=True)
class Chain:
    """One or more stages, source first, each with its buffer size."""

    links: tuple[tuple[str, int], ...]

    def __call__(self, source: IterDataPipe, **options: Any) -> IterDataPipe:
        for kind, size in self.links:
            if kind == "prefetch":
                source = source.thread_prefetch(size, **options)
            else:
                source = source.to_cuda_stream("cpu", buffer_size=size, **options)
        return source

    @property
    def waiting(self) -> int:
        """How many items wait, between the source and the consumer, once all buffers are full."""
        return sum(size for _, size in self.links)

    @property
    def ahead(self) -> int:
        """How many items the source may have been asked for beyond those that the consumer asked for."""
        return sum(size + 1 for _, size in self.links)

    @property
    def threads(self) -> int:
        return len(self.links)


STAGES: dict[str, Callable[[IterDataPipe], IterDataPipe]] = {
    "prefetch 1": Chain((("prefetch", 1),)),
    "prefetch 2": Chain((("prefetch", 2),)),
    "prefetch 64": Chain((("prefetch", 64),)),
    "move 1": Chain((("move", 1),)),
    "move 2": Chain((("move", 2),)),
    "move 64": Chain((("move", 64),)),
    "prefetch 2, move 2": Chain((("prefetch", 2), ("move", 2))),
    "move 2, prefetch 2": Chain((("move", 2), ("prefetch", 2))),
    "prefetch 64, move 1": Chain((("prefetch", 64), ("move", 1))),
}

BOTH_ORDERS = ["prefetch 2", "move 2", "prefetch 2, move 2", "move 2, prefetch 2"]


class Gate:
    """A place where a source waits until the test lets it go on."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()

    def wait(self) -> None:
        self.reached.set()
        if not self.opened.wait(HANG):
            raise AssertionError("nobody opened the gate")


class Items(IterDataPipe):
    """The given items, through an iterator class: torch's hook adds its text to errors of generators only.

    It keeps no item that it gave, save in `items`. It counts epochs, resets and what it was asked for.
    """

    def __init__(self, items: Iterable[Any], *, error: BaseException | None = None) -> None:
        self.items = list(items)
        self.error = error  # raised after the items
        self.epochs = 0
        self.resets = 0
        self.pulls = 0

    def __iter__(self) -> Iterator[Any]:
        self.epochs += 1
        return self.walk()

    def walk(self) -> Iterator[Any]:
        return _ItemsIterator(self)

    def reset(self) -> None:
        self.resets += 1

    def __len__(self) -> int:
        return len(self.items)


class _ItemsIterator:
    def __init__(self, source: Items) -> None:
        self.source = source
        self.index = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.source.pulls += 1
        index, self.index = self.index, self.index + 1
        if index < len(self.source.items):
            return self.source.items[index]
        if self.source.error is not None:
            raise self.source.error
        raise StopIteration


def always(_: Any) -> bool:
    """For places that want a function with a name, which torch and pickle ask for."""
    return True


class Numbers(IterDataPipe):
    """0, 1, 2, ... one after the other, `n` of them; knows no length; tells `on_pull` before it gives one."""

    def __init__(self, n: int, on_pull: Callable[[int], Any] = always) -> None:
        self.n = n
        self.on_pull = on_pull

    def __iter__(self) -> Iterator[int]:
        for number in range(self.n):
            self.on_pull(number)
            yield number


class Watched(IterDataPipe):
    """0, 1, 2, ... like `Numbers`; the class knows what was pulled, since a loader iterates a copy of the pipe."""

    pulled: ClassVar[list[int]] = []
    moved: ClassVar[threading.Event] = threading.Event()

    def __init__(self, n: int) -> None:
        self.n = n
        self.pulled.clear()

    def __iter__(self) -> Iterator[int]:
        for number in range(self.n):
            self.pulled.append(number)
            self.moved.set()
            yield number

    @classmethod
    def stands_still(cls) -> bool:
        """Whether nothing is pulled for a while."""
        cls.moved.clear()
        return not cls.moved.wait(0.05)


class Item:
    """Something whose life can be watched."""

    alive: ClassVar[weakref.WeakSet[Item]] = weakref.WeakSet()

    def __init__(self, payload: Any = None) -> None:
        self.payload = payload
        self.alive.add(self)


def observe(pipe: Iterable[Any]) -> tuple[list[Any], type[BaseException] | None, tuple[Any, ...]]:
    """What a consumer sees in one epoch: the items, then the error's class and arguments, if there was one."""
    seen: list[Any] = []
    try:
        for item in pipe:
            seen.append(item)  # noqa: PERF402 - what came before an error counts
    except BaseException as error:
        return seen, type(error), error.args
    return seen, None, ()


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """The block ends in less than `seconds`."""
    start = time.monotonic()
    yield
    took = time.monotonic() - start
    assert took < seconds, f"took {took:.2f} s, not less than {seconds} s"


def switches(thread: threading.Thread) -> int:
    """How often the thread has gone to sleep so far."""
    status = Path(f"/proc/self/task/{thread.native_id}/status").read_text(encoding="ascii")
    return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])


def stands_still(thread: threading.Thread) -> bool:
    """Whether the thread neither woke up nor went to sleep over a tenth of a second."""
    before = switches(thread)
    threading.Event().wait(0.1)
    return switches(thread) == before


def drain(_rank: int, name: str) -> None:
    """Run a whole chain in the process that calls this; for processes that import what they run."""
    assert list(STAGES[name](IterableWrapper(range(10)))) == list(range(10))


PRELUDE = """
import copy, gc, multiprocessing, os, pickle, signal, sys, threading, time, warnings, weakref
import torch
from contract import *
from helpers import Fn, eventually, settled, workers
"""


def scenario(code: str, *, timeout: float = HANG, **options: Any) -> str:
    """Run `code` in a process of its own that must end in time, with status 0 and nothing on stderr."""
    done = run_child(PRELUDE + textwrap.dedent(code), timeout=timeout, **options)
    assert (done.returncode, done.stderr) == (0, ""), f"{done.stdout}\n{done.stderr}"
    return done.stdout
