"""The amaxes of x and of a weight that ranks agree on before they cast, without a gradient.

y is int32 [4], the bits of float32: row's and column's of each, zero where an operand is not measured; then, where each
column of x has a scale of its own, the amaxes of x's columns. Bits are compared and sent: a NaN is the largest."""

from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.quant.casts import as_matrix
from octavo.quant.proto import TensorProto
from octavo.quant.quantizer import Quantizer, QuantizerPair
from octavo.runtime.contract import ForwardResult, Layer, Tensors
from octavo.values import Value, register


@register("amaxes")
class Config(Value):
    x_row: Quantizer | None = None
    x_column: Quantizer | None = None
    w_row: Quantizer | None = None
    w_column: Quantizer | None = None
    each_column: Quantizer | None = None  # of x, with a scale for each column
    grads: str = ""

    @cached_property
    def pairs(self) -> tuple[QuantizerPair, QuantizerPair]:
        return (self.x_row, self.x_column), (self.w_row, self.w_column)


class Inputs(NamedTuple):
    x: Tensor
    weight: Tensor


class AmaxesLayer(Layer):
    """Measures x and a weight."""

    def decided_by_layout(self, config: Config, side: str) -> bool:
        specs = (*config.pairs[0], *config.pairs[1], config.each_column)
        return all(spec is None or spec.shipped for spec in specs)

    def forward(self, config: Config, inputs: Inputs) -> ForwardResult:
        found: list[Tensor] = []
        for tensor, pair in zip(inputs, config.pairs, strict=True):
            found += _measured(tensor, pair)
        if (spec := config.each_column) is not None:
            columns = spec._measured(as_matrix(inputs.x), None, spec, None, None, None)[1]
            assert columns is not None
            found.append(columns.reshape(-1))
        return ForwardResult((torch.cat(found).abs().view(torch.int32),), (), ())

    def abstract(self, config: Config, inputs: Inputs) -> ForwardResult:
        size = 4 if config.each_column is None else 4 + inputs.x.shape[-1]
        return ForwardResult((TensorProto((size,), torch.int32, inputs.x.device),), (), ())

    def wants(self, config: Config) -> tuple[bool, ...]:
        return False, False

    def abstract_gradients(self, config: Config, saved: Any, dy: Any) -> tuple[TensorProto | None, ...]:
        return None, None

    def backward(self, config: Config, saved: Any, buffers: Any, grads: Tensors, writes: Any = None) -> Tensors:
        return None, None


layer = AmaxesLayer(Config, Inputs)


def _measured(tensor: Tensor, pair: QuantizerPair) -> list[Tensor]:
    """Row's and column's amax, one element each."""
    row, column = pair
    nothing = torch.zeros(1, dtype=torch.float32, device=tensor.device)
    if row is None and column is None:
        return [nothing, nothing]
    matrix = as_matrix(tensor)
    if row is not None and column is not None and row._fuses_with(column):
        found = row._measured(matrix, row, column, None, None, None)
    else:
        first = None if row is None else row._measured(matrix, row, None, None, None, None)[0]
        second = None if column is None else column._measured(matrix, None, column, None, None, None)[1]
        found = first, second
    return [nothing if amax is None else amax.reshape(1) for amax in found]
