"""Counts the collectives of a call, and their bytes."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from octavo.communication import collectives


class Wire(TorchDispatchMode):
    """Counts the bytes that each collective sends."""

    def __init__(self):
        super().__init__()
        self.sent = []

    def __torch_dispatch__(self, function, types, arguments=(), settings=None):
        if function.namespace == "_c10d_functional" and "wait" not in str(function):
            x = arguments[0]
            if x.dtype != torch.int64:  # whether the ranks call the layer alike
                size = x.numel() * x.element_size()
                self.sent.append((str(function).split(".")[1], str(x.dtype).split(".")[1], size))
        return function(*arguments, **(settings or {}))


class Sent:
    """Notes the collectives of layers in eager mode, which a dispatch mode would turn into nodes of a graph."""

    def __enter__(self):
        self.sent, self.send = [], collectives.sent

        def noted(kind, operator, where, group, t, *settings):
            if t.dtype != torch.int64:  # whether the ranks call the layer alike
                self.sent.append(
                    (str(operator).split(".")[1], str(t.dtype).split(".")[1], t.numel() * t.element_size())
                )
            return self.send(kind, operator, where, group, t, *settings)

        collectives.sent = noted
        return self

    def __exit__(self, *_):
        collectives.sent = self.send


def received(sent, size):
    """The bytes that a rank receives in these collectives."""
    part = (size - 1) / size
    shares = {"all_gather_into_tensor": size - 1, "reduce_scatter_tensor": part, "all_reduce": 2 * part}
    return sum(shares.get(name, 0) * nbytes for name, _, nbytes in sent)
