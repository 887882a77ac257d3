"""One background thread that runs an iterator ahead, and the hand-off to whoever consumes it.

What is guaranteed, and how:

- The hand-off is two queues: `ready` brings parcels to the consumer, `taken` tells the worker how many it took. Both
  are `SimpleQueue`: they wait without polling, Ctrl-C ends the wait, and `put` may be called from a finalizer inside
  another `put` or `get` on the same thread. So a *request* to stop takes no lock: it sets a flag and puts a word into
  each queue.
- Items are opaque. Only the end mark is looked for, by identity, and each worker has its own.
- The worker's thread holds the source and the hand-off, never the consumer's `BackgroundIterator`: dropped anywhere,
  that is finalized at once, and its finalizer requests without waiting. `Worker` holds no item.
- A worker that starts inside another worker is that one's child. A request reaches all descendants at once. Who asked
  from outside waits for them all, once; a worker that closes its source does not wait.
- Whatever goes wrong on the thread, it says the last word, so that no consumer waits for ever.

The races, each named again where it is handled: [late child] a child starts while its parent is being stopped; [last
word] a consumer waits in `next()` while somebody stops the worker; [pause] a worker is about to ask its source;
[fork] a child process has the objects, but not the thread; [exit] a daemon thread inside a torch operation aborts the
process when the interpreter is finalized.
"""

from __future__ import annotations

import atexit
import contextvars
import os
import sys
import threading
import time
import traceback
import types
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, NoReturn, Protocol

from sidestream.ambient import capture

__all__ = ["BackgroundIterator", "Courier", "Worker"]

_current: contextvars.ContextVar[Worker | None] = contextvars.ContextVar("sidestream_worker", default=None)
_started: set[Worker] = set()  # all whose thread may run; looked through at each start


class _Exit:
    done = False  # the exit hook has run: from here on nothing waits


class Courier(Protocol):
    """What happens to items on their way. One courier serves one iteration; the consumer's thread makes it."""

    def before_next(self) -> None:
        """Run in the consumer's thread before an item is taken: if it raises, nothing is lost."""

    def issue(self, item: Any) -> Any:
        """Turn an item into the parcel that waits. Run by the worker before it asks the source for more."""

    def receive(self, parcel: Any) -> Any:
        """Turn the parcel into what `next()` returns. Run in the consumer's thread."""


class Worker:
    """The thread, and the words it obeys: `request`, `wait`, `pause`, `resume`. It holds no item."""

    def __init__(self, name: str, close_timeout: float) -> None:
        self.name = name
        self.close_timeout = close_timeout
        self.end = object()  # the last word in `ready`
        self.outcome: BaseException | type[StopIteration] | None = None  # how the source ended, once it has
        self.stopped = False
        self.halted = False  # paused, or on the wrong side of a fork: next() has to look
        self.forked = False
        self.left_behind = False  # it was stuck when somebody waited for it; nobody waits again but the exit hook
        self.asking = False  # the thread may ask its source; False where it waits for a word
        self.rests: SimpleQueue[None] = SimpleQueue()  # a word when it comes to rest while it is halted
        self.taken: SimpleQueue[int] = SimpleQueue()
        self.ready: Callable[[], SimpleQueue[Any] | None] = lambda: None
        self.thread: threading.Thread | None = None
        self.parent: Worker | None = None

    def start(self, ready: SimpleQueue[Any], *args: Any) -> None:
        """Run `_run(self, ready, state, *args)` on a thread of its own; `state` is the caller's ambient state."""
        self.ready = weakref.ref(ready)
        self.parent = _current.get()
        words = (self, ready, capture(), *args)
        self.thread = threading.Thread(target=_run, args=words, name=self.name, daemon=True)
        try:
            _started.difference_update([worker for worker in tuple(_started) if not worker.runs()])
            _started.add(self)
            if any(worker.stopped for worker in self.ancestors()):  # [late child] the request has seen this child, or
                self.request()  # the child sees the request
            self.thread.start()
        except BaseException:  # there are too many threads, or Ctrl-C, which may come before the thread runs, or after
            if self.thread.ident is None and self.thread not in threading.enumerate():
                self.thread = None
            raise

    def runs(self) -> bool:
        """Whether there is a thread that has not ended; one whose `start` is under way has no `ident` yet."""
        return self.thread is not None and (self.thread.ident is None or self.thread.is_alive())

    def ancestors(self) -> Iterator[Worker]:
        """The worker inside which this one started, and so on."""
        worker = self.parent
        while worker is not None:
            yield worker
            worker = worker.parent

    def family(self) -> list[Worker]:
        """Itself and its descendants, also those whose parent has ended before them."""
        return [self, *(worker for worker in tuple(_started) if self in worker.ancestors())]

    def request(self) -> None:
        """Ask the worker and its descendants to stop. Takes no lock; callable from anywhere, any number of times."""
        for worker in self.family():
            worker.stopped = True
            if isinstance(worker.outcome, BaseException):
                worker.outcome = None  # nobody asks for it any more, and its traceback holds what the source held
            worker.taken.put(0)
            ready = worker.ready()
            if ready is not None:
                ready.put(worker.end)  # [last word] no consumer waits for an item that will not come

    def wait(self) -> None:
        """Wait, `close_timeout` seconds at most, for the thread and its descendants. Warn once of one that is stuck."""
        if not (self.forked or _Exit.done or sys.is_finalizing()):
            _wait_for([worker for worker in self.family() if not worker.left_behind])

    def join(self, deadline: float | None = None) -> bool:
        """Wait for the thread until `deadline`, in the time of `time.monotonic`; return whether it has ended."""
        if self.thread is None or self.thread.ident is None or self.thread is threading.current_thread():
            return True
        self.thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return not self.thread.is_alive()

    def where(self) -> str:
        """Show the stack of the thread as it is now."""
        ident = self.thread.ident if self.thread is not None else None
        frame = sys._current_frames().get(ident or 0)
        return "".join(traceback.format_stack(frame)) if frame is not None else "(not known)\n"

    def pause(self) -> None:
        """Ask the source for nothing more; return once a call in progress has ended. No-op where no thread runs.

        Raises:
            TimeoutError: It did not end within `close_timeout` seconds. Nothing is asked for after it.
        """
        if not self.runs():
            return
        self.halted = True  # [pause] the thread looks at this after it has said that it asks, and again when it rests
        deadline = time.monotonic() + self.close_timeout
        while self.asking:
            try:
                self.rests.get(timeout=max(0.0, deadline - time.monotonic()))
            except Empty:
                msg = f"{self.name}: the source's next() did not end within {self.close_timeout:g} seconds"
                raise TimeoutError(msg) from None
            self.rests.put(None)  # for another thread that waits here; one too many does no harm

    def rest(self) -> None:
        """Say that the source is not asked now, also to those who wait in `pause`."""
        self.asking = False
        if self.halted:
            self.rests.put(None)

    def resume(self) -> None:
        """Go on after `pause`."""
        if self.halted and not self.forked:
            self.halted = False
            self.taken.put(0)


class BackgroundIterator(Iterator[Any]):
    """Iterates `source` ahead on a thread that starts at the first `next()`.

    Args:
        source: What to iterate; `iter` is called on the thread.
        make_courier: Called at the first `next()`, in the consumer's thread.
        worker: The thread to be.
        buffer_size: How many parcels may wait [items]; one more is in the worker's hand.
        max_bytes: How much may wait [bytes] by `weigh`; one parcel always may. None: nothing is weighed.
        weigh: The size of a parcel [bytes].
    """

    __slots__ = ("__weakref__", "_begun", "_closed", "_cut", "_make_courier", "_room", "_source", "worker")

    def __init__(  # noqa: PLR0913 - six words, said once
        self,
        source: Iterable[Any],
        make_courier: Callable[[], Courier],
        worker: Worker,
        *,
        buffer_size: int,
        max_bytes: int | None = None,
        weigh: Callable[[Any], int] = lambda _: 0,
    ) -> None:
        self.worker = worker
        self._closed = False
        self._cut = False  # items were dropped that nobody had asked for
        self._source: Iterable[Any] | None = source
        self._make_courier = make_courier
        self._room = _Room(worker, buffer_size, max_bytes, weigh)
        self._begun: tuple[SimpleQueue[Any], Courier] | None = None  # between the first next() and close

    def __next__(self) -> Any:
        ready, courier = self._begun or self._begin()
        worker = self.worker
        courier.before_next()
        if worker.halted:
            self._look_twice(ready)
        parcel = ready.get()
        if parcel is worker.end:
            ready.put(parcel)  # whoever asks again finds it again
            self._end()
        try:
            item = courier.receive(parcel)
        except BaseException as error:
            self.close()
            if isinstance(error, StopIteration):
                raise _no_stop(error) from error
            raise
        worker.taken.put(1)
        return item

    def close(self) -> None:
        """Stop the worker; wait for it, `close_timeout` seconds at most, unless called on another worker's thread."""
        self._closed = True
        self.drop()
        if _current.get() is None:
            self.worker.wait()

    def drop(self) -> None:
        """Stop the worker, drop what waits, and wait for nothing."""
        begun, self._begun, self._source = self._begun, None, None
        self.worker.request()
        if begun is not None:
            ready, _ = begun
            with suppress(Empty):  # a thread that is stuck would hold all of it
                while True:
                    self._cut |= ready.get_nowait() is not self.worker.end
            ready.put(self.worker.end)

    def __del__(self) -> None:
        self.worker.request()

    def _begin(self) -> tuple[SimpleQueue[Any], Courier]:
        source = self._source
        if source is None:
            self._end()
        try:
            courier = self._make_courier()
        except BaseException:
            self.close()
            raise
        courier.before_next()
        ready: SimpleQueue[Any] = SimpleQueue()
        self._begun, self._source = (ready, courier), None
        try:
            self.worker.start(ready, source, courier, self._room)
        except BaseException:
            if self.worker.thread is None:  # then the next call begins anew
                self._begun, self._source = None, source
            raise
        return ready, courier

    def _look_twice(self, ready: SimpleQueue[Any]) -> None:
        if self.worker.forked:
            msg = f"{self.worker.name}: the thread of this iterator is in the parent process; call iter() again"
            raise RuntimeError(msg)
        if ready.empty() and _current.get() is None:  # another worker can wait: it does not hold up who would resume
            msg = f"{self.worker.name} is paused and nothing waits: call resume() first"
            raise RuntimeError(msg)

    def _end(self) -> NoReturn:
        """Raise how the source ended; after that, and after `close`, StopIteration."""
        outcome = StopIteration if self._closed else None if self._cut else self.worker.outcome
        if outcome is None:  # [last word] a short epoch must not look like a whole one
            msg = f"{self.worker.name} was stopped before its source had ended"
            raise RuntimeError(msg)
        self.worker.outcome = StopIteration
        try:
            raise outcome
        finally:
            del outcome  # its traceback holds this frame


class _Room:
    """The room for what waits, as the worker knows it: less what it put, and more by what was reported as taken."""

    __slots__ = ("bytes", "items", "sizes", "weigh", "worker")

    def __init__(self, worker: Worker, items: int, max_bytes: int | None, weigh: Callable[[Any], int]) -> None:
        self.worker = worker
        self.items, self.bytes = items, max_bytes or 0
        self.weigh = None if max_bytes is None else weigh
        self.sizes: deque[int] = deque()  # of what waits, if it is weighed

    def listen(self) -> None:
        """Wait for words, and take all that are there: one was taken, or none but a flag has changed."""
        worker, words = self.worker, self.worker.taken
        worker.rest()
        taken = words.get()
        worker.asking = True
        for _ in range(words.qsize()):
            taken += words.get()
        self.items += taken
        if self.weigh is not None:
            self.bytes += sum(self.sizes.popleft() for _ in range(taken))

    def admit(self, parcel: Any) -> bool:
        """Wait until `parcel` may be put, and count it. False: the worker was stopped meanwhile."""
        size = 0 if self.weigh is None else self.weigh(parcel)
        while not self.items or (size > self.bytes and self.sizes):
            self.listen()
            if self.worker.stopped:
                return False
        self.items -= 1
        if self.weigh is not None:
            self.bytes -= size
            self.sizes.append(size)
        return True


def _run(worker: Worker, ready: SimpleQueue[Any], state: Callable[..., None], *args: Any) -> None:
    """Be the thread: work, then say the last word, whatever happened."""
    try:
        state(_work, worker, ready, *args)
    except BaseException as error:  # noqa: BLE001 - the consumer gets it, whatever it is
        if not worker.stopped:
            worker.outcome = _no_stop(error)
    finally:
        ready.put(worker.end)


def _work(worker: Worker, ready: SimpleQueue[Any], source: Iterable[Any], courier: Courier, room: _Room) -> None:
    _current.set(worker)
    if worker.stopped:
        return
    iterator = iter(source)
    worker.asking = True
    try:
        _feed(worker, ready, iterator, courier, room)
    finally:
        worker.rest()
        _close(iterator)


def _feed(worker: Worker, ready: SimpleQueue[Any], iterator: Iterator[Any], courier: Courier, room: _Room) -> None:
    end, issue, put = worker.end, courier.issue, ready.put
    while not worker.stopped:
        if worker.halted:  # [pause] looked at before each call, after `asking` was set
            room.listen()
            continue
        item = next(iterator, end)
        if item is end:
            worker.outcome = StopIteration
            return
        parcel = issue(item)
        del item
        if room.admit(parcel):
            put(parcel)
        del parcel


def _no_stop(error: BaseException) -> BaseException:
    """Return `error`, or for StopIteration a RuntimeError: out of `next()` it would look like the end of the data."""
    if not isinstance(error, StopIteration):
        return error
    new = RuntimeError("a sample's own method raised StopIteration, which would have looked like the end of the data")
    new.__cause__ = error
    return new


def _close(iterator: Iterator[Any]) -> None:
    """Close a generator or an iterator of ours, so that `finally` blocks run here and soon. Others are dropped."""
    if type(iterator).__name__ == "IteratorDecorator":  # torch's hook around an `__iter__` that is no generator
        iterator = getattr(iterator, "iterator", iterator)
    if not isinstance(iterator, (types.GeneratorType, BackgroundIterator)):
        return
    try:
        iterator.close()
    except BaseException as error:  # noqa: BLE001 - an error is on its way already, or nobody is left to raise it to
        report = (type(error), error, error.__traceback__, threading.current_thread())
        threading.excepthook(threading.ExceptHookArgs(report))


def _wait_for(workers: list[Worker]) -> None:
    started = time.monotonic()
    stuck = [worker for worker in workers if not worker.join(started + worker.close_timeout)]
    for worker in [worker for worker in stuck if not worker.left_behind]:
        worker.left_behind = True
        warnings.warn(
            f"{worker.name} did not stop within {worker.close_timeout:g} seconds and is left behind. It ends by itself "
            f"when the call that it is in returns:\n{worker.where()}",
            RuntimeWarning,
            stacklevel=4,
        )


@atexit.register
def _before_exit() -> None:
    """[exit] End every thread while the interpreter is still whole."""
    workers = list(_started)
    for worker in workers:
        worker.request()
    try:
        _wait_for(workers)
    finally:
        _Exit.done = True


def _in_forked_child() -> None:
    """[fork] The threads are not here: what they fed is at an end, and nobody waits for them."""
    for worker in _started:
        worker.stopped = worker.halted = worker.forked = True
    _started.clear()
    _current.set(None)


os.register_at_fork(after_in_child=_in_forked_child)
