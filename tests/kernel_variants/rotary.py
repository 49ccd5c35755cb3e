"""The compilations of rotary positions."""

from octavo.kernels.rotary.triton import WARPS, _back_kernel, _constants, _rotate_kernel
from octavo.quant.tile import Variant


def variants() -> list[Variant]:
    sizes = {"T": "i32", "H": "i32", "S": "i32"}
    steps = {f"{x}_{dim}": "i32" for x in "qkv" for dim in ("batch", "token", "head")}
    found = []
    for dtype in ("*bf16", "*fp16", "*fp32"):
        forward = {"qkv": dtype, "own": "*fp32", "other": "*fp32", "q": dtype, "k": dtype, **sizes}
        back = {"dq": dtype, "dk": dtype, "dv": dtype, "own": "*fp32", "other": "*fp32", "out": dtype, **sizes, **steps}
        found += [
            Variant(f"rotation of {dtype}", _rotate_kernel, forward, _constants(128), WARPS),
            Variant(f"rotation of gradients, {dtype}", _back_kernel, back, _constants(128), WARPS),
        ]
    return found
