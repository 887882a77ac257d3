"""Rebuild a nested sample with a function applied to each leaf that can move.

The first rule that fits wins:

1. a type given to `register_sample_type`, or a subclass of one, goes through its two functions;
2. a leaf goes to `fn`: tensors, and objects with a callable `to`, but neither modules nor classes;
3. mappings that can be assigned to, lists, deques and their subclasses are copied without a constructor, then
   filled: attributes, `default_factory`, `maxlen` and the order of keys stay;
4. namedtuples are made by `_make`, `torch.return_types` by their own class, other tuples by `tuple.__new__`;
5. a mapping that cannot be assigned to becomes a dict, with one warning for each type;
6. dataclass instances are copied, then their fields are set: no `__init__`, no `__post_init__`;
7. all else passes as the same object: strings, numbers, NumPy arrays, sets, generators, modules.

Rules 3 to 6 make new objects even where nothing changed (but for tuple types written in C), so the receiver
owns them. Inputs are never changed. An attribute that is neither item nor field is carried over, not walked.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import types
import warnings
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Iterable, Mapping, MutableMapping
from contextlib import suppress
from functools import lru_cache
from itertools import zip_longest
from typing import Any, ClassVar, TypeAlias

import torch

Flatten: TypeAlias = Callable[[Any], tuple[list[Any] | tuple[Any, ...], Any]]
Unflatten: TypeAlias = Callable[[list[Any], Any], Any]
Rebuild: TypeAlias = "Callable[[_Walk, Any], Any]"
Rule: TypeAlias = tuple[bool, Rebuild]  # whether to ask the instance for `to`, and what to do if it has none

_OPEN = (None, None)  # stands for what is being rebuilt: met again, it is a cycle
_MANY_TYPES = 1000  # a program that makes a namedtuple class for each batch must not fill the memory


class _Known:
    """The registered types; the rule of each type met since the last registration; the types warned about."""

    registered: ClassVar[dict[type, tuple[Flatten, Unflatten]]] = {}
    rules: ClassVar[dict[type, Rule]] = {}
    warned: ClassVar[weakref.WeakSet[type]] = weakref.WeakSet()


def map_leaves(fn: Callable[[Any], Any], sample: Any, *, keep: Container[Any] = ()) -> Any:
    """Rebuild `sample` with `fn` applied once to each distinct leaf, by the rules of this module.

    The same object twice in is the same object twice out. What stands under a name in `keep` (a key of a
    mapping, a field of a namedtuple or dataclass, at any depth) passes as the same object.

    Raises:
        ValueError: `sample` contains itself.
    """
    return _Walk(fn, keep).visit(sample)


def leaves(sample: Any, *, keep: Container[Any] = ()) -> list[Any]:
    """Return the distinct leaves of `sample` in the order of `map_leaves`. Only looks; a cycle is no error."""
    walk, found, seen, stack = _Walk(callable, keep), [], {}, [sample]
    while stack:
        one = stack.pop()
        rebuild = walk.rule(one)
        if rebuild is _same or id(one) in seen:
            continue
        seen[id(one)] = one  # holds it, so that its id does not come back
        if rebuild is _leaf:
            found.append(one)
        else:
            stack.extend(reversed(_children(walk, rebuild, one)))
    return found


def register_sample_type(type: type[Any], flatten: Flatten, unflatten: Unflatten) -> None:  # noqa: A002 - public
    """Say how to walk `type` and its subclasses. Registering it again replaces the functions.

    Args:
        type: The class.
        flatten: `flatten(obj)` returns `(children, context)`: a list or tuple of values to walk; anything.
        unflatten: `unflatten(children, context)` makes the new object from the list of rebuilt children.

    Raises:
        TypeError: `type` is no class, or one of the functions cannot be called.
    """
    checks = (type, inspect.isclass(type)), (flatten, callable(flatten)), (unflatten, callable(unflatten))
    for name, (value, right) in zip(("type", "flatten", "unflatten"), checks, strict=True):
        if not right:
            wanted = "a class" if name == "type" else "callable"
            msg = f"register_sample_type: {name} must be {wanted}, not {value!r}"
            raise TypeError(msg)
    _Known.registered[type] = (flatten, unflatten)
    _Known.rules = {}  # a new one: a walk in progress may still write an old rule into the old one


class _Walk:
    """One walk. No closure that calls itself: such a cycle would hold the tensors until it is collected."""

    __slots__ = ("done", "fn", "keep", "rules")

    def __init__(self, fn: Callable[[Any], Any], keep: Container[Any]) -> None:
        if len(_Known.rules) >= _MANY_TYPES:
            _Known.rules = {}
        self.fn, self.keep, self.rules = fn, keep or None, _Known.rules
        self.done: dict[int, tuple[Any, Any]] = {}  # by id; holds the object too, so that no id comes back

    def rule(self, sample: Any) -> Rebuild:
        kind = type(sample)
        asks, rebuild = self.rules.get(kind) or self.rules.setdefault(kind, _rule(kind))
        return _leaf if asks and callable(getattr(sample, "to", None)) else rebuild

    def visit(self, sample: Any) -> Any:
        rebuild = self.rule(sample)
        if rebuild is _same:
            return sample
        key = id(sample)
        done = self.done.get(key)
        if done is None and rebuild is _leaf:
            done = self.done[key] = (sample, self.fn(sample))
        elif done is None:
            self.done[key] = _OPEN
            done = self.done[key] = (sample, rebuild(self, sample))
        elif done is _OPEN:
            msg = f"the sample contains itself: a {type(sample).__qualname__} is met again inside itself, a cycle"
            raise ValueError(msg)
        return done[1]

    def kept(self, name: Any) -> bool:
        return self.keep is not None and isinstance(name, str) and name in self.keep


def _same(_: _Walk, sample: Any) -> Any:
    return sample


def _leaf(walk: _Walk, sample: Any) -> Any:
    return walk.fn(sample)


def _exact_sequence(walk: _Walk, sample: Any) -> Any:
    return type(sample)(map(walk.visit, sample))


def _exact_dict(walk: _Walk, sample: Any) -> Any:
    if walk.keep is None:
        return dict(zip(sample, map(walk.visit, sample.values()), strict=True))
    return {key: value if walk.kept(key) else walk.visit(value) for key, value in sample.items()}


def _registered(walk: _Walk, sample: Any) -> Any:
    children, context, unflatten = _flatten(sample)
    return unflatten(list(map(walk.visit, children)), context)


def _flatten(sample: Any) -> tuple[Iterable[Any], Any, Unflatten]:
    base = next(base for base in type(sample).__mro__ if base in _Known.registered)
    flatten, unflatten = _Known.registered[base]
    match flatten(sample):
        case (list() | tuple() as children, context):
            return children, context, unflatten
        case other:
            msg = f"flatten of {base.__qualname__} must return (list or tuple, context), not {other!r}"
            raise TypeError(msg)


def _children(walk: _Walk, rebuild: Rebuild, sample: Any) -> list[Any]:
    """Return what `rebuild` would visit."""
    if rebuild is _registered:
        return list(_flatten(sample)[0])
    if rebuild in (_exact_dict, _mapping):
        return [value for key, value in sample.items() if not walk.kept(key)]
    if rebuild is _dataclass:
        names = [field.name for field in dataclasses.fields(sample)]
        return [getattr(sample, name) for name in names if not walk.kept(name) and hasattr(sample, name)]
    fields: Any = getattr(type(sample), "_fields", ()) if rebuild is _tuple else ()
    return [value for name, value in zip_longest(fields, sample) if not walk.kept(name)]


def _mapping(walk: _Walk, sample: Any) -> Any:
    items = list(sample.items())
    new = {key: value if walk.kept(key) else walk.visit(value) for key, value in items}
    try:
        return _assign(sample, items, new)
    except Exception as reason:  # noqa: BLE001 - whatever the user's class raises: it cannot be assigned to
        kind = type(sample)
        if kind not in _Known.warned:
            text = f"a {kind.__qualname__} in a sample becomes a dict, it cannot be assigned to: {reason!r}"
            warnings.warn(f"{text}; register_sample_type() can keep it", stacklevel=2)
            _Known.warned.add(kind)
        return new


def _assign(sample: Any, items: list[tuple[Any, Any]], new: dict[Any, Any]) -> Any:
    if not hasattr(sample, "__setitem__"):
        msg = "no __setitem__"
        raise TypeError(msg)
    out = _clone(sample)
    for key, old in items:
        changed = new[key] is not old
        if changed or isinstance(sample, dict):  # all of a dict: some move to the end what is assigned
            out[key] = new[key]
        if changed and sample[key] is new[key]:
            sample[key] = old
            msg = "its copies share its items"
            raise TypeError(msg)
    return out


def _sequence(walk: _Walk, sample: Any) -> Any:
    out, children = _clone(sample), list(map(walk.visit, sample))
    if isinstance(sample, deque):
        deque.__init__(out, children, sample.maxlen)
    else:
        list.__init__(out, children)
    return out


def _tuple(walk: _Walk, sample: Any) -> Any:
    kind: Any = type(sample)
    names, (native, _) = getattr(kind, "_fields", None), _layout(kind)
    pairs = list(zip(names or [None] * len(sample), sample, strict=True))
    children = [value if walk.kept(name) else walk.visit(value) for name, value in pairs]
    in_c = native is not tuple or hasattr(kind, "n_sequence_fields")  # torch.Size, torch.return_types, ...
    if in_c and all(new is old for new, (_, old) in zip(children, pairs, strict=True)):
        return sample  # some refuse to be made anew
    out = native.__new__(kind, children) if names is None else kind._make(children)
    if hasattr(sample, "__dict__"):
        out.__dict__.update(sample.__dict__)
    return out


def _dataclass(walk: _Walk, sample: Any) -> Any:
    out = _clone(sample)
    for name in [field.name for field in dataclasses.fields(sample)]:
        if not walk.kept(name) and hasattr(sample, name):
            old = getattr(sample, name)
            new = walk.visit(old)
            if new is not old:
                object.__setattr__(out, name, new)
    return out


@lru_cache(_MANY_TYPES)
def _layout(kind: Any) -> tuple[Any, list[types.MemberDescriptorType]]:
    """Find the nearest base whose `__new__` is written in C, and all slots."""
    native = next(it for it in kind.__mro__ if isinstance(vars(it).get("__new__"), types.BuiltinFunctionType))
    members = (member for base in kind.__mro__ for member in vars(base).values())
    return native, [member for member in members if isinstance(member, types.MemberDescriptorType)]


def _clone(sample: Any) -> Any:
    """Copy as `copy.copy` does, but by no constructor of a dict or deque subclass, with all attributes.

    A `__copy__` written in Python is used if it gives a new object of the class. The items of lists and
    deques are left to the caller.
    """
    kind: Any = type(sample)
    native, slots = _layout(kind)
    if native not in (dict, list, deque, object):
        return copy.copy(sample)
    if isinstance(getattr(kind, "__copy__", None), types.FunctionType):
        out = copy.copy(sample)
        if type(out) is kind and out is not sample:
            return out
    out = native.__new__(kind)
    for slot in slots:
        with suppress(AttributeError):  # one that was never set
            slot.__set__(out, _own(sample, slot.__get__(sample)))
    state = getattr(sample, "__dict__", {})
    if state is sample:  # a dict whose attributes are its items
        out.__dict__ = out
    elif state:
        out.__dict__.update({name: _own(sample, value) for name, value in state.items()})
    if native is dict:
        base: Any = OrderedDict if isinstance(sample, OrderedDict) else dict
        for key, value in base.items(sample):
            base.__setitem__(out, key, value)
    return out


def _own(sample: Any, value: Any) -> Any:
    """Copy what may hold or mirror the items of a mapping: assignment must not reach the input."""
    holds = isinstance(sample, Mapping) and isinstance(value, (MutableMapping, list, set))
    return copy.copy(value) if holds else value


_EXACT: dict[Any, Rebuild] = {dict: _exact_dict, list: _exact_sequence, tuple: _exact_sequence}
_EXACT.update(dict.fromkeys((str, bytes, bool, int, float, complex, type(None)), _same))


def _rule(kind: type) -> Rule:  # noqa: PLR0911 - a table, first match wins
    if not _Known.registered.keys().isdisjoint(kind.__mro__):
        return False, _registered
    if issubclass(kind, torch.Tensor):
        return False, _leaf
    if kind in _EXACT or issubclass(kind, (torch.nn.Module, type)):
        return False, _EXACT.get(kind, _same)
    if issubclass(kind, Mapping):  # asked by its class: on an instance, an attribute is often an item
        return False, _leaf if callable(getattr(kind, "to", None)) else _mapping
    if issubclass(kind, (list, deque)):
        return True, _sequence
    if issubclass(kind, tuple):
        return True, _tuple
    return True, _dataclass if dataclasses.is_dataclass(kind) else _same
