"""Each benchmark starts, runs every contender, prints its table and writes its JSON. Nothing here is timed.

What a benchmark counts, it counts right: wrong batches, copies, memory, what is left running.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
SCRIPTS = ["overlap", "handoff", "small_tensors", "start_stop", "memory", "images", "gpu_check"]
WITHOUT_DEVICE = {"handoff", "start_stop", "images"}


@functools.cache
def run(script: str) -> tuple[dict[str, Any], str]:
    """The report of a smoke run, and what it printed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [
            sys.executable,
            str(BENCHMARKS / f"{script}.py"),
            "--quick",
            "--simulated",
            "--json",
            str(report),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=folder, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        return json.loads(report.read_text()), done.stdout


def result(script: str, contender: str) -> dict[str, Any]:
    """What came out for one contender; skips where that is not installed."""
    one = run(script)[0]["results"][contender]
    if "cannot" in one:
        pytest.skip(one["cannot"])
    return one["median"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_smoke_run_prints_a_row_and_writes_a_result_for_each_contender(script, request):
    if script not in WITHOUT_DEVICE:
        request.getfixturevalue("sim")
    report, printed = run(script)
    assert report["question"] == (BENCHMARKS / f"{script}.py").read_text().split("\n")[0].strip('"')
    assert printed.startswith(report["question"])
    assert "sidestream" in " ".join(report["results"])
    assert [name for name in report["results"] if name not in printed] == []
    reasons = {name: one["cannot"] for name, one in report["results"].items() if "cannot" in one}
    assert {name: why for name, why in reasons.items() if not why.startswith("not installed")} == {}
    assert {"device", "torch threads", "versions"} == report["about"].keys()


def test_a_simulated_device_is_called_one(sim):
    report, printed = run("overlap")
    assert report["about"]["device"] == "simulated, not a GPU"
    assert "simulated, not a GPU" in printed


def test_the_loader_without_an_event_has_wrong_batches_and_the_stages_have_none(sim):
    assert result("overlap", "side stream without event")["wrong"] == 10
    assert result("overlap", "sidestream")["wrong"] == 0
    assert result("overlap", "plain")["wrong"] == 0


def test_copies_are_counted_a_sample(sim):
    assert result("small_tensors", "one by one")["50 x 1 KB"]["copies"] == 50
    assert result("small_tensors", "sidestream, mover alone")["50 x 1 KB"]["copies"] == 1


def test_memory_is_counted_in_batches(sim):
    assert result("memory", "plain")["device"] == 1
    assert 1 <= result("memory", "sidestream")["device"] <= 5


def test_what_an_early_break_leaves_is_counted():
    assert result("start_stop", "sidestream")["left"] == 0
    assert result("start_stop", "queue.Queue")["left"] == 3


def printed_by(code: str) -> str:
    """What `code` prints in a process of its own, with the benchmarks to import from."""
    code = "import sys; sys.path.append(sys.argv[1])\n" + textwrap.dedent(code)
    command = [sys.executable, "-c", code, str(BENCHMARKS)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def test_a_peer_that_is_missing_says_so():
    printed = printed_by("""
        sys.modules["prefetch_generator"] = None
        import child, handoff
        print(child.attempt(handoff, "prefetch_generator", {"quick": True}))
    """)
    assert printed == "{'cannot': 'not installed: prefetch_generator'}\n"


@pytest.mark.parametrize(
    ("out", "right"),
    [
        ('\n{"about": {}, "results": {"x": {"rounds": [1]}}}\n', {"rounds": [1]}),
        ("", {"cannot": "failed: terminate called"}),
    ],
)
def test_a_contender_that_dies_keeps_the_result_that_it_has_printed(out, right):
    printed = printed_by(f"""
        import common, subprocess
        done = subprocess.CompletedProcess([], -6, {out!r}, "terminate called")
        subprocess.run = lambda *_, **options: done
        print(common._run("overlap", ["x"], {{}}, "python")["results"]["x"])
    """)
    assert printed == f"{right}\n"


def test_the_pictures_are_drawn_from_the_reports(sim, tmp_path):
    pytest.importorskip("matplotlib")
    for script in ("overlap", "handoff"):
        (tmp_path / f"{script}.json").write_text(json.dumps(run(script)[0]))
    command = [sys.executable, "-W", "error", str(BENCHMARKS / "plot.py"), str(tmp_path)]
    environment = {**os.environ, "MPLCONFIGDIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    for script in ("overlap", "handoff"):
        assert (tmp_path / f"{script}.png").read_bytes().startswith(b"\x89PNG")
