"""Reported faults of streams, pinned memory and devices, each with the right value.

Growth on the device and of pinned memory, the life of the host's source, stream order and reuse, copies to the CPU,
the wrong device. What another file holds already is named where it would stand.
"""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Iterator

import pytest
import torch

import streams
from contract import DataLoader2, InProcessReadingService
from helpers import Fn, eventually, run_child
from streams import CHAINS, N, check_same, full, take

pytestmark = pytest.mark.usefixtures("device")
chains = pytest.mark.parametrize("chain", CHAINS)


def moved(make, n, **options):
    return Fn(lambda: map(make, range(n))).to_cuda_stream("cuda", **options)


# --- Growth -----------------------------------------------------------------------------------------------


def test_pinned_memory_settles(sim):
    """case 44: sizes come again after more batches than the look-ahead, so one pinned block for each size is enough."""
    sizes = [1 << k for k in range(15, 22)]
    _empty_pinned_cache()
    sim.reset("late")
    for step, batch in enumerate(Fn(lambda: (torch.empty(sizes[i % 7]) for i in range(1000))).to_cuda_stream("cuda")):
        assert batch.numel() == sizes[step % 7]
    assert sim.counters().host_allocs == 7


def test_no_more_pinned_batches_are_alive_than_the_look_ahead_and_one(sim):
    """case 44: nothing pinned is held once the device has read it; buffer_size + 2 copies wait, one is being staged."""
    _empty_pinned_cache()
    sim.reset("late")
    for _ in moved(full, 300, buffer_size=4):
        streams.busy()
    assert sim.counters().host_allocs <= 4 + 3


def _empty_pinned_cache():
    torch.cuda.synchronize()
    torch._C._host_emptyCache()


@chains
def test_reserved_memory_is_the_same_after_2_epochs_and_after_40(chain):
    """case 45"""
    streams.begin("ahead")
    pipe = CHAINS[chain](Fn(lambda: map(full, range(8))))
    reserved = []
    for _ in range(40):
        for batch in pipe:
            batch.clone()
        del batch
        torch.cuda.synchronize()
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[39] == reserved[1]


@pytest.mark.parametrize("size", [1, 3])
def test_the_extra_batches_are_a_constant(size):
    """case 46: the consumer's, those that wait, the one in hand, and the one that the consumer has just let go."""
    streams.begin()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for _ in moved(full, 100, buffer_size=size):
        streams.busy()
    assert torch.cuda.max_memory_allocated() - before <= (size + 3) * streams.BATCH


# --- Pinned memory and the life of the host's source ------------------------------------------------------


@pytest.mark.parametrize("schedule", ["late", "ahead", "random"])
def test_a_pinned_batch_lives_as_long_as_its_copy_is_queued(schedule):
    """case 48: a fresh pinned tensor for each item. When the source is asked for more, nobody but torch's own wrapper
    of its generator still has the last one, and at the end nobody has any."""
    streams.begin(schedule)
    refs: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def source() -> Iterator[torch.Tensor]:
        for i in range(20):
            batch = full(i).pin_memory()
            refs.append(weakref.ref(batch))
            yield batch
            del batch
            alive.append(sum(ref() is not None for ref in refs))

    gc.disable()
    try:
        check_same(streams.read(take(Fn(source).to_cuda_stream("cuda"), "custom")), [[full(i)] for i in range(20)])
    finally:
        gc.enable()
    assert alive == [1] * 20
    assert [ref() for ref in refs] == [None] * 20


@pytest.mark.parametrize("schedule", ["late", "ahead", "random", "timed"])
def test_memory_pinned_by_others_may_go_when_the_source_is_asked_for_more(schedule):
    """case 48: a registered buffer, which torch's allocator knows nothing of, is unregistered and overwritten then."""
    streams.begin(schedule, bandwidth=1e8)
    runtime = torch.cuda.cudart()

    def source() -> Iterator[torch.Tensor]:
        for i in range(8):
            memory = bytearray(4 * N)
            batch = torch.frombuffer(memory, dtype=torch.float32)
            batch.fill_(i)
            assert int(runtime.cudaHostRegister(batch.data_ptr(), 4 * N, 0)) == 0
            assert batch.is_pinned()
            yield batch
            assert int(runtime.cudaHostUnregister(batch.data_ptr())) == 0
            batch.fill_(-1)

    check_same(streams.read(take(Fn(source).to_cuda_stream("cuda"), "custom")), [[full(i)] for i in range(8)])


# case 49: held by test_streams.py::test_a_source_may_overwrite_what_it_yielded
# case 50: held by test_streams.py::test_pinned_tensors_are_not_staged_again
# case 51, on the target device: held by test_streams.py::test_tensors_that_are_on_the_device_pass_as_the_same_object
# case 51, from another device: held by test_streams.py::test_a_mover_to_another_device_works_on_that_device


@chains
def test_empty_and_scalar_tensors_arrive_and_leave_no_error(chain):
    """case 52"""
    sample = (
        torch.empty(0, 3),
        torch.empty(0, dtype=torch.int16),
        torch.tensor(5),
        torch.empty(0, 3).pin_memory(),
    )
    [out] = list(CHAINS[chain](Fn(lambda: iter([sample]))))
    assert [(t.shape, t.dtype, t.device.type) for t in out] == [(t.shape, t.dtype, "cuda") for t in sample]
    assert out[2].item() == 5
    torch.cuda.synchronize()


def test_without_cuda_building_touches_nothing_and_iterating_says_so():
    """case 53"""
    done = run_child(
        """
        import copy, pickle
        import torch
        import sidestream
        from contract import IterableWrapper
        source = IterableWrapper([torch.ones(2)])
        cuda, cpu = source.to_cuda_stream("cuda"), source.to_cuda_stream("cpu")
        pickle.loads(pickle.dumps(cuda)), copy.deepcopy(cuda), len(cuda)
        assert [out.tolist() for out in cpu] == [[1.0, 1.0]]
        assert not torch.cuda.is_initialized()
        try:
            next(iter(cuda))
        except RuntimeError as error:
            print("to_cuda_stream" in str(error), "'cuda'" in str(error), error.__cause__)
        """,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "SIDESTREAM_TEST_DEVICE": "none"},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "True True None\n", "")


def test_the_next_copies_run_while_a_kernel_does(sim):
    """case 54: with a step queued that has not run, the copies of the batches ahead are done."""
    sim.reset("ahead")
    iterator = iter(moved(full, 10))
    next(iterator)
    streams.busy()
    assert eventually(lambda: sim.counters().h2d == 4)
    assert eventually(lambda: streams.copies_run(sim) == 4)
    kernels = [op.stream for op in sim.log() if op.kind == "kernel"]
    assert kernels == [0]
    assert sim.pending(0) > 0
    iterator.close()


# --- Streams: order and reuse of memory on the device -----------------------------------------------------

# case 55, the values: held by test_streams.py::test_values_are_right_on_every_stream_in_either_order
# case 55, no wait on the host: held by test_streams.py::test_no_call_in_the_consumers_thread_waits_for_the_device
# case 56: held by test_streams.py::test_values_are_right_on_every_stream_in_either_order[...-move, prefetch-...]
# case 57: held by test_streams.py::test_the_stream_that_is_current_at_each_next_waits_once
# case 58: held by test_streams.py::test_values_are_right_on_every_stream_in_either_order[dropped-...]
# case 59: held by test_streams.py::test_every_tensor_of_a_sample_is_waited_for_and_guarded


class Own:
    """A batch object that moves itself and notes what it was asked for."""

    def __init__(self, x):
        self.x = x
        self.calls = []

    def to(self, device, non_blocking=False):
        out = type(self)(self.x.to(device, non_blocking=non_blocking))
        out.calls = [("to", torch.cuda.current_stream(), non_blocking)]
        return out


class Guarding(Own):
    def record_stream(self, stream):
        self.calls.append(("record_stream", stream))
        self.x.record_stream(stream)


def test_an_object_with_a_guard_of_its_own_is_moved_ahead_and_guarded_by_it():
    """case 60"""
    own = torch.cuda.Stream()
    with torch.cuda.stream(own):
        out = list(moved(lambda i: Guarding(full(i)), 4))
        check_same([[one.x.cpu()] for one in out], [[full(i)] for i in range(4)])
    for one in out:
        [(to, ahead_on, non_blocking), guard] = one.calls
        assert (to, non_blocking) == ("to", True)
        assert ahead_on not in (own, torch.cuda.default_stream())
        assert guard == ("record_stream", own)


def test_an_object_without_one_is_moved_at_delivery_on_the_consumers_stream():
    """case 60"""
    own = torch.cuda.Stream()
    with torch.cuda.stream(own):
        out = list(moved(lambda i: Own(full(i)), 4))
        assert [one.calls for one in out] == [[("to", own, True)]] * 4
        check_same([[one.x.cpu()] for one in out], [[full(i)] for i in range(4)])


def test_reserved_memory_is_bounded_for_a_consumer_that_runs_ahead():
    """case 61: 200 batches of 4 MiB, 2 waiting: 5 of them, in segments of 20 MiB that hold 5, and one to spare."""
    streams.begin()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    target = torch.empty(1 << 20, device="cuda")
    for batch in moved(lambda i: full(i, 1 << 20), 200):
        streams.busy()
        target.copy_(batch, non_blocking=True)
    del batch
    assert torch.cuda.max_memory_reserved() - before <= 3 * (20 << 20)
    assert target.cpu()[0].item() == 199


# case 61, active memory: held by test_streams.py::test_the_device_holds_buffer_size_plus_3_batches_and_no_more
# case 63: held by test_streams.py::test_the_consumers_thread_keeps_its_device_streams_and_modes


@chains
def test_breaking_and_closing_leave_the_state_too(chain):
    """case 63"""
    with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
        before = streams.state()
        for _ in CHAINS[chain](Fn(lambda: map(full, range(9)))):
            break
        assert streams.state() == before
        iterator = iter(CHAINS[chain](Fn(lambda: map(full, range(9)))))
        next(iterator)
    outside = streams.state()
    iterator.close()  # in another state than it was opened in
    assert streams.state() == outside


# case 64: held by test_streams.py::test_a_mover_to_another_device_works_on_that_device


@pytest.mark.parametrize("schedule", ["late", "ahead", "random"])
@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("nbytes", [1 << 10, 300 << 10, 8 << 20])
def test_values_are_right_for_all_sizes_behind_a_busy_stream(schedule, pinned, nbytes):
    """case 65"""
    streams.begin(schedule)
    make = lambda i: full(i, nbytes // 4).pin_memory() if pinned else full(i, nbytes // 4)
    own = torch.cuda.Stream()
    with torch.cuda.stream(own):
        streams.busy()
        out = [batch.clone() for batch in moved(make, 6)]
        check_same([[one.cpu()] for one in out], [[full(i, nbytes // 4)] for i in range(6)])


@pytest.mark.parametrize("schedule", ["late", "ahead", "random"])
def test_a_graph_replayed_on_moved_batches_gives_what_eager_calls_give(schedule):
    """case 66: 100 batches, each copied into the static input while later copies are in flight."""
    static, output = torch.empty(N, device="cuda"), torch.empty(N, device="cuda")
    graph = streams.captured(lambda: output.copy_(static))
    streams.begin(schedule)
    outputs = []
    for batch in moved(full, 100):
        static.copy_(batch)
        graph.replay()
        outputs.append([output.clone()])
    check_same([[one.cpu() for one in out] for out in outputs], [[full(i)] for i in range(100)])


def test_a_graph_can_be_captured_while_the_stage_runs():
    """case 66: in the mode that the stage asks for, its worker's calls do not break the capture."""
    iterator = iter(moved(full, 30))
    outputs = [next(iterator).clone()]
    for _ in range(10):
        static, output = torch.empty(N, device="cuda"), torch.empty(N, device="cuda")
        graph = streams.captured(lambda output=output, static=static: output.copy_(static))
        static.copy_(next(iterator))
        graph.replay()
        outputs.append(output)
    iterator.close()
    check_same([[one.cpu()] for one in outputs], [[full(i)] for i in range(11)])


# case 66, next() in a capture: held by test_streams.py::test_next_in_a_capture_is_refused_and_nothing_is_lost


@chains
@pytest.mark.parametrize("n", [0, 1, 2])
def test_very_short_epochs_are_whole(chain, n):
    """case 67"""
    pipe = CHAINS[chain](Fn(lambda: map(full, range(n))))
    for _ in range(2):
        check_same([[batch.cpu()] for batch in pipe], [[full(i)] for i in range(n)])


@chains
def test_an_error_before_the_first_item_comes_out(chain):
    """case 67"""

    def source():
        raise OSError(5, "disk")
        yield

    with pytest.raises(OSError, match="disk") as caught:
        list(CHAINS[chain](Fn(source)))
    assert caught.value.errno == 5
    del caught


# --- Copies to the CPU ------------------------------------------------------------------------------------

# case 68, a target on the CPU: held by test_streams.py::test_a_cpu_target_is_complete_when_next_returns
# case 68, a user's own `.map(lambda b: b.to("cpu", non_blocking=True))`: not ours to repair; the stages never pass
# non_blocking towards the CPU:


def test_an_object_is_not_told_to_copy_to_the_cpu_without_blocking():
    """case 68"""
    out = list(Fn(lambda: iter([Own(torch.ones(N, device="cuda"))])).to_cuda_stream("cpu"))
    assert [one.calls[0][2] for one in out] == [False]
    assert out[0].x.device.type == "cpu"


class Tensors:
    """Like a TensorDict: tensors under names, moved by itself."""

    def __init__(self, **tensors):
        self.tensors = tensors

    def to(self, device, *, non_blocking=False):
        return Tensors(**{name: one.to(device, non_blocking=non_blocking) for name, one in self.tensors.items()})


def test_an_object_that_moves_its_tensors_shows_the_sources_values_1000_times(sim):
    """case 69"""
    sim.reset("random", seed=7)
    wrong = 0
    for i, batch in enumerate(moved(lambda i: Tensors(a=full(i, 500), b=full(-i, 700)), 1000)):
        streams.busy()
        right = torch.equal(batch.tensors["a"].cpu(), full(i, 500)) and torch.equal(
            batch.tensors["b"].cpu(), full(-i, 700)
        )
        wrong += not right
    assert (i, wrong) == (999, 0)


# --- The wrong device -------------------------------------------------------------------------------------

ON_DEVICE_1 = """
import simcuda
simulator = simcuda.load()
import torch, sidestream
from helpers import Fn

inside = []
def source():
    for i in range(6):
        inside.append(torch.cuda.current_device() if torch.cuda.is_initialized() else None)
        yield {pin}
def pinned(t):
    return t.pin_memory()
{setup}
out = list(Fn(source){chain})
reserved = torch.cuda.is_initialized() and torch.cuda.memory_reserved(0)
print(sorted(simulator.contexts()), reserved, simulator.device_bytes(0))
print(set(inside), [t.device.index for t in out] == [{index}] * 6, [t[0].item() for t in out])
"""


def _on_device_1(**parts):
    done = run_child(ON_DEVICE_1.format(**parts))
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


@pytest.mark.usefixtures("sim")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
@pytest.mark.parametrize("pin", ["torch.full((9000,), i)", "torch.full((9000,), i).pin_memory()"])
def test_nothing_is_made_on_device_0_where_device_1_is_current(device, pin):
    """case 70"""
    chain = f".thread_prefetch(2).to_cuda_stream('{device}')"
    lines = _on_device_1(setup="torch.cuda.set_device(1)", pin=pin, chain=chain, index=1)
    assert lines == ["[1] 0 0", "{1} True [0, 1, 2, 3, 4, 5]"]


@pytest.mark.usefixtures("sim")
def test_a_mover_to_device_1_makes_nothing_on_device_0_though_that_is_current():
    """case 70 and case 64"""
    lines = _on_device_1(setup="", pin="torch.full((9000,), i)", chain=".to_cuda_stream('cuda:1')", index=1)
    assert lines[0] == "[1] 0 0"


@pytest.mark.usefixtures("sim")
def test_a_prefetcher_starts_no_cuda():
    """case 70"""
    lines = _on_device_1(setup="", pin="torch.full((9000,), i)", chain=".thread_prefetch(2)", index=None)
    assert lines == ["[] False 0", "{None} True [0, 1, 2, 3, 4, 5]"]


@pytest.mark.skipif(streams.SIMULATOR is None and torch.cuda.device_count() < 2, reason="needs two devices")
@pytest.mark.filterwarnings("ignore:CUDA reports that you have:UserWarning")  # torchdata draws a seed
@pytest.mark.parametrize("device", ["cuda", None])
def test_a_device_without_index_is_the_one_current_at_the_first_next(device):
    """case 71: not at building, not in the worker, and each iteration anew, through a loader's copy too."""
    pipe = Fn(_two).to_cuda_stream(device)
    loader = DataLoader2(pipe, reading_service=InProcessReadingService())
    for index in (1, 0, 1):
        iterator = iter(pipe)
        with torch.cuda.device(index):
            assert next(iterator).device == torch.device("cuda", index)
            assert [batch.device.index for batch in loader] == [index] * 2
        assert next(iterator).device == torch.device("cuda", index)
        iterator.close()
    loader.shutdown()


def _two():
    return map(full, range(2))


@pytest.mark.parametrize("device", [["cuda:0", "cuda:1"], [torch.device("cuda", 0)], True, 1])
def test_what_is_no_device_is_a_type_error_when_building(device):
    """case 71"""
    with pytest.raises(TypeError, match="device must be a string"):
        Fn(_two).to_cuda_stream(device)


@pytest.mark.parametrize("device", ["gpu", "mps", "cuda:x"])
def test_what_names_no_device_is_a_value_error_when_building(device):
    """case 71"""
    with pytest.raises(ValueError, match=device):
        Fn(_two).to_cuda_stream(device)
