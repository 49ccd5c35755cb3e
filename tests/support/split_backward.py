"""A mark for tests that run backward in two passes, gradients of weights in the second."""

import pytest
import torch
from torch.autograd.graph import GradientEdge


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, dy):
        return 2 * dy


def _runs():
    """Whether the node of an autograd.Function outlives its output, as the second pass needs it."""
    x = torch.ones(1, device="cpu", dtype=torch.float32, requires_grad=True)
    y = _Doubled.apply(x * 1)
    node = y.grad_fn
    y.detach_()  # as the first pass does
    try:
        torch.autograd.grad([GradientEdge(node, 0)], [x], [torch.ones_like(x)])
    except RuntimeError as error:
        if "is invalid for this instance of _C._FunctionBase" not in str(error):
            raise
        return False
    return True


needs_split_backward = pytest.mark.skipif(
    not _runs(), reason="this torch, as 2.11 does, frees an autograd.Function's node with its output: no second pass"
)
