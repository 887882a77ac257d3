"""CudaStreamMover: the pipe that copies samples to the device ahead of the consumer, on a side stream."""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.data import IterDataPipe, functional_datapipe, get_worker_info

from sidestream.stage import Stage, check_count
from sidestream.transfer import Copier, ToCpu
from sidestream.worker import Courier

__all__ = ["CudaStreamMover"]


@functional_datapipe("to_cuda_stream")
class CudaStreamMover(Stage):
    """Moves samples to a device ahead of the consumer. Functional form: `.to_cuda_stream(...)`.

    A thread of the stage's own stages each sample in pinned memory, copies it on a side stream and records one event.
    At `next()` the stream that is current in the consumer's thread then waits for that event, on the device: `next()`
    returns before the copy has run and never waits on the host for CUDA. Use the sample on that stream at once; a
    kernel on yet another stream is yours to order (`other.wait_stream(torch.cuda.current_stream())`).

    Samples come back as they were, with tensors moved, at any depth (see `sidestream.samples`). They may be kept,
    dropped and freed at any time. At most `buffer_size` + 3 samples are on the device for a consumer that keeps none
    and never synchronizes, which is then at most `buffer_size` + 2 steps ahead of the device.

    The source may overwrite the tensors that it yielded once it is asked for more, pinned memory included. It may not
    overwrite what passes as it is (NumPy arrays, values kept on the CPU, tensors that are on the device already), nor
    objects that are moved at delivery: those with a `to` but no `record_stream` of their own, which move on the
    consumer's stream.

    Where a sample has 8 or more small tensors, they travel in blocks of at most 1 MiB. A small tensor that you keep
    keeps its block alive: `clone()` what is to stay. `next()` while the current stream captures a CUDA graph is a
    RuntimeError; capture with `capture_error_mode="thread_local"` and copy batches into the graph's static inputs.

    The stage stays in the main process: `MultiProcessingReadingService` runs what is before it in worker processes.

    Args:
        source_datapipe: Where the samples come from.
        device: "cuda" (the device that is current at the first `next()`), "cuda:1", a torch.device, or "cpu" (CPU
            samples pass; CUDA tensors are copied, complete when `next()` returns). None: the current CUDA device, or
            without CUDA the CPU, after one warning.
        buffer_size: How many moved samples may wait [items]; one more is in the thread's hand.
        keep_on_cpu: Names of keys of mappings and fields of namedtuples and dataclasses whose values are not moved.
        pack_below: Tensors of fewer bytes count as small [bytes]. 0: none does.
        close_timeout: How long closing, a new iterator and `pause()` wait for a thread that is inside the source
            [seconds].

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: `device` is no CUDA device and not the CPU, or a number is out of range.
        RuntimeError: At the first `next()`, if there is no such CUDA device or this is a worker process; at any, if the
            current stream is capturing.
    """

    def __init__(  # noqa: PLR0913 - the public arguments
        self,
        source_datapipe: IterDataPipe[Any],
        device: str | torch.device | None = None,
        *,
        buffer_size: int = 2,
        keep_on_cpu: Iterable[str] = (),
        pack_below: int = 1 << 16,
        close_timeout: float = 2.0,
    ) -> None:
        super().__init__(source_datapipe, buffer_size, close_timeout)
        self.device = _check_device(device)
        self.keep_on_cpu = _check_names(keep_on_cpu)
        self.pack_below = check_count("pack_below", pack_below, least=0)

    def is_replicable(self) -> bool:
        """No: reading services keep the stage in the main process."""
        return False

    def make_courier(self) -> Courier:
        """Make what moves the samples of one iteration: here `device` gets its index."""
        _refuse_worker_process()
        device = _resolve(self.device)
        if device.type == "cpu":
            return ToCpu(self.keep_on_cpu)
        return Copier(device, self.buffer_size, self.keep_on_cpu, self.pack_below)


class _Warned:
    no_cuda = False  # once a process


def _check_device(device: Any) -> torch.device | None:
    if device is None:
        return None
    if not isinstance(device, (str, torch.device)):
        msg = f"device must be a string, a torch.device or None, not {device!r}"
        raise TypeError(msg)
    try:
        found = torch.device(device)
    except RuntimeError as error:
        msg = f"device must be 'cuda', 'cuda:<index>' or 'cpu', not {device!r}"
        raise ValueError(msg) from error
    if found.type not in ("cuda", "cpu"):
        msg = f"device must be a CUDA device or the CPU, not {device!r}"
        raise ValueError(msg)
    return found


def _check_names(names: Any) -> frozenset[str]:
    found = [names] if isinstance(names, str) else list(names) if isinstance(names, Iterable) else [names]
    wrong = [name for name in found if not isinstance(name, str)]
    if wrong:
        msg = f"keep_on_cpu must be names, not {wrong[0]!r}"
        raise TypeError(msg)
    return frozenset(found)


def _refuse_worker_process() -> None:
    """Raise in a process that loads data for another, before any CUDA call.

    Such a process is known by torch's worker info, by CUDA begun before a fork, or by being a loop of torchdata's.
    """
    target = getattr(multiprocessing.current_process(), "_target", None)
    torchdata_loop = str(getattr(target, "__module__", "")).startswith("torchdata.dataloader2.communication")
    if torchdata_loop or get_worker_info() is not None or torch.cuda._is_in_bad_fork():
        msg = (
            "to_cuda_stream cannot run in a worker process, or in any that was forked after CUDA began: put it last, "
            "behind all that workers do, so that it stays in the main process"
        )
        raise RuntimeError(msg)


def _resolve(device: torch.device | None) -> torch.device:
    """Give a CUDA device its index, by the calling thread's current device."""
    if device is not None and device.type == "cpu":
        return device
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device is None and not count:
        if not _Warned.no_cuda:
            _Warned.no_cuda = True
            warnings.warn(
                "to_cuda_stream: there is no CUDA device, samples stay on the CPU", RuntimeWarning, stacklevel=4
            )
        return torch.device("cpu")
    index = None if device is None else device.index
    if index is None and count:
        index = torch.cuda.current_device()
    if index is None or index >= count:
        msg = f"to_cuda_stream: device {str(device)!r} was asked for, but torch finds {count} CUDA devices"
        raise RuntimeError(msg)
    return torch.device("cuda", index)
