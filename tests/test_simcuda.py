"""The simulated device is right: order, memory, waits, schedules, captures, and what it shows of planted faults.

Everything else that is proven on it rests on this file. Streams here are torch's own; `raw` calls the runtime as torch
does, for the few things that torch never does by itself.
"""

from __future__ import annotations

import ctypes
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import simcuda
from helpers import run_child

pytestmark = pytest.mark.usefixtures("sim")
POISON = 0xFB
N = 1000  # elements of the small tensors here


def poison(n: int = N) -> torch.Tensor:
    """What float32 memory that nothing has written to shows."""
    return torch.full((4 * n,), POISON, dtype=torch.uint8).view(torch.float32)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bitwise, so that poison equals poison."""
    return torch.equal(a.cpu().contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def assert_same(a: torch.Tensor, b: torch.Tensor) -> None:
    """Never `assert` on a tensor of the device itself: pytest would print it, and printing needs kernels."""
    assert same(a.cpu(), b)


KEPT: list[torch.Tensor] = []


@pytest.fixture(autouse=True)
def keep_sources() -> Iterator[None]:
    """Pinned tensors live as long as a test: torch would record an event when one is freed, and counts would be off."""
    yield
    KEPT.clear()


def pinned(value: float, n: int = N) -> torch.Tensor:
    KEPT.append(torch.full((n,), float(value)).pin_memory())
    return KEPT[-1]


def full(value: float, n: int = N) -> torch.Tensor:
    return torch.full((n,), float(value))


@pytest.fixture
def side() -> torch.cuda.Stream:
    return torch.cuda.Stream()


@pytest.fixture
def fresh(sim: simcuda.Simulator) -> None:
    """No block is cached, so that the next one is poison."""
    torch.cuda.empty_cache()
    sim.reset("late")


def ahead_on(stream: torch.cuda.Stream, source: torch.Tensor) -> torch.Tensor:
    """`source` on its way to the device, on `stream`."""
    with torch.cuda.stream(stream):
        return source.to("cuda", non_blocking=True)


@pytest.fixture
def raw(sim: simcuda.Simulator) -> Iterator[ctypes.CDLL]:
    yield sim._library
    sim._library.cudaGetLastError()


# --- Loading -----------------------------------------------------------------------------------------------------


def test_loading_twice_gives_the_same_simulator(sim: simcuda.Simulator) -> None:
    assert simcuda.load() is sim
    assert simcuda.load(2) is sim


def test_importing_the_package_does_nothing_but_python() -> None:
    done = run_child(
        """
        import pathlib, sys, simcuda
        assert "torch" not in sys.modules
        maps = pathlib.Path("/proc/self/maps").read_text()
        assert "libcuda" not in maps and "simcuda-" not in maps
        """
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_loading_after_torch_says_so() -> None:
    done = run_child("import torch, simcuda; simcuda.load()")
    assert done.stderr.splitlines()[-1] == (
        "RuntimeError: the simulated device must be loaded before torch is imported"
    )


def fake_torch(folder: Path, cuda: str) -> Path:
    (folder / "version.py").write_text(f"__version__ = '2.14.1'\ncuda: Optional[str] = {cuda}\n")
    return folder


@pytest.mark.parametrize(
    ("cuda", "why"),
    [
        ("None", "torch is a build without CUDA"),
        ("'12.8'", "torch is built for CUDA 12, the simulator is for CUDA 13"),
    ],
)
def test_another_build_of_torch_is_unavailable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cuda: str, why: str
) -> None:
    monkeypatch.setattr(simcuda, "_loaded", None)
    monkeypatch.setattr(simcuda, "_folder", lambda _: fake_torch(tmp_path, cuda))
    with pytest.raises(simcuda.Unavailable) as caught:
        simcuda.load()
    assert str(caught.value) == why


def test_no_torch_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simcuda, "_loaded", None)
    monkeypatch.setattr(simcuda, "_folder", lambda _: None)
    with pytest.raises(simcuda.Unavailable, match=r"^torch is not installed$"):
        simcuda.load()


def test_missing_headers_are_unavailable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(simcuda, "_folder", lambda _: tmp_path)
    with pytest.raises(simcuda.Unavailable, match=r"^the headers of the nvidia-cuda-runtime wheel are missing$"):
        simcuda._built()


@pytest.mark.parametrize(
    ("compilers", "why"), [([], "no C++ compiler"), ([["false"]], "the compiler failed: false gave 1")]
)
def test_no_compiler_is_unavailable(
    monkeypatch: pytest.MonkeyPatch,
    compilers: list[list[str]],
    why: str,
) -> None:
    monkeypatch.setattr(simcuda, "_compilers", lambda: iter(compilers))
    with pytest.raises(simcuda.Unavailable) as caught:
        simcuda._built()
    assert str(caught.value) == why


def test_a_second_build_takes_the_place_of_the_first_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two processes that build at once each rename a whole file: none ever sees half of one."""
    monkeypatch.setattr(simcuda, "SOURCES", [simcuda.HERE / "absent.cpp"])
    compiler = next(simcuda._compilers())
    headers = simcuda._headers()
    target = tmp_path / "sim.so"
    target.write_bytes(b"made by another process")
    assert simcuda._compile(compiler, headers, target, [])
    assert target.read_bytes()[:4] == b"\x7fELF"
    assert list(tmp_path.iterdir()) == [target]


# --- Copies ------------------------------------------------------------------------------------------------------


def test_every_way_to_copy_gives_the_values(sim: simcuda.Simulator, side: torch.cuda.Stream) -> None:
    for schedule in simcuda.SCHEDULES:
        sim.reset(schedule, bandwidth=1e12)
        x = torch.arange(12.0).reshape(3, 4)
        on_device = x.to("cuda")
        assert_same(on_device, x)
        assert_same(on_device.clone(), x)
        assert_same(torch.empty_like(on_device).copy_(on_device), x)
        assert_same(x.pin_memory().to("cuda", non_blocking=True), x)
        back = torch.empty(3, 4).pin_memory()
        back.copy_(on_device, non_blocking=True)
        torch.cuda.synchronize()
        assert_same(back, x)
        moved = ahead_on(side, x.pin_memory())
        torch.cuda.current_stream().wait_stream(side)
        assert_same(moved, x)


def test_strided_sources_arrive() -> None:
    x = torch.arange(12.0).reshape(3, 4).t()
    assert_same(x.to("cuda").cpu(), x)


def test_sparse_and_jagged_tensors_arrive() -> None:
    indices, values = torch.tensor([[0, 1], [1, 0]]), torch.tensor([1.0, 2.0])
    coo = torch.sparse_coo_tensor(indices, values, (2, 2), check_invariants=False)
    assert torch.equal(coo.to("cuda")._values().cpu(), values)
    assert torch.equal(coo.to("cuda")._indices().cpu(), indices)
    offsets = torch.tensor([0, 2, 5])
    jagged = torch.nested.nested_tensor_from_jagged(torch.arange(5.0), offsets).to("cuda", non_blocking=True)
    assert torch.equal(jagged.values().cpu(), torch.arange(5.0))
    assert torch.equal(jagged.offsets().cpu(), offsets)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_csr_tensors_arrive() -> None:
    crow, col = torch.tensor([0, 1, 2]), torch.tensor([1, 0])
    csr = torch.sparse_csr_tensor(crow, col, torch.tensor([1.0, 2.0]), (2, 2), check_invariants=False)
    moved = csr.to("cuda", non_blocking=True)
    assert torch.equal(moved.crow_indices().cpu(), crow)
    assert torch.equal(moved.values().cpu(), torch.tensor([1.0, 2.0]))


def test_a_pageable_source_is_read_at_the_call(sim: simcuda.Simulator, side: torch.cuda.Stream) -> None:
    source = full(1)
    on_device = ahead_on(side, source)
    source.fill_(2)
    side.synchronize()
    assert_same(on_device, full(1))
    assert (sim.counters().h2d, sim.counters().pageable) == (1, 1)


def test_a_pinned_source_is_read_when_the_copy_runs(sim: simcuda.Simulator, side: torch.cuda.Stream) -> None:
    source = pinned(1)
    on_device = ahead_on(side, source)
    source.fill_(2)
    side.synchronize()
    assert_same(on_device, full(2))
    assert (sim.counters().h2d, sim.counters().pageable) == (1, 0)


def test_a_copy_to_pageable_memory_blocks(sim: simcuda.Simulator) -> None:
    on_device = pinned(3).to("cuda", non_blocking=True)
    back = full(0)
    back.copy_(on_device, non_blocking=True)
    assert_same(back, full(3))
    assert (sim.pending(0), sim.counters().d2h) == (0, 1)


def test_a_copy_to_pinned_memory_does_not_block(sim: simcuda.Simulator) -> None:
    on_device = pinned(3).to("cuda", non_blocking=True)
    back = pinned(0)
    back.copy_(on_device, non_blocking=True)
    assert_same(back, full(0))
    torch.cuda.current_stream().synchronize()
    assert_same(back, full(3))
    assert sim.counters().d2h == 1


def test_memory_is_known_for_what_it_is(raw: ctypes.CDLL) -> None:
    assert not full(1).is_pinned()
    assert pinned(1).is_pinned()
    assert pinned(1)[10:].is_pinned()
    mine = full(1)
    assert raw.cudaHostRegister(ctypes.c_void_p(mine.data_ptr()), ctypes.c_size_t(4 * N), 0) == 0
    assert mine.is_pinned()
    assert raw.cudaHostUnregister(ctypes.c_void_p(mine.data_ptr())) == 0
    assert not mine.is_pinned()


def test_a_copy_of_the_wrong_kind_or_size_is_refused(raw: ctypes.CDLL, sim: simcuda.Simulator) -> None:
    on_device, host = full(1).to("cuda"), full(1)
    sim.reset("late")

    def copy(dst: torch.Tensor, src: torch.Tensor, nbytes: int, kind: int) -> int:
        pointers = (ctypes.c_void_p(dst.data_ptr()), ctypes.c_void_p(src.data_ptr()))
        return raw.cudaMemcpyAsync(*pointers, ctypes.c_size_t(nbytes), kind, None)

    to_device, to_host = 1, 2
    assert copy(on_device, host, 4 * N, to_host) == 1  # cudaErrorInvalidValue
    assert copy(on_device, host, 1 << 40, to_device) == 1
    assert copy(on_device, host, 4 * N, to_device) == 0
    assert sim.counters().h2d == 1


# --- Poison ------------------------------------------------------------------------------------------------------


def allocated(raw: ctypes.CDLL, nbytes: int, name: str = "cudaMalloc") -> int:
    pointer = ctypes.c_void_p()
    flags = () if name == "cudaMalloc" else (0,)
    assert getattr(raw, name)(ctypes.byref(pointer), ctypes.c_size_t(nbytes), *flags) == 0
    assert pointer.value is not None
    return pointer.value


@pytest.mark.parametrize(("name", "free"), [("cudaMalloc", "cudaFree"), ("cudaHostAlloc", "cudaFreeHost")])
def test_new_and_freed_memory_is_poison(raw: ctypes.CDLL, sim: simcuda.Simulator, name: str, free: str) -> None:
    before = sim.device_bytes()
    memory = allocated(raw, 8192, name)
    assert ctypes.string_at(memory, 8192) == bytes([POISON]) * 8192
    ctypes.memset(memory, 7, 8192)
    assert sim.device_bytes() - before == (8192 if name == "cudaMalloc" else 0)
    assert getattr(raw, free)(ctypes.c_void_p(memory)) == 0
    assert ctypes.string_at(memory, 8192) == bytes([POISON]) * 8192
    assert sim.device_bytes() == before
    assert getattr(raw, free)(ctypes.c_void_p(memory)) == 1  # a second free is cudaErrorInvalidValue


def test_the_device_runs_out_of_memory(sim: simcuda.Simulator) -> None:
    with pytest.raises(torch.cuda.OutOfMemoryError):
        torch.empty(5 << 30, dtype=torch.uint8, device="cuda")
    free, total = torch.cuda.mem_get_info()
    assert (total, total - free) == (4 << 30, sim.device_bytes())


@pytest.mark.usefixtures("fresh")
def test_the_real_allocator_counts() -> None:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    a = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
    b = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_allocated() - before == 2 << 20
    del a, b
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() - before == 2 << 20


# --- Late --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fresh")
def test_late_shows_a_missing_wait_every_time(sim: simcuda.Simulator, side: torch.cuda.Stream) -> None:
    for value in range(20):
        sim.reset("late")
        torch.cuda.empty_cache()
        assert_same(ahead_on(side, pinned(value)), poison())


def test_late_gives_the_values_where_the_wait_is_there(sim: simcuda.Simulator, side: torch.cuda.Stream) -> None:
    for value in range(20):
        on_device = ahead_on(side, pinned(value))
        torch.cuda.current_stream().wait_stream(side)
        assert_same(on_device, full(value))
    assert sim.counters().stream_waits == 20


def test_late_runs_what_a_wait_needs_and_no_more(sim: simcuda.Simulator) -> None:
    a, b, c = (torch.cuda.Stream() for _ in range(3))
    event = torch.cuda.Event()
    kept = [ahead_on(a, pinned(1)), ahead_on(b, pinned(2)), ahead_on(c, pinned(3))]
    with torch.cuda.stream(b):
        event.record()
    kept.append(ahead_on(b, pinned(4)))
    a.wait_event(event)
    kept.append(ahead_on(a, pinned(5)))
    a.synchronize()  # a's copy, wait and copy; of b the copy and the record; of c nothing
    assert (sim.pending(a.cuda_stream), sim.pending(b.cuda_stream), sim.pending(c.cuda_stream)) == (0, 1, 1)
    assert sim.pending() == 2
    torch.cuda.synchronize()
    assert sim.pending() == 0
    assert [x.cpu()[0].item() for x in kept] == [1, 2, 3, 4, 5]


def test_late_stops_at_the_event(sim: simcuda.Simulator, side: torch.cuda.Stream) -> None:
    event = torch.cuda.Event()
    first = ahead_on(side, pinned(1))
    event.record(side)
    second = ahead_on(side, pinned(2))
    event.synchronize()
    assert sim.pending(side.cuda_stream) == 1
    assert_same(first, full(1))
    del second


def test_late_never_answers_a_query_by_running(sim: simcuda.Simulator, side: torch.cuda.Stream) -> None:
    on_device = ahead_on(side, pinned(1))
    event = side.record_event()
    assert [event.query() for _ in range(5)] == [False] * 5
    assert side.query() is False
    assert sim.pending(side.cuda_stream) == 2
    sim.run()
    assert (event.query(), side.query()) == (True, True)
    assert (sim.counters().host_waits, sim.counters().event_queries >= 6) == (0, True)
    assert_same(on_device, full(1))


def test_run_lets_the_oldest_work_go_first(sim: simcuda.Simulator) -> None:
    a, b = torch.cuda.Stream(), torch.cuda.Stream()
    kept = [ahead_on(a, pinned(1)), ahead_on(b, pinned(2)), ahead_on(a, pinned(3))]
    sim.run(1)
    assert (sim.pending(a.cuda_stream), sim.pending(b.cuda_stream)) == (1, 1)
    sim.run(1)
    assert (sim.pending(a.cuda_stream), sim.pending(b.cuda_stream)) == (1, 0)
    sim.run(1)
    assert sim.pending() == 0
    assert len(kept) == 3


def test_a_long_chain_of_waits_runs(sim: simcuda.Simulator) -> None:
    """Nothing recurses: each link is one more stream to go back to."""
    a, b = torch.cuda.Stream(), torch.cuda.Stream()
    for _ in range(20_000):
        a.wait_stream(b)
        b.wait_stream(a)
    b.synchronize()
    assert sim.pending(b.cuda_stream) == 0


# --- Events ------------------------------------------------------------------------------------------------------


def test_an_event_never_recorded_is_complete(sim: simcuda.Simulator, side: torch.cuda.Stream) -> None:
    event = torch.cuda.Event()
    assert event.query() is True
    event.synchronize()
    side.wait_event(event)
    assert sim.pending() == 0


def test_a_wait_is_for_the_record_of_its_time(sim: simcuda.Simulator) -> None:
    a, b = torch.cuda.Stream(), torch.cuda.Stream()
    event = torch.cuda.Event()
    first = ahead_on(a, pinned(1))
    event.record(a)
    b.wait_event(event)
    second = ahead_on(a, pinned(2))
    event.record(a)
    b.synchronize()
    assert (sim.pending(a.cuda_stream), event.query()) == (2, False)
    event.synchronize()
    assert (sim.pending(a.cuda_stream), event.query()) == (0, True)
    assert [x.cpu()[0].item() for x in (first, second)] == [1, 2]


def test_the_log_tells_which_events_block(sim: simcuda.Simulator, side: torch.cuda.Stream) -> None:
    for blocking in (False, True):
        event = torch.cuda.Event(blocking=blocking)
        event.record(side)
        event.synchronize()
    found = [(o.kind, o.stream, o.blocking) for o in sim.log()]
    handle = side.cuda_stream
    assert found == [
        ("record", handle, False),
        ("host_wait", handle, False),
        ("record", handle, True),
        ("host_wait", handle, True),
    ]


class Dim3(ctypes.Structure):
    _fields_ = [("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint)]


def test_work_for_the_wrong_device_is_refused(raw: ctypes.CDLL) -> None:
    here, there = torch.cuda.Stream(0), torch.cuda.Stream(1)
    event = torch.cuda.Event()
    event.record(here)
    invalid_handle = 400

    def record(stream: torch.cuda.Stream) -> int:
        return raw.cudaEventRecord(ctypes.c_void_p(event.cuda_event), ctypes.c_void_p(stream.cuda_stream))

    def launch(stream: torch.cuda.Stream) -> int:
        shape, handle = (Dim3(1, 1, 1), Dim3(1, 1, 1)), ctypes.c_void_p(stream.cuda_stream)
        return raw.cudaLaunchKernel(None, *shape, None, ctypes.c_size_t(0), handle)

    assert (record(here), record(there)) == (0, invalid_handle)
    assert (launch(here), launch(there)) == (0, invalid_handle)


def test_elapsed_time_is_that_of_the_device(sim: simcuda.Simulator, side: torch.cuda.Stream) -> None:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(side):
        torch.cuda._sleep(1)
        start.record()
        for _ in range(10):
            torch.cuda._sleep(10_000_000_000)
        end.record()
    side.synchronize()
    assert 100_000 <= start.elapsed_time(end) < 110_000
    assert sim.counters().kernels == 11


# --- Counters, log, contexts -------------------------------------------------------------------------------------


def test_counters_and_log_tell_what_was_called(sim: simcuda.Simulator, side: torch.cuda.Stream) -> None:
    torch.cuda.empty_cache()
    source = pinned(1)
    sim.reset("late")
    on_device = ahead_on(side, source)
    event = side.record_event()
    torch.cuda.current_stream().wait_event(event)
    copied = on_device.clone()
    event.synchronize()
    assert sim.counters() == simcuda.Counters(
        h2d=1,
        d2h=0,
        d2d=1,
        pageable=0,
        h2d_bytes=4 * N,
        host_waits=1,
        stream_waits=1,
        event_records=1,
        event_queries=0,
        host_allocs=0,
        device_mallocs=2,  # the side stream's pool, and the default stream's
        kernels=0,
        memsets=0,
    )
    log = sim.log()
    kinds = ["alloc", "h2d", "record", "wait", "alloc", "d2d", "host_wait"]
    assert [o.kind for o in log] == kinds
    h2d, d2d = log[1], log[5]
    assert (h2d.stream, h2d.nbytes, h2d.pinned, h2d.device) == (side.cuda_stream, 4 * N, True, 0)
    assert (h2d.src, h2d.dst) == (source.data_ptr(), on_device.data_ptr())
    assert (d2d.stream, d2d.src, d2d.dst) == (0, on_device.data_ptr(), copied.data_ptr())
    assert {o.thread for o in log} == {threading.get_native_id()}
    sim.reset("late")
    assert (sim.counters().h2d, sim.log()) == (0, [])


def test_the_log_tells_which_thread_called(sim: simcuda.Simulator) -> None:
    seen: list[int] = []

    def work() -> None:
        seen.append(threading.get_native_id())
        full(1).to("cuda")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert [o.thread for o in sim.log() if o.kind == "h2d"] == seen


def test_sync_debug_mode_works() -> None:
    x = full(1).to("cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first call in a process says that this is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
            x.cpu()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_contexts_are_made_by_what_makes_them() -> None:
    done = run_child(
        """
        import simcuda
        sim = simcuda.load()
        import torch
        assert torch.cuda.is_available() and torch.cuda.device_count() == 2
        assert torch.cuda.get_device_name(1) == "Simulated device"
        assert torch.cuda.get_device_capability(0) == (9, 0)
        assert sim.contexts() == set(), sim.contexts()
        stream = torch.cuda.Stream(1)
        assert sim.contexts() == {1}, sim.contexts()
        torch.ones(3).pin_memory()  # torch looks for a device that has a context
        assert sim.contexts() == {1}, sim.contexts()
        torch.ones(3).to("cuda:0")
        assert sim.contexts() == {0, 1}
        """
    )
    assert (done.returncode, done.stderr) == (0, "")


# --- Two devices -------------------------------------------------------------------------------------------------


def test_the_current_device_is_the_threads_own() -> None:
    seen: list[int] = []
    with torch.cuda.device(1):
        thread = threading.Thread(target=lambda: seen.append(torch.cuda.current_device()))
        thread.start()
        thread.join()
        seen.append(torch.cuda.current_device())
    assert [*seen, torch.cuda.current_device()] == [0, 1, 0]


def test_each_device_has_its_own_default_stream(sim: simcuda.Simulator) -> None:
    a = pinned(1).to("cuda:0", non_blocking=True)
    b = pinned(2).to("cuda:1", non_blocking=True)
    assert (sim.pending(0, device=0), sim.pending(0, device=1)) == (1, 1)
    torch.cuda.synchronize(1)
    assert (sim.pending(0, device=0), sim.pending(0, device=1)) == (1, 0)
    assert [o.device for o in sim.log() if o.kind == "h2d"] == [0, 1]
    assert (a.cpu()[0].item(), b.cpu()[0].item()) == (1, 2)


def test_copies_go_from_device_to_device(sim: simcuda.Simulator) -> None:
    a = pinned(1).to("cuda:0", non_blocking=True)
    b = a.to("cuda:1", non_blocking=True)
    assert_same(b, full(1))
    assert sim.counters().d2d == 1


# --- Ahead -------------------------------------------------------------------------------------------------------


def reused(side: torch.cuda.Stream, *, guard: bool) -> torch.Tensor:
    """What the default stream reads from memory of the side stream that is freed, perhaps guarded, and used again."""
    seen = pinned(0)
    x = ahead_on(side, pinned(1))
    torch.cuda.current_stream().wait_stream(side)
    seen.copy_(x, non_blocking=True)
    if guard:
        x.record_stream(torch.cuda.current_stream())
    del x
    y = ahead_on(side, pinned(2))
    torch.cuda.synchronize()
    del y
    return seen


def test_ahead_shows_a_missing_reuse_guard_every_time(sim: simcuda.Simulator, side: torch.cuda.Stream) -> None:
    for _ in range(20):
        sim.reset("ahead")
        assert_same(reused(side, guard=False), full(2))
        assert_same(reused(side, guard=True), full(1))


def test_ahead_runs_side_streams_at_once_and_default_streams_last(
    sim: simcuda.Simulator, side: torch.cuda.Stream
) -> None:
    sim.reset("ahead")
    on_side, on_default = ahead_on(side, pinned(1)), pinned(2).to("cuda", non_blocking=True)
    assert (sim.pending(side.cuda_stream), sim.pending(0)) == (0, 1)
    side.wait_stream(torch.cuda.current_stream())
    after = ahead_on(side, pinned(3))
    assert (sim.pending(side.cuda_stream), sim.pending(0)) == (2, 2)
    torch.cuda.current_stream().synchronize()  # what the side stream waited for: it goes on by itself
    assert sim.pending() == 0
    assert [x.cpu()[0].item() for x in (on_side, on_default, after)] == [1, 2, 3]


# --- Random ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fresh")
def test_random_shows_both_faults_in_some_schedules_and_none_where_none_is(
    sim: simcuda.Simulator, side: torch.cuda.Stream
) -> None:
    unwaited, unguarded = set(), set()
    for seed in range(40):
        torch.cuda.empty_cache()
        sim.reset("random", seed=seed)
        x = ahead_on(side, pinned(1))
        unwaited.add(x.cpu()[0].item())
        unguarded.add(reused(side, guard=False)[0].item())
        assert_same(reused(side, guard=True), full(1))
        y = ahead_on(side, pinned(3))
        torch.cuda.current_stream().wait_stream(side)
        assert_same(y, full(3))
        del x, y
    assert unwaited == {poison()[0].item(), 1.0}
    assert unguarded == {1.0, 2.0}


def progress(sim: simcuda.Simulator, seed: int) -> list[int]:
    """How much work waits after each of some calls."""
    sim.reset("random", seed=seed)
    streams = [torch.cuda.Stream() for _ in range(3)]
    source, seen = pinned(1), []
    target = torch.empty(N, device="cuda")
    for i in range(30):
        with torch.cuda.stream(streams[i % 3]):
            target.copy_(source, non_blocking=True)
        seen.append(sim.pending())
    return seen


def test_random_is_the_same_for_the_same_seed(sim: simcuda.Simulator) -> None:
    progress(sim, 0)  # whatever torch makes at first use is made
    ways = {seed: progress(sim, seed) for seed in range(20)}
    assert ways == {seed: progress(sim, seed) for seed in range(20)}
    assert len({tuple(way) for way in ways.values()}) > 10


def test_random_lets_a_poller_see_progress(sim: simcuda.Simulator, side: torch.cuda.Stream) -> None:
    sim.reset("random", seed=1)
    ahead_on(side, pinned(1))
    event = side.record_event()
    assert any(event.query() for _ in range(10_000))


# --- Timed -------------------------------------------------------------------------------------------------------


def spin(milliseconds: int) -> None:
    torch.cuda._sleep(milliseconds * 1_000_000)


def device_time(side: torch.cuda.Stream, work: Callable[[], None]) -> float:
    """How long the device is at it, on both streams [milliseconds]. It starts when the host has called everything."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    spin(500)
    start.record()
    side.wait_event(start)
    work()
    torch.cuda.current_stream().wait_stream(side)
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def test_timed_overlaps_a_copy_with_a_kernel(sim: simcuda.Simulator, side: torch.cuda.Stream) -> None:
    sim.reset("timed", bandwidth=1e7)
    source = pinned(1, 500_000)  # 2 MB: 200 ms

    def apart() -> None:
        ahead_on(side, source)
        spin(200)

    def in_line() -> None:
        source.to("cuda", non_blocking=True)
        spin(200)

    assert 200 <= device_time(side, apart) < 350
    assert 400 <= device_time(side, in_line) < 550


def test_timed_does_not_add_up_oversleeping(sim: simcuda.Simulator, side: torch.cuda.Stream) -> None:
    sim.reset("timed")

    def many() -> None:
        for _ in range(100):
            spin(1)

    assert device_time(side, many) == pytest.approx(100, abs=0.01)


def test_timed_host_waits_take_the_time(sim: simcuda.Simulator, side: torch.cuda.Stream) -> None:
    sim.reset("timed")
    start = time.monotonic()
    with torch.cuda.stream(side):
        spin(100)
    side.synchronize()
    assert 0.1 <= time.monotonic() - start < 5
    assert sim.pending() == 0


def hold(stream: torch.cuda.Stream) -> None:
    """Keeps a stream busy for an hour; a reset ends that."""
    with torch.cuda.stream(stream):
        spin(3_600_000)


def test_timed_queries_tell_what_is_done(sim: simcuda.Simulator, side: torch.cuda.Stream) -> None:
    sim.reset("timed")
    hold(side)
    event = side.record_event()
    assert (event.query(), side.query(), sim.pending(side.cuda_stream)) == (False, False, 2)
    sim.reset("timed")
    assert (event.query(), side.query(), sim.pending(side.cuda_stream)) == (True, True, 0)


def test_timed_shows_a_pinned_source_written_too_early(sim: simcuda.Simulator, side: torch.cuda.Stream) -> None:
    sim.reset("timed")
    source = pinned(1)
    hold(side)
    on_device = ahead_on(side, source)
    source.fill_(2)
    sim.reset("late")
    assert_same(on_device, full(2))


@pytest.mark.usefixtures("fresh")
def test_timed_shows_a_missing_wait(sim: simcuda.Simulator, side: torch.cuda.Stream) -> None:
    sim.reset("timed")
    hold(side)
    on_device = ahead_on(side, pinned(1))
    assert_same(on_device, poison())
    sim.reset("late")
    assert_same(on_device, full(1))


def test_a_reset_takes_no_time(sim: simcuda.Simulator, side: torch.cuda.Stream) -> None:
    """An hour of work is queued: this test ends."""
    sim.reset("timed")
    hold(side)
    torch.cuda.current_stream().wait_stream(side)
    on_device = pinned(5).to("cuda", non_blocking=True)
    sim.reset("late")
    assert sim.pending() == 0
    assert_same(on_device, full(5))


def test_run_waits_for_the_streams_under_timed(sim: simcuda.Simulator, side: torch.cuda.Stream) -> None:
    sim.reset("timed")
    with torch.cuda.stream(side):
        spin(50)
    sim.run()
    assert (sim.pending(), sim.counters().host_waits) == (0, 0)


# --- Host functions ----------------------------------------------------------------------------------------------


def test_a_host_function_runs_in_its_place(raw: ctypes.CDLL, sim: simcuda.Simulator) -> None:
    for schedule in simcuda.SCHEDULES:
        sim.reset(schedule)
        on_device, seen = full(0).to("cuda"), []
        callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _, seen=seen: seen.append(sim.pending(0)))
        on_device.copy_(pinned(1), non_blocking=True)
        assert raw.cudaLaunchHostFunc(None, callback, None) == 0
        event = torch.cuda.Event()
        event.record()
        event.synchronize()
        assert seen == [2] or schedule != "late"  # itself and the record
        assert len(seen) == 1


# --- Captures ----------------------------------------------------------------------------------------------------


def captured(mode: str, during: Callable[[], None] = lambda: None) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A graph that copies its first input to its output, which is returned; `during` runs in the capture."""
    graph, output = torch.cuda.CUDAGraph(), torch.empty(N, device="cuda")
    captured.input = torch.empty(N, device="cuda")
    # The outer context: where a capture fails, torch leaves its stream current.
    with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph, capture_error_mode=mode):
        output.copy_(captured.input)
        during()
    return graph, output


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_a_graph_runs_when_replayed(sim: simcuda.Simulator, mode: str) -> None:
    graph, output = captured(mode)
    assert (sim.counters().d2d, sim.pending()) == (0, 0)  # a capture itself copies nothing
    for value in (1, 2):
        captured.input.copy_(full(value))
        graph.replay()
        assert_same(output, full(value))
    assert sim.counters().d2d == 2


def in_thread(work: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    return run


def error_of(call: Callable[[], object], errors: list[str]) -> Callable[[], None]:
    def run() -> None:
        try:
            call()
        except RuntimeError as error:
            errors.append(str(error).splitlines()[0])

    return run


UNSUPPORTED = "CUDA error: cudaErrorStreamCaptureUnsupported"
INVALIDATED = "CUDA error: cudaErrorStreamCaptureInvalidated"


@pytest.mark.parametrize("what", ["event.query", "event.synchronize", "stream.synchronize", "stream.query"])
@pytest.mark.parametrize(
    ("mode", "other_thread", "allowed"),
    [
        ("global", False, False),
        ("global", True, False),
        ("thread_local", False, False),
        ("thread_local", True, True),
    ],
)
def test_a_capture_forbids_calls_that_look_at_the_device(
    side: torch.cuda.Stream,
    what: str,
    mode: str,
    other_thread: bool,
    allowed: bool,
) -> None:
    event = side.record_event()
    owner, _, name = what.partition(".")
    errors: list[str] = []
    call = error_of(getattr({"event": event, "stream": side}[owner], name), errors)
    if allowed:
        captured(mode, in_thread(call))
        assert errors == []
        return
    with pytest.raises(RuntimeError, match=INVALIDATED):
        captured(mode, in_thread(call) if other_thread else call)
    assert errors == [UNSUPPORTED]


@pytest.mark.parametrize(("mode", "result"), [("global", 900), ("thread_local", 0)])
@pytest.mark.parametrize("name", ["cudaMalloc", "cudaHostAlloc"])
def test_a_capture_forbids_allocation(raw: ctypes.CDLL, mode: str, result: int, name: str) -> None:
    results: list[int] = []
    pointer = ctypes.c_void_p()
    flags = () if name == "cudaMalloc" else (0,)
    call = lambda: results.append(getattr(raw, name)(ctypes.byref(pointer), ctypes.c_size_t(8192), *flags))
    if result:
        with pytest.raises(RuntimeError, match=INVALIDATED):
            captured(mode, in_thread(call))
    else:
        captured(mode, in_thread(call))
        getattr(raw, {"cudaMalloc": "cudaFree", "cudaHostAlloc": "cudaFreeHost"}[name])(pointer)
    assert results == [result]


def test_no_thread_may_wait_for_a_device_that_captures() -> None:
    errors: list[str] = []
    with pytest.raises(RuntimeError, match=INVALIDATED):
        captured("thread_local", in_thread(error_of(torch.cuda.synchronize, errors)))
    assert errors == [UNSUPPORTED]


def test_work_of_other_streams_goes_on_in_a_capture(sim: simcuda.Simulator, side: torch.cuda.Stream) -> None:
    kept: list[torch.Tensor] = []
    source = pinned(1)

    def work() -> None:
        kept.append(ahead_on(side, source))
        side.synchronize()

    captured("thread_local", in_thread(work))
    assert sim.pending(side.cuda_stream) == 0
    assert_same(kept[0], full(1))


def test_a_stream_that_waits_for_a_captured_event_joins(sim: simcuda.Simulator, side: torch.cuda.Stream) -> None:
    graph, other = torch.cuda.CUDAGraph(), torch.empty(N, device="cuda")
    source = full(3).to("cuda")
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            other.copy_(source)
        torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    sim.reset("late")
    graph.replay()
    assert_same(other, full(3))
    assert sim.counters().d2d == 1


def test_a_capture_may_not_wait_for_work_outside(side: torch.cuda.Stream) -> None:
    event = side.record_event()
    errors: list[str] = []
    with pytest.raises(RuntimeError, match=INVALIDATED):
        captured("thread_local", error_of(lambda: torch.cuda.current_stream().wait_event(event), errors))
    assert errors == ["CUDA error: cudaErrorStreamCaptureIsolation"]


# --- Threads, processes, the sanitizer ---------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", simcuda.SCHEDULES)
def test_threads_may_call_at_once(sim: simcuda.Simulator, schedule: str) -> None:
    sim.reset(schedule, bandwidth=1e12)
    wrong: list[float] = []

    def work(number: int) -> None:
        stream = torch.cuda.Stream()
        for i in range(50):
            value = 1000.0 * number + i
            x = ahead_on(stream, pinned(value, 100))
            torch.cuda.current_stream().wait_event(stream.record_event())
            x.record_stream(torch.cuda.current_stream())
            if not same(x, full(value, 100)):
                wrong.append(value)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert sim.counters().h2d == 200


@pytest.mark.parametrize("schedule", simcuda.SCHEDULES)
def test_a_process_can_end_with_work_queued(schedule: str) -> None:
    """Under `timed` a thread waits for it, for an hour: neither hang nor crash."""
    done = run_child(
        f"""
        import simcuda, threading
        sim = simcuda.load()
        import torch
        sim.reset({schedule!r}, seed=3)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(3_600_000_000_000)
            kept = torch.ones(1000).pin_memory().to("cuda", non_blocking=True)
            event = stream.record_event()
        torch.cuda.current_stream().wait_event(event)
        if sim.pending() and {schedule!r} == "timed":
            waiter = threading.Thread(target=event.synchronize, daemon=True)
            waiter.start()
            while not sim.counters().host_waits: pass
        """,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_forked_child_finds_the_device_unlocked() -> None:
    """Its parent's threads, which may have held the lock, are not there."""
    done = run_child(
        """
        import simcuda, os, threading
        sim = simcuda.load()
        import torch
        stop = threading.Event()
        def busy():
            while not stop.is_set():
                torch.ones(10).to("cuda")
        torch.ones(10).to("cuda")
        threads = [threading.Thread(target=busy) for _ in range(2)]
        for thread in threads: thread.start()
        ends = []
        for _ in range(20):
            child = os.fork()
            if child == 0:
                os._exit(40 + len(sim.contexts()))
            ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        stop.set()
        for thread in threads: thread.join()
        assert ends == [41] * 20, ends
        """,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_stream_sanitizer_reports_a_race_and_nothing_else() -> None:
    done = run_child(
        """
        import simcuda
        sim = simcuda.load()
        import torch
        from torch.cuda._sanitizer import CUDASanitizerDispatchMode, CUDASanitizerErrors

        def chain(wait):
            side, source = torch.cuda.Stream(), torch.ones(100).pin_memory()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                x = torch.empty(100, device="cuda").copy_(source, non_blocking=True)
            if wait:
                torch.cuda.current_stream().wait_stream(side)
            return x.clone()

        with CUDASanitizerDispatchMode():
            assert chain(wait=True).cpu()[0].item() == 1
            try:
                chain(wait=False)
            except CUDASanitizerErrors as errors:
                assert len(errors.errors) == 1 and "data race" in str(errors.errors[0])
                print("reported")
        """
    )
    assert done.stdout == "reported\n", done.stderr
    assert done.returncode == 0


def test_the_log_names_kernels(sim: simcuda.Simulator) -> None:
    torch.cuda._sleep(7)
    (entry,) = sim.log()
    assert (entry.kind, entry.stream, entry.device, entry.nbytes) == ("kernel", 0, 0, 0)
    assert "spin_kernel" in entry.name
