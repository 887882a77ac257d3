"""Each check of the stream tests can fail: a rule of the stages is taken out, and the checks named for it go red.

The table names, for each sabotage, the checks of `streams.py` that find it. Each of them passes before and raises
AssertionError after. Nothing in the package is made for this: the sabotages replace its functions, or torch's.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

import streams
from sidestream import transfer
from sidestream.transfer import Copier, Fence, Pace, Transfer, _Move
from streams import SIMULATOR as SIM

pytestmark = pytest.mark.usefixtures("sim")
Patch = pytest.MonkeyPatch
Check = Callable[[], None]


def named(check: Callable[..., None], *args: Any, **options: Any) -> Check:
    return functools.partial(check, *args, **options)


def under_seeds(check: Callable[..., None], n: int = 40, **options: Any) -> Check:
    """The check under random schedules: some of them show the fault."""

    def run() -> None:
        for seed in range(n):
            check("random", seed, **options)

    return run


# --- What the consumer's stream waits for -----------------------------------------------------------------


def no_wait_at_delivery(patch: Patch) -> None:
    patch.setattr(torch.cuda.Stream, "wait_event", lambda self, event: None)


def wait_on_the_default_stream(patch: Patch) -> None:
    receive = Transfer.receive

    def sabotaged(self: Transfer, pace: Pace) -> Any:
        with torch.cuda.stream(torch.cuda.default_stream()):
            return receive(self, pace)

    patch.setattr(Transfer, "receive", sabotaged)


def wait_on_the_stream_of_the_first_next(patch: Patch) -> None:
    first: list[torch.cuda.Stream] = []
    receive = Transfer.receive

    def sabotaged(self: Transfer, pace: Pace) -> Any:
        first.append(torch.cuda.current_stream())
        with torch.cuda.stream(first[0]):
            return receive(self, pace)

    patch.setattr(Transfer, "receive", sabotaged)


def wait_in_the_workers_thread(patch: Patch) -> None:
    issue = Copier.issue

    def sabotaged(self: Copier, sample: Any) -> Transfer:
        parcel = issue(self, sample)
        parcel.receive(Pace(1))
        parcel.fences, parcel.guarded = {}, []
        return parcel

    patch.setattr(Copier, "issue", sabotaged)


def wait_for_the_whole_copy_stream(patch: Patch) -> None:
    receive = Transfer.receive

    def sabotaged(self: Transfer, pace: Pace) -> Any:
        for device in self.fences:
            torch.cuda.current_stream(device).wait_stream(transfer.side_stream(device))
        return receive(self, pace)

    patch.setattr(Transfer, "receive", sabotaged)


def wait_on_the_host(patch: Patch) -> None:
    receive = Transfer.receive

    def sabotaged(self: Transfer, pace: Pace) -> Any:
        for event in self.fences.values():
            event.synchronize()
        return receive(self, pace)

    patch.setattr(Transfer, "receive", sabotaged)


def event_before_the_copies(patch: Patch) -> None:
    run = _Move.run

    def sabotaged(self: _Move, *args: Any) -> Transfer:
        event = transfer.record(transfer.side_stream(self.device))
        parcel = run(self, *args)
        parcel.fences = {self.device: event}
        return parcel

    patch.setattr(_Move, "run", sabotaged)


def events_that_spin(patch: Patch) -> None:
    patch.setattr(transfer, "record", lambda stream: stream.record_event(torch.cuda.Event()))


def wait_on_the_current_device_only(patch: Patch) -> None:
    def sabotaged(self: Transfer, pace: Pace) -> Any:
        for event in self.fences.values():
            torch.cuda.current_stream().wait_event(event)
        pace.note([torch.cuda.current_stream(device) for device in self.fences])
        return self.sample

    patch.setattr(Transfer, "receive", sabotaged)


# --- Lifetime on the device -------------------------------------------------------------------------------


def guard_only(name: str, which: Callable[[Transfer, Any], bool]) -> Callable[[Patch], None]:
    def sabotage(patch: Patch) -> None:
        receive = Transfer.receive

        def sabotaged(self: Transfer, pace: Pace) -> Any:
            self.guarded = [(device, one) for device, one in self.guarded if which(self, one)]
            return receive(self, pace)

        patch.setattr(Transfer, "receive", sabotaged)

    sabotage.__name__ = f"guard {name}"
    return sabotage


guard_nothing = guard_only("nothing", lambda _, __: False)
guard_only_the_first_level = guard_only("only the first level", lambda parcel, one: one is parcel.sample)
guard_only_tensors = guard_only("only tensors", lambda _, one: isinstance(one, torch.Tensor))


def guard_on_the_default_stream(patch: Patch) -> None:
    record = torch.Tensor.record_stream
    patch.setattr(torch.Tensor, "record_stream", lambda self, _: record(self, torch.cuda.default_stream()))


def guard_only_values(patch: Patch) -> None:
    move = transfer._Move.tensor

    def sabotaged(self: transfer._Move, tensor: torch.Tensor) -> torch.Tensor:
        before = len(self.guarded)
        out = move(self, tensor)
        self.guarded[before:] = self.guarded[-1:]  # the values come last
        return out

    patch.setattr(transfer._Move, "tensor", sabotaged)


def guard_no_packed_block(patch: Patch) -> None:
    pack = transfer.pack

    def sabotaged(*args: Any) -> list[torch.Tensor]:
        pack(*args)
        return []

    patch.setattr(transfer, "pack", sabotaged)


# --- Bounds -----------------------------------------------------------------------------------------------


def no_bound(patch: Patch) -> None:
    note = Pace.note

    def sabotaged(self: Pace, streams: Any) -> None:
        note(self, streams)
        self.passed[-1] = []

    patch.setattr(Pace, "note", sabotaged)


def bound_of_one_more(patch: Patch) -> None:
    make = Pace.__init__

    def sabotaged(self: Pace, *args: Any) -> None:
        make(self, *args)
        self.passed.appendleft([])

    patch.setattr(Pace, "__init__", sabotaged)


def bound_on_the_stream_of_this_next(patch: Patch) -> None:
    note = Pace.note

    def sabotaged(self: Pace, streams: Any) -> None:
        self.recent = (streams, streams)
        note(self, streams)

    patch.setattr(Pace, "note", sabotaged)


def a_stream_for_each_epoch(patch: Patch) -> None:
    patch.setattr(transfer, "side_stream", torch.cuda.Stream)


def copies_on_the_default_stream(patch: Patch) -> None:
    patch.setattr(transfer, "side_stream", torch.cuda.default_stream)


# --- Staging ----------------------------------------------------------------------------------------------


def no_pinning(patch: Patch) -> None:
    patch.setattr(transfer, "staged", torch.clone)


def no_packing(patch: Patch) -> None:
    patch.setattr(transfer, "is_small", lambda *_: False)


def pinned_memory_staged_again(patch: Patch) -> None:
    patch.setattr(torch.Tensor, "is_pinned", lambda self: False)


def pinned_source_not_waited_for(patch: Patch) -> None:
    patch.setattr(_Move, "borrowed", property(lambda self: False, lambda self, value: None), raising=False)


def one_staging_buffer_for_all(patch: Patch) -> None:
    buffers: dict[int, torch.Tensor] = {}

    def sabotaged(tensor: torch.Tensor) -> torch.Tensor:
        buffer = buffers.setdefault(tensor.nbytes, torch.empty_like(tensor, pin_memory=True))
        return buffer.copy_(tensor)

    patch.setattr(transfer, "staged", sabotaged)


def staging_by_torchs_copy(patch: Patch) -> None:
    patch.setattr(transfer, "staged", lambda tensor: torch.empty_like(tensor, pin_memory=True).copy_(tensor))


# --- Work upstream, state, graphs, the CPU ----------------------------------------------------------------


def no_fence(patch: Patch) -> None:
    patch.setattr(Fence, "issue", lambda self, item: item)


def no_order_behind_the_source(patch: Patch) -> None:
    patch.setattr(_Move, "order", lambda self: None)


def order_behind_the_default_stream(patch: Patch) -> None:
    order = _Move.order

    def sabotaged(self: _Move) -> None:
        self.here = torch.cuda.default_stream()
        order(self)

    patch.setattr(_Move, "order", sabotaged)


def delivery_leaves_another_stream_current(patch: Patch) -> None:
    receive = Transfer.receive

    def sabotaged(self: Transfer, pace: Pace) -> Any:
        sample = receive(self, pace)
        torch.cuda.set_stream(torch.cuda.Stream())
        return sample

    patch.setattr(Transfer, "receive", sabotaged)


def delivery_leaves_another_device_current(patch: Patch) -> None:
    receive = Transfer.receive

    def sabotaged(self: Transfer, pace: Pace) -> Any:
        sample = receive(self, pace)
        torch.cuda.set_device(1)
        return sample

    patch.setattr(Transfer, "receive", sabotaged)


def captures_not_refused(patch: Patch) -> None:
    patch.setattr(transfer, "refuse_capture", lambda *_: None)


def unfinished_copies_to_the_cpu(patch: Patch) -> None:
    patch.setattr(transfer, "_to_cpu", lambda leaf: leaf.to("cpu", non_blocking=True))


OBJECTS = ("carried", "carried, slots", "carried, twice")
AHEAD = [sample for sample in streams.SAMPLES if sample != "late"]  # which needs no guard
late = functools.partial(named, streams.check_values, "late")
ahead = functools.partial(named, streams.check_values, "ahead")

TABLE: dict[Callable[[Patch], None], dict[str, Check]] = {
    no_wait_at_delivery: {
        "values, default stream": late(),
        "values, custom stream": late(consumer="custom"),
        "values, retained": late(holding="retained"),
        "values, random": under_seeds(streams.check_values),
        "one wait": named(streams.check_one_wait, SIM),
        "upstream work": named(streams.check_upstream_work),
    },
    wait_on_the_default_stream: {
        "values, custom stream": late(consumer="custom"),
        "one wait": named(streams.check_one_wait, SIM),
    },
    wait_on_the_stream_of_the_first_next: {
        "values, changing streams": late(consumer="changing"),
        "one wait": named(streams.check_one_wait, SIM),
    },
    wait_in_the_workers_thread: {
        "values, custom stream": late(consumer="custom"),
        "one wait": named(streams.check_one_wait, SIM),
    },
    wait_for_the_whole_copy_stream: {
        "own copy": named(streams.check_waits_for_its_own_copy, SIM),
        "one wait": named(streams.check_one_wait, SIM),
    },
    wait_on_the_host: {
        "host waits": named(streams.check_host_never_waits, SIM),
        "one wait": named(streams.check_one_wait, SIM),
    },
    event_before_the_copies: {
        "values, default stream": late(),
        "values, custom stream": late(consumer="custom"),
        "own copy": named(streams.check_waits_for_its_own_copy, SIM),
    },
    events_that_spin: {"events block": named(streams.check_events_block, SIM)},
    wait_on_the_current_device_only: {"another device": named(streams.check_other_device, across=False)},
    guard_nothing: {
        "values, ahead": ahead(),
        "values, random": under_seeds(streams.check_values, consumer="custom"),
        "upstream work, random": under_seeds(streams.check_upstream_work),
        **{f"{sample}, ahead": ahead(sample=sample) for sample in AHEAD},
    },
    guard_only_the_first_level: {
        f"{sample}, ahead": ahead(sample=sample)
        for sample in ("nested", "packed", "jagged", "coo", "csr", "packed sequence")
    },
    guard_only_tensors: {sample: ahead(sample=sample) for sample in OBJECTS},
    guard_on_the_default_stream: {"values, random": under_seeds(streams.check_values, consumer="custom")},
    guard_only_values: {"coo, ahead": ahead(sample="coo"), "csr, ahead": ahead(sample="csr")},
    guard_no_packed_block: {"packed, ahead": ahead(sample="packed")},
    no_bound: {
        "memory": named(streams.check_memory_bound),
        "memory, timed": named(streams.check_memory_bound, schedule="timed", cycles=1_000_000, n=60),
        "steps": named(streams.check_steps_ahead),
    },
    bound_of_one_more: {f"memory, {size}": named(streams.check_memory_bound, size) for size in (1, 2, 4)}
    | {f"steps, {size}": named(streams.check_steps_ahead, size) for size in (1, 2, 4)},
    bound_on_the_stream_of_this_next: {"steps, changing": named(streams.check_steps_ahead, consumer="changing")},
    a_stream_for_each_epoch: {"one stream": named(streams.check_one_copy_stream, SIM)},
    copies_on_the_default_stream: {"one stream": named(streams.check_one_copy_stream, SIM)},
    no_pinning: {"pinned": named(streams.check_copies_are_pinned, SIM)},
    no_packing: {"copies": named(streams.check_copies_are_pinned, SIM)},
    pinned_memory_staged_again: {"pinned": named(streams.check_pinned_is_not_staged, SIM)},
    pinned_source_not_waited_for: {
        "values": named(streams.check_overwriting_source, pinned=True),
        "asked for more": named(streams.check_pinned_source_is_waited_for, SIM),
    },
    one_staging_buffer_for_all: {"values": late()},
    staging_by_torchs_copy: {
        kind: named(streams.check_no_team, kind) for kind in ("contiguous", "transposed", "strided", "expanded")
    },
    no_fence: {
        "upstream work": named(streams.check_upstream_work),
        "values, prefetcher last": late(chain="move, prefetch", consumer="custom"),
    },
    no_order_behind_the_source: {"upstream work": named(streams.check_upstream_work, chain="move")},
    order_behind_the_default_stream: {"upstream stream": named(streams.check_upstream_stream)},
    delivery_leaves_another_stream_current: {"state": named(streams.check_state_is_left)},
    delivery_leaves_another_device_current: {"state": named(streams.check_state_is_left)},
    captures_not_refused: {"capture": named(streams.check_capture_is_refused, SIM)},
    unfinished_copies_to_the_cpu: {"values": named(streams.check_cpu_target)},
}

ROWS = [
    pytest.param(sabotage, check, id=f"{sabotage.__name__.replace('_', ' ')}: {name}")
    for sabotage, checks in TABLE.items()
    for name, check in checks.items()
]


def is_red(check: Check) -> bool:
    """Whether the check raises AssertionError; nothing keeps what the error's frames hold."""
    try:
        check()
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize(("sabotage", "check"), ROWS)
def test_a_sabotage_is_caught_by_the_checks_that_are_named_for_it(sabotage, check):
    assert not is_red(check)
    with pytest.MonkeyPatch.context() as patch:
        sabotage(patch)
        # Whether memory without a guard is used again in time, the threads decide: once in 50 runs it is not.
        red = any(is_red(check) for _ in range(5))
    gc.collect()  # an iterator that the check left behind
    streams.begin()
    assert red
