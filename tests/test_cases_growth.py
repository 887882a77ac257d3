"""Reported gaps after resuming, and growth over epochs: no item is skipped; threads, items and memory stay bounded."""

from __future__ import annotations

import copy
import ctypes
import gc
import itertools
import os
import pickle
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import IterDataPipe

from contract import (
    BOTH_ORDERS,
    STAGES,
    Chain,
    DataLoader2,
    InProcessReadingService,
    Item,
    Items,
    IterableWrapper,
    scenario,
)
from helpers import Fn, eventually, settled, workers

EPOCHS = 40
LOADER_EPOCHS = 15


# `DataLoader2` draws its seed in `fork_rng`, which says so where there is more than one device.
pytestmark = pytest.mark.filterwarnings("ignore:CUDA reports that you have:UserWarning")


@pytest.fixture(params=BOTH_ORDERS)
def stage(request: pytest.FixtureRequest) -> Chain:
    return STAGES[request.param]


# Checkpoint and resume. The stages offer none of their own: a restored loader starts its epoch again, from 0.


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("taken", range(7))
def test_a_restored_loader_starts_its_epoch_again(size: int, taken: int) -> None:
    """case 35 and case 37: never a gap, whatever was fetched ahead."""
    for kind in ("prefetch", "move"):
        dp = Chain(((kind, size),))(IterableWrapper(range(6)))
        loader = DataLoader2(dp, reading_service=InProcessReadingService())
        it = iter(loader)
        assert list(itertools.islice(it, taken)) == list(range(6))[:taken]
        state = loader.state_dict()
        again = DataLoader2.from_state(state, InProcessReadingService())
        assert list(again) == list(range(6))
        assert list(it) == list(range(6))[taken:]
        loader.shutdown()
        again.shutdown()


def test_the_count_is_of_items_delivered_not_of_items_fetched() -> None:
    """case 36"""
    source = Items(range(50))
    dp = source.thread_prefetch(5)
    it = iter(dp)
    assert [next(it) for _ in range(3)] == [0, 1, 2]
    assert eventually(lambda: source.pulls >= 8)
    assert dp._number_of_samples_yielded == 3
    assert next(it) == 3
    it.close()


def test_asking_for_state_resets_nothing(stage: Chain) -> None:
    """case 38: before `iter`, between `iter` and the first `next`, in mid-epoch, and after the end."""
    source = Items(range(5))
    dp = stage(source)

    def ask() -> None:
        pickle.dumps(dp)
        copy.deepcopy(dp)
        DataLoader2(dp).state_dict()

    for epoch in range(1, 4):
        ask()
        it = iter(dp)
        ask()
        assert source.resets == epoch - 1
        assert next(it) == 0
        ask()
        assert list(it) == [1, 2, 3, 4]
        ask()
        assert (source.resets, source.epochs) == (epoch, epoch)


# case 39: a second resume within one epoch: the stages offer no resume, see case 35.


class Until(IterDataPipe):
    """0 to `stop`, an attribute that can be changed."""

    stop = 10

    def __iter__(self) -> Iterator[int]:
        yield from range(self.stop)


def test_only_the_loaders_own_copy_counts(stage: Chain) -> None:
    """case 40"""
    source = Until()
    loader = DataLoader2(stage(source))
    source.stop = 3
    assert list(loader) == list(range(10))
    innermost = loader.datapipe
    while hasattr(innermost, "source_datapipe"):
        innermost = innermost.source_datapipe
    innermost.stop = 4
    assert list(loader) == list(range(4))
    loader.shutdown()


def test_a_copy_and_its_original_share_no_thread_and_no_queue(stage: Chain) -> None:
    """case 40"""
    dp = stage(IterableWrapper(range(50)))
    a = iter(dp)
    assert next(a) == 0
    twin = copy.deepcopy(dp)
    b = iter(twin)
    assert [next(b), next(a), next(b)] == [0, 1, 1]
    assert len(workers()) == 2 * stage.threads
    a.close()
    assert settled(stage.threads)
    assert list(b) == list(range(2, 50))


# Growth


@pytest.fixture
def exact_memory() -> Iterator[None]:
    """Give what is freed back to the system at once: else the C library keeps it, in an arena for each thread."""
    mallopt, mmap_threshold = getattr(ctypes.CDLL(None), "mallopt", lambda *_: 0), -3
    mallopt(mmap_threshold, 1 << 16)
    yield
    mallopt(mmap_threshold, 1 << 25)


def resident() -> int:
    """Bytes of memory that this process holds."""
    getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0)(0)
    return int(Path("/proc/self/status").read_text(encoding="ascii").partition("VmRSS:")[2].split()[0]) << 10


def tensors() -> int:
    """How many tensors there are; a proxy is not asked what it stands for."""
    gc.collect()
    return sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())


@pytest.mark.usefixtures("exact_memory")
def test_nothing_grows_over_epochs_that_are_left_half_way(stage: Chain) -> None:
    """case 41"""

    def src() -> Iterator[torch.Tensor]:
        for number in range(20):
            yield torch.full((1 << 18,), number, dtype=torch.float32)

    dp, sizes = stage(Fn(src)), []
    before = tensors()
    for _ in range(EPOCHS):
        for item in dp:
            if item[0] == 10:
                break
        del item
        assert settled()
        sizes.append(resident())
    assert tensors() == before
    low = [min(sizes[start : start + EPOCHS // 4]) for start in (EPOCHS // 4, 3 * EPOCHS // 4)]
    assert low[1] - low[0] < EPOCHS // 4 << 20  # half of what one item kept in each epoch would make


def test_pipe_and_worker_go_at_once_with_the_last_reference(stage: Chain) -> None:
    """case 42"""
    gc.disable()
    try:
        dp = stage(Fn(itertools.count))
        it = iter(dp)
        next(it)
        gone = weakref.ref(dp)
        del dp, it
        assert gone() is None
        assert settled()
    finally:
        gc.enable()


class Counted(IterDataPipe):
    """New items, and the highest number of them that were alive together."""

    peak = 0

    def __iter__(self) -> Iterator[Item]:
        return iter(self.make, None)

    made = 0

    def make(self) -> Item | None:
        Counted.made += 1
        if Counted.made % 31 == 0:
            return None
        item = Item(bytes(1 << 10))
        Counted.peak = max(Counted.peak, len(Item.alive))
        return item


@pytest.mark.parametrize("service", [None, InProcessReadingService()], ids=["none", "in process"])
def test_only_so_many_items_are_alive_at_any_time(service: InProcessReadingService | None) -> None:
    """case 43; with worker processes the queues between them hold items that no stage of ours has seen."""
    gc.collect()
    Counted.peak = Counted.made = 0
    size = 4
    loader = DataLoader2(Counted().thread_prefetch(size), reading_service=service)
    for _ in range(LOADER_EPOCHS):
        it, count = iter(loader), 0
        while next(it, None) is not None:
            count += 1
        assert count == 30
        assert eventually(lambda: len(Item.alive) == 0)
    assert size <= Counted.peak <= size + 2
    loader.shutdown()


def test_live_items_stay_bounded_in_both_orders(stage: Chain) -> None:
    """case 43: what waits, what each worker has in hand, and one with the consumer."""
    gc.collect()
    Counted.peak = Counted.made = 0
    dp = stage(Counted())
    for _ in range(LOADER_EPOCHS):
        it = iter(dp)
        while next(it, None) is not None:
            pass
    assert Counted.peak <= stage.ahead + 1
    assert threading.active_count() == 1


# Pinned memory on a machine without CUDA


def test_building_for_cuda_touches_no_cuda_and_iterating_without_one_is_a_clear_error() -> None:
    """case 53"""
    scenario(
        """
    source = IterableWrapper([torch.ones(2)])
    cuda, cpu = source.to_cuda_stream("cuda"), source.to_cuda_stream("cpu")
    for dp in (cuda, cpu):
        assert len(dp) == 1
        pickle.loads(pickle.dumps(dp))
        copy.deepcopy(dp)
        traverse_dps(dp)
        iter(dp)
    assert not torch.cuda.is_initialized()
    assert [x.tolist() for x in cpu] == [[1.0, 1.0]]
    it = iter(cuda)
    try:
        next(it)
    except RuntimeError as error:
        assert "cuda" in str(error)
    else:
        raise AssertionError
    assert not torch.cuda.is_initialized()
    assert settled()
    """,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
