"""Which of two twins runs: `reference.py` (plain torch, anywhere) or `triton.py` (NVIDIA GPUs from SM89 on).

The choice follows the tensor's device and can be forced:

    octavo.backend.use("reference")            # from here on
    with octavo.backend.use("reference"): ...  # or for a while

Both twins write the same bytes, so forcing one is a way to check the other, never a change of meaning. The force is
process-wide, not per thread: autograd runs backward on threads of its own.
"""

import importlib
import importlib.util
from functools import cache
from types import ModuleType, TracebackType

import torch
from torch import Tensor

from octavo.errors import UnsupportedDevice, UnsupportedHardware, check_choice

CHOICES = ("auto", "reference", "triton")
MIN_TRITON_CAPABILITY = (8, 9)  # the first chips that convert float32 to FP8 in hardware

_forced = "auto"


class use:
    """Force a twin, or "auto" to follow the device again. As a context manager it restores what was before."""

    def __init__(self, name: str) -> None:
        global _forced
        check_choice(name, CHOICES, what="backend")
        self._before = _forced
        _forced = name

    def __enter__(self) -> "use":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _forced
        _forced = self._before


def forced() -> str:
    return _forced


@cache
def triton_refusal(device: torch.device) -> str:
    """Why Triton kernels cannot run on this device; empty when they can."""
    if device.type != "cuda":
        return f"Triton kernels run on CUDA tensors, this one is on {device}"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_TRITON_CAPABILITY:
        found, least = (f"SM{major}{minor}" for major, minor in (capability, MIN_TRITON_CAPABILITY))
        return f"FP8 conversion in Triton needs {least} or newer, {torch.cuda.get_device_name(device)} is {found}"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    return ""


def choose(device: torch.device) -> str:
    """ "reference" or "triton" for tensors on this device."""
    if device.type not in ("cpu", "cuda", "meta"):
        raise UnsupportedDevice(f"Octavo runs on cpu and cuda tensors, got one on {device}. Move it to either.")
    if _forced == "reference" or device.type in ("cpu", "meta"):
        if _forced == "triton":
            raise UnsupportedHardware(f"The triton backend was forced, but {triton_refusal(device)}. Use 'auto'.")
        return "reference"
    refusal = triton_refusal(device)
    if not refusal:
        return "triton"
    if _forced == "triton" or "not installed" in refusal:
        raise UnsupportedHardware(
            f"No Triton kernels here: {refusal}. Call octavo.backend.use('reference') to run plain torch instead."
        )
    return "reference"


@cache
def _load(package: str, name: str) -> ModuleType:
    return importlib.import_module(f"{package}.{name}")


def twin(package: str, like: Tensor) -> ModuleType:
    """The module of `package` that serves tensors like this one. Triton is imported only when it is used."""
    return _load(package, choose(like.device))
