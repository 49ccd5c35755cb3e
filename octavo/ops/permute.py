"""Permute and Unpermute as operations of a Sequential: tokens to the rows of their experts, and back.

`octavo.moe.Experts` is built of them. Outside of a Sequential use `octavo.moe.permute` and `octavo.moe.unpermute`.
"""

from typing import Any

import torch
from torch import Tensor, nn

from octavo.ops import permute_layer, unpermute_layer
from octavo.ops.inputs import check_input
from octavo.ops.operation import Edge, FusibleOperation
from octavo.runtime.call import Stage
from octavo.runtime.call_cache import Lookup


class _RowOperation(FusibleOperation, nn.Module):
    """Copy or sum rows by tensors that say where they are."""

    op_is_elementwise = True

    def _call_lookup(self, needs_dx: bool, extra_inputs: tuple[Any, ...]) -> Lookup | None:
        if not all([type(t) is Tensor for t in extra_inputs]):
            return None
        needs = torch.is_grad_enabled() and (needs_dx or any([t.requires_grad for t in extra_inputs]))
        return Lookup((type(self).__name__, torch.is_grad_enabled()), list(extra_inputs), (), needs)


class Permute(_RowOperation):
    """Copy each token to the rows of its assignments. Its extra inputs are the positions [..., K] of a permutation
    and the assignments [rows]. Rows after the last expert are left as the memory was."""

    num_extra_inputs = 2
    op_layer_config = permute_layer.Config

    def op_stage(self, x: Any, extra_inputs: tuple[Any, ...], kwargs: dict[str, Any], as_nodes: bool) -> Stage:
        check_input("Permute", x)
        positions, assignments = extra_inputs
        needs = x.requires_grad
        y = Edge((assignments.shape[0], x.shape[-1]), x.dtype, x.device, needs)
        key = f"permute(tail='untouched',wants_dx={needs})"
        return Stage("permute", key, (positions, assignments), (), needs, outputs=(y,))

    def forward(self, input: Tensor, positions: Tensor, assignments: Tensor) -> Tensor:
        return self.op_run(input, positions, assignments)


class Unpermute(_RowOperation):
    """Sum the rows of each token's assignments, each multiplied by its probability. Its extra inputs are the positions
    [..., K] of a permutation, the assignments [rows] and the probabilities [..., K]."""

    num_extra_inputs = 3
    op_layer_config = unpermute_layer.Config

    def op_stage(self, x: Any, extra_inputs: tuple[Any, ...], kwargs: dict[str, Any], as_nodes: bool) -> Stage:
        check_input("Unpermute", x)
        positions, assignments, probs = extra_inputs
        dx, dprobs = x.requires_grad, probs.requires_grad
        y = Edge((*positions.shape[:-1], x.shape[-1]), x.dtype, x.device, dx or dprobs)
        key = f"unpermute(tail='untouched',wants_dx={dx},wants_dprobs={dprobs})"
        return Stage("unpermute", key, (positions, assignments, probs, None), (), dx or dprobs, outputs=(y,))

    def forward(self, input: Tensor, positions: Tensor, assignments: Tensor, probs: Tensor) -> Tensor:
        return self.op_run(input, positions, assignments, probs)
