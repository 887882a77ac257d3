"""Draws what `overlap.py` and `handoff.py` measured.

    python benchmarks/plot.py benchmarks/results

Reads `overlap.json` and `handoff.json` there and writes `overlap.png` and `handoff.png` beside them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

OURS, PEER = "#1565c0", "#b0b7bf"


def read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """A report, and the medians of its contenders that have some."""
    report = json.loads(path.read_text())
    return report, {name: one["median"] for name, one in report["results"].items() if "median" in one}


def sign(figure: Figure, report: dict[str, Any], path: Path) -> None:
    """Say below the picture where the numbers come from, and save it."""
    about = report["about"]
    where = f"{report['machine']} · device: {about['device']} · torch {about['versions']['torch']} · {report['date']}"
    figure.text(0.01, 0.01, f"{where}\n{report['command']}", fontsize=7, color="#555555")
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.savefig(path, dpi=150)


def overlap(source: Path, path: Path) -> None:
    """A bar a contender, the mean over the cells; a line to the worst cell; 1 is perfect."""
    report, found = read(source)
    names = sorted(found, key=lambda name: -_mean(found[name]["ahead"]))
    figure = Figure(figsize=(8, 0.45 * len(names) + 1.8))
    axes = figure.subplots()
    means = [_mean(found[name]["ahead"]) for name in names]
    reach = [max(found[name]["ahead"].values()) - mean for name, mean in zip(names, means, strict=True)]
    colors = [OURS if name == "sidestream" else PEER for name in names]
    axes.barh(
        names,
        means,
        xerr=[[0] * len(names), reach],
        color=colors,
        error_kw={"ecolor": "#555555", "capsize": 3},
    )
    axes.axvline(1, color="black", linewidth=1, linestyle="--")
    for i, name in enumerate(names):
        wrong = found[name]["wrong"]
        if isinstance(wrong, (int, float)) and wrong:
            text, end = f"{wrong:.0f} of {found[name]['read']} batches wrong", means[i] + reach[i]
            axes.annotate(
                text,
                (end, i),
                xytext=(6, 0),
                textcoords="offset points",
                va="center",
                color="#b71c1c",
                fontsize=8,
            )
    axes.set_xlabel("step / max(load, copy, compute): mean, line to the worst cell; 1 is perfect", fontsize=9)
    axes.set_title(report["question"], fontsize=10, loc="left")
    sign(figure, report, path)


def _mean(cells: dict[str, float]) -> float:
    return sum(cells.values()) / len(cells)


def handoff(source: Path, path: Path) -> None:
    """A line a contender: cost of an item against the buffer's size."""
    report, found = read(source)
    figure = Figure(figsize=(8, 4.5))
    axes = figure.subplots()
    for name, one in found.items():
        sizes = [int(size) for size in one["cost"]]
        ours = name == "sidestream"
        axes.plot(
            sizes,
            list(one["cost"].values()),
            marker="o",
            label=name,
            linewidth=3 if ours else 1.2,
            color=OURS if ours else None,
        )
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="buffer size [items]",
        ylabel="cost of an item over the bare pipe [µs]",
    )
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    axes.set_title(report["question"], fontsize=10, loc="left")
    sign(figure, report, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, help="where the JSON files are, and where the pictures go")
    folder = parser.parse_args().folder
    for name, draw in (("overlap", overlap), ("handoff", handoff)):
        draw(folder / f"{name}.json", folder / f"{name}.png")
        print(folder / f"{name}.png")


if __name__ == "__main__":
    main()
