"""Weights of published checkpoints that are codes: FP8 or another dtype of 8 bits, which are values times a scale.

torch copies codes into a weight as if they were values, and a model trains on them, with an amax of 448 instead of 0.1.
A layer refuses codes where they arrive: in a state dict, in `octavo.convert` and in a call.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from octavo.errors import UnsupportedDtype

# The names of scales, after that of their weight: DeepSeek and transformers write the first, compressed-tensors and
# ModelOpt the second, and ModelOpt a third where the scales of blocks have a scale.
_SUFFIXES = ("_scale_inv", "_scale", "_scale_2")
_INPUT_SCALE = "input_scale"  # of a layer whose activations have one scale
_PACKED = (torch.uint8, torch.float4_e2m1fn_x2)  # dtypes that may hold two codes in an element
RULE = "published codes, which are values only if they are multiplied by their scales"


def are_codes(dtype: torch.dtype | None) -> bool:
    """Return whether a weight of this dtype is codes."""
    return dtype is not None and dtype.itemsize == 1


def way_to_values(dtype: torch.dtype) -> str:
    """Return the way out for a layer whose weight or bias has a dtype that the layer does not take."""
    if are_codes(dtype):
        return f"These are {RULE}: assign the values, codes.float() * scales, before the call."
    return "Cast the layer: layer.float()."


def unsupported_codes_reason(module: nn.Module, names: Iterable[str], own_forward: bool) -> str:
    """Return why a module with these weights cannot be converted; empty if no weight is codes. A forward of the
    module's own multiplies codes by the module's scales, also codes that were cast to float32."""
    for name in names:
        dtype, scales = getattr(module, name).dtype, [scale for scale in _scales_of(name) if _has(module, scale)]
        if are_codes(dtype) or (scales and own_forward):
            listed = f" ({', '.join(scales)})" if scales else ""
            return (
                f"its {name} is {dtype}: {RULE}{listed}. Build the model without codes, and fill it with "
                "octavo.load_fp8(model, folder), or load it dequantized (transformers: "
                "quantization_config=FineGrainedFP8Config(dequantize=True))"
            )
    return ""


def refuse_codes(module: nn.Module, names: Sequence[str], state: Mapping[str, Any], prefix: str) -> None:
    """Raise if a state dict has codes for these weights of a module, or scales of them that the module does not
    have."""
    for name in names:
        known = [*_scales_of(name), *([_INPUT_SCALE] if name == names[0] else [])]
        scales = [prefix + scale for scale in known if prefix + scale in state and not _has(module, scale)]
        dtype = getattr(state.get(prefix + name), "dtype", None)
        if are_codes(dtype):
            listed = ", ".join(scales) or "this state dict has none"
            raise UnsupportedDtype(
                f"{prefix}{name} of this state dict is {dtype}: {RULE} ({listed}). Load the folder "
                f"with octavo.load_fp8(model, folder), which keeps the codes, or dequantize it before load_state_dict: "
                f"{_dequantization(state, prefix + name, scales)}."
            )
        if scales:
            raise UnsupportedDtype(
                f"{scales[0]} of this state dict is a scale of published codes, and {type(module).__name__} takes a "
                f"weight of values. Multiply {prefix}{name} by its scales unless that is done, and drop the keys "
                f"{', '.join(scales)}."
            )


def _scales_of(name: str) -> list[str]:
    return [name + suffix for suffix in _SUFFIXES]


def _has(module: nn.Module, name: str) -> bool:
    return getattr(module, name, None) is not None


def _dequantization(state: Mapping[str, Any], key: str, scales: list[str]) -> str:
    """Return the line that makes values of codes in a dict `state`."""
    codes, own = state[key], [scale for scale in scales if scale.startswith(key)]
    if not own:
        return f'state["{key}"] = state["{key}"].float() * scales, by the scales that the checkpoint has for it'
    shape, factor = getattr(state[own[0]], "shape", ()), ""
    if len(own) == 1 and codes.dtype not in _PACKED:
        factor = _factor(f'state.pop("{own[0]}").float()', tuple(shape), tuple(codes.shape))
    if not factor:
        return "have the program that made the checkpoint write it in bfloat16"
    others = "".join(f'; del state["{scale}"]' for scale in scales if scale != own[0])
    return f'state["{key}"] = state["{key}"].float() * {factor}{others}'


def _factor(scale: str, shape: tuple[int, ...], whole: tuple[int, ...]) -> str:
    """Return an expression that brings a scale of a shape to codes of the shape `whole`; empty if there is none."""
    if all(n == 1 for n in shape):
        return scale
    if len(shape) == len(whole) - 1 and shape == whole[:-1]:
        return f"{scale}[..., None]"
    if len(shape) != len(whole) or shape[:-2] != whole[:-2] or 0 in shape:
        return ""
    for dim in (-2, -1):
        n, blocks = whole[dim], shape[dim]
        block = 1 << (-(-n // blocks) - 1).bit_length()  # the power of two that gives so many blocks
        if -(-n // block) != blocks:
            return ""
        if 1 < blocks < n:
            scale += f".repeat_interleave({block}, {dim})" + ("[..., :%d, :]" if dim == -2 else "[..., :%d]") % n
    return scale
