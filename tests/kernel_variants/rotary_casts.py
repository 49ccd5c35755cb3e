"""The compilations of gradients of rotary positions that leave as codes."""

import torch

from octavo.formats import E4M3, E5M2
from octavo.kernels.rotary.cast.triton import CONFIGS, TURNS, _cast_kernel, _constants
from octavo.kernels.tile_cast import triton as tile_casts
from octavo.quant import tile
from octavo.quant.block import Block1D, Block2D
from octavo.quant.quantizer import Quantizer
from octavo.quant.tensorwise import Tensorwise
from octavo.quant.tensorwise.triton import is_transposable
from octavo.quant.tile import Variant
from tests.kernel_variants import pointer_types

STRIDES = tuple(f"{x}_{dim}" for x in "qkv" for dim in ("batch", "token", "head"))


def variants() -> list[Variant]:
    given, rows, square, half = Tensorwise(E5M2), Block1D(), Block2D(E4M3, "fp32"), torch.bfloat16
    found = [_variant(spec, dtype) for spec in (given, rows, square) for dtype in (half, torch.float16)]
    return [
        *found,
        _variant(given, torch.float32),
        _variant(given, half, channels=64),
        _variant(given, half, column=False),
    ]


def _variant(spec: Quantizer, dtype: torch.dtype, channels: int = 128, column: bool = True) -> Variant:
    config, pointer = tile_casts.fitting(CONFIGS, spec), tile.POINTERS[dtype]
    there, fixed = pointer_types.signature(spec, column=column)
    there |= dict.fromkeys(("dq", "dk", "dv"), pointer) | {"own": "*fp32", "other": "*fp32"}
    there |= dict.fromkeys(("M", "K", "T", "H", "S", *STRIDES), "i32")
    fixed |= _constants(spec, dtype, channels, config, TURNS, is_transposable(config))
    own = {name: fixed.get(name) for name in _cast_kernel.arg_names if name not in there}
    signature = {name: there[name] for name in _cast_kernel.arg_names if name in there}
    title = f"rotary gradient {dtype} to {spec}{'' if column else ', row alone'}, {channels} channels {config}"
    return Variant(title, _cast_kernel, signature, own, config.warps)
