"""Runs `measure(contender, options)` of one benchmark and prints what it returns as JSON, on the last line.

`common.py` starts this in a process of its own for each contender.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import json
import platform
import sys
import warnings
from typing import Any

import device

THREADS = 1  # of torch: the cores are few, and the loaders need one


def versions() -> dict[str, str]:
    names = ("torch", "torchdata", "prefetch_generator", "spdl-core", "grain")
    found = {"python": platform.python_version()}
    for one in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[one] = importlib.metadata.version(one)
    return found


def attempt(benchmark: Any, contender: str, options: dict[str, Any]) -> dict[str, Any]:
    from peers import Unable

    try:
        return {"rounds": [benchmark.measure(contender, options)]}
    except Unable as reason:
        return {"cannot": str(reason)}
    except ImportError as reason:
        return {"cannot": f"not installed: {reason.name}"}


def main() -> None:
    benchmark_name, contenders, options = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
    warnings.simplefilter("ignore")  # peers have much to say about themselves
    device.load(simulated=options["simulated"])
    import torch

    torch.set_num_threads(THREADS)
    benchmark = importlib.import_module(benchmark_name)
    results = {one: attempt(benchmark, one, options) for one in contenders}
    about = {"device": device.name(), "torch threads": torch.get_num_threads(), "versions": versions()}
    print("\n" + json.dumps({"about": about, "results": results}), flush=True)


if __name__ == "__main__":
    main()
