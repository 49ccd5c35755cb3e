"""The probability of each row's slot; zero for rows without a slot, which backward does not read."""

from typing import Any, NamedTuple

from torch import Tensor

from octavo._torch.operators import unsafe_view
from octavo.kernels import permute
from octavo.layers.activation import matrix
from octavo.layers.contract import ForwardResult, Layer, Tensors
from octavo.layers.unpermute import slots_of
from octavo.quant.proto import TensorProto
from octavo.values import Value, register


@register("permute-probs")
class Config(Value):
    grads: str = ""  # "p" if the gradient is wanted


class Inputs(NamedTuple):
    probs: Tensor  # [..., K], or with experts [..., E]
    positions: Tensor  # [..., K]
    slots: Tensor  # [rows]
    experts: Tensor | None = None  # [..., K]


class Saved(NamedTuple):
    probs: Tensor | None  # for its shape alone
    positions: Tensor | None
    experts: Tensor | None


class PermuteProbsLayer(Layer):
    """Returns the probability of each row."""

    def forward(self, config: Config, inputs: Inputs) -> ForwardResult:
        return ForwardResult((permute.take(matrix(inputs.probs), slots_of(inputs), inputs.slots),), (), ())

    def abstract(self, config: Config, inputs: Inputs) -> ForwardResult:
        probs: Any = inputs.probs
        return ForwardResult((TensorProto((inputs.slots.shape[0],), probs.dtype, probs.device),), (), ())

    def save(self, config: Config, inputs: Inputs, made: ForwardResult) -> Tensors:
        if not config.grads:
            return Saved(None, None, None)
        return Saved(inputs.probs, inputs.positions, inputs.experts)

    def wants(self, config: Config) -> tuple[bool, ...]:
        return "p" in config.grads, False, False, False

    def abstract_gradients(self, config: Config, saved: Any, grad: Any) -> tuple[TensorProto | None, ...]:
        if not config.grads:
            return None, None, None, None
        return TensorProto(tuple(saved[0].shape), grad.dtype, grad.device), None, None, None

    def backward(self, config: Config, saved: Any, buffers: Any, grads: Tensors, writes: Any = None) -> Tensors:
        grad, kept = grads[0], Saved._make(saved)
        if grad is None or kept.probs is None:
            return None, None, None, None
        slots = slots_of(kept)
        dprobs = permute.take_backward(grad, slots, (slots.positions.shape[0], kept.probs.shape[-1]))
        return unsafe_view(dprobs, tuple(kept.probs.shape)), None, None, None


layer = PermuteProbsLayer(Config, Inputs, saved=Saved)
