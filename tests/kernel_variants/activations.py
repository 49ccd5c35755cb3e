"""The compilations of activations: every function, and some with scales, seed or bias."""

import torch

from octavo.kernels.activation import ACTIVATIONS, Function
from octavo.kernels.activation.triton import WARPS, _backward_kernel, _constants, _forward_kernel
from octavo.quant import tile
from octavo.quant.tile import Variant


def variants() -> list[Variant]:
    """List the compilations: every activation, and some with scales, seed or bias."""
    swiglu, clamped, situ, plain = (ACTIVATIONS[name] for name in ("swiglu", "clamped-swiglu", "situglu", "linear"))
    cases = [_variants(name, fn, torch.bfloat16) for name, fn in ACTIVATIONS.items()]
    cases += [
        _variants("swiglu", swiglu, torch.float16),
        _variants("swiglu", swiglu, torch.float32, "scales"),
        _variants("clamped-swiglu by 32", clamped._replace(interleave=32), torch.bfloat16, "scales"),
        _variants("situglu by 32", situ._replace(interleave=32), torch.bfloat16, "scales"),
        _variants("srelu", ACTIVATIONS["srelu"], torch.bfloat16, "scales"),
        _variants("dropout", plain._replace(drop=0.1), torch.bfloat16, "seed"),
        _variants("bias", plain, torch.bfloat16, "bias"),
        _variants("swiglu", swiglu, torch.bfloat16, "end"),
    ]
    return [variant for pair in cases for variant in pair]


def _variants(name: str, fn: Function, dtype: torch.dtype, given: str = "") -> list[Variant]:
    """Return forward and backward for rows of 4096, with the one of scales, bias, seed and end that `given` names."""
    kind = tile.POINTERS[dtype]
    pointers = {
        "x": kind, "y": kind, "dy": kind, "dx": kind, "scales": "*fp32" if given == "scales" else None,
        "ds": "*fp32" if given == "scales" else None, "bias": kind if given == "bias" else None,
        "seed": "*i64" if given == "seed" else None, "end": "*i32" if given == "end" else None,
    }  # fmt: skip
    sizes = dict.fromkeys(("M", "H", "stride_m", "dy_stride_m"), "i32")
    constants = {"stride_k": 1, "dy_stride_k": 1, **_constants(fn, 4096)}
    title = f"{name} {dtype}{', ' if given else ''}{given}"

    def variant(name, kernel, **missing):
        said = {**pointers, **sizes, **missing}
        signature = {k: said[k] for k in kernel.arg_names if said.get(k) is not None}
        own = {k: constants.get(k) for k in kernel.arg_names if k not in signature}
        return Variant(f"{name} {title}", kernel, signature, own, WARPS, 1)

    forgotten = {} if fn.remembers else {"x": None}
    return [variant("activation", _forward_kernel), variant("activation backward", _backward_kernel, **forgotten)]
