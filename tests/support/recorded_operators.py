"""What our operators are called with in one compiled step: (operator, arguments), for torch.library.opcheck."""

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import octavo
from octavo.runtime.graph_nodes import UNDECLARED_WRITES


class Recorder(TorchDispatchMode):
    """Notes calls of our operators, with copies of what they were given."""

    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "octavo":
            self.calls.append((func, pytree.tree_map_only(torch.Tensor, copied, args)))
        return func(*args, **(kwargs or {}))


def copied(tensor):
    """With its strides and device, and with whether it wants a gradient."""
    own = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return own.copy_(tensor.detach()).requires_grad_(tensor.requires_grad)


def recorded(layer, x, dy, **flags):
    """Every call in one forward and backward. The graph is run as it was traced, so that its operators are seen."""
    calls = []

    def backend(gm, _):
        def run(*args):
            with Recorder(calls):
                return gm(*args)

        return run

    torch._dynamo.reset()
    y = torch.compile(layer, fullgraph=True, backend=backend)(x, **flags)
    y = y[0] if isinstance(y, tuple) else y
    y = y.anchor if isinstance(y, octavo.QTensor) else y
    if y.requires_grad:
        with Recorder(calls):
            y.backward(dy)
    return calls


def hides_writes(op, args):
    """Whether this call may write to tensors that the operator's schema does not name: forward does where it raises
    running amaxes."""
    return op in UNDECLARED_WRITES and (op is torch.ops.octavo.run_bwd.default or "observe=True" in args[-1])


def without_gradients(args):
    return pytree.tree_map_only(torch.Tensor, lambda t: t.detach(), args)
