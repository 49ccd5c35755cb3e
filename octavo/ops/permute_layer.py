"""Tokens copied to the rows of their assignments. dx is the sum of the gradients of these rows; no other row is
read."""

import math
from typing import Any, NamedTuple

from torch import Tensor

from octavo._torch.operators import unsafe_view
from octavo.errors import check_choice
from octavo.kernels import permute
from octavo.kernels.permute import Assignments
from octavo.ops.activation_layer import matrix
from octavo.quant.proto import TensorProto
from octavo.runtime.contract import ForwardResult, Layer, Tensors
from octavo.values import Value, register


@register("permute")
class Config(Value):
    tail: str = "zero"  # rows after the last expert; or "untouched": whatever is there
    wants_dx: bool = False
    keeps_x: bool = False  # for a fused backward that reads x again

    def validate(self) -> None:
        check_choice(self.tail, ("zero", "untouched"), what="tail")


class Inputs(NamedTuple):
    x: Tensor  # [..., D]
    positions: Tensor  # [..., K]
    assignments: Tensor  # [rows]


class Saved(NamedTuple):
    positions: Tensor | None
    x: Tensor | None


def flat(positions: Tensor) -> Tensor:
    """Reshape [..., K] to [T, K]."""
    return positions.view(math.prod(positions.shape[:-1]), positions.shape[-1])


class PermuteLayer(Layer):
    """Copy each token to the rows of its assignments."""

    def forward(self, config: Config, inputs: Inputs) -> ForwardResult:
        x, positions, assignments = inputs
        rows = permute.scatter(matrix(x), flat(positions), assignments, config.tail == "zero")
        return ForwardResult((rows,), (), ())

    def abstract(self, config: Config, inputs: Inputs) -> ForwardResult:
        x: Any = inputs.x
        rows = TensorProto((inputs.assignments.shape[0], x.shape[-1]), x.dtype, x.device)
        return ForwardResult((rows,), (), ())

    def save(self, config: Config, inputs: Inputs, made: ForwardResult) -> Tensors:
        return Saved(inputs.positions if config.wants_dx else None, inputs.x if config.keeps_x else None)

    def wants(self, config: Config) -> tuple[bool, ...]:
        return config.wants_dx, False, False

    def abstract_gradients(self, config: Config, saved: Any, dy: Any) -> tuple[TensorProto | None, ...]:
        if not config.wants_dx:
            return None, None, None
        return TensorProto((*saved[0].shape[:-1], dy.shape[1]), dy.dtype, dy.device), None, None

    def backward(self, config: Config, saved: Any, buffers: Any, grads: Tensors, writes: Any = None) -> Tensors:
        dy, (positions, _) = grads[0], Saved._make(saved)
        if dy is None or positions is None:
            return None, None, None
        dx = permute.combine(dy, Assignments(flat(positions)), None)
        return unsafe_view(dx, (*positions.shape[:-1], dx.shape[1])), None, None


layer = PermuteLayer(Config, Inputs, saved=Saved)
