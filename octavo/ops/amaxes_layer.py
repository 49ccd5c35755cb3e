"""The amaxes of x and of a weight that ranks agree on before they cast, without a gradient. Rows in groups have one for
each group, and so have their weights.

y is int32 [4 * groups], the bits of float32: x's row and column, w's row and column, zero where an operand is not
measured; then, where each column of x has a scale of its own, the amaxes of x's columns. Bits are compared and sent: a
NaN is the largest."""

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.ops.grouped_linear_layer import Ragged
from octavo.ops.operands import DENSE
from octavo.quant.casts import as_matrix
from octavo.quant.groups import split
from octavo.quant.proto import TensorProto
from octavo.quant.quantizer import Quantizer, QuantizerPair
from octavo.runtime.contract import ForwardResult, Layer
from octavo.values import Value, register


@register("amaxes")
class Config(Value):
    x_row: Quantizer | None = None
    x_column: Quantizer | None = None
    w_row: Quantizer | None = None
    w_column: Quantizer | None = None
    each_column: Quantizer | None = None  # of a dense x, with a scale for each column

    @cached_property
    def pairs(self) -> tuple[QuantizerPair, QuantizerPair]:
        return (self.x_row, self.x_column), (self.w_row, self.w_column)


class Inputs(NamedTuple):
    x: Tensor  # [..., K]; any tensor if x is not measured
    weight: Tensor  # [N, K], or [G, N, K]; any tensor if it is not measured
    splits: Tensor | None = None  # [G]; any tensor [G, ...] if x is not measured; None if x is dense


class AmaxesLayer(Layer):
    """Measure x and a weight."""

    def decided_by_layout(self, config: Config, side: str) -> bool:
        specs = (*config.pairs[0], *config.pairs[1], config.each_column)
        return all(spec is None or spec.shipped for spec in specs)

    def forward(self, config: Config, inputs: Inputs) -> ForwardResult:
        (x, weight, splits), (x_pair, w_pair) = inputs, config.pairs
        number = 1 if splits is None else splits.shape[0]
        found = [torch.zeros(number, dtype=torch.float32, device=x.device)] * 4
        if x_pair != (None, None):
            rows = DENSE if splits is None else Ragged(split(splits, x.shape[0]))
            found[:2] = rows.amaxes(x, *x_pair, found[0])
        if w_pair != (None, None):
            matrix, rows = (DENSE if splits is None else Ragged).of_weight(weight)
            found[2:] = rows.amaxes(matrix, *w_pair, found[0])
        if (spec := config.each_column) is not None:
            columns = spec._measured(as_matrix(x), None, spec)[1]
            assert columns is not None
            found.append(columns.reshape(-1))
        return ForwardResult((torch.cat(found).abs().view(torch.int32),), (), ())

    def abstract(self, config: Config, inputs: Inputs) -> ForwardResult:
        size = 4 if inputs.splits is None else 4 * inputs.splits.shape[0]
        size += 0 if config.each_column is None else inputs.x.shape[-1]
        return ForwardResult((TensorProto((size,), torch.int32, inputs.x.device),), (), ())


layer = AmaxesLayer(Config, Inputs)
