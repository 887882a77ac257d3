"""From the host's side of a move: which tensors can be staged in pinned memory, and how small ones share a block.

All of it runs on the thread that calls it and starts no other: no operation here is large enough for torch to share it
out among threads. The device's side, streams and events and lifetime, is in `transfer`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from itertools import accumulate
from operator import mul
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = [
    "BLOCK",
    "PACK_FROM",
    "is_plain",
    "is_plain_sparse",
    "is_small",
    "lies_ready",
    "pack",
    "staged",
    "staged_sparse",
    "storages",
]

PACK_FROM = 8  # small tensors in a sample; fewer are not worth a block
BLOCK = 1 << 20  # [bytes] a kept tensor keeps its block alive, so blocks are small
ALIGN = 16  # [bytes] what vectorized kernels expect of an address
SERIAL = (1 << 15) - 1  # [elements] torch copies up to so many without asking for more threads
ROWS, COLUMNS = (torch.sparse_csr, torch.sparse_bsr), (torch.sparse_csc, torch.sparse_bsc)
PACKABLE = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128}
PACKABLE |= {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool}

_paddings: dict[tuple[torch.dtype, int], torch.Tensor] = {}


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is bytes with a shape, which a memory copy can stage."""
    plain = type(tensor) is torch.Tensor and tensor.is_cpu and tensor.layout is torch.strided
    return plain and not (tensor.requires_grad or tensor.is_quantized or tensor.is_nested) and tensor.numel() > 0


def is_small(leaf: object, limit: int) -> bool:
    """Whether `leaf` is plain and row-major, of fewer than `limit` bytes (at most `BLOCK`), and known to `cat`."""
    if type(leaf) is not torch.Tensor or not leaf.is_cpu or leaf.layout is not torch.strided or leaf.is_nested:
        return False
    if leaf.dtype not in PACKABLE or not 0 < leaf.nbytes < limit or leaf.requires_grad or not leaf.is_contiguous():
        return False
    return not (leaf.is_neg() or leaf.is_conj()) and (1 not in leaf.shape or is_row_major(leaf))


def is_row_major(tensor: torch.Tensor) -> bool:
    """Whether `tensor` has the strides of a new one. Contiguous ones may differ where a dimension has size 1."""
    lengths = [*accumulate(reversed(tensor.shape), mul, initial=1)]
    return tensor.stride() == tuple(reversed(lengths[:-1]))


def lies_ready(tensor: torch.Tensor) -> bool:
    """Whether a plain `tensor` is pinned, and its bytes are those that `to` gives."""
    if tensor.is_conj() or tensor.is_neg() or not tensor.is_pinned():
        return False
    return tensor.is_contiguous() or bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


def staged(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a plain tensor into pinned memory, with the strides that `to` gives and with no thread but this one.

    `copy_` would do, but on large tensors it makes a team of OpenMP threads for each thread that calls it, and on full
    cores they fight those of the consumer.
    """
    out = torch.empty_like(tensor, pin_memory=True)
    as_it_is = tensor.is_contiguous() or tensor.stride() == out.stride()  # the same bytes in the same order
    if as_it_is and not (tensor.is_conj() or tensor.is_neg()):
        ctypes.memmove(out.data_ptr(), tensor.data_ptr(), tensor.nbytes)  # releases the GIL
    else:
        copy_serially(out, tensor)
    return out


def is_plain_sparse(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is sparse, and its parts are plain."""
    sparse = type(tensor) is torch.Tensor and tensor.layout in (torch.sparse_coo, *ROWS, *COLUMNS)
    return sparse and not tensor.requires_grad and all(is_plain(part) for part in storages(tensor))


def staged_sparse(tensor: torch.Tensor) -> torch.Tensor:
    """Copy the parts of a sparse tensor into pinned memory."""
    *indices, values = [staged(part) for part in storages(tensor)]
    shape = list(tensor.shape)
    how: dict[str, Any] = {"device": "cpu", "check_invariants": False}  # not the thread's default device
    if tensor.layout is torch.sparse_coo:
        return torch.sparse_coo_tensor(indices[0], values, shape, is_coalesced=tensor.is_coalesced(), **how)
    return torch.sparse_compressed_tensor(indices[0], indices[1], values, shape, layout=tensor.layout, **how)


def copy_serially(target: torch.Tensor, source: torch.Tensor) -> None:
    """Do as `target.copy_(source)`, in pieces so small that torch does not share them out among threads."""
    if source.numel() <= SERIAL:
        target.copy_(source)
        return
    rows = SERIAL * len(source) // source.numel()
    pieces = (target.split(rows), source.split(rows)) if rows else (target.unbind(), source.unbind())
    for to, piece in zip(*pieces, strict=True):
        copy_serially(to, piece)


def pack(tensors: list[torch.Tensor], device: torch.device, moved: dict[int, torch.Tensor]) -> list[torch.Tensor]:
    """Move small tensors in blocks, with one copy each. Results go to `moved`, by the id of the tensor.

    Returns:
        The blocks on the device: what has to be guarded.
    """
    return [_move_block(block, device, moved) for block in _blocks(_sections(tensors))]


# One type, its tensors with the paddings between them, their size [bytes].
Section = tuple[torch.dtype, list[torch.Tensor], int]


def _sections(tensors: list[torch.Tensor]) -> Iterator[Section]:
    by_type: dict[torch.dtype, list[torch.Tensor]] = {}  # `cat` of several types would promote them, and say nothing
    for tensor in tensors:
        by_type.setdefault(tensor.dtype, []).append(tensor)
    for dtype, group in by_type.items():
        pieces: list[torch.Tensor] = []
        size = 0
        for tensor in group:
            length = tensor.nbytes
            gap = -length % ALIGN
            if size + length + gap > BLOCK:
                yield dtype, pieces, size
                pieces, size = [], 0
            pieces.append(tensor)
            if gap:
                pieces.append(_padding(dtype, gap // dtype.itemsize))
            size += length + gap
        yield dtype, pieces, size


def _padding(dtype: torch.dtype, length: int) -> torch.Tensor:
    key = (dtype, length)
    padding = _paddings.get(key)
    return padding if padding is not None else _paddings.setdefault(key, torch.zeros(length, dtype=dtype, device="cpu"))


def _blocks(sections: Iterable[Section]) -> Iterator[list[Section]]:
    block: list[Section] = []
    room = BLOCK
    for section in sections:
        if section[2] > room:
            yield block
            block, room = [], BLOCK
        block.append(section)
        room -= section[2]
    yield block


def _move_block(block: list[Section], device: torch.device, moved: dict[int, torch.Tensor]) -> torch.Tensor:
    sizes = [size for _, _, size in block]
    host = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu", pin_memory=True)
    for (dtype, pieces, _), part in zip(block, host.split(sizes), strict=True):
        torch.cat(_flat(pieces), out=part.view(dtype))
    out = host.to(device, non_blocking=True)
    for (dtype, pieces, _), part in zip(block, out.split(sizes), strict=True):
        # Tensors of their own. Views share a version counter: an in-place operation on one would break the backward
        # pass of its neighbours. The "unsafe" split gives each a counter, `.data` gives one to what is viewed again.
        views = part.view(dtype).unsafe_split_with_sizes([piece.numel() for piece in pieces])
        for piece, view in zip(pieces, views, strict=True):
            moved[id(piece)] = view if piece.dim() == 1 else view.view(piece.shape).data
    return out


def _flat(pieces: list[torch.Tensor]) -> list[torch.Tensor]:
    flat = [piece if piece.dim() == 1 else piece.reshape(-1) for piece in pieces]
    if max(map(torch.numel, flat)) > SERIAL:
        flat = [part for one in flat for part in one.split(SERIAL)]
    return flat


def storages(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return plain tensors that together own all the memory of `tensor`."""
    if type(tensor) is torch.Tensor and tensor.layout is torch.strided:  # by far the most
        return [tensor.values() if tensor.is_nested else tensor]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in ROWS:
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in COLUMNS:
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return [plain for name in names for plain in storages(getattr(tensor, name))]
    return [tensor]
