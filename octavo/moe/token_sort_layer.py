"""The sort of tokens by their experts: a row for each assignment of each token (octavo.kernels.permute). It has no
gradient.

The map says which experts a token goes to: an index [..., K], or a mask [..., E]. The number of rows is fixed: the most
that the assignments can fill, or that of `rows`, a tensor without elements, since a graph may know it only as a symbol.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from octavo._torch.operators import unsafe_view
from octavo.kernels import permute
from octavo.kernels.permute import most_rows
from octavo.quant.proto import TensorProto
from octavo.runtime.contract import ForwardResult, Layer
from octavo.values import Value, register


@register("token-sort")
class Config(Value):
    experts: int = 1
    top_k: int = 0  # assignments of a token, if the map is a mask; 0: the map is an index
    align: int = 1  # the rows of each expert are filled up to a multiple


class Inputs(NamedTuple):
    routing: Tensor  # a map: index [..., K], int32 or int64; or mask [..., E], bool
    rows: Tensor | None = None  # [rows, 0], for its shape alone


class TokenSortLayer(Layer):
    """Sort assignments by expert. Its auxiliary outputs are sizes [E], positions [..., K], assignments [rows], and
    of a mask experts [..., K]."""

    def outputs(self, config: Config) -> int:
        return 0

    def auxiliary(self, config: Config) -> int:
        return 4 if config.top_k else 3

    def forward(self, config: Config, inputs: Inputs) -> ForwardResult:
        shape = (*inputs.routing.shape[:-1], config.top_k or inputs.routing.shape[-1])
        routing = inputs.routing.reshape(math.prod(shape[:-1]), inputs.routing.shape[-1])
        index = permute.listed(routing, config.top_k) if config.top_k else routing
        made = permute.sort(index, config.experts, number_of_rows(config, inputs), config.align)
        auxiliary = (made.sizes, unsafe_view(made.positions, shape), made.assignments)
        return ForwardResult((), (*auxiliary, unsafe_view(index, shape)) if config.top_k else auxiliary, ())

    def abstract(self, config: Config, inputs: Inputs) -> ForwardResult:
        device = inputs.routing.device
        positions = (*inputs.routing.shape[:-1], config.top_k or inputs.routing.shape[-1])
        shapes = ((config.experts,), positions, (number_of_rows(config, inputs),), positions)
        dtypes = (torch.int64, torch.int32, torch.int32, torch.int32)
        auxiliary = [TensorProto(shape, dtype, device) for shape, dtype in zip(shapes, dtypes, strict=True)]
        return ForwardResult((), tuple(auxiliary[: self.auxiliary(config)]), ())


layer = TokenSortLayer(Config, Inputs)


def number_of_rows(config: Config, inputs: Inputs) -> int:
    if inputs.rows is not None:
        return inputs.rows.shape[0]
    assignments = math.prod(inputs.routing.shape[:-1]) * (config.top_k or inputs.routing.shape[-1])
    return most_rows(assignments, config.experts, config.align)
