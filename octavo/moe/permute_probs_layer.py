"""The probability of each row's assignment; zero for rows without an assignment, which backward does not read."""

from typing import Any, NamedTuple

from torch import Tensor

from octavo._torch.operators import unsafe_view
from octavo.kernels import permute
from octavo.ops.activation_layer import matrix
from octavo.ops.unpermute_layer import assignments_of
from octavo.quant.proto import TensorProto
from octavo.runtime.contract import ForwardResult, Layer, Tensors
from octavo.values import Value, register


@register("permute-probs")
class Config(Value):
    wants_dprobs: bool = False


class Inputs(NamedTuple):
    probs: Tensor  # [..., K], or with experts [..., E]
    positions: Tensor  # [..., K]
    assignments: Tensor  # [rows]
    experts: Tensor | None = None  # [..., K]


class Saved(NamedTuple):
    probs: Tensor | None  # for its shape alone
    positions: Tensor | None
    experts: Tensor | None


class PermuteProbsLayer(Layer):
    """Return the probability of each row."""

    def forward(self, config: Config, inputs: Inputs) -> ForwardResult:
        return ForwardResult((permute.take(matrix(inputs.probs), assignments_of(inputs), inputs.assignments),), (), ())

    def abstract(self, config: Config, inputs: Inputs) -> ForwardResult:
        probs: Any = inputs.probs
        return ForwardResult((TensorProto((inputs.assignments.shape[0],), probs.dtype, probs.device),), (), ())

    def save(self, config: Config, inputs: Inputs, made: ForwardResult) -> Tensors:
        if not config.wants_dprobs:
            return Saved(None, None, None)
        return Saved(inputs.probs, inputs.positions, inputs.experts)

    def wants(self, config: Config) -> tuple[bool, ...]:
        return config.wants_dprobs, False, False, False

    def abstract_gradients(self, config: Config, saved: Any, grad: Any) -> tuple[TensorProto | None, ...]:
        if not config.wants_dprobs:
            return None, None, None, None
        return TensorProto(tuple(saved[0].shape), grad.dtype, grad.device), None, None, None

    def backward(self, config: Config, saved: Any, buffers: Any, grads: Tensors, writes: Any = None) -> Tensors:
        grad, kept = grads[0], Saved._make(saved)
        if grad is None or kept.probs is None:
            return None, None, None, None
        assignments = assignments_of(kept)
        dprobs = permute.take_backward(grad, assignments, (assignments.positions.shape[0], kept.probs.shape[-1]))
        return unsafe_view(dprobs, tuple(kept.probs.shape)), None, None, None


layer = PermuteProbsLayer(Config, Inputs, saved=Saved)
