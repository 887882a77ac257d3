"""Writes the tables of a run to where people look: results/README.md and the docstring of each benchmark.

    python benchmarks/tables.py

Reads the JSON files in benchmarks/results. The GPU's table needs a run on a GPU: a simulated one does not count.
"""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import common

HERE = Path(__file__).parent
BENCHMARKS = ["overlap", "handoff", "small_tensors", "start_stop", "memory", "images", "gpu_check"]
LAST = re.compile(r'Last table.*?"""[^\n]*\n', re.DOTALL)
INTRODUCTION = """# Results

One run of each benchmark, every contender in a process of its own; medians of its rounds. The JSON files beside this
page have all rounds. Each table names the command that made it; a whole run with all peers is:

    for name in overlap handoff small_tensors start_stop memory images; do
        python benchmarks/$name.py --all-peers --json benchmarks/results/$name.json
    done
    python benchmarks/tables.py && python benchmarks/plot.py benchmarks/results
"""


def last(name: str) -> tuple[str, str]:
    """What was measured, where and when; and the table."""
    file = HERE / "results" / f"{name}.json"
    report = json.loads(file.read_text()) if file.exists() else {}
    if not report or (name == "gpu_check" and "GPU" in report["about"]["device"]):
        return "", "not run on a GPU" if name == "gpu_check" else "not run"
    table: str = importlib.import_module(name).table(report["results"])
    return common.header(report), table


def main() -> None:
    page = [INTRODUCTION]
    for name in BENCHMARKS:
        header, table = last(name)
        page.append(f"## {name}.py\n\n" + (f"```\n{header}\n```\n\n" if header else "") + table + "\n")
        script = HERE / f"{name}.py"
        where = " · ".join(header.split("\n")[1:3])
        ending = f'Last table: {where}\n\n{table}\n"""  # noqa: E501\n' if header else f'Last table: {table}.\n"""\n'
        script.write_text(LAST.sub(lambda _, ending=ending: ending, script.read_text(), count=1))
    (HERE / "results").mkdir(exist_ok=True)
    (HERE / "results" / "README.md").write_text("\n".join(page))


if __name__ == "__main__":
    main()
