"""The hooks of torch's optimizers."""

from typing import Any

from torch.optim import Optimizer


def runs_hooks(optimizer: Any) -> bool:
    """Whether torch's constructor has run for this very object, and wrapped the `step` that it has. Wrappers may have
    an optimizer's class, or its attributes, with a `step` of their own."""
    if not isinstance(optimizer, Optimizer) or "_optimizer_step_post_hooks" not in vars(optimizer):
        return False
    return bool(getattr(type(optimizer).step, "hooked", False))
