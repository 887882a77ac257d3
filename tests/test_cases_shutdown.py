"""Reported hangs at shutdown, break, Ctrl-C and interpreter exit: each ends, in time, with no thread and no noise.

Whatever might hang runs in a process of its own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from contract import HANG, PRELUDE, scenario
from helpers import eventually, run_child

EXITS = 3  # interpreter exits with a worker inside a torch operation
RESTARTS = 60

# case 2: held by test_contract.py::test_a_stuck_worker_is_left_with_one_warning_that_shows_where_it_stands
#         and test_contract.py::test_finalizers_never_wait
# case 13: held by test_contract.py::test_an_error_comes_after_the_items_before_it_as_it_was


def test_close_returns_whether_the_queue_is_full_or_empty() -> None:
    """case 1"""
    scenario("""
    def counted():
        for i in range(10**9):
            pulls.append(i)
            yield i
    pulls = []
    it = iter(Fn(counted).thread_prefetch(4))
    next(it)
    assert eventually(lambda: len(pulls) >= 5)
    with within(1.0):
        it.close()
    assert workers() == []
    with within(0.1):
        it.close()

    gate = Gate()
    it = iter(Numbers(10**9, lambda i: gate.wait() if i == 3 else None).thread_prefetch(4))
    assert [next(it) for _ in range(3)] == [0, 1, 2]
    assert gate.reached.wait(5)
    timer = threading.Timer(0.05, gate.opened.set)
    timer.start()
    with within(1.0):
        it.close()
    timer.join()
    assert workers() == []
    """)


@pytest.mark.parametrize("stage", ["thread_prefetch(4)", "to_cuda_stream('cpu').thread_prefetch(4)"])
@pytest.mark.parametrize("service", ["None", "InProcessReadingService()"])
def test_the_process_ends_without_any_shutdown_call(stage: str, service: str) -> None:
    """case 4"""
    ended = float(
        scenario(f"""
        dl = DataLoader2(IterableWrapper(range(100)).{stage}, reading_service={service})
        it = iter(dl)
        assert next(it) == 0
        print(time.time())
        """)
    )
    assert time.time() - ended < 3.0


def test_after_a_break_the_source_is_left_alone() -> None:
    """case 5; that the count no longer grows follows from there being no thread left."""
    scenario("""
    seen = []
    def src():
        for i in range(1000):
            seen.append(i)
            yield i
    for x in Fn(src).thread_prefetch(4):
        if x == 10:
            break
    with within(1.0):
        assert settled()
    assert 11 <= len(seen) <= 11 + 4 + 1
    """)


CTRL_C = """
def slow():
    for i in range(10**6):
        threading.Event().wait(0.05)
        if i == 3:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        yield i
for _ in Fn(slow).{stage}:
    pass
"""


@pytest.mark.parametrize(
    "stage", ["thread_prefetch(2)", "to_cuda_stream('cpu')", "thread_prefetch(2).to_cuda_stream('cpu')"]
)
def test_ctrl_c_ends_with_its_own_traceback_alone(stage: str) -> None:
    """case 6"""
    start = time.monotonic()
    done = run_child(PRELUDE + CTRL_C.format(stage=stage), timeout=HANG)
    assert time.monotonic() - start < 20.0
    assert done.returncode in (-signal.SIGINT, 130)
    assert done.stderr.count("Traceback (most recent call last)") == 1
    assert done.stderr.splitlines()[-1] == "KeyboardInterrupt"


@pytest.mark.parametrize(
    "stage", ["thread_prefetch(2)", "to_cuda_stream('cpu')", "thread_prefetch(2).to_cuda_stream('cpu')"]
)
def test_exit_with_a_worker_inside_a_torch_operation(stage: str) -> None:
    """case 7; each forked process leaves through an interpreter's whole finalization."""
    scenario(f"""
    warnings.filterwarnings("ignore", "This process", DeprecationWarning)
    def multiply():
        a = torch.randn(700, 700)
        while True:
            yield a @ a
    def copy_8_mb():
        a = torch.randn(700, 700)
        while True:
            yield a.repeat(4, 4)
    for src in [multiply, copy_8_mb] * {EXITS}:
        pid = os.fork()
        if pid == 0:
            it = iter(Fn(src).{stage})
            next(it)
            sys.exit(0)
        assert os.waitpid(pid, 0)[1] == 0
    """)


@pytest.mark.parametrize("stage", ["thread_prefetch(2)", "thread_prefetch(2).to_cuda_stream('cpu')"])
def test_exit_with_a_worker_that_is_stuck(stage: str) -> None:
    """case 7, the source never comes back: the exit waits for `close_timeout`, not for it."""
    done = run_child(
        PRELUDE
        + textwrap.dedent(f"""
        warnings.simplefilter("always")
        def stuck():
            yield 0
            threading.Event().wait()
        it = iter(Fn(stuck).{stage})
        next(it)
        print(time.time())
        """),
        timeout=HANG,
    )
    assert time.time() - float(done.stdout) < 2.0 + 2.0
    assert done.returncode == 0
    assert done.stderr.count("RuntimeWarning") == 1
    assert "in stuck" in done.stderr
    assert "Fatal" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_next_after_the_end_and_after_an_error_never_blocks() -> None:
    """case 8"""
    scenario("""
    def ends(it):
        with within(1.0):
            for _ in range(3):
                assert next(it, "end") == "end"
    it = iter(IterableWrapper(range(2)).thread_prefetch(2))
    assert list(it) == [0, 1]
    ends(it)
    it = iter(Items([0], error=OSError(5, "disk")).thread_prefetch(2))
    assert next(it) == 0
    try:
        next(it)
    except OSError as error:
        assert error.errno == 5
    ends(it)
    assert settled()
    """)


def gone(pid: int) -> bool:
    """Whether the process has ended, reaped or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def spawn(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent,
    )


def test_sigterm_while_the_queue_is_full_leaves_no_process() -> None:
    """case 9"""
    child = spawn("""
    it = iter(IterableWrapper(range(10**6), deepcopy=False).thread_prefetch(2))
    next(it)
    print(os.getpid(), flush=True)
    signal.pause()
    """)
    assert child.stdout is not None
    assert int(child.stdout.readline()) == child.pid
    child.terminate()
    assert child.wait(5) == -signal.SIGTERM
    child.stdout.close()


def test_a_loader_whose_worker_is_killed_with_a_full_queue_leaves_no_process() -> None:
    """case 9, inside a worker process: SIGTERM ends it although its queue is full and nobody takes from it."""
    child = spawn("""
    dp = IterableWrapper(range(10**5)).sharding_filter().thread_prefetch(2)
    dl = DataLoader2(dp, reading_service=MultiProcessingReadingService(2, worker_prefetch_cnt=0, main_prefetch_cnt=0))
    it = iter(dl)
    next(it)
    print(*[p.pid for p in multiprocessing.active_children()], flush=True)
    signal.pause()
    """)
    assert child.stdout is not None
    pids = [int(pid) for pid in child.stdout.readline().split()]
    assert len(pids) == 2
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    assert eventually(lambda: all(gone(pid) for pid in pids))
    child.terminate()
    assert child.wait(5) == -signal.SIGTERM
    child.stdout.close()


@pytest.mark.parametrize(
    "chain",
    [
        "sharding_filter().thread_prefetch(2)",
        "thread_prefetch(2).sharding_filter()",
        "sharding_filter().to_cuda_stream('cpu').thread_prefetch(2)",
    ],
    ids=["last in the workers", "inside the workers", "last in the main process"],
)
def test_a_break_with_worker_processes_prints_nothing(chain: str) -> None:
    """case 10; without torchdata's own prefetcher in the main process, and at a quiet moment.

    `DataLoader2` asks its worker processes to end while a thread may still be reading from them, and then waits for
    ever for an answer that the thread took. The bare pipe hangs so too, with `main_prefetch_cnt` at its default.
    """
    scenario(f"""
    warnings.filterwarnings("ignore", "This process", DeprecationWarning)
    raised = []
    sys.unraisablehook = raised.append
    dl = DataLoader2(
        IterableWrapper(range(1000)).{chain},
        reading_service=MultiProcessingReadingService(2, main_prefetch_cnt=0),
    )
    for _ in dl:
        for thread in workers():
            if "sidestream" in thread.name:
                assert eventually(lambda: stands_still(thread))
        break
    del dl
    gc.collect()
    assert eventually(lambda: multiprocessing.active_children() == [])
    assert settled(), workers()
    assert raised == []
    """)


def test_a_new_iterator_stops_the_old_thread_first() -> None:
    """case 11"""
    scenario(f"""
    dp = IterableWrapper(range(50)).thread_prefetch(2)
    for _ in range({RESTARTS}):
        a = iter(dp)
        assert next(a) == 0
        b = iter(dp)
        assert next(b) == 0
        assert len(workers()) == 1
        try:
            next(a)
        except RuntimeError as error:
            assert "invalidated" in str(error)
        else:
            raise AssertionError
        assert next(b) == 1
    assert list(b) == list(range(2, 50))
    assert settled()
    """)


@pytest.mark.parametrize("stage", ["thread_prefetch(1)", "to_cuda_stream('cpu', buffer_size=1)"])
def test_the_smallest_buffer_can_be_left_at_any_point(stage: str) -> None:
    """case 12: before any item, after the first, after the last, and after the end."""
    scenario(f"""
    dp = IterableWrapper(range(5)).{stage}
    for taken in (0, 1, 5, 6):
        for leave in ("close", "drop"):
            it = iter(dp)
            seen = [next(it, None) for _ in range(taken)]
            assert seen == [0, 1, 2, 3, 4, None][:taken]
            if taken == 0:
                assert workers() == []
            with within(1.0):
                if leave == "close":
                    it.close()
                del it
                assert settled()
    """)
