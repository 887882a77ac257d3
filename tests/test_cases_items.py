"""Reported faults of delivery and of iterating again: lost, doubled, misread or stale items, and the wrong iterator."""

from __future__ import annotations

import copy
import gc
import importlib
import itertools
import os
import pkgutil
import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.utils.common import StreamWrapper

import sidestream
from contract import (
    BOTH_ORDERS,
    STAGES,
    Chain,
    DataLoader2,
    Gate,
    InProcessReadingService,
    IterableWrapper,
    Numbers,
    scenario,
)
from helpers import Fn, eventually, settled, workers

REPEATS = 20
BREAKS = 60
ROUNDS = 20


# `DataLoader2` draws its seed in `fork_rng`, which says so where there is more than one device.
pytestmark = pytest.mark.filterwarnings("ignore:CUDA reports that you have:UserWarning")


@pytest.fixture
def gate() -> Iterator[Gate]:
    """Where a source waits; open at the end whatever happened, so that no test holds up the next."""
    gate = Gate()
    yield gate
    gate.opened.set()


@pytest.fixture(params=BOTH_ORDERS)
def stage(request: pytest.FixtureRequest) -> Chain:
    return STAGES[request.param]


# Lost, doubled or misread


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("kind", ["prefetch", "move"])
def test_what_waits_when_the_source_ends_is_delivered(kind: str, size: int) -> None:
    """case 22; the consumer is slow: it takes the next item only after the source has ended or the buffer is full."""
    chain, pulled = Chain(((kind, size),)), []
    for n in {0, 1, size - 1, size, size + 1, 20}:
        pulled.clear()
        dp = chain(Numbers(n, pulled.append))
        seen = []
        for item in dp:
            seen.append(item)
            expected = min(n, item + 1 + size)
            assert eventually(lambda expected=expected: len(pulled) >= expected)
        assert seen == list(range(n))
        assert [list(dp) for _ in range(REPEATS)] == [list(range(n))] * REPEATS


def test_none_is_an_item(stage: Chain) -> None:
    """case 23; what else must pass is held by test_contract.py::test_items_are_opaque"""
    assert list(stage(IterableWrapper([0, None, 2, None]))) == [0, None, 2, None]


def everything_in_the_package() -> list[Any]:
    """All that the package's modules hold, their private end markers included."""
    names = [module.name for module in pkgutil.walk_packages(sidestream.__path__, "sidestream.")]
    core = [name for name in names if name.rpartition(".")[2] not in ("cli", "demo", "__main__")]
    return [value for name in core for value in vars(importlib.import_module(name)).values()]


def test_the_packages_own_end_markers_are_items() -> None:
    """case 23"""
    items = everything_in_the_package()
    assert len(items) > 20
    out = list(IterableWrapper(items, deepcopy=False).thread_prefetch(2))
    assert [id(item) for item in out] == [id(item) for item in items]


def test_items_without_a_truth_or_an_equality_pass(stage: Chain) -> None:
    """case 23"""
    items = [np.zeros(3), torch.zeros(2), np.array([]), torch.zeros(0)]
    assert [id(item) for item in stage(IterableWrapper(items, deepcopy=False))] == [id(item) for item in items]


def test_exceptions_are_items_too(stage: Chain) -> None:
    """case 24"""
    payload = ValueError("payload")
    out = list(stage(IterableWrapper([1, payload, 3], deepcopy=False)))
    assert out == [1, payload, 3]
    assert out[1] is payload


def test_a_source_that_overwrites_its_item_is_safe_behind_a_copy(stage: Chain) -> None:
    """case 26; without the copy no look-ahead on the CPU can be right, which the docstring says."""

    def src() -> Iterator[torch.Tensor]:
        buffer = torch.zeros(2)
        for number in range(5):
            yield buffer.fill_(number)

    copied = stage(Fn(src).map(copy.deepcopy))
    assert [item.tolist() for item in copied] == [[i, i] for i in range(5)]
    assert "overwrit" in (type(Fn(src).thread_prefetch()).__doc__ or "")


# Iterating again


@pytest.mark.parametrize("service", [None, InProcessReadingService()], ids=["none", "in process"])
def test_every_epoch_through_a_loader_is_whole(stage: Chain, service: InProcessReadingService | None) -> None:
    """case 27; worker processes: the next test."""
    loader = DataLoader2(stage(IterableWrapper(range(5))), reading_service=service)
    assert [list(loader) for _ in range(3)] == [[0, 1, 2, 3, 4]] * 3
    loader.shutdown()


@pytest.mark.parametrize("count", [0, 10])
def test_epochs_and_restarts_with_worker_processes_are_whole(count: int) -> None:
    """case 27 and case 28"""
    scenario(f"""
    warnings.filterwarnings("ignore", "This process", DeprecationWarning)
    for name in BOTH_ORDERS:
        dl = DataLoader2(
            STAGES[name](IterableWrapper(range(5))),
            reading_service=MultiProcessingReadingService(1, main_prefetch_cnt={count}),
        )
        assert [list(dl) for _ in range(3)] == [[0, 1, 2, 3, 4]] * 3, name
        for _ in range(3):
            it = iter(dl)
            assert [next(it), next(it)] == [0, 1], name
            assert list(dl) == [0, 1, 2, 3, 4], name
        with within(10):
            dl.shutdown()
        del it, dl
        assert eventually(lambda: multiprocessing.active_children() == [])
        assert settled(), (name, workers())
    """)


@pytest.mark.parametrize("service", [None, InProcessReadingService()], ids=["none", "in process"])
def test_a_full_loop_after_two_batches_is_whole(stage: Chain, service: InProcessReadingService | None) -> None:
    """case 28"""
    loader = DataLoader2(stage(IterableWrapper(range(20))), reading_service=service)
    for _ in range(3):
        it = iter(loader)
        assert [next(it), next(it)] == [0, 1]
        assert list(loader) == list(range(20))
    loader.shutdown()


def test_no_epoch_starts_before_its_loop(stage: Chain) -> None:
    """case 29"""
    epoch = 0

    def src() -> Iterator[tuple[int, int]]:
        tag = epoch
        for number in range(6):
            yield tag, number

    dp = stage(Fn(src))
    for epoch in range(6):
        assert list(dp) == [(epoch, number) for number in range(6)]
    for epoch in range(6, 12):
        it = iter(dp)
        epoch += 100  # noqa: PLW2901 - set between `iter` and the first item
        assert next(it) == (epoch, 0)
        it.close()


def test_an_old_worker_never_writes_into_a_later_epoch(stage: Chain) -> None:
    """case 30"""
    dice, epoch = random.Random(0), 0

    def src() -> Iterator[tuple[int, int]]:
        tag = epoch
        for number in range(30):
            sum(range(200 * dice.randrange(5)))  # some work, so that breaks meet the worker at any point
            yield tag, number

    dp = stage(Fn(src))
    for epoch in range(BREAKS):
        stop = dice.randrange(6)
        assert list(itertools.islice(dp, stop)) == [(epoch, number) for number in range(stop)]


# case 31: held by test_contract.py::test_nothing_starts_before_the_first_next


def test_a_hundred_pipes_that_nobody_iterates_start_nothing(stage: Chain) -> None:
    """case 31"""
    pulled: list[int] = []
    pipes = [stage(Numbers(5, pulled.append)) for _ in range(100)]
    assert len(copy.deepcopy(pipes)) == 100
    assert (pulled, workers()) == ([], [])


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


class Handle:
    """An open file that closes when the last reference goes, and says nothing about it."""

    def __init__(self) -> None:
        self.number = os.open(os.devnull, os.O_RDONLY)

    def __del__(self) -> None:
        os.close(self.number)

    def close(self) -> None:
        """For `StreamWrapper`, which calls it; `__del__` follows."""


@pytest.mark.parametrize("make", [lambda: StreamWrapper(Handle()), Handle], ids=["stream", "handle"])
def test_open_files_that_wait_are_closed_when_the_epoch_is_left(stage: Chain, make: Callable[[], Any]) -> None:
    """case 32"""
    made: list[weakref.ref[Any]] = []

    def src() -> Iterator[Any]:
        for _ in range(10):
            file = make()
            made.append(weakref.ref(file))
            yield file
            del file

    dp = stage(Fn(src))
    before = open_files()
    for _ in range(ROUNDS):
        it = iter(dp)
        for _ in range(2):
            next(it)
        del it
    assert settled()
    gc.collect()
    assert len(made) >= ROUNDS
    assert [ref for ref in made if ref() is not None] == []
    assert open_files() == before


def test_the_old_iterator_says_that_it_is_invalid(stage: Chain) -> None:
    """case 33"""
    dp = stage(IterableWrapper(range(20)))
    a = iter(dp)
    assert next(a) == 0
    b = iter(dp)
    assert next(b) == 0
    with pytest.raises(RuntimeError, match="invalidated"):
        next(a)
    assert list(b) == list(range(1, 20))


def test_the_old_worker_keeps_its_own_error_to_itself(
    stage: Chain, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """case 33, the worker of the old iterator is inside the source, and meets the source's own complaint later."""
    noise: list[Any] = []
    monkeypatch.setattr("threading.excepthook", noise.append)
    monkeypatch.setattr(sys, "unraisablehook", noise.append)
    epochs = 0

    class Complains(IterDataPipe):
        def __iter__(self) -> Iterator[int]:
            nonlocal epochs
            epochs += 1
            for number in range(10):
                if epochs == 1 and number == 1:
                    gate.wait()
                yield number

    dp = stage(Complains(), close_timeout=0.1)
    a = iter(dp)
    assert next(a) == 0
    assert gate.reached.wait(5)
    old = set(workers())
    with pytest.warns(RuntimeWarning, match="__iter__"):
        b = iter(dp)
    assert next(b) == 0
    gate.opened.set()
    assert eventually(lambda: not any(thread.is_alive() for thread in old))
    assert list(b) == list(range(1, 10))
    with pytest.raises(RuntimeError, match="invalidated"):
        next(a)
    assert noise == []


def test_one_stage_before_a_fork_gives_both_branches_the_same_items(stage: Chain) -> None:
    """case 34, the answer: one stage in front of the fork."""
    left, right = stage(IterableWrapper(range(20)).map(abs)).fork(2)
    assert list(left.zip(right)) == [(i, i) for i in range(20)]


def test_two_stages_behind_a_fork_give_an_error_and_no_wrong_pair(gate: Gate) -> None:
    """case 34: torch's fork is not made for two threads; its own error comes out, in time."""
    left, right = Numbers(20, lambda number: gate.wait() if number == 3 else None).fork(2)
    a, b = iter(left.thread_prefetch(2)), iter(right.thread_prefetch(2))
    assert next(a) == 0
    assert gate.reached.wait(5)
    seen: list[Any] = []
    with pytest.raises((ValueError, IndexError)):
        seen.extend(itertools.islice(b, 20))
    threading.Timer(0.0, gate.opened.set).start()
    a.close()
    b.close()
    assert settled()
