"""The public interface as a typed program uses it. Only the type checker reads this file."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterDataPipe

from sidestream import CudaStreamMover, ThreadPrefetcher, prefetch, register_sample_type
from sidestream.samples import map_leaves


class Source(IterDataPipe[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        yield torch.zeros(2)


class Graph:
    def __init__(self, nodes: torch.Tensor) -> None:
        self.nodes = nodes


def flatten(graph: Graph) -> tuple[list[torch.Tensor], None]:
    return [graph.nodes], None


def unflatten(children: list[Any], context: None) -> Graph:
    return Graph(children[0])


register_sample_type(Graph, flatten, unflatten)

loaded = ThreadPrefetcher(Source(), 4, max_bytes=1 << 30, close_timeout=1)
moved = CudaStreamMover(loaded, torch.device("cuda", 0), buffer_size=2, keep_on_cpu=["lengths"], pack_below=0)
also: IterDataPipe[Any] = CudaStreamMover(loaded, "cuda:1")

with prefetch([torch.zeros(2)], "cuda", 4, keep_on_cpu=("lengths",), max_bytes=1 << 30) as loader:
    for batch in loader:
        taken = batch
    size: int = len(loader)

length: int = len(moved)
loaded.pause()
loaded.resume()
replicable: bool = moved.is_replicable()
for batch in moved:
    taken = batch

doubled: Any = map_leaves(lambda leaf: leaf * 2, {"a": torch.ones(1)}, keep={"b"})

prefetch(3)  # type: ignore[arg-type]
ThreadPrefetcher(Source(), "4")  # type: ignore[arg-type]
CudaStreamMover(loaded, "cuda", 2)  # type: ignore[call-arg]

with contextlib.closing(iter(loaded)) as iterator:  # type: ignore[type-var]
    next(iterator)
