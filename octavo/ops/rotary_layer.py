"""Rows of q, k and v, side by side, as heads, those of q and k rotated by their positions (`octavo.kernels.rotary`).

y is q [B, T, H, D]; k and v [B, T, S, D] are side outputs. v is a view of x if the Linear before has just made x, since
no other tensor shares that memory. Otherwise v is a copy, with the strides that the view would have.
"""

from typing import Any, NamedTuple

from torch import Tensor

from octavo.kernels import rotary
from octavo.quant.proto import TensorProto
from octavo.runtime.contract import ForwardResult, Layer, Tensors
from octavo.values import Value, register


@register("rotary")
class Config(Value):
    heads: int = 1  # of q
    shared: int = 1  # of k and of v
    owns: bool = False  # whether no other tensor shares x's memory, so that v may be a view of it
    wants_dx: bool = False


class Inputs(NamedTuple):
    x: Tensor  # [B, T, (H + 2 S) D]
    own: Tensor  # [T, 1, D]
    other: Tensor  # [T, 1, D]


class Saved(NamedTuple):
    own: Tensor | None
    other: Tensor | None


class RotaryLayer(Layer):
    """Cut rows into heads and rotate them."""

    def outputs(self, config: Config) -> int:
        return 3

    def forward(self, config: Config, inputs: Inputs) -> ForwardResult:
        x, own, other = inputs
        x = x.contiguous()
        q, k = rotary.rotate(x, own, other, config.heads, config.shared)
        v = rotary.rows_of(x, config.heads + 2 * config.shared)[:, :, config.heads + config.shared :]
        if not config.owns:
            v = _proto_of_v(config, x).empty().copy_(v)
        return ForwardResult((q, k, v), (), ())

    def abstract(self, config: Config, inputs: Inputs) -> ForwardResult:
        x: Any = inputs.x
        v = _proto_of_v(config, x)
        q, k = (
            TensorProto((*v.shape[:2], heads, v.shape[3]), x.dtype, x.device) for heads in (config.heads, config.shared)
        )
        return ForwardResult((q, k, v), (), ())

    def save(self, config: Config, inputs: Inputs, made: ForwardResult) -> Tensors:
        return Saved(inputs.own, inputs.other) if config.wants_dx else Saved(None, None)

    def wants(self, config: Config) -> tuple[bool, ...]:
        return config.wants_dx, False, False

    def abstract_gradients(self, config: Config, saved: Any, *grads: Any) -> tuple[TensorProto | None, ...]:
        like = next((g for g in grads if g is not None), None)
        if like is None or not config.wants_dx:
            return None, None, None
        return TensorProto(shape_of_dx(config, like), like.dtype, like.device), None, None

    def backward(self, config: Config, saved: Any, buffers: Any, grads: Tensors, writes: Any = None) -> Tensors:
        parts = complete(config, grads)
        return (None if parts is None else rotary.rotate_back(*parts, *saved)), None, None


layer = RotaryLayer(Config, Inputs, saved=Saved)


def complete(config: Config, grads: Tensors) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return the gradients of q, k and v, zeros where one has none; None if none has one."""
    like = next((g for g in grads if g is not None), None)
    if like is None:
        return None
    batch, length, _, channels = like.shape
    counts = config.heads, config.shared, config.shared
    q, k, v = (
        like.new_zeros(batch, length, count, channels) if g is None else g
        for g, count in zip(grads, counts, strict=True)
    )
    return q, k, v


def shape_of_dx(config: Config, like: Any) -> tuple[int, ...]:
    """Return the shape of dx, from the gradient of q, k or v."""
    return (*like.shape[:2], (config.heads + 2 * config.shared) * like.shape[3])


def _proto_of_v(config: Config, x: Any) -> TensorProto:
    batch, length, width = x.shape
    channels = width // (config.heads + 2 * config.shared)
    return TensorProto(
        (batch, length, config.shared, channels), x.dtype, x.device, (length * width, width, channels, 1)
    )
