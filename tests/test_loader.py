"""`prefetch` gives what the bare loader gives, in the same order, and is used as it is. The oracle: the bare one."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import tqdm
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.distributed import DistributedSampler

import sidestream.mover
from contract import Gate, Items, scenario, stands_still
from helpers import eventually, workers
from sidestream import prefetch
from sidestream.loader import PrefetchLoader

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader
    except ImportError:  # torchdata before 0.8
        StatefulDataLoader = None

pytestmark = [
    # From Python 3.12 on, of any fork beside another thread. Here a DataLoader forks its workers beside two of ours.
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),  # torch of torchdata
]

# --- The loaders of the drop-in proof --------------------------------------------------------------------------------


class Rows(Dataset):
    """Row i holds nothing but i."""

    def __init__(self, n: int = 22) -> None:
        self.n = n

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"x": torch.full((3,), float(i)), "y": i, "name": f"row {i}", "pair": (torch.tensor(i), [i / 2])}

    def __len__(self) -> int:
        return self.n


class Stream(IterableDataset):
    """The same rows, shared out among the workers."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        return (Rows()[i] for i in range(first, 22, step))


@dataclass
class Batch:
    """What a custom collate_fn makes."""

    x: torch.Tensor
    names: list[str]

    def pin_memory(self) -> Batch:
        return Batch(self.x.pin_memory(), self.names)


def as_batch(rows: list[dict[str, Any]]) -> Batch:
    return Batch(torch.stack([row["x"] for row in rows]), [row["name"] for row in rows])


class NodeLoader:
    """Like the loader of torchdata.nodes: one iterator object for all epochs, rewound by `iter`, and a state."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.position = 0
        return self

    def __next__(self) -> dict[str, Any]:
        if self.position == 22:
            raise StopIteration
        self.position += 1
        return Rows()[self.position - 1]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def distributed(**options: Any) -> DataLoader:
    sampler = DistributedSampler(Rows(), num_replicas=2, rank=1, seed=3)
    return DataLoader(Rows(), batch_size=4, sampler=sampler, **options)


def own_generator(**options: Any) -> DataLoader:
    """Batches of one: a break comes long before what is loaded ahead reaches the end, where the sampler draws again."""
    return DataLoader(Rows(), shuffle=True, generator=torch.Generator().manual_seed(5), **options)


def stateful(**options: Any) -> Any:
    """It too keeps a generator from epoch to epoch."""
    if StatefulDataLoader is None:
        pytest.skip("this torchdata has no StatefulDataLoader; NodeLoader stands in for it")
    return StatefulDataLoader(Rows(), shuffle=True, **options)


LOADERS: dict[str, Callable[..., Any]] = {
    "shuffled": functools.partial(DataLoader, Rows(), batch_size=4, shuffle=True),
    "custom collate_fn": functools.partial(DataLoader, Rows(), batch_size=4, drop_last=True, collate_fn=as_batch),
    "batch_size=None": functools.partial(DataLoader, Rows(7), batch_size=None),
    "IterableDataset": functools.partial(DataLoader, Stream(), batch_size=4),
    "DistributedSampler": distributed,
    "own generator": own_generator,
    "StatefulDataLoader": stateful,
}
WORKERS: dict[str, dict[str, Any]] = {
    "no worker": {},
    "2 workers": {"num_workers": 2},
    "2 persistent workers": {"num_workers": 2, "persistent_workers": True},
}
WHOLE, BREAKS = (None, None, None), (2, None, 3)  # how many batches are taken, in each of three epochs


def seen(batch: Any) -> Any:
    """All that there is to know of a batch but the device that it is on."""
    if isinstance(batch, torch.Tensor):
        return batch.dtype, batch.shape, batch.cpu().tolist()
    if isinstance(batch, dict):
        return {name: seen(one) for name, one in batch.items()}
    if isinstance(batch, (list, tuple)):
        return type(batch), [seen(one) for one in batch]
    return (type(batch), seen(vars(batch))) if isinstance(batch, Batch) else batch


def three_epochs(loader: Any, taken: tuple[int | None, ...]) -> list[list[Any]]:
    """Run seeded epochs as people do: tell the sampler which it is, and draw random numbers in the steps."""
    torch.manual_seed(7)
    epochs = []
    for epoch, n in enumerate(taken):
        if hasattr(getattr(loader, "sampler", None), "set_epoch"):
            loader.sampler.set_epoch(epoch)
        epochs.append([(seen(batch), torch.rand(()).item()) for batch in itertools.islice(loader, n)])
    return epochs


@functools.lru_cache
def bare(kind: str, workers: str, taken: tuple[int | None, ...]) -> list[list[Any]]:
    """What the loader gives without us."""
    return three_epochs(LOADERS[kind](**WORKERS[workers]), taken)


each_loader = pytest.mark.parametrize("kind", LOADERS)
each_number_of_workers = pytest.mark.parametrize("workers", WORKERS)
each_way = pytest.mark.parametrize("taken", [WHOLE, BREAKS], ids=["whole epochs", "early breaks"])


@each_loader
@each_number_of_workers
@each_way
def test_it_gives_the_batches_of_the_bare_loader_in_three_seeded_epochs(kind: str, workers: str, taken: Any) -> None:
    loader = prefetch(LOADERS[kind](**WORKERS[workers]), "cpu")
    assert three_epochs(loader, taken) == bare(kind, workers, taken)


@each_loader
@each_number_of_workers
@pytest.mark.parametrize("pin_memory", [False, True], ids=["pageable", "pinned"])
def test_it_gives_them_on_a_device(kind: str, workers: str, pin_memory: bool, device: torch.device) -> None:
    """Epochs with breaks, since they are the harder ones."""
    loader = prefetch(LOADERS[kind](pin_memory=pin_memory, **WORKERS[workers]), device)
    assert three_epochs(loader, BREAKS) == bare(kind, workers, BREAKS)


def test_the_oracle_has_what_it_should_have() -> None:
    """The proof above compares something: shuffled epochs that differ, a half of the rows a rank, breaks."""
    rows = [[row for batch, _ in epoch for row in batch["y"][2]] for epoch in bare("shuffled", "no worker", WHOLE)]
    assert [sorted(epoch) for epoch in rows] == [list(range(22))] * 3
    assert (rows[0] != rows[1], rows[1] != rows[2]) == (True, True)
    ranks = [
        [row for batch, _ in epoch for row in batch["y"][2]] for epoch in bare("DistributedSampler", "no worker", WHOLE)
    ]
    assert ([len(epoch) for epoch in ranks], ranks[0] != ranks[1]) == ([11] * 3, True)
    assert [len(epoch) for epoch in bare("IterableDataset", "2 workers", BREAKS)] == [2, 6, 3]


@each_way
@pytest.mark.parametrize("where", ["cpu", "device"])
def test_a_loader_with_one_iterator_for_all_epochs(taken: Any, where: str, request: pytest.FixtureRequest) -> None:
    device = request.getfixturevalue("device") if where == "device" else "cpu"
    assert three_epochs(prefetch(NodeLoader(), device), taken) == three_epochs(NodeLoader(), taken)


def test_batches_are_where_they_were_asked_for(device: torch.device) -> None:
    loader = DataLoader(Rows(), batch_size=4)
    assert {batch["x"].device for batch in prefetch(loader, device)} == {device}
    assert {batch["x"].device for batch in prefetch(loader)} == {device}  # None: the current CUDA device
    assert {batch["x"].device.type for batch in prefetch(loader, "cpu")} == {"cpu"}


def test_without_cuda_batches_stay_on_the_cpu_after_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sidestream.mover._Warned, "no_cuda", False)
    loader = prefetch([torch.ones(1)])
    with pytest.warns(RuntimeWarning, match="no CUDA device"):
        assert [batch.device.type for batch in loader] == ["cpu"]
    assert [batch.device.type for batch in loader] == ["cpu"]


def test_pinned_batches_arrive_pinned_on_the_cpu(device: torch.device) -> None:
    loader = prefetch(DataLoader(Rows(), batch_size=4, pin_memory=True), "cpu")
    assert {batch["x"].is_pinned() for batch in loader} == {True}


def outcome(loader: Any) -> tuple[list[Any], str]:
    """The batches of an epoch that fails, and the first line of the error."""
    batches = []
    try:
        for batch in loader:
            batches.append(batch.tolist())  # noqa: PERF401 - what came before the error counts
    except LookupError as error:
        error.__traceback__ = None  # torch's frame in it holds the error: its workers would end with the garbage only
        return batches, str(error).splitlines()[0]
    return batches, "no error"


@each_number_of_workers
def test_an_error_in_the_data_set_is_that_of_the_bare_loader(workers: str) -> None:
    def make() -> DataLoader:
        return DataLoader(Broken(), batch_size=2, **WORKERS[workers])

    loader = prefetch(make(), "cpu")
    ours = [outcome(loader), outcome(loader)]  # it can be iterated again
    assert ours == [outcome(make())] * 2
    assert [batches for batches, _ in ours] == [[[0, 1], [2, 3]]] * 2


class Broken(Dataset):
    def __getitem__(self, i: int) -> int:
        if i == 5:
            raise LookupError("row 5")
        return i

    def __len__(self) -> int:
        return 8


# --- What can be wrapped ---------------------------------------------------------------------------------------------


class ByIndex:
    """The old way to be iterable."""

    def __getitem__(self, i: int) -> int:
        return range(3)[i]


def counting() -> Iterator[int]:
    yield from range(3)


class Method:
    def batches(self) -> Iterator[int]:
        yield from range(3)


@pytest.mark.parametrize(
    "iterable",
    [
        [0, 1, 2],
        range(3),
        {0: "a", 1: "b", 2: "c"},
        ByIndex(),
        Items(range(3)),
        IterableWrapper(range(3)),
        prefetch(range(3), "cpu"),
        counting,
        Method().batches,
        functools.partial(counting),
    ],
    ids=lambda one: type(one).__name__,
)
def test_iterables_and_generator_functions_give_as_many_epochs_as_are_asked_for(iterable: Any) -> None:
    loader = prefetch(iterable, "cpu")
    assert [list(loader) for _ in range(3)] == [[0, 1, 2]] * 3


@pytest.mark.parametrize("make", [counting, lambda: iter([0, 1, 2]), lambda: map(int, "012")])
def test_an_iterator_gives_one_pass(make: Callable[[], Iterator[int]]) -> None:
    loader = prefetch(make(), "cpu")
    assert [list(loader), list(loader)] == [[0, 1, 2], []]


def test_a_generator_function_is_called_once_an_epoch_at_its_first_next() -> None:
    calls = []

    def batches() -> Iterator[int]:
        calls.append(threading.current_thread() is threading.main_thread())
        yield 0

    loader = prefetch(batches, "cpu")
    iterator = iter(loader)
    assert (calls, workers()) == ([], [])
    assert [next(iterator), list(loader)] == [0, [0]]
    assert calls == [False, False]


@pytest.mark.parametrize("wrong", [3, None, object(), lambda: [1], list])
def test_nothing_else_can_be_wrapped(wrong: Any) -> None:
    with pytest.raises(TypeError, match="an iterable or a generator function"):
        prefetch(wrong, "cpu")


class Uncopied:
    """A loader that nobody may copy."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise AssertionError("it was copied")

    __copy__ = __deepcopy__ = __getstate__ = __reduce_ex__


def test_the_loader_is_used_and_never_copied() -> None:
    source = Uncopied()
    loader = prefetch(source, "cpu")
    assert [list(loader), list(loader), next(loader)] == [[0, 1, 2], [0, 1, 2], 0]
    assert loader.source is source
    loader.close()


def test_on_the_cpu_the_items_are_not_copied_either() -> None:
    items = [object(), None, torch.ones(1)]
    loader = prefetch(items, "cpu")
    assert [one is item for one, item in zip(loader, items, strict=True)] == [True, True, True]


# --- Arguments -------------------------------------------------------------------------------------------------------


def test_the_signature() -> None:
    parameters = inspect.signature(prefetch).parameters.values()
    assert {one.name: (one.default, one.kind is one.KEYWORD_ONLY) for one in parameters} == {
        "iterable": (inspect.Parameter.empty, False),
        "device": (None, False),
        "buffer_size": (2, False),
        "keep_on_cpu": ((), True),
        "pack_below": (1 << 16, True),
        "max_bytes": (None, True),
        "close_timeout": (2.0, True),
    }


def test_arguments_reach_the_stages() -> None:
    options = {"keep_on_cpu": ["y"], "pack_below": 5, "max_bytes": 6, "close_timeout": 0.5}
    moved = prefetch([], "cpu", 3, **options)._moved
    loaded = moved.source_datapipe
    assert (moved.device, moved.buffer_size, loaded.buffer_size) == (torch.device("cpu"), 3, 3)
    assert (moved.keep_on_cpu, moved.pack_below, loaded.max_bytes) == ({"y"}, 5, 6)
    assert (moved.close_timeout, loaded.close_timeout) == (0.5, 0.5)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"device": "meta"}, ValueError),
        ({"device": 0}, TypeError),
        ({"buffer_size": 0}, ValueError),
        ({"buffer_size": True}, TypeError),
        ({"max_bytes": 0}, ValueError),
        ({"pack_below": -1}, ValueError),
        ({"keep_on_cpu": [3]}, TypeError),
        ({"close_timeout": float("nan")}, ValueError),
    ],
)
def test_a_wrong_argument_is_an_error_at_once(options: Any, error: Any) -> None:
    with pytest.raises(error):
        prefetch([], **options)


def test_names_are_kept_on_the_cpu(device: torch.device) -> None:
    (batch,) = prefetch([{"x": torch.ones(1), "lengths": torch.ones(1)}], device, keep_on_cpu=["lengths"])
    assert (batch["x"].device, batch["lengths"].device.type) == (device, "cpu")


@pytest.mark.parametrize("buffer_size", [1, 3])
def test_the_source_is_asked_for_no_more_than_two_buffers_and_what_is_in_hand(buffer_size: int) -> None:
    source = Items(range(100))
    loader = prefetch(source, "cpu", buffer_size)
    assert next(loader) == 0
    ahead = 2 * (buffer_size + 1)
    assert eventually(lambda: source.pulls == 1 + ahead)
    assert [stands_still(thread) for thread in workers()] == [True, True]
    assert source.pulls == 1 + ahead
    loader.close()


# --- Length and attributes -------------------------------------------------------------------------------------------


def test_the_length_is_that_of_the_source_as_it_is_now() -> None:
    source = [1, 2]
    loader = prefetch(source, "cpu")
    assert len(loader) == 2
    source.append(3)
    assert (len(loader), len(prefetch(DataLoader(Rows(), batch_size=4), "cpu"))) == (3, 6)


@pytest.mark.parametrize("source", [counting, counting(), DataLoader(Stream())])
def test_without_a_length_it_is_a_type_error_and_list_works(source: Any) -> None:
    loader = prefetch(source, "cpu")
    with pytest.raises(TypeError):
        len(loader)
    assert len(list(loader)) in (3, 22)


def test_attributes_are_those_of_the_source() -> None:
    source = DataLoader(Rows(), batch_size=4, shuffle=True, drop_last=True)
    loader = prefetch(source, "cpu")
    for name in ("dataset", "sampler", "batch_sampler", "batch_size", "drop_last", "collate_fn", "num_workers"):
        assert getattr(loader, name) is getattr(source, name)


def test_methods_are_those_of_the_source() -> None:
    class Loader(Items):
        def set_epoch(self, epoch: int) -> None:
            self.items = [epoch] * 3

    loader = prefetch(Loader([]), "cpu")
    loader.set_epoch(4)
    assert list(loader) == [4, 4, 4]


def test_an_attribute_that_neither_has_is_an_error_that_names_it() -> None:
    loader = prefetch([1], "cpu")
    with pytest.raises(AttributeError, match="nowhere"):
        _ = loader.nowhere


def test_private_attributes_are_not_passed_on() -> None:
    """Lightning ends the workers of whatever has an `_iterator`: it would end them under our threads."""
    source = DataLoader(Rows(), batch_size=4, num_workers=1, persistent_workers=True)
    loader = prefetch(source, "cpu")
    next(loader)
    assert source._iterator is not None
    assert [hasattr(loader, name) for name in ("_iterator", "_get_iterator", "__array__")] == [False] * 3
    loader.close()


def test_the_state_of_a_loader_that_has_run_ahead_is_not_passed_on() -> None:
    """Case 36: resumed from there, the batches that wait would be lost. The source's own can still be asked for."""
    source = NodeLoader()
    loader = prefetch(source, "cpu")
    next(loader)
    assert eventually(lambda: loader.source.state_dict() == {"position": 7})
    assert (hasattr(loader, "state_dict"), hasattr(loader, "load_state_dict")) == (False, True)
    loader.close()


# --- next(loader) ----------------------------------------------------------------------------------------------------


def test_next_begins_an_epoch_and_stays_at_its_end_until_iter() -> None:
    source = Items([0, 1])
    loader = prefetch(source, "cpu")
    assert [next(loader), next(loader), next(loader, "end"), next(loader, "end")] == [0, 1, "end", "end"]
    assert (list(loader), next(loader), source.epochs) == ([0, 1], 0, 3)
    loader.close()


def test_next_in_a_loop_takes_from_the_loop() -> None:
    loader = prefetch(range(6), "cpu")
    assert [(number, next(loader)) for number in loader] == [(0, 1), (2, 3), (4, 5)]


def test_iter_whose_result_is_dropped_and_then_next() -> None:
    loader = prefetch(range(3), "cpu")
    assert next(loader) == 0
    iter(loader)
    assert [next(loader), next(loader), next(loader), next(loader, None)] == [0, 1, 2, None]


def test_next_raises_what_the_source_raises_and_then_it_is_at_its_end() -> None:
    error = LookupError("item")
    loader = prefetch(Items([0], error=error), "cpu")
    assert next(loader) == 0
    with pytest.raises(LookupError) as caught:
        next(loader)
    assert (caught.value is error, next(loader, "end")) == (True, "end")


# --- Begin and end ---------------------------------------------------------------------------------------------------


def gone() -> bool:
    return eventually(lambda: workers() == [])


def test_leaving_the_context_ends_the_threads() -> None:
    with prefetch(range(100), "cpu") as loader:
        iterator = iter(loader)
        assert (next(iterator), len(workers())) == (0, 2)
    assert (workers(), next(iterator, "end")) == ([], "end")


def test_an_error_leaves_the_context_and_ends_the_threads() -> None:
    def train(loader: PrefetchLoader) -> None:
        with loader:
            for number in loader:
                raise LookupError(number)

    with pytest.raises(LookupError):
        train(prefetch(range(100), "cpu"))
    assert workers() == []


@pytest.mark.parametrize("begin", [iter, next], ids=["iter", "next"])
def test_close_ends_an_epoch_and_the_next_one_begins_anew(begin: Any) -> None:
    loader = prefetch(range(4), "cpu")
    loader.close()
    begun = begin(loader)
    loader.close()
    loader.close()
    assert (begun is not None, workers(), list(loader)) == (True, [], [0, 1, 2, 3])


def test_a_dropped_loader_ends_its_threads() -> None:
    loader = prefetch(range(100), "cpu")
    assert next(loader) == 0
    del loader
    assert gone()


def test_a_new_iterator_ends_the_one_before() -> None:
    loader = prefetch(range(100), "cpu")
    first = iter(loader)
    assert next(first) == 0
    second = iter(loader)
    assert (next(second), len(workers())) == (0, 2)
    with pytest.raises(RuntimeError, match="invalidated"):
        next(first)
    loader.close()


class OneIterator:
    """Like persistent workers: one iterator for all epochs. Item 2 of the first comes when the gate is opened."""

    def __init__(self) -> None:
        self.gate = Gate()
        self.position = 0
        self.epochs = 0
        self.second = threading.Event()

    def __iter__(self) -> Iterator[int]:
        self.epochs += 1
        self.position = 0
        if self.epochs == 2:
            self.second.set()
        return self

    def __next__(self) -> int:
        if (self.epochs, self.position) == (1, 2):
            self.gate.wait()
            self.second.wait(0.2)  # were it to begin now, this call would take an item from it
        if self.position == 6:
            raise StopIteration
        self.position += 1
        return self.position - 1


def test_an_epoch_does_not_begin_before_the_last_one_has_left_the_source() -> None:
    """Beyond `close_timeout` too: the two would share the items of a loader that has one iterator for all epochs."""
    source = OneIterator()
    loader = prefetch(source, "cpu", close_timeout=0)
    assert next(loader) == 0
    source.gate.reached.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda *_: source.gate.opened.set()  # once it waits no longer for the thread to stop
        assert list(loader) == [0, 1, 2, 3, 4, 5]
    assert source.gate.opened.is_set()


@pytest.mark.parametrize("options", WORKERS.values(), ids=WORKERS)
def test_a_program_may_end_in_the_middle_of_an_epoch(options: dict[str, Any]) -> None:
    scenario(f"""
        from torch.utils.data import DataLoader
        from sidestream import prefetch
        loader = prefetch(DataLoader(range(100), batch_size=2, **{options}), "cpu")
        other = prefetch(range(100), "cpu")
        iterator = iter(loader)
        assert (next(iterator).tolist(), next(other)) == ([0, 1], 0)
    """)


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_begins_anew_and_does_not_disturb(way: Callable[[PrefetchLoader], PrefetchLoader]) -> None:
    """Case 99. A shallow copy shares the stages, so that it begins only when the other has ended."""
    loader = prefetch(Items(range(4)), "cpu")
    assert list(way(loader)) == [0, 1, 2, 3]
    assert [next(loader), next(loader)] == [0, 1]
    other = way(loader)
    assert (next(loader), next(loader), next(loader, "end")) == (2, 3, "end")
    assert (list(other), list(way(loader))) == ([0, 1, 2, 3], [0, 1, 2, 3])


# --- Other people's loops --------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def no_monitor(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread of tqdm's own, which would stay."""
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)


@pytest.fixture
def loader() -> PrefetchLoader:
    return prefetch(DataLoader(range(10), batch_size=3), "cpu")


def numbers(batches: Any) -> list[Any]:
    return [batch.tolist() for batch in batches]


TEN = [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]


def test_in_a_plain_loop(loader: PrefetchLoader) -> None:
    assert [numbers(loader) for _ in range(2)] == [TEN, TEN]


def test_in_tqdm(loader: PrefetchLoader, capsys: pytest.CaptureFixture[str]) -> None:
    with tqdm.tqdm(loader, ascii=True) as bar:
        assert (numbers(bar), bar.total) == (TEN, 4)
    assert "4/4" in capsys.readouterr().err


def test_in_tqdm_without_a_length(capsys: pytest.CaptureFixture[str]) -> None:
    with tqdm.tqdm(prefetch(counting, "cpu"), ascii=True) as bar:
        assert (list(bar), bar.total) == ([0, 1, 2], None)
    assert "3it" in capsys.readouterr().err


def test_in_enumerate(loader: PrefetchLoader) -> None:
    assert [(i, batch.tolist()) for i, batch in enumerate(loader)] == list(enumerate(TEN))


def test_in_zip(loader: PrefetchLoader) -> None:
    other = prefetch("abcd", "cpu")
    assert [(batch.tolist(), one) for batch, one in zip(loader, other, strict=True)] == list(
        zip(TEN, "abcd", strict=True)
    )
    assert [one for one, _ in zip("ab", loader, strict=False)] == ["a", "b"]  # leaves it in the middle
    assert gone()


def test_in_islice(loader: PrefetchLoader) -> None:
    assert [numbers(itertools.islice(loader, n)) for n in (2, 4, 9)] == [TEN[:2], TEN, TEN]
    assert gone()
