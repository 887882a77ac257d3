"""What all benchmarks share: options, a process for each contender, medians, tables, JSON."""

from __future__ import annotations

import argparse
import datetime as dt
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
LIMIT = 900  # for one contender [seconds]
ALL_PEERS = ("spdl-core", "grain")  # beside torchdata.nodes, which is in a torchdata without DataPipes
NODES = "torchdata==0.11.0"

Results = dict[str, dict[str, Any]]  # by contender: {"rounds": [...], "median": ...} or {"cannot": why}


def parser(doc: str | None, *, extra: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The options of every benchmark; `extra` are flags of one."""
    made = argparse.ArgumentParser(description=(doc or "").split("\n")[0])
    made.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    made.add_argument("--quick", action="store_true", help="a smoke run: few items, all in one process, no meaning")
    made.add_argument("--all-peers", action="store_true", help="also SPDL, Grain, torchdata.nodes (makes a venv)")
    made.add_argument("--simulated", action="store_true", help="use the simulated device even where there is a GPU")
    made.add_argument("--only", nargs="+", metavar="NAME", help="run these contenders alone")
    for flag in extra:
        made.add_argument(flag, action="store_true")
    return made


def main(  # noqa: PLR0913 - what makes up a benchmark
    script: str,
    doc: str | None,
    contenders: Iterable[str],
    table: Callable[[Results], str],
    *,
    others: Iterable[str] = (),
    rounds: int = 3,
    extra: Sequence[str] = (),
    limit: float = math.inf,
) -> None:
    """Measure each contender in a process of its own, round by round, and print the table of the medians.

    After `limit` seconds no contender is begun.
    """
    arguments = parser(doc, extra=extra).parse_args()
    options = {key: value for key, value in vars(arguments).items() if key != "json"}
    names = list(contenders)
    if arguments.only:
        names = [name for name in names if name in arguments.only]
    report = _report(doc)
    if arguments.quick:
        _add(report, names, _run(script, names, options, sys.executable))
        rounds = 0
    for _ in range(rounds):
        for name in names:
            found = _run(script, [name], options, sys.executable) if _seconds() < limit else _too_late(name, limit)
            _add(report, [name], found)
    if arguments.all_peers:
        _run_others(report, script, list(others), options, max(1, rounds))
    for one in report["results"].values():
        if "rounds" in one:
            one["median"] = median(one["rounds"])
    report["seconds"] = round(_seconds())
    print(header(report) + "\n\n" + table(report["results"]))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


_started = dt.datetime.now(dt.timezone.utc)


def _seconds() -> float:
    return (dt.datetime.now(dt.timezone.utc) - _started).total_seconds()


def _too_late(name: str, limit: float) -> dict[str, Any]:
    return {"results": {name: {"cannot": f"not run: {limit:.0f} s were over"}}}


def _report(doc: str | None) -> dict[str, Any]:
    return {
        "question": (doc or "").split("\n")[0],
        "command": " ".join(["python", "benchmarks/" + Path(sys.argv[0]).name, *sys.argv[1:]]),
        "date": _started.strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores, {_processor()}, {platform.system()}",
        "load average at start": round(os.getloadavg()[0], 1),
        "results": {},
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def header(report: dict[str, Any]) -> str:
    about = report.get("about", {})
    versions = ", ".join(f"{name} {version}" for name, version in about.get("versions", {}).items())
    return "\n".join(
        [
            report["question"],
            f"{report['date']} · {report['machine']} · load average {report['load average at start']} at the start",
            f"device: {about.get('device')} · torch threads: {about.get('torch threads')} · {versions}",
            f"{report['command']}   ({report['seconds']} s)",
        ]
    )


def _run(script: str, names: list[str], options: dict[str, Any], python: str) -> dict[str, Any]:
    """What a new process measures for `names`; if it breaks, that instead of a result."""
    command = [python, str(HERE / "child.py"), Path(script).stem, json.dumps(names), json.dumps(options)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False, cwd=HERE)
    except subprocess.TimeoutExpired:
        return {"results": {name: {"cannot": f"not done after {LIMIT} s"} for name in names}}
    if done.returncode != 0:
        print(done.stderr, file=sys.stderr)
    lines = done.stdout.strip().splitlines()
    if not lines or not lines[-1].startswith('{"about"'):  # with it, it only died on its way out, as daemon threads do
        why = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        return {"results": {name: {"cannot": f"failed: {why[-1]}"} for name in names}}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def _add(report: dict[str, Any], names: list[str], found: dict[str, Any]) -> None:
    if "about" in found:
        about = report.setdefault("about", found["about"])
        about["versions"] = {**found["about"]["versions"], **about["versions"]}
    for name in names:
        new, old = found["results"][name], report["results"].get(name, {})
        report["results"][name] = {"rounds": old["rounds"] + new.get("rounds", [])} if "rounds" in old else new


def _run_others(report: dict[str, Any], script: str, names: list[str], options: dict[str, Any], rounds: int) -> None:
    """The peers that need an environment of their own."""
    try:
        python = _environment()
    except (OSError, subprocess.SubprocessError) as reason:
        found = {name: {"cannot": f"not run: no environment ({reason})"} for name in names}
        _add(report, names, {"results": found})
        return
    for _ in range(rounds):
        for name in names:
            _add(report, [name], _run(script, [name], options, python))


def _environment() -> str:
    """Make an environment with SPDL, Grain and torchdata.nodes in front of what is installed here, once."""
    folder = Path(tempfile.gettempdir()) / f"sidestream-peers-{os.getuid()}-{platform.python_version()}"
    python = folder / "bin" / "python"
    if not (folder / "done").exists():
        venv.create(folder, with_pip=True, clear=True)
        (site,) = folder.glob("lib/python*/site-packages")
        site.joinpath("behind.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
        for wanted in (ALL_PEERS, ("--no-deps", NODES)):
            subprocess.run(
                [python, "-m", "pip", "install", "-q", *wanted], check=True, timeout=600, capture_output=True
            )
        (folder / "done").touch()
    return str(python)


def median(rounds: list[Any]) -> Any:
    """Medians of numbers, through dicts and lists; of anything else the first."""
    first = rounds[0]
    if isinstance(first, dict):
        return {key: median([one[key] for one in rounds]) for key in first}
    if isinstance(first, list):
        return [median(list(column)) for column in zip(*rounds, strict=True)]
    if isinstance(first, (int, float)) and not isinstance(first, bool):
        return statistics.median(rounds)
    return first


def markdown(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table; floats with three figures."""
    lines = [[*header], *([_cell(one) for one in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    shown = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    ]
    shown.insert(1, "| " + " | ".join("-" * width for width in widths) + " |")
    return "\n".join(shown)


def _cell(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def rows(results: Results, columns: Callable[[Any], Sequence[object]], width: int) -> list[list[object]]:
    """A row a contender: `columns` of its median, or why it has none in the first of `width` cells."""
    made: list[list[object]] = []
    for name, one in results.items():
        made.append([name, *(columns(one["median"]) if "median" in one else [one["cannot"], *[""] * (width - 1)])])
    return made
