"""Reported faults around copies, graph walks, worker processes and `DataLoader2`: a stage is as good as any pipe."""

from __future__ import annotations

import copy
import itertools
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterDataPipe, graph_settings

from contract import (
    BOTH_ORDERS,
    STAGES,
    Chain,
    DataLoader2,
    InProcessReadingService,
    Items,
    IterableWrapper,
    Watched,
    observe,
    scenario,
    traverse_dps,
)
from helpers import Fn, settled, workers

# `DataLoader2` draws its seed in `fork_rng`, which says so where there is more than one device.
pytestmark = pytest.mark.filterwarnings("ignore:CUDA reports that you have:UserWarning")


@pytest.fixture(params=BOTH_ORDERS)
def stage(request: pytest.FixtureRequest) -> Chain:
    return STAGES[request.param]


# Pickling, cloning, graph walks

# case 99: held by test_contract.py::test_it_can_be_copied_at_any_moment


def test_a_clone_made_while_the_stage_runs_owns_no_thread_and_disturbs_nothing(stage: Chain) -> None:
    """case 99"""
    dp = stage(IterableWrapper(range(40)))
    it = iter(dp)
    assert next(it) == 0
    before = set(workers())
    clones = [pickle.loads(pickle.dumps(dp)), copy.deepcopy(dp), DataLoader2(dp).datapipe]
    assert set(workers()) == before
    assert next(it) == 1
    assert [list(clone) for clone in clones] == [list(range(40))] * 3
    assert list(it) == list(range(2, 40))


class Locks(IterDataPipe):
    """Items that can be neither pickled nor copied."""

    def __iter__(self) -> Iterator[Any]:
        for _ in range(9):
            yield {"lock": threading.Lock(), "function": lambda: None, "generator": (x for x in ())}


def test_a_graph_walk_never_meets_the_items_that_wait(stage: Chain) -> None:
    """case 100"""
    dp = stage(Locks())
    it = iter(dp)
    next(it)
    graph = traverse_dps(dp)
    assert [pipe for pipe, _ in graph.values()] == [dp]
    loader = DataLoader2(stage(Locks()), reading_service=InProcessReadingService())
    counted = iter(loader)
    counted.limit(2)
    lengths = [len(list(counted))]
    for _ in range(4):
        counted.resume()
        lengths.append(len(list(counted)))
    assert lengths == [2, 2, 2, 2, 1]
    it.close()
    loader.shutdown()


class OpenFile(IterDataPipe):
    """A source that holds an open file."""

    def __init__(self) -> None:
        self.file = Path(__file__).open(encoding="utf-8")  # noqa: SIM115 - that it stays open is the point

    def __iter__(self) -> Iterator[str]:
        yield from ()


def refusal(function: Callable[[Any], Any], pipe: IterDataPipe) -> tuple[type[BaseException], str]:
    with pytest.raises(Exception) as caught:
        function(pipe)
    return caught.type, str(caught.value)


def test_what_cannot_be_pickled_upstream_is_named_as_without_the_stage(stage: Chain) -> None:
    """case 102"""
    source = OpenFile()
    for function in (pickle.dumps, copy.deepcopy):
        assert refusal(function, stage(source)) == refusal(function, source)
        assert "TextIOWrapper" in refusal(function, stage(source))[1]
    source.file.close()
    by_lambda = Fn(lambda: iter(()))
    assert refusal(pickle.dumps, stage(by_lambda)) == refusal(pickle.dumps, by_lambda)


# Worker processes


def test_each_stage_runs_in_the_process_where_the_graph_puts_it() -> None:
    """case 104"""
    scenario("""
    warnings.filterwarnings("ignore", "This process", DeprecationWarning)
    from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
    main = os.getpid()
    def tag(x):
        return (*x, os.getpid())
    def start():
        return IterableWrapper([(i,) for i in range(8)])
    def pids(dp, dispatched=False):
        dl = DataLoader2(dp, reading_service=MultiProcessingReadingService(2))
        out = list(dl)
        assert sorted(x[0] for x in out) == list(range(8))
        with within(HANG):  # torchdata waits up to 20 s for a process of its own that is slow to end
            dl.shutdown()
        del dl
        if dispatched:  # now and then one of its processes does not end then, with the bare pipe as well
            for child in multiprocessing.active_children():
                child.kill()
        assert eventually(lambda: multiprocessing.active_children() == [])
        assert settled(), workers()
        return [set(column) for column in list(zip(*out))[1:]]

    before, behind = pids(start().sharding_filter().map(tag).thread_prefetch(2).map(tag))
    assert before == behind and len(before) == 2 and main not in before

    before, between, behind = pids(
        start().sharding_filter().map(tag).thread_prefetch(2).map(tag).to_cuda_stream("cpu").map(tag)
    )
    assert before == between and len(before) == 2 and main not in before
    assert behind == {main}

    before, between, behind = pids(
        start().sharding_filter().map(tag).to_cuda_stream("cpu").map(tag).thread_prefetch(2).map(tag)
    )
    assert len(before) == 2 and main not in before
    assert between == behind == {main}

    before, between, behind = pids(
        start().map(tag).thread_prefetch(2).sharding_round_robin_dispatch(SHARDING_PRIORITIES.MULTIPROCESSING)
        .map(tag).thread_prefetch(2).map(tag),
        dispatched=True,
    )
    assert len(before) == 1 and main not in before
    assert between == behind and len(between) == 2 and not between & (before | {main})

    before, behind = pids(
        start().map(tag).thread_prefetch(2).sharding_round_robin_dispatch(SHARDING_PRIORITIES.MULTIPROCESSING)
        .thread_prefetch(2).to_cuda_stream("cpu").map(tag),
        dispatched=True,
    )
    assert len(before) == 1 and main not in before
    assert behind == {main}
    """)


def test_the_mover_alone_is_not_replicable() -> None:
    """case 104"""
    source = IterableWrapper(range(3))
    assert source.to_cuda_stream("cpu").is_replicable() is False
    assert getattr(source.thread_prefetch(), "is_replicable", lambda: True)() is True


def test_a_whole_chain_runs_in_a_daemonic_and_in_a_spawned_process() -> None:
    """case 106"""
    scenario("""
    warnings.filterwarnings("ignore", "This process", DeprecationWarning)
    for name in BOTH_ORDERS:
        process = multiprocessing.get_context("fork").Process(target=drain, args=(0, name), daemon=True)
        process.start()
        process.join(10)
        assert process.exitcode == 0, name
    torch.multiprocessing.spawn(drain, args=(BOTH_ORDERS[2],), nprocs=1)
    """)


# DataLoader2

# case 107: held by test_contract.py::test_limit_pauses_and_resume_goes_on_with_nothing_lost,
#           ::test_pause_gives_up_on_a_blocked_source_and_nothing_is_lost, ::test_pause_stands_between_items
#           and ::test_pause_and_resume_do_nothing_where_there_is_nothing_to_do


def test_limit_stands_still_with_the_buffers_full() -> None:
    """case 107, as it was reported"""
    loader = DataLoader2(Watched(12).thread_prefetch(3), reading_service=InProcessReadingService())
    it = iter(loader)
    it.limit(2)
    first = list(it)
    count = len(Watched.pulled)
    assert Watched.stands_still()
    assert (first, len(Watched.pulled)) == ([0, 1], count)
    rest = []
    for _ in range(6):
        it.resume()
        rest.append(list(it))
    assert rest == [[2, 3], [4, 5], [6, 7], [8, 9], [10, 11], []]
    loader.shutdown()


def test_limit_without_a_reading_service_limits_nothing(stage: Chain) -> None:
    """case 108: as with the bare pipe, and torchdata's own warning says so."""

    def limited(dp: IterDataPipe) -> list[int]:
        it = iter(DataLoader2(dp))
        with pytest.warns(UserWarning, match="doesn't support `limit`"):
            it.limit(2)
        with pytest.warns(UserWarning, match="doesn't support `pause`"):
            return list(it)

    assert limited(stage(IterableWrapper(range(5)))) == limited(IterableWrapper(range(5))) == [0, 1, 2, 3, 4]


def test_more_worker_processes_than_items_and_sharding_on_either_side() -> None:
    """case 109 and case 111"""
    scenario("""
    warnings.filterwarnings("ignore", "This process", DeprecationWarning)
    def run(dp, count):
        dl = DataLoader2(dp, reading_service=MultiProcessingReadingService(count))
        out = sorted(dl)
        with within(HANG):  # torchdata waits up to 20 s for a process of its own that is slow to end
            dl.shutdown()
        del dl
        assert eventually(lambda: multiprocessing.active_children() == [])
        assert settled(), workers()
        return out
    def source(n):
        return IterableWrapper(range(n))
    for name in BOTH_ORDERS:
        assert run(STAGES[name](source(2).sharding_filter()), 4) == [0, 1], name
        assert run(STAGES[name](source(6).sharding_filter()), 2) == [0, 1, 2, 3, 4, 5], name
    assert run(source(6).thread_prefetch(2).sharding_filter(), 2) == [0, 1, 2, 3, 4, 5]
    assert run(source(6).thread_prefetch(2), 2) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    """)


# case 110: held by test_contract.py::test_length_is_the_sources_and_is_never_kept
#           and ::test_where_the_source_has_no_length_the_error_names_the_stage


def test_the_length_follows_sharding(stage: Chain) -> None:
    """case 110"""
    dp = stage(IterableWrapper(range(13)).sharding_filter())
    assert len(dp) == 13
    graph_settings.apply_sharding(dp, 2, 0)
    assert len(dp) == 7
    assert list(dp) == list(range(0, 13, 2))
    assert workers() == []


@pytest.mark.parametrize("kind", ["ThreadPrefetcher", "CudaStreamMover"])
def test_a_missing_length_is_told_with_the_stages_name(kind: str) -> None:
    """case 110"""
    dp = {"ThreadPrefetcher": Fn(list).thread_prefetch(), "CudaStreamMover": Fn(list).to_cuda_stream("cpu")}[kind]
    with pytest.raises(TypeError, match=f"^{kind} instance doesn't have valid length$"):
        len(dp)


def two_epochs(dp: IterDataPipe, seed: int) -> list[list[int]]:
    loader = DataLoader2(dp, reading_service=InProcessReadingService())
    loader.seed(seed)
    epochs = [list(loader), list(loader)]
    loader.shutdown()
    return epochs


def test_shuffle_order_is_that_of_the_bare_pipe(stage: Chain) -> None:
    """case 112"""
    bare = two_epochs(IterableWrapper(range(50)).shuffle(), 7)
    assert sorted(bare[0]) == sorted(bare[1]) == list(range(50))
    assert bare[0] != bare[1]
    assert two_epochs(stage(IterableWrapper(range(50)).shuffle()), 7) == bare
    assert two_epochs(stage(IterableWrapper(range(50)).shuffle()), 7) == bare
    assert two_epochs(stage(stage(IterableWrapper(range(50))).shuffle()), 7) == bare


def test_an_epoch_left_early_does_not_change_the_next_order(stage: Chain) -> None:
    """case 112"""

    def second_epoch(dp: IterDataPipe) -> list[int]:
        loader = DataLoader2(dp, reading_service=InProcessReadingService())
        loader.seed(7)
        assert len(list(itertools.islice(loader, 5))) == 5
        out = list(loader)
        loader.shutdown()
        return out

    bare = second_epoch(IterableWrapper(range(50)).shuffle())
    assert second_epoch(stage(IterableWrapper(range(50)).shuffle())) == bare


def test_without_a_loader_the_global_seed_gives_the_bare_pipes_order(stage: Chain) -> None:
    """case 112"""

    def epochs(dp: IterDataPipe) -> list[list[int]]:
        torch.manual_seed(3)
        return [list(dp), list(dp)]

    bare = epochs(IterableWrapper(range(50)).shuffle())
    assert epochs(stage(IterableWrapper(range(50)).shuffle())) == bare


def test_after_an_error_the_loader_is_shut_and_the_bare_stage_is_not(stage: Chain) -> None:
    """case 113"""
    loader = DataLoader2(stage(Items([0, 1], error=ValueError("x"))))
    assert observe(loader) == ([0, 1], ValueError, ("x",))
    assert settled()
    with pytest.raises(RuntimeError, match="already been shut down"):
        list(loader)
    assert observe(loader.datapipe) == ([0, 1], ValueError, ("x",))
    assert settled()


# case 114: held by test_contract.py::test_it_loads_ahead_and_never_further_than_the_bound
#           and ::test_wrong_arguments_are_errors_when_building
