"""The package as a whole: what importing it does, what it offers, and that its parts import one way only."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest
from torch.utils.data import IterDataPipe

import sidestream
from helpers import run_child
from sidestream.samples import map_leaves

SRC = Path(sidestream.__file__).parent

# Who may import whom. Nothing points up, and neither `worker` nor `samples` knows pipes or a device.
MAY_IMPORT = {
    "__init__": {"loader", "mover", "prefetch", "samples"},
    "ambient": set(),
    "cli": {"__init__"},
    "demo": {"__init__"},
    "loader": {"mover", "prefetch"},
    "mover": {"stage", "transfer", "worker"},
    "prefetch": {"stage", "transfer", "worker"},
    "samples": set(),
    "stage": {"worker"},
    "staging": set(),
    "transfer": {"samples", "staging"},
    "worker": {"ambient"},
}


def imports(module: str) -> set[str]:
    """Return the parts of the package that `module` imports, and other top-level names with them."""
    found = set()
    for node in ast.walk(ast.parse((SRC / f"{module}.py").read_text())):
        if isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return found


def test_every_part_is_listed() -> None:
    assert {path.stem for path in SRC.glob("*.py")} == set(MAY_IMPORT)


@pytest.mark.parametrize("module", sorted(MAY_IMPORT))
def test_parts_import_one_way_only(module: str) -> None:
    ours = {name for name in imports(module) if name.split(".")[0] == "sidestream"}
    parts = {name.partition(".")[2] or "__init__" for name in ours}
    assert parts <= MAY_IMPORT[module]


@pytest.mark.parametrize("module", sorted(set(MAY_IMPORT) - {"cli", "demo"}))
def test_the_core_needs_torch_and_the_standard_library_only(module: str) -> None:
    outside = {name.split(".")[0] for name in imports(module)} - {"sidestream", "torch"}
    from sys import stdlib_module_names

    assert outside <= stdlib_module_names


@pytest.mark.parametrize("module", ["worker", "samples", "stage"])
def test_no_cuda_outside_its_rooms(module: str) -> None:
    assert "cuda" not in (SRC / f"{module}.py").read_text().lower()


def test_only_the_worker_has_locks_and_threads() -> None:
    users = {
        path.stem for path in SRC.glob("*.py") if "threading" in imports(path.stem) or "queue" in imports(path.stem)
    }
    assert users == {"worker"}


def test_importing_it_loads_little_touches_no_cuda_and_warns_of_nothing() -> None:
    done = run_child("""
        import sys
        import simcuda
        try:
            simulator = simcuda.load()
        except simcuda.Unavailable:
            simulator = None
        import torch, torch.utils.data
        before = set(sys.modules)
        import sidestream
        new = {name.split(".")[0] for name in set(sys.modules) - before}
        assert new <= {"sidestream", "torch"} | set(sys.stdlib_module_names), new
        assert not torch.cuda.is_initialized()
        assert simulator is None or simulator.contexts() == set()
    """)
    assert (done.returncode, done.stderr) == (0, "")


def test_it_registers_both_functional_forms() -> None:
    assert {"thread_prefetch", "to_cuda_stream"} <= IterDataPipe.functions.keys()


def test_the_public_names() -> None:
    assert sidestream.__all__ == ["CudaStreamMover", "ThreadPrefetcher", "prefetch", "register_sample_type"]
    assert all(inspect.getdoc(getattr(sidestream, name)) for name in sidestream.__all__)


def test_the_signatures() -> None:
    def parameters(function: object) -> dict[str, tuple[object, bool]]:
        found = inspect.signature(function).parameters.values()
        return {one.name: (one.default, one.kind is one.KEYWORD_ONLY) for one in found}

    needed = inspect.Parameter.empty
    assert parameters(sidestream.ThreadPrefetcher) == {
        "source_datapipe": (needed, False),
        "buffer_size": (2, False),
        "max_bytes": (None, True),
        "close_timeout": (2.0, True),
    }
    assert parameters(sidestream.CudaStreamMover) == {
        "source_datapipe": (needed, False),
        "device": (None, False),
        "buffer_size": (2, True),
        "keep_on_cpu": ((), True),
        "pack_below": (1 << 16, True),
        "close_timeout": (2.0, True),
    }
    assert list(parameters(sidestream.register_sample_type)) == ["type", "flatten", "unflatten"]
    assert list(parameters(map_leaves)) == ["fn", "sample", "keep"]
