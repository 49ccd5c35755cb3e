"""y = a · bᵀ with scaled operands: a [M, K], b [N, K], both contracted over their last dim.

One function serves the three GEMMs of a linear layer, because a QTensor's last dim is always the contraction:

    fprop   y  = gemm(x row,     w row)          [M, N] over K
    dgrad   dx = gemm(dy row,    w column)       [M, K] over N
    wgrad   dw = gemm(dy column, x column)       [N, K] over M

Three routes compute the same function (`route` tells which one a call takes, `native.support` why it is not native):

    native      torch.nn.functional.scaled_mm, if a probe on this chip agreed with the reference
    emulated    true codes multiplied in bfloat16 with float32 accumulation, in Triton: exact products. MX and NVFP4 on
                Hopper decode to memory first (`octavo.kernels.decode`), other cases tile by tile
    reference   float64, anywhere; also every GEMM on a CPU
"""

from functools import lru_cache

import torch
from torch import Tensor

from octavo import backend
from octavo.errors import UnsupportedConfig, UnsupportedDevice, UnsupportedDtype, UnsupportedShape, check_choice
from octavo.formats import FLOATS
from octavo.kernels.gemm import native, reference
from octavo.quant.casts import KNOWN
from octavo.quant.pairs import check_pair
from octavo.quant.qtensor import QTensor
from octavo.quant.quantizer import Quantizer

ACCUMULATIONS = ("fast", "precise")
Operand = Tensor | QTensor


def gemm(
    a: Operand,
    b: Operand,
    *,
    out_dtype: torch.dtype | None = None,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    accumulate: bool = False,
    accumulation: str = "precise",
) -> Tensor:
    """Compute a · bᵀ + bias, outside autograd. With `out`, round to its dtype and write, or add, the result there.
    `accumulation="fast"` lets FP8 tensor cores keep ~14 bits of the running sum; "precise" promotes it every 128."""
    check_choice(accumulation, ACCUMULATIONS, what="accumulation")
    dtype = _check(a, b, out_dtype, bias, out, accumulate)
    a, b = (x.detach() if isinstance(x, Tensor) else x for x in (a, b))
    bias = None if bias is None else bias.detach().contiguous()
    found = product(a, b, dtype, bias, accumulation)
    if out is None:
        return found
    return out.add_(found) if accumulate else out.copy_(found)


def route(a: Operand, b: Operand) -> str:
    """Return the route of gemm(a, b) here: "native", "emulated" or "reference"."""
    if backend.choose(a.device) == "reference":
        return "reference"
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return "native"
    return spec_route(a.spec, b.spec, a.device)


def spec_route(a: Quantizer | None, b: Quantizer | None, device: torch.device) -> str:
    """Return `route` for operands that these quantizers produce on `device`; None means an unquantized operand."""
    if backend.choose(device) == "reference":
        return "reference"
    if a is None or b is None:
        return "native"
    return "native" if backend.forced() != "emulated" and native.support(a, b, device).ok else "emulated"


def product(a: Operand, b: Operand, dtype: torch.dtype, bias: Tensor | None, accumulation: str) -> Tensor:
    """Run `gemm` into a new tensor, and check the pair of quantizers alone. Layers call this one."""
    if isinstance(a, QTensor) and isinstance(b, QTensor):
        way = _way(a.spec.number, b.spec.number, a.codes.device, backend.forced())
        if way == "native" and a.codes.numel() and b.codes.numel():
            return native.gemm(a, b, dtype, bias, accumulation == "fast")
        m, n = a.codes.shape[0], b.codes.shape[0]
    else:
        way, m, n = route(a, b), _rows(a), _rows(b)
    if m == 0 or n == 0:
        return torch.empty(m, n, dtype=dtype, device=a.device)
    if way == "reference" or _columns(a) == 0:  # an empty sum, which no GEMM library accepts
        return reference.gemm(a, b, dtype, bias)
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return native.high_precision(a, b, dtype, bias)
    assert isinstance(a, QTensor) and isinstance(b, QTensor)
    return backend.implementation(__name__, a.codes).gemm(a, b, dtype, bias)


@lru_cache(maxsize=1024)
def _way(a: int, b: int, device: torch.device, force: str) -> str:
    """Check the pair, and cache `spec_route` by the quantizers' numbers, the device and the forced backend."""
    check_pair(KNOWN[a], KNOWN[b])
    return spec_route(KNOWN[a], KNOWN[b], device)


def _rows(x: Operand) -> int:
    return x.rows if isinstance(x, QTensor) else x.shape[0]


def _columns(x: Operand) -> int:
    return x.columns if isinstance(x, QTensor) else x.shape[-1]


def _check(
    a: Operand, b: Operand, out_dtype: torch.dtype | None, bias: Tensor | None, out: Tensor | None, accumulate: bool
) -> torch.dtype:
    """Check the operands and return the dtype of the result."""
    for name, x in (("a", a), ("b", b)):
        if not isinstance(x, (Tensor, QTensor)):
            raise UnsupportedDtype(f"gemm takes tensors and QTensors, got {type(x).__name__} for {name}.")
        if isinstance(x, Tensor) and (x.dim() != 2 or x.dtype not in FLOATS):
            raise UnsupportedShape(
                f"gemm takes float32, bfloat16 or float16 matrices, got {x.dtype} {tuple(x.shape)} for {name}."
            )
    if _columns(a) != _columns(b):
        raise UnsupportedShape(
            f"gemm contracts the last dim of both operands: a has {_columns(a)}, b has {_columns(b)}. "
            "For a transposed operand, quantize it with axis=0."
        )
    _check_pair(a, b)
    dtype = out_dtype or (out.dtype if out is not None else a.dtype)
    if dtype not in FLOATS:
        raise UnsupportedDtype(f"gemm writes float32, bfloat16 or float16, got out_dtype={dtype}.")
    others = [t for t in (b, bias, out) if t is not None]
    if any(t.device != a.device for t in others):
        found = ", ".join(str(t.device) for t in [a, *others])
        raise UnsupportedDevice(f"gemm takes all its tensors on one device, got {found}. Move them together.")
    if bias is not None and (tuple(bias.shape) != (_rows(b),) or bias.dtype not in FLOATS):
        raise UnsupportedShape(
            f"gemm's bias has one element a row of b, ({_rows(b)},), in float32, bfloat16 or float16; "
            f"got {bias.dtype} {tuple(bias.shape)}."
        )
    if out is not None and (tuple(out.shape) != (_rows(a), _rows(b)) or out.dtype != dtype):
        raise UnsupportedShape(
            f"gemm's out must be {dtype} {(_rows(a), _rows(b))}, got {out.dtype} {tuple(out.shape)}."
        )
    if accumulate and out is None:
        raise UnsupportedConfig("gemm(accumulate=True) adds to out=, which is missing. Give out=, or accumulate=False.")
    return dtype


def _check_pair(a: Operand, b: Operand) -> None:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.dtype != b.dtype:
            raise UnsupportedDtype(f"gemm's high-precision operands must share a dtype, got {a.dtype} and {b.dtype}.")
        return
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        raise UnsupportedConfig(
            "gemm takes two QTensors or two plain tensors, got one of each. Quantize both, or dequantize() the other."
        )
    check_pair(a.spec, b.spec)
