"""The activation of another package's experts, found by what it computes."""

from typing import Any

import torch

from octavo.fusion.blocks import KINDS
from octavo.ops.activation import Activation

GATED = ("swiglu", "geglu", "reglu", "sreglu", "qgeglu")
UNGATED = ("silu", "gelu", "relu", "srelu", "qgelu")
_GATE = "_apply_gate"  # the method of gated experts that activates the output of the first layer
_LIMITS, _SLOPES = ("limit", "swiglu_limit"), ("alpha", "swiglu_alpha")  # attributes of experts that clamp


def activation_of(module: Any) -> Activation | None:
    """Return the activation that computes what the module's own does; None if there is none. The module's own is
    called on numbers up to 1000 in magnitude, which also reach clamps."""
    numbers: Any = {"device": "cpu", "dtype": torch.float32}
    with torch.no_grad(), torch.device("cpu"):  # the module's own code may make tensors on the default device
        extremes = torch.tensor([-1000.0, -100.0, 40.0, 200.0, 1000.0], **numbers)
        x = torch.cat([torch.linspace(-12, 12, 97, **numbers), extremes])
        up = torch.ones(1, **numbers)
        if module.has_gate:
            up = torch.tensor([-500.0, -0.7, 1.3, 30.0], **numbers).repeat_interleave(len(x))
            x = torch.cat([x.repeat(4), up])
        try:
            wanted = getattr(module, _GATE if module.has_gate else "act_fn")(x[None])
        except Exception:  # it may need tensors elsewhere
            return None
        bound = 1e-5 * (wanted.abs() + up.abs())
        return next((one for one in _candidates(module) if bool(((one(x[None]) - wanted).abs() <= bound).all())), None)


def _candidates(module: Any) -> list[Activation]:
    """Return the activations that a module may have."""
    found: list[Activation] = [KINDS[name]() for name in (GATED if module.has_gate else UNGATED)]
    if module.has_gate:
        limit, alpha = (_first_number(module, names) for names in (_LIMITS, _SLOPES))
        if limit is not None and limit > 0:
            kind = KINDS["clamped-swiglu"]
            found.append(kind(limit=limit, alpha=1.0, glu_linear_offset=0.0))
            if alpha is not None:
                found.append(kind(limit=limit, alpha=alpha, glu_linear_offset=1.0))
    return found


def _first_number(module: Any, names: tuple[str, ...]) -> float | None:
    values = (getattr(module, name, None) for name in names)
    return next((float(value) for value in values if isinstance(value, (int, float))), None)
