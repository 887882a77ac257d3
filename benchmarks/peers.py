"""The contenders: each makes a loader from a pipe, so that all see the same source and stand behind the same wrapper.

`LOADERS` load items ahead on the host. `MOVERS` deliver samples on the device; they use the same loaders, each with
the move that its documentation shows. `OTHERS` live in an environment of their own (`--all-peers`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from queue import Queue
from typing import Any

import torch
from torch.utils.data import DataLoader, IterDataPipe

DEVICE = "cuda"
Pipe = IterDataPipe
Build = Callable[[Pipe, int], Pipe]


class Unable(Exception):  # noqa: N818 - it stands in a cell, and is no fault
    """A contender cannot do a case; the text says why and stands in its cell."""


class Behind(IterDataPipe):
    """An iterator behind a pipe: torch's wrapper around it costs over a microsecond an item, for everybody."""

    def __init__(self, source: Any, make: Callable[[Any], Iterator[Any]]) -> None:
        self.source, self.make = source, make

    def __iter__(self) -> Iterator[Any]:
        return self.make(self.source)


def to_device(sample: Any, *, non_blocking: bool = False) -> Any:
    """What a training loop does by hand."""
    if isinstance(sample, torch.Tensor):
        return sample.to(DEVICE, non_blocking=non_blocking)
    if isinstance(sample, dict):
        return {key: to_device(value, non_blocking=non_blocking) for key, value in sample.items()}
    return type(sample)(to_device(value, non_blocking=non_blocking) for value in sample)


def pinned(sample: Any) -> Any:
    """The same for pinning: each tensor by itself."""
    if isinstance(sample, torch.Tensor):
        return sample.pin_memory()
    if isinstance(sample, dict):
        return {key: pinned(value) for key, value in sample.items()}
    return type(sample)(pinned(value) for value in sample)


# --- Loading ahead --------------------------------------------------------------------------------------------------


def plain(source: Pipe, _size: int) -> Pipe:
    return source


def sidestream_loader(source: Pipe, size: int) -> Pipe:
    import sidestream

    return sidestream.ThreadPrefetcher(source, size)


def queue_loader(source: Pipe, size: int) -> Pipe:
    """A thread and a `queue.Queue`, with no care for errors or for stopping: the least that can be written."""
    return Behind(source, lambda pipe: _from_queue(pipe, size))


def _from_queue(pipe: Pipe, size: int) -> Iterator[Any]:
    queue: Queue[Any] = Queue(size)
    end = object()

    def fill() -> None:
        for item in pipe:
            queue.put(item)
        queue.put(end)

    threading.Thread(target=fill, daemon=True).start()
    return iter(queue.get, end)


def torchdata_prefetch(source: Pipe, size: int) -> Pipe:
    from torchdata.datapipes.iter import Prefetcher

    return Prefetcher(source, size)


def prefetch_generator(source: Pipe, size: int) -> Pipe:
    from prefetch_generator import BackgroundGenerator

    return Behind(source, lambda pipe: BackgroundGenerator(iter(pipe), max_prefetch=size))


def data_loader(source: Pipe, size: int, *, pin: bool = False) -> Pipe:
    """One worker process, which lives on between epochs; `pin_memory` has its thread only with workers."""
    loader: Any = DataLoader(
        source, batch_size=None, num_workers=1, prefetch_factor=size, pin_memory=pin, persistent_workers=True
    )
    return Behind(loader, iter)


def spdl(source: Pipe, size: int) -> Pipe:
    from spdl.pipeline import PipelineBuilder

    def items(pipe: Pipe) -> Iterator[Any]:
        pipeline = PipelineBuilder().add_source(pipe).add_sink(size).build(num_threads=1)
        with pipeline.auto_stop():
            yield from pipeline

    return Behind(source, items)


def grain(source: Pipe, size: int) -> Pipe:
    from grain.experimental import ThreadPrefetchIterDataset

    return Behind(source, lambda pipe: iter(ThreadPrefetchIterDataset(_grain_dataset(pipe), prefetch_buffer_size=size)))


def _grain_dataset(pipe: Pipe) -> Any:
    from grain import DatasetIterator, IterDataset

    class Items(DatasetIterator):
        def __init__(self) -> None:
            super().__init__()
            self.iterator = iter(pipe)

        def __next__(self) -> Any:
            return next(self.iterator)

        def get_state(self) -> dict[str, Any]:
            return {}

        def set_state(self, state: dict[str, Any]) -> None:
            raise NotImplementedError

    class Source(IterDataset):
        def __iter__(self) -> Any:
            return Items()

    return Source()


def torchdata_nodes(source: Pipe, size: int, *, pin: bool = False) -> Pipe:
    from torchdata.nodes import IterableWrapper, Loader, PinMemory, Prefetcher

    node: Any = IterableWrapper(source)
    loader: Any = Loader(Prefetcher(PinMemory(node) if pin else node, prefetch_factor=size))
    return Behind(loader, iter)


LOADERS: dict[str, Build] = {
    "plain": plain,
    "sidestream": sidestream_loader,
    "queue.Queue": queue_loader,
    "prefetch_generator": prefetch_generator,
    "torchdata prefetch": torchdata_prefetch,
    "DataLoader, 1 worker": data_loader,
}
OTHER_LOADERS: dict[str, Build] = {"SPDL": spdl, "Grain": grain, "torchdata.nodes": torchdata_nodes}


# --- Onto the device ------------------------------------------------------------------------------------------------


def moved_after(loader: Build, *, non_blocking: bool = False) -> Build:
    """`loader`, and then `.to(device)` in the training loop."""

    def build(source: Pipe, size: int) -> Pipe:
        pipe = loader(source, size)
        return Behind(pipe, lambda one: (to_device(sample, non_blocking=non_blocking) for sample in one))

    return build


def mover(source: Pipe, size: int) -> Pipe:
    import sidestream

    return sidestream.CudaStreamMover(source, DEVICE, buffer_size=size)


def both_stages(source: Pipe, size: int) -> Pipe:
    return mover(sidestream_loader(source, size), size)


def torchdata_pinned(source: Pipe, size: int) -> Pipe:
    from torchdata.datapipes.iter import PinMemory

    return PinMemory(torchdata_prefetch(source, size))


def data_loader_pinned(source: Pipe, size: int) -> Pipe:
    return data_loader(source, size, pin=True)


def nodes_pinned(source: Pipe, size: int) -> Pipe:
    return torchdata_nodes(source, size, pin=True)


class StreamWithoutEvent:
    """The loader that is passed around in forums: a thread, a queue, a side stream, and nothing that orders it.

    Its batches are handed over before their copies have run, and their memory may be used again while it is read.
    """

    def __init__(self, source: Iterable[Any], size: int) -> None:
        self.source = source
        self.queue: Queue[Any] = Queue(size)
        self.stream = torch.cuda.Stream()
        threading.Thread(target=self.load, daemon=True).start()

    def load(self) -> None:
        for sample in self.source:
            with torch.cuda.stream(self.stream):
                self.queue.put(to_device(pinned(sample), non_blocking=True))
        self.queue.put(None)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        sample = self.queue.get()
        if sample is None:
            raise StopIteration
        return sample


def stream_without_event(source: Pipe, size: int) -> Pipe:
    return Behind(source, lambda pipe: StreamWithoutEvent(pipe, size))


MOVERS: dict[str, Build] = {
    "plain": moved_after(plain),
    "sidestream": both_stages,
    "prefetch_generator": moved_after(prefetch_generator),
    "torchdata prefetch": moved_after(torchdata_prefetch),
    "torchdata prefetch, pin_memory": moved_after(torchdata_pinned, non_blocking=True),
    "DataLoader, 1 worker, pin_memory": moved_after(data_loader_pinned, non_blocking=True),
    "side stream without event": stream_without_event,
}
OTHER_MOVERS: dict[str, Build] = {
    "SPDL": moved_after(spdl),
    "Grain": moved_after(grain),
    "torchdata.nodes, PinMemory": moved_after(nodes_pinned, non_blocking=True),
}
