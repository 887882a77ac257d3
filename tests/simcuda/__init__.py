"""A simulated CUDA device under torch's own CUDA build: what it does is told in device.hpp, which schedules in `reset`.

`load()` before torch is imported. The library is built at the first call, with any C++ compiler, and kept.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["Counters", "Operation", "Simulator", "Unavailable", "load"]

HERE = Path(__file__).parent
SOURCES = sorted(HERE.glob("*.cpp"))
CUDA_MAJOR = "13"
SCHEDULES = ("late", "ahead", "random", "timed")
KINDS = [
    "h2d",
    "d2h",
    "d2d",
    "h2h",
    "memset",
    "kernel",
    "record",
    "wait",
    "host_function",
    "host_wait",
    "alloc",
    "free",
    "host_alloc",
    "host_free",
]
FLAGS = [
    "-std=c++17",
    "-O1",
    "-Wall",
    "-fPIC",
    "-shared",
    "-pthread",
    "-fno-sanitize=undefined",
    "-Wl,-soname,libcuda.so.1",
]


class Unavailable(Exception):
    """The simulated device cannot be used here; the message says why, in one line."""


@dataclasses.dataclass(frozen=True)
class Counters:
    """How often something was called since the last reset."""

    h2d: int
    d2h: int
    d2d: int
    pageable: int  # host-to-device copies from pageable memory, a part of h2d
    h2d_bytes: int  # [bytes]
    host_waits: int  # event, stream and device synchronizations that a thread called
    stream_waits: int
    event_records: int
    event_queries: int
    host_allocs: int
    device_mallocs: int
    kernels: int
    memsets: int


@dataclasses.dataclass(frozen=True)
class Operation:
    """One call, in the order of the calls."""

    kind: str  # one of KINDS
    stream: int  # as torch's Stream.cuda_stream; 0 for a device's default stream
    device: int  # -1 for pinned memory
    thread: int  # as threading.get_native_id()
    nbytes: int  # [bytes]
    pinned: bool  # the host's side of a copy
    blocking: bool  # of an event: made with blocking=True
    dst: int
    src: int
    name: str  # of a kernel, mangled; of a host wait: "event", "stream", "device"


class _Counters(ctypes.Structure):
    _fields_ = [(field.name, ctypes.c_uint64) for field in dataclasses.fields(Counters)]


class _LogEntry(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_int32) for name in ("kind", "device")],
        ("stream", ctypes.c_uint64),
        ("thread", ctypes.c_int64),
        *[(name, ctypes.c_uint64) for name in ("nbytes", "dst", "src")],
        *[(name, ctypes.c_int32) for name in ("pinned", "blocking")],
        ("name", ctypes.c_char_p),
    ]


class Simulator:
    """The device's controls. One exists in a process; it is as thread-safe as CUDA is."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        for name in ("log", "device_bytes", "contexts", "pending"):
            getattr(library, f"simcuda_{name}").restype = ctypes.c_uint64

    def reset(self, schedule: str = "late", *, seed: int = 0, bandwidth: float = 1e9) -> None:
        """Run all queued work at once, wipe counters and log, and choose the schedule.

        Args:
            schedule: "late": work runs only when something waits for it, and queries run nothing; "ahead": side streams
                run as soon as they can, default streams only when something waits for them; "random": `seed` decides,
                at each call and in each wait; "timed": work takes time, on a thread a stream.
            seed: Of "random"; the same for the same sequence of calls.
            bandwidth: Of copies under "timed" [bytes/second].
        """
        self._library.simcuda_reset(SCHEDULES.index(schedule), ctypes.c_uint64(seed), ctypes.c_double(bandwidth))

    def counters(self) -> Counters:
        """What was called since the last reset."""
        counters = _Counters()
        self._library.simcuda_counters(ctypes.byref(counters))
        return Counters(**{field.name: getattr(counters, field.name) for field in dataclasses.fields(Counters)})

    def log(self) -> list[Operation]:
        """The operations since the last reset, in the order of the calls."""
        room = self._library.simcuda_log(None, ctypes.c_uint64(0))
        entries = (_LogEntry * room)()
        n = min(room, self._library.simcuda_log(entries, ctypes.c_uint64(room)))
        return [_operation(entry) for entry in entries[:n]]

    def device_bytes(self, device: int = 0) -> int:
        """What cudaMalloc gave and cudaFree did not take back [bytes]."""
        return int(self._library.simcuda_device_bytes(device))

    def contexts(self) -> set[int]:
        """The devices on which a call made a context. A reset does not unmake them."""
        bits = self._library.simcuda_contexts()
        return {device for device in range(64) if bits >> device & 1}

    def pending(self, stream: int | None = None, device: int = 0) -> int:
        """How many queued operations have not run: on all streams, or on one (0: the default stream of `device`)."""
        handle, where = (0, -1) if stream is None else (stream, device)
        return int(self._library.simcuda_pending(ctypes.c_uint64(handle), where))

    def run(self, n: int | None = None) -> None:
        """Let the device run `n` operations that are ready, or all: the oldest first, or as the seed picks.

        Under "timed" it waits until all queued work has run.
        """
        self._library.simcuda_run(ctypes.c_uint64(2**64 - 1 if n is None else n))


def _operation(entry: _LogEntry) -> Operation:
    fields = {field.name: getattr(entry, field.name) for field in dataclasses.fields(Operation)}
    fields.update(kind=KINDS[entry.kind], name=entry.name.decode())
    fields.update(pinned=bool(entry.pinned), blocking=bool(entry.blocking))
    return Operation(**fields)


def load(devices: int = 2) -> Simulator:
    """Build the library where needed and put it in front of the CUDA runtime that torch will look for.

    Raises:
        Unavailable: No compiler, no headers, or torch is no CUDA build of the major version that is simulated.
        RuntimeError: torch was imported before.
    """
    global _loaded  # noqa: PLW0603 - a process has one CUDA runtime
    if _loaded is None:
        _check_torch()
        if "torch" in sys.modules:
            raise RuntimeError("the simulated device must be loaded before torch is imported")
        library = ctypes.CDLL(str(_built()), mode=ctypes.RTLD_GLOBAL)
        library.simcuda_start(devices)
        _loaded = Simulator(library)
    return _loaded


_loaded: Simulator | None = None


def _folder(package: str) -> Path | None:
    """Where a package lies, found without importing it."""
    spec = importlib.util.find_spec(package)
    places = list(spec.submodule_search_locations or []) if spec else []
    return Path(places[0]) if places else None


def _check_torch() -> None:
    torch = _folder("torch")
    if torch is None:
        raise Unavailable("torch is not installed")
    text = (torch / "version.py").read_text()
    found = re.search(r"^cuda\b[^=]*=\s*'(\d+)", text, re.MULTILINE)
    if found is None:
        raise Unavailable("torch is a build without CUDA")
    if found[1] != CUDA_MAJOR:
        raise Unavailable(f"torch is built for CUDA {found[1]}, the simulator is for CUDA {CUDA_MAJOR}")


def _headers() -> Path:
    nvidia = _folder("nvidia")
    headers = nvidia / f"cu{CUDA_MAJOR}" / "include" if nvidia else None
    if headers is None or not (headers / "cuda_runtime_api.h").exists():
        raise Unavailable("the headers of the nvidia-cuda-runtime wheel are missing")
    return headers


def _compilers() -> Iterator[list[str]]:
    """The commands that may be C++ compilers, best first."""
    if "CXX" in os.environ:
        yield shlex.split(os.environ["CXX"])
    yield from ([name] for name in ("c++", "g++", "clang++") if shutil.which(name))
    if shutil.which("cc"):
        yield ["cc", "-xc++"]
    if importlib.util.find_spec("ziglang"):
        yield [sys.executable, "-m", "ziglang", "c++"]


def _built() -> Path:
    """The library: made by the first compiler that can, or found where it was made before."""
    headers = _headers()
    failures = []
    for compiler in _compilers():
        target = _target(compiler, headers)
        with contextlib.suppress(OSError):
            if target.exists() or _compile(compiler, headers, target, failures):
                return target
    raise Unavailable("no C++ compiler" if not failures else f"the compiler failed: {failures[0]}")


def _target(compiler: list[str], headers: Path) -> Path:
    """A name that changes with everything that the library is made from."""
    folder = Path(tempfile.gettempdir()) / f"simcuda-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    made_from = [*SOURCES, HERE / "device.hpp", HERE / "exports.map", *HERE.glob("include/crt/*.h")]
    parts = [path.read_bytes() for path in (*made_from, headers / "cuda_runtime_api.h")]
    parts.append(repr((compiler, FLAGS, shutil.which(compiler[0]))).encode())
    return folder / f"{hashlib.sha256(b''.join(parts)).hexdigest()[:20]}.so"


def _compile(compiler: list[str], headers: Path, target: Path, failures: list[str]) -> bool:
    """Build under a name of our own, then rename: two processes may build at once."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        places = [f"-I{HERE}", f"-I{HERE / 'include'}", "-isystem", str(headers)]
        version = f"-Wl,--version-script={HERE / 'exports.map'}"
        command = [*compiler, *FLAGS, version, *places, *map(str, SOURCES), "-o", str(made), "-lstdc++"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            made.replace(target)
            return True
        lines = [line for line in done.stderr.splitlines() if "error" in line]
        failures.append(lines[0] if lines else f"{compiler[0]} gave {done.returncode}")
        return False
