"""Refuse the transforms that layers do not support: torch.func's, forward-mode AD, batches of gradients."""

from typing import Any, NoReturn

from torch import Tensor
from torch.autograd import forward_ad

from octavo._torch.dispatcher import has_transforms, transforms
from octavo.errors import UnsupportedConfig

FORWARD_MODE = "forward-mode AD (torch.autograd.forward_ad, torch.func.jvp)"
BATCHED = "vmap over gradients (is_grads_batched=True, jacobian(vectorize=True))"


def refuse_tangents() -> NoReturn:
    """Refuse forward-mode AD, as the `jvp` of an autograd function."""
    raise UnsupportedConfig(_sentence(FORWARD_MODE))


def refuse_batched() -> NoReturn:
    raise UnsupportedConfig(_sentence(BATCHED))


def refuse_active(error: RuntimeError) -> None:
    """Refuse the torch.func transforms that a call failed in; return if none is active."""
    if why := why_active():
        raise UnsupportedConfig(why) from error


def check_transforms(tensors: Any) -> None:
    """Refuse transforms that would silently lose derivatives, in a call without autograd. vmap alone is allowed: its
    rules for torch's operators hold, or raise."""
    if has_transforms() and set(_active()) != {"vmap"}:
        raise UnsupportedConfig(why_active())
    if forward_ad._current_level >= 0:
        flat = [t for entry in tensors for t in (entry if isinstance(entry, tuple) else (entry,))]
        if any([isinstance(t, Tensor) and forward_ad.unpack_dual(t)[1] is not None for t in flat]):  # type: ignore[no-untyped-call]
            refuse_tangents()


def why_active() -> str:
    """Return the reason why a layer does not run in the active torch.func transforms; empty if none is active."""
    found = _active()
    rows = " Leading dims of x are rows, and need no vmap." if "vmap" in found else ""
    return _sentence(f"torch.func ({', '.join(found)})") + rows if found else ""


def _sentence(what: str) -> str:
    return (
        f"Octavo's layers are differentiated by backward, once, and run here under {what}. Use loss.backward() or "
        "torch.autograd.grad, with torch.func.functional_call for other parameters, or run these layers in plain "
        "torch: octavo.revert(model)."
    )


def _active() -> list[str]:
    """Return names of torch.func's transforms, the innermost last."""
    return [transform.key().name.lower() for transform in transforms() or ()]
