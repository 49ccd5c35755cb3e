"""Rows in memory of other ranks, in plain torch, where that memory is a tensor of this process too."""

import torch
from torch import Tensor

from octavo.kernels.peer_rows import HEIGHT, Peers


def put(x: Tensor, source: Tensor | None, target: Tensor, peers: Peers) -> None:
    for rank, memory in enumerate(peers.memory):
        own = _of_rank(target, rank)
        rows = own if source is None else source.long()[own]
        _rows(memory, x).index_copy_(0, target[own] % HEIGHT, x[rows])


def get(out: Tensor, target: Tensor, peers: Peers) -> None:
    for rank, memory in enumerate(peers.memory):
        own = _of_rank(target, rank)
        out.index_copy_(0, own, _rows(memory, out)[target[own] % HEIGHT])


def _of_rank(target: Tensor, rank: int) -> Tensor:
    """Return the numbers of the places that are on a rank."""
    return torch.div(target, HEIGHT, rounding_mode="floor").eq(rank).nonzero()[:, 0]


def _rows(memory: Tensor, like: Tensor) -> Tensor:
    width = like.shape[1] * like.element_size()
    whole = memory.shape[0] // width * width
    return memory[:whole].view(like.dtype).view(-1, like.shape[1])
