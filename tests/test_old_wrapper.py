"""What the wrapper from the tutorials does, beside what `prefetch` does: a test for each cell of the README's table."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import simcuda
from contract import observe
from helpers import eventually, workers
from old_wrapper import OldWrapper
from sidestream import prefetch


class Pair(NamedTuple):
    x: torch.Tensor
    y: int


class Numbers:
    """A loader of 0, 1, ... that counts its epochs, and fails at an item where it is told to."""

    def __init__(self, n: int = 5, fails_at: int | None = None) -> None:
        self.n = n
        self.fails_at = fails_at
        self.epochs = 0

    def __iter__(self) -> Iterator[int]:
        self.epochs += 1
        for number in range(self.n):
            if number == self.fails_at:
                raise LookupError(number)
            yield number

    def __len__(self) -> int:
        return self.n


class Leash:
    """Passes a loader on until the test is over: the old wrapper's thread ends at nothing but an error."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.over = False

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            if self.over:
                raise InterruptedError
            yield batch

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


@pytest.fixture
def old() -> Iterator[Callable[..., OldWrapper]]:
    """Makes old wrappers, and ends their threads by force when the test is over."""
    made: list[OldWrapper] = []

    def make(loader: Any, device: Any = "cpu") -> OldWrapper:
        made.append(OldWrapper(Leash(loader), device))
        return made[-1]

    yield make
    for wrapper in made:
        wrapper.loader.over = True
        while wrapper.worker.is_alive():
            while not wrapper.queue.empty():
                wrapper.queue.get()
            wrapper.worker.join(0.01)


def large(number: int) -> torch.Tensor:
    return torch.full((1 << 16,), float(number))


# Waits for its copies


def test_the_old_one_hands_over_batches_before_they_are_copied(old: Any, sim: simcuda.Simulator) -> None:
    """Under the schedule `late` a copy runs when something waits for it. Here nothing does: all five are unwritten."""
    batches = itertools.islice(old([large(number) for number in range(5)], "cuda"), 5)
    assert [torch.equal(batch.cpu(), large(number)) for number, batch in enumerate(batches)] == [False] * 5


def test_ours_lets_the_stream_wait_for_the_copies(device: torch.device) -> None:
    batches = list(prefetch([large(number) for number in range(5)], device))
    assert [torch.equal(batch.cpu(), large(number)) for number, batch in enumerate(batches)] == [True] * 5


# Keeps types


def samples() -> list[Any]:
    return [(torch.ones(1), 2), Pair(torch.ones(1), 2), [torch.ones(1), 2]]


def test_the_old_one_turns_tuples_into_lists(old: Any) -> None:
    assert [type(sample) for sample in old(samples())] == [list, list, list]


def test_ours_keeps_the_types_of_samples() -> None:
    assert [type(sample) for sample in prefetch(samples(), "cpu")] == [tuple, Pair, list]


def test_ours_keeps_the_types_of_samples_that_it_moves(device: torch.device) -> None:
    assert [type(sample) for sample in prefetch(samples(), device)] == [tuple, Pair, list]


# Ends


def test_the_old_one_begins_epochs_that_nobody_asked_for(old: Any) -> None:
    source = Numbers()
    assert list(old(source)) == [0, 1, 2, 3, 4]
    assert eventually(lambda: source.epochs == 2)


def test_ours_ends_with_the_epoch() -> None:
    source = Numbers()
    assert list(prefetch(source, "cpu")) == [0, 1, 2, 3, 4]
    assert (source.epochs, eventually(lambda: workers() == [])) == (1, True)
    assert source.epochs == 1


def test_the_old_one_starts_to_load_when_it_is_built(old: Any) -> None:
    source = Numbers()
    old(source)
    assert eventually(lambda: source.epochs == 1)


def test_ours_starts_to_load_at_the_first_next() -> None:
    source = Numbers()
    loader = iter(prefetch(source, "cpu"))
    assert (source.epochs, workers()) == (0, [])
    assert (next(loader), source.epochs) == (0, 1)


# Frees its thread


def test_the_old_one_leaks_its_thread(old: Any) -> None:
    """Its own thread holds it, so that it is never collected; a full queue holds the thread."""
    wrapper = old(Numbers())
    thread, queue = wrapper.worker, wrapper.queue
    assert list(wrapper) == [0, 1, 2, 3, 4]
    del wrapper
    assert eventually(queue.full)
    assert thread.is_alive()


@pytest.mark.parametrize("taken", [5, 2], ids=["whole epoch", "break"])
def test_ours_frees_its_threads(taken: int) -> None:
    for number in prefetch(Numbers(), "cpu"):
        if number == taken - 1:
            break
    assert eventually(lambda: workers() == [])


# Errors


def test_the_old_one_swallows_errors(old: Any) -> None:
    wrapper = old(Numbers(fails_at=2))
    assert eventually(lambda: not wrapper.worker.is_alive())
    assert list(wrapper) == [0, 1]  # a short epoch, and not a word


def test_ours_raises_errors_after_the_batches_before_them() -> None:
    assert observe(prefetch(Numbers(fails_at=2), "cpu")) == ([0, 1], LookupError, (2,))


# Break


def test_the_old_one_goes_on_with_old_batches_after_a_break(old: Any) -> None:
    wrapper = old(Numbers())
    assert list(itertools.islice(wrapper, 2)) == [0, 1]
    assert list(wrapper) == [2, 3, 4, 0, 1]


def test_ours_begins_anew_after_a_break() -> None:
    loader = prefetch(Numbers(), "cpu")
    assert list(itertools.islice(loader, 2)) == [0, 1]
    assert list(loader) == [0, 1, 2, 3, 4]


# Length and attributes


class Endless(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return itertools.count()


def test_the_old_one_has_three_attributes_of_its_loader(old: Any) -> None:
    source = DataLoader(range(6), batch_size=2)
    wrapper = old(source)
    assert (len(wrapper), wrapper.dataset, wrapper.sampler) == (3, source.dataset, source.sampler)
    assert [hasattr(wrapper, name) for name in ("batch_size", "drop_last", "collate_fn")] == [False] * 3


def test_ours_has_the_length_and_all_public_attributes() -> None:
    source = DataLoader(range(6), batch_size=2)
    loader = prefetch(source, "cpu")
    assert (len(loader), loader.dataset, loader.sampler) == (3, source.dataset, source.sampler)
    assert (loader.batch_size, loader.drop_last, loader.collate_fn) == (2, False, source.collate_fn)


def test_the_old_one_cannot_do_without_a_length(old: Any) -> None:
    wrapper = old(DataLoader(Endless(), batch_size=2))
    with pytest.raises(TypeError):
        next(iter(wrapper))


def test_ours_can_do_without_a_length() -> None:
    loader = prefetch(DataLoader(Endless(), batch_size=2), "cpu")
    assert [batch.tolist() for batch in itertools.islice(loader, 2)] == [[0, 1], [2, 3]]


# next(loader), which both have


def test_both_can_be_asked_by_next(old: Any) -> None:
    wrapper, loader = old(Numbers()), prefetch(Numbers(), "cpu")
    assert [next(wrapper) for _ in range(5)] == [next(loader) for _ in range(5)] == [0, 1, 2, 3, 4]
    for one in (wrapper, loader):
        with pytest.raises(StopIteration):
            next(one)
    loader.close()
