"""Operators of torch without a public function, and what an operator's object says about itself."""

from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket  # the operators that nodes of a graph call

unsafe_view = torch.ops.aten._unsafe_view  # a view that autograd takes for a tensor of its own: its base is not used
assert_async = torch.ops.aten._assert_async.msg  # raises where a tensor is false, without a wait for the device
to_copy = torch.ops.aten._to_copy.default  # the operator behind Tensor.to


def schema(operator: Any) -> Any:
    """An overload's arguments and results: their names, which alias, which are written."""
    return operator._schema


def operator_name(target: Any, first: Any, namespace: str) -> str:
    """The name of the operator that a node of a graph calls, without its overload in the given namespace; empty if it
    calls none. `first` is the node's first argument: the operator itself, where the compiler wrapped one that writes
    to its inputs."""
    if isinstance(target, HigherOrderOperator) and str(target).startswith("auto_functionalized"):
        target = first
    if isinstance(target, OpOverload) and target.namespace == namespace:
        return str(target._schema.name)
    if isinstance(target, OpOverloadPacket):
        return str(target._qualified_op_name)
    return str(target) if isinstance(target, (OpOverload, HigherOrderOperator)) else ""
