"""Probes: whether a GEMM that the chip should run itself does so here, and right.

A probe multiplies small operands and compares the product with the reference's. Its verdict holds for the process. Only
the GEMM's own answer makes a verdict: an error of anything around it, such as memory that is used up, is raised, and
the next call probes again. Probes do not depend on the default device, modes or transforms of the call that runs them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from octavo import backend
from octavo.errors import warn
from octavo.launch import apart

Result = TypeVar("Result")
CAPTURED = "The first GEMM of a kind runs a probe, which a CUDA graph capture cannot hold. Run one step before it."


@dataclass(frozen=True)
class Support:
    """Whether the chip multiplies two operands itself, and if not, why."""

    ok: bool
    reason: str = ""


class Refused(Exception):
    """The GEMM itself raised an error."""


def answer_of(gemm: Callable[[], Result]) -> Result:
    """Run a GEMM. What it raises is its answer, unless the device has no memory left or has failed."""
    try:
        return gemm()
    # no answer of the GEMM: the next call probes again
    except (torch.OutOfMemoryError, torch.AcceleratorError, MemoryError):
        raise
    except Exception as error:
        text = (str(error).strip().splitlines() or [""])[0].rstrip(".")
        raise Refused(text or type(error).__name__) from error


def verdict(what: str, device: torch.device, probe: Callable[[], float], instead: str = "") -> Support:
    """Run a probe, which returns the largest error as a fraction of its bound. A GEMM that fails is emulated from here
    on, with a warning; `octavo.backend.use("strict")` raises instead. For one that is no native GEMM, `instead` says
    what is done."""
    reason = ""
    try:
        # the call around may trace, or record: the probe is no part of it
        with apart():
            worst = probe()
        # NaN is wrong too
        if not worst <= 1.0:
            reason = f"{what} is off its error bound by a factor {worst:.3g}"
    except Refused as error:
        reason = f"{what} fails: {error}"
    if reason and instead:
        warn(f"{reason}. {instead}", stacklevel=3)
    elif reason:
        backend.note_emulated(what, reason, device)
    return Support(not reason, reason)


def noise(*shape: int, seed: int) -> Tensor:
    """Return numbers on the CPU, the same on every machine, whose rows have four magnitudes."""
    # named: a default device must not change what is drawn
    generator = torch.Generator(device="cpu").manual_seed(seed)
    x = torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu")
    return x * 2.0 ** (torch.arange(shape[-2], dtype=torch.float32, device="cpu") % 4)[:, None]


def error_of(got: Tensor, want: Tensor, size: Tensor, relative: float, bias: Tensor | float = 0.0) -> float:
    """Return the largest error as a fraction of its bound (docs/numerics.md): `want` is the exact result, `size` the
    sum of its absolute products, `bias` the absolute value of what was added to it."""
    # an error of the sum, which grows with its terms, and one of the last rounding
    return float(((got - want).abs() / (relative * size + 2**-8 * (want.abs() + bias))).max())
