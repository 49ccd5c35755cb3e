"""What autograd keeps of a forward, in bytes: of any call, and of grouped layers."""

import torch

from tests.support.experts import batch, experts, named, sizes
from tests.support.state_tensors import state_tensors


class Saved:
    """Tensors saved for backward by what runs inside, each storage once; parameters and buffers cost nothing."""

    def __init__(self, layer):
        self.free = {t.untyped_storage().data_ptr() for t in (*layer.parameters(), *state_tensors(layer))}
        self.storages = {}

    def __enter__(self):
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, lambda t: t)
        self.hooks.__enter__()
        return self

    def __exit__(self, *error):
        self.hooks.__exit__(*error)

    def pack(self, tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.free:
            self.storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    @property
    def nbytes(self):
        return sum(self.storages.values())


def kept(recipe, layout, *, x_grad=True, w_grad=True, first=None):
    layer = experts(recipe, 2, 128, 128, **layout)
    for p in named(layer, "weight").values():
        p.requires_grad_(w_grad)
    x = batch((200, 55), 1, k=128, n=128)[0].requires_grad_(x_grad)
    if first is not None:
        layer(x, sizes((200, 55)), is_first_microbatch=True)
    with Saved(layer) as found:
        y = layer(x, sizes((200, 55)), is_first_microbatch=first)
    y.backward(torch.ones_like(y))  # and they are enough
    return found.nbytes
