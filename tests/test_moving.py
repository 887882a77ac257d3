"""Samples of every kind come out on the device as their own `to` would give them, and the source keeps its own.

The oracle is `map_leaves(lambda leaf: leaf.to(device), sample)`: what a careful user would do by hand, without a stage.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import threading
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence
from torch.utils.data.datapipes.iter import IterableWrapper

import simcuda
from helpers import Fn, workers
from sidestream.samples import map_leaves
from sidestream.transfer import side_stream

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage"),
    pytest.mark.filterwarnings("ignore:.*is_fx_tracing"),
]

LARGE = 300  # a side; the square has more elements than torch copies on one thread


class Named(torch.Tensor):
    """A subclass with nothing of its own."""


class Point(NamedTuple):
    x: Any
    y: Any = None


@dataclasses.dataclass
class Batch:
    image: Any
    length: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    image: Any


def moved(sample: Any, device: Any, **options: Any) -> Any:
    """What comes out of the stage for one sample."""
    (out,) = IterableWrapper([sample], deepcopy=False).to_cuda_stream(device, **options)
    return out


@pytest.fixture(autouse=True)
def device_tensors_print_no_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Printing computes, and the simulated device does not: a failed assertion would print for minutes."""
    original = torch.Tensor.__repr__

    def short(tensor: torch.Tensor, **options: Any) -> str:
        return f"<{tuple(tensor.shape)} on {tensor.device}>" if tensor.is_cuda else original(tensor, **options)

    monkeypatch.setattr(torch.Tensor, "__repr__", short)


# What a tensor is


def parts(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The strided tensors that a sparse or nested tensor is made of."""
    if tensor.layout is torch.sparse_coo:
        return {"indices": tensor._indices(), "values": tensor._values()}
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return {"crow": tensor.crow_indices(), "col": tensor.col_indices(), "values": tensor.values()}
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return {"ccol": tensor.ccol_indices(), "row": tensor.row_indices(), "values": tensor.values()}
    if tensor.layout is torch.jagged:
        lengths = tensor.lengths()
        found = {"values": tensor.values(), "offsets": tensor.offsets()}
        return found if lengths is None else {**found, "lengths": lengths}
    sizes, strides = tensor._nested_tensor_size(), tensor._nested_tensor_strides()
    return {"buffer": tensor.values(), "sizes": sizes, "strides": strides}


def content(tensor: torch.Tensor) -> Any:
    """All that a consumer can see in a tensor but its identity, on the CPU."""
    facts = (type(tensor), tensor.device, tensor.dtype, tensor.layout, tensor.requires_grad)
    if tensor.layout is not torch.strided or tensor.is_nested:
        coalesced = tensor.is_coalesced() if tensor.layout is torch.sparse_coo else None
        return *facts, coalesced, {name: content(part) for name, part in parts(tensor).items()}
    plain = tensor.detach().cpu()
    bits = (
        plain.resolve_conj()
        .resolve_neg()
        .clone(memory_format=torch.contiguous_format)
        .reshape(-1)
        .view(torch.uint8)
        .numpy()
        .tobytes()
    )
    return *facts, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg(), bits


def canonical(sample: Any) -> Any:
    """A sample as something that `==` compares, types included."""
    if isinstance(sample, torch.Tensor):
        return content(sample)
    if isinstance(sample, np.ndarray):
        return np.ndarray, id(sample)
    if isinstance(sample, (dict, UserDict)):
        return type(sample), [(key, canonical(value)) for key, value in sample.items()]
    if isinstance(sample, (list, tuple, deque)):
        return type(sample), [canonical(value) for value in sample]
    if dataclasses.is_dataclass(sample):
        return type(sample), [canonical(getattr(sample, field.name)) for field in dataclasses.fields(sample)]
    return type(sample), sample


def by_hand(sample: Any, device: torch.device) -> Any:
    return map_leaves(lambda leaf: leaf.to(device), sample)


# Tensors


def jagged(**options: Any) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.arange(2.0), torch.arange(5.0)], layout=torch.jagged, **options)


def uncoalesced() -> torch.Tensor:
    return torch.sparse_coo_tensor([[0, 0, 1], [1, 1, 0]], [1.0, 2.0, 3.0], (2, 2))


TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "scalar": lambda: torch.tensor(5),
    "no elements": lambda: torch.empty(0),
    "no rows": lambda: torch.empty(0, 3, dtype=torch.int16),
    "small": lambda: torch.arange(6.0),
    "large": lambda: torch.arange(LARGE * LARGE, dtype=torch.float64),
    "pinned": lambda: torch.arange(6.0).pin_memory(),
    "pinned and transposed": lambda: torch.arange(6.0).reshape(2, 3).pin_memory().t(),
    "transposed": lambda: torch.arange(12.0).reshape(3, 4).t(),
    "large transposed": lambda: torch.arange(float(LARGE * LARGE)).reshape(LARGE, LARGE).t(),
    "large permuted": lambda: torch.arange(60000).reshape(20, 30, 100).permute(2, 0, 1),
    "every other column": lambda: torch.arange(12.0).reshape(3, 4)[:, ::2],
    "large, every other column": lambda: torch.arange(float(LARGE * 400)).reshape(LARGE, 400)[:, ::2],
    "large, one long row": lambda: torch.arange(200000.0).reshape(1, 200000)[:, ::2],
    "part of a large one": lambda: torch.arange(float(LARGE * LARGE)).reshape(LARGE, LARGE)[3:8, 5:7],
    "expanded": lambda: torch.arange(3.0).reshape(3, 1).expand(3, 4),
    "large expanded": lambda: torch.ones(1).expand(LARGE, LARGE),
    "overlapping": lambda: torch.arange(9.0).unfold(0, 4, 1),
    "flipped by hand": lambda: torch.arange(6.0).reshape(2, 3).flip(1)[:, 1:],
    "channels last": lambda: torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "large channels last": lambda: torch.rand(4, 3, 64, 80).to(memory_format=torch.channels_last),
    "channels last 3d": lambda: torch.rand(2, 3, 4, 5, 2).to(memory_format=torch.channels_last_3d),
    "row of a matrix": lambda: torch.arange(28.0).reshape(4, 7)[:1, :3],
    "one element of many": lambda: torch.arange(8.0)[::8],
    "one channel, channels last": lambda: torch.rand(2, 1, 4, 5).to(memory_format=torch.channels_last),
    "conjugate": lambda: torch.randn(3, 4, dtype=torch.complex64).conj(),
    "large conjugate transposed": lambda: torch.randn(200, 300, dtype=torch.complex64).mH,
    "negative": lambda: torch.randn(3, 4, dtype=torch.complex64).conj().imag,
    "bool": lambda: torch.tensor([True, False]),
    "bfloat16": lambda: torch.arange(6).to(torch.bfloat16),
    "float8": lambda: torch.arange(6, dtype=torch.uint8).view(torch.float8_e4m3fn),
    "view as another type": lambda: torch.arange(6.0).view(torch.int32)[1:],
    "from numpy": lambda: torch.from_numpy(np.arange(6.0)),
    "subclass": lambda: torch.arange(6.0).as_subclass(Named),
    "parameter": lambda: torch.nn.Parameter(torch.arange(6.0)),
    "requires_grad": lambda: torch.arange(6.0).requires_grad_(),
    "buffer": lambda: torch.nn.Buffer(torch.arange(6.0)),
    "coo": lambda: torch.eye(3).to_sparse(),
    "coo, not coalesced": uncoalesced,
    "coo, empty": lambda: torch.sparse_coo_tensor(size=(3, 2)),
    "coo, dense last dimension": lambda: torch.eye(3).reshape(3, 3, 1).expand(3, 3, 2).to_sparse(2),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "csc": lambda: torch.eye(3).to_sparse_csc(),
    "bsr": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "bsc": lambda: torch.eye(4).to_sparse_bsc((2, 2)),
    "jagged": jagged,
    "jagged with lengths": lambda: torch.nested.nested_tensor_from_jagged(
        torch.arange(10.0), torch.tensor([0, 4, 7, 10]), torch.tensor([2, 3, 1])
    ),
    "nested": lambda: torch.nested.nested_tensor([torch.arange(2.0), torch.arange(5.0)]),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_comes_out_as_to_gives_it(name: str, device: torch.device) -> None:
    """cases 52, 89, 91, 92, 93, 94: class, layout, strides, values, requires_grad; the source's own is as it was."""
    tensor = TENSORS[name]()
    before = content(tensor)
    out = moved(tensor, device)
    assert out.device == device
    assert content(out) == content(tensor.to(device))
    assert content(tensor) == before


@pytest.mark.parametrize("name", TENSORS)
def test_it_is_the_same_inside_a_sample_with_many_small_tensors(name: str, device: torch.device) -> None:
    tensor = TENSORS[name]()
    out = moved([torch.zeros(2), *(torch.ones(i) for i in range(1, 9)), tensor], device)[-1]
    assert content(out) == content(tensor.to(device))


def test_strides_are_the_measured_ones(device: torch.device) -> None:
    """cases 92, 93"""
    square = torch.arange(12.0).reshape(3, 4)
    image = torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)
    out = moved([square.t(), square[:, ::2], torch.ones(3, 1).expand(3, 4), image], device)
    assert [t.stride() for t in out] == [(1, 4), (2, 1), (4, 1), (60, 1, 15, 3)]
    assert [t.untyped_storage().nbytes() for t in out] == [48, 24, 48, 480]


def test_a_sample_of_tensors_without_elements_leaves_no_error_behind(device: torch.device) -> None:
    """case 52"""
    out = moved((torch.empty(0, 3), torch.empty(0), torch.tensor(5)), device)
    torch.cuda.synchronize()
    assert [t.shape for t in out] == [(0, 3), (0,), ()]
    assert [t.device for t in out] == [device] * 3
    assert out[2].item() == 5


def test_large_tensors_are_staged_whatever_their_strides(sim: simcuda.Simulator) -> None:
    names = [name for name in TENSORS if name.startswith("large")]
    assert len(names) == 8
    for name in names:
        sim.reset("late")
        tensor = TENSORS[name]()
        out = moved(tensor, torch.device("cuda", 0))
        counted = sim.counters()
        assert (counted.h2d, counted.pageable, counted.h2d_bytes) == (1, 0, tensor.nbytes)
        assert content(out) == content(tensor.to("cuda"))


def test_requires_grad_keeps_its_graph_as_to_does(device: torch.device) -> None:
    weight = torch.arange(3.0, requires_grad=True)
    leaf, made = moved((weight, weight * 2), device)
    assert [t.grad_fn.name() for t in (leaf, made)] == ["ToCopyBackward0"] * 2
    made.backward(torch.tensor([1.0, 10.0, 100.0]).to(device))
    assert weight.grad is not None
    assert weight.grad.tolist() == [2, 20, 200]
    with torch.no_grad():
        out = moved(weight, device)
        assert (out.requires_grad, out.grad_fn) == (False, None)


def test_a_parameter_becomes_what_to_makes_of_it_and_a_subclass_loses_its_attributes(
    device: torch.device,
) -> None:
    """case 94: no more is promised than `to` does."""
    named = torch.arange(3.0).as_subclass(Named)
    named.note = "mine"  # type: ignore[attr-defined]
    parameter, out = moved((torch.nn.Parameter(torch.ones(2)), named), device)
    assert (type(parameter), type(out)) == (torch.Tensor, Named)
    assert (hasattr(out, "note"), named.note) == (False, "mine")  # type: ignore[attr-defined]


class Counting(torch.Tensor):
    """Tells which functions of torch were called on it."""

    calls: list[str] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls.append(getattr(func, "__name__", ""))
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_subclass_is_moved_through_its_own_torch_function(device: torch.device) -> None:
    """case 94"""
    tensor = torch.arange(3.0).as_subclass(Counting)
    Counting.calls.clear()
    out = moved(tensor, device)
    assert Counting.calls.count("to") == 1
    assert (type(out), out.as_subclass(torch.Tensor).cpu().tolist()) == (Counting, [0, 1, 2])


def test_a_meta_tensor_raises_torchs_own_error_and_leaves_the_stage_whole(device: torch.device) -> None:
    """case 96"""
    source = IterableWrapper([torch.ones(2), torch.empty(3, device="meta"), torch.ones(2)])
    dp = source.to_cuda_stream(device)
    stream = torch.cuda.current_stream()
    for _ in range(2):
        it = iter(dp)
        assert next(it).cpu().tolist() == [1, 1]
        with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
            next(it)
        with pytest.raises(StopIteration):
            next(it)
        assert torch.cuda.current_stream() == stream
    assert moved(torch.ones(2), device).cpu().tolist() == [1, 1]


def test_what_is_there_already_passes_as_the_same_object(device: torch.device) -> None:
    there = torch.arange(3.0).to(device)
    out = moved({"x": there, "y": torch.ones(2)}, device)
    assert out["x"] is there
    assert out["y"].cpu().tolist() == [1, 1]


def test_the_same_tensor_twice_is_moved_once_and_views_are_separate(sim: simcuda.Simulator) -> None:
    """case 98"""
    t = torch.arange(4.0)
    out = moved({"x": t, "y": [t, (t,)], "v": t[:2], "w": t[:2]}, torch.device("cuda", 0))
    assert out["x"] is out["y"][0] is out["y"][1][0]
    assert sim.counters().h2d == 3
    assert len({out[name].untyped_storage().data_ptr() for name in "xvw"}) == 3
    assert [out[name].cpu().tolist() for name in "xvw"] == [[0, 1, 2, 3], [0, 1], [0, 1]]


# Packed sequences


def sequences() -> dict[str, PackedSequence]:
    steps = [torch.arange(3.0), torch.arange(5.0), torch.arange(1.0)]
    padded = torch.arange(24.0).reshape(3, 4, 2)
    return {
        "sorted": pack_sequence(sorted(steps, key=len, reverse=True)),
        "unsorted": pack_sequence(steps, enforce_sorted=False),
        "padded": pack_padded_sequence(padded, torch.tensor([4, 2, 1]), batch_first=True),
    }


@pytest.mark.parametrize("name", sequences())
def test_a_packed_sequence_keeps_its_batch_sizes_on_the_cpu(name: str, device: torch.device) -> None:
    """case 88"""
    packed = sequences()[name]
    out = moved({"p": packed}, device)["p"]
    assert type(out) is PackedSequence
    assert (out.data.device, out.batch_sizes.device) == (device, torch.device("cpu"))
    assert torch.equal(out.batch_sizes, packed.batch_sizes)
    for mine, theirs in [
        (out.sorted_indices, packed.sorted_indices),
        (out.unsorted_indices, packed.unsorted_indices),
    ]:
        assert (mine is None) == (theirs is None)
        assert mine is None or content(mine) == content(theirs.to(device))
    back, right = pad_packed_sequence(PackedSequence(*map(to_cpu, out))), pad_packed_sequence(packed)
    assert all(torch.equal(a, b) for a, b in zip(back, right, strict=True))


def to_cpu(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.cpu()


# Every storage is guarded


class Recorder:
    """Which storages were recorded, and on which streams."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[int, torch.cuda.Stream, threading.Thread]] = []
        original = torch.Tensor.record_stream

        def record_stream(tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
            self.seen.append((tensor.untyped_storage().data_ptr(), stream, threading.current_thread()))
            original(tensor, stream)

        monkeypatch.setattr(torch.Tensor, "record_stream", record_stream)


@pytest.fixture
def recorder(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Recorder:  # the device, first
    return Recorder(monkeypatch)


def storages(sample: Any) -> set[int]:
    """The device storages in a sample of the containers used here, found without the package."""
    if isinstance(sample, torch.Tensor):
        if sample.layout is not torch.strided or sample.is_nested:
            return storages(list(parts(sample).values()))
        return {sample.untyped_storage().data_ptr()} if sample.is_cuda and sample.numel() else set()
    if dataclasses.is_dataclass(sample):
        sample = [getattr(sample, field.name) for field in dataclasses.fields(sample)]
    if isinstance(sample, dict):
        sample = list(sample.values())
    return set().union(*map(storages, sample)) if isinstance(sample, (list, tuple)) else set()


def nested_tensors() -> Any:
    x = torch.arange(4.0)
    return {"a": [(x, {"b": x + 1})], "c": Batch(x + 2, Frozen(x + 3))}


SPARSE_OR_NESTED = ("coo", "csr", "csc", "bsr", "bsc", "jagged", "nested")
GUARDED: dict[str, Callable[[], Any]] = {
    "at any depth": nested_tensors,
    "packed sequence": lambda: sequences()["unsorted"],
    "many small": lambda: [torch.ones(i) for i in range(1, 30)],
    "subclass": lambda: torch.ones(3).as_subclass(Named),
    "requires_grad": lambda: torch.ones(3, requires_grad=True),
    "transposed": lambda: torch.ones(LARGE, LARGE).t(),
    **{name: TENSORS[name] for name in TENSORS if name.startswith(SPARSE_OR_NESTED) and "empty" not in name},
}


@pytest.mark.parametrize("name", GUARDED)
def test_every_storage_that_was_moved_is_recorded_on_the_consumers_stream(
    name: str, recorder: Recorder, device: torch.device
) -> None:
    """case 59"""
    consumer = torch.cuda.Stream(device)
    with torch.cuda.stream(consumer):
        out = moved(GUARDED[name](), device)
    found = storages(out)
    assert found
    assert {address for address, _, _ in recorder.seen if address} == found
    assert {(stream, thread) for _, stream, thread in recorder.seen} == {(consumer, threading.current_thread())}


# Objects with a `to`


class Moving:
    """What the objects below share: a tensor, and a note of each call of `to`."""

    def __init__(self) -> None:
        self.x = torch.arange(3.0)
        self.calls: list[Any] = []

    def note(self, device: Any, *options: Any) -> Moving:
        out = copy.copy(self)
        out.x = self.x.to(device)
        self.calls.append((threading.current_thread(), torch.cuda.current_stream(), device, *options))
        return out


class Plain(Moving):
    def to(self, device: Any) -> Moving:
        return self.note(device)


class KeywordOnly(Moving):
    def to(self, *, device: Any) -> Moving:
        return self.note(device)


class NonBlocking(Moving):
    def to(self, device: Any, non_blocking: bool = False) -> Moving:
        return self.note(device, non_blocking)


class NonBlockingKeywordOnly(Moving):
    def to(self, *, device: Any, non_blocking: bool = False) -> Moving:
        return self.note(device, non_blocking)


class AnyArguments(Moving):
    def to(self, *args: Any, **options: Any) -> Moving:
        (device,) = args or (options["device"],)
        return self.note(device, options["non_blocking"])


class AnyKeywords(Moving):
    def to(self, **options: Any) -> Moving:
        return self.note(options["device"], options["non_blocking"])


class OtherName(Moving):
    def to(self, where: Any, dtype: Any = None) -> Moving:
        return self.note(where, dtype)


class Callable_(Moving):
    """`to` is an attribute that can be called, not a method."""

    def __init__(self) -> None:
        super().__init__()
        self.to = self.note


class Static(Moving):
    @staticmethod
    def to(device: Any) -> str:
        return f"made for {device}"


OBJECTS: dict[type[Moving], tuple[Any, ...]] = {
    Plain: (),
    KeywordOnly: (),
    NonBlocking: (True,),
    NonBlockingKeywordOnly: (True,),
    AnyArguments: (True,),
    AnyKeywords: (True,),
    OtherName: (None,),
    Callable_: (),
}


@pytest.mark.parametrize("kind", OBJECTS)
def test_an_object_is_moved_by_its_own_to_with_what_the_signature_takes(
    kind: type[Moving], device: torch.device
) -> None:
    """case 80"""
    item = kind()
    out = moved({"o": item}, device)["o"]
    assert [call[2:] for call in item.calls] == [(device, *OBJECTS[kind])]
    assert (type(out), out is item) == (kind, False)
    assert (out.x.device, out.x.cpu().tolist()) == (device, [0, 1, 2])
    assert item.x.device == torch.device("cpu")


def test_whatever_to_returns_is_delivered(device: torch.device) -> None:
    assert moved(Static(), device) == f"made for {device}"


class Failing(Moving):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def to(self, device: Any, non_blocking: bool = False) -> Any:
        self.calls.append(device)
        raise self.error


class FailingAhead(Failing):
    def record_stream(self, stream: Any) -> None:
        raise AssertionError("nothing was moved")


@pytest.mark.parametrize("kind", [Failing, FailingAhead])
@pytest.mark.parametrize("error", [TypeError("to() got an unexpected keyword argument"), ValueError(1), KeyError("k")])
def test_the_own_error_of_a_to_comes_out_and_it_is_not_tried_again(
    kind: type[Failing], error: Exception, device: torch.device
) -> None:
    """case 80"""
    item = kind(error)
    with pytest.raises(type(error)) as raised:
        moved([item], device)
    assert raised.value is error
    assert item.calls == [device]


@pytest.mark.parametrize("kind", [Failing, FailingAhead])
def test_a_stop_iteration_in_a_to_is_not_the_end_of_the_data(kind: type[Failing], device: torch.device) -> None:
    error = StopIteration("mine")
    dp = IterableWrapper([torch.ones(1), kind(error), torch.ones(1)], deepcopy=False).to_cuda_stream(device)
    it = iter(dp)
    assert next(it).item() == 1
    with pytest.raises(RuntimeError, match="StopIteration") as raised:
        next(it)
    assert raised.value.__cause__ is error


class InPlace(Moving):
    """Changes itself and returns itself, as many batch classes do."""

    def to(self, device: Any) -> Any:
        self.x = self.x.to(device)
        return self


class ReturnsNothing(InPlace):
    def to(self, device: Any) -> Any:
        super().to(device)


class InPlaceAhead(InPlace):
    def record_stream(self, stream: torch.cuda.Stream) -> None:
        self.x.record_stream(stream)


@pytest.mark.parametrize("kind", [InPlace, ReturnsNothing, InPlaceAhead])
def test_a_to_that_works_in_place_changes_a_copy(kind: type[InPlace], device: torch.device) -> None:
    """case 82"""
    item = kind()
    tensor = item.x
    dp = IterableWrapper([item], deepcopy=False).to_cuda_stream(device)
    for _ in range(2):
        (out,) = dp
        assert (type(out), out is item) == (kind, False)
        assert (out.x.device, out.x.cpu().tolist()) == (device, [0, 1, 2])
        assert item.x is tensor
        assert content(tensor) == content(torch.arange(3.0))


class Guarded(Moving):
    """Has a `record_stream` of its own: it may be moved ahead."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded: list[Any] = []

    def to(self, device: Any, non_blocking: bool = False) -> Moving:
        return self.note(device, non_blocking)

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        self.x.record_stream(stream)
        self.recorded.append((threading.current_thread(), stream, self.x.device))


def test_an_object_with_a_record_stream_is_moved_ahead_and_guarded_by_it(device: torch.device) -> None:
    """case 60"""
    side = side_stream(device)
    item = Guarded()
    consumer = torch.cuda.Stream(device)
    with torch.cuda.stream(consumer):
        it = iter(IterableWrapper([torch.ones(1), item], deepcopy=False).to_cuda_stream(device))
        next(it)
        next(it)
        del it
    ((thread, stream, *options),) = item.calls
    assert options == [device, True]
    assert thread is not threading.current_thread()
    assert stream == side
    assert item.recorded == [(threading.current_thread(), consumer, device)]


def test_it_is_moved_before_it_is_asked_for(device: torch.device) -> None:
    reached = threading.Event()

    class Telling(Guarded):
        def to(self, device: Any, non_blocking: bool = False) -> Moving:
            reached.set()
            return super().to(device, non_blocking)

    it = iter(IterableWrapper([torch.ones(1), Telling()], deepcopy=False).to_cuda_stream(device))
    next(it)
    assert reached.wait(10)
    assert next(it).x.cpu().tolist() == [0, 1, 2]


def test_an_object_without_one_is_moved_at_delivery_on_the_consumers_stream(device: torch.device) -> None:
    """case 60"""
    item, consumer = NonBlocking(), torch.cuda.Stream(device)
    asked = threading.Event()

    def source() -> Iterator[Any]:
        yield torch.ones(1)
        yield item
        asked.set()  # the worker is done with the object
        yield torch.ones(1)

    it = iter(Fn(source).to_cuda_stream(device))
    next(it)
    assert asked.wait(10)
    assert item.calls == []
    with torch.cuda.stream(consumer):
        out = next(it)
    assert item.calls == [(threading.current_thread(), consumer, device, True)]
    assert out.x.cpu().tolist() == [0, 1, 2]
    assert len(list(it)) == 1


def test_tensors_beside_an_object_are_right_at_delivery(device: torch.device) -> None:
    """The object's copy is on the consumer's stream, behind the wait for the tensors."""
    sample = {"t": torch.arange(5.0), "o": Plain(), "list": [Plain(), torch.ones(2)]}
    out = moved(sample, device)
    assert out["t"].cpu().tolist() == [0, 1, 2, 3, 4]
    assert (out["o"].x.cpu().tolist(), out["list"][0].x.cpu().tolist()) == ([0, 1, 2], [0, 1, 2])
    assert out["list"][1].cpu().tolist() == [1, 1]


@pytest.mark.parametrize("kind", [Plain, Guarded])
def test_the_same_object_twice_is_moved_once(kind: type[Moving], device: torch.device) -> None:
    """case 98"""
    item = kind()
    out = moved({"a": item, "b": [item]}, device)
    assert out["a"] is out["b"][0]
    assert len(item.calls) == 1


class Pins(Plain):
    def pin_memory(self) -> Moving:
        return copy.copy(self)


class PinsForDevice(Plain):
    def pin_memory(self, device: Any) -> Moving:
        assert device is not None
        return copy.copy(self)


@pytest.mark.parametrize("kind", [Pins, PinsForDevice])
def test_a_pin_memory_method_of_either_signature_is_no_hindrance(kind: type[Moving], device: torch.device) -> None:
    """case 81"""
    out = moved(kind(), device)
    assert (type(out), out.x.device, out.x.cpu().tolist()) == (kind, device, [0, 1, 2])


class TensorDictLike(dict):  # type: ignore[type-arg]
    """A mapping that knows better how to move itself."""

    def __init__(self, items: Any, *, batch_size: tuple[int, ...]) -> None:
        super().__init__(items)
        self.batch_size = batch_size

    def to(self, device: Any) -> TensorDictLike:
        return TensorDictLike({k: v.to(device) for k, v in self.items()}, batch_size=self.batch_size)


class GraphLike:
    """As PyG's Data: iterable, indexable, sized, and moved by its own `to`."""

    def __init__(self, **fields: torch.Tensor) -> None:
        self.__dict__.update(fields)

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("iterated")

    def __len__(self) -> int:
        raise AssertionError("measured")

    def __getitem__(self, key: Any) -> Any:
        raise AssertionError("indexed")

    def to(self, device: Any, *args: Any, non_blocking: bool = False) -> GraphLike:
        assert (args, non_blocking) == ((), True)
        return type(self)(**{name: value.to(device) for name, value in vars(self).items()})


class BatchTuple(namedtuple("BatchTuple", "x y")):  # noqa: PYI024
    __slots__ = ()

    def to(self, device: Any) -> BatchTuple:
        return BatchTuple(self.x.to(device), "moved by its own")


def test_an_object_is_asked_before_it_is_taken_for_a_container(device: torch.device) -> None:
    """cases 86, 87"""
    sample = (
        TensorDictLike({"a": torch.ones(2)}, batch_size=(2,)),
        GraphLike(x=torch.arange(2.0)),
        BatchTuple(torch.ones(1), torch.ones(1)),
    )
    mapping, graph, pair = moved(sample, device)
    assert (type(mapping), mapping.batch_size, mapping["a"].device) == (TensorDictLike, (2,), device)
    assert (type(graph), graph.x.device, graph.x.cpu().tolist()) == (GraphLike, device, [0, 1])
    assert (type(pair), pair.x.device, pair.y) == (BatchTuple, device, "moved by its own")


class ToIsData:
    to = "the receiver"


class PathWithTo(type(Path())):  # type: ignore[misc]
    to = "there"


def test_what_has_a_to_that_cannot_be_called_and_modules_and_classes_pass(device: torch.device) -> None:
    """case 80"""
    sample = [ToIsData(), torch.nn.Linear(2, 2), Plain, torch.float32, PathWithTo("a"), torch.device("cpu")]
    out = moved(sample, device)
    assert [new is old for new, old in zip(out, sample, strict=True)] == [True] * len(sample)
    assert sample[1].weight.device == torch.device("cpu")


# What stays


def test_numpy_arrays_and_plain_values_pass_as_the_same_objects(device: torch.device) -> None:
    """case 73"""
    sample = [
        np.arange(3.0),
        np.float32(1),
        "text",
        b"x",
        None,
        3,
        2.5,
        {1},
        range(3),
        object(),
        lambda: None,
    ]
    out = moved([*sample, torch.ones(1)], device)
    assert [new is old for new, old in zip(out[:-1], sample, strict=True)] == [True] * len(sample)
    assert out[-1].device == device


@pytest.mark.parametrize("sample", [{}, [], None, "text", {"a": [1, (2,)]}], ids=repr)
def test_a_sample_without_anything_to_move_needs_no_copy(sample: Any, sim: simcuda.Simulator) -> None:
    out = moved(sample, torch.device("cuda", 0))
    assert (out, type(out)) == (sample, type(sample))
    counted = sim.counters()
    assert (counted.h2d, counted.stream_waits) == (0, 0)


def test_named_values_stay_on_the_cpu_at_any_depth(device: torch.device) -> None:
    t = {name: torch.arange(3.0) + i for i, name in enumerate("abcdefghi")}
    sample = {
        "length": t["a"],
        "image": t["b"],
        "deep": [{"length": [t["c"]], "image": t["d"]}, Point(t["e"], t["f"]), Batch(t["g"], t["h"])],
        ("length", 0): t["i"],
    }
    out = moved(sample, device, keep_on_cpu=["length", "y"])
    point, batch = out["deep"][1:]
    assert out["length"] is t["a"]
    assert out["deep"][0]["length"] is sample["deep"][0]["length"]
    assert (point.y is t["f"], batch.length is t["h"]) == (True, True)
    went = {
        "b": out["image"],
        "d": out["deep"][0]["image"],
        "e": point.x,
        "g": batch.image,
        "i": out["length", 0],
    }
    assert {name: content(new) for name, new in went.items()} == {name: content(t[name].to(device)) for name in went}
    assert (type(point), type(batch)) == (Point, Batch)


@pytest.mark.parametrize("kind", [Plain, Guarded])
def test_what_is_kept_is_the_same_object_also_beside_objects_that_move_late(
    kind: type[Moving], device: torch.device
) -> None:
    sample = {"host": [torch.ones(1), MappingProxyType({"a": 1})], "o": kind()}
    out = moved(sample, device, keep_on_cpu="host")
    assert out["host"] is sample["host"]
    assert out["o"].x.device == device


def test_what_is_kept_under_one_name_is_moved_under_another(device: torch.device) -> None:
    t = torch.arange(3.0)
    out = moved({"host": t, "device": t}, device, keep_on_cpu="host")
    assert out["host"] is t
    assert content(out["device"]) == content(t.to(device))


def test_names_that_are_kept_do_not_count_as_small_tensors(sim: simcuda.Simulator) -> None:
    sample = {str(i): torch.ones(2) for i in range(9)}
    moved(sample, torch.device("cuda", 0), keep_on_cpu=["0", "1"])
    assert sim.counters().h2d == 7  # eight would be one block


def test_an_attribute_name_of_a_plain_object_is_no_field(device: torch.device) -> None:
    item = Plain()
    out = moved(item, device, keep_on_cpu=["x"])
    assert out.x.device == device


# The source keeps its own


def rich_sample() -> Any:
    t = torch.arange(4.0)
    return {
        "dict": {"t": t, "same": t, "n": 1},
        "ordered": OrderedDict(b=t + 1, a=t + 2),
        "default": defaultdict(list, k=[t + 3]),
        "list": [t + 4, (t + 5, "s")],
        "deque": deque([t + 6], maxlen=3),
        "point": Point(t + 7),
        "batch": Batch(t + 8, t.reshape(2, 2).t()),
        "frozen": Frozen(t + 9),
        "user": UserDict(a=t + 10),
        "sparse": torch.eye(2).to_sparse(),
        "jagged": jagged(),
        "many": [torch.full((i,), i) for i in range(20)],
    }


def test_inputs_are_never_changed_and_the_second_epoch_gives_the_same(device: torch.device) -> None:
    """case 82"""
    sample = rich_sample()
    before, ids = canonical(sample), [id(value) for value in sample.values()]
    dp = IterableWrapper([sample, sample], deepcopy=False).to_cuda_stream(device)
    right = canonical(by_hand(sample, device))
    for _ in range(2):
        out = list(dp)
        assert [canonical(one) for one in out] == [right, right]
        assert (canonical(sample), [id(value) for value in sample.values()]) == (before, ids)
        assert all(one[name] is not sample[name] for one in out for name in sample)


def test_a_change_of_what_came_out_does_not_reach_the_source(device: torch.device) -> None:
    sample = rich_sample()
    before = canonical(sample)
    out = moved(sample, device)
    out["list"].append(1)
    out["dict"].clear()
    out["batch"].image = None
    out["deque"].append(2)
    out["default"]["new"].append(3)
    out["many"][5].copy_(torch.zeros(5, dtype=torch.int64))
    assert canonical(sample) == before


@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.no_grad, torch.inference_mode])
def test_inputs_are_right_and_unchanged_in_each_mode(mode: Callable[[], Any], device: torch.device) -> None:
    sample = [t() for name, t in TENSORS.items() if "large" not in name and "jagged" not in name]
    before = canonical(sample)
    with mode():
        out = moved(sample, device)
        right = by_hand(sample, device)
        assert [t.is_inference() for t in out] == [t.is_inference() for t in right]
    assert canonical(out) == canonical(right)
    assert canonical(sample) == before


def test_an_error_of_a_sample_comes_alone_and_threads_end(device: torch.device) -> None:
    cycle: list[Any] = [torch.ones(1)]
    cycle.append(cycle)
    with pytest.raises(ValueError, match="contains itself"):
        moved(cycle, device)
    assert [t for t in workers() if t.name.startswith("sidestream")] == []


# Any sample


def numbered(shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(int(np.prod(shape, dtype=int))).to(dtype).reshape(shape)


PLAIN = st.builds(
    numbered,
    st.lists(st.sampled_from([0, 1, 2, 3]), max_size=3),
    st.sampled_from([torch.float32, torch.int64, torch.bool, torch.complex64]),
)
SMALL = [name for name in TENSORS if "large" not in name and "jagged" not in name]
LEAVES = st.one_of(
    PLAIN,
    st.sampled_from(SMALL).map(lambda name: TENSORS[name]()),
    st.sampled_from([None, 1, 2.5, "text", b"x", ...]),
    st.just(np.arange(2)),
)
NAMES = st.sampled_from("abcdef")


def containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    several = st.lists(children, max_size=5)
    return st.one_of(
        several,
        several.map(tuple),
        several.map(lambda items: deque(items, maxlen=7)),
        st.lists(children, min_size=1, max_size=2).map(lambda items: items * 2),  # the same ones twice
        st.dictionaries(NAMES, children, max_size=4),
        st.dictionaries(NAMES, children, max_size=4).map(OrderedDict),
        st.dictionaries(NAMES, children, max_size=4).map(UserDict),
        st.builds(Point, children, children),
        st.builds(Batch, children, children),
        st.builds(Frozen, children),
    )


def occurrences(sample: Any) -> list[torch.Tensor]:
    """The tensors in a sample of these containers, as often as they occur."""
    if isinstance(sample, torch.Tensor):
        return [sample]
    if dataclasses.is_dataclass(sample):
        sample = [getattr(sample, field.name) for field in dataclasses.fields(sample)]
    values = sample.values() if isinstance(sample, (dict, UserDict)) else sample
    within = isinstance(sample, (dict, UserDict, list, tuple, deque))
    return [tensor for value in values for tensor in occurrences(value)] if within else []


def sharing(sample: Any) -> list[int]:
    """For each tensor, where the same object occurs first."""
    found = [id(tensor) for tensor in occurrences(sample)]
    return [found.index(one) for one in found]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sample=st.recursive(LEAVES, containers, max_leaves=25))
def test_any_sample_comes_out_as_by_hand(sample: Any, device: torch.device) -> None:
    before = canonical(sample)
    out = moved(sample, device)
    assert canonical(out) == canonical(by_hand(sample, device))
    assert sharing(out) == sharing(sample)
    assert canonical(sample) == before
