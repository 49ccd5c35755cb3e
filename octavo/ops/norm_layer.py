"""The norm layer: normalises rows (the trailing dims of x), then scales and shifts them (octavo.kernels.norm).

Backward keeps x and the weight, by reference, and for each row rstd and the mean if there is one; for the gradient of
the bias alone it keeps nothing.
"""

import math
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo._torch.operators import unsafe_view
from octavo.errors import check_choice, check_not_negative
from octavo.kernels import norm as kernel
from octavo.kernels.norm import Norm
from octavo.ops.activation_layer import vector as vector
from octavo.quant.proto import TensorProto
from octavo.runtime.contract import DTYPES, ForwardResult, Layer, Tensors, wanted_protos
from octavo.values import Value, register

KINDS = ("layer", "rms", "l2")


@register("norm")
class Config(Value):
    kind: str = "layer"
    eps: float = 1e-5
    zero_centered: bool = False  # the weight is γ - 1
    dims: int = 1  # how many trailing dims of x make a row
    weight_dtype: str = ""  # empty: no weight
    bias_dtype: str = ""
    wants_dx: bool = False
    wants_dw: bool = False
    wants_db: bool = False

    def validate(self) -> None:
        check_choice(self.kind, KINDS, what="norm")
        check_not_negative(self.eps, what="eps")

    @cached_property
    def norm(self) -> Norm:
        return Norm(self.kind, self.eps, self.zero_centered)

    @cached_property
    def keeps(self) -> bool:
        """Whether backward keeps x and the statistics of its rows."""
        return self.wants_dx or self.wants_dw


class Inputs(NamedTuple):
    x: Tensor  # [..., *shape]
    weight: Tensor | None = None  # shape
    bias: Tensor | None = None  # shape


class Intermediates(NamedTuple):
    mean: Any = None  # [rows]
    rstd: Any = None  # [rows]


class Saved(NamedTuple):
    x: Tensor | None
    weight: Tensor | None
    mean: Tensor | None
    rstd: Tensor | None


def matrix(config: Config, x: Tensor) -> Tensor:
    """Return x as [rows, columns]."""
    lead = x.dim() - config.dims
    return x if x.dim() == 2 and lead == 1 else x.reshape(math.prod(x.shape[:lead]), math.prod(x.shape[lead:]))


class NormLayer(Layer):
    """Normalise rows, then scale and shift them."""

    def forward(self, config: Config, inputs: Inputs) -> ForwardResult:
        y, mean, rstd = kernel.forward(
            config.norm, matrix(config, inputs.x), vector(inputs.weight), vector(inputs.bias)
        )
        intermediates = Intermediates(mean, rstd) if config.keeps else Intermediates()
        if inputs.x.dim() != 2 or config.dims != 1:
            y = unsafe_view(y, inputs.x.shape)  # fresh, and no view of anything
        return ForwardResult((y,), (), intermediates)

    def abstract(self, config: Config, inputs: Inputs) -> ForwardResult:
        x: Any = inputs.x
        shape = tuple(x.shape)
        rows = math.prod(shape[: len(shape) - config.dims])
        mean, rstd = (TensorProto((rows,), torch.float32, x.device) for _ in range(2))  # two tensors, not one twice
        intermediates = Intermediates(mean if config.norm.centers else None, rstd) if config.keeps else Intermediates()
        return ForwardResult((TensorProto(shape, x.dtype, x.device),), (), intermediates)

    def wants(self, config: Config) -> tuple[bool, ...]:
        return config.wants_dx, config.wants_dw, config.wants_db

    def save(self, config: Config, inputs: Inputs, made: ForwardResult) -> Tensors:
        weight = inputs.weight if config.wants_dx else None
        return Saved(inputs.x if config.keeps else None, weight, *made.intermediates)

    def abstract_gradients(self, config: Config, saved: Any, dy: Any) -> tuple[TensorProto | None, ...]:
        shape = tuple(dy.shape)
        row = shape[len(shape) - config.dims :]
        own = (shape, dy.dtype), (row, config.weight_dtype), (row, config.bias_dtype)
        return wanted_protos(dy, self.wants(config), *own)

    def backward(self, config: Config, saved: Any, buffers: Any, grads: Tensors, writes: Any = None) -> Tensors:
        return gradients(config, saved, grads[0])


layer = NormLayer(Config, Inputs, intermediates=Intermediates, saved=Saved)


def gradients(config: Config, saved: Tensors, dy: Tensor | None, added: Tensor | None = None) -> Tensors:
    """Return the gradients of the inputs. `added` is another gradient of x: dx is the sum of both, rounded once."""
    if dy is None:
        return (added, *[None] * (len(Inputs._fields) - 1))
    x, weight, mean, rstd = Saved._make(saved)
    wanted = layer.wants(config)
    of_kernel = kernel.backward(
        config.norm,
        matrix(config, dy),
        None if x is None else matrix(config, x),
        kernel.Statistics(mean, rstd),
        vector(weight),
        kernel.Wanted(
            wanted[0],
            DTYPES[config.weight_dtype] if wanted[1] else None,
            DTYPES[config.bias_dtype] if wanted[2] else None,
        ),
        added=None if added is None else matrix(config, added).contiguous(),
    )
    row = dy.shape[dy.dim() - config.dims :]
    shapes = dy.shape, row, row
    return tuple([None if t is None else t.view(own) for t, own in zip(of_kernel, shapes, strict=True)])
