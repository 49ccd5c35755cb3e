"""What a cast refuses: tensors that no quantizer takes, and cast arguments that do not fit x or its quantizers.

The public methods of a quantizer check what the user passes. Layers make their arguments themselves, and
`octavo.quant.casts` checks none; casts of rows in groups check sizes and what `check_scaling` does.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from octavo.errors import UnsupportedConfig, UnsupportedDevice, UnsupportedDtype, UnsupportedShape
from octavo.formats import FLOATS
from octavo.quant.orientation import column_axis
from octavo.quant.proto import TensorProto
from octavo.quant.qtensor import QProto, QTensor
from octavo.quant.scale_blocks import is_square

if TYPE_CHECKING:
    from octavo.quant.quantizer import AmaxPair, CastArgs, Quantizer

MAX_DIM = 2**31 - 256  # kernels count rows and columns in 32 bits, rounded up to a tile, and address in 64


def check_tensor(x: Tensor) -> Tensor:
    if not isinstance(x, Tensor):
        way_out = "Use torch.as_tensor first."
        if hasattr(x, "dequantize"):
            way_out = "Pass its dequantize(); quantize_into takes the codes to overwrite first, then x."
        raise UnsupportedDtype(f"A quantizer takes a torch.Tensor as x, got {type(x).__name__}. {way_out}")
    if x.dtype not in FLOATS:
        raise UnsupportedDtype(f"A quantizer takes float32, bfloat16 or float16, got {x.dtype}. Cast x first.")
    return x


def check_size(m: int, k: int, shape: tuple[int, ...]) -> None:
    if m > MAX_DIM or k > MAX_DIM:
        raise UnsupportedShape(
            f"A quantizer takes at most 2^31-256 rows and columns, got {m} x {k} from shape {tuple(shape)}. "
            "Quantize it in pieces."
        )


def check_float(dtype: torch.dtype, what: str) -> torch.dtype:
    if dtype not in FLOATS:
        raise UnsupportedDtype(f"{what} gives float32, bfloat16 or float16, got {dtype}. Cast the result instead.")
    return dtype


def check_flag(skip: Tensor | None, x: Tensor) -> Tensor | None:
    if skip is not None and (skip.numel() != 1 or skip.device != x.device):
        raise UnsupportedDevice(
            f"skip is one element on the device of x ({x.device}), so that a captured graph can read it; "
            f"got {skip.numel()} on {skip.device}."
        )
    return skip


def check_source(source: Tensor, x: Tensor) -> int:
    """Raise unless `source` can name rows of x. Return how many rows it makes."""
    if not isinstance(source, Tensor):
        raise UnsupportedDtype(f"source is a tensor, got {type(source).__name__}. Use torch.as_tensor first.")
    if source.dtype != torch.int32:
        raise UnsupportedDtype(f"source is int32, got {source.dtype}. Use source.to(torch.int32).")
    if source.dim() != 1:
        raise UnsupportedShape(
            f"source is a vector, the row of x for each row to quantize, got shape {tuple(source.shape)}. Flatten it."
        )
    if source.device != x.device:
        raise UnsupportedDevice(f"x is on {x.device} and source on {source.device}. Move source first.")
    return source.shape[0]


def check_fits(q: QTensor, proto: QProto, what: str, way: str) -> None:
    """Raise unless q is as described. `what` cannot write to it; `way` allocates one that fits."""
    why = proto.unsupported_reason(q)
    if why:
        raise UnsupportedShape(f"{what} cannot write x into {q!r}: it has {why}. Allocate it with {way}.empty().")


def check_fuses(row: "Quantizer", column: "Quantizer") -> "Quantizer":
    """Raise unless one kernel serves x by `row` and x.T by `column`. Return the latter."""
    if not row._fuses_with(column):
        raise UnsupportedConfig(
            f"{row} and {column} cannot share one read of x: {type(row).__name__}.quantize_both needs "
            "the same scheme with equal settings, rht and stochastic of NVFP4 aside. Quantize each orientation on "
            "its own, with quantize(x, axis)."
        )
    return column


def check_square(spec: "Quantizer") -> None:
    """Raise a TypeError unless the blocks are the same in both orientations."""
    if not is_square(spec.block):
        r, c = ("all" if b is None else b for b in spec.block)
        raise TypeError(
            f"{spec} scales {r}x{c} blocks along the contraction; transposing its codes would quantize twice. "
            "Quantize the other orientation from the source: quantize(x, axis=0) or quantize_both."
        )


def check_scaling(specs: Iterable["Quantizer | None"], cast_args: "CastArgs") -> None:
    """Raise if a quantizer lacks the seed that it needs, or would ignore an inverse scale."""
    for spec in specs:
        if spec is None:
            continue
        if cast_args.inverse_scale is not None and not spec.takes_inverse_scale:
            raise UnsupportedConfig(f"{spec} derives its scales from the data; inverse_scale= is for Tensorwise.")
        if cast_args.seed is None and spec.is_stochastic:
            raise UnsupportedConfig(
                f"{spec} rounds stochastically and needs seed=, an int64 tensor [seed, step] that advances every step."
            )


def check_seed(specs: "Iterable[Quantizer | None]", seed: Tensor | None, x: Tensor) -> None:
    """Raise for a seed that no quantizer uses, or that is none."""
    if seed is None:
        return
    there = [spec for spec in specs if spec is not None]
    if not any([spec.is_stochastic for spec in there]):
        raise UnsupportedConfig(f"{there[0]} rounds to nearest; seed= is for NVFP4(stochastic=True).")
    if tuple(seed.shape) != (2,) or seed.dtype != torch.int64 or seed.device != x.device:
        raise UnsupportedShape(
            f"seed= is an int64 tensor [seed, step] on {x.device}; "
            f"got {seed.dtype} {tuple(seed.shape)} on {seed.device}."
        )


def checked(cast_args: "CastArgs", x: Tensor, row: "Quantizer | None", column: "Quantizer | None") -> "CastArgs":
    """Check `cast_args` and return it, detached: it has every tensor that the cast needs and none that the cast would
    ignore, each of the right size."""
    check_scaling((row, column), cast_args)
    check_seed((row, column), cast_args.seed, x)
    inverse_scale = cast_args.inverse_scale
    if inverse_scale is not None:
        if any(a is not None for a in cast_args.amax):
            raise UnsupportedConfig(
                "inverse_scale= is given, and amax=, from which it would be computed, too. Give one of them."
            )
        if inverse_scale.numel() != 1 or inverse_scale.dtype != torch.float32 or inverse_scale.device != x.device:
            raise UnsupportedShape(
                f"inverse_scale= is the inverse scale, one float32 on {x.device}; "
                f"got {inverse_scale.dtype} {tuple(inverse_scale.shape)} on {inverse_scale.device}."
            )
        inverse_scale = inverse_scale.detach()
    return cast_args._replace(amax=_checked_amax(cast_args.amax, x, row, column), inverse_scale=inverse_scale)


def _checked_amax(amax: "AmaxPair", x: Tensor, row: "Quantizer | None", column: "Quantizer | None") -> "AmaxPair":
    if amax[0] is None and amax[1] is None:
        return amax
    if any((spec is None) != (a is None) for spec, a in zip((row, column), amax, strict=True)):
        raise UnsupportedConfig("Give amax= for both orientations, as amax_both(x) returns them, or for neither.")
    found = []
    for spec, a, axis in ((row, amax[0], -1), (column, amax[1], column_axis(x.dim()))):
        if spec is not None and a is not None:
            want = (1,) if spec.two_level else spec.proto(TensorProto.of(x), axis).scale.shape
            if tuple(a.shape) != want or a.dtype != torch.float32 or a.device != x.device:
                raise UnsupportedShape(
                    f"amax= must be float32 {want} on {x.device}, as amax(x, axis) returns it; "
                    f"got {a.dtype} {tuple(a.shape)} on {a.device}."
                )
            a = a.detach().contiguous()
        found.append(a)
    # both orientations keep one shared amax: a tensorwise cast then reads x once
    return found[0], found[0] if amax[0] is amax[1] else found[1]
