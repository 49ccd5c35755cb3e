"""The rounding layer: casts x to codes, or rounds its gradient. y is a gradient anchor, one element that looks like x
and carries the gradient, and the codes are auxiliary outputs; the caller joins the two (`octavo.quant.qtensor`)."""

from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor

from octavo.quant.proto import TensorProto
from octavo.quant.quantizer import Quantizer
from octavo.runtime.contract import ForwardResult, Layer, Tensors
from octavo.values import Value, register


@register("rounding")
class Config(Value):
    spec: Quantizer | None = None  # of x
    back: Quantizer | None = None  # of dy, which comes out as values again
    wants_dx: bool = False

    @cached_property
    def parts(self) -> int:
        """The number of tensors of x's codes."""
        return 0 if self.spec is None else 3 if self.spec.two_level else 2


class Inputs(NamedTuple):
    x: Tensor
    seed: Tensor | None = None  # [2] int64, where dy is rounded stochastically


class Saved(NamedTuple):
    seed: Tensor | None


class RoundingLayer(Layer):
    """Cast x to codes, or round its gradient."""

    def auxiliary(self, config: Config) -> int:
        return config.parts

    def decided_by_layout(self, config: Config, side: str) -> bool:
        return all(spec is None or spec.shipped for spec in (config.spec, config.back))

    def gradient_aliases(self, config: Config) -> dict[int, int]:
        return {0: -1} if config.back is None and config.wants_dx else {}

    def forward(self, config: Config, inputs: Inputs) -> ForwardResult:
        x = inputs.x
        parts = () if config.spec is None else tuple(config.spec.quantize(x.detach()).tensors())
        return ForwardResult((x.new_zeros(1).expand(x.shape),), parts, ())

    def abstract(self, config: Config, inputs: Inputs) -> ForwardResult:
        x: Any = inputs.x
        anchor = TensorProto(tuple(x.shape), x.dtype, x.device, (0,) * len(x.shape))
        parts: tuple[TensorProto, ...] = ()
        if config.spec is not None:
            q = config.spec.proto(x)
            parts = tuple(p for p in (q.codes, q.scale, q.global_scale) if p is not None)
        return ForwardResult((anchor,), parts, ())

    def wants(self, config: Config) -> tuple[bool, ...]:
        return config.wants_dx, False

    def save(self, config: Config, inputs: Inputs, made: ForwardResult) -> Tensors:
        return Saved(inputs.seed if config.wants_dx else None)

    def abstract_gradients(self, config: Config, saved: Any, dy: Any) -> tuple[TensorProto | None, ...]:
        return (TensorProto(tuple(dy.shape), dy.dtype, dy.device) if config.wants_dx else None), None

    def backward(self, config: Config, saved: Any, buffers: Any, grads: Tensors, writes: Any = None) -> Tensors:
        dy = grads[0]
        if dy is None or config.back is None:
            return dy, None
        return config.back.quantize(dy.contiguous(), seed=Saved._make(saved).seed).dequantize(dy.dtype), None


layer = RoundingLayer(Config, Inputs, saved=Saved)
