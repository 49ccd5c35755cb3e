"""x + extra, of one shape, added in the wider of their dtypes and rounded to x's. Both gradients are dy itself."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.quant.proto import TensorProto
from octavo.runtime.contract import DTYPES, ForwardResult, Layer, Tensors, wanted_protos
from octavo.values import Value, register


@register("add")
class Config(Value):
    dtype: str = "float32"  # of x and y
    extra_dtype: str = "float32"
    wants_dx: bool = False
    wants_dextra: bool = False


class Inputs(NamedTuple):
    x: Tensor
    extra: Tensor


def same(config: Config) -> bool:
    """Return whether the extra's gradient is dy without a cast."""
    return config.dtype == config.extra_dtype


class AddLayer(Layer):
    """Compute x + extra."""

    def gradient_aliases(self, config: Config) -> dict[int, int]:
        wanted = (0 if config.wants_dx else None, 1 if config.wants_dextra and same(config) else None)
        return {i: -1 for i in wanted if i is not None}

    def forward(self, config: Config, inputs: Inputs) -> ForwardResult:
        x = inputs.x
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)  # contiguous, however x and extra lie in memory
        return ForwardResult((torch.add(x, inputs.extra, out=y),), (), ())

    def abstract(self, config: Config, inputs: Inputs) -> ForwardResult:
        x: Any = inputs.x
        return ForwardResult((TensorProto(tuple(x.shape), x.dtype, x.device),), (), ())

    def wants(self, config: Config) -> tuple[bool, ...]:
        return config.wants_dx, config.wants_dextra

    def abstract_gradients(self, config: Config, saved: Any, dy: Any) -> tuple[TensorProto | None, ...]:
        shape = tuple(dy.shape)
        return wanted_protos(dy, self.wants(config), (shape, dy.dtype), (shape, config.extra_dtype))

    def backward(self, config: Config, saved: Any, buffers: Any, grads: Tensors, writes: Any = None) -> Tensors:
        dy = grads[0]
        if dy is None:
            return None, None
        x, extra = self.wants(config)
        return (dy if x else None), (dy.to(DTYPES[config.extra_dtype]) if extra else None)


layer = AddLayer(Config, Inputs)
