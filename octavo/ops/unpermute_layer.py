"""The rows of each token's assignments, summed, each multiplied by its probability if there are any.

    y[t] = Σ_k p[t, k] · rows[position of (t, k)]

The sum runs in the order of the assignments, in float32, and is rounded once. Backward returns p · dy in each
assignment's row, and ⟨dy, row⟩ as the gradient of its probability; an assignment without a row has the gradient zero,
and adds nothing to y.
"""

from typing import Any, NamedTuple

from torch import Tensor

from octavo._torch.operators import unsafe_view
from octavo.errors import check_choice
from octavo.kernels import permute
from octavo.kernels.permute import Assignments
from octavo.ops.activation_layer import matrix
from octavo.ops.permute_layer import flat
from octavo.quant.proto import TensorProto
from octavo.runtime.contract import ForwardResult, Layer, Tensors, wanted_protos
from octavo.values import Value, register


@register("unpermute")
class Config(Value):
    tail: str = "zero"  # gradients of rows after the last expert; or "untouched": whatever is there
    wants_dx: bool = False
    wants_dprobs: bool = False
    keeps_rows: bool = True  # for the gradient of the probabilities, unless a fused backward has it otherwise

    def validate(self) -> None:
        check_choice(self.tail, ("zero", "untouched"), what="tail")


class Inputs(NamedTuple):
    x: Tensor  # [rows, D]
    positions: Tensor  # [..., K]
    assignments: Tensor  # [rows]
    probs: Tensor | None = None  # [..., K], or with experts [..., E]
    experts: Tensor | None = None  # [..., K]


class Saved(NamedTuple):
    rows: Tensor | None
    positions: Tensor | None
    assignments: Tensor | None
    probs: Tensor | None
    experts: Tensor | None


class UnpermuteLayer(Layer):
    """Sum the rows of each token's assignments."""

    def forward(self, config: Config, inputs: Inputs) -> ForwardResult:
        y = permute.combine(inputs.x, assignments_of(inputs), _matrix(inputs.probs))
        return ForwardResult((unsafe_view(y, (*inputs.positions.shape[:-1], y.shape[1])),), (), ())

    def abstract(self, config: Config, inputs: Inputs) -> ForwardResult:
        rows: Any = inputs.x
        y = TensorProto((*inputs.positions.shape[:-1], rows.shape[1]), rows.dtype, rows.device)
        return ForwardResult((y,), (), ())

    def save(self, config: Config, inputs: Inputs, made: ForwardResult) -> Tensors:
        if not (config.wants_dx or config.wants_dprobs):
            return Saved(None, None, None, None, None)
        rows = inputs.x if config.wants_dprobs and config.keeps_rows else None
        return Saved(rows, inputs.positions, inputs.assignments, inputs.probs, inputs.experts)

    def wants(self, config: Config) -> tuple[bool, ...]:
        return config.wants_dx, False, False, config.wants_dprobs, False

    def abstract_gradients(self, config: Config, saved: Any, dy: Any) -> tuple[TensorProto | None, ...]:
        _, _, assignments, probs, _ = saved
        if assignments is None:
            return (None,) * len(Inputs._fields)
        rows, none = ((assignments.shape[0], dy.shape[-1]), dy.dtype), ((), None)
        own = none if probs is None else (tuple(probs.shape), probs.dtype)
        return wanted_protos(dy, self.wants(config), rows, none, none, own)

    def backward(self, config: Config, saved: Any, buffers: Any, grads: Tensors, writes: Any = None) -> Tensors:
        dy, kept = grads[0], Saved._make(saved)
        if dy is None or kept.assignments is None:
            return (None,) * len(Inputs._fields)
        drows, dprobs = permute.combine_backward(
            matrix(dy), kept.rows, assignments_of(kept), kept.assignments, _matrix(kept.probs), config.tail == "zero",
            config.wants_dx,
        )  # fmt: skip
        if dprobs is not None and kept.probs is not None:
            dprobs = unsafe_view(dprobs, tuple(kept.probs.shape))
        return drows, None, None, dprobs, None


layer = UnpermuteLayer(Config, Inputs, saved=Saved)


def assignments_of(tensors: Any) -> Assignments:
    """Return the kernels' assignments, from a tuple with positions and experts."""
    return Assignments(flat(tensors.positions), None if tensors.experts is None else flat(tensors.experts))


def _matrix(probs: Tensor | None) -> Tensor | None:
    return None if probs is None else matrix(probs)
