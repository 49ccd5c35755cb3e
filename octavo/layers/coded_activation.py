"""The elementwise layer, with codes of x kept for backward in the place of x: E4M3, a scale for every 128 elements of a
row. Forward has the bits of `octavo.layers.activation`; backward computes with the decoded x.

No two rows share a scale, so rows that hold anything, NaN too, do not affect the others.
"""

from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.layers import activation
from octavo.layers.activation import ActivationLayer, Inputs, matrix
from octavo.layers.contract import ForwardResult
from octavo.quant.block import Block1D
from octavo.quant.proto import TensorProto
from octavo.values import register

CODES = Block1D()


@register("coded-activation")
class Config(activation.Config):
    """The settings of `octavo.layers.activation`."""

    @classmethod
    def of(cls, config: activation.Config) -> "Config":
        """The config with the settings of another layer's."""
        return cls(**{field.name: getattr(config, field.name) for field in fields(config)})


class Fresh(NamedTuple):
    x_codes: Any = None  # [M, K]
    x_scale: Any = None  # [M, ceil(K / 128)]


class Saved(NamedTuple):
    x_codes: Tensor | None
    x_scale: Tensor | None
    scales: Tensor | None
    bias: Tensor | None
    seed: Tensor | None


class CodedActivationLayer(ActivationLayer):
    """Applies an elementwise function, and keeps codes of x for backward."""

    scales = ("x_scale",)

    def fresh(self, config: activation.Config, x: Tensor) -> Fresh:
        if not config.keeps_x:
            return Fresh()
        q = CODES.quantize(matrix(x))
        return Fresh(q.codes, q.scale)

    def abstract(self, config: activation.Config, inputs: Inputs) -> ForwardResult:
        made, x = super().abstract(config, inputs), inputs.x
        if not config.keeps_x:
            return made._replace(fresh=Fresh())
        q = CODES.proto(TensorProto(activation.shape_of_matrix(tuple(x.shape)), x.dtype, x.device))
        return made._replace(fresh=Fresh(q.codes, q.scale))

    def save(self, config: activation.Config, inputs: Inputs, made: ForwardResult) -> Saved:
        _, *rest = super().save(config, inputs, made)
        return Saved(*made.fresh, *rest)

    def restored(self, config: activation.Config, saved: Any, dtype: torch.dtype) -> activation.Saved:
        codes, scale, *rest = Saved._make(saved)
        if codes is None or scale is None:
            return activation.Saved(None, *rest)
        return activation.Saved(CODES.assemble((codes, scale), tuple(codes.shape), dtype).dequantize(), *rest)


layer = CodedActivationLayer(Config, Inputs, fresh=Fresh, saved=Saved)
