"""Every rule of the stages' contract holds for both stages, in both orders, for small and large buffers."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import inspect
import itertools
import pickle
import signal
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import IterDataPipe

import contract
from contract import (
    BOTH_ORDERS,
    STAGES,
    Chain,
    DataLoader2,
    Gate,
    InProcessReadingService,
    Item,
    Items,
    IterableWrapper,
    Numbers,
    SeedGenerator,
    Watched,
    always,
    observe,
    scenario,
    set_graph_random_seed,
    stands_still,
    traverse_dps,
    within,
)
from helpers import Fn, eventually, settled, workers

# `DataLoader2` draws its seed in `fork_rng`, which says so where there is more than one device.
pytestmark = pytest.mark.filterwarnings("ignore:CUDA reports that you have:UserWarning")

LENGTHS = [0, 1, 2, 3, 4, 63, 64, 65, 200]
EXAMPLES = 60
ROUNDS = 20


@pytest.fixture(params=STAGES)
def stage(request: pytest.FixtureRequest) -> Chain:
    return STAGES[request.param]


@pytest.fixture(params=BOTH_ORDERS)
def order(request: pytest.FixtureRequest) -> Chain:
    """One representative of each arrangement, for rules that the buffer size does not touch."""
    return STAGES[request.param]


@pytest.fixture
def gate() -> Iterator[Gate]:
    """Where a source waits; open at the end whatever happened, so that no test holds up the next."""
    gate = Gate()
    yield gate
    gate.opened.set()


@pytest.fixture(params=["prefetch 2", "move 2"])
def single(request: pytest.FixtureRequest) -> Chain:
    return STAGES[request.param]


# Order and completeness


@pytest.mark.parametrize("n", LENGTHS)
def test_items_and_their_order_are_those_of_the_source(stage: Chain, n: int) -> None:
    dp = stage(IterableWrapper(range(n)))
    assert [list(dp) for _ in range(3)] == [list(range(n))] * 3


LINKS = st.lists(st.tuples(st.sampled_from(["prefetch", "move"]), st.integers(1, 5)), min_size=1, max_size=3)
ENDS = st.sampled_from(["close", "drop", "keep"])


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    links=LINKS,
    n=st.integers(0, 12),
    epochs=st.lists(st.tuples(st.integers(0, 14), ENDS), min_size=1, max_size=4),
)
def test_each_epoch_is_a_prefix_of_the_bare_pipe(
    links: list[tuple[str, int]], n: int, epochs: list[tuple[int, str]]
) -> None:
    dp = Chain(tuple(links))(IterableWrapper(range(n)))
    for stop, end in epochs:
        it = iter(dp)
        assert list(itertools.islice(it, stop)) == list(range(n))[:stop]
        if end == "close":
            it.close()
        if end == "drop":
            del it


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    links=LINKS,
    n=st.integers(0, 8),
    error=st.sampled_from([ValueError("x"), KeyError(7), SystemExit(3), None]),
)
def test_an_epoch_looks_like_the_bare_pipe_errors_included(
    links: list[tuple[str, int]], n: int, error: BaseException | None
) -> None:
    source = Items(range(n), error=error)
    dp = Chain(tuple(links))(source)
    assert observe(dp) == observe(source)
    assert observe(dp) == observe(source)


# Start


def test_nothing_starts_before_the_first_next(stage: Chain) -> None:
    source = Items(range(200))
    dp = stage(source)
    assert len(dp) == 200
    pickle.loads(pickle.dumps(dp))
    copy.deepcopy(dp)
    traverse_dps(dp)
    it = iter(dp)
    assert (source.epochs, source.resets, source.pulls, workers()) == (0, 0, 0, [])
    assert next(it) == 0
    assert (source.epochs, source.resets, len(workers())) == (1, 1, stage.threads)
    it.close()


def test_an_iterator_that_was_never_asked_starts_nothing_when_it_ends(stage: Chain) -> None:
    source = Items(range(5))
    dp = stage(source)
    iter(dp).close()
    it = iter(dp)
    it.close()
    it.close()
    with pytest.raises(StopIteration):
        next(it)
    assert (source.epochs, source.pulls, workers()) == (0, 0, [])
    assert list(dp) == list(range(5))


# Bound


def test_it_loads_ahead_and_never_further_than_the_bound(stage: Chain) -> None:
    asked, pulled, overrun = 0, 0, threading.Event()

    def on_pull(number: int) -> None:
        nonlocal pulled
        pulled = number + 1
        if pulled > asked + stage.ahead:
            overrun.set()

    it = iter(stage(Numbers(10_000, on_pull)))
    for _ in range(ROUNDS):
        asked += 1
        next(it)
        wanted = asked + stage.waiting
        assert eventually(lambda wanted=wanted: pulled >= wanted)
    assert not overrun.wait(0.05)
    it.close()
    assert settled()
    assert asked + stage.waiting <= pulled <= asked + stage.ahead
    assert not overrun.is_set()


def mebibytes(count: int) -> torch.Tensor:
    return torch.zeros(count << 20, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("max_bytes", "waiting"),
    [(1, 1), (5 << 19, 2), (3 << 20, 3), (100 << 20, 8)],
    ids=["1 B", "2.5", "3", "100 MiB"],
)
@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: {"a": [x]}], ids=["bare", "nested"])
def test_max_bytes_bounds_what_waits_and_one_item_always_passes(
    max_bytes: int, waiting: int, wrap: Callable[[torch.Tensor], Any]
) -> None:
    pulled, overrun = 0, threading.Event()

    def source() -> Iterator[Any]:
        nonlocal pulled
        for _ in range(40):
            pulled += 1
            if pulled > asked + waiting + 1:
                overrun.set()
            yield wrap(mebibytes(1))

    it = iter(Fn(source).thread_prefetch(8, max_bytes=max_bytes))
    for asked in range(1, ROUNDS):
        next(it)
        assert eventually(lambda asked=asked: pulled >= asked + waiting)
    assert not overrun.wait(0.05)
    assert len(list(it)) == 40 - asked


def test_max_bytes_counts_tensors_only_and_a_huge_item_blocks_nothing() -> None:
    items = [1, "text", mebibytes(2), 2, mebibytes(2), b"bytes", 3]
    out = list(Items(items).thread_prefetch(4, max_bytes=1 << 20))
    assert len(out) == len(items)
    assert all(a is b for a, b in zip(out, items, strict=True))
    pulls = Items(range(10))
    it = iter(pulls.thread_prefetch(4, max_bytes=1))
    assert next(it) == 0
    assert eventually(lambda: pulls.pulls >= 5)
    it.close()


def test_nothing_is_walked_where_no_bytes_are_counted_and_cuda_is_not_in_use() -> None:
    scenario("""
    class Untouchable(dict):
        def __iter__(self):
            raise AssertionError("walked")
        items = keys = values = __len__ = __getitem__ = __iter__
    items = [Untouchable(a=1), Untouchable()]
    out = list(Items(items).thread_prefetch(2))
    assert [id(x) for x in out] == [id(x) for x in items]
    """)


# Items are opaque


class Hostile:
    """Whoever compares it, hashes it or asks for its truth fails."""

    def __eq__(self, other: object) -> bool:
        raise AssertionError("compared")

    def __bool__(self) -> bool:
        raise AssertionError("asked for truth")

    __hash__ = None  # type: ignore[assignment]


OPAQUE = [
    None,
    ValueError("payload"),
    StopIteration(),
    SystemExit(1),
    KeyboardInterrupt(),
    np.zeros(3),
    torch.zeros(2),
    Hostile(),
    Hostile,
    NotImplemented,
    ...,
    threading.Event(),
    lambda: None,
    0,
    "",
    False,
]


def test_items_are_opaque(stage: Chain) -> None:
    out = list(stage(Items(OPAQUE)))
    assert [id(item) for item in out] == [id(item) for item in OPAQUE]


# Errors


class Own(BaseException):
    """Neither an `Exception` nor one of the language's own."""


ERRORS: list[Callable[[], BaseException]] = [
    lambda: ValueError("x"),
    lambda: KeyError(7),
    lambda: OSError(5, "disk"),
    MemoryError,
    lambda: SystemExit(3),
    KeyboardInterrupt,
    GeneratorExit,
    lambda: asyncio.CancelledError("why"),
    StopAsyncIteration,
    lambda: Own(1, 2),
]


@pytest.mark.parametrize("n", [0, 1, 5])
@pytest.mark.parametrize("make", ERRORS, ids=lambda make: type(make()).__name__)
def test_an_error_comes_after_the_items_before_it_as_it_was(
    stage: Chain, make: Callable[[], BaseException], n: int
) -> None:
    error = make()
    args = error.args
    it = iter(stage(Items(range(n), error=error)))
    assert [next(it) for _ in range(n)] == list(range(n))
    with pytest.raises(type(error)) as caught:
        next(it)
    assert caught.value is error
    assert error.args == args
    assert (error.__cause__, error.__context__, getattr(error, "__notes__", [])) == (None, None, [])
    frames = traceback.extract_tb(error.__traceback__)
    assert (contract.__file__, "__next__") in [(frame.filename, frame.name) for frame in frames]
    for _ in range(3):
        with pytest.raises(StopIteration):
            next(it)
    assert settled()


class Unopenable(IterDataPipe):
    """A source that fails before its first item."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __iter__(self) -> Iterator[Any]:
        raise self.error


@pytest.mark.parametrize("make", [lambda: OSError(2, "no such file"), lambda: SystemExit(3)])
def test_a_source_that_cannot_be_opened_says_so_at_the_first_next(
    stage: Chain, make: Callable[[], BaseException]
) -> None:
    error = make()
    it = iter(stage(Unopenable(error)))
    with pytest.raises(type(error)) as caught:
        next(it)
    assert caught.value is error
    with pytest.raises(StopIteration):
        next(it)
    assert settled()


def test_after_an_error_the_pipe_can_be_iterated_again(stage: Chain) -> None:
    dp = stage(Items(range(3), error=ValueError("x")))
    assert [observe(dp) for _ in range(3)] == [([0, 1, 2], ValueError, ("x",))] * 3


def test_after_the_end_there_is_nothing_for_ever(stage: Chain) -> None:
    it = iter(stage(IterableWrapper(range(2))))
    assert list(it) == [0, 1]
    for _ in range(5):
        with pytest.raises(StopIteration):
            next(it)
    it.close()
    assert settled()


# No polling


def test_a_worker_with_full_buffers_does_not_wake_up(order: Chain) -> None:
    it = iter(order(IterableWrapper(range(10_000))))
    next(it)
    assert len(workers()) == order.threads
    for thread in workers():
        assert eventually(lambda thread=thread: stands_still(thread), 3.0)
    it.close()


def test_a_consumer_that_waits_does_not_wake_up(order: Chain, gate: Gate) -> None:
    got: list[int] = []
    dp = order(Numbers(2, lambda number: gate.wait() if number == 1 else None))
    consumer = threading.Thread(target=lambda: got.extend(dp))
    consumer.start()
    assert gate.reached.wait(5)
    for thread in [*workers(), consumer]:
        assert eventually(lambda thread=thread: stands_still(thread), 3.0)
    gate.opened.set()
    consumer.join(5)
    assert got == [0, 1]


def test_a_consumer_that_waits_can_be_interrupted() -> None:
    """And may ask again: nothing is lost by it."""
    assert (
        scenario("""
    def arrangement(name):
        gate, asked = Gate(), threading.Event()
        def src():
            yield 0
            asked.wait(10)
            assert eventually(lambda: stands_still(threading.main_thread()))
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            gate.wait()
            yield 1
        it = iter(STAGES[name](Fn(src)))
        assert next(it) == 0
        with within(5):
            try:
                asked.set()
                next(it)
            except KeyboardInterrupt:
                print("interrupted")
        gate.opened.set()
        assert list(it) == [1]
        assert settled()
    for name in BOTH_ORDERS:
        arrangement(name)
    """)
        == "interrupted\n" * 4
    )


# Stop


class Cleanup:
    """An endless source, and on which threads its `finally` blocks ran."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []

    def __call__(self) -> Iterator[int]:
        try:
            yield from itertools.count()
        finally:
            self.threads.append(threading.current_thread())


def leave_by_break(dp: IterDataPipe) -> None:
    for item in dp:
        if item == 3:
            break


def leave_by_break_at_once(dp: IterDataPipe) -> None:
    for _ in dp:
        break


def leave_by_del(dp: IterDataPipe) -> None:
    it = iter(dp)
    next(it)
    del it


def leave_by_collection(dp: IterDataPipe) -> None:
    cycle: list[Any] = [iter(dp)]
    next(cycle[0])
    cycle.append(cycle)
    del cycle
    gc.collect()


def leave_by_close(dp: IterDataPipe) -> None:
    it = iter(dp)
    next(it)
    it.close()
    with pytest.raises(StopIteration):
        next(it)


def leave_by_closing_twice(dp: IterDataPipe) -> None:
    it = iter(dp)
    next(it)
    it.close()
    it.close()


def leave_by_contextlib_closing(dp: IterDataPipe) -> None:
    with contextlib.closing(iter(dp)) as it:
        assert [next(it), next(it)] == [0, 1]


def leave_by_new_iterator(dp: IterDataPipe) -> None:
    old = iter(dp)
    next(old)
    iter(dp)


def fails_at_3(x: int) -> int:
    return 1 // (3 - x)


def leave_by_error_behind(dp: IterDataPipe) -> None:
    assert observe(dp.map(fails_at_3))[:2] == ([0, 0, 1], ZeroDivisionError)


WAYS = [value for name, value in list(globals().items()) if name.startswith("leave_by_")]


@pytest.mark.parametrize("leave", WAYS, ids=lambda way: way.__name__)
def test_however_a_loop_ends_the_workers_end_and_the_source_is_closed_there(
    stage: Chain, leave: Callable[[IterDataPipe], None]
) -> None:
    cleanup = Cleanup()
    with within(2.0):
        leave(stage(Fn(cleanup)))
        assert eventually(lambda: len(cleanup.threads) == 1)
        assert settled()
    assert cleanup.threads[0] is not threading.main_thread()


def test_a_loader_that_ends_with_an_error_ends_the_workers(stage: Chain) -> None:
    loader = DataLoader2(stage(Watched(10_000)).map(fails_at_3), reading_service=InProcessReadingService())
    assert observe(loader)[:2] == ([0, 0, 1], ZeroDivisionError)
    with within(2.0):
        assert settled()
    assert len(Watched.pulled) <= 4 + stage.ahead


def test_a_loader_that_is_dropped_ends_the_workers(stage: Chain) -> None:
    loader = DataLoader2(stage(Watched(10_000)))
    it = iter(loader)
    assert next(it) == 0
    loader.shutdown()
    del it, loader
    with within(2.0):
        assert settled()
    assert len(Watched.pulled) <= 1 + stage.ahead


@pytest.mark.parametrize("leave", [leave_by_close, leave_by_closing_twice, leave_by_contextlib_closing])
def test_close_returns_when_the_worker_is_gone(single: Chain, leave: Callable[[IterDataPipe], None]) -> None:
    cleanup = Cleanup()
    leave(single(Fn(cleanup)))
    assert workers() == []
    assert len(cleanup.threads) == 1


def test_close_waits_for_the_item_in_progress(single: Chain, gate: Gate) -> None:
    it = iter(single(Numbers(5, lambda number: gate.wait() if number == 1 else None), close_timeout=30.0))
    assert next(it) == 0
    assert gate.reached.wait(5)
    timer = threading.Timer(0.1, gate.opened.set)
    timer.start()
    with within(5.0):
        it.close()
    assert gate.opened.is_set()
    timer.join()
    assert workers() == []


class Closable(IterDataPipe):
    """A user's pipe that is its own iterator and has a `close` of its own."""

    def __init__(self) -> None:
        self.closed = 0
        self.number = -1

    def __iter__(self) -> Closable:
        return self

    def __next__(self) -> int:
        self.number += 1
        return self.number

    def close(self) -> None:
        self.closed += 1


def test_the_users_own_close_is_not_called(order: Chain) -> None:
    source = Closable()
    it = iter(order(source))
    assert next(it) == 0
    it.close()
    assert settled()
    assert source.closed == 0


def block_at(position: int, gate: Gate, pulls: list[int]) -> Callable[[], Iterator[int]]:
    """A generator function that stands at the gate before item `position`."""

    def stands_here() -> Iterator[int]:
        for number in range(position + 5):
            pulls.append(number)
            if number == position:
                gate.wait()
            yield number

    return stands_here


def test_a_stuck_worker_is_left_with_one_warning_that_shows_where_it_stands(stage: Chain, gate: Gate) -> None:
    pulls: list[int] = []
    it = iter(stage(Fn(block_at(1, gate, pulls)), close_timeout=0.2))
    assert next(it) == 0
    assert gate.reached.wait(5)
    start = time.monotonic()
    with pytest.warns(RuntimeWarning) as caught, within(1.2):
        it.close()
    assert time.monotonic() - start >= 0.2
    assert len(caught) == 1
    assert "stands_here" in str(caught[0].message)
    gate.opened.set()
    assert settled()
    assert pulls == [0, 1]


def test_a_worker_that_was_left_behind_is_not_waited_for_again(stage: Chain, gate: Gate) -> None:
    dp = stage(Fn(block_at(1, gate, [])), close_timeout=0.3)
    it = iter(dp)
    assert next(it) == 0
    assert gate.reached.wait(5)
    with pytest.warns(RuntimeWarning):
        it.close()
    with within(0.2):
        it.close()
        iter(dp)
        del it
    gate.opened.set()
    assert settled()


def test_finalizers_never_wait(stage: Chain, gate: Gate) -> None:
    pulls: list[int] = []
    it = iter(stage(Fn(block_at(1, gate, pulls)), close_timeout=30.0))
    next(it)
    assert gate.reached.wait(5)
    with within(1.0):
        del it
    gate.opened.set()
    assert settled()
    assert pulls == [0, 1]


def test_a_stuck_worker_never_touches_a_later_epoch(order: Chain, gate: Gate) -> None:
    first = True

    def source() -> Iterator[tuple[str, int]]:
        nonlocal first
        tag, first = "old" if first else "new", False
        for number in range(20):
            if tag == "old" and number == 1:
                gate.wait()
            yield tag, number

    dp = order(Fn(source), close_timeout=0.1)
    old = iter(dp)
    assert next(old) == ("old", 0)
    assert gate.reached.wait(5)
    with pytest.warns(RuntimeWarning):
        new = iter(dp)
    seen = [next(new)]
    gate.opened.set()
    assert seen + list(new) == [("new", number) for number in range(20)]
    with pytest.raises(RuntimeError, match="invalidated"):
        next(old)
    assert settled()


@pytest.mark.parametrize("between", [lambda dp: dp, lambda dp: dp.map(int).filter(always)])
@pytest.mark.parametrize("levels", [2, 3, 4])
def test_nested_stages_close_at_once(levels: int, between: Callable[[IterDataPipe], IterDataPipe]) -> None:
    cleanup = Cleanup()
    dp: IterDataPipe = Fn(cleanup)
    for level in range(levels):
        dp = between(dp.thread_prefetch(2) if level % 2 else dp.to_cuda_stream("cpu", buffer_size=2))
    it = iter(dp)
    assert next(it) == 0
    assert len(workers()) == levels
    for thread in workers():
        assert eventually(lambda thread=thread: stands_still(thread), 3.0)
    with within(1.0):
        it.close()
        assert eventually(lambda: len(cleanup.threads) == 1)
        assert settled()


def test_nested_stages_wait_once_for_a_stuck_source(gate: Gate) -> None:
    pulls: list[int] = []
    dp: IterDataPipe = Fn(block_at(1, gate, pulls))
    for _ in range(4):
        dp = dp.map(int).thread_prefetch(2, close_timeout=0.5)
    it = iter(dp)
    assert next(it) == 0
    assert gate.reached.wait(5)
    with pytest.warns(RuntimeWarning) as caught, within(1.5):
        it.close()
    assert len(caught) == 1
    assert "stands_here" in str(caught[0].message)
    gate.opened.set()
    assert settled()
    assert pulls == [0, 1]


def test_garbage_collection_may_stop_a_worker_from_anywhere() -> None:
    """Also from its own thread, and from inside another stage's hand-off: every allocation may collect here."""
    scenario("""
    def arrangement(name):
        stage = STAGES[name]
        def leave_in_a_cycle():
            box = [iter(stage(IterableWrapper(range(100))))]
            next(box[0])
            box.append(box)
        dropped = Gate()
        def own():
            yield 0
            dropped.wait()
            gc.collect()
            yield 1
        gc.disable()
        box = [iter(stage(Fn(own)))]
        next(box[0]); box.append(box)
        del box
        dropped.opened.set()
        assert settled(), workers()
        gc.enable()
        gc.set_threshold(1)
        def noisy():
            for i in range(40):
                leave_in_a_cycle()
                yield i
        for i in stage(Fn(noisy)):
            leave_in_a_cycle()
        gc.collect()
        assert i == 39
        assert settled(), workers()
    for name in BOTH_ORDERS:
        arrangement(name)
    """)


# Epochs and iterators


def test_epochs_share_nothing(stage: Chain) -> None:
    epoch = 0

    def source() -> Iterator[tuple[int, int]]:
        tag = epoch
        for number in range(20):
            yield tag, number

    dp = stage(Fn(source))
    for epoch in range(ROUNDS):
        stop = epoch % 7 + 1
        assert list(itertools.islice(dp, stop)) == [(epoch, number) for number in range(stop)]


def test_a_new_iterator_ends_the_old_one(stage: Chain) -> None:
    dp = stage(IterableWrapper(range(200)))
    old = iter(dp)
    assert next(old) == 0
    new = iter(dp)
    assert next(new) == 0
    assert settled(stage.threads)
    with pytest.raises(RuntimeError, match="invalidated"):
        next(old)
    assert list(new) == list(range(1, 200))


# Fork, pickle, copy, graph walk


def test_a_forked_child_starts_afresh_and_the_parent_goes_on() -> None:
    scenario("""
    warnings.filterwarnings("ignore", "This process", DeprecationWarning)
    def in_the_child(how):
        global it
        with within(1.0):
            if how == "close":
                it.close()
            if how == "drop":
                del it
            assert list(dp) == list(range(50))
            assert settled()
    for name, stage in STAGES.items():
        for how in ("close", "drop", "leave"):
            dp = stage(IterableWrapper(range(50)))
            it = iter(dp)
            assert next(it) == 0
            pid = os.fork()
            if pid == 0:
                in_the_child(how)
                if how == "leave" and name in BOTH_ORDERS:
                    sys.exit(0)  # through the whole of the interpreter's end
                os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0, (name, how)
            assert list(it) == list(range(1, 50)), name
    assert settled()
    """)


COPIES: dict[str, Callable[[IterDataPipe], IterDataPipe]] = {
    "pickle": lambda dp: pickle.loads(pickle.dumps(dp)),
    "deepcopy": copy.deepcopy,
    "loader": lambda dp: DataLoader2(dp).datapipe,
    "graph walk": lambda dp: next(iter(traverse_dps(dp).values()))[0],
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("taken", [0, 3, 30])
def test_it_can_be_copied_at_any_moment(stage: Chain, how: str, taken: int) -> None:
    dp = stage(IterableWrapper(range(30)))
    it = iter(dp)
    assert [next(it) for _ in range(taken)] == list(range(taken))
    running = len(workers())
    twin = COPIES[how](dp)
    assert len(workers()) == running
    if how != "graph walk":
        assert list(twin) == list(range(30))
    assert list(it) == list(range(taken, 30))


class Unpicklable(IterDataPipe):
    """Items that no pickler takes."""

    def __iter__(self) -> Iterator[Any]:
        for _ in range(20):
            yield [threading.Lock(), lambda: None]


@pytest.mark.parametrize("how", COPIES)
def test_waiting_items_are_never_pickled(stage: Chain, how: str) -> None:
    it = iter(dp := stage(Unpicklable()))
    next(it)
    twin = COPIES[how](dp)
    assert type(twin) is type(dp)
    assert len(list(it)) == 19


def test_its_state_is_its_configuration_at_any_moment(stage: Chain) -> None:
    dp = stage(IterableWrapper(range(9)))
    before = dict(dp.__getstate__())
    it = iter(dp)
    next(it)
    during = dict(dp.__getstate__())
    list(it)
    assert before == during == dict(dp.__getstate__())


def test_the_state_hook_is_honoured(order: Chain) -> None:
    dp = order(IterableWrapper(range(3)))
    IterDataPipe.set_getstate_hook(lambda state: ("hooked", sorted(state)))
    try:
        assert dp.__getstate__()[0] == "hooked"
    finally:
        IterDataPipe.set_getstate_hook(None)


def test_when_seeds_are_given_it_takes_none_and_ends_the_old_epoch(order: Chain) -> None:
    """A loader resets its worker processes after it has given seeds and before it calls `iter`."""
    dp = order(IterableWrapper(range(200)))
    it = iter(dp)
    next(it)
    given, expected = SeedGenerator(1), SeedGenerator(1)
    set_graph_random_seed(dp, given)
    assert settled()
    assert given.generate_seed() == expected.generate_seed()
    assert not hasattr(dp, "set_seed")
    with pytest.raises(RuntimeError, match="was stopped before its source had ended"):
        next(it)
    assert list(dp) == list(range(200))


def test_looking_at_a_stage_changes_nothing(order: Chain) -> None:
    """torch looks at all attributes of a pipe when it writes an error message."""
    dp = order(IterableWrapper(range(200)))
    it = iter(dp)
    assert next(it) == 0
    inspect.getmembers(dp)
    assert (repr(dp), len(workers())) == (type(dp).__qualname__, order.threads)
    assert list(it) == list(range(1, 200))


# Pause, resume, limit


def test_limit_pauses_and_resume_goes_on_with_nothing_lost(stage: Chain) -> None:
    loader = DataLoader2(stage(Watched(9)), reading_service=InProcessReadingService())
    it = iter(loader)
    it.limit(2)
    seen = [list(it)]
    for _ in range(4):
        assert Watched.stands_still()
        it.resume()
        seen.append(list(it))
    assert seen == [[0, 1], [2, 3], [4, 5], [6, 7], [8]]
    loader.shutdown()


def test_pause_and_resume_do_nothing_where_there_is_nothing_to_do(stage: Chain) -> None:
    dp = stage(IterableWrapper(range(5)))
    dp.resume()
    dp.pause()
    dp.resume()
    it = iter(dp)
    dp.pause()
    dp.resume()
    assert next(it) == 0
    dp.pause()
    dp.pause()
    dp.resume()
    dp.resume()
    assert list(it) == [1, 2, 3, 4]
    dp.pause()
    dp.resume()
    assert list(dp) == [0, 1, 2, 3, 4]


def test_pause_stands_between_items(single: Chain, gate: Gate) -> None:
    pulls: list[int] = []
    dp = single(Fn(block_at(1, gate, pulls)), close_timeout=30.0)
    it = iter(dp)
    assert next(it) == 0
    assert gate.reached.wait(5)
    timer = threading.Timer(0.1, gate.opened.set)
    timer.start()
    dp.pause()
    assert gate.opened.is_set()
    assert pulls == [0, 1]
    timer.join()
    dp.resume()
    assert list(it) == [1, 2, 3, 4, 5]


def test_pause_gives_up_on_a_blocked_source_and_nothing_is_lost(stage: Chain, gate: Gate) -> None:
    pulls: list[int] = []
    dp = stage(Fn(block_at(1, gate, pulls)), close_timeout=0.2)
    it = iter(dp)
    assert next(it) == 0
    assert gate.reached.wait(5)
    start = time.monotonic()
    with pytest.raises(TimeoutError), within(1.2):
        dp.pause()
    assert time.monotonic() - start >= 0.2
    gate.opened.set()
    dp.resume()
    assert list(it) == [1, 2, 3, 4, 5]


def test_a_paused_epoch_can_be_left(stage: Chain) -> None:
    dp = stage(IterableWrapper(range(200)))
    it = iter(dp)
    next(it)
    dp.pause()
    with within(1.0):
        it.close()
    assert settled()
    it = iter(dp)
    next(it)
    dp.pause()
    with within(1.0):
        del it
        assert settled()
    assert list(dp) == list(range(200))


# Length and arguments


def test_length_is_the_sources_and_is_never_kept(stage: Chain) -> None:
    source = Items(range(7))
    dp = stage(source)
    assert len(dp) == 7
    source.items.append(7)
    assert len(dp) == 8


def test_where_the_source_has_no_length_the_error_names_the_stage(stage: Chain) -> None:
    with pytest.raises(TypeError, match=r"(ThreadPrefetcher|CudaStreamMover).*doesn't have valid length"):
        len(stage(Numbers(3)))


STAGE_CALLS: dict[str, Callable[..., IterDataPipe]] = {
    "ThreadPrefetcher": lambda **options: IterableWrapper(range(3)).thread_prefetch(**options),
    "CudaStreamMover": lambda **options: IterableWrapper(range(3)).to_cuda_stream("cpu", **options),
}
WRONG = [("buffer_size", value) for value in (0, -1, True, False, 2.0, 1.5, "2", None)] + [
    ("close_timeout", value) for value in (-0.1, float("nan"), "soon", True)
]


@pytest.mark.parametrize(("argument", "value"), WRONG)
@pytest.mark.parametrize("name", STAGE_CALLS)
def test_wrong_arguments_are_errors_when_building(name: str, argument: str, value: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=argument):
        STAGE_CALLS[name](**{argument: value})


@pytest.mark.parametrize("value", [-1, True, 1.5, "many"])
def test_a_wrong_max_bytes_is_an_error_when_building(value: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="max_bytes"):
        IterableWrapper(range(3)).thread_prefetch(max_bytes=value)


@pytest.mark.parametrize("name", STAGE_CALLS)
def test_the_defaults_and_the_forms_give_the_stage_of_that_name(name: str) -> None:
    dp = STAGE_CALLS[name]()
    assert type(dp).__name__ == name
    assert list(dp) == [0, 1, 2]


# Items are not kept


class Fresh(IterDataPipe):
    """Items made on the spot by a function, until it gives `None`; nothing here keeps one."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make

    def __iter__(self) -> Iterator[Any]:
        return iter(self.make, None)


def test_no_stage_keeps_an_item_that_it_handed_over(stage: Chain, gate: Gate) -> None:
    made = 0

    def make() -> Item | None:
        nonlocal made
        made += 1
        if made == 4:
            gate.wait()
        return Item() if made <= 6 else None

    it = iter(stage(Fresh(make)))
    for number in range(6):
        if number == 3:
            gate.opened.set()
        item = next(it)
        gone = weakref.ref(item)
        del item
        assert eventually(lambda gone=gone: gone() is None, 2.0), number
    with pytest.raises(StopIteration):
        next(it)
    assert settled()


def test_items_that_were_not_delivered_are_let_go(stage: Chain) -> None:
    it = iter(stage(Fresh(Item)))
    next(it)
    it.close()
    assert settled()
    gc.collect()
    assert len(Item.alive) == 0


def test_the_pipe_goes_with_its_last_reference_while_it_runs(stage: Chain) -> None:
    gc.disable()
    try:
        dp = stage(IterableWrapper(range(10_000)))
        it = iter(dp)
        next(it)
        gone = weakref.ref(dp)
        del dp, it
        assert gone() is None
        assert settled()
    finally:
        gc.enable()


# State around the consumer


def test_the_consumers_thread_is_left_as_it_was(stage: Chain) -> None:
    def state() -> tuple[Any, ...]:
        return (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_default_device(),
            torch.get_default_dtype(),
            torch.get_num_threads(),
            torch.is_autocast_cache_enabled(),
            signal.getsignal(signal.SIGINT),
        )

    before = state()
    with torch.no_grad(), torch.autocast("cpu"):
        inside = state()
        for _ in stage(IterableWrapper(range(5))):
            assert state() == inside
        assert state() == inside
    assert state() == before


def test_the_iterator_may_be_handed_to_another_thread(stage: Chain) -> None:
    it = iter(stage(IterableWrapper(range(10))))
    seen = [next(it)]
    thread = threading.Thread(target=lambda: seen.extend(itertools.islice(it, 4)))
    thread.start()
    thread.join(5)
    assert seen + list(it) == list(range(10))


def test_nothing_warns_in_an_ordinary_epoch(stage: Chain) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert list(stage(IterableWrapper(range(5)))) == list(range(5))
    assert caught == []
