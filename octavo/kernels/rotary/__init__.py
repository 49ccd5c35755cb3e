"""Rotary positions of attention's q and k, in one kernel each way.

q, k and v lie side by side in the rows of one tensor [B, T, (H + 2 S) D]: H heads of q, S of k and of v. Channel i and
channel i + D/2 of a head of q or k are a pair, which is rotated by an angle that depends on the position. Factors are
[T, 1, D]: `own` for a channel itself, the cosine, and `other` for the other one of its pair, the sine, negative in the
first half. Sums are float32, rounded once. v is copied.

Of torch's operations the gradient, whose parts are laid side by side again, takes ten kernels, and as one kernel of
Inductor's three times as long as its bytes.
"""

from typing import Any

import torch
from torch import Tensor

from octavo import backend


def rotate(qkv: Tensor, own: Tensor, other: Tensor, heads: int, shared: int) -> tuple[Tensor, Tensor]:
    """Return q [B, T, H, D] and k [B, T, S, D] of contiguous qkv, rotated."""
    return backend.implementation(__name__, qkv).rotate(qkv, own, other, heads, shared)


def rotate_back(dq: Tensor, dk: Tensor, dv: Tensor, own: Tensor, other: Tensor) -> Tensor:
    """Return the gradient of qkv, from those of q, k and v."""
    return backend.implementation(__name__, dq).rotate_back(dq, dk, dv, own, other)


def heads_of(qkv: Tensor, own: Tensor, other: Tensor, heads: int, shared: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return q [B, T, H, D], k and v [B, T, S, D], q and k rotated; differentiable in qkv. v is a part of qkv."""
    return _Heads.apply(qkv, own, other, heads, shared)  # type: ignore[no-untyped-call]


class _Heads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, own: Tensor, other: Tensor, heads: int, shared: int) -> tuple[Tensor, ...]:
        # the factors alone: the gradient of a rotation is a rotation
        ctx.save_for_backward(own, other)
        qkv = qkv.contiguous()
        q, k = torch.ops.octavo.rotate(qkv, own, other, heads, shared)
        # v is a view: it is not rotated
        return q, k, rows_of(qkv, heads + 2 * shared)[:, :, heads + shared :]

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return torch.ops.octavo.rotate_back(dq, dk, dv, *ctx.saved_tensors), None, None, None, None


def rows_of(x: Tensor, heads: int) -> Tensor:
    """Return [B, T, heads * D] as [B, T, heads, D]."""
    return x.view(x.shape[0], x.shape[1], heads, x.shape[2] // heads)


@torch.library.custom_op("octavo::rotate", mutates_args=())
def _rotate(qkv: Tensor, own: Tensor, other: Tensor, heads: int, shared: int) -> tuple[Tensor, Tensor]:
    return rotate(qkv, own, other, heads, shared)


@_rotate.register_fake
def _(qkv: Tensor, own: Tensor, other: Tensor, heads: int, shared: int) -> tuple[Tensor, Tensor]:
    batch, length, width = qkv.shape
    channels = width // (heads + 2 * shared)
    return qkv.new_empty(batch, length, heads, channels), qkv.new_empty(batch, length, shared, channels)


@torch.library.custom_op("octavo::rotate_back", mutates_args=())
def _rotate_back(dq: Tensor, dk: Tensor, dv: Tensor, own: Tensor, other: Tensor) -> Tensor:
    return rotate_back(dq, dk, dv, own, other)


@_rotate_back.register_fake
def _(dq: Tensor, dk: Tensor, dv: Tensor, own: Tensor, other: Tensor) -> Tensor:
    batch, length, heads, channels = dq.shape
    return dq.new_empty(batch, length, (heads + 2 * dk.shape[2]) * channels)
