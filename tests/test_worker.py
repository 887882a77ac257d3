"""Faults that a reading of the worker found, each set up so that it shows every time."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch.utils.data import IterDataPipe
from torch.utils.data.graph_settings import apply_random_seed

from contract import Gate, IterableWrapper
from helpers import Fn, eventually, run_child, settled, workers
from sidestream import worker as worker_module
from sidestream.stage import Stage
from sidestream.worker import BackgroundIterator, Worker


class Plain:
    """A courier that changes nothing, but that `issue` may fail."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error

    def before_next(self) -> None:
        pass

    def issue(self, item: Any) -> Any:
        if self.error is not None:
            raise self.error
        return item

    def receive(self, parcel: Any) -> Any:
        return parcel


def background(source: Any, courier: Plain | None = None) -> BackgroundIterator:
    return BackgroundIterator(source, lambda: courier or Plain(), Worker("worker", 2.0), buffer_size=2)


def at_a_gate(after: Callable[[], Iterator[int]] = lambda: iter(())) -> tuple[BackgroundIterator, Gate]:
    """An iterator whose first item is taken, and whose source waits at the gate; what comes `after` it."""
    gate = Gate()

    def source() -> Iterator[int]:
        yield 0
        gate.wait()
        yield from after()

    it = background(Fn(source))
    assert next(it) == 0
    assert gate.reached.wait(5)
    return it, gate


def bad_ending() -> Iterator[int]:
    try:
        yield from range(5)
    finally:
        raise KeyError("in finally")


def test_a_source_whose_close_raises_says_so_and_the_worker_ends(monkeypatch):
    reports: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", reports.append)
    it = background(bad_ending())
    assert next(it) == 0
    it.close()
    assert settled()
    assert [(report.exc_type, report.exc_value.args) for report in reports] == [(KeyError, ("in finally",))]


def test_it_does_not_hide_the_error_that_came_first(monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    error = ValueError("first")
    it = background(bad_ending(), Plain(error))
    with pytest.raises(ValueError) as caught:
        next(it)
    assert caught.value is error
    assert list(it) == []


def test_an_error_while_the_ambient_state_is_set_comes_out_of_next(monkeypatch):
    error = RuntimeError("no such device")

    def state(*_: Any) -> None:
        raise error

    monkeypatch.setattr(worker_module, "capture", lambda: state)
    it = background(range(3))
    with pytest.raises(RuntimeError) as caught:
        next(it)
    assert caught.value is error


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("runs", [False, True])
def test_a_start_that_fails_or_is_interrupted_loses_nothing(monkeypatch, error: BaseException, runs: bool):
    """`Thread.start` waits for the thread, so Ctrl-C may come out of it when the thread runs already."""
    start = threading.Thread.start

    def fail(thread: threading.Thread) -> None:
        if runs:
            start(thread)
        raise error

    it = background(range(5))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(type(error)) as caught:
            next(it)
    assert caught.value is error
    assert list(it) == list(range(5))
    assert settled()


def test_an_error_that_meets_a_stop_is_no_quiet_end():
    def late() -> Iterator[int]:
        raise ValueError("late")

    it, gate = at_a_gate(late)
    it.worker.request()
    gate.opened.set()
    assert settled()
    with pytest.raises(RuntimeError, match="was stopped before its source had ended"):
        next(it)


@pytest.mark.parametrize("chain", ["one", "two"])
def test_a_consumer_that_waits_while_another_thread_stops_the_epoch_gets_an_error(chain: str):
    gate = Gate()

    def source() -> Iterator[int]:
        yield 0
        gate.wait()

    dp = Fn(source).thread_prefetch()
    dp = dp.to_cuda_stream("cpu") if chain == "two" else dp
    it = iter(dp)
    assert next(it) == 0
    seen: list[BaseException] = []

    def consume() -> None:
        try:
            next(it)
        except BaseException as error:
            seen.append(error)

    consumer = threading.Thread(target=consume)
    consumer.start()
    assert gate.reached.wait(5)
    dp._worker.request()
    consumer.join(5)
    gate.opened.set()
    assert [type(error) for error in seen] == [RuntimeError]


def test_ending_an_epoch_whose_source_has_ended_but_not_its_items_is_no_quiet_end():
    dp = IterableWrapper(range(3)).thread_prefetch(10)
    it = iter(dp)
    assert next(it) == 0
    assert settled()  # all is loaded
    dp.end_epoch()
    with pytest.raises(RuntimeError, match="was stopped before its source had ended"):
        next(it)


def test_ctrl_c_while_a_worker_is_being_started_leaves_the_iterator_as_it_was(monkeypatch):
    it = background(range(5))
    with monkeypatch.context() as patch:
        patch.setattr(Worker, "ancestors", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            next(it)
    assert list(it) == list(range(5))


class Interrupted(SimpleQueue):
    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        raise KeyboardInterrupt


def test_ctrl_c_in_pause_leaves_a_worker_that_can_be_stopped():
    it, gate = at_a_gate()
    it.worker.rests = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        it.worker.pause()
    gate.opened.set()
    it.close()
    assert settled()


def test_two_threads_that_pause_at_once_both_come_back():
    it, gate = at_a_gate(lambda: iter([1]))
    errors: list[BaseException] = []

    def pause() -> None:
        try:
            it.worker.pause()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=pause) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert eventually(lambda: it.worker.halted)
    gate.opened.set()
    for thread in threads:
        thread.join(5)
    assert errors == []
    it.worker.resume()
    assert list(it) == [1]


def test_seeding_the_graph_in_mid_epoch_is_no_quiet_end():
    dp = IterableWrapper(range(10)).thread_prefetch()
    it = iter(dp)
    assert next(it) == 0
    apply_random_seed(dp, torch.Generator())
    assert settled()
    with pytest.raises(RuntimeError, match="was stopped before its source had ended"):
        next(it)
    assert list(dp) == list(range(10))


def test_descendants_are_waited_for_when_the_worker_between_has_ended():
    gate = Gate()

    def source() -> Iterator[int]:
        yield 0
        yield 1
        gate.wait()

    class Between(IterDataPipe):
        def __init__(self, dp: IterDataPipe) -> None:
            self.dp = dp

        def __iter__(self) -> Iterator[Any]:
            yield from self.dp

    dp = Between(Fn(source).thread_prefetch(1)).thread_prefetch(1).to_cuda_stream("cpu", close_timeout=0.2)
    it = iter(dp)
    assert next(it) == 0
    assert gate.reached.wait(5)
    del it  # asks, and does not wait
    assert settled(1), "all have ended but the innermost, which is stuck"
    with pytest.warns(RuntimeWarning, match="left behind"):
        dp.end_epoch()
    gate.opened.set()


def test_a_stuck_worker_holds_nothing_that_waited():
    gate = Gate()
    alive: weakref.WeakSet[Any] = weakref.WeakSet()

    class Item:
        def __init__(self) -> None:
            alive.add(self)

    def source() -> Iterator[Item]:
        for _ in range(3):
            yield Item()
        gate.wait()

    it = iter(Fn(source).thread_prefetch(2, close_timeout=0.1))
    next(it)
    assert gate.reached.wait(5)
    assert len(alive) >= 2
    with pytest.warns(RuntimeWarning):
        it.close()
    gc.collect()
    assert len(alive) <= 1, "the generator itself holds the last one that it made, no more"
    gate.opened.set()


def test_a_paused_source_makes_the_stage_behind_it_wait():
    inner = IterableWrapper(range(10)).thread_prefetch(1)
    outer = inner.to_cuda_stream("cpu", buffer_size=1)
    it = iter(outer)
    assert next(it) == 0
    inner.pause()
    got: list[int] = []
    consumer = threading.Thread(target=lambda: got.extend(it))
    consumer.start()
    assert eventually(lambda: len(got) >= 1)
    inner.resume()
    consumer.join(5)
    assert got == list(range(1, 10))


def test_a_worker_that_is_stopped_before_it_begins_leaves_its_source_alone():
    begun: list[int] = []

    class Source:
        def __iter__(self) -> Iterator[int]:
            begun.append(1)
            return iter([1])

    it = background(Source())
    it.worker.stopped = True
    with pytest.raises(RuntimeError, match="was stopped"):
        next(it)
    assert begun == []


def test_the_exit_hook_waits_for_what_a_thread_drops_last():
    done = run_child("""
        import threading, sidestream
        from torch.utils.data import IterDataPipe
        dropping = threading.Event()
        class Items:
            def __iter__(self): return self
            def __next__(self): return 0
            def __del__(self):
                dropping.set()
                threading.Event().wait(0.3)
                print("dropped", flush=True)
        class Source(IterDataPipe):
            def __iter__(self): return Items()
        it = iter(Source().thread_prefetch())
        next(it)
        del it
        assert dropping.wait(5)
    """)
    assert (done.returncode, done.stdout, done.stderr) == (0, "dropped\n", "")


def test_a_close_timeout_as_good_as_for_ever():
    it = iter(IterableWrapper(range(9)).thread_prefetch(close_timeout=1e10))
    assert next(it) == 0
    it.close()
    assert workers() == []


def test_a_stage_of_its_own_has_to_make_a_courier():
    with pytest.raises(TypeError, match="make_courier"):
        Stage(IterableWrapper(range(1)), 1, 1.0)
