"""The amaxes of each group of x and of each group's weight that ranks agree on before they cast, without a gradient.

y is int32 [4 * groups], the bits of float32: x's row and column, w's row and column, zero where an operand is not
measured."""

from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.ops.grouped_linear_layer import aligned, stacked
from octavo.quant.grouped import groups_amax
from octavo.quant.groups import Groups, split
from octavo.quant.proto import TensorProto
from octavo.quant.quantizer import Quantizer, QuantizerPair
from octavo.runtime.contract import ForwardResult, Layer, Tensors
from octavo.values import Value, register


@register("grouped-amaxes")
class Config(Value):
    x_row: Quantizer | None = None
    x_column: Quantizer | None = None
    w_row: Quantizer | None = None
    w_column: Quantizer | None = None
    grads: str = ""

    @cached_property
    def pairs(self) -> tuple[QuantizerPair, QuantizerPair]:
        return (self.x_row, self.x_column), (self.w_row, self.w_column)


class Inputs(NamedTuple):
    x: Tensor  # [rows, K]; any tensor if x is not measured
    splits: Tensor  # [G]; any tensor [G, ...] if x is not measured
    weight: Tensor  # [G, N, K]; any tensor if the weights are not measured


class GroupedAmaxesLayer(Layer):
    """Measures the groups of x and their weights."""

    def decided_by_layout(self, config: Config, side: str) -> bool:
        return all(spec is None or spec.shipped for pair in config.pairs for spec in pair)

    def forward(self, config: Config, inputs: Inputs) -> ForwardResult:
        x, w = config.pairs
        number = inputs.splits.shape[0]
        found = [torch.zeros(number, dtype=torch.float32, device=inputs.x.device)] * 4
        if x != (None, None):
            found[:2] = _measured(found[0], inputs.x, x, split(inputs.splits, inputs.x.shape[0]))
        if w != (None, None):
            matrix, groups = stacked(inputs.weight)
            found[2:] = _measured(found[0], matrix, w, groups)
        return ForwardResult((torch.cat(found).abs().view(torch.int32),), (), ())

    def abstract(self, config: Config, inputs: Inputs) -> ForwardResult:
        return ForwardResult((TensorProto((4 * inputs.splits.shape[0],), torch.int32, inputs.x.device),), (), ())

    def wants(self, config: Config) -> tuple[bool, ...]:
        return False, False, False

    def abstract_gradients(self, config: Config, saved: Any, dy: Any) -> tuple[TensorProto | None, ...]:
        return None, None, None

    def backward(self, config: Config, saved: Any, buffers: Any, grads: Tensors, writes: Any = None) -> Tensors:
        return None, None, None


layer = GroupedAmaxesLayer(Config, Inputs)


def _measured(nothing: Tensor, x: Tensor, pair: QuantizerPair, groups: Groups) -> list[Tensor]:
    """Row's and column's amax of each group, of the values that a cast reads."""
    return [nothing if amax is None else amax for amax in groups_amax(aligned(x), *pair, groups)]
