"""What a sample costs, counted and not timed: copies, host waits, words between threads, calls.

Counts are exact. Copies and waits come from the simulated device; the rest from what is passed in: a counting queue, a
counting lock, a counting `fn`, Python's profiler. A change that makes one of them grow has to change a number here.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import pytest
import torch

import sidestream.transfer
import sidestream.worker
from helpers import Fn, eventually
from sidestream.samples import map_leaves
from sidestream.transfer import Copier

KIB = 1 << 10
SAMPLES = 10


def small(n: int, nbytes: int = KIB, dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> list[torch.Tensor]:
    kinds = [dtypes[i % len(dtypes)] for i in range(n)]
    return [torch.ones(nbytes // kind.itemsize, dtype=kind) for kind in kinds]


FOUR = (torch.float32, torch.int64, torch.uint8, torch.float64)
COPIES = {
    "one": (lambda: small(1), 1),
    "seven are too few to pack": (lambda: small(7), 7),
    "200": (lambda: small(200), 1),
    "200 of four types": (lambda: small(200, dtypes=FOUR), 1),
    "200, nested": (lambda: [{"a": small(10), "b": (small(10),)} for _ in range(10)], 1),
    "1,000": (lambda: small(1000), 1),
    "two blocks": (lambda: small(64, 32 * KIB), 2),
    "200 that are not small": (lambda: small(200, 64 * KIB), 200),
    "one tensor, 200 times": (lambda: small(1) * 200, 1),
    "200 small ones and a large one": (lambda: [small(200), torch.ones(1 << 20)], 2),
}


# --- What the device is asked for -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", COPIES)
def test_copies_a_sample(sim, kind):
    make, right = COPIES[kind]
    sample = make()
    for _out in Fn(lambda: (sample for _ in range(SAMPLES))).to_cuda_stream("cuda"):
        pass
    torch.cuda.synchronize()
    counters = sim.counters()
    assert (counters.h2d, counters.pageable) == (right * SAMPLES, 0)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_host_waits_events_and_stream_waits_a_sample(sim, size, monkeypatch):
    """The mover's thread waits once a sample from the (size + 3)rd on; the consumer's never does."""
    n, records, record = size + 12, [], sidestream.transfer.record
    monkeypatch.setattr(sidestream.transfer, "record", lambda stream: records.append(stream) or record(stream))
    for _out in Fn(lambda: (small(200) for _ in range(n))).to_cuda_stream("cuda", buffer_size=size):
        pass
    counters = sim.counters()
    assert counters.host_waits == n - (size + 2)
    assert counters.stream_waits == n
    assert len(records) == n + (n - 1)  # behind each copy; where the consumer stood, at each next() but the first
    consumer = threading.get_native_id()
    assert [one for one in sim.log() if one.kind == "host_wait" and one.thread == consumer] == []


def test_a_prefetcher_of_host_samples_asks_the_device_for_nothing(sim):
    torch.cuda.init()
    for _out in Fn(lambda: (small(200) for _ in range(SAMPLES))).thread_prefetch():
        pass
    assert sim.log() == []


# --- What the threads say to each other -----------------------------------------------------------------------------


class CountingQueue(SimpleQueue):
    """Counts each call with its arguments, beside the item."""

    made: list[CountingQueue]

    def __init__(self):
        super().__init__()
        self.calls = Counter()
        self.made.append(self)

    def put(self, item):
        self.calls["put"] += 1
        super().put(item)

    def get(self, *args, **options):
        self.calls[("get", args, *options.items())] += 1
        return super().get(*args, **options)


@pytest.fixture
def queues(monkeypatch) -> list[CountingQueue]:
    """Those that an iteration makes."""
    monkeypatch.setattr(CountingQueue, "made", [], raising=False)
    monkeypatch.setattr(sidestream.worker, "SimpleQueue", CountingQueue)
    return CountingQueue.made


def test_a_word_each_way_an_item_and_no_more(queues):
    n = 100
    pipe = Fn(lambda: iter(range(n))).thread_prefetch(3)
    iterator = iter(pipe)
    assert list(iterator) == list(range(n))
    rests, taken, ready = queues
    assert rests.calls == {}  # nobody has paused
    assert ready.calls == {
        "put": n + 2,
        ("get", ()): n + 1,
    }  # two more: the end, and the end again for who asks again
    assert taken.calls["put"] == n
    assert taken.calls["get", ()] < n  # the worker listens only where there is no room
    assert taken.calls.keys() <= {"put", ("get", ())}  # never for a while: that would be polling


def test_a_worker_whose_buffer_is_full_makes_no_further_call(queues):
    asked = threading.Semaphore(0)

    def source():
        for i in range(100):
            asked.release()
            yield i

    iterator = iter(Fn(source).thread_prefetch(2))
    next(iterator)
    for _ in range(4):  # the one delivered, two that wait, one in hand
        asked.acquire()
    assert eventually(lambda: sum(queue.calls["get", ()] for queue in queues) == 3)  # ours; a word; none so far
    before = [Counter(queue.calls) for queue in queues]
    iterator.worker.pause()  # returns when the worker is at rest
    assert [queue.calls for queue in queues] == before
    iterator.close()


# --- What a leaf costs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 200, 1000])
def test_one_call_of_fn_a_leaf(n):
    calls = []
    sample = [{"x": leaf, "again": leaf} for leaf in small(n, 16)]
    map_leaves(calls.append, sample)
    assert [id(leaf) for leaf in calls] == [id(one["x"]) for one in sample]


CALLS_A_TENSOR = 29
small_ready = {n: small(n, 256) for n in (100, 200, 400)}


def calls_of(function: Callable[[], Any]) -> int:
    """How many calls, of Python and of C, `function` makes on this thread."""
    count = 0

    def note(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


@pytest.fixture
def copier(sim) -> Copier:
    made = Copier(torch.device("cuda", 0), 1000, frozenset(), 1 << 16)
    for sample in ([small(10), torch.ones(KIB)],) * 3:
        made.receive(made.issue(sample))  # what is made once is made
    return made


def test_a_small_tensor_costs_a_fixed_number_of_calls(copier):
    """Of any kind; the simulated device's and torch's own C++ calls are not seen."""
    issue = [calls_of(lambda n=n: copier.issue(small_ready[n])) for n in (100, 200, 400)]
    assert abs((issue[2] - issue[1]) - 2 * (issue[1] - issue[0])) <= 10  # the allocator looks after old blocks, or not
    assert (issue[1] - issue[0]) / 100 <= CALLS_A_TENSOR


def test_delivery_costs_the_same_for_any_number_of_packed_tensors(copier):
    parcels = [copier.issue(small_ready[n]) for n in (100, 200, 400)]
    received = [calls_of(lambda one=one: copier.receive(one)) for one in parcels]
    assert received[0] == received[1] == received[2]


@pytest.mark.parametrize("work", ["issue", "receive"])
def test_a_tensor_costs_the_same_for_any_number_of_bytes(copier, work):
    def calls(nbytes):
        sample = torch.ones(nbytes // 4)
        parcel = copier.issue(sample)
        return calls_of(lambda: copier.receive(parcel) if work == "receive" else copier.issue(sample))

    assert calls(1 << 17) == calls(1 << 20) == calls(16 << 20)


def test_nothing_is_weighed_without_max_bytes(monkeypatch):
    weighed = []
    monkeypatch.setattr(sys.modules["sidestream.prefetch"], "nbytes", lambda item: weighed.append(item) or 1)
    assert list(Fn(lambda: iter(range(5))).thread_prefetch()) == list(range(5))
    assert weighed == []
    assert list(Fn(lambda: iter(range(5))).thread_prefetch(max_bytes=10)) == list(range(5))
    assert weighed == list(range(5))


def test_no_sample_is_walked_before_cuda_is_initialized(monkeypatch):
    walked = []
    monkeypatch.setattr(sidestream.transfer, "leaves", lambda item: walked.append(item) or [])
    for initialized, right in ((False, []), (True, [7])):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda initialized=initialized: initialized)
        monkeypatch.setattr(sidestream.transfer, "refuse_capture", lambda: None)
        assert list(Fn(lambda: iter([7])).thread_prefetch()) == [7]
        assert walked == right
