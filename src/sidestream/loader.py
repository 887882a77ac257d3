"""prefetch(): both stages around a loader that is already there."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
from torch.utils.data import IterDataPipe

from sidestream.mover import CudaStreamMover
from sidestream.prefetch import ThreadPrefetcher

__all__ = ["PrefetchLoader", "prefetch"]


def prefetch(  # noqa: PLR0913 - the arguments of both stages
    iterable: Iterable[Any] | Callable[[], Iterable[Any]],
    device: str | torch.device | None = None,
    buffer_size: int = 2,
    *,
    keep_on_cpu: Iterable[str] = (),
    pack_below: int = 1 << 16,
    max_bytes: int | None = None,
    close_timeout: float = 2.0,
) -> PrefetchLoader:
    """Load the batches of `iterable` ahead on a thread and move them to `device` on a side stream.

    Args:
        iterable: A `DataLoader` or any other loader or iterable; it is used, never copied. An iterator gives one pass;
            a generator function is called for each.
        device: As for `CudaStreamMover`: None is the current CUDA device, or the CPU where there is none.
        buffer_size: How many batches may wait, loaded and once more moved [items].
        keep_on_cpu: As for `CudaStreamMover`: names whose values are not moved.
        pack_below: As for `CudaStreamMover`: tensors of fewer bytes travel together [bytes].
        max_bytes: As for `ThreadPrefetcher`: how much may wait, loaded [bytes].
        close_timeout: How long `close()` waits for a thread that is inside the source [seconds]; a new epoch waits
            until it has left.

    Returns:
        A loader of the same length and the same attributes, to be iterated once an epoch.

    Raises:
        TypeError: `iterable` is neither iterable nor a generator function, or another argument has the wrong type.
        ValueError: An argument is out of range.
    """
    source = _Source(iterable)
    loaded = ThreadPrefetcher(source, buffer_size, max_bytes=max_bytes, close_timeout=close_timeout)
    moved = CudaStreamMover(
        loaded,
        device,
        buffer_size=buffer_size,
        keep_on_cpu=keep_on_cpu,
        pack_below=pack_below,
        close_timeout=close_timeout,
    )
    return PrefetchLoader(iterable, loaded, moved)


class PrefetchLoader:
    """What `prefetch` returns. `for batch in loader` runs one epoch; public attributes that it lacks are the source's.

    `next(loader)` goes on with the newest iterator that is still in use, or begins an epoch; at its end it raises
    StopIteration until `iter(loader)` begins another. `close()`, or leaving a `with` block, ends the epoch. A new
    epoch waits until the one before has left the source, which may have one iterator for all.

    A loop that breaks leaves the source read ahead. So `state_dict` is not passed on, which would tell what was loaded,
    not what was delivered. And a source that keeps random state from epoch to epoch (a `DataLoader` with a `generator`)
    may have drawn more than without us: seed it, or tell its sampler the epoch, before each epoch.
    """

    def __init__(self, source: Any, loaded: ThreadPrefetcher, moved: CudaStreamMover) -> None:
        self.source = source
        self._loaded = loaded
        self._moved = moved
        self._newest: weakref.ref[Iterator[Any]] | None = None
        self._own: Iterator[Any] | None = None  # one that next(loader) began

    def __iter__(self) -> Iterator[Any]:
        self.close()
        loading = self._loaded._worker
        if loading is not None:
            loading.join()  # a DataLoader with persistent workers would give it batches of the new epoch
        iterator = iter(self._moved)
        self._newest = weakref.ref(iterator)
        return iterator

    def __next__(self) -> Any:
        iterator = self._own or (self._newest() if self._newest is not None else None)
        if iterator is None:
            iterator = self._own = iter(self)
        return next(iterator)

    def __len__(self) -> int:
        return len(self.source)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in ("source", "state_dict"):  # `source`: while this one is copied
            msg = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(msg)
        return getattr(self.source, name)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_newest": None, "_own": None}  # a copy starts from the beginning

    def close(self) -> None:
        """End the epoch and wait for its threads, `close_timeout` seconds at most."""
        newest = self._newest() if self._newest is not None else None
        self._own = self._newest = None
        if newest is not None:
            cast(Any, newest).close()
        self._moved.end_epoch()

    def __enter__(self) -> PrefetchLoader:  # noqa: PYI034 - typing.Self needs Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Source(IterDataPipe[Any]):
    """A pipe that stands for an iterable, and passes on its iterators as they are."""

    def __init__(self, iterable: Any) -> None:
        super().__init__()
        self.iterable = iterable
        walkable = hasattr(type(iterable), "__iter__") or hasattr(type(iterable), "__getitem__")
        if not (walkable or inspect.isgeneratorfunction(iterable)):
            msg = f"prefetch takes an iterable or a generator function, not {iterable!r}"
            raise TypeError(msg)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.iterable() if inspect.isgeneratorfunction(self.iterable) else self.iterable)
