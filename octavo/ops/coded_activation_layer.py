"""The elementwise layer, with codes of x kept for backward in the place of x: E4M3, a scale for every 128 elements of a
row. Forward has the bits of `octavo.ops.activation_layer`; backward computes with the decoded x.

No two rows share a scale, so rows that hold anything, NaN too, do not affect the others.
"""

from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.ops import activation_layer
from octavo.ops.activation_layer import ActivationLayer, Inputs, matrix
from octavo.quant.block import Block1D
from octavo.quant.proto import TensorProto
from octavo.runtime.contract import ForwardResult
from octavo.values import register

CODES = Block1D()


@register("coded-activation")
class Config(activation_layer.Config):
    """The settings of `octavo.ops.activation_layer`."""

    @classmethod
    def of(cls, config: activation_layer.Config) -> "Config":
        """Return the config with the settings of another layer's."""
        return cls(**{field.name: getattr(config, field.name) for field in fields(config)})


class Intermediates(NamedTuple):
    x_codes: Any = None  # [M, K]
    x_scale: Any = None  # [M, ceil(K / 128)]


class Saved(NamedTuple):
    x_codes: Tensor | None
    x_scale: Tensor | None
    scales: Tensor | None
    bias: Tensor | None
    seed: Tensor | None


class CodedActivationLayer(ActivationLayer):
    """Apply an elementwise function, and keep codes of x for backward."""

    scales = ("x_scale",)

    def intermediates(self, config: activation_layer.Config, x: Tensor) -> Intermediates:
        if not config.keeps_x:
            return Intermediates()
        q = CODES.quantize(matrix(x))
        return Intermediates(q.codes, q.scale)

    def abstract(self, config: activation_layer.Config, inputs: Inputs) -> ForwardResult:
        made, x = super().abstract(config, inputs), inputs.x
        if not config.keeps_x:
            return made._replace(intermediates=Intermediates())
        q = CODES.proto(TensorProto(activation_layer.shape_of_matrix(tuple(x.shape)), x.dtype, x.device))
        return made._replace(intermediates=Intermediates(q.codes, q.scale))

    def save(self, config: activation_layer.Config, inputs: Inputs, made: ForwardResult) -> Saved:
        _, *rest = super().save(config, inputs, made)
        return Saved(*made.intermediates, *rest)

    def restored(self, config: activation_layer.Config, saved: Any, dtype: torch.dtype) -> activation_layer.Saved:
        codes, scale, *rest = Saved._make(saved)
        if codes is None or scale is None:
            return activation_layer.Saved(None, *rest)
        return activation_layer.Saved(CODES.assemble((codes, scale), tuple(codes.shape), dtype).dequantize(), *rest)


layer = CodedActivationLayer(Config, Inputs, intermediates=Intermediates, saved=Saved)
