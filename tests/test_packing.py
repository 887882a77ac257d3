"""Many small tensors in a sample travel in few blocks, and nobody can tell from what comes out.

The oracle is `.to(device)` of each tensor. Blocks are seen as storages: what shares one came in one copy.
"""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data.datapipes.iter import IterableWrapper

import simcuda
from helpers import Fn
from sidestream.staging import pack

MIB = 1 << 20
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128]
DTYPES = [*FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
OTHER_DTYPES = [
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.complex32,
]


class Named(torch.Tensor):
    """A subclass."""


def moved(sample: Any, device: torch.device, **options: Any) -> Any:
    """What comes out of the stage for one sample."""
    (out,) = IterableWrapper([sample], deepcopy=False).to_cuda_stream(device, **options)
    return out


def small(n: int, numel: int = 5, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """`n` tensors; each has values of its own."""
    return [torch.arange(i, i + numel).to(dtype) for i in range(n)]


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes: equal also for NaN and for types that the CPU cannot compare."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def same(out: torch.Tensor, tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether `out` is what `.to(device)` makes of `tensor`."""
    right = tensor.to(device)
    seen = [(t.dtype, t.device, t.shape, t.stride(), t.is_conj(), t.is_neg(), raw(t)) for t in (out, right)]
    return seen[0] == seen[1]


def blocks(tensors: list[torch.Tensor]) -> dict[int, int]:
    """The size of each storage that the tensors share [bytes], by its address."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


@pytest.fixture(autouse=True)
def device_tensors_print_no_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Printing computes, and the simulated device does not: a failed assertion would print for minutes."""
    original = torch.Tensor.__repr__

    def short(tensor: torch.Tensor, **options: Any) -> str:
        return f"<{tuple(tensor.shape)} on {tensor.device}>" if tensor.is_cuda else original(tensor, **options)

    monkeypatch.setattr(torch.Tensor, "__repr__", short)


# Blocks


@pytest.mark.parametrize(("n", "copies"), [(1, 1), (7, 7), (8, 1), (9, 1), (300, 1)])
def test_from_eight_small_tensors_on_a_block_is_one_copy(n: int, copies: int, sim: simcuda.Simulator) -> None:
    tensors = small(n)
    out = moved(tensors, torch.device("cuda", 0))
    counted = sim.counters()
    assert (counted.h2d, counted.pageable, len(blocks(out))) == (copies, 0, copies)
    assert [o.tolist() for o in map(torch.Tensor.cpu, out)] == [t.tolist() for t in tensors]


def test_tensors_are_counted_in_the_whole_sample_and_once_each(device: torch.device) -> None:
    once = small(8)
    nested = {"a": once[:3], "b": ({"c": once[3:7]}, once[7])}
    out = moved(nested, device)
    assert len(blocks([*out["a"], *out["b"][0]["c"], out["b"][1]])) == 1
    seven = small(7)
    assert len(blocks(moved(seven + seven, device))) == 7


def test_a_block_has_at_most_a_mebibyte(sim: simcuda.Simulator) -> None:
    """17 tensors of 60 KiB fill a block; 65520 bytes are 16 less than 64 KiB, and 16 of them are one block."""
    device = torch.device("cuda", 0)
    for numel, n, sizes in [(15360, 40, [17, 17, 6]), (16380, 16, [16]), (16380, 17, [16, 1])]:
        sim.reset("late")
        tensors = small(n, numel)
        out = moved(tensors, device)
        assert sim.counters().h2d == len(sizes)
        assert sorted(blocks(out).values()) == sorted(size * numel * 4 for size in sizes)
        assert all(torch.equal(o.cpu(), t) for o, t in zip(out, tensors, strict=True))


def test_a_block_that_dtypes_share_has_at_most_a_mebibyte_too(sim: simcuda.Simulator) -> None:
    tensors = [t for dtype in (torch.float32, torch.int64, torch.float64) for t in small(10, 8000, dtype)]
    out = moved(tensors, torch.device("cuda", 0))
    total = sum(t.nbytes for t in tensors)
    assert (sim.counters().h2d, sim.counters().h2d_bytes) == (2, total)
    assert sum(blocks(out).values()) == total
    assert max(blocks(out).values()) <= MIB
    assert all(torch.equal(o.cpu(), t) for o, t in zip(out, tensors, strict=True))


def test_each_tensor_starts_at_a_multiple_of_16_bytes(device: torch.device) -> None:
    tensors = [torch.ones(1 + i % 7).to(dtype) for i, dtype in enumerate(DTYPES * 3)]
    out = moved(tensors, device)
    assert [t.data_ptr() % 16 for t in out] == [0] * len(tensors)
    assert len(blocks(out)) == 1
    assert list(blocks(out).values()) == [sum(-(-t.nbytes // 16) * 16 for t in tensors)]
    assert all(same(o, t, device) for o, t in zip(out, tensors, strict=True))


# Which tensors


def test_int64_beside_float32_is_not_promoted(device: torch.device) -> None:
    odd = 2**53 + 1  # no float has it
    tensors = [
        torch.tensor([odd, -odd]),
        torch.tensor([0.5]),
        torch.tensor([True, False]),
        torch.tensor([7], dtype=torch.int8),
    ]
    out = moved(tensors + [t.clone() for t in tensors], device)
    assert len(blocks(out)) == 1
    assert [(t.dtype, t.cpu().tolist()) for t in out] == [(t.dtype, t.tolist()) for t in tensors * 2]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_dtype_is_packed(dtype: torch.dtype, device: torch.device) -> None:
    bits = torch.arange(4096, dtype=torch.int32).view(torch.uint8) % (2 if dtype is torch.bool else 251)
    tensors = [piece.clone() for piece in bits.view(dtype).split(100)][:9]
    out = moved(tensors, device)
    assert len(blocks(out)) == 1
    assert all(same(o, t, device) for o, t in zip(out, tensors, strict=True))


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", OTHER_DTYPES, ids=str)
def test_dtypes_that_torch_cannot_concatenate_come_out_right(dtype: torch.dtype, device: torch.device) -> None:
    tensors = [torch.arange(i, i + 48, dtype=torch.uint8).view(dtype) for i in range(9)]
    assert all(same(o, t, device) for o, t in zip(moved(tensors, device), tensors, strict=True))


def test_tensors_without_dimensions_are_packed_and_without_elements_keep_their_shape(
    sim: simcuda.Simulator,
) -> None:
    """case 52"""
    device = torch.device("cuda", 0)
    scalars = [torch.tensor(i, dtype=dtype) for i, dtype in enumerate(DTYPES)]
    empty = [torch.empty(0), torch.empty(0, 3, dtype=torch.int16), torch.empty(2, 0, 4)]
    out = moved(scalars + empty, device)
    assert (sim.counters().h2d, len(blocks(out[: len(scalars)]))) == (1, 1)
    assert all(same(o, t, device) for o, t in zip(out, scalars + empty, strict=True))
    torch.cuda.synchronize()  # no error is left behind


def odd_ones(device: torch.device) -> dict[str, torch.Tensor]:
    """Small tensors that no block may hold."""
    return {
        "requires_grad": torch.ones(3, requires_grad=True),
        "made by autograd": torch.ones(3, requires_grad=True) * 2,
        "subclass": torch.ones(3).as_subclass(Named),
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "negative": torch.randn(3, dtype=torch.complex64).conj().imag,
        "transposed": torch.randn(3, 4).t(),
        "every other": torch.arange(8.0)[::2],
        "expanded": torch.ones(1).expand(5),
        "there already": torch.ones(3).to(device),
    }


@pytest.mark.parametrize("name", odd_ones(torch.device("cpu")))
def test_a_tensor_that_is_more_than_its_bytes_travels_alone(name: str, device: torch.device) -> None:
    tensor = odd_ones(device)[name]
    *packed, out = moved([*small(8), tensor], device)
    assert len(blocks(packed)) == 1
    assert out.untyped_storage().data_ptr() not in blocks(packed)
    assert same(out, tensor, device)
    right = tensor.to(device)
    assert (type(out), out.requires_grad) == (type(right), right.requires_grad)
    seven = moved([*small(7), tensor], device)
    assert len(blocks(seven)) == 8  # it does not count as one of the eight


def test_a_sparse_tensor_travels_alone(device: torch.device) -> None:
    *packed, out = moved([*small(8), torch.eye(3).to_sparse()], device)
    assert len(blocks(packed)) == 1
    assert torch.equal(out.cpu().to_dense(), torch.eye(3))


@pytest.mark.parametrize(("pack_below", "copies"), [(0, 8), (1, 8), (20, 8), (21, 1), (1 << 16, 1)])
def test_pack_below_is_the_first_size_that_travels_alone(pack_below: int, copies: int, sim: simcuda.Simulator) -> None:
    out = moved(small(8), torch.device("cuda", 0), pack_below=pack_below)  # of 20 bytes each
    assert (sim.counters().h2d, len(blocks(out))) == (copies, copies)
    assert [t.cpu().tolist() for t in out] == [t.tolist() for t in small(8)]


def test_what_is_larger_than_a_block_travels_alone_whatever_pack_below(sim: simcuda.Simulator) -> None:
    large = torch.arange(float(MIB // 2))
    out = moved([*small(8), large], torch.device("cuda", 0), pack_below=1 << 30)
    assert (sim.counters().h2d, len(blocks(out[:8])), max(blocks(out[:8]).values()) <= MIB) == (2, 1, True)
    assert torch.equal(out[8].cpu(), large)


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.int16, torch.complex128], ids=str)
def test_by_default_64_kib_travel_alone_and_less_is_packed(dtype: torch.dtype, sim: simcuda.Simulator) -> None:
    numel = (1 << 16) // dtype.itemsize
    moved(small(8, numel - 1, dtype), torch.device("cuda", 0))
    assert sim.counters().h2d == 1
    sim.reset("late")
    moved(small(8, numel, dtype), torch.device("cuda", 0))
    assert sim.counters().h2d == 8


def unusual_strides() -> dict[str, torch.Tensor]:
    """Contiguous tensors whose strides are not those that a new tensor would get."""
    return {
        "row of a matrix": torch.randn(4, 7)[:1, :3],
        "one channel, channels last": torch.randn(2, 1, 4, 5).to(memory_format=torch.channels_last),
        "stride of a single element": torch.randn(8)[::8],
    }


@pytest.mark.parametrize("name", unusual_strides())
def test_strides_are_those_of_to(name: str, device: torch.device) -> None:
    tensor = unusual_strides()[name]
    *_, out = moved([*small(8), tensor], device)
    assert out.stride() == tensor.to(device).stride()
    assert same(out, tensor, device)


# Tensors of their own


def test_a_packed_tensor_is_a_leaf_with_no_base_and_its_own_version(device: torch.device) -> None:
    out = moved(small(9), device)
    facts = [(t._base, t.is_leaf, t.requires_grad, t.grad_fn, t._is_view(), t._version) for t in out]
    assert facts == [(None, True, False, None, False, 0)] * 9
    out[4].zero_()
    assert [t._version for t in out] == [0, 0, 0, 0, 1, 0, 0, 0, 0]


def test_a_packed_tensor_can_begin_to_require_grad_alone(device: torch.device) -> None:
    out = moved(small(8), device)
    out[3].requires_grad_()
    assert [t.requires_grad for t in out] == [i == 3 for i in range(8)]


@contextlib.contextmanager
def nothing() -> Iterator[None]:
    yield


def on_device(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return moved(tensors, torch.device("cuda", 0))


def packed_on_cpu(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same blocks, where kernels run also on the simulated device."""
    found: dict[int, Any] = {}
    assert len(pack(tensors, torch.device("cpu"), found)) == 1
    return [found[id(tensor)] for tensor in tensors]


@pytest.fixture(params=[packed_on_cpu, on_device])
def carry(request: pytest.FixtureRequest, device: torch.device) -> Callable[..., list[torch.Tensor]]:
    return request.param


def kernels_run(tensor: torch.Tensor) -> bool:
    """On the simulated device they do not; version counters are checked there all the same."""
    return tensor.is_cpu or torch.cuda.get_device_name() != "Simulated device"


def test_in_place_on_a_neighbour_does_not_break_backward(carry: Callable[..., list[torch.Tensor]]) -> None:
    out = carry(small(8))
    weight = torch.ones_like(out[0]).requires_grad_()
    product = weight * out[0]
    for neighbour in out[1:]:
        neighbour.add_(1)
    product.backward(torch.ones_like(weight))  # as views of one block: "modified by an inplace operation"
    assert weight.grad is not None
    assert weight.grad.shape == (5,)
    if kernels_run(out[0]):
        assert weight.grad.tolist() == [0, 1, 2, 3, 4]
        assert out[1].tolist() == [2, 3, 4, 5, 6]


def test_in_place_on_the_tensor_itself_is_still_noticed(carry: Callable[..., list[torch.Tensor]]) -> None:
    out = carry(small(8))
    weight = torch.ones_like(out[0]).requires_grad_()
    product = weight * out[0]
    out[0].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward(torch.ones_like(weight))


def test_in_place_with_a_gradient_works_and_stays_with_one_tensor(
    carry: Callable[..., list[torch.Tensor]],
) -> None:
    out = carry(small(8))
    weight = torch.ones_like(out[0]).requires_grad_()
    out[2].mul_(weight)  # as an output of a split: "a view and is being modified inplace"
    assert [t.requires_grad for t in out] == [i == 2 for i in range(8)]
    out[2].backward(torch.ones_like(weight))
    assert weight.grad is not None
    if kernels_run(out[0]):
        assert weight.grad.tolist() == [2, 3, 4, 5, 6]


def test_what_came_under_no_grad_takes_a_gradient_afterwards(
    carry: Callable[..., list[torch.Tensor]],
) -> None:
    with torch.no_grad():
        out = carry(small(8))
    weight = torch.ones_like(out[0]).requires_grad_()
    out[1].mul_(weight)  # as a view made under no_grad: "inside a no_grad block ... modified inplace"
    out[1].backward(torch.ones_like(weight))
    assert [(t.requires_grad, t._base) for t in out] == [(i == 1, None) for i in range(8)]
    if kernels_run(out[0]):
        assert weight.grad is not None
        assert weight.grad.tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("mode", [nothing, torch.no_grad, torch.inference_mode])
def test_tensors_are_of_the_consumers_mode_as_with_to(mode: Callable[[], Any], device: torch.device) -> None:
    tensors = small(8)
    with mode():
        out = moved(tensors, device)
        right = tensors[0].to(device)
        assert [t.is_inference() for t in out] == [right.is_inference()] * 8
        assert right.is_inference() is (mode is torch.inference_mode)
        assert all(same(o, t, device) for o, t in zip(out, tensors, strict=True))
        out[0].add_(1)
    assert [t.requires_grad for t in out] == [False] * 8
    assert not any(t.is_inference() for t in tensors)


def test_packed_tensors_can_be_saved_and_copied(device: torch.device) -> None:
    out = moved(small(8), device)
    assert copy.deepcopy(out)[5].cpu().tolist() == [5, 6, 7, 8, 9]
    assert out[5].clone().untyped_storage().nbytes() == 20


def test_a_write_to_a_packed_tensor_reaches_neither_neighbours_nor_the_source(device: torch.device) -> None:
    tensors = small(8)
    out = moved(tensors, device)
    out[3].copy_(torch.full((5,), -1.0))
    expected = [[-1.0] * 5 if i == 3 else t.tolist() for i, t in enumerate(small(8))]
    assert [t.cpu().tolist() for t in out] == expected
    assert [t.tolist() for t in tensors] == [t.tolist() for t in small(8)]


# Memory


def settle() -> int:
    """What the allocator counts as in use, after all work is done [bytes]."""
    gc.collect()
    torch.cuda.synchronize()
    del_me = torch.empty(1, device="cuda")  # an allocation: now the allocator looks at its events
    del del_me
    return torch.cuda.memory_stats()["active_bytes.all.current"]


def test_a_kept_tensor_keeps_its_block_alone(device: torch.device) -> None:
    """1,000 steps of 8 KiB, one tensor of 1 KiB kept from the first: its block stays, and nothing else."""
    steps, block = 1000, 8 << 10
    before = settle()
    kept, reserved = None, []
    source = Fn(lambda: ([torch.full((256,), float(i)) for _ in range(8)] for i in range(steps)))
    for step, batch in enumerate(source.to_cuda_stream(device)):
        if step == 0:
            kept = batch[5]
            assert blocks(batch) == {kept.untyped_storage().data_ptr(): block}
        reserved.append(torch.cuda.memory_reserved())
        last = batch[0]
    assert (last.cpu().unique().tolist(), kept.cpu().unique().tolist()) == ([999.0], [0.0])
    del batch, last
    assert settle() - before == block
    assert reserved[-1] == reserved[20]
    del kept
    assert settle() == before


def test_one_record_stream_a_block(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, torch.cuda.Stream]] = []
    original = torch.Tensor.record_stream

    def record_stream(tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
        seen.append((tensor.untyped_storage().data_ptr(), stream))
        original(tensor, stream)

    monkeypatch.setattr(torch.Tensor, "record_stream", record_stream)
    consumer = torch.cuda.Stream(device)
    with torch.cuda.stream(consumer):
        out = moved([*small(200), *small(40, 15360), torch.zeros(1 << 17)], device)
    assert sorted(address for address, _ in seen) == sorted(blocks(out))
    assert len(seen) == 3 + 1  # the first block holds the 200 too
    assert {stream for _, stream in seen} == {consumer}


# Any sample


def tensors_of(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 100, shape, generator=generator).to(dtype)


TENSORS = st.lists(
    st.builds(
        tensors_of,
        st.sampled_from(DTYPES),
        st.lists(st.sampled_from([0, 1, 2, 3, 17]), max_size=4).map(tuple),
        st.integers(0, 9),
    ),
    min_size=1,
    max_size=40,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tensors=TENSORS, pack_below=st.sampled_from([0, 8, 100, 1 << 16]))
def test_any_sample_comes_out_as_to_gives_it(
    tensors: list[torch.Tensor], pack_below: int, device: torch.device
) -> None:
    out = moved(tensors, device, pack_below=pack_below)
    assert [same(o, t, device) for o, t in zip(out, tensors, strict=True)] == [True] * len(tensors)
    assert [t.data_ptr() % 16 for t in out] == [0] * len(tensors)
    count = sum(0 < t.nbytes < pack_below for t in tensors)
    filled = [o for o in out if o.numel()]
    assert len(blocks(filled)) == (len(filled) - count + 1 if count >= 8 else len(filled))
