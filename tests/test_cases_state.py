"""State of the consumer's thread is there on the worker's, as of the first `next()`, and none comes back."""

from __future__ import annotations

import contextlib
import contextvars
import decimal
import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterDataPipe

from contract import BOTH_ORDERS, STAGES, Chain, IterableWrapper
from helpers import Fn

RUNS = 10


@pytest.fixture(params=BOTH_ORDERS)
def stage(request: pytest.FixtureRequest) -> Chain:
    return STAGES[request.param]


def modes() -> dict[str, Any]:
    """All that torch keeps for each thread by itself and that the stages carry."""
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast cpu": torch.is_autocast_enabled("cpu"),
        "autocast cpu dtype": torch.get_autocast_dtype("cpu"),
        "autocast cuda": torch.is_autocast_enabled("cuda"),
        "autocast cuda dtype": torch.get_autocast_dtype("cuda"),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "device": str(torch.get_default_device()),
        "new tensors": str(torch.empty(0).device),
    }


class Modes(IterDataPipe):
    """What the modes are where and when each item is made."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for _ in range(6):
            yield modes()


@contextlib.contextmanager
def autocast_cuda() -> Iterator[None]:
    """Autocast for CUDA as its own context sets it; that context refuses to where there is no CUDA."""
    enabled, dtype = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", enabled)
        torch.set_autocast_dtype("cuda", dtype)


@contextlib.contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


MODES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "nothing": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast, another type, no cache": lambda: torch.autocast("cpu", dtype=torch.float16, cache_enabled=False),
    "autocast cuda": autocast_cuda,
    "with device": lambda: torch.device("meta"),
    "set_default_device": default_device,
}


@pytest.mark.parametrize("mode", MODES)
def test_the_worker_has_the_consumers_modes(stage: Chain, mode: str) -> None:
    """case 115: on every item; the consumer's own are the same before, in and after."""
    outside = modes()
    with MODES[mode]():
        inside = modes()
        it = iter(stage(Modes()))
        for _ in range(6):
            assert next(it) == inside
            assert modes() == inside
        assert modes() == inside
    assert modes() == outside
    assert (inside == outside) is (mode == "nothing")


@pytest.mark.parametrize("mode", MODES)
def test_the_modes_are_those_of_the_first_next(stage: Chain, mode: str) -> None:
    """case 115: not those of `iter`; leaving the block in mid-epoch changes nothing for a running worker."""
    outside = modes()
    it = iter(stage(Modes()))
    with MODES[mode]():
        inside = modes()
        seen = [next(it)]
    seen += list(it)
    assert seen == [inside] * 6
    assert modes() == outside


def test_each_epoch_takes_the_modes_anew(stage: Chain) -> None:
    """case 115"""
    dp = stage(Modes())
    with torch.no_grad():
        assert {item["grad"] for item in dp} == {False}
    assert {item["grad"] for item in dp} == {True}


def square(x: torch.Tensor) -> torch.Tensor:
    return x @ x


def test_tensors_made_upstream_are_what_the_consumers_mode_makes(stage: Chain) -> None:
    """case 115: no graph is built behind a consumer's back."""
    weight = torch.ones(2, requires_grad=True)
    dp = stage(IterableWrapper([torch.ones(2)]).map(functools.partial(torch.mul, weight)))
    with torch.no_grad():
        assert [(x.requires_grad, x.grad_fn) for x in dp] == [(False, None)]
    with torch.inference_mode():
        assert [x.is_inference() for x in dp] == [True]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert [x.dtype for x in stage(IterableWrapper([torch.ones(2, 2)]).map(square))] == [torch.bfloat16]
    assert [x.requires_grad for x in dp] == [True]


COLOUR: contextvars.ContextVar[str] = contextvars.ContextVar("colour", default="none")


def test_the_worker_sees_the_consumers_context_and_changes_only_its_own(stage: Chain) -> None:
    """case 116"""

    def src() -> Iterator[str]:
        for number in range(4):
            yield COLOUR.get()
            COLOUR.set(f"worker {number}")

    dp = stage(Fn(src))
    token = COLOUR.set("red")
    it = iter(dp)
    COLOUR.set("blue")
    assert next(it) == "blue"
    COLOUR.set("green")
    assert list(it) == ["worker 0", "worker 1", "worker 2"]
    assert COLOUR.get() == "green"
    assert next(iter(dp)) == "green"
    COLOUR.reset(token)


def test_decimal_precision_and_numpy_errors_ride_on_the_context(stage: Chain) -> None:
    """case 116"""

    def src() -> Iterator[tuple[str, str]]:
        yield str(decimal.Decimal(1) / 3), np.geterr()["divide"]

    with decimal.localcontext() as context, np.errstate(divide="raise"):
        context.prec = 5
        assert list(stage(Fn(src))) == [("0.33333", "raise")]


def process_wide() -> tuple[Any, ...]:
    return (
        torch.get_default_device(),
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.get_num_interop_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_autocast_cache_enabled(),
    )


def test_nothing_process_wide_is_changed(stage: Chain) -> None:
    """case 117"""
    before = process_wide()
    with torch.device("meta"):
        for item in stage(Fn(lambda: (process_wide() for _ in range(3)))):
            assert item == (torch.device("meta"), *before[1:])
    assert process_wide() == before


def test_the_consumers_autocast_cache_is_not_cleared(stage: Chain) -> None:
    """case 117: leaving `torch.autocast` on another thread would clear the cache for everybody."""
    weight = torch.ones(2, 2, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cleared: list[int] = []
        original, torch.clear_autocast_cache = torch.clear_autocast_cache, lambda: cleared.append(1)
        try:
            assert len(list(stage(Fn(lambda: (weight @ weight for _ in range(3)))))) == 3
        finally:
            torch.clear_autocast_cache = original
    assert cleared == []


def generators() -> tuple[Any, ...]:
    name, keys, *rest = np.random.get_state()  # noqa: NPY002 - the global one is what is watched
    return torch.get_rng_state().tolist(), random.getstate(), name, keys.tolist(), rest


def test_the_stages_draw_no_random_number(stage: Chain) -> None:
    """case 119"""
    before = generators()
    dp = stage(IterableWrapper(range(20)))
    assert list(dp) == list(range(20))
    next(iter(dp))
    assert generators() == before


def draw(own: torch.Generator, _: int) -> torch.Tensor:
    return torch.rand(1, generator=own)


def test_a_generator_of_its_own_makes_a_pipe_repeatable(stage: Chain) -> None:
    """case 119: though the consumer draws from the global generator meanwhile."""

    def run() -> list[float]:
        torch.manual_seed(0)
        own = torch.Generator().manual_seed(5)
        out = []
        for item in stage(IterableWrapper(range(8)).map(functools.partial(draw, own))):
            torch.rand(3)
            out.append(float(item))
        return out

    own = torch.Generator().manual_seed(5)
    expected = [float(torch.rand(1, generator=own)) for _ in range(8)]
    assert [run() for _ in range(RUNS)] == [expected] * RUNS
