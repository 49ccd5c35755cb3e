"""Choose which implementation of a kernel runs: `reference.py` (plain torch, anywhere) or `triton.py` (NVIDIA GPUs
from SM89 on). Both implement the same functions.

The choice follows the tensor's device. The user can force it:

    octavo.backend.use("reference")            # from here on
    with octavo.backend.use("reference"): ...  # or for a while

Both write the same codes and scales, so forcing one is a way to check the other. The choice holds for the whole
process, not for one thread, because autograd runs backward on threads of its own.
"""

import importlib
import importlib.util
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from octavo._torch.cuda import assert_async
from octavo.errors import UnsupportedDevice, UnsupportedHardware, check_choice, warn

__all__ = ["choose", "forced", "use"]

CHOICES = ("auto", "strict", "checked", "reference", "triton", "emulated")
MIN_TRITON_CAPABILITY = (8, 9)  # the first chips that convert float32 to FP8 in hardware

_forces: list["use"] = []  # active forces, the newest last
_emulated: dict[str, str] = {}  # a GEMM that the chip should run itself, and failed its probe -> why
_lock = threading.Lock()


def __dir__() -> list[str]:
    """Return the public names."""
    return __all__


class use:
    """Force one implementation of every kernel, from the call on or for a `with` block.

    Without a block the choice stays for the rest of the process. A block removes its own choice when it ends, whatever
    other threads chose meanwhile. The newest choice counts.

    Args:
        name: "reference" runs plain torch on every device; use it to check a kernel. "triton" runs the GPU kernels, and
            raises where there are none. "emulated" does too, and multiplies codes in bfloat16 where the chip has a GEMM
            of its own; use it to check that one. "strict" follows the device of each tensor, and raises where the
            chip's own GEMM does not build or fails its probe: without it such a GEMM is emulated, with a warning.
            "checked" follows the device of each tensor, and has a GPU check values that the host does not read: group
            sizes, and experts of tokens. A wrong one ends in a device-side assertion, which prints the rule and which
            the process does not survive. It holds in compiled graphs, and in CUDA graphs that are captured under it; it
            takes more time. On a CPU these values are always checked, and raise.
            "auto", the default of a process, follows the device of each tensor.

    Raises:
        UnsupportedConfig: `name` is none of these.
        UnsupportedHardware: `name` is "strict", and a GEMM is emulated already.

    Example:
        >>> with octavo.backend.use("reference"):
        ...     print(octavo.backend.forced())
        reference
        >>> octavo.backend.forced()
        'auto'
    """

    def __init__(self, name: str) -> None:
        check_choice(name, CHOICES, what="backend")
        self.name = name
        if name == "strict" and _emulated:
            raise UnsupportedHardware(f"This process emulates a GEMM: {'; '.join(_emulated.values())}. {_WAY_OUT}")
        with _lock:
            _forces.append(self)

    def __enter__(self) -> "use":
        return self

    def __exit__(self, *error: object) -> None:
        with _lock:
            _forces.remove(self)


_WAY_OUT = "Run `octavo doctor` for every GEMM's state; octavo.backend.use('auto') emulates those that fail."


def refuse_emulation(reason: str) -> None:
    """Raise under `use("strict")`: a GEMM that failed its probe is asked for."""
    if forced() == "strict":
        raise UnsupportedHardware(f"{reason}. {_WAY_OUT}")


def note_emulated(what: str, reason: str, device: torch.device) -> None:
    """Note that a GEMM failed its probe, and warn; raise under `use("strict")`."""
    refuse_emulation(reason)
    _emulated[what] = reason
    warn(f"{reason}. On {device} Octavo emulates this GEMM, exactly but slower.", stacklevel=3)


def emulated() -> dict[str, str]:
    """Return the GEMMs of this process that the chip should run itself and that failed their probes, with reasons."""
    return dict(_emulated)


def forced() -> str:
    """Return the implementation that `use` forces at this moment.

    Returns:
        The argument of the newest `use` in force; "auto" without one.

    Example:
        >>> octavo.backend.forced()
        'auto'
    """
    return _forces[-1].name if _forces else "auto"


def check_on_device(rule: Callable[[], Tensor], message: str) -> None:
    """Have the device assert that `rule()`, a bool tensor of one element, is True, under `use("checked")`. The host
    does not wait. CUDA prints up to 255 characters of the message."""
    if forced() == "checked":
        assert_async(rule(), message)


@dataclass(frozen=True)
class UnsupportedReason:
    """The reason why Triton kernels cannot run on a device, and whether the user can fix it."""

    why: str
    mendable: bool = False


@cache
def unsupported_by_triton(device: torch.device) -> UnsupportedReason | None:
    if device.type != "cuda":
        return UnsupportedReason(f"Triton kernels run on CUDA tensors, and this one is on {device}")
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_TRITON_CAPABILITY:
        found, least = (f"SM{major}{minor}" for major, minor in (capability, MIN_TRITON_CAPABILITY))
        why = f"FP8 conversion in Triton needs {least} or newer, {torch.cuda.get_device_name(device)} is {found}"
        warn(f"{why}: Octavo runs its plain torch reference on {device}, which is slow.", stacklevel=2)
        return UnsupportedReason(why)
    if importlib.util.find_spec("triton") is None:
        return UnsupportedReason("the package triton is not installed", mendable=True)
    return None


def choose(device: torch.device) -> str:
    """Return the implementation that runs for tensors on a device.

    Args:
        device: a CPU, CUDA or meta device.

    Returns:
        "reference" or "triton".

    Raises:
        UnsupportedDevice: Octavo does not run on devices of this type.
        UnsupportedHardware: `use("triton")` or `use("emulated")` is in force and the device has no Triton kernels, or
            the device has a GPU that could run them and the package triton is not installed.

    Example:
        >>> octavo.backend.choose(torch.device("cpu"))
        'reference'
    """
    if device.type not in ("cpu", "cuda", "meta"):
        raise UnsupportedDevice(f"Octavo runs on cpu and cuda tensors, got one on {device}. Move it to either.")
    force = forced()
    if force == "reference" or (device.type != "cuda" and force in ("auto", "strict", "checked")):
        return "reference"
    unsupported_reason = unsupported_by_triton(device)
    if unsupported_reason is None:
        return "triton"
    if force in ("triton", "emulated") or unsupported_reason.mendable:
        raise UnsupportedHardware(
            f"No Triton kernels here: {unsupported_reason.why}. Call octavo.backend.use('reference') to run plain "
            "torch instead."
        )
    return "reference"


def implementation(package: str, like: Tensor) -> ModuleType:
    """Return the module of `package` that runs for tensors like this one. Import Triton only if it is used."""
    return _implementation(package, like.device, _forces[-1].name if _forces else "auto")


@cache
def _implementation(package: str, device: torch.device, force: str) -> ModuleType:
    name = choose(device)
    if importlib.util.find_spec(f"{package}.{name}") is None:
        raise UnsupportedHardware(
            f"{package} has no {name}.py, so it does not run on {device}. Add one, or call "
            "octavo.backend.use('reference') to run plain torch instead."
        )
    return importlib.import_module(f"{package}.{name}")
