"""The device is chosen before torch is imported; threads are compared around every test."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import simcuda

CHOICE = os.environ.get("SIDESTREAM_TEST_DEVICE") or ("real" if Path("/dev/nvidia0").exists() else "simulated")
SIMULATOR: simcuda.Simulator | None = None
WHY_NOT = f"no device: SIDESTREAM_TEST_DEVICE={CHOICE}"
if CHOICE == "simulated":
    try:
        SIMULATOR = simcuda.load()
    except simcuda.Unavailable as reason:
        WHY_NOT = f"no simulated device: {reason}"

import torch  # noqa: E402 - the simulator has to be there first

import sidestream  # noqa: E402, F401 - registers the two stages
from helpers import eventually  # noqa: E402

HAVE_DEVICE = CHOICE == "real" or SIMULATOR is not None


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    """Whatever a test starts is gone when it ends."""
    before = set(threading.enumerate())
    yield
    left = lambda: [t for t in threading.enumerate() if t not in before]
    assert eventually(lambda: not left()), f"threads left running: {left()}"


@pytest.fixture
def device() -> Iterator[torch.device]:
    """The device that stream tests run on: simulated (under the schedule `late`), or real."""
    if not HAVE_DEVICE:
        pytest.skip(WHY_NOT)
    if SIMULATOR is not None:
        SIMULATOR.reset("late")
    yield torch.device("cuda", 0)
    if SIMULATOR is not None:
        SIMULATOR.reset("late")  # runs all that is queued at once, however long it would take
    torch.cuda.synchronize()


@pytest.fixture
def sim(device: torch.device) -> simcuda.Simulator:
    """The simulator itself, for schedules and counters; skipped on a real device."""
    if SIMULATOR is None:
        pytest.skip("needs the simulated device")
    return SIMULATOR
