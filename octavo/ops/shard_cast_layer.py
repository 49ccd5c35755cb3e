"""The cast of a rank's own tokens, before their codes are gathered: x by row, and where dw needs it by column. Codes
are auxiliary outputs, y is an empty tensor, and there is no gradient: the caller's collective has it.

The scale of a whole tensor follows from all-reduced amaxes, or from a delayed inverse scale. The scales of
columns (fp8-rowwise), one for all tokens of a feature, are agreed on in the same way: `columns` has their amaxes.

An amax that is observed is the last auxiliary output: the caller raises the running amaxes of all layers that share the
codes.
"""

from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.communication.all_reduced_amaxes import all_reduced_cast, number_of
from octavo.ops.operands import DENSE
from octavo.quant.casts import quantize_pair
from octavo.quant.orientation import column_axis
from octavo.quant.proto import TensorProto
from octavo.quant.quantizer import CastArgs, Quantizer, QuantizerPair
from octavo.recipes import BF16, Recipe
from octavo.runtime.contract import ForwardResult, Layer
from octavo.scaling.delayed_scaling import X, cast_args, part_of
from octavo.values import Value, register


@register("shard-cast")
class Config(Value):
    recipe: Recipe = BF16()
    has_columns: bool = False  # whether x's column codes are made too
    observe: bool = False  # delayed: the amax of x is returned
    measures_x: bool = False  # delayed: until a step has seen an amax of x

    @cached_property
    def pair(self) -> QuantizerPair:
        quant = self.recipe.linear()
        return quant.fprop.left, quant.wgrad.right if self.has_columns else None

    @cached_property
    def specs(self) -> list[tuple[Quantizer, int]]:
        """The quantizers of both orientations, and whether it is the column."""
        return [(spec, at) for at, spec in enumerate(self.pair) if spec is not None]

    @cached_property
    def parts(self) -> int:
        """The number of tensors of x's codes."""
        return sum(3 if spec.two_level else 2 for spec, _ in self.specs)


class Inputs(NamedTuple):
    x: Tensor
    scaling: Any = ()  # delayed: inverse scales of x, w, dy; if x is measured also their amax counts
    all_reduced: Any = ()  # amaxes of x by row and by column, one element each, as bits
    columns: Any = ()  # the amaxes of each column, [K, 1], as bits


class ShardCastLayer(Layer):
    """Cast the tokens of one rank."""

    def auxiliary(self, config: Config) -> int:
        return config.parts + config.observe

    def decided_by_layout(self, config: Config, side: str) -> bool:
        return all(spec.shipped for spec, _ in config.specs)

    def forward(self, config: Config, inputs: Inputs) -> ForwardResult:
        x = inputs.x
        amax = torch.zeros(1, dtype=torch.float32, device=x.device) if config.observe else None
        row, column = config.pair
        if inputs.columns:  # a scale of a row is the rank's own, and one of a column is all ranks'
            first, _ = quantize_pair(x, row, None, CastArgs())
            _, second = quantize_pair(x, None, column, CastArgs(amax=(None, number_of(inputs.columns[0]))))
        else:
            part = inputs.scaling[part_of(X, config.measures_x)]
            if inputs.all_reduced:
                arguments = all_reduced_cast(config.recipe, config.pair, part, inputs.all_reduced, amax)
            else:
                arguments = cast_args(config.recipe, config.pair, part, partial(DENSE.amax, x, None), amax)
            first, second = quantize_pair(x, row, column, arguments)
        parts = [t for q in (first, second) if q is not None for t in q.tensors()]
        if amax is not None:
            parts.append(amax)
        return ForwardResult((x.new_empty(0),), tuple(parts), ())

    def abstract(self, config: Config, inputs: Inputs) -> ForwardResult:
        x: Any = inputs.x
        parts: list[TensorProto] = []
        for spec, at in config.specs:
            q = spec.proto(x, column_axis(len(x.shape)) if at else -1)
            parts += [p for p in (q.codes, q.scale, q.global_scale) if p is not None]
        if config.observe:
            parts.append(TensorProto((1,), torch.float32, x.device))
        return ForwardResult((TensorProto((0,), x.dtype, x.device),), tuple(parts), ())


layer = ShardCastLayer(Config, Inputs)
