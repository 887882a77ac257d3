"""Reported faults of errors: lost, changed, late or repeated ones. Each comes out once, as it was raised."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterDataPipe

from contract import BOTH_ORDERS, STAGES, Chain, Items, IterableWrapper, always, observe, scenario
from helpers import Fn, settled, workers


@pytest.fixture(params=BOTH_ORDERS)
def stage(request: pytest.FixtureRequest) -> Chain:
    return STAGES[request.param]


def test_an_error_after_an_item_comes_after_that_item(stage: Chain) -> None:
    """case 14"""

    def src() -> Iterator[int]:
        yield 1
        raise OSError(5, "disk")

    it = iter(stage(Fn(src)))
    assert next(it) == 1
    with pytest.raises(OSError) as caught:
        next(it)
    assert caught.value.errno == 5
    assert settled()


def test_an_error_in_a_worker_process_reaches_the_consumer() -> None:
    """case 15"""
    out = scenario("""
    warnings.filterwarnings("ignore", "This process", DeprecationWarning)
    class FailingPipe(Numbers):
        def __iter__(self):
            yield 1
            raise ValueError("the disk is full")
    for chain in (
        lambda dp: dp.thread_prefetch(2),
        lambda dp: dp.thread_prefetch(2).to_cuda_stream("cpu"),
        lambda dp: dp.to_cuda_stream("cpu").thread_prefetch(2),
    ):
        service = MultiProcessingReadingService(1, main_prefetch_cnt=0)
        dl = DataLoader2(chain(FailingPipe(3)), reading_service=service)
        it = iter(dl)
        assert next(it) == 1
        try:
            next(it)
        except BaseException as error:
            assert "the disk is full" in str(error), error
            assert "FailingPipe" in str(error), error
            print(type(error).__name__)
        with within(10):
            dl.shutdown()
        del it, dl
        assert eventually(lambda: multiprocessing.active_children() == [])
        assert settled()
    """)
    assert out.split() == ["ValueError"] * 3


def test_a_failed_load_never_serves_the_previous_batch_again(stage: Chain) -> None:
    """case 16"""
    it = iter(stage(Items([torch.tensor(0), torch.tensor(1)], error=RuntimeError("copy failed"))))
    seen: list[Any] = []
    for _ in range(5):
        try:
            seen.append(int(next(it)))
        except (RuntimeError, StopIteration) as error:  # noqa: PERF203 - a consumer that goes on
            seen.append(type(error).__name__)
    assert seen == [0, 1, "RuntimeError", "StopIteration", "StopIteration"]


class Bad(Exception):
    """Cannot be made again from a text."""

    def __init__(self, path: str, *, code: int) -> None:
        super().__init__(path)
        self.code = code


def test_an_exception_with_its_own_constructor_arrives_as_the_same_object(stage: Chain) -> None:
    """case 17"""
    raised: list[Bad] = []

    def reads_a_file() -> Iterator[int]:
        raised.append(Bad("a.bin", code=7))
        raise raised[0]
        yield

    with pytest.raises(Bad) as caught:
        list(stage(Fn(reads_a_file)))
    assert caught.value is raised[0]
    assert caught.value.code == 7
    assert "reads_a_file" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]


class KeywordsOnly(BaseException):
    """Its constructor takes no text."""

    def __init__(self, *, code: int) -> None:
        self.code = code


class Unprintable(BaseException):
    """No text can be had of it."""

    def __str__(self) -> str:
        raise AssertionError("asked for its text")

    __repr__ = __str__


class UnprintableError(Exception):
    """The same, as an ordinary error."""

    __str__ = __repr__ = Unprintable.__str__


@pytest.mark.parametrize("make", [lambda: KeywordsOnly(code=2), Unprintable, UnprintableError])
def test_odd_exception_classes_arrive_as_the_same_object(stage: Chain, make: Callable[[], BaseException]) -> None:
    """case 18"""
    error = make()
    it = iter(stage(Items([0], error=error)))
    assert next(it) == 0
    caught = None
    try:
        next(it)
    except BaseException as out:
        caught = out
    assert caught is error
    assert settled()


def test_stop_iteration_in_a_generator_is_the_same_error_as_without_the_stage(stage: Chain) -> None:
    """case 19 (a)"""

    def src() -> Iterator[int]:
        yield 0
        raise StopIteration

    assert observe(Fn(src))[:2] == ([0], RuntimeError)
    assert observe(stage(Fn(src))) == observe(Fn(src))


class Mapped(IterDataPipe):
    """A hand-written iterator that calls a function which may raise `StopIteration`."""

    def __init__(self, source: IterDataPipe, function: Callable[[Any], Any]) -> None:
        self.source, self.function = source, function

    def __iter__(self) -> Mapped:
        self.it = iter(self.source)
        return self

    def __next__(self) -> Any:
        return self.function(next(self.it))


def stops_at_3(x: int) -> int:
    if x == 3:
        raise StopIteration
    return x


def test_stop_iteration_from_a_function_ends_where_the_bare_pipe_ends(stage: Chain) -> None:
    """case 19 (b): through a hand-written `__next__` it is an end, through a generator pipe an error."""
    pipes: list[Callable[[], IterDataPipe]] = [
        lambda: Mapped(IterableWrapper(range(10)), stops_at_3),
        lambda: IterableWrapper(range(10)).map(stops_at_3),
    ]
    assert [observe(make())[:2] for make in pipes] == [([0, 1, 2], None), ([0, 1, 2], RuntimeError)]
    for make in pipes:
        assert observe(stage(make())) == observe(make())


@pytest.mark.parametrize("error", [lambda: ValueError("x"), lambda: KeyError(7), lambda: KeyError("k", 1), ValueError])
def test_the_stage_adds_no_text_and_leaves_the_arguments_alone(stage: Chain, error: Callable[[], Exception]) -> None:
    """case 20: what torch's own hook adds is there, once, and nothing else."""

    def src() -> Iterator[int]:
        yield 0
        raise error()

    def two_pipes() -> IterDataPipe:
        return Fn(src).map(abs).filter(always)

    assert observe(stage(two_pipes())) == observe(two_pipes())
    assert observe(stage(Items([0], error=error()))) == ([0], type(error()), error().args)


def test_no_error_goes_to_the_thread_or_unraisable_hooks(stage: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    """case 13, the other side: an error is handed on, never printed by the thread as well."""
    noise: list[Any] = []
    monkeypatch.setattr("threading.excepthook", noise.append)
    monkeypatch.setattr(sys, "unraisablehook", noise.append)
    for error in (ValueError("x"), SystemExit(3), KeyboardInterrupt()):
        assert observe(stage(Items([0], error=error)))[:2] == ([0], type(error))
    assert settled()
    assert (noise, workers()) == ([], [])
