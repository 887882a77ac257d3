"""The wrapper that spread through tutorials, put down here with its faults, to be compared with `prefetch`.

A thread, a queue of two, a CUDA stream, a device argument; `len`, `dataset` and `sampler`. Not to be used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from queue import Queue
from threading import Thread
from typing import Any

import torch

__all__ = ["OldWrapper"]


class OldWrapper:
    """Loads the batches of a `DataLoader` on a thread and moves them on a stream of its own."""

    def __init__(self, loader: Any, device: str | torch.device, queue_size: int = 2) -> None:
        self.loader = loader
        self.device = torch.device(device)
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self.queue: Queue[Any] = Queue(maxsize=queue_size)
        self.index = 0
        self.worker = Thread(target=self.load_loop, daemon=True)
        self.worker.start()  # before anybody asks

    def load_loop(self) -> None:
        with contextlib.suppress(Exception):  # the thread ends, and nobody hears why
            while True:  # epoch after epoch, whoever wants them
                for sample in self.loader:
                    self.queue.put(self.move(sample))

    def move(self, sample: Any) -> Any:
        if isinstance(sample, (list, tuple)):
            return [self.move(one) for one in sample]
        if isinstance(sample, dict):
            return {name: self.move(one) for name, one in sample.items()}
        if not isinstance(sample, torch.Tensor):
            return sample
        with torch.cuda.stream(self.stream):
            return sample.to(self.device, non_blocking=True)  # and no event that anybody could wait for

    def __iter__(self) -> Iterator[Any]:
        self.index = 0
        return self

    def __next__(self) -> Any:
        thread_gone = not self.worker.is_alive() and self.queue.empty()
        if thread_gone or self.index >= len(self):
            self.index = 0
            raise StopIteration
        self.index += 1
        return self.queue.get()

    def __len__(self) -> int:
        return len(self.loader)

    @property
    def dataset(self) -> Any:
        return self.loader.dataset

    @property
    def sampler(self) -> Any:
        return self.loader.sampler
