"""Which device samples go to, what is refused and when, and in which process and at which moment CUDA is touched."""

from __future__ import annotations

import math
import os
import pickle
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data.datapipes.iter import IterableWrapper

import simcuda
from contract import HANG, PRELUDE, DataLoader2, Items
from helpers import Fn, run_child
from sidestream import CudaStreamMover

CPU = torch.device("cpu")


def child(code: str, *, simulated: bool) -> None:
    """Run `code` in a process of its own, with the simulated device or with none; it must end well and say nothing."""
    load = "import simcuda\nsim = simcuda.load()\n" if simulated else ""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""} if not simulated else None
    done = run_child(load + PRELUDE + textwrap.dedent(code), timeout=HANG, env=environment)
    assert (done.returncode, done.stderr) == (0, ""), f"{done.stdout}\n{done.stderr}"


def two() -> Any:
    return IterableWrapper([torch.ones(2), torch.zeros(2)], deepcopy=False)


@pytest.fixture
def second(device: torch.device) -> torch.device:
    """The second of two devices."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    return torch.device("cuda", device.index + 1)


# Where samples go


@pytest.mark.parametrize("asked", [None, "cuda", "cuda:0", torch.device("cuda"), torch.device("cuda", 0)], ids=repr)
def test_samples_go_to_the_device_that_was_asked_for(asked: Any, device: torch.device) -> None:
    assert [t.device for t in two().to_cuda_stream(asked)] == [device, device]


@pytest.mark.parametrize("asked", ["cuda:1", torch.device("cuda", 1), torch.device("cuda:1")], ids=repr)
def test_another_device_than_the_current_one(asked: Any, second: torch.device) -> None:
    assert [t.device for t in two().to_cuda_stream(asked)] == [second, second]
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("asked", ["cpu", CPU], ids=repr)
def test_cpu_samples_pass_to_the_cpu_as_the_same_objects(asked: Any) -> None:
    """case 53"""
    sample = {"t": torch.ones(2), "list": [torch.zeros(1)]}
    (out,) = IterableWrapper([sample], deepcopy=False).to_cuda_stream(asked)
    assert (out["t"] is sample["t"], out["list"][0] is sample["list"][0]) == (True, True)


@pytest.mark.parametrize("asked", [None, "cuda"])
def test_the_index_is_that_of_the_first_next(asked: Any, second: torch.device) -> None:
    """case 71"""
    dp = two().to_cuda_stream(asked)
    it = iter(dp)
    with torch.cuda.device(second):
        first = next(it)
    assert (first.device, next(it).device) == (second, second)  # once an iteration
    assert [t.device.index for t in dp] == [0, 0]


def test_the_index_is_that_of_the_consumers_thread(second: torch.device) -> None:
    """case 71; the current device is each thread's own."""
    it = iter(two().to_cuda_stream("cuda"))

    def consume() -> torch.device:
        torch.cuda.set_device(second)
        return next(it).device

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(consume).result(10) == second
    assert torch.cuda.current_device() == 0
    assert next(it).device == second


@pytest.mark.filterwarnings("ignore:CUDA reports that you have")  # DataLoader2 draws a seed
def test_the_index_is_resolved_in_the_loaders_clone_too(second: torch.device) -> None:
    """case 71"""
    loader = DataLoader2(two().to_cuda_stream("cuda"))
    with torch.cuda.device(second):
        assert [t.device for t in loader] == [second, second]
    assert [t.device.index for t in loader] == [0, 0]
    loader.shutdown()


def test_behind_a_prefetcher_the_index_is_still_the_consumers(second: torch.device) -> None:
    dp = two().to_cuda_stream("cuda").thread_prefetch()
    with torch.cuda.device(second):
        assert [t.device for t in dp] == [second, second]


# What is refused


@pytest.mark.parametrize(
    "wrong", ["gpu", "mps", "meta", "cuda:x", "cuda:-2", "", "xpu:0", torch.device("mps")], ids=repr
)
def test_another_kind_of_device_is_a_value_error_when_building(wrong: Any) -> None:
    """case 71"""
    with pytest.raises(ValueError, match="device") as raised:
        two().to_cuda_stream(wrong)
    assert repr(wrong) in str(raised.value)


@pytest.mark.parametrize("wrong", [["cuda:0", "cuda:1"], ("cuda",), True, False, 0, 1, 1.0, b"cuda"], ids=repr)
def test_what_names_no_device_is_a_type_error_when_building(wrong: Any) -> None:
    """case 71"""
    with pytest.raises(TypeError, match="device") as raised:
        two().to_cuda_stream(wrong)
    assert repr(wrong) in str(raised.value)


@pytest.mark.parametrize("asked", ["cuda:7", torch.device("cuda", 7)], ids=repr)
def test_a_device_that_is_not_there_is_an_error_at_the_first_next(asked: Any, device: torch.device) -> None:
    source = Items([1, 2])
    it = iter(source.to_cuda_stream(asked))
    with pytest.raises(RuntimeError, match="cuda:7") as raised:
        next(it)
    assert f"{torch.cuda.device_count()} CUDA device" in str(raised.value)
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(it)
    assert source.pulls == 0


@pytest.mark.parametrize(
    ("name", "wrong", "error"),
    [
        *(("buffer_size", wrong, TypeError) for wrong in (True, 1.5, "2", None)),
        *(("buffer_size", wrong, ValueError) for wrong in (0, -1)),
        *(("pack_below", wrong, TypeError) for wrong in (False, 1.0, "8", None)),
        ("pack_below", -1, ValueError),
        *(("close_timeout", wrong, TypeError) for wrong in (True, "2", None)),
        *(("close_timeout", wrong, ValueError) for wrong in (-0.5, math.inf, math.nan)),
        *(("keep_on_cpu", wrong, TypeError) for wrong in ([1], ("a", None), 5, None, [b"a"])),
    ],
)
def test_a_wrong_argument_is_named_with_its_value_when_building(name: str, wrong: Any, error: type[Exception]) -> None:
    culprit = next(it for it in wrong if not isinstance(it, str)) if isinstance(wrong, (list, tuple)) else wrong
    with pytest.raises(error, match=f"^{name} must be ") as raised:
        two().to_cuda_stream("cpu", **{name: wrong})
    assert repr(culprit) in str(raised.value)


def test_the_edges_of_arguments_are_accepted() -> None:
    names = (name for name in ["a", "b"])
    dp = two().to_cuda_stream("cpu", buffer_size=1, pack_below=0, close_timeout=0, keep_on_cpu=names)
    assert len(list(dp)) == len(list(pickle.loads(pickle.dumps(dp)))) == 2
    assert dp.keep_on_cpu == {"a", "b"}
    assert two().to_cuda_stream("cpu", keep_on_cpu="length").keep_on_cpu == {"length"}


def test_all_but_the_device_are_keywords() -> None:
    with pytest.raises(TypeError, match="positional"):
        CudaStreamMover(two(), "cpu", 2)  # type: ignore[misc]


def test_without_cuda_none_warns_once_and_cuda_is_one_error() -> None:
    """case 53"""
    child(
        """
        sample = {"t": torch.ones(2)}
        source = IterableWrapper([sample, sample], deepcopy=False)
        assert not torch.cuda.is_available()

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert [out["t"] is sample["t"] for out in source.to_cuda_stream("cpu")] == [True, True]

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            dp = source.to_cuda_stream()
            copies = pickle.loads(pickle.dumps(dp)), copy.deepcopy(dp)
            assert (len(dp), caught) == (2, [])
            for _ in range(2):
                assert [out["t"] is sample["t"] for out in dp] == [True, True]
            assert [len(list(pipe)) for pipe in (*copies, source.to_cuda_stream(None))] == [2, 2, 2]
        assert [one.category for one in caught] == [RuntimeWarning], caught
        assert "to_cuda_stream" in str(caught[0].message) and "CPU" in str(caught[0].message)

        for asked in ("cuda", "cuda:0", torch.device("cuda")):
            source = Items([1])
            dp = source.to_cuda_stream(asked)
            assert len(pickle.loads(pickle.dumps(dp))) == 1
            for _ in range(2):
                it = iter(dp)
                try:
                    next(it)
                except RuntimeError as error:
                    assert repr(str(asked)) in str(error) and "to_cuda_stream" in str(error), error
                else:
                    raise AssertionError("no error")
                assert [next(it, "end") for _ in range(2)] == ["end", "end"]
            assert source.pulls == 0
        assert not torch.cuda.is_initialized()
        assert settled()
        """,
        simulated=False,
    )


# Nothing touches CUDA too early


def test_nothing_but_iteration_to_a_cuda_device_touches_cuda(sim: simcuda.Simulator) -> None:
    """case 53; and case 70: then only the device that is meant.

    `DataLoader2` is left out: it draws a seed when it is built, for which torch asks each device for its state.
    """
    child(
        """
        def untouched():
            return not torch.cuda.is_initialized() and sim.contexts() == set() and sim.log() == []

        assert untouched()
        source = IterableWrapper([{"t": torch.ones(2)}] * 3)
        pipes = [source.to_cuda_stream(asked) for asked in (None, "cuda", "cuda:1", torch.device("cuda"), "cpu")]
        pipes += [pipe.thread_prefetch() for pipe in pipes] + [source.thread_prefetch().to_cuda_stream()]
        assert untouched()
        for pipe in pipes:
            assert len(pipe) == 3
            assert len(traverse_dps(pipe)) == 1
            assert len(pickle.loads(pickle.dumps(pipe))) == len(copy.copy(pipe)) == len(copy.deepcopy(pipe)) == 3
            iter(pipe)  # starts nothing
            pipe.pause() or pipe.resume()
            repr(pipe), dir(pipe), pipe.is_replicable() if hasattr(pipe, "is_replicable") else None
        assert untouched()
        assert len(list(source.to_cuda_stream("cpu"))) == len(list(source.thread_prefetch())) == 3
        assert len(list(source.to_cuda_stream("cpu").thread_prefetch())) == 3
        assert untouched()
        try:
            next(iter(source.to_cuda_stream("cuda:7")))
        except RuntimeError:
            pass
        assert sim.contexts() == set()

        torch.cuda.set_device(1)
        out = list(source.thread_prefetch().to_cuda_stream("cuda:1")) + list(source.to_cuda_stream())
        assert [batch["t"].device.index for batch in out] == [1] * 6
        assert [batch["t"].tolist() for batch in out] == [[1, 1]] * 6
        assert (sim.contexts(), sim.device_bytes(0), torch.cuda.current_device()) == ({1}, 0, 1)
        """,
        simulated=True,
    )


# To the CPU


def test_cuda_tensors_are_complete_on_the_cpu_when_next_returns(device: torch.device) -> None:
    """case 68; the device does nothing by itself here, so a copy that nobody waited for is not there."""

    def source() -> Iterator[Any]:
        for i in range(4):
            pinned = torch.full((1 << 16,), float(i)).pin_memory()
            there = pinned.to(device, non_blocking=True)
            yield {"x": there, "deep": [(there[:3], i)], "cpu": pinned}

    for i, out in enumerate(Fn(source).to_cuda_stream("cpu")):
        assert (out["x"].device, out["deep"][0][0].device) == (CPU, CPU)
        assert (out["x"].unique().tolist(), out["deep"][0][0].tolist()) == ([float(i)], [float(i)] * 3)
        assert out["cpu"].is_pinned()


class Holder:
    """An object whose own `to` may be asynchronous."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def to(self, device: Any, non_blocking: bool = False) -> Holder:
        return Holder(self.x.to(device, non_blocking=non_blocking))


def jagged() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.arange(2.0), torch.arange(3.0)], layout=torch.jagged)


SEQUENCE = pack_sequence([torch.arange(3.0), torch.arange(2.0)])
ON_CPU: dict[str, tuple[Callable[[], Any], Callable[[Any], torch.Tensor]]] = {
    "object": (lambda: Holder(torch.arange(3.0)), lambda out: out.x),
    "sparse": (lambda: torch.eye(2).to_sparse(), lambda out: out._values()),
    "jagged": (jagged, lambda out: out.values()),
    "packed sequence": (lambda: SEQUENCE, lambda out: out.data),
}


@pytest.mark.parametrize("name", ON_CPU)
def test_objects_and_other_layouts_are_complete_on_the_cpu_too(name: str, device: torch.device) -> None:
    """case 69"""
    make, look = ON_CPU[name]
    there = make().to(device, non_blocking=True)
    (out,) = IterableWrapper([there], deepcopy=False).to_cuda_stream("cpu")
    assert (look(out).device, look(there).device) == (CPU, device)
    assert look(out).tolist() == look(make()).tolist()


def test_names_that_are_kept_are_left_where_they_are(device: torch.device) -> None:
    """They are "not moved", from a device neither."""
    there = torch.ones(2).to(device)
    (out,) = IterableWrapper([{"a": there, "b": there}], deepcopy=False).to_cuda_stream("cpu", keep_on_cpu="a")
    assert out["a"] is there
    assert (out["b"].device, out["b"].tolist()) == (CPU, [1, 1])


# Processes


def test_the_stage_is_not_replicable() -> None:
    """case 104"""
    assert two().to_cuda_stream().is_replicable() is False
    assert two().to_cuda_stream("cpu").is_replicable() is False


def test_reading_services_keep_the_stage_in_the_main_process() -> None:
    """case 104"""
    child(
        """
        warnings.filterwarnings("ignore", "This process", DeprecationWarning)
        def tag(x):
            return (*x, os.getpid())
        dp = IterableWrapper([(i,) for i in range(8)]).sharding_filter().map(tag).to_cuda_stream("cpu").map(tag)
        dl = DataLoader2(dp, reading_service=MultiProcessingReadingService(2))
        for _ in range(2):
            out = list(dl)
            assert sorted(x[0] for x in out) == list(range(8))
            assert {x[2] for x in out} == {os.getpid()}
            assert len({x[1] for x in out} - {os.getpid()}) == 2
        dl.shutdown()
        assert settled()
        """,
        simulated=False,
    )


IN_WORKERS = """
    from torch.utils.data import DataLoader, IterDataPipe
    warnings.filterwarnings("ignore", "This process", DeprecationWarning)

    class Report(IterDataPipe):
        def __init__(self, source):
            self.source = source
        def __iter__(self):
            before = sim.contexts(), len(sim.log())
            try:
                got = list(self.source)
            except RuntimeError as error:
                got = str(error)
            yield got, torch.cuda.is_initialized(), (sim.contexts(), len(sim.log())) == before

    def source():
        return IterableWrapper([torch.ones(2)] * 4)

    def check():
        pipes = [source().to_cuda_stream(asked) for asked in (None, "cpu")]
        for dp in (*pipes, source().to_cuda_stream("cuda").thread_prefetch()):
            gc.collect()  # an old iterator of torch's loader complains if it ends in a forked process
            reports = list(DataLoader(Report(dp), num_workers=2, batch_size=None))
            assert len(reports) == 2
            for got, initialized, untouched in reports:
                assert "to_cuda_stream cannot run in a worker process" in got and "put it last" in got, got
                assert not initialized and untouched
"""


def test_a_worker_of_torchs_loader_gets_one_error_before_any_cuda_call(sim: simcuda.Simulator) -> None:
    """cases 90, 105; before and after the parent has begun to use CUDA."""
    code = textwrap.dedent(IN_WORKERS) + textwrap.dedent("""
        check()
        assert sim.contexts() == set()
        assert [t.tolist() for t in source().to_cuda_stream("cuda")] == [[1, 1]] * 4
        check()
        try:
            list(DataLoader(source().to_cuda_stream(), num_workers=1, batch_size=None))
        except RuntimeError as error:  # torch takes 5 seconds to end a worker that failed, so there is one
            assert "to_cuda_stream cannot run in a worker process" in str(error), error
        else:
            raise AssertionError("no error")
    """)
    child(code, simulated=True)


DISPATCHED = """
    warnings.filterwarnings("ignore", "This process", DeprecationWarning)
    warnings.filterwarnings("ignore", "CUDA reports that you have", UserWarning)  # DataLoader2 draws a seed
    from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
    dp = IterableWrapper(range(8)).to_cuda_stream("cpu")
    dp = dp.sharding_round_robin_dispatch(SHARDING_PRIORITIES.MULTIPROCESSING)
    dl = DataLoader2(dp, reading_service=MultiProcessingReadingService(2))
    try:
        list(dl)
    except Exception as error:
        assert "to_cuda_stream cannot run in a worker process" in str(error), repr(error)
    else:
        raise AssertionError("no error")
    dl.shutdown()
    for process in multiprocessing.active_children():  # torchdata leaves some behind after an error in any pipe there
        process.kill()
"""


def test_a_dispatching_process_gets_the_error_and_it_reaches_the_parent() -> None:
    """case 105: the stage stands before what reading services do not replicate, so it lands in a process of its own."""
    child(DISPATCHED, simulated=False)


def test_a_dispatching_process_gets_the_error_where_there_is_a_device(sim: simcuda.Simulator) -> None:
    """case 105"""
    child(DISPATCHED.replace('"cpu"', ""), simulated=True)


SPAWNED = """
import simcuda
simcuda.load()
import torch
from torch.utils.data.datapipes.iter import IterableWrapper
import sidestream

def move(kind):
    out = list(IterableWrapper([torch.full((3,), i) for i in range(5)]).thread_prefetch().to_cuda_stream("cuda"))
    assert [t.device.index for t in out] == [0] * 5
    assert [t.tolist() for t in out] == [[i] * 3 for i in range(5)]
"""


def test_the_stage_works_in_an_ordinary_child_process(sim: simcuda.Simulator, tmp_path: Path) -> None:
    """case 106; it does not load data for another."""
    (tmp_path / "spawned.py").write_text(SPAWNED)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})" + textwrap.dedent("""
        from spawned import move
        warnings.filterwarnings("ignore", "This process", DeprecationWarning)
        def run(context, function, *args):
            process = multiprocessing.get_context(context).Process(target=function, args=args, daemon=True)
            process.start()
            process.join(40)
            return process.exitcode
        assert run("fork", move, "fork") == 0
        assert run("spawn", move, "spawn") == 0

        move("here")
        def fails():
            try:
                move("after CUDA began in the parent")
            except RuntimeError as error:
                assert "to_cuda_stream" in str(error), error
                sys.exit(7)
        assert run("fork", fails) == 7
        assert run("spawn", move, "spawn") == 0
    """)
    child(code, simulated=True)
