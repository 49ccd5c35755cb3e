"""What torch's optimizers are asked and told, for all of them: hooks that fire around every step."""

from functools import cache
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from octavo.errors import UnsupportedConfig
from octavo.modules.held import HeldWeight


@cache
def refuse_updates() -> None:
    """Optimizers raise before they write to a weight held as codes: most updates would be rounded away."""

    def check(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if isinstance(p, HeldWeight) and p.grad is not None:
                    raise UnsupportedConfig(
                        f"A weight of {tuple(p.shape)} is held as codes (octavo.quantize_weights), which an optimizer "
                        "cannot update. Leave it out of the optimizer, or octavo.revert(model) and train the weight."
                    )

    register_optimizer_step_pre_hook(check)
