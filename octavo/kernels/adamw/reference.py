"""AdamW in plain torch, in the order in which torch.optim.AdamW computes."""

import torch
from torch import Tensor

from octavo.formats import E4M3
from octavo.kernels.adamw import BLOCK, Moments
from octavo.kernels.stochastic_codes.reference import noise_of

_SMALLEST = 2.0**-9  # the least positive E4M3


def adamw(
    values: Tensor, grad: Tensor, moments: Moments, settings: Tensor, seed: Tensor | None, copy: Tensor | None,
    amaxes: int,
) -> Tensor | None:  # fmt: skip
    decay, step_size, root, blend1, beta2, blend2, eps, unscale, skip = settings.tolist()
    if skip:
        return _amaxes(values, amaxes)
    g = grad.float() * unscale
    average, square = read(moments)
    average = average.lerp(g, blend1)
    square = torch.addcmul(square * beta2, g, g, value=blend2)
    new = torch.addcdiv(values.float() * decay, average, square.sqrt() / root + eps, value=-step_size)
    write(moments, average, square)
    values.copy_(new if seed is None else _rounded_stochastically(new, seed))
    if copy is not None:
        copy.copy_(values)
    return _amaxes(values, amaxes)


def _amaxes(values: Tensor, number: int) -> Tensor | None:
    if not number or not values.numel():
        return values.new_zeros(number, dtype=torch.float32) if number else None
    return values.view(number, -1).abs().amax(1).float()


def read(moments: Moments) -> tuple[Tensor, Tensor]:
    """Return both moments in float32."""
    average, square, average_scale, square_scale = moments
    if average_scale is None or square_scale is None:
        return average.float(), square.float()
    return _decoded(average, average_scale), _decoded(square, square_scale).square()


def write(moments: Moments, average: Tensor, square: Tensor) -> None:
    """Round both moments to their own format."""
    if moments.average_scale is None or moments.square_scale is None:
        moments.average.copy_(average)
        moments.square.copy_(square)
        return
    _encode(average, moments.average, moments.average_scale, least=0.0)
    _encode(square.sqrt(), moments.square, moments.square_scale, least=_SMALLEST)


def _blocks(flat: Tensor) -> Tensor:
    """Return elements as rows of one block each; the last row ends in zeros."""
    missing = -flat.numel() % BLOCK
    return torch.nn.functional.pad(flat.reshape(-1), (0, missing)).view(-1, BLOCK)


def _decoded(codes: Tensor, scale: Tensor) -> Tensor:
    values = _blocks(codes).view(E4M3.dtype).float() * scale[:, None]
    return values.view(-1)[: codes.numel()].view(codes.shape)


def _encode(x: Tensor, codes: Tensor, scale: Tensor, least: float) -> None:
    rows = _blocks(x)
    scale.copy_(rows.abs().amax(1) * (1 / E4M3.max))
    scaled = torch.where(scale[:, None] > 0, rows / scale[:, None], 0.0)
    if least:
        scaled = torch.where((scaled > 0) & (scaled < least), least, scaled)
    found = scaled.clamp(-E4M3.max, E4M3.max).to(E4M3.dtype).view(torch.uint8)
    codes.copy_(found.view(-1)[: codes.numel()].view(codes.shape))


def _rounded_stochastically(x: Tensor, seed: Tensor) -> Tensor:
    """Round to bfloat16 up or down with the probability of the distance: add 16 random bits, and drop as many."""
    noise = noise_of(0, 1, x.numel(), seed).view(x.shape)
    bits = x.contiguous().view(torch.int32).long() & 0xFFFFFFFF
    rounded = ((bits + noise) & 0xFFFF0000).to(torch.int64)
    rounded = torch.where(rounded >= 1 << 31, rounded - (1 << 32), rounded).to(torch.int32).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x)
