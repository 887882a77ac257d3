"""What both pipes are beside what they do to an item: epochs, length, pickling, pause, shared arguments."""

from __future__ import annotations

import math
import sys
import weakref
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, NoReturn

from torch.utils.data import IterDataPipe

from sidestream.worker import BackgroundIterator, Courier, Worker

__all__ = ["Stage", "check_count", "check_seconds"]

# They ask every pipe for `set_seed` at the start of an epoch, before `iter()`: see `Stage.set_seed`.
_EPOCH_STARTERS = ("torchdata.dataloader2.graph.settings", "torch.utils.data.graph_settings")

# What belongs to one iteration, ours and torch's: never pickled, so that a copy starts from the beginning.
_OF_ONE_ITERATION = {"_worker", "_iterator", "_as_iterator", "_fast_forward_iterator"}
_OF_ONE_ITERATION |= {"_valid_iterator_id", "_number_of_samples_yielded", "_snapshot_state", "_profile_name"}


class Stage(IterDataPipe[Any]):
    """A pipe that runs its source ahead; a subclass makes the courier.

    Its state is its arguments. What an iteration needs lives and ends with that iteration: the pipe keeps only its last
    worker, which holds no item, and a weak reference to its iterator.
    """

    _worker: Worker | None = None
    _iterator: weakref.ref[BackgroundIterator] | None = None

    def __init__(self, source_datapipe: IterDataPipe[Any], buffer_size: int, close_timeout: float) -> None:
        super().__init__()
        self.source_datapipe = source_datapipe
        self.buffer_size = check_count("buffer_size", buffer_size)
        self.close_timeout = check_seconds("close_timeout", close_timeout)

    @abstractmethod
    def make_courier(self) -> Courier:
        """Make what carries the items of one iteration; called at its first `next()`, in the consumer's thread."""

    def make_iterator(self, worker: Worker) -> BackgroundIterator:
        """Make the iterator of a new epoch. Nothing runs yet."""
        return BackgroundIterator(self.source_datapipe, self.make_courier, worker, buffer_size=self.buffer_size)

    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch; the one before it is ended first. The thread starts at the first `next()`."""
        if self._fast_forward_iterator is not None:  # torch wound one forward and now asks for it
            return self._fast_forward_iterator
        self.end_epoch()
        self._worker = Worker(f"sidestream.{type(self).__name__}", self.close_timeout)
        iterator = self.make_iterator(self._worker)
        self._iterator = weakref.ref(iterator)
        return iterator

    def __len__(self) -> int:
        """The length of the source, asked anew each time."""
        try:
            return len(self.source_datapipe)
        except TypeError as error:
            msg = f"{type(self).__name__} instance doesn't have valid length"
            raise TypeError(msg) from error

    def pause(self) -> None:
        """Ask the source for nothing more and wait for a call in progress. No-op where nothing runs.

        Raises:
            TimeoutError: The call did not end within `close_timeout` seconds.
        """
        if self._worker is not None:
            self._worker.pause()

    def resume(self) -> None:
        """Go on after `pause`. No-op where nothing is paused."""
        if self._worker is not None:
            self._worker.resume()

    @property
    def set_seed(self) -> NoReturn:
        """Not there: a stage draws nothing, and a seed drawn for it would change the order of a shuffle elsewhere.

        But being asked for it by those who start an epoch is the one sign of it that comes before `DataLoader2` resets
        its worker processes, which the old epoch's thread may still be reading from. So the old epoch ends here.
        Anyone else may look, as torch does at all attributes for an error message.
        """
        if sys._getframe(1).f_globals.get("__name__") in _EPOCH_STARTERS:
            self.end_epoch()
        raise AttributeError("set_seed")

    def end_epoch(self) -> None:
        """Stop the newest iteration and wait for its worker, `close_timeout` seconds at most.

        Its iterator raises RuntimeError from then on, unless it had ended or was closed itself.
        """
        iterator = self._iterator() if self._iterator is not None else None
        if iterator is not None:
            iterator.drop()
        if self._worker is not None:
            self._worker.request()
            self._worker.wait()

    def __getstate__(self) -> Any:
        state = {name: value for name, value in vars(self).items() if name not in _OF_ONE_ITERATION}
        return state if IterDataPipe.getstate_hook is None else IterDataPipe.getstate_hook(state)


def check_count(name: str, value: Any, *, least: int = 1) -> int:
    """Return `value` if it is a whole number, `least` or more.

    Raises:
        TypeError: It is no int (a bool is none).
        ValueError: It is too small.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        msg = f"{name} must be an int, not {value!r}"
        raise TypeError(msg)
    if value < least:
        msg = f"{name} must be at least {least}, not {value}"
        raise ValueError(msg)
    return value


def check_seconds(name: str, value: Any) -> float:
    """Return `value` if it is a finite number of seconds, not negative.

    Raises:
        TypeError: It is no number (a bool is none).
        ValueError: It is negative, infinite or NaN.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        msg = f"{name} must be a number of seconds, not {value!r}"
        raise TypeError(msg)
    if not 0 <= value < math.inf:
        msg = f"{name} must be finite and not negative, not {value!r}"
        raise ValueError(msg)
    return min(float(value), 1e6)  # the platform's waits have a limit, and this one is for ever
