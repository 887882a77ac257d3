"""Checks of stream order, lifetime, bounds and staging: the tests run them, and so does the table of sabotages.

A check is a function that raises AssertionError. Kernels do not run on the simulated device: values are read by copies,
compute is `torch.cuda._sleep`. Checks that read the simulator's log take it as their first argument.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import itertools
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from conftest import SIMULATOR  # before torch: it loads the simulated device  # isort: skip
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import IterDataPipe

import simcuda
from helpers import Fn, eventually

N = 20480  # elements of a large tensor [float32]: too large to be packed
BATCH = 4 * N  # [bytes] a multiple of the allocator's unit
CYCLES = 1000 if SIMULATOR is not None else 2_000_000  # of a step: long enough for a race to show


def begin(schedule: str = "late", seed: int = 0, bandwidth: float = 1e9) -> None:
    """Start from an idle device with no cached memory, under a schedule where the device is simulated."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    if SIMULATOR is not None:
        SIMULATOR.reset(schedule, seed=seed, bandwidth=bandwidth)


def busy(cycles: int = CYCLES) -> None:
    """Keep the current stream occupied."""
    torch.cuda._sleep(cycles)


# --- Samples: number i holds nothing but i ----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Pair:
    x: Any
    y: Any


def full(i: int, n: int = N) -> torch.Tensor:
    return torch.full((n,), float(i))


def nested(i: int) -> Any:
    """Large and small tensors at several depths; the small ones are packed."""
    small = [torch.full((5,), i, dtype=(torch.float32, torch.int64, torch.uint8)[k % 3]) for k in range(9)]
    return {"a": [(full(i), {"b": full(i, N + 1)})], "c": Pair(full(i, N + 2), small), "name": str(i)}


def jagged(i: int) -> torch.Tensor:
    """A nested tensor whose offsets hold i too."""
    return torch.nested.nested_tensor_from_jagged(full(i, 3 * N), torch.tensor([0, i, 3 * N]))


def coo(i: int) -> torch.Tensor:
    indices = torch.full((1, N), i)
    return torch.sparse_coo_tensor(indices, full(i), (100,), is_coalesced=True, check_invariants=False)


def csr(i: int) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the layout beta
        crow, col = torch.tensor([0, N]), torch.full((N,), i)
        return torch.sparse_csr_tensor(crow, col, full(i), (1, N), check_invariants=False)


def packed_sequence(i: int) -> Any:
    return pack_sequence([full(i, 2), full(i)], enforce_sorted=False)


class Carried:
    """An object that moves itself, and guards itself."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Carried:
        return type(self)(self.x.to(device, non_blocking=non_blocking))

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        self.x.record_stream(stream)


class Slots:
    """The same with no `__dict__`."""

    __slots__ = ("x",)
    __init__, to, record_stream = Carried.__init__, Carried.to, Carried.record_stream


class Late:
    """An object with `to` only: it moves at delivery."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def to(self, device: torch.device) -> Late:
        return Late(self.x.to(device))


SAMPLES: dict[str, Callable[[int], Any]] = {
    "plain": full,
    "pinned": lambda i: full(i).pin_memory(),
    "nested": nested,
    "packed": lambda i: [full(i, 1000) for _ in range(20)],
    "strided": lambda i: torch.full((200, 200), float(i)).t()[::2],
    "jagged": jagged,
    "coo": coo,
    "csr": csr,
    "packed sequence": packed_sequence,
    "carried": lambda i: Carried(full(i)),
    "carried, slots": lambda i: Slots(full(i)),
    "carried, twice": lambda i: Carried(Carried(full(i))),
    "late": lambda i: Late(full(i)),
}


def parts(sample: Any) -> list[torch.Tensor]:
    """The plain tensors of a sample."""
    if isinstance(sample, (Carried, Slots, Late)):
        return parts(sample.x)
    if isinstance(sample, Pair):
        return [*parts(sample.x), *parts(sample.y)]
    if isinstance(sample, dict):
        return [part for value in sample.values() for part in parts(value)]
    if isinstance(sample, (list, tuple)):
        return [part for value in sample for part in parts(value)]
    if not isinstance(sample, torch.Tensor):
        return []
    if sample.layout is torch.sparse_coo:
        return [sample._indices(), sample._values()]
    if sample.layout is torch.sparse_csr:
        return [sample.crow_indices(), sample.col_indices(), sample.values()]
    return [sample.values(), sample.offsets()] if sample.is_nested else [sample]


# --- Chains, consumers, and what they do with a sample ----------------------------------------------------

CHAINS: dict[str, Callable[..., IterDataPipe]] = {
    "move": lambda dp, **options: dp.to_cuda_stream("cuda", **options),
    "prefetch, move": lambda dp, **options: dp.thread_prefetch().to_cuda_stream("cuda", **options),
    "move, prefetch": lambda dp, **options: dp.to_cuda_stream("cuda", **options).thread_prefetch(),
}


def default_stream() -> Iterator[torch.cuda.Stream]:
    return itertools.repeat(torch.cuda.default_stream())


def custom_stream() -> Iterator[torch.cuda.Stream]:
    return itertools.repeat(torch.cuda.Stream())


def changing_streams() -> Iterator[torch.cuda.Stream]:
    return itertools.cycle([torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.default_stream()])


CONSUMERS = {"default": default_stream, "custom": custom_stream, "changing": changing_streams}
HOLDINGS = ("retained", "dropped", "partly", "mixed")


def keeps(holding: str, i: int, copies: list[torch.Tensor], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """What a consumer still has of sample i after its step: the tensors themselves, copies of them, or some of each."""
    holding = HOLDINGS[i % 3] if holding == "mixed" else holding
    if holding == "retained":
        return tensors
    return copies if holding == "dropped" else [tensors[0], *copies[1:]]


Taken = list[tuple[torch.cuda.Stream, list[torch.Tensor]]]


def take(pipe: Iterable[Any], consumer: str = "default", holding: str = "dropped", cycles: int = CYCLES) -> Taken:
    """Consume without waiting for the device: a step is a sleep, then a copy of each tensor of the sample."""
    taken: Taken = []
    iterator = iter(pipe)
    for i, stream in enumerate(CONSUMERS[consumer]()):
        with torch.cuda.stream(stream):
            try:
                sample = next(iterator)
            except StopIteration:
                return taken
            busy(cycles)
            tensors = parts(sample)
            del sample  # it goes in mid-step, as far as it is not kept
            taken.append((stream, keeps(holding, i, [one.clone() for one in tensors], tensors)))
            del tensors
    raise AssertionError("consumers do not end")


def read(taken: Taken) -> list[list[torch.Tensor]]:
    """Bring what was taken to the CPU, each on the stream that it was received on."""
    out = []
    for stream, tensors in taken:
        with torch.cuda.stream(stream):
            out.append([one.cpu() for one in tensors])
    return out


def check_same(got: list[list[torch.Tensor]], expected: list[list[torch.Tensor]]) -> None:
    assert len(got) == len(expected), f"{len(got)} samples, not {len(expected)}"
    wrong = [
        i
        for i, (a, b) in enumerate(zip(got, expected, strict=True))
        if len(a) != len(b) or not all(map(torch.equal, a, b))
    ]
    assert wrong == [], f"wrong values in samples {wrong}"


def check_values(
    schedule: str = "late",
    seed: int = 0,
    *,
    chain: str = "move",
    consumer: str = "default",
    holding: str = "dropped",
    sample: str = "plain",
    n: int = 12,
    **options: Any,
) -> None:
    """A consumer that never waits on the host sees each sample's own values."""
    begin(schedule, seed)
    make = SAMPLES[sample]
    pipe = CHAINS[chain](Fn(lambda: map(make, range(n))), **options)
    check_same(read(take(pipe, consumer, holding)), [parts(make(i)) for i in range(n)])


# --- Who waits for what -----------------------------------------------------------------------------------


def main_thread() -> int:
    return threading.main_thread().native_id or 0


def check_one_wait(sim: simcuda.Simulator, chain: str = "move") -> None:
    """At each `next()` the stream that is current then waits once, and nothing else waits in the consumer's thread."""
    begin()
    streams = [torch.cuda.Stream(), torch.cuda.default_stream(), torch.cuda.Stream()]
    order = [streams[i] for i in (0, 0, 1, 2, 1, 0)]
    iterator = iter(CHAINS[chain](Fn(lambda: map(nested, range(6)))))
    for stream in order:
        before = len(sim.log())
        with torch.cuda.stream(stream):
            next(iterator)
        mine = [op for op in sim.log()[before:] if op.thread == main_thread()]
        assert [op.stream for op in mine if op.kind == "wait"] == [stream.cuda_stream]
        assert [op.kind for op in mine if op.kind in ("host_wait", "h2d")] == []
    iterator.close()


def copies_run(sim: simcuda.Simulator) -> int:
    """How many host-to-device copies the device has run; they are all on one stream."""
    log = sim.log()
    side = next(op.stream for op in log if op.kind == "h2d")
    ops = [op.kind for op in log if op.stream == side]
    return ops[: len(ops) - sim.pending(side)].count("h2d")


def check_waits_for_its_own_copy(sim: simcuda.Simulator, chain: str = "move") -> None:
    """The consumer's stream reaches a sample when that sample's copy has run, whatever copies are queued behind it."""
    begin()
    consumer = torch.cuda.Stream()
    iterator = iter(CHAINS[chain](Fn(lambda: map(full, range(100)))))
    # How many are issued ahead at the first next(), that one included, and how many of those copies the mover's
    # own bound has let run: with a prefetcher behind it, its consumer is that worker.
    issued, ran = (4, 0) if chain != "move, prefetch" else (7, 2)
    with torch.cuda.stream(consumer):
        for i in range(2):
            sample = next(iterator)
            assert eventually(lambda i=i: sim.counters().h2d == issued + i)
            consumer.synchronize()
            assert copies_run(sim) == ran + i + 1
            assert sample.cpu()[0].item() == i
    iterator.close()


@contextlib.contextmanager
def no_sync() -> Iterator[None]:
    """torch raises where it synchronizes a stream."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the mode a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def check_host_never_waits(sim: simcuda.Simulator, chain: str = "move") -> None:
    """No call in the consumer's thread waits for the device, by the log and by torch's own detector."""
    begin()
    with no_sync():
        taken = take(CHAINS[chain](Fn(lambda: map(nested, range(12)))), "custom")
    waits = [op for op in sim.log() if op.kind == "host_wait"]
    assert [op for op in waits if op.thread == main_thread()] == []
    assert waits, "the mover's worker waits: that is what bounds the memory"
    check_same(read(taken), [parts(nested(i)) for i in range(12)])


def check_events_block(sim: simcuda.Simulator, sample: str = "pinned") -> None:
    """A thread that waits for the device sleeps: it waits for events only, and they were made for that."""
    begin()
    take(CHAINS["move"](Fn(lambda: map(SAMPLES[sample], range(8)))))
    waits = {(op.name, op.blocking) for op in sim.log() if op.kind == "host_wait"}
    assert waits == {("event", True)}


# --- One stream -------------------------------------------------------------------------------------------


def check_one_copy_stream(sim: simcuda.Simulator) -> None:
    """Epochs, clones and movers copy on one stream a device, which is no default stream."""
    begin()
    for device in range(torch.cuda.device_count()):
        pipe = Fn(lambda: iter([full(1), full(2)])).to_cuda_stream(f"cuda:{device}")
        for one in (
            pipe,
            pipe,
            copy.deepcopy(pipe),
            Fn(lambda: iter([full(3)])).to_cuda_stream(f"cuda:{device}"),
        ):
            assert all(batch.device.index == device for batch in one)
    copies = [op for op in sim.log() if op.kind == "h2d"]
    streams = {(op.device, op.stream) for op in copies}
    assert sorted(device for device, _ in streams) == list(range(torch.cuda.device_count()))
    assert len(copies) == 7 * torch.cuda.device_count()
    assert 0 not in {stream for _, stream in streams}


# --- Bounds -----------------------------------------------------------------------------------------------


def active_bytes(which: str, device: int = 0) -> int:
    """Memory that is in use or waits for the device to be done with it [bytes]."""
    return int(torch.cuda.memory_stats(device)[f"active_bytes.all.{which}"])


def peak_batches(
    size: int,
    consumer: str = "default",
    *,
    chain: str = "move",
    early: bool = False,
    patient: int = 0,
    n: int = 200,
    cycles: int = CYCLES,
) -> float:
    """The most batches that were on the device at once, for a consumer that keeps none and never waits.

    It drops a batch as a loop does, when it has the next one, or `early`: before it asks for the next one. For so
    many of the first batches it is `patient`: it asks when the mover has issued all that it may.
    """
    gc.collect()  # nothing of another test goes while this one counts
    target = torch.empty(N, device="cuda")
    before = active_bytes("current")
    torch.cuda.reset_peak_memory_stats()
    pipe = CHAINS[chain](Fn(lambda: map(full, range(n))), buffer_size=size)
    iterator = iter(pipe)
    for i, stream in zip(range(n), CONSUMERS[consumer](), strict=False):
        if 0 < i < patient:
            assert eventually(lambda i=i: SIMULATOR.counters().h2d == i + size + 1)
        with torch.cuda.stream(stream):
            batch = next(iterator)
            busy(cycles)
            target.copy_(batch, non_blocking=True)
            if early:
                del batch
    iterator.close()
    return (active_bytes("peak") - before) / BATCH


def check_memory_bound(
    size: int = 2, schedule: str = "late", seed: int = 0, consumer: str = "default", **options: Any
) -> None:
    """At most buffer_size + 3 batches are on the device: just so many where the device is as late as it can be."""
    begin(schedule, seed)
    exact = schedule == "late" and SIMULATOR is not None
    peak = peak_batches(size, consumer, patient=20 if exact else 0, **options)
    assert peak <= size + 3, f"{peak} batches on the device, more than {size + 3}"
    if exact:
        early = options.get("early", False)  # then the last batch is gone when next() is called
        assert peak == size + 3 - early, f"{peak} batches on the device, not {size + 3 - early}"


def check_steps_ahead(size: int = 2, consumer: str = "default", n: int = 30) -> None:
    """The consumer is at most buffer_size + 2 steps ahead; just so many where the source is the slow one."""
    begin()
    allowed = threading.Semaphore(1)

    def source() -> Iterator[torch.Tensor]:
        for i in range(n):
            assert allowed.acquire(timeout=60)
            yield full(i)

    ahead, steps = [], []
    iterator = iter(Fn(source).to_cuda_stream("cuda", buffer_size=size))
    for _, stream in zip(range(n), CONSUMERS[consumer](), strict=False):
        with torch.cuda.stream(stream):
            next(iterator)
            busy()
            steps.append(stream.record_event())
        ahead.append(sum(not step.query() for step in steps))
        allowed.release()  # the next item is loaded only when this step is queued
    iterator.close()
    assert max(ahead) <= size + 2, f"{max(ahead)} steps ahead"
    if SIMULATOR is not None:
        assert ahead == [min(i + 1, size + 2) for i in range(n)]


# --- Staging ----------------------------------------------------------------------------------------------


def check_copies_are_pinned(sim: simcuda.Simulator) -> None:
    """Every copy comes from pinned memory, and there is one for each large tensor and one for all small ones."""
    n, large = 6, 3
    begin()
    for _ in CHAINS["move"](Fn(lambda: map(nested, range(n)))):
        pass
    assert sim.counters().pageable == 0
    assert all(op.pinned for op in sim.log() if op.kind == "h2d")
    assert sim.counters().h2d == n * (large + 1)


def check_pinned_is_not_staged(sim: simcuda.Simulator) -> None:
    """The copy of a tensor that is pinned already reads that tensor's own memory."""
    samples = [full(i).pin_memory() for i in range(6)]
    begin()
    taken = take(CHAINS["move"](Fn(lambda: iter(samples))))
    copies = [op for op in sim.log() if op.kind == "h2d"]
    assert [op.src for op in copies] == [one.data_ptr() for one in samples]
    assert sim.counters().host_allocs == 0
    check_same(read(taken), [[one] for one in samples])


def check_overwriting_source(
    schedule: str = "late", seed: int = 0, *, pinned: bool, n: int = 12, numel: int = N
) -> None:
    """A source that fills one buffer again and again gives the right values under the mover alone."""
    buffers = {
        "x": torch.empty(numel),
        "s": [torch.empty(4) for _ in range(9)],
        "t": torch.empty(100, 250).t(),
    }
    if pinned:
        buffers = {
            "x": buffers["x"].pin_memory(),
            "s": [one.pin_memory() for one in buffers["s"]],
            "t": torch.empty(100, 250).pin_memory().t(),
        }
    begin(schedule, seed, bandwidth=1e8)

    def source() -> Iterator[Any]:
        for i in range(n):
            for one in parts(buffers):
                one.fill_(i)
            yield buffers

    got = read(take(CHAINS["move"](Fn(source)), "custom"))
    check_same(got, [[torch.full_like(one, i) for one in parts(buffers)] for i in range(n)])


def check_pinned_source_is_waited_for(sim: simcuda.Simulator) -> None:
    """When a source of pinned tensors is asked for more, no copy from its memory is left to run."""
    samples = [full(i).pin_memory() for i in range(6)]
    begin()
    ran: list[int] = []

    def source() -> Iterator[torch.Tensor]:
        for one in samples:
            yield one
            ran.append(copies_run(sim))

    for _ in CHAINS["move"](Fn(source)):
        pass
    assert ran == [1, 2, 3, 4, 5, 6]


def square(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros((512, 512), dtype=dtype)


LARGE: dict[str, Callable[[], Any]] = {
    "contiguous": square,
    "transposed": lambda: square().t(),
    "strided": lambda: square()[:, ::2],
    "strided and transposed": lambda: square().t()[:, ::2],
    "expanded": lambda: torch.zeros(1).expand(1 << 18),
    "pinned": lambda: square().pin_memory(),
    "pinned and strided": lambda: square().pin_memory()[:, ::2],
    "conjugate": lambda: square(torch.complex64).conj(),
    "negative": lambda: torch._neg_view(square()),
    "packed": lambda: [torch.zeros(15_000) for _ in range(40)],
}


def tasks() -> set[str]:
    """The threads of this process, those that Python knows nothing of too."""
    return {path.name for path in Path("/proc/self/task").iterdir()}


def check_no_team(kind: str = "contiguous") -> None:
    """Staging a large sample starts no thread."""
    sample = LARGE[kind]()
    begin()
    before: set[str] = set()
    new: set[str] = set()

    def source() -> Iterator[Any]:
        before.update(tasks())
        yield sample
        new.update(tasks() - before)

    threads = torch.get_num_threads()
    torch.set_num_threads(max(2, threads))  # else no operation of torch would start any
    try:
        for _ in CHAINS["move"](Fn(source)):
            pass
    finally:
        torch.set_num_threads(threads)
    assert before, "the source ran"
    assert new == set(), "there are new threads"


def check_large_copies_are_pinned(sim: simcuda.Simulator, kind: str) -> None:
    """The copies of a large sample all come from pinned memory."""
    sample = LARGE[kind]()
    begin()
    for _ in CHAINS["move"](Fn(lambda: iter([sample]))):
        pass
    assert sim.counters().h2d == (3 if kind == "packed" else 1)  # 2.4 MB in blocks of 1 MiB
    assert sim.counters().pageable == 0


# --- State, graphs, GPU work upstream ---------------------------------------------------------------------


def state() -> tuple[Any, ...]:
    devices = range(torch.cuda.device_count())
    streams = tuple(torch.cuda.current_stream(device) for device in devices)
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cuda")
    return (torch.cuda.current_device(), *streams, *modes)


def check_state_is_left(chain: str = "move", mode: Callable[[], Any] = contextlib.nullcontext) -> None:
    """The consumer's thread has the same device, streams and modes before, in and after a loop."""
    begin()
    with torch.cuda.stream(torch.cuda.Stream()), mode():
        before = state()
        iterator = iter(CHAINS[chain](Fn(lambda: map(nested, range(9)))))
        for _ in range(5):
            next(iterator)
            assert state() == before
        iterator.close()
        assert state() == before


def captured(work: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """A graph of `work`, captured in the way that the stages ask for."""
    graph = torch.cuda.CUDAGraph()
    # The outer context: where a capture fails, torch leaves its stream current.
    with (
        torch.cuda.stream(torch.cuda.current_stream()),
        torch.cuda.graph(graph, capture_error_mode="thread_local"),
    ):
        work()
    return graph


def check_capture_is_refused(sim: simcuda.Simulator, chain: str = "move") -> None:
    """`next()` in a capture raises before any CUDA call, the capture goes on, and no sample is lost."""
    begin()
    static, output = torch.empty(N, device="cuda"), torch.empty(N, device="cuda")
    iterator = iter(CHAINS[chain](Fn(lambda: map(full, range(4)))))
    first = next(iterator)
    calls = lambda: [op for op in sim.log() if op.thread == main_thread()]
    errors, made = [], []

    def work() -> None:
        output.copy_(static)
        before = calls()
        try:
            next(iterator)
        except Exception as error:
            errors.append(error)
        made.extend(calls()[len(before) :])

    try:
        graph = captured(work)
    except Exception as error:
        raise AssertionError("the capture broke") from error
    assert [type(error) for error in errors] == [RuntimeError]
    assert "captur" in str(errors[0])
    assert made == []
    seen = []
    for batch in [first, *iterator]:
        static.copy_(batch)
        graph.replay()
        seen.append([output.cpu()])
    check_same(seen, [[full(i)] for i in range(4)])


def on_gpu(tensor: torch.Tensor) -> torch.Tensor:
    """Work that is queued, not done, when this returns."""
    busy()
    return tensor.to("cuda", non_blocking=True)


UPSTREAM: dict[str, Callable[[IterDataPipe], IterDataPipe]] = {
    "prefetch": lambda dp: dp.map(on_gpu).thread_prefetch(),
    "move": lambda dp: dp.map(on_gpu).to_cuda_stream("cuda"),
    "prefetch, move": lambda dp: dp.map(on_gpu).thread_prefetch().to_cuda_stream("cuda"),
    "move, prefetch": lambda dp: dp.map(on_gpu).to_cuda_stream("cuda").thread_prefetch(),
    "move, work, prefetch": lambda dp: dp.to_cuda_stream("cuda").map(torch.clone).thread_prefetch(),
}


def check_upstream_work(
    schedule: str = "late",
    seed: int = 0,
    *,
    chain: str = "prefetch",
    consumer: str = "custom",
    holding: str = "dropped",
) -> None:
    """CUDA tensors that a map made on a worker's thread are complete and safe where the consumer takes them."""
    n = 12
    samples = [full(i).pin_memory() for i in range(n)]
    begin(schedule, seed)
    taken = take(UPSTREAM[chain](Fn(lambda: iter(samples))), consumer, holding)
    check_same(read(taken), [[one] for one in samples])


def check_upstream_stream(schedule: str = "late", seed: int = 0, *, chain: str = "move") -> None:
    """The same where the source makes a stream of its own current on the worker's thread."""
    n = 12
    samples = [full(i).pin_memory() for i in range(n)]
    begin(schedule, seed)
    stream = torch.cuda.Stream()

    def source() -> Iterator[torch.Tensor]:
        torch.cuda.set_stream(stream)
        yield from samples

    check_same(read(take(UPSTREAM[chain](Fn(source)))), [[one] for one in samples])


def check_other_device(
    schedule: str = "late", seed: int = 0, *, consumer: str = "default", across: bool = True
) -> None:
    """Everything happens on cuda:1 though cuda:0 is current; `across`: tensors of cuda:0 are copied there too."""
    begin(schedule, seed)
    n = 12
    make = lambda i: [full(i), *([on_gpu(full(i).pin_memory())] if across else [])]
    own = torch.cuda.Stream("cuda:1") if consumer == "custom" else torch.cuda.default_stream("cuda:1")
    with torch.cuda.device(1), torch.cuda.stream(own), torch.cuda.device(0):
        seen = []
        for sample in Fn(lambda: map(make, range(n))).to_cuda_stream("cuda:1"):
            assert torch.cuda.current_device() == 0
            assert {one.device.index for one in sample} == {1}
            with torch.cuda.device(1):
                busy()
                seen.append([one.clone() for one in sample])
            del sample
        assert torch.cuda.current_device() == 0
        assert torch.cuda.current_stream(1) == own
        check_same([[one.cpu() for one in sample] for sample in seen], [[full(i)] * (1 + across) for i in range(n)])


_unused = itertools.count(1000, 6)


def check_cpu_target(schedule: str = "late") -> None:
    """CUDA tensors in a sample for the CPU are copied, and complete when `next()` returns."""
    start = next(_unused)  # values that no pinned memory in torch's cache may still hold
    samples = [full(start + i).pin_memory() for i in range(6)]
    begin(schedule)
    source = lambda: ({"x": on_gpu(one), "y": one} for one in samples)
    seen = [(sample["x"].device.type, sample["x"].tolist()) for sample in Fn(source).to_cuda_stream("cpu")]
    assert seen == [("cpu", one.tolist()) for one in samples]
