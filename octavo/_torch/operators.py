"""Operators and functions of torch without a public name, or with a slower one, and what an operator says of itself."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket  # the operators that nodes of a graph call
from torch.nn.attention import SDPBackend

from octavo._torch.imports import when_imported

Formula = TypeVar("Formula", bound=Callable[..., int])

unsafe_view = torch.ops.aten._unsafe_view  # a view that autograd takes for a tensor of its own: its base is not used
assert_async = torch.ops.aten._assert_async.msg  # raises where a tensor is false, without a wait for the device
to_copy = torch.ops.aten._to_copy.default  # the operator behind Tensor.to

scaled_mm = torch._scaled_mm  # FP8 codes with scales: the kernels of F.scaled_mm in two thirds of its host time
grouped_mm = torch._grouped_mm  # bfloat16 in groups whose sizes stay on the device

# operators and their functions, a shorter way to the same kernels: replay calls these
FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten._scaled_mm.default: torch._scaled_mm,
    torch.ops.aten._scaled_mm_v2.default: torch._scaled_mm_v2,
}

# one call, and few kernels, for lists of tensors: torch's optimizers are built on these functions
foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_


def chosen_backend(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, enable_gqa: bool) -> str:
    """Return the name of the `SDPBackend` that scaled_dot_product_attention runs with these arguments, in the present
    `sdpa_kernel`: public functions tell only which are allowed."""
    number = torch._fused_sdp_choice(q, k, v, is_causal=is_causal, enable_gqa=enable_gqa)
    return SDPBackend(number).name


def schema(operator: Any) -> Any:
    """Return an overload's arguments and results: their names, which alias, which are written."""
    return operator._schema


def counts_flops(operator: Any) -> Callable[[Formula], Formula]:
    """Make a function the formula by which torch's FLOP counter counts an operator. The counter imports Triton, so the
    formula is registered when a program imports the counter."""

    def register(formula: Formula) -> Formula:
        when_imported("torch.utils.flop_counter", lambda m: m.register_flop_formula(operator, get_raw=True)(formula))
        return formula

    return register


def operator_name(target: Any, first: Any, namespace: str) -> str:
    """Return the name of the operator that a node of a graph calls, without its overload in the given namespace; empty
    if it calls none. `first` is the node's first argument: the operator itself, where the compiler wrapped one that
    writes to its inputs."""
    if isinstance(target, HigherOrderOperator) and str(target).startswith("auto_functionalized"):
        target = first
    if isinstance(target, OpOverload) and target.namespace == namespace:
        return str(target._schema.name)
    if isinstance(target, OpOverloadPacket):
        return str(target._qualified_op_name)
    return str(target) if isinstance(target, (OpOverload, HigherOrderOperator)) else ""
