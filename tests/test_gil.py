"""The benchmark of threads and the GIL starts, measures each case and says on what. Nothing here is timed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "gil.py"


def test_a_smoke_run_prints_its_tables_and_writes_a_number_for_each_case(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--quick", "--json", str(tmp_path / "gil.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads((tmp_path / "gil.json").read_text())
    assert report["question"] == SCRIPT.read_text().split("\n")[0].strip('"')
    assert done.stdout.startswith(report["question"])
    assert (report["about"]["torch threads"], report["about"]["blas threads"]) == (1, 1)
    assert [name for name in (*report["pairs"], *report["sources"]) if f"| {name} |" not in done.stdout] == []
    ways = [list(way) for consumers in report["sources"].values() for way in consumers.values()]
    assert ways == [["plain", "thread", "process and thread"]] * 15
    plain = [consumers[name]["plain"] for consumers in report["sources"].values() for name in consumers]
    assert plain == [{"gain": 1.0, "step": 1.0}] * 15  # what all others are compared with
