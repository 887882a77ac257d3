"""Batches are right on CUDA streams: order, lifetime, bounds, staging, state, devices, graphs.

The checks are in `streams.py`; `test_sabotage.py` shows that each of them can fail. Where the device is simulated,
every schedule runs; on a real one, what needs no log runs in the order that the device chooses.
"""

from __future__ import annotations

import contextlib
import functools
import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import streams
from helpers import Fn, run_child
from sidestream.transfer import side_stream
from streams import CHAINS, CONSUMERS, HOLDINGS, SAMPLES, UPSTREAM

SEEDS = 200
chains = pytest.mark.parametrize("chain", CHAINS)
consumers = pytest.mark.parametrize("consumer", CONSUMERS)
holdings = pytest.mark.parametrize("holding", HOLDINGS)
schedules = pytest.mark.parametrize("schedule", ["late", "ahead"])
sizes = pytest.mark.parametrize("size", [1, 2, 4])
two_devices = pytest.mark.skipif(
    streams.SIMULATOR is None and torch.cuda.device_count() < 2, reason="needs two devices"
)
pytestmark = pytest.mark.usefixtures("device")


# --- Values -----------------------------------------------------------------------------------------------


@schedules
@chains
@consumers
@holdings
def test_values_are_right_on_every_stream_in_either_order(schedule, chain, consumer, holding):
    # case 55, case 56, case 57, case 58
    streams.check_values(schedule, chain=chain, consumer=consumer, holding=holding)


@schedules
@chains
@pytest.mark.parametrize("sample", SAMPLES)
def test_every_tensor_of_a_sample_is_waited_for_and_guarded(schedule, chain, sample):
    # case 59; each schedule with the consumer that it shows most for
    streams.check_values(
        schedule, chain=chain, sample=sample, consumer={"late": "custom", "ahead": "default"}[schedule]
    )


@chains
@consumers
def test_values_are_right_under_200_random_schedules(sim, chain, consumer):
    for seed in range(SEEDS):
        sample, holding = ("nested", "plain")[seed % 2], "mixed"
        streams.check_values("random", seed, chain=chain, consumer=consumer, sample=sample, holding=holding, n=7)


@pytest.mark.parametrize("sample", SAMPLES)
def test_all_kinds_of_samples_are_right_under_random_schedules(sim, sample):
    for seed in range(SEEDS // 10):
        chain = list(CHAINS)[seed % 3]
        streams.check_values("random", seed, chain=chain, consumer="changing", sample=sample, holding="mixed")


@chains
@consumers
def test_values_are_right_where_work_takes_time(sim, chain, consumer):
    streams.check_values("timed", chain=chain, consumer=consumer, sample="nested", holding="mixed")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**32),
    chain=st.sampled_from(list(CHAINS)),
    consumer=st.sampled_from(list(CONSUMERS)),
    size=st.integers(1, 5),
    epochs=st.lists(
        st.tuples(st.lists(st.integers(0, 40_000), max_size=10), st.integers(0, 10)), min_size=1, max_size=4
    ),
)
def test_epochs_that_are_left_at_any_point_harm_no_other(sim, seed, chain, consumer, size, epochs):
    """Batches of any size, kept from every epoch, each left after some batches; those not taken are dropped."""
    streams.begin("random", seed)
    lengths: list[int] = []
    pipe = CHAINS[chain](Fn(lambda: (streams.full(i, n) for i, n in enumerate(lengths))), buffer_size=size)
    taken, expected = [], []
    for lengths, stop in epochs:
        taken += streams.take(_first(pipe, stop), consumer, "mixed")
        expected += [[streams.full(i, n)] for i, n in enumerate(lengths[:stop])]
    streams.check_same(streams.read(taken), expected)


def _first(pipe, n):
    with contextlib.closing(iter(pipe)) as iterator:
        yield from itertools.islice(iterator, n)


# --- Who waits for what -----------------------------------------------------------------------------------


@chains
def test_the_stream_that_is_current_at_each_next_waits_once(sim, chain):
    streams.check_one_wait(sim, chain)


@chains
def test_a_sample_is_complete_before_those_behind_it(sim, chain):
    streams.check_waits_for_its_own_copy(sim, chain)


@chains
def test_no_call_in_the_consumers_thread_waits_for_the_device(sim, chain):
    streams.check_host_never_waits(sim, chain)


def test_a_sample_without_tensors_costs_no_wait(sim):
    for _ in Fn(lambda: iter(["a", 1, None, {"b": []}])).to_cuda_stream("cuda"):
        pass
    assert sim.counters().stream_waits == sim.counters().event_records == 0


@pytest.mark.parametrize("sample", ["plain", "pinned", "coo"])
def test_threads_that_wait_for_the_device_sleep(sim, sample):
    streams.check_events_block(sim, sample)


# --- One copy stream --------------------------------------------------------------------------------------


def test_epochs_clones_and_movers_share_one_copy_stream_a_device(sim):
    streams.check_one_copy_stream(sim)


# --- Bounds -----------------------------------------------------------------------------------------------


@sizes
@pytest.mark.parametrize("chain", ["move", "prefetch, move"])
@pytest.mark.parametrize("consumer", ["default", "custom"])
def test_the_device_holds_buffer_size_plus_3_batches_and_no_more(size, chain, consumer):
    # case 61
    streams.check_memory_bound(size, chain=chain, consumer=consumer)


@sizes
def test_the_bound_holds_on_changing_streams(size):
    """Where the batch is dropped before the next one is asked for: its end is then before what the worker waits for."""
    streams.check_memory_bound(size, consumer="changing", early=True)


@sizes
@consumers
def test_the_bound_holds_in_any_schedule(sim, size, consumer):
    early = consumer == "changing"  # else the end of a batch is behind what the worker waits for, on another stream
    check = functools.partial(streams.check_memory_bound, size, consumer=consumer, early=early)
    check("ahead")
    check("timed", cycles=1_000_000, n=60)
    for seed in range(10):
        check("random", seed, n=60)


@consumers
def test_memory_is_bounded_where_the_prefetcher_comes_last(consumer):
    """Each stage adds no more than its own buffer and 3."""
    streams.begin()
    assert streams.peak_batches(2, consumer, chain="move, prefetch", early=True) <= (2 + 3) + (2 + 3)


@sizes
@consumers
def test_the_consumer_is_at_most_buffer_size_plus_2_steps_ahead(size, consumer):
    streams.check_steps_ahead(size, consumer)


# --- Staging ----------------------------------------------------------------------------------------------


def test_all_copies_come_from_pinned_memory_and_small_tensors_share_one(sim):
    streams.check_copies_are_pinned(sim)


def test_pinned_tensors_are_not_staged_again(sim):
    streams.check_pinned_is_not_staged(sim)


def test_the_source_is_asked_for_more_when_its_pinned_memory_has_been_read(sim):
    streams.check_pinned_source_is_waited_for(sim)


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("schedule", ["late", "ahead", "random", "timed"])
def test_a_source_may_overwrite_what_it_yielded(schedule, pinned):
    for seed in range(10 if schedule == "random" else 1):
        streams.check_overwriting_source(schedule, seed, pinned=pinned)


@pytest.mark.parametrize("kind", streams.LARGE)
def test_staging_starts_no_team_of_threads(kind):
    streams.check_no_team(kind)


@pytest.mark.parametrize("kind", streams.LARGE)
def test_large_samples_are_copied_from_pinned_memory(sim, kind):
    streams.check_large_copies_are_pinned(sim, kind)


# --- State ------------------------------------------------------------------------------------------------

MODES = {
    "plain": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cuda"),
}


@chains
@pytest.mark.parametrize("mode", MODES)
def test_the_consumers_thread_keeps_its_device_streams_and_modes(chain, mode):
    # case 63
    streams.check_state_is_left(chain, MODES[mode])


def test_the_state_is_left_where_next_raises():
    def source():
        yield streams.full(0)
        raise OSError(5, "disk")

    with torch.cuda.stream(torch.cuda.Stream()):
        before = streams.state()
        iterator = iter(Fn(source).to_cuda_stream("cuda"))
        next(iterator)
        with pytest.raises(OSError, match="disk"):
            next(iterator)
        assert streams.state() == before
        with pytest.raises(StopIteration):
            next(iterator)
        assert streams.state() == before


# --- Two devices ------------------------------------------------------------------------------------------


@two_devices
@schedules
@pytest.mark.parametrize("consumer", ["default", "custom"])
def test_a_mover_to_another_device_works_on_that_device(schedule, consumer):
    # case 64
    streams.check_other_device(schedule, consumer=consumer)


@two_devices
def test_values_are_right_on_another_device_under_random_schedules(sim):
    for seed in range(SEEDS // 4):
        streams.check_other_device("random", seed, consumer=("default", "custom")[seed % 2])


@two_devices
def test_tensors_of_two_devices_in_one_item_are_both_waited_for(sim):
    """What a prefetcher hands over is complete on each device's current stream."""
    samples = [streams.full(i).pin_memory() for i in range(8)]

    def source():
        for one in samples:
            yield [one.to(f"cuda:{device}", non_blocking=True) for device in (0, 1)]

    sim.reset("late")
    own = [torch.cuda.Stream(device) for device in (0, 1)]
    with torch.cuda.stream(own[0]), torch.cuda.stream(own[1]):
        got = [[one.clone() for one in pair] for pair in Fn(source).thread_prefetch()]
        got = [[one.cpu() for one in pair] for pair in got]
    streams.check_same(got, [[one, one] for one in samples])


# --- CUDA graphs ------------------------------------------------------------------------------------------


@chains
def test_next_in_a_capture_is_refused_and_nothing_is_lost(sim, chain):
    # case 66
    streams.check_capture_is_refused(sim, chain)


# --- GPU work upstream ------------------------------------------------------------------------------------


@schedules
@pytest.mark.parametrize("chain", UPSTREAM)
@consumers
@holdings
def test_gpu_work_on_a_worker_is_complete_and_safe_where_it_is_taken(schedule, chain, consumer, holding):
    streams.check_upstream_work(schedule, chain=chain, consumer=consumer, holding=holding)


@pytest.mark.parametrize("chain", UPSTREAM)
def test_gpu_work_on_a_worker_is_right_under_random_schedules(sim, chain):
    for seed in range(SEEDS // 5):
        streams.check_upstream_work("random", seed, chain=chain, consumer="changing", holding="mixed")


@schedules
@pytest.mark.parametrize("chain", ["prefetch, move", "move", "move, prefetch"])
def test_a_stream_that_the_source_made_current_is_waited_for(schedule, chain):
    streams.check_upstream_stream(schedule, chain=chain)


@chains
def test_tensors_that_are_on_the_device_pass_as_the_same_object(chain):
    # case 51
    made = [torch.zeros(8, device="cuda") for _ in range(5)]
    out = list(CHAINS[chain](Fn(lambda: ({"x": streams.full(i), "y": one} for i, one in enumerate(made)))))
    assert [sample["y"] is one for sample, one in zip(out, made, strict=True)] == [True] * 5
    streams.check_same([[sample["x"].cpu()] for sample in out], [[streams.full(i)] for i in range(5)])


# --- Device to host ---------------------------------------------------------------------------------------


@schedules
def test_a_cpu_target_is_complete_when_next_returns(schedule):
    # case 68
    streams.check_cpu_target(schedule)


# --- PyTorch's stream sanitizer ---------------------------------------------------------------------------

SANITIZED = """
import os, sys, threading
from streams import *
from torch.cuda._sanitizer import CUDASanitizerDispatchMode, CUDASanitizerErrors, EventHandler

lock, launch = threading.Lock(), EventHandler._handle_kernel_launch
def one_at_a_time(*args):  # the handler counts launches; two threads use it here
    with lock:
        return launch(*args)
EventHandler._handle_kernel_launch = one_at_a_time

def source():
    mode.__enter__()  # dispatch modes are the thread's own; this one ends with its thread
    threads.add(threading.get_native_id())
    yield from map(nested, range(8))

threads, mode = set(), CUDASanitizerDispatchMode()
wait = torch.cuda.Stream.wait_event
begin()
for chain in sys.argv[1:]:
    chain, waits = chain.split(":")
    if waits == "no":
        torch.cuda.Stream.wait_event = lambda self, event: None
    with mode, torch.cuda.stream(torch.cuda.Stream()):
        pipe = Fn(source)
        iterator = iter(CHAINS[chain](pipe))
        try:
            seen = [[part.clone() for part in parts(sample)] for sample in iterator]
            print(chain, len(seen))
        except CUDASanitizerErrors as errors:
            print("data race" in str(errors.errors[0]))
            iterator.close()
        seen = sample = None
assert threading.main_thread().native_id not in threads
sys.stdout.flush()
os._exit(0)  # the sanitizer's callbacks are called, and abort, when the interpreter is gone
"""


def _sanitized(*chains):
    code = SANITIZED.replace("sys.argv[1:]", repr(chains))
    return run_child(code)


@pytest.mark.usefixtures("sim")
@pytest.mark.parametrize("chain", ["move", "move, prefetch"])
def test_the_stream_sanitizer_is_silent(chain):
    done = _sanitized(f"{chain}:yes")
    assert (done.returncode, done.stdout) == (0, f"{chain} 8\n"), done.stderr


@pytest.mark.usefixtures("sim")
@pytest.mark.parametrize("chain", ["move", "move, prefetch"])
def test_the_stream_sanitizer_reports_a_missing_wait(chain):
    done = _sanitized(f"{chain}:no")
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_no_stream_of_the_user_is_the_side_stream(device: torch.device) -> None:
    """torch hands out 32 streams of a priority in turn."""
    assert side_stream(device) not in [torch.cuda.Stream(device) for _ in range(100)]
