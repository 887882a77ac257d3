"""Thread-local state of torch and Python: captured on one thread, set on another.

Only per-thread setters are used. The context managers of torch are not: leaving `torch.autocast` clears a cache of the
whole process, and entering `torch.device` writes a global.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack, _push_mode
from torch.utils._device import DeviceContext

__all__ = ["capture"]

AUTOCAST_DEVICES = ("cpu", "cuda")


def capture() -> Callable[..., None]:
    """Take the calling thread's state: grad and inference mode, autocast, default device, CUDA device, contextvars.

    Function modes (but for the default device) and dispatch modes are not taken.

    Returns:
        `run(body, *args)`, which calls `body(*args)` in that state on a thread that ends soon after: the state is set
        there, not restored.
    """
    context = contextvars.copy_context()
    found = [
        _inference(),
        _grad(),
        *map(_autocast, AUTOCAST_DEVICES),
        _autocast_cache(),
        _default_device(),
        _cuda_device(),
    ]
    setters = [setter for setter in found if setter is not None]

    def run(body: Callable[..., None], *args: Any) -> None:
        guards = [setter() for setter in setters]  # the one of inference mode lasts as long as it is held
        context.run(body, *args)
        del guards

    return run


def _inference() -> Callable[[], object] | None:
    return (lambda: torch._C._InferenceMode(True)) if torch.is_inference_mode_enabled() else None


def _grad() -> Callable[[], object]:
    enabled = torch.is_grad_enabled()
    return lambda: torch._C._set_grad_enabled(enabled)


def _autocast(kind: str) -> Callable[[], object]:
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

    def set_it() -> None:
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)

    return set_it


def _autocast_cache() -> Callable[[], object]:
    enabled = torch.is_autocast_cache_enabled()
    return lambda: torch.set_autocast_cache_enabled(enabled)


def _default_device() -> Callable[[], object] | None:
    modes = [mode for mode in _get_current_function_mode_stack() if isinstance(mode, DeviceContext)]
    device = modes[-1].device if modes else None  # not torch.get_default_device(): it may start CUDA to find an index
    return (lambda: _push_mode(DeviceContext(device))) if device is not None else None


def _cuda_device() -> Callable[[], object] | None:
    index = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
    return (lambda: torch.cuda.set_device(index)) if index else None  # a thread starts on 0: nothing to touch
