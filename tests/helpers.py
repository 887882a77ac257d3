"""What several test files need: sources, gates, threads, child processes."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from torch.utils.data import IterDataPipe


def workers() -> list[threading.Thread]:
    """Every thread but the main one."""
    return [t for t in threading.enumerate() if t is not threading.main_thread()]


def eventually(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    """Whether `condition` becomes true in time. For what other threads do by themselves, such as ending."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.002)
    return condition()


def settled(n: int = 0, seconds: float = 5.0) -> bool:
    """Whether, in time, no more than `n` threads are left beside the main one."""
    return eventually(lambda: len(workers()) <= n, seconds)


class Fn(IterDataPipe):
    """A source made from a generator function."""

    def __init__(self, function: Callable[[], Iterable[Any]]) -> None:
        self.function = function

    def __iter__(self) -> Iterator[Any]:
        yield from self.function()


def run_child(code: str, *, timeout: float = 60.0, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `code` in an interpreter of its own, warnings as errors but for torchdata's own farewell.

    `helpers` can be imported there; the simulated device is not loaded there unless `code` loads it.
    """
    return subprocess.run(
        [sys.executable, "-W", "error", "-W", "ignore::UserWarning:torchdata.datapipes", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=Path(__file__).parent,
        check=False,
        **options,
    )
