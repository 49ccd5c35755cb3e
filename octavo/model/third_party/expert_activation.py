"""The activation of another package's experts: Octavo's that computes the same, or the module's own code."""

import weakref
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from octavo.fusion.blocks import KINDS
from octavo.model.third_party.known_experts import Known
from octavo.model.third_party.owned import Owned
from octavo.ops.activation import Activation

GATED = ("swiglu", "geglu", "reglu", "sreglu", "qgeglu")
UNGATED = ("silu", "gelu", "relu", "srelu", "qgelu")
_GATE = "_apply_gate"  # the method of gated experts that activates the output of the first layer
_LIMITS, _SLOPES = ("limit", "swiglu_limit"), ("alpha", "swiglu_alpha")  # attributes of experts that clamp


class OwnActivation(Owned, nn.Module):
    """The activation of the experts around it, by their own code.

    Args:
        owner: the experts.
        known: their kind.
    """

    def __init__(self, owner: nn.Module, known: Known) -> None:
        super().__init__()
        self._owner, self._known = weakref.ref(owner), known

    def forward(self, h: Tensor) -> Tensor:
        """Return the activated values."""
        return own(self._owner(), self._known)(h)


def own(module: Any, known: Known) -> Callable[[Tensor], Tensor]:
    """Return the function that activates the output of the module's first layer, or of its gate if that is alone."""
    if not isinstance(known.activation, str):
        function = known.activation
        return lambda h: function(module, h)
    if known.gated and known.is_joined and hasattr(module, _GATE):
        return getattr(module, _GATE)
    activate = attrgetter(known.activation)(module)
    if not (known.gated and known.is_joined):
        return activate

    def gated(h: Tensor) -> Tensor:
        gate, up = (h[..., ::2], h[..., 1::2]) if known.alternates else h.chunk(2, dim=-1)
        return activate(gate) * up

    return gated


def activation_of(module: Any, known: Known) -> nn.Module:
    """Return Octavo's activation that computes what the module's own does; if there is none, the module's own. It is
    called on numbers up to 1000 in magnitude, which also reach clamps."""
    numbers: Any = {"device": "cpu", "dtype": torch.float32}
    with torch.no_grad(), torch.device("cpu"):  # the module's own code may make tensors on the default device
        extremes = torch.tensor([-1000.0, -100.0, 40.0, 200.0, 1000.0], **numbers)
        x = torch.cat([torch.linspace(-12, 12, 97, **numbers), extremes])
        up = torch.ones(1, **numbers)
        if known.gated:
            up = torch.tensor([-500.0, -0.7, 1.3, 30.0], **numbers).repeat_interleave(len(x))
            x = x.repeat(4)
            x = torch.stack([x, up], dim=-1).flatten() if known.alternates else torch.cat([x, up])
        try:
            wanted = own(module, known)(x[None])
        except Exception:  # it may need tensors elsewhere
            return OwnActivation(module, known)
        bound = 1e-5 * (wanted.abs() + up.abs())
        fits = (one for one in _candidates(module, known) if bool(((one(x[None]) - wanted).abs() <= bound).all()))
        return next(fits, OwnActivation(module, known))


def _candidates(module: Any, known: Known) -> list[Activation]:
    """Return the activations that a module may have."""
    found: list[Activation] = [KINDS[name]() for name in (GATED if known.gated else UNGATED)]
    if known.gated:
        limit, alpha = (_first_number(module, names) for names in (_LIMITS, _SLOPES))
        if limit is not None and 0 < limit < float("inf"):
            kind = KINDS["clamped-swiglu"]
            found.append(kind(limit=limit, alpha=1.0, glu_linear_offset=0.0))
            found.append(kind(limit=limit, alpha=1.702 if alpha is None else alpha, glu_linear_offset=1.0))
    for one in found if known.alternates else ():
        one.glu_interleave_size = 1
    return found


def _first_number(module: Any, names: tuple[str, ...]) -> float | None:
    values = (getattr(module, name, None) for name in names)
    return next((float(value) for value in values if isinstance(value, (int, float))), None)
