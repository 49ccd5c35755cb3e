"""A fork inside a chain (`octavo.runtime.chain`) returns x, and x as a side output. dx is the sum of both gradients.

A node returns no alias of its inputs. The side output of a fork that is a chain's first stage is therefore a
gradient anchor, one element that looks like x and carries its gradient, which the caller joins to x
(`octavo.quant.qtensor.Join`).
"""

from typing import Any, NamedTuple

from torch import Tensor

from octavo.quant.proto import TensorProto
from octavo.runtime.contract import ForwardResult, Layer, Tensors
from octavo.values import Value, register


@register("fork")
class Config(Value):
    leads: bool = False  # it is the first stage: x is an input of the chain
    wants_dx: bool = False


class Inputs(NamedTuple):
    x: Tensor


class ForkLayer(Layer):
    """Return x twice."""

    forks = True

    def outputs(self, config: Config) -> int:
        return 2

    def forward(self, config: Config, inputs: Inputs) -> ForwardResult:
        x = inputs.x
        return ForwardResult((x, x.new_zeros(1).expand(x.shape) if config.leads else x), (), ())

    def abstract(self, config: Config, inputs: Inputs) -> ForwardResult:
        x: Any = inputs.x
        anchor = TensorProto(tuple(x.shape), x.dtype, x.device, (0,) * len(x.shape))
        return ForwardResult((x, anchor if config.leads else x), (), ())

    def wants(self, config: Config) -> tuple[bool, ...]:
        return (config.wants_dx,)

    def abstract_gradients(self, config: Config, saved: Any, *grads: Any) -> tuple[TensorProto | None, ...]:
        like = next((g for g in grads if g is not None), None)
        return (
            TensorProto(tuple(like.shape), like.dtype, like.device) if like is not None and config.wants_dx else None,
        )

    def backward(self, config: Config, saved: Any, buffers: Any, grads: Tensors, writes: Any = None) -> Tensors:
        dy, extra = grads
        return (dy if extra is None else extra if dy is None else dy + extra,)


layer = ForkLayer(Config, Inputs)
