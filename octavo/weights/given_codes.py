"""Codes and scales that a program brings, checked, and laid out as a layer reads those of its weight."""

import math

import torch
from torch import Tensor

from octavo.errors import UnsupportedConfig, UnsupportedDevice, UnsupportedDtype, UnsupportedShape, check_choice
from octavo.quant.proto import TensorProto
from octavo.quant.qtensor import Parts
from octavo.quant.quantizer import Quantizer
from octavo.quant.scale_blocks import ceil_div, grid
from octavo.runtime.contract import DTYPE_NAMES, LAYERS
from octavo.weights.code_memory import Kind


def check_codes(
    spec: Quantizer, codes: Tensor, scale: Tensor, global_scale: Tensor | None, dtype: torch.dtype
) -> Parts:
    """Return codes as bytes, scales as the quantizer stores them, [(groups,) rows, columns] of blocks, and the global
    scale [(groups)] if there is one."""
    check_choice(dtype, tuple(DTYPE_NAMES), what="dtype")
    if codes.dim() not in (2, 3):
        raise UnsupportedShape(f"codes are [N, K], or [G, N, K] of groups; got {tuple(codes.shape)}.")
    if codes.dtype not in (spec.fmt.dtype, torch.uint8):
        raise UnsupportedDtype(f"codes of {spec} are {spec.fmt.dtype} or uint8, got {codes.dtype}.")
    if (global_scale is None) == spec.two_level:
        wants = "takes" if spec.two_level else "has no"
        raise UnsupportedConfig(f"{spec} {wants} global_scale, got {'none' if global_scale is None else 'one'}.")
    given = [scale] if global_scale is None else [scale, global_scale]
    for t in given:
        if t.device != codes.device:
            raise UnsupportedDevice(f"codes are on {codes.device}, a scale is on {t.device}. Move one of them.")
    *lead, n, columns = codes.shape
    blocks = [*lead, *grid(n, columns * spec.fmt.packed, spec.block)]
    found = [codes.view(torch.uint8), _shaped(_stored(spec, scale), blocks, "scale")]
    return *found, *[_shaped(t.float(), lead or [1], "global_scale") for t in given[1:]]


def _stored(spec: Quantizer, scale: Tensor) -> Tensor:
    """Return scales in the dtype in which the quantizer stores them."""
    if spec.scale_format is None:
        if not scale.dtype.is_floating_point or scale.dtype.itemsize == 1:
            raise UnsupportedDtype(f"scales of {spec} are numbers in float32, got {scale.dtype}.")
        return scale.float()
    # a float there may be the decoded scale, or its inverse: a byte is neither
    if scale.dtype.itemsize != 1:
        raise UnsupportedDtype(f"scales of {spec} are bytes of its scale format, got {scale.dtype}.")
    return scale.view(torch.uint8)


def _shaped(t: Tensor, shape: list[int], what: str) -> Tensor:
    """Return scales in a shape that differs in dims of one element alone."""
    if [n for n in t.shape if n != 1] != [n for n in shape if n != 1]:
        raise UnsupportedShape(f"{what} is {tuple(t.shape)}, and these codes have blocks of {tuple(shape)}.")
    return t.reshape(shape)


def laid_out(kind: Kind, spec: Quantizer, given: Parts, dtype: torch.dtype) -> Parts:
    """Return the parts of a weight as its layer reads them. Codes keep their memory if they lie as the layer needs
    them; groups may be padded."""
    codes, scale, *level2 = given
    proto = LAYERS[kind.layer].abstract_weight(kind.config, TensorProto(kind.shape, dtype, codes.device))[0]
    # the program's memory becomes the weight's, without a copy
    shape = proto.codes.shape
    kept = codes.is_contiguous() and codes.numel() == math.prod(shape)
    own = codes.view(shape) if kept else torch.zeros(shape, dtype=torch.uint8, device=codes.device)
    # a layer reads scales in its own order, and pads groups: zero makes padding decode to zero
    own_scale = proto.scale.empty().zero_()
    groups = 1 if codes.dim() == 2 else codes.shape[0]
    height = own.shape[0] // groups
    length = height if spec.block[0] is None else spec.block[0]
    for g in range(groups):
        part, blocks = (codes, scale) if codes.dim() == 2 else (codes[g], scale[g])
        first = g * ceil_div(height, length)
        own_scale[first : first + blocks.shape[0], : blocks.shape[1]] = blocks.to(own_scale.dtype)
        if not kept:
            own[g * height : g * height + part.shape[0], : part.shape[1]] = part
    return own, own_scale, *level2
