"""`map_leaves` rebuilds every kind of sample as it was, moves each leaf once, and never changes its input.

The function applied is `moved`, which returns another tensor: a value left behind or moved twice is a wrong
number.
"""

from __future__ import annotations

import copy
import gc
import io
import sys
import time
import types
import warnings
import weakref
from collections import ChainMap, Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import InitVar, dataclass, field
from datetime import datetime, timezone
from decimal import Decimal
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from sidestream import samples
from sidestream.samples import map_leaves, register_sample_type


def tensor(value: float = 1.0) -> torch.Tensor:
    return torch.tensor([value])


def moved(leaf: Any) -> Any:
    """Stand in for a copy to a device: another tensor, 100 more than the one given."""
    return leaf + 100


def unchanged(leaf: Any) -> Any:
    return leaf


class Recorder:
    """A function for `map_leaves` that remembers the leaves it was given."""

    def __init__(self, function: Callable[[Any], Any] = moved) -> None:
        self.function = function
        self.seen: list[Any] = []

    def __call__(self, leaf: Any) -> Any:
        self.seen.append(leaf)
        return self.function(leaf)


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    """Forget after each test what it registered."""
    before = dict(samples._Known.registered)
    yield
    samples._Known.registered.clear()
    samples._Known.registered.update(before)
    samples._Known.rules = {}


class Pair(NamedTuple):
    left: Any
    right: Any = None


Empty = namedtuple("Empty", [])  # noqa: PYI024 - the old form too
One = namedtuple("One", ["x"])  # noqa: PYI024


class OddPair(Pair):
    """A namedtuple whose constructor takes something else."""

    def __new__(cls, text: str) -> OddPair:  # noqa: PYI034 - Self needs Python 3.11
        left, right = text.split()
        return super().__new__(cls, left, right)


class Tagged(dict):
    """A dict that cannot be made from a dict."""

    def __init__(self, items: dict[Any, Any], tag: str) -> None:
        super().__init__(items)
        self.tag = tag


class Meta(list):
    __slots__ = ("meta", "unset")

    def __init__(self, items: Any, meta: str) -> None:
        super().__init__(items)
        self.meta = meta


class TaggedTuple(tuple):  # noqa: SLOT001 - has a __dict__ on purpose
    """Has attributes, and a constructor of its own."""

    def __new__(cls, *items: Any, tag: str) -> TaggedTuple:  # noqa: PYI034
        self = super().__new__(cls, items)
        self.tag = tag
        return self

    def __reduce__(self) -> Any:
        """Let `copy.deepcopy`, the oracle below, make one."""
        return make_tagged_tuple, (tuple(self), self.tag)


def make_tagged_tuple(items: Any, tag: str) -> TaggedTuple:
    return TaggedTuple(*items, tag=tag)


class Movable:
    """What PyG or torchtext batches look like: they iterate, and move by their own `to`."""

    def __init__(self, x: torch.Tensor, batch_size: int = 3) -> None:
        self.x, self.batch_size = x, batch_size

    def to(self, device: Any) -> Movable:
        return type(self)(moved(self.x), self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("walked")

    def __len__(self) -> int:
        raise AssertionError("walked")

    def __getitem__(self, index: Any) -> Any:
        raise AssertionError("walked")


class MovableDict(UserDict):
    """What a TensorDict looks like: a mapping with a `to` and a batch size."""

    batch_size = 3

    def to(self, device: Any) -> Any:
        raise NotImplementedError


@dataclass
class Plain:
    x: Any
    name: str = "n"


@dataclass(frozen=True)
class Frozen:
    x: Any
    y: Any = 0


@dataclass(slots=True)
class Slotted:
    x: Any
    y: Any = 0


@dataclass(frozen=True, slots=True)
class FrozenSlotted:
    x: Any


@dataclass(frozen=True)
class HandSlotted:
    __slots__ = ("x",)
    x: Any


@dataclass
class Busy:
    """Its constructor counts, and makes fields that it does not take."""

    x: Any
    scale: InitVar[int]
    made: Any = field(init=False)
    runs = 0

    def __post_init__(self, scale: int) -> None:
        type(self).runs += 1
        self.made = scale


# Leaves


@pytest.mark.parametrize(
    "leaf",
    [
        torch.ones(2),
        torch.nn.Parameter(torch.ones(2)),
        torch.ones(2).to_sparse(),
        torch.ones(0, device="meta"),
        Movable(tensor()),
        pack_sequence([torch.ones(2), torch.ones(1)]),
        MovableDict(a=tensor()),
    ],
    ids=lambda leaf: type(leaf).__name__,
)
def test_a_leaf_is_given_to_the_function_whole(leaf: Any) -> None:
    """Cases 86, 87 and 88: an object is asked before it is taken for a mapping, sequence or namedtuple."""
    fn = Recorder(lambda _: "moved")
    assert map_leaves(fn, {"k": [leaf]}) == {"k": ["moved"]}
    assert len(fn.seen) == 1
    assert fn.seen[0] is leaf


def test_a_packed_sequence_is_a_leaf_though_a_namedtuple() -> None:
    """Case 88: field by field it would break."""
    packed = pack_sequence([torch.ones(2), torch.ones(1)])
    fn = Recorder(unchanged)
    assert map_leaves(fn, packed) is packed
    assert [type(leaf) for leaf in fn.seen] == [PackedSequence]


def test_an_object_moved_by_its_own_method_keeps_class_and_batch_size() -> None:
    """Cases 86 and 87."""
    batch = Movable(tensor(1), batch_size=7)
    out = map_leaves(lambda leaf: leaf.to("cpu"), [batch])[0]
    assert (type(out), out.batch_size, out.x.item(), batch.x.item()) == (Movable, 7, 101.0, 1.0)


def test_whether_an_object_can_move_is_asked_of_each_instance() -> None:
    class Maybe:
        pass

    cannot, can, blocked = Maybe(), Maybe(), Maybe()
    can.to = lambda device: device
    blocked.to = "an address"
    fn = Recorder(lambda _: "moved")
    for _ in range(2):  # the rule of a class is chosen once
        assert map_leaves(fn, [cannot, can, blocked]) == [cannot, "moved", blocked]
    assert fn.seen == [can, can]


def test_modules_and_classes_are_no_leaves() -> None:
    for value in (torch.nn.Linear(1, 1), torch.nn.ModuleDict(), Movable, torch.Tensor, PackedSequence, type):
        fn = Recorder()
        assert map_leaves(fn, [value])[0] is value
        assert fn.seen == []


@pytest.mark.parametrize("kind", ["attribute", "default", "item"])
def test_a_mapping_is_asked_for_to_by_its_class_not_by_its_items(kind: str) -> None:
    """Attribute access on a dict is often item access: it may raise KeyError, add a key, or find an item."""

    class Dots(defaultdict if kind == "default" else dict):
        __getattr__ = dict.__getitem__ if kind != "default" else defaultdict.__getitem__

    sample = Dots(list) if kind == "default" else Dots()
    sample["x"] = tensor(1)
    if kind == "item":
        sample["to"] = max  # can be called, is an item
    keys = list(sample)
    out = map_leaves(moved, sample)
    assert (type(out), list(out), list(sample)) == (Dots, keys, keys)
    assert (out["x"].item(), sample["x"].item()) == (101.0, 1.0)


# Values that pass


class Colour(Enum):
    RED = 1


class Str(str):  # noqa: SLOT000
    pass


@pytest.mark.parametrize(
    "value",
    ["abc", b"xy", bytearray(b"z"), memoryview(b"q"), np.str_("s"), Str("s"), np.bytes_(b"b"), ""],
    ids=lambda value: type(value).__name__,
)
def test_strings_are_the_same_object(value: Any) -> None:
    """Case 72."""
    assert map_leaves(moved, {"n": value})["n"] is value
    assert map_leaves(moved, value) is value


def generator() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        1.5,
        2 + 1j,
        Colour.RED,
        Path("a"),
        datetime(2020, 1, 1, tzinfo=timezone.utc),
        Decimal("1.5"),
        lambda: None,
        int,
        slice(1),
        range(3),
        ...,
        generator(),
        io.StringIO("text"),
        {1, 2},
        frozenset({1}),
        np.ones(3),
        np.array([None, 1], dtype=object),
        np.float32(1.5),
        torch.float32,
        torch.device("cpu"),
        torch.Generator(),
        object(),
        types.SimpleNamespace(x=1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_values_are_the_same_object(value: Any) -> None:
    """Case 73."""
    fn = Recorder()
    assert map_leaves(fn, [value])[0] is value
    assert map_leaves(fn, value) is value
    assert fn.seen == []


def test_generators_and_files_are_not_read() -> None:
    """Case 73."""
    source, file = generator(), io.StringIO("text")
    map_leaves(moved, [source, file])
    assert (next(source), file.read()) == (1, "text")


# Built-in containers


def test_built_in_containers_keep_their_class_at_every_level() -> None:
    """Case 74."""
    kept = frozenset({"f"})
    out = map_leaves(moved, ([tensor(1)], {"d": (tensor(2),)}, deque([tensor(3)], maxlen=4), {"s"}, kept))
    assert [type(value) for value in out] == [list, dict, deque, set, frozenset]
    assert (type(out), type(out[1]["d"]), out[2].maxlen, out[4] is kept) == (tuple, tuple, 4, True)
    assert [out[0][0].item(), out[1]["d"][0].item(), out[2][0].item()] == [101.0, 102.0, 103.0]


@pytest.mark.parametrize("empty", [[], (), {}, deque(), deque(maxlen=0), OrderedDict(), Tagged({}, "t"), Empty()])
def test_empty_containers_stay_what_they_are(empty: Any) -> None:
    out = map_leaves(moved, empty)
    assert type(out) is type(empty)
    assert out == empty


def test_containers_are_new_even_where_nothing_changed() -> None:
    inner = ["a"]
    sample = {"x": inner, "d": deque("a"), "o": OrderedDict(a=1), "c": Plain(1)}
    out = map_leaves(moved, sample)
    assert out == sample
    assert out is not sample
    assert [out[key] is sample[key] for key in sample] == [False] * 4


def test_keys_are_kept_as_they_are_and_in_order() -> None:
    """Case 76: other keys than strings, keys that are tensors."""
    key = tensor(5)
    sample = {3: tensor(1), "b": tensor(2), (1, "t"): tensor(3), key: tensor(4), None: 1}
    fn = Recorder()
    out = map_leaves(fn, sample)
    assert all(ours is theirs for ours, theirs in zip(out, sample, strict=True))
    assert [value.item() for value in list(out.values())[:4]] == [101.0, 102.0, 103.0, 104.0]
    assert [leaf.item() for leaf in fn.seen] == [1.0, 2.0, 3.0, 4.0]


# Mappings


def test_a_dict_subclass_keeps_class_attributes_and_input() -> None:
    """Case 76: the constructor is not called."""
    sample = Tagged({"z": tensor(1), "a": "s"}, tag="t")
    out = map_leaves(moved, sample)
    assert (type(out), out.tag, list(out), out["a"]) == (Tagged, "t", ["z", "a"], "s")
    assert (out["z"].item(), sample["z"].item(), sample.tag) == (101.0, 1.0, "t")


def test_an_ordered_dict_keeps_its_own_order() -> None:
    """Case 76: `move_to_end` changes the order that a plain dict does not see."""
    sample = OrderedDict(z=tensor(1), a=tensor(2), m=3)
    sample.move_to_end("z")
    out = map_leaves(moved, sample)
    assert (type(out), list(out), list(sample)) == (OrderedDict, ["a", "m", "z"], ["a", "m", "z"])
    out.move_to_end("m", last=False)
    assert list(out) == ["m", "a", "z"]


def test_a_counter_stays_a_counter() -> None:
    """Case 76: its own copy drops attributes."""
    sample = Counter("aab")
    sample.note = "n"
    out = map_leaves(moved, sample)
    assert (type(out), out, out.note) == (Counter, Counter("aab"), "n")


class Updated(OrderedDict):
    """Moves to the end what is assigned, as a recipe in Python's documentation does."""

    def __setitem__(self, key: Any, value: Any) -> None:
        if key in self:
            self.move_to_end(key)
        super().__setitem__(key, value)


def test_a_dict_that_reorders_on_assignment_keeps_its_order() -> None:
    out = map_leaves(moved, Updated(a=tensor(1), b="s", c=tensor(2)))
    assert (type(out), list(out)) == (Updated, ["a", "b", "c"])


def test_a_default_dict_keeps_its_factory() -> None:
    """Case 78."""
    out = map_leaves(moved, defaultdict(list, x=tensor(1)))
    assert (type(out), out.default_factory, out["x"].item(), out["missing"]) == (defaultdict, list, 101.0, [])


def test_a_default_dict_with_a_constructor_of_its_own() -> None:
    class Named(defaultdict):
        def __init__(self, name: str) -> None:
            super().__init__(list)
            self.name = name

    sample = Named("n")
    sample["x"].append(tensor(1))
    out = map_leaves(moved, sample)
    assert (type(out), out.default_factory, out.name, out["x"][0].item()) == (Named, list, "n", 101.0)
    assert sample["x"][0].item() == 1.0


def test_an_attribute_dict_moves_its_attributes_with_its_items() -> None:
    class Attributes(dict):
        def __init__(self, **items: Any) -> None:
            super().__init__(items)
            self.__dict__ = self

    sample = Attributes(x=tensor(1))
    out = map_leaves(moved, sample)
    assert (type(out), out.x is out["x"], out.x.item(), sample.x.item()) == (Attributes, True, 101.0, 1.0)


def test_a_dict_that_mirrors_items_as_attributes_is_assigned_by_its_own_method() -> None:
    """What `transformers`' ModelOutput does."""

    class Mirror(OrderedDict):
        def __setitem__(self, key: Any, value: Any) -> None:
            super().__setitem__(key, value)
            super().__setattr__(key, value)

    sample = Mirror()
    sample["logits"] = tensor(1)
    out = map_leaves(moved, sample)
    assert (type(out), out.logits is out["logits"], out.logits.item()) == (Mirror, True, 101.0)
    assert (sample.logits is sample["logits"], sample.logits.item()) == (True, 1.0)


def test_a_dict_that_notes_its_assignments_does_not_write_into_its_input() -> None:
    """Case 82: the note is an attribute, and a shallow copy shares it."""

    class Noting(dict):
        def __init__(self) -> None:
            self.inverse: dict[int, Any] = {}
            self.order: list[Any] = []

        def __setitem__(self, key: Any, value: Any) -> None:
            super().__setitem__(key, value)
            self.inverse[id(value)] = key
            self.order.append(key)

    one, sample = tensor(1), Noting()
    sample["x"] = one
    out = map_leaves(moved, sample)
    assert (type(out), out["x"].item(), out.inverse[id(out["x"])]) == (Noting, 101.0, "x")
    assert (sample["x"] is one, sample.inverse, sample.order) == (True, {id(one): "x"}, ["x"])


def test_a_user_dict_stays_one() -> None:
    """Case 79."""
    sample = UserDict(a=tensor(1), s="x")
    sample.note = "n"
    out = map_leaves(moved, sample)
    assert (type(out), out["a"].item(), out["s"], out.note) == (UserDict, 101.0, "x", "n")
    assert sample["a"].item() == 1.0


def test_a_chain_map_is_seen_whole() -> None:
    """Case 79."""
    sample = ChainMap({"a": tensor(1)}, {"b": tensor(2)})
    out = map_leaves(moved, sample)
    assert (type(out), out["a"].item(), out["b"].item()) == (ChainMap, 101.0, 102.0)
    assert (sample["a"].item(), sample["b"].item()) == (1.0, 2.0)


class Wrapper(MutableMapping):
    """A mapping in Python over a dict that it holds; its constructor takes two arguments."""

    def __init__(self, items: Any, tag: str) -> None:
        self.inside, self.tag = items, tag

    def __getitem__(self, key: Any) -> Any:
        return self.inside[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self.inside[key] = value

    def __delitem__(self, key: Any) -> None:
        del self.inside[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.inside)

    def __len__(self) -> int:
        return len(self.inside)


class SlottedWrapper(Wrapper):
    __slots__ = ("inside", "tag")


@pytest.mark.parametrize("kind", [Wrapper, SlottedWrapper])
def test_a_mapping_in_python_gets_items_of_its_own(kind: type[Wrapper]) -> None:
    """Cases 79 and 82: a shallow copy shares the dict inside, and would change the producer's sample."""
    sample = kind({"b": tensor(1), "a": "s"}, "t")
    out = map_leaves(moved, sample)
    assert (type(out), out.tag, list(out), out["b"].item()) == (kind, "t", ["b", "a"], 101.0)
    assert sample["b"].item() == 1.0


class Deep(Wrapper):
    """Holds its items two levels down, where no shallow copy gets at them."""

    def __init__(self, items: Any) -> None:
        super().__init__(items, "t")
        self.inside = types.SimpleNamespace(items=items)

    def __getitem__(self, key: Any) -> Any:
        return self.inside.items[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self.inside.items[key] = value

    def __iter__(self) -> Iterator[Any]:
        return iter(self.inside.items)


class TwoArguments(Mapping):
    def __init__(self, keys: list[Any], values: list[Any]) -> None:
        self.names, self.things = keys, values

    def __getitem__(self, key: Any) -> Any:
        return self.things[self.names.index(key)]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


class ReadOnlyDict(dict):
    def __setitem__(self, key: Any, value: Any) -> None:
        raise RuntimeError("read-only")


class CopiesAreItself(dict):
    def __copy__(self) -> CopiesAreItself:
        return self


@pytest.mark.parametrize(
    "sample",
    [
        types.MappingProxyType({"z": tensor(1), "a": "s"}),
        TwoArguments(["z", "a"], [tensor(1), "s"]),
        ReadOnlyDict(z=tensor(1), a="s"),
        Deep({"z": tensor(1), "a": "s"}),
    ],
    ids=lambda sample: type(sample).__name__,
)
def test_a_mapping_that_cannot_be_assigned_to_becomes_a_dict_with_one_warning(sample: Any) -> None:
    """Case 79: nothing is left on the CPU in silence, no exception from the user's class comes out."""
    samples._Known.warned.clear()
    with pytest.warns(UserWarning, match=f"{type(sample).__qualname__} in a sample becomes a dict") as caught:
        outs = [map_leaves(moved, sample) for _ in range(3)]
    assert len(caught) == 1
    for out in outs:
        assert (type(out), list(out), out["z"].item(), out["a"]) == (dict, ["z", "a"], 101.0, "s")
    assert sample["z"].item() == 1.0


@pytest.mark.parametrize("sample", [TwoArguments([], []), TwoArguments(["a"], ["s"]), types.MappingProxyType({})])
def test_a_read_only_mapping_becomes_a_dict_also_where_nothing_moves(sample: Any) -> None:
    """The class of what comes out does not depend on what is in it."""
    samples._Known.warned.clear()
    with pytest.warns(UserWarning, match="no __setitem__"):
        out = map_leaves(moved, sample)
    assert (type(out), out) == (dict, dict(sample))


def test_the_warning_does_not_keep_a_class_alive() -> None:
    class Local(ReadOnlyDict):
        pass

    with pytest.warns(UserWarning, match="becomes a dict"):
        map_leaves(moved, Local(x=tensor()))
    samples._Known.rules = {}
    samples._layout.cache_clear()
    local = weakref.ref(Local)
    del Local
    gc.collect()
    assert local() is None


def test_a_copy_that_is_the_object_itself_is_not_used() -> None:
    """Case 82."""
    sample = CopiesAreItself(x=tensor(1))
    out = map_leaves(moved, sample)
    assert (type(out), out["x"].item(), sample["x"].item()) == (CopiesAreItself, 101.0, 1.0)


def test_a_copy_method_of_the_class_is_used() -> None:
    class Counted(dict):
        def __copy__(self) -> Counted:
            out = Counted(self)
            out.copied = True
            return out

    out = map_leaves(moved, Counted(x=tensor(1)))
    assert (type(out), out.copied, out["x"].item()) == (Counted, True, 101.0)


def test_an_error_of_the_function_is_not_taken_for_one_of_the_mapping() -> None:
    error = ValueError("cannot move")

    def fail(_: Any) -> Any:
        raise error

    for sample in (
        OrderedDict(x=tensor()),
        Tagged({"x": tensor()}, "t"),
        UserDict(x=tensor()),
        Plain(tensor()),
    ):
        with pytest.raises(ValueError, match="cannot move") as caught:
            map_leaves(fail, sample)
        assert caught.value is error


# Lists and deques


def test_a_list_subclass_keeps_its_attributes() -> None:
    """Case 77, slots too: one that was never set stays unset."""
    sample = Meta([tensor(1), "s"], meta="m")
    out = map_leaves(moved, sample)
    assert (type(out), out.meta, hasattr(out, "unset"), len(out)) == (Meta, "m", False, 2)
    assert (out[0].item(), out[1], sample[0].item()) == (101.0, "s", 1.0)
    assert out is not sample


def test_a_deque_subclass_keeps_attributes_and_length_limit() -> None:
    """Cases 74 and 77: `deque.__copy__` calls the constructor, and forgets attributes."""

    class Window(deque):
        def __init__(self, tag: str) -> None:
            super().__init__(maxlen=2)
            self.tag = tag

    sample = Window("t")
    sample.extend([tensor(0), tensor(1), tensor(2)])
    out = map_leaves(moved, sample)
    assert (type(out), out.tag, out.maxlen) == (Window, "t", 2)
    assert [value.item() for value in out] == [101.0, 102.0]
    assert [value.item() for value in sample] == [1.0, 2.0]


def test_a_list_with_a_copy_method_is_filled_anew() -> None:
    class Copied(list):
        def __copy__(self) -> Copied:
            return Copied(self)

    out = map_leaves(moved, Copied([tensor(1), 2]))
    assert (type(out), len(out), out[0].item(), out[1]) == (Copied, 2, 101.0, 2)


# Tuples


def test_namedtuples_keep_class_and_fields() -> None:
    """Case 75: defaults, another constructor, no field, one field."""
    odd = OddPair("a b")
    out = map_leaves(moved, [Pair(tensor(1)), odd, Empty(), One(tensor(2))])
    assert [type(value) for value in out] == [Pair, OddPair, Empty, One]
    assert (out[0].left.item(), out[0].right, out[1], out[2], out[3].x.item()) == (
        101.0,
        None,
        ("a", "b"),
        (),
        102.0,
    )


def test_a_namedtuple_subclass_keeps_its_attributes() -> None:
    sample = OddPair("a b")
    sample.note = "n"
    assert map_leaves(moved, sample).note == "n"


def test_namedtuples_are_made_by_their_make() -> None:
    class Made(Pair):
        @classmethod
        def _make(cls, items: Any) -> Made:
            out = super()._make(items)
            out.made = True
            return out

    assert map_leaves(moved, Made(1, 2)).made is True


def test_torch_return_types_keep_their_class() -> None:
    """Case 75."""
    sample = torch.tensor([1.0, 3.0, 2.0]).topk(2)
    out = map_leaves(moved, sample)
    assert type(out) is torch.return_types.topk
    assert (out.values.tolist(), out.indices.tolist()) == ([103.0, 102.0], [101, 102])
    assert (sample.values.tolist(), sample.indices.tolist()) == ([3.0, 2.0], [1, 2])


def test_a_tuple_subclass_keeps_attributes_without_its_constructor() -> None:
    sample = TaggedTuple(tensor(1), "s", tag="t")
    out = map_leaves(moved, sample)
    assert (type(out), out.tag, out[0].item(), out[1]) == (TaggedTuple, "t", 101.0, "s")
    assert sample[0].item() == 1.0


@pytest.mark.parametrize(
    "value",
    [torch.Size([2, 3]), time.gmtime(0), sys.version_info, sys.flags],
    ids=lambda value: type(value).__name__,
)
def test_tuples_made_in_c_pass_where_nothing_in_them_can_move(value: Any) -> None:
    """Neither `tuple.__new__` nor, for some, anything else can make them; hidden fields would be lost."""
    assert map_leaves(moved, [value])[0] is value


# Dataclasses


def test_a_dataclass_is_copied_and_its_input_stays() -> None:
    sample = Plain([tensor(1)], "s")
    sample.extra = "e"
    out = map_leaves(moved, sample)
    assert (type(out), out.x[0].item(), out.name, out.extra) == (Plain, 101.0, "s", "e")
    assert (sample.x[0].item(), out is sample) == (1.0, False)


def test_a_frozen_dataclass() -> None:
    """Case 83."""
    sample = Frozen(tensor(1), {"k": tensor(2)})
    out = map_leaves(moved, sample)
    assert (type(out), out.x.item(), out.y["k"].item()) == (Frozen, 101.0, 102.0)
    assert (sample.x.item(), sample.y["k"].item()) == (1.0, 2.0)


@pytest.mark.parametrize("kind", [Slotted, FrozenSlotted, HandSlotted])
def test_a_dataclass_with_slots(kind: Any) -> None:
    """Case 84."""
    sample = kind(tensor(1))
    out = map_leaves(moved, sample)
    assert (type(out), out.x.item(), sample.x.item()) == (kind, 101.0, 1.0)


def test_a_dataclass_keeps_current_values_and_is_not_initialized_again() -> None:
    """Case 84: `init=False`, `InitVar`, `__post_init__`."""
    sample = Busy(tensor(1), scale=3)
    sample.made = tensor(2)
    runs = Busy.runs
    out = map_leaves(moved, sample)
    assert (type(out), out.x.item(), out.made.item(), sample.made.item()) == (Busy, 101.0, 102.0, 2.0)
    assert Busy.runs == runs


def test_a_dataclass_field_that_was_never_set_stays_unset() -> None:
    sample = Busy(tensor(1), scale=3)
    del sample.made
    out = map_leaves(moved, sample)
    assert (out.x.item(), hasattr(out, "made")) == (101.0, False)


def test_what_is_no_field_is_carried_over_as_it_is() -> None:
    @dataclass
    class Cached:
        x: Any

        @cached_property
        def double(self) -> Any:
            return self.x * 2

    sample = Cached(tensor(1))
    double = sample.double
    assert map_leaves(moved, sample).double is double


def test_a_dataclass_that_is_also_an_exception() -> None:
    """Its `__new__` is not that of `object`: it goes through `copy.copy`."""

    @dataclass
    class FailureError(Exception):
        x: Any

    sample = FailureError(tensor(1))
    out = map_leaves(moved, sample)
    assert (type(out), out.x.item(), sample.x.item()) == (FailureError, 101.0, 1.0)
    assert out.args[0] is sample.args[0]


# Order of the rules


def test_the_first_rule_wins_where_several_fit() -> None:
    @dataclass
    class Output(OrderedDict):
        logits: Any = None

    sample = Output()
    sample["x"] = tensor(1)
    out = map_leaves(moved, sample)
    assert (type(out), out["x"].item()) == (Output, 101.0)  # a mapping before a dataclass

    class Half(torch.nn.Module, tuple):  # noqa: SLOT001  # a module before a tuple
        pass

    module = Half()
    assert map_leaves(moved, [module])[0] is module


# Identity


def test_the_same_object_twice_is_moved_once_and_stays_the_same() -> None:
    """Case 98: a view is another tensor."""
    one, shared = tensor(1), [tensor(2)]
    sample = {"x": one, "y": (one, shared), "v": one[:1], "s": shared, "d": Frozen(one, shared)}
    fn = Recorder()
    out = map_leaves(fn, sample)
    assert out["x"] is out["y"][0]
    assert out["x"] is out["d"].x
    assert out["s"] is out["y"][1]
    assert out["s"] is out["d"].y
    assert out["v"] is not out["x"]
    assert [leaf.item() for leaf in fn.seen] == [1.0, 2.0, 1.0]


def test_an_object_with_to_is_moved_once_too() -> None:
    batch = Movable(tensor(1))
    out = map_leaves(lambda leaf: leaf.to("cpu"), [batch, {"again": batch}])
    assert out[0] is out[1]["again"]


def test_equal_objects_are_not_the_same_object() -> None:
    out = map_leaves(unchanged, [["a"], ["a"]])
    assert out == [["a"], ["a"]]
    assert out[0] is not out[1]


class Box:
    """Knows its values only when asked, and makes them anew each time."""

    def __init__(self, values: list[float]) -> None:
        self.values = values


def test_temporaries_are_not_mistaken_for_one_another() -> None:
    """What `flatten` makes is freed after its turn: its address may come back as another object's."""
    register_sample_type(
        Box,
        lambda box: ([[tensor(value)] for value in box.values], None),
        lambda children, _: Box([child[0].item() for child in children]),
    )
    out = map_leaves(moved, [Box([float(i), float(i) + 0.5]) for i in range(100)])
    assert [box.values for box in out] == [[i + 100.0, i + 100.5] for i in range(100)]


def test_leaves_that_are_temporaries_are_not_mistaken_for_one_another() -> None:
    register_sample_type(Box, lambda box: ([tensor(value) for value in box.values], None), lambda children, _: children)
    out = map_leaves(torch.Tensor.item, [Box([float(i), float(i) + 0.5]) for i in range(100)])
    assert out == [[float(i), i + 0.5] for i in range(100)]


def test_leaves_of_temporaries_are_all_found() -> None:
    register_sample_type(
        Box, lambda box: ([[tensor(value)] for value in box.values], None), lambda children, _: children
    )
    found = samples.leaves([Box([float(i), float(i) + 0.5]) for i in range(100)])
    assert [leaf.item() for leaf in found] == [i / 2 for i in range(200)]


def test_values_made_by_a_mapping_are_not_mistaken_for_one_another() -> None:
    class Lazy(TwoArguments):
        def __getitem__(self, key: Any) -> Any:
            return [tensor(super().__getitem__(key))]

    lazies = [Lazy(["a", "b"], [float(i), float(i) + 0.5]) for i in range(100)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        out = map_leaves(moved, lazies)
    assert [(d["a"][0].item(), d["b"][0].item()) for d in out] == [(i + 100.0, i + 100.5) for i in range(100)]


def test_nothing_of_a_walk_is_left_in_reference_cycles() -> None:
    """Else tensors live until the garbage collector comes by."""
    gc.collect()
    gc.disable()
    try:
        leaf = tensor(1)
        given, made = weakref.ref(leaf), []
        out = map_leaves(Recorder(lambda value: made.append(weakref.ref(value + 1)) or value + 1), [{"x": (leaf,)}])
        del leaf
        assert given() is None
        del out
        assert made[0]() is None
    finally:
        gc.enable()


# Cycles and depth


def cycle_of(kind: str) -> Any:
    if kind == "list":
        sample: Any = []
        sample.append(sample)
    elif kind == "dict":
        sample = {}
        sample["deep"] = ([sample],)
    elif kind == "dataclass":
        sample = Plain(None)
        sample.x = {"back": sample}
    elif kind == "deque":
        sample = deque()
        sample.append((sample,))
    else:
        sample = UserDict()
        sample["me"] = sample
    return sample


@pytest.mark.parametrize("kind", ["list", "dict", "dataclass", "deque", "UserDict"])
def test_a_cycle_is_an_error_that_says_so(kind: str) -> None:
    """Case 85."""
    sample = cycle_of(kind)
    with pytest.raises(ValueError, match=rf"contains itself: a {type(sample).__qualname__} .* a cycle"):
        map_leaves(moved, [sample])


def test_a_cycle_through_a_registered_type_is_an_error() -> None:
    box = Box([])
    register_sample_type(Box, lambda box: ([[box]], None), lambda children, _: children)
    with pytest.raises(ValueError, match="contains itself: a Box"):
        map_leaves(moved, box)


WRAPS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "dict": (lambda x: {"k": x}, lambda x: x["k"]),
    "list": (lambda x: [x], lambda x: x[0]),
    "tuple": (lambda x: (x,), lambda x: x[0]),
    "OrderedDict": (lambda x: OrderedDict(k=x), lambda x: x["k"]),
    "UserDict": (lambda x: UserDict(k=x), lambda x: x["k"]),
    "deque": (lambda x: deque([x]), lambda x: x[0]),
    "Pair": (Pair, lambda x: x.left),
    "Plain": (Plain, lambda x: x.x),
    "Meta": (lambda x: Meta([x], "m"), lambda x: x[0]),
}


@pytest.mark.parametrize("keep", [(), ("absent",)])
@pytest.mark.parametrize("name", [*WRAPS, "all"])
def test_depth_200_works(name: str, keep: tuple[str, ...]) -> None:
    """Case 85, at the recursion limit that Python has by default."""
    chosen = [WRAPS[name]] if name != "all" else list(WRAPS.values())
    depth = 200
    sample: Any = tensor(1)
    for level in range(depth):
        sample = chosen[level % len(chosen)][0](sample)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    try:
        out = map_leaves(moved, sample, keep=keep)
    finally:
        sys.setrecursionlimit(limit)
    for level in reversed(range(depth)):
        wrap, unwrap = chosen[level % len(chosen)]
        assert type(out) is type(wrap(None))
        out = unwrap(out)
    assert out.item() == 101.0


# Cost


@pytest.mark.parametrize("n", [10, 100, 1000])
def test_the_function_is_called_once_a_leaf(n: int) -> None:
    """Linear: as many calls as leaves, and on each container as many visits as it has items."""
    fn = Recorder()
    sample = {f"k{i}": tensor(i) for i in range(n)}
    out = map_leaves(fn, sample)
    assert len(fn.seen) == n
    assert all(seen is given for seen, given in zip(fn.seen, sample.values(), strict=True))
    assert [value.item() for value in out.values()] == [i + 100.0 for i in range(n)]


def test_python_calls_grow_with_the_leaves_only() -> None:
    def calls(n: int) -> int:
        sample, count = [tensor(i) for i in range(n)], [0]
        map_leaves(unchanged, sample)

        def profile(_frame: Any, event: str, _arg: Any) -> None:
            count[0] += event == "call"

        sys.setprofile(profile)
        try:
            map_leaves(unchanged, sample)
        finally:
            sys.setprofile(None)
        return count[0]

    ten, hundred, thousand = calls(10), calls(100), calls(1000)
    assert (hundred - ten, thousand - hundred) == (90 * 3, 900 * 3)  # the visit, the rule, the function


def test_many_classes_do_not_fill_the_memory() -> None:
    """A collate function may make a namedtuple class for each batch."""
    kinds = [type("Batch", (Pair,), {}) for _ in range(2100)]
    old = weakref.ref(kinds[0])
    for kind in kinds:
        assert type(map_leaves(moved, kind(tensor(1)))) is kind
    assert len(samples._Known.rules) <= 1001
    kind = None
    kinds.clear()
    gc.collect()
    assert old() is None


# Names that stay


def test_keep_passes_values_by_key_and_field_at_any_depth() -> None:
    length, mask = tensor(1), [tensor(2)]
    sample = {
        "length": length,
        "x": tensor(3),
        "pair": Pair(left=mask, right=tensor(4)),
        "deep": [Frozen(x=length, y=UserDict(length=length, z=tensor(5)))],
        "ordered": OrderedDict(left=mask),
        "own": Wrapper({"length": length}, "t"),
    }
    fn = Recorder()
    out = map_leaves(fn, sample, keep=("length", "left"))
    assert out["length"] is length
    assert out["pair"].left is mask
    assert out["ordered"]["left"] is mask
    assert out["deep"][0].y["length"] is length
    assert out["own"]["length"] is length
    assert [leaf.item() for leaf in fn.seen] == [3.0, 4.0, 1.0, 5.0]  # `x` of Frozen is not kept
    assert out["deep"][0].x.item() == 101.0


def test_keep_passes_dataclass_fields() -> None:
    sample = Plain([tensor(1)])
    assert map_leaves(moved, sample, keep={"x"}).x is sample.x


def test_keep_means_strings_only() -> None:
    """Neither a key of another type nor a position is a name."""
    out = map_leaves(moved, {0: tensor(1), "l": [tensor(2)]}, keep=(0, 1))
    assert (out[0].item(), out["l"][0].item()) == (101.0, 102.0)


def test_a_kept_object_is_still_moved_where_it_stands_under_another_name() -> None:
    one = tensor(1)
    out = map_leaves(moved, {"keep": one, "x": one}, keep=("keep",))
    assert out["keep"] is one
    assert out["x"].item() == 101.0


# Only looking


def test_leaves_are_those_that_would_be_moved_with_names_kept() -> None:
    batch, packed = Movable(tensor()), pack_sequence([torch.ones(1)])
    register_sample_type(Box, lambda box: (box.values, None), lambda children, _: Box(children))
    sample = {
        "keep": tensor(0),
        "x": [batch, packed, batch],
        "pair": Pair(left=tensor(1), right=tensor(2)),
        "box": Box([tensor(3)]),
        "plain": Plain(tensor(4), "s"),
        "top": torch.tensor([5.0]).topk(1),
        "linear": torch.nn.Linear(1, 1),
    }
    keep, fn = ("keep", "left"), Recorder(unchanged)
    map_leaves(fn, sample, keep=keep)
    found = samples.leaves(sample, keep=keep)
    assert [id(leaf) for leaf in found] == [id(leaf) for leaf in fn.seen]
    assert found[:2] == [batch, packed]
    assert [leaf.item() for leaf in found[2:]] == [2.0, 3.0, 4.0, 5.0, 0.0]


@pytest.mark.parametrize("kind", ["list", "dict", "dataclass", "deque", "UserDict"])
def test_leaves_of_a_cycle_are_found(kind: str) -> None:
    one = tensor(1)
    assert samples.leaves([cycle_of(kind), one]) == [one]


# Registered types


class Graph:
    def __init__(self, nodes: Any, name: str) -> None:
        self.nodes, self.name = nodes, name


class SubGraph(Graph):
    pass


def flatten_graph(graph: Graph) -> tuple[list[Any], str]:
    return [graph.nodes], graph.name


def test_a_registered_type_is_walked_by_its_functions() -> None:
    """Children and context come back in this order; the children as a list."""
    given: list[Any] = []

    def unflatten(children: list[Any], context: str) -> Graph:
        given.append((type(children), context))
        return Graph(children[0], context)

    graph = Graph([tensor(1)], "g")
    assert map_leaves(moved, [graph])[0] is graph  # not yet
    register_sample_type(Graph, flatten_graph, unflatten)
    out = map_leaves(moved, [graph])[0]
    assert (type(out), out.name, out.nodes[0].item(), graph.nodes[0].item()) == (Graph, "g", 101.0, 1.0)
    assert given == [(list, "g")]


def test_subclasses_follow_the_nearest_registered_class() -> None:
    register_sample_type(Graph, flatten_graph, lambda _children, _context: "graph")
    assert map_leaves(moved, SubGraph(1, "s")) == "graph"
    register_sample_type(SubGraph, flatten_graph, lambda _children, _context: "sub")
    assert (map_leaves(moved, SubGraph(1, "s")), map_leaves(moved, Graph(1, "g"))) == ("sub", "graph")


def test_registering_again_replaces() -> None:
    register_sample_type(Graph, flatten_graph, lambda _children, _context: "first")
    assert map_leaves(moved, Graph(1, "g")) == "first"
    register_sample_type(Graph, flatten_graph, lambda _children, _context: "second")
    assert map_leaves(moved, Graph(1, "g")) == "second"


def test_a_registered_type_comes_before_every_other_rule() -> None:
    """Even for a leaf, a string, a dict or a module."""
    for kind, value in (
        (Movable, Movable(tensor())),
        (str, "s"),
        (dict, OrderedDict(a=1)),
        (torch.nn.Module, torch.nn.ReLU()),
    ):
        register_sample_type(kind, lambda value: ((), value), lambda children, value: (children, value))
        out = map_leaves(moved, [value])[0]
        assert out[0] == []
        assert out[1] is value


def test_a_registered_type_moves_once() -> None:
    register_sample_type(Graph, flatten_graph, lambda children, context: Graph(children[0], context))
    graph = Graph(tensor(1), "g")
    out = map_leaves(moved, [graph, graph])
    assert out[0] is out[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((Graph(1, "g"), flatten_graph, max), "type must be a class, not <"),
        (("Graph", flatten_graph, max), "type must be a class, not 'Graph'"),
        ((Graph, None, max), "flatten must be callable, not None"),
        ((Graph, flatten_graph, 3), "unflatten must be callable, not 3"),
    ],
)
def test_bad_registrations_are_refused_at_once(arguments: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        register_sample_type(*arguments)
    assert Graph not in samples._Known.registered


@pytest.mark.parametrize("bad", [None, [1, 2, 3], "ab", ("ab", None), ({}, None), (x for x in ((), 1))])
def test_a_bad_answer_of_flatten_is_an_error_that_names_the_type(bad: Any) -> None:
    register_sample_type(Graph, lambda _: bad, lambda children, _: children)
    with pytest.raises(TypeError, match="flatten of Graph must return"):
        map_leaves(moved, SubGraph(1, "g"))


# Any nesting


TEXT = st.sampled_from(["a", "b", "c", "left", "x"])
SHARED = [tensor(float(i)) for i in range(3)]
LEAVES = st.one_of(
    st.builds(tensor, st.integers(0, 9).map(float)),
    st.sampled_from(SHARED),
    st.none(),
    TEXT,
    st.integers(0, 3),
)


def tagged(items: dict[Any, Any]) -> Tagged:
    return Tagged(items, "tag")


def default(items: dict[Any, Any]) -> Any:
    return defaultdict(list, items)


def nestings(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.lists(inner, max_size=3)
    dicts = st.dictionaries(TEXT, inner, max_size=3)
    return st.one_of(
        lists,
        dicts,
        lists.map(tuple),
        lists.map(lambda items: deque(items, maxlen=5)),
        lists.map(lambda items: Meta(items, "meta")),
        lists.map(lambda items: TaggedTuple(*items, tag="tag")),
        *(dicts.map(kind) for kind in (OrderedDict, default, tagged, UserDict)),
        dicts.map(lambda items: Wrapper(items, "tag")),
        *(st.builds(kind, inner, inner) for kind in (Pair, Frozen, Slotted)),
        inner.map(lambda value: [value, {"again": value}]),
    )


SAMPLES = st.recursive(LEAVES, nestings, max_leaves=12)


def parts(sample: Any) -> list[tuple[Any, Any]]:
    """List (name, value) of what is inside, written apart from the code under test."""
    if isinstance(sample, (dict, MutableMapping)):
        return [(key, sample[key]) for key in sample]
    if isinstance(sample, (list, tuple, deque)):
        return list(enumerate(sample))
    return [(name, getattr(sample, name)) for name in ("x", "y")] if isinstance(sample, (Frozen, Slotted)) else []


def leaves(sample: Any) -> list[torch.Tensor]:
    """List the tensors in order, each as often as it stands there."""
    if isinstance(sample, torch.Tensor):
        return [sample]
    return [leaf for _, value in parts(sample) for leaf in leaves(value)]


def described(sample: Any) -> Any:
    """Show classes, names, attributes and values, without identity."""
    if isinstance(sample, torch.Tensor):
        return ("tensor", sample.item())
    noted = [getattr(sample, name, None) for name in ("tag", "meta", "maxlen", "default_factory")]
    inside = [(name, described(value)) for name, value in parts(sample)]
    return (type(sample), noted, inside, sample if isinstance(sample, (str, int)) else None)


def nodes(sample: Any) -> list[int]:
    """List the ids of everything that has an identity, in order."""
    inside = [node for _, value in parts(sample) for node in nodes(value)]
    own = [id(sample)] if isinstance(sample, torch.Tensor) or parts(sample) else []
    return own + inside


def first_places(ids: list[int]) -> list[int]:
    """Say for each where it stood first: two walks with the same sharing give the same list."""
    return [ids.index(one) for one in ids]


@settings(max_examples=150, deadline=None)
@given(SAMPLES)
def test_any_sample_comes_back_as_it_was(sample: Any) -> None:
    before, ids = described(sample), nodes(sample)
    out = map_leaves(unchanged, sample)
    assert described(out) == before
    assert first_places(nodes(out)) == first_places(ids)
    assert (described(sample), nodes(sample)) == (before, ids)


@settings(max_examples=150, deadline=None)
@given(SAMPLES)
def test_any_sample_has_each_distinct_leaf_moved_once_in_order(sample: Any) -> None:
    fn, ids = Recorder(), nodes(sample)
    given_leaves, before = leaves(sample), described(sample)
    out = map_leaves(fn, sample)
    distinct = list(dict.fromkeys(map(id, given_leaves)))
    assert [id(leaf) for leaf in fn.seen] == distinct
    assert [id(leaf) for leaf in samples.leaves(sample)] == distinct
    assert [leaf.item() for leaf in leaves(out)] == [leaf.item() + 100 for leaf in given_leaves]
    assert first_places(nodes(out)) == first_places(ids)
    assert set(nodes(out)).isdisjoint(ids)  # nothing is shared with the input
    assert (described(sample), nodes(sample)) == (before, ids)


@settings(max_examples=100, deadline=None)
@given(SAMPLES)
def test_any_sample_equals_its_deep_copy_in_form(sample: Any) -> None:
    """Python's own copy is the oracle for classes, names and sharing; tensors are the leaves of both."""
    expected = copy.deepcopy(sample)
    out = map_leaves(torch.clone, sample)
    assert described(out) == described(expected)
    assert first_places(nodes(out)) == first_places(nodes(expected))


@settings(max_examples=100, deadline=None)
@given(SAMPLES)
def test_any_sample_keeps_what_is_named(sample: Any) -> None:
    def kept_leaves(value: Any, kept: bool) -> list[tuple[torch.Tensor, bool]]:
        if isinstance(value, torch.Tensor):
            return [(value, kept)]
        named = (*getattr(value, "_fields", ()),)
        inside = [(named[name] if named else name, part) for name, part in parts(value)]
        return [pair for name, part in inside for pair in kept_leaves(part, kept or name in ("left", "x"))]

    expected = kept_leaves(sample, False)
    out = leaves(map_leaves(moved, sample, keep=("left", "x")))
    assert [leaf.item() for leaf in out] == [leaf.item() + (0 if kept else 100) for leaf, kept in expected]
    assert all(ours is theirs for ours, (theirs, kept) in zip(out, expected, strict=True) if kept)
