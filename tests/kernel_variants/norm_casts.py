"""The compilations of norms that write codes."""

import torch

from octavo.formats import E4M3, E5M2
from octavo.kernels.norm.cast.triton import CONFIGS, _cast_kernel, _config, _constants
from octavo.quant import tile
from octavo.quant.block import Block1D, Block2D
from octavo.quant.quantizer import Quantizer
from octavo.quant.tensorwise import Tensorwise
from octavo.quant.tensorwise.triton import is_transposable
from octavo.quant.tile import Config, Variant
from tests.kernel_variants import pointer_types


def variants() -> list[Variant]:
    given, rows, square, half = Tensorwise(), Block1D(), Block2D(E4M3, "fp32"), torch.bfloat16
    found = [_variant("rms", given, half, config) for config in CONFIGS]
    found += [_variant("rms", given, half, CONFIGS[0], column=False), _variant("l2", given, half, CONFIGS[0])]
    found += [_variant("layer", spec, half, _config(spec)) for spec in (given, rows, square)]
    found += [_variant("layer", spec, torch.float32, _config(spec)) for spec in (Tensorwise(E5M2), rows, square)]
    return [*found, *(_variant("rms", spec, torch.float16, _config(spec)) for spec in (given, rows, square))]


def _variant(kind: str, spec: Quantizer, dtype: torch.dtype, config: Config, column: bool = True) -> Variant:
    pointer, layer = tile.POINTERS[dtype], kind == "layer"
    there, fixed = pointer_types.signature(spec, column=column)
    there |= {"x": pointer, "rstd": "*fp32", **pointer_types.SIZES}
    there |= {} if kind == "l2" else {"weight": pointer}
    there |= {"mean": "*fp32", "bias": pointer} if layer else {}
    fixed |= pointer_types.CONTIGUOUS | _constants(layer, False, spec, dtype, config, is_transposable(config))
    own = {name: fixed.get(name) for name in _cast_kernel.arg_names if name not in there}
    signature = {name: there[name] for name in _cast_kernel.arg_names if name in there}
    title = f"norm quantize {kind} {dtype} to {spec}{'' if column else ', row alone'} {config}"
    return Variant(title, _cast_kernel, signature, own, config.warps)
