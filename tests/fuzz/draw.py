"""Random data, layouts in memory and recipes, and how a result is held against the oracle's."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.fuzz.formats import F32, LARGEST, last_place, rounded
from tests.fuzz.oracle import Product, Recipe

TORCH = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SIZES = (1, 2, 7, 16, 17, 31, 32, 33, 48, 64, 97, 127, 128, 129, 130, 160, 256)
RECIPES = (
    "bf16",
    "fp8-delayed",
    "fp8-delayed(history=2,algorithm='most_recent',margin=1)",
    "fp8-delayed(grad_format=E4M3,cold_start='one')",
    "fp8-delayed(wgrad='bf16')",
    "fp8-current",
    "fp8-current(pow2=True,grad_format=E4M3)",
    "fp8-current(fprop='bf16')",
    "fp8-rowwise",
    "fp8-rowwise(pow2=False,grad_format=E5M2)",
    "fp8-rowwise(wgrad='bf16')",
    "fp8-block",
    "fp8-block(scale='fp32')",
    "fp8-block(grad_format=E5M2,backward='high_precision')",
    "fp8-block(dgrad='bf16')",
    "mxfp8",
    "mxfp8(square_weights=True,grad_format=E5M2)",
    "mxfp8(rounding='floor')",
    "mxfp8(rounding='ceil')",
    "mxfp8(rounding='even')",
    "nvfp4",
    "nvfp4(stochastic=False)",
    "nvfp4(rht=False)",
    "nvfp4(square_weights=False)",
)
DEQUANTIZED = tuple(
    f"{name}(backward='dequantized')" for name in ("fp8-delayed", "fp8-current", "fp8-block", "mxfp8", "nvfp4")
)
KINDS = ("normal", "normal", "outliers", "rows", "tiny", "huge", "zeros", "sparse", "ties")
LAYOUTS = ("contiguous", "contiguous", "transposed", "sliced", "expanded")


def choose(rng: np.random.Generator, options):
    return options[int(rng.integers(len(options)))]


def data(
    rng: np.random.Generator, shape: tuple[int, ...], kind: str, dtype: str, held: str = ""
) -> NDArray[np.float32]:
    """Values in a dtype's range, rounded to it or to the dtype they are `held` in, as float32. All finite."""
    x = rng.standard_normal(shape).astype(F32)
    half = dtype == "float16"
    if kind == "outliers":
        x = np.where(rng.random(shape) < 1 / 37, x * F32(2.0**10), x)
    elif kind == "rows" and x.ndim:
        x = x * np.exp2(rng.integers(-8, 9, (*shape[:-1], 1))).astype(F32)
    elif kind == "tiny":  # subnormals of the dtype among them
        x = x * F32(2.0**-22 if half else 2.0**-125)
    elif kind == "huge":
        x = x * F32(2.0**10 if half else 2.0**60)
    elif kind == "zeros":
        x = np.copysign(F32(0), x)
    elif kind == "sparse":
        x = np.where(rng.random((*shape[:-1], 1)) < 0.5, F32(0), x)
    elif kind == "ties":  # halves of the formats' steps
        x = np.round(x * 16) / F32(32)
    return rounded(x, held or dtype)


def spoil(rng: np.random.Generator, x: NDArray[np.float32]) -> NDArray[np.float32]:
    """A copy in which up to three elements are not finite."""
    x = x.copy()
    for _ in range(int(rng.integers(1, 4))):
        if x.size:
            x.flat[int(rng.integers(x.size))] = choose(rng, (np.inf, -np.inf, np.nan))
    return x


def laid_out(values: NDArray[np.float32], layout: str, dtype: str, device: str) -> tuple[Tensor, NDArray[np.float32]]:
    """A tensor in a layout, and its values: an expanded one repeats its first row."""
    x = torch.from_numpy(np.ascontiguousarray(values)).to(device, TORCH[dtype])
    if layout == "transposed" and x.dim() > 1:
        x = x.transpose(-1, -2).contiguous().transpose(-1, -2)
    elif layout == "sliced" and x.dim():  # every second element of something larger, NaN between them
        around = torch.full((*x.shape[:-1], 2 * x.shape[-1] + 3), float("nan"), device=device, dtype=x.dtype)
        around[..., 1 : 1 + 2 * x.shape[-1] : 2] = x
        x = around[..., 1 : 1 + 2 * x.shape[-1] : 2]
    elif layout == "expanded" and x.dim() > 1 and x.shape[0] > 1:
        x = x[:1].expand(x.shape)
        values = np.broadcast_to(values[:1], values.shape)
    return x, np.array(values, F32)


def replay(what: str, case: Any, device: str, run: Callable[[], None]) -> None:
    """Run a case; whatever it raises names the case and the command that runs it alone."""
    try:
        run()
    except Exception as error:
        nonfinite = " --nonfinite" if case.spoiled else ""
        command = f"python -m tests.fuzz {what} {case.seed} --device {device}{nonfinite}"
        raise AssertionError(f"{type(error).__name__}: {error}\n{case}\n{command}") from error


# -- comparing ---------------------------------------------------------------------------------------------------------


def coefficient(recipe: Recipe, gemm: str, contraction: int) -> float:
    """The bound of docs/numerics.md on |error| / Σ|a||b| on a GPU. The native ones are for terms of even magnitude: see
    `Product.dropped` for the others."""
    if recipe.mode(gemm) != "quantized":
        return 1e-5
    if recipe.name in ("mxfp8", "nvfp4"):
        return 1e-6
    fast = gemm == "fprop" and recipe.name in ("fp8-delayed", "fp8-current", "fp8-rowwise")
    return max(2e-3, 1e-6 * contraction if fast else 0.0)


def assert_close(
    found: Tensor,
    want: Product,
    dtype: str,
    what: str,
    *,
    exact: bool,
    bound: float | None = None,
    lost: float | NDArray[np.float64] = 0.0,
) -> None:
    """On a CPU (no bound) exactly, or within one rounding. On a GPU within bound·Σ|a||b| and `lost`, which is what
    emulation drops of very small values, or one rounding more before a sum, plus one rounding. A native product
    (`bound` over 1e-5) may also lose what a tensor core drops beside an outlier."""
    assert found.dtype == TORCH[dtype], f"{what} is {found.dtype}, not {dtype}"
    assert tuple(found.shape) == want.value.shape, f"{what} has shape {tuple(found.shape)}, not {want.value.shape}"
    got = found.detach().float().cpu().numpy()
    with np.errstate(invalid="ignore", over="ignore"):
        same = (got == want.value) | (np.isnan(got) & np.isnan(want.value))
        if not (exact and bound is None):
            slack = (2.0**-48 if bound is None else bound) * want.magnitude + lost
            near = np.abs(got.astype(np.float64) - want.value) <= last_place(want.value, dtype) + slack
            if bound is not None and bound > 1e-5 and not near.all():
                error = np.abs(got.astype(np.float64) - want.value) - last_place(want.value, dtype) - slack
                near[~near] = error[~near] <= want.dropped(~near)
            same |= near & np.isfinite(got) & np.isfinite(want.value)
        if bound is not None:  # float32 sums may pass the dtype's range on their way
            same |= (want.magnitude > 0.98 * LARGEST[dtype]) & ~np.isnan(want.value)
    if not same.all():
        at = tuple(int(i) for i in np.argwhere(~same)[0])
        raise AssertionError(
            f"{what}: {int((~same).sum())} of {same.size} differ, the first at {at}: "
            f"{got[at]!r} instead of {want.value[at]!r}, Σ|a||b| = {want.magnitude[at]:.6g}"
        )


def lost_in_emulation(contraction: int, a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    """Emulation loses what is under 2^-133 of a block whose largest value is under 2^-115."""
    with np.errstate(invalid="ignore"):
        largest = [np.abs(np.where(np.isfinite(t), t, 0)).max(initial=0.0) for t in (a, b)]
    return contraction * 2.0**-132 * float(sum(largest))
