"""Counts the collectives of a call, and their bytes."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


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
