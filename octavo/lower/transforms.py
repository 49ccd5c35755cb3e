"""Transformations of functions that layers refuse: torch.func's, forward-mode AD, batches of gradients."""

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from octavo.errors import UnsupportedConfig

functorch: Any = torch._C._functorch
is_batched = functorch.is_legacy_batchedtensor  # whether a gradient is several


def refuse_transform(what: str, more: str = "") -> NoReturn:
    raise UnsupportedConfig(
        f"Octavo's layers are differentiated by backward, once, and run here under {what}. Use loss.backward() or "
        "torch.autograd.grad with parameters as they are (torch.func.functional_call works), or run these layers in "
        f"plain torch: octavo.revert(model).{more if 'vmap' in what else ''}"
    )


def refuse_active(error: RuntimeError) -> None:
    """Refuse the torch.func transforms that a call failed in; nothing, if it was in none."""
    if found := _active():
        refuse_transform(f"torch.func ({', '.join(found)})", " Leading dims of x are rows: no vmap is needed for them.")


def refuse_tangents() -> NoReturn:
    """The `jvp` of an autograd function."""
    refuse_transform("forward-mode AD (torch.autograd.forward_ad, torch.func.jvp)")


def check_transforms(tensors: Any) -> None:
    """Refuse what would lose derivatives without a word, where autograd has no part in a call. vmap alone goes on: its
    rules for torch's operators hold, or raise."""
    if torch._C._are_functorch_transforms_active() and (found := [name for name in _active() if name != "vmap"]):
        refuse_transform(f"torch.func ({', '.join(found)})")
    if forward_ad._current_level >= 0:
        flat = [t for entry in tensors for t in (entry if isinstance(entry, tuple) else (entry,))]
        if any([isinstance(t, Tensor) and forward_ad.unpack_dual(t)[1] is not None for t in flat]):  # type: ignore[no-untyped-call]
            refuse_tangents()


def refuse_batched() -> NoReturn:
    refuse_transform("vmap over gradients (is_grads_batched=True, jacobian(vectorize=True))")


def _active() -> list[str]:
    """Names of torch.func's transforms, the innermost last."""
    return [t.key().name.lower() for t in functorch.get_interpreter_stack() or ()]
