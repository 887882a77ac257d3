"""The device of a benchmark: a real GPU, or the simulated one of the tests, put in place before torch is imported."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

ROOT = Path(__file__).parent.parent
for folder in ("src", "tests"):
    sys.path.append(str(ROOT / folder))  # behind all else: an installed sidestream comes first


class _State:
    simulator: ClassVar[Any] = None
    why_none: ClassVar[str] = ""
    cycles: ClassVar[float] = 1e9  # of `torch.cuda._sleep` [1/second]; the simulated device's clock


def have_gpu(*, simulated: bool) -> bool:
    """Whether there is a GPU, and the simulated device was not asked for."""
    return Path("/dev/nvidia0").exists() and not simulated


def load(*, simulated: bool) -> None:
    """Use a GPU where there is one, unless the simulated device is asked for. Call before torch is imported."""
    if have_gpu(simulated=simulated):
        return
    import simcuda

    try:
        _State.simulator = simcuda.load()
    except simcuda.Unavailable as reason:
        _State.why_none = str(reason)


def simulator() -> Any:
    """The simulated device's controls; None on a real one."""
    return _State.simulator


def name() -> str:
    """What the numbers were measured on."""
    import torch

    if _State.simulator is not None:
        return "simulated, not a GPU"
    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"none: {_State.why_none}"


def reset(schedule: str, *, bandwidth: float = 1e9) -> None:
    """Start from an idle device with no cached memory; under `schedule`, where it is simulated."""
    import torch

    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    if _State.simulator is not None:
        _State.simulator.reset(schedule, bandwidth=bandwidth)


def calibrate() -> None:
    """Find how many cycles a second `compute` has to ask a real device for."""
    import torch

    if _State.simulator is None:
        torch.cuda._sleep(10**7)  # the first kernel is loaded
        _State.cycles = 2e8 / seconds_between(lambda: torch.cuda._sleep(2 * 10**8))


def compute(seconds: float) -> None:
    """Keep the current stream busy for so long [seconds]."""
    import torch

    if seconds:
        torch.cuda._sleep(int(seconds * _State.cycles))


def seconds_between(work: Callable[[], object]) -> float:
    """How long the device takes for `work`, by two events on the current stream [seconds]."""
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3
