"""Samples on their way to a device: side stream, events, lifetime. How tensors leave the host is in `staging`.

The order of things on the device, for the sample that `Copier` issues and the stream S that is current at `next()`:

- the copies run on the side stream; the sample's event is recorded behind them; S waits for that event, and for no
  more;
- each storage that was allocated for the move belongs to the side stream, and S is recorded on it (`record_stream`):
  the allocator hands it out again only when S has passed the point where the sample was freed;
- the worker waits, before it issues a sample, until the consumer's stream is done with all but the last few: see
  `Pace`;
- a copy reads pinned memory only. What is staged here is kept by torch's pinned allocator until its copy has run. For
  memory that was pinned by others the worker waits, before it asks the source for more.
"""

from __future__ import annotations

import copy
import inspect
import types
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from sidestream.samples import leaves, map_leaves
from sidestream.staging import (
    BLOCK,
    PACK_FROM,
    is_plain,
    is_plain_sparse,
    is_small,
    lies_ready,
    pack,
    staged,
    staged_sparse,
    storages,
)

__all__ = ["Copier", "Fence", "ToCpu", "Transfer", "nbytes"]

Guarded = tuple[torch.device, Any]  # a tensor, or an object with a `record_stream` of its own
Streams = Sequence[torch.cuda.Stream]

_side_streams: dict[torch.device, torch.cuda.Stream] = {}


def side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the copy stream of `device`: one a process, since the allocator keeps a pool of memory for each stream.

    It has high priority, as torch hands out 32 streams of each priority in turn: no stream that a user makes without
    asking for a priority is this one.
    """
    stream = _side_streams.get(device)
    return stream if stream is not None else _side_streams.setdefault(device, torch.cuda.Stream(device, priority=-1))


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream that is current in this thread; CUDA has begun.

    `torch.cuda.current_stream` makes a new object each time: 40 of about 200 µs of a `next()` whose caches were cold.
    """
    return _stream(*torch._C._cuda_getCurrentStream(device.index))


@lru_cache(maxsize=64)  # streams come and go
def _stream(stream_id: int, device_index: int, device_type: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type)


def record(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Record an event on `stream`. A thread that waits for it sleeps: `blocking` keeps it from spinning."""
    event = torch.cuda.Event(blocking=True)
    event.record(stream)
    return event


def refuse_capture(device: torch.device | None = None) -> None:
    """Raise if the current stream (of `device`, or of the current one) is capturing a CUDA graph."""
    if not torch.cuda.is_initialized():
        return
    if device is None or device.index == torch.cuda.current_device():
        capturing = torch.cuda.is_current_stream_capturing()
    else:
        with torch.cuda.device(device):
            capturing = torch.cuda.is_current_stream_capturing()
    if capturing:
        msg = "next() while the current stream captures a CUDA graph: take the batch before, copy it to a static input"
        raise RuntimeError(msg)


@dataclass(slots=True, eq=False)
class Transfer:
    """A sample whose device work is queued, and what the consumer's stream has to know of it."""

    sample: Any
    fences: dict[torch.device, torch.cuda.Event]  # the event to wait for, on each device
    guarded: list[Guarded]  # what the consumer's stream is recorded on
    keep: frozenset[str] | None = None  # where objects move only at delivery: the names that are not for moving

    def receive(self, pace: Pace) -> Any:
        """Make the current stream of each device wait and guard the sample's memory; wait for nothing itself."""
        streams = {device: current_stream(device) for device in self.fences}
        pace.note(list(streams.values()))
        for device, event in self.fences.items():
            streams[device].wait_event(event)
        for device, one in self.guarded:
            one.record_stream(streams[device])
        return self.sample if self.keep is None else map_leaves(_arrive, self.sample, keep=self.keep)


class Pace:
    """Keeps a worker so near to the device that at most `buffer_size` + 3 samples are alive there.

    `note` is called for the n-th sample that the consumer receives: it records an event on the streams that had
    received samples n - 1 and n - 2, behind the point where the consumer freed the latter. `wait` is called before the
    j-th is issued: it waits for the event of note j - `buffer_size` - 1, which has been recorded, since a worker with
    `buffer_size` samples waiting does not go on. Only samples with memory on the device count; where the source makes
    them there, it has made one before `wait`: one more.
    """

    def __init__(self, buffer_size: int) -> None:
        # Shifted by so many that the first in the queue is always the one to wait for.
        self.passed: deque[Sequence[torch.cuda.Event]] = deque([()] * (buffer_size + 1))
        self.recent: tuple[Streams, Streams] = ((), ())

    def wait(self) -> None:
        """Wait, on the worker's thread, until the device has done what it must have."""
        for event in self.passed.popleft():
            event.synchronize()

    def note(self, streams: Streams) -> None:
        """Note which streams receive a sample now, in the consumer's thread."""
        before, last = self.recent
        gone = last if before == last else [*last, *(stream for stream in before if stream not in last)]
        self.passed.append([record(stream) for stream in gone])
        self.recent = (last, streams)


class Fence:
    """Courier for samples that may hold CUDA tensors made on the worker's thread. Others pass untouched."""

    before_next = staticmethod(refuse_capture)

    def __init__(self, buffer_size: int) -> None:
        self.pace = Pace(buffer_size)

    def issue(self, item: Any) -> Any:
        """Record an event behind the work that this thread has queued, where the item holds CUDA tensors."""
        if not torch.cuda.is_initialized():
            return item
        strange = [leaf for leaf in leaves(item) if not isinstance(leaf, torch.Tensor) or leaf.is_cuda]
        guarded = [guard for leaf in strange for guard in guards(leaf)]
        if not guarded:
            return item
        self.pace.wait()
        fences = {device: record(current_stream(device)) for device in {device for device, _ in guarded}}
        return Transfer(item, fences, guarded)

    def receive(self, parcel: Any) -> Any:
        """Let the consumer's stream wait for that event."""
        return parcel.receive(self.pace) if type(parcel) is Transfer else parcel


class ToCpu:
    """Courier to the CPU: CPU samples pass, CUDA tensors are copied and complete when `next()` returns."""

    def __init__(self, keep: frozenset[str]) -> None:
        self.keep = keep

    def before_next(self) -> None:
        """Nothing is to be refused."""

    def issue(self, sample: Any) -> Any:
        """Copy and wait for the copies, where there is anything that CUDA may have to do with."""
        if not torch.cuda.is_initialized():
            return sample
        found = leaves(sample, keep=self.keep)
        strange = any(leaf.is_cuda if isinstance(leaf, torch.Tensor) else True for leaf in found)
        return map_leaves(_to_cpu, sample, keep=self.keep) if strange else sample

    def receive(self, parcel: Any) -> Any:
        """Hand it over."""
        return parcel


class Copier:
    """Courier to a CUDA device. `issue` runs on the mover's thread, the rest in the consumer's."""

    def __init__(self, device: torch.device, buffer_size: int, keep: frozenset[str], pack_below: int) -> None:
        self.device = device
        self.keep = keep
        self.pack_below = min(pack_below, BLOCK + 1)
        self.pace = Pace(buffer_size)

    def before_next(self) -> None:
        """Refuse to take a sample while the current stream is capturing."""
        refuse_capture(self.device)

    def issue(self, sample: Any) -> Transfer:
        """Queue the copies of `sample`; its memory may be overwritten afterwards."""
        self.pace.wait()
        found = leaves(sample, keep=self.keep)
        if not found:
            return Transfer(map_leaves(_arrive, sample, keep=self.keep), {}, [])
        side = side_stream(self.device)  # CUDA begins here, if it has not
        here = current_stream(self.device)
        with torch.cuda.device(self.device):
            torch.cuda.set_stream(side)  # the context manager would look for what is known here, with five objects
            try:
                return _Move(self, here).run(sample, found)
            finally:
                torch.cuda.set_stream(here)

    def receive(self, parcel: Transfer) -> Any:
        """Hand the sample to the stream that is current now, and note where the consumer stands."""
        return parcel.receive(self.pace)


class _Move:
    """The move of one sample, with the side stream current."""

    def __init__(self, copier: Copier, here: torch.cuda.Stream) -> None:
        self.copier, self.device = copier, copier.device
        self.here = here  # the stream that is current on this thread while the source runs
        self.ordered = False  # whether the side stream waits for it
        self.borrowed = False  # whether a copy reads memory that is not ours
        self.deferred = False  # whether an object is left for delivery
        self.guarded: list[Guarded] = []
        self.packed: dict[int, torch.Tensor] = {}  # by the id of the leaf

    def run(self, sample: Any, found: list[Any]) -> Transfer:
        small = [leaf for leaf in found if is_small(leaf, self.copier.pack_below)]
        if len(small) >= PACK_FROM:
            self.guarded += [(self.device, block) for block in pack(small, self.device, self.packed)]
        moved = map_leaves(self.leaf, sample, keep=self.copier.keep)
        event = record(side_stream(self.device))
        if self.borrowed:
            event.synchronize()
        return Transfer(moved, {self.device: event}, self.guarded, self.copier.keep if self.deferred else None)

    def leaf(self, leaf: Any) -> Any:
        packed = self.packed.get(id(leaf))
        if packed is not None:
            return packed
        if isinstance(leaf, torch.Tensor):
            return self.tensor(leaf)
        if isinstance(leaf, PackedSequence):
            fields = {name: one for name, one in leaf._asdict().items() if one is not None}
            on_cpu = fields.pop("batch_sizes")  # torch wants these there
            return type(leaf)(batch_sizes=on_cpu, **{name: self.tensor(one) for name, one in fields.items()})
        if callable(getattr(leaf, "record_stream", None)):
            return self.guarded_object(leaf)
        self.deferred = True
        return _Deferred(leaf, self.device)

    def guarded_object(self, item: Any) -> Any:
        inner = tensors_of(item)
        if not inner or any(tensor.is_cuda for tensor in inner):  # it hides what it has, or holds this thread's results
            self.order()
        self.borrowed = True
        out = move_object(item, self.device)
        self.guarded.append((self.device, out))
        return out

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        out = self.copied(tensor)
        self.guarded += [(self.device, plain) for plain in storages(out) if plain.is_cuda]
        return out

    def copied(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_cpu:
            self.order()
            if tensor.device == self.device:
                return tensor
        elif is_plain(tensor) and not lies_ready(tensor):
            return staged(tensor).to(self.device, non_blocking=True)
        elif is_plain_sparse(tensor):
            return staged_sparse(tensor).to(self.device, non_blocking=True)
        self.borrowed = self.borrowed or tensor.layout is not torch.strided or tensor.numel() > 0
        return tensor.to(self.device, non_blocking=True)

    def order(self) -> None:
        """Let the side stream wait for what this thread has queued: the sample may hold its results."""
        if not self.ordered:
            self.ordered = True
            side_stream(self.device).wait_event(record(self.here))


class _Deferred:
    """Stands for an object that moves at delivery. It is a leaf, since it has a `to`."""

    def __init__(self, item: Any, device: torch.device) -> None:
        self.item, self.device = item, device

    def to(self) -> Any:
        return move_object(self.item, self.device)


def _arrive(leaf: Any) -> Any:
    return leaf.to() if type(leaf) is _Deferred else leaf


def _to_cpu(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.cpu() if leaf.is_cuda else leaf
    return leaf.cpu() if isinstance(leaf, PackedSequence) else move_object(leaf, torch.device("cpu"))


def move_object(item: Any, device: torch.device) -> Any:
    """Copy `item` shallowly and move the copy by its own `to`, with `non_blocking` where its signature takes it."""
    out = copy.copy(item)
    parameters: dict[str, inspect.Parameter] = {}
    with suppress(TypeError, ValueError):  # what is written in C may not tell
        parameters.update(inspect.signature(out.to).parameters)
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    options = {"non_blocking": True} if device.type == "cuda" and ("non_blocking" in parameters or takes_any) else {}
    by_name = parameters and all(one.kind in (one.KEYWORD_ONLY, one.VAR_KEYWORD) for one in parameters.values())
    moved = out.to(device=device, **options) if by_name else out.to(device, **options)
    return out if moved is None else moved


def tensors_of(leaf: Any) -> list[torch.Tensor]:
    """Return the plain tensors of a leaf: of a tensor, a packed sequence, or an object and the objects in it."""
    found: dict[int, torch.Tensor] = {}
    seen: dict[int, Any] = {}
    stack = [leaf]
    while stack:
        one = stack.pop()
        if isinstance(one, torch.Tensor):
            found.update((id(plain), plain) for plain in storages(one))
        elif id(one) not in seen:
            seen[id(one)] = one
            stack += leaves(list(one) if isinstance(one, PackedSequence) else attributes(one))
    return list(found.values())


def attributes(item: Any) -> list[Any]:
    """Return the values of an object's attributes, slots included."""
    slots = [member for kind in type(item).__mro__ for member in vars(kind).values()]
    members = [member for member in slots if isinstance(member, types.MemberDescriptorType)]
    values = [member.__get__(item) for member in members if hasattr(item, member.__name__)]
    return [*getattr(item, "__dict__", {}).values(), *values]


def guards(leaf: Any) -> list[Guarded]:
    """Return what of a leaf has to be guarded: its CUDA tensors, and an object that has some if it guards itself."""
    found: list[Guarded] = [(tensor.device, tensor) for tensor in tensors_of(leaf) if tensor.is_cuda]
    if found and not isinstance(leaf, torch.Tensor) and callable(getattr(leaf, "record_stream", None)):
        found.append((found[0][0], leaf))
    return found


def nbytes(parcel: Any) -> int:
    """Return how much memory the tensors of an item take [bytes]."""
    item = parcel.sample if type(parcel) is Transfer else parcel
    return sum(tensor.nbytes for leaf in leaves(item) for tensor in tensors_of(leaf))
