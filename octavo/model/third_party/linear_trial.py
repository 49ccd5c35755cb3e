"""Whether the forward of a subclass of nn.Linear computes F.linear: tried on small random tensors.

A forward that casts, or that writes the product in another way, is F.linear to the rounding of its dtype, with its
gradients, in training and in eval mode and under torch.autocast. A forward that reads more than weight, bias, sizes and
mode may do something else at another time, and is not tried.
"""

import inspect
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_READ = {"weight", "bias", "in_features", "out_features", "training", "forward"}  # attributes that a forward may read
_SIZES, _LEADS = (16, 8), ((5,), (2, 3), (1,))  # features in and out; leading dims of x
_DTYPES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # with the error of results in them
_AUTOCAST = torch.bfloat16


class _Differs(Exception):
    """The difference between a forward and F.linear."""


def differs(module: nn.Linear) -> str:
    """Return what a module's forward does other than F.linear, as a clause; empty if nothing was found."""
    kind: Any = type(module)
    return _tried(kind, module.bias is not None)


@cache
def _tried(kind: Any, has_bias: bool) -> str:
    parameters = list(inspect.signature(kind.forward).parameters.values())[1:]
    if len(parameters) != 1 or parameters[0].kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
        return "takes more than x"
    generator = torch.Generator("cpu").manual_seed(0)
    try:
        # the user's default device and dtype, modes of autograd and autocast are none of the trial's
        with torch.device("cpu"), torch.enable_grad(), torch.autocast("cpu", enabled=False):
            for dtype, bound in _DTYPES.items():
                for lead in _LEADS:
                    for training in (True, False):
                        _try(kind, has_bias, dtype, lead, training, bound, generator)
            with torch.autocast("cpu", _AUTOCAST):
                _try_autocast(kind, has_bias, generator)
    except _Differs as found:
        return str(found)
    except Exception as error:  # it may need what the trial does not have
        return f"raised {type(error).__name__} in a trial"
    return ""


def _try(
    kind: Any, has_bias: bool, dtype: torch.dtype, lead: tuple[int, ...], training: bool, bound: float, generator: Any
) -> None:
    """Compare one call, with its gradients."""
    x, weight, bias, dy = _tensors(lead, has_bias, dtype, generator)
    wanted = F.linear(x, weight, bias)
    y = _call(kind, x, weight, bias, training)
    _compare(y, wanted, bound, "y")
    if y.dtype != dtype:
        raise _Differs(f"returns {y.dtype} for {dtype}")
    leaves = [t for t in (x, weight, bias) if t is not None]
    own, theirs = (torch.autograd.grad(one, leaves, dy, allow_unused=True) for one in (y, wanted))
    for name, a, b in zip(("dx", "dw", "db"), own, theirs, strict=False):
        assert b is not None
        _compare(a, b, bound, name)


def _try_autocast(kind: Any, has_bias: bool, generator: Any) -> None:
    """Compare a call under torch.autocast, whose product is to be rounded as autocast does."""
    x, weight, bias, _ = _tensors((64,), has_bias, torch.float32, generator)
    exact = (x.double() @ weight.double().T + (0 if bias is None else bias.double())).detach()
    y = _call(kind, x, weight, bias, True).detach()
    _compare(y, exact, _DTYPES[_AUTOCAST], "y under autocast")
    if (y.double() - exact).norm() < 1e-5 * exact.norm():
        raise _Differs("computes in float32 under torch.autocast")


def _tensors(lead: tuple[int, ...], has_bias: bool, dtype: torch.dtype, generator: Any) -> tuple[Any, ...]:
    shapes = (*lead, _SIZES[0]), (_SIZES[1], _SIZES[0]), (_SIZES[1],), (*lead, _SIZES[1])
    x, weight, bias, dy = (
        torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(dtype) for shape in shapes
    )
    leaves = (x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_())
    return *leaves[:2], leaves[2] if has_bias else None, dy


def _call(kind: Any, x: Tensor, weight: Tensor, bias: Tensor | None, training: bool) -> Tensor:
    """Run the class's forward on an object that has weight, bias, sizes and mode, and raises for all else."""
    probe = object.__new__(_watched(kind))
    own: dict[str, Any] = {"weight": weight, "bias": bias, "training": training}
    own |= {"in_features": weight.shape[1], "out_features": weight.shape[0]}
    object.__setattr__(probe, "__dict__", own)
    y = probe.forward(x.clone())
    if not isinstance(y, Tensor):
        raise _Differs(f"returns a {type(y).__name__}")
    return y


@cache
def _watched(kind: type) -> Any:
    """Return a class derived from a kind, whose instances raise where more of them is read, or anything is written."""

    def read(self: Any, name: str) -> Any:
        if name in _READ or name.startswith("__") or callable(getattr(kind, name, None)):
            return object.__getattribute__(self, name)
        raise _Differs(f"reads self.{name}")

    def write(self: Any, name: str, value: Any) -> None:
        raise _Differs(f"writes self.{name}")

    return type(kind.__name__, (kind,), {"__getattribute__": read, "__setattr__": write})


def _compare(found: Tensor | None, wanted: Tensor, bound: float, what: str) -> None:
    if found is None or found.shape != wanted.shape:
        raise _Differs(f"makes {what} of another shape")
    error = (found.detach().double() - wanted.detach().double()).norm() / wanted.detach().double().norm()
    if not bool(error <= bound):
        raise _Differs(f"computes another {what}")
