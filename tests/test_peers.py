"""What the README says of torchdata's own stages, shown on them; each beside the same thing with ours."""

from __future__ import annotations

import threading
from collections import deque
from pathlib import Path

import pytest
import torch

from contract import IterableWrapper
from helpers import eventually, run_child

STAGES = {"torchdata": lambda dp: dp.prefetch(2), "sidestream": lambda dp: dp.thread_prefetch(2)}


def outcome(name: str, source: str) -> str:
    """What a consumer sees of `source` within three seconds: its items, the error, or nothing."""
    done = run_child(f"""
        import os, sys, threading, warnings
        warnings.simplefilter("ignore")
        import torchdata.datapipes.iter, sidestream
        from helpers import Fn
        threading.excepthook = lambda _: None  # torchdata's thread dies with a traceback
        def source():
            {source}
        def consume():
            try:
                print(list(stage(Fn(source))))
            except BaseException as error:
                print(repr(error))
        kinds = {{"torchdata": lambda dp: dp.prefetch(2), "sidestream": lambda dp: dp.thread_prefetch(2)}}
        stage = kinds[{name!r}]
        consumer = threading.Thread(target=consume, daemon=True)
        consumer.start()
        consumer.join(3)
        if consumer.is_alive():
            print("nothing")
        sys.stdout.flush()
        os._exit(0)
    """)
    return done.stdout.strip()


@pytest.mark.parametrize(("name", "seen"), [("torchdata", "nothing"), ("sidestream", "SystemExit(3)")])
def test_a_source_that_raises_system_exit(name: str, seen: str) -> None:
    """case 13"""
    assert outcome(name, "yield 1; sys.exit(3)") == seen


@pytest.mark.parametrize(
    ("name", "seen"),
    [
        ("torchdata", r"ValueError('data\nThis exception is thrown by __iter__ of PrefetcherIterDataPipe"),
        ("sidestream", "[1, ValueError('data'), 2]"),
    ],
)
def test_items_that_are_exceptions(name: str, seen: str) -> None:
    """case 24"""
    assert outcome(name, "yield 1; yield ValueError('data'); yield 2").startswith(seen)


@pytest.mark.parametrize(("name", "polls"), [("torchdata", True), ("sidestream", False)])
def test_an_idle_stage(name: str, polls: bool) -> None:
    it = iter(STAGES[name](IterableWrapper(range(100))))
    next(it)
    others = [t for t in threading.enumerate() if t is not threading.main_thread()]
    (thread,) = others
    path = Path(f"/proc/self/task/{thread.native_id}/status")

    def wake_ups() -> int:
        with path.open() as file:
            return next(int(line.split()[1]) for line in file if line.startswith("voluntary_ctxt_switches"))

    def grows() -> bool:
        before = wake_ups()
        return eventually(lambda: wake_ups() > before + 20, 1.0)

    grows()  # the buffer fills
    assert grows() is polls
    it.close()


@pytest.mark.filterwarnings("ignore:The argument 'device':DeprecationWarning")  # torchdata passes it
@pytest.mark.parametrize(("name", "kept"), [("torchdata", False), ("sidestream", True)])
def test_a_container_keeps_what_it_is(name: str, kept: bool, device: torch.device) -> None:
    """case 74"""
    dp = IterableWrapper([deque([torch.ones(1)], maxlen=3)])
    dp = dp.pin_memory() if name == "torchdata" else dp.to_cuda_stream(device)
    (out,) = dp
    assert (type(out) is deque and out.maxlen == 3) is kept


@pytest.mark.filterwarnings("ignore:The argument 'device':DeprecationWarning")
def test_torchdata_pins_but_does_not_copy(device: torch.device) -> None:
    (pinned,) = IterableWrapper([torch.ones(1)]).pin_memory()
    (moved,) = IterableWrapper([torch.ones(1)]).to_cuda_stream(device)
    assert (pinned.device.type, moved.device) == ("cpu", device)
