"""The backward of a fork (MakeExtraOutput) with that of what follows it: the gradient that came the other way is added
to dx in place.

    linear-add     dx = dy · w + dextra
    add-rmsnorm    dx = the norm's + dextra
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from octavo.fuser.pattern import Rule
from octavo.layers import linear, norm
from octavo.modules.linear import Linear
from octavo.modules.norm import RMSNorm
from octavo.modules.views import MakeExtraOutput

Grads = tuple[Tensor | None, ...]


class Summed:
    """The backward of a layer after a fork."""

    forward = None

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def backward(
        self, configs: Sequence[Any], saved: Sequence[Grads], buffers: Sequence[Any], grads: Sequence[Grads]
    ) -> list[Grads]:
        found = self.layer.backward(configs[1], saved[1], buffers[1], grads[1])
        return [_summed(found[0], grads[0][1]), (None, *found[1:])]


def _summed(dx: Tensor | None, extra: Tensor | None) -> Grads:
    """dx is fresh, so that the sum may take its place."""
    if dx is None or extra is None:
        return (extra if dx is None else dx,)
    return (dx.add_(extra),)


FUSED = {"linear-add": Summed(linear), "add-rmsnorm": Summed(norm)}
RULES = (
    Rule("linear-add", (MakeExtraOutput, Linear), "linear-add"),
    Rule("add-rmsnorm", (MakeExtraOutput, RMSNorm), "add-rmsnorm"),
)
SIDE = "backward"
