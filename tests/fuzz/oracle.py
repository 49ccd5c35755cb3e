"""Linear and GroupedLinear in numpy, from docs/numerics.md, recipe-settings.md, training.md and experts.md. Nothing
of Octavo is imported here, nor in the two files below this one.

Products of decoded codes are summed in float64, rounded to float32, the bias added there, and rounded to the dtype."""

import ast
import math
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from tests.fuzz.formats import E2M1, E4M3, F32, FORMATS, LARGEST, rounded
from tests.fuzz.schemes import Quantized, Scheme, quantize

Multipliers = dict[str, float]
ONES: Multipliers = {"x": 1.0, "w": 1.0, "dy": 1.0}


# -- recipes -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    """A recipe's name and settings, and the schemes of its operands by orientation."""

    name: str
    settings: dict[str, object] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> "Recipe":
        """From `name` or `name(setting=value,...)`."""
        name, _, rest = text.partition("(")
        call = ast.parse(f"f({rest.removesuffix(')')})", mode="eval").body
        assert isinstance(call, ast.Call)
        settings = {
            str(k.arg): k.value.id if isinstance(k.value, ast.Name) else ast.literal_eval(k.value)
            for k in call.keywords
        }
        return cls(name, settings)

    def get(self, setting: str, default: object) -> object:
        return self.settings.get(setting, default)

    def mode(self, gemm: str) -> str:
        """quantized, high_precision or dequantized."""
        if self.name == "bf16" or self.get(gemm, "") == "bf16":
            return "high_precision"
        return "quantized" if gemm == "fprop" else str(self.get("backward", "quantized"))

    def scheme(self, operand: str, orientation: str) -> Scheme:
        """How x, w or dy is quantized along its rows, or along its columns."""
        default = "E5M2" if self.name in ("fp8-delayed", "fp8-current") else "E4M3"
        fmt = FORMATS[str(self.get("grad_format", default))] if operand == "dy" else E4M3
        if self.name == "fp8-delayed":
            return Scheme("tensorwise", fmt, given=True)
        if self.name == "fp8-current":
            return Scheme("tensorwise", fmt, pow2=bool(self.get("pow2", False)))
        if self.name == "fp8-rowwise":
            return Scheme("rowwise", fmt, pow2=bool(self.get("pow2", True)))
        if self.name == "fp8-block":
            return Scheme("block", fmt, pow2=self.get("scale", "pow2") == "pow2", square=operand == "w")
        if self.name == "mxfp8":
            square = operand == "w" and bool(self.get("square_weights", False))
            return Scheme("mx", fmt, square=square, rounding=str(self.get("rounding", "rceil")))
        assert self.name == "nvfp4"
        return Scheme(
            "nvfp4",
            E2M1,
            square=operand == "w" and bool(self.get("square_weights", True)),
            rht=operand != "w" and orientation == "column" and bool(self.get("rht", True)),
            stochastic=operand == "dy" and bool(self.get("stochastic", True)),
        )

    @property
    def exact(self) -> bool:
        """Whether the float64 sum has no rounding at all: FP8 codes with scales that multiply the sum."""
        return self.name in ("fp8-delayed", "fp8-current", "fp8-rowwise")


# -- one product -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Product:
    """float32 values, and Σ|a||b| of each, which bounds what another order of sums may change."""

    value: NDArray[np.float32]
    magnitude: NDArray[np.float64]
    factors: tuple[NDArray[np.float64], NDArray[np.float64]] | None = None  # a and b, of a · bᵀ

    def dropped(self, at: NDArray[np.bool_]) -> NDArray[np.float64]:
        """The most that an FP8 tensor core of an H200 drops, where `at` is true: of each product, the part under 2⁻¹⁰
        of the largest one."""
        assert self.factors is not None
        rows, columns = np.nonzero(at)
        terms = np.abs(self.factors[0][rows] * self.factors[1][columns])
        return np.minimum(terms, 2.0**-10 * terms.max(1, initial=0.0, keepdims=True)).sum(1)


def product(a: Quantized | NDArray, b: Quantized | NDArray) -> Product:
    """a · bᵀ."""
    (u, s), (v, t) = _terms(a), _terms(b)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        over_all = np.float64(1)
        if isinstance(a, Quantized) and a.over_all is not None:
            assert isinstance(b, Quantized) and b.over_all is not None
            over_all = np.float64(a.over_all * b.over_all)
        value = ((u @ v.T) * (s * t.T) * over_all).astype(F32)
        magnitude = (np.abs(u) @ np.abs(v).T) * (s * t.T) * over_all
        factors = (u * s * over_all, v * t)
    return Product(value, magnitude, factors)


def _terms(a: Quantized | NDArray) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """What is summed, and what multiplies the sum of each row."""
    if not isinstance(a, Quantized):
        return a.astype(np.float64), np.ones((1, 1))
    if a.scheme.kind in ("tensorwise", "rowwise"):
        return a.scheme.fmt.decode(a.codes), a.grid.astype(np.float64)
    return a.values(), np.ones((1, 1))


# -- a layer -----------------------------------------------------------------------------------------------------------


@dataclass
class Operands:
    """One call: x [M, K] and dy [M, N] hold values of `dtype`, w [N, K] of `weight_dtype`, bias [N] float32 values."""

    x: NDArray[np.float32]
    w: NDArray[np.float32]
    bias: NDArray[np.float32] | None
    dy: NDArray[np.float32]
    dtype: str
    weight_dtype: str
    multipliers: Multipliers = field(default_factory=lambda: dict(ONES))
    seed: tuple[int, int] = (0, 0)
    scales: NDArray[np.float32] | None = None  # of the bias, one for each row
    grad_dtype: str = ""  # of dW, if it is not the weight's: that of a main_grad


@dataclass
class Results:
    """Rounded to their dtypes, as float32; magnitudes for bounds."""

    y: Product
    dx: Product
    dw: Product
    db: Product
    dscales: Product


@np.errstate(over="ignore", invalid="ignore")
def linear(recipe: Recipe, given: Operands) -> Results:
    """y, dx, dW, db of one forward and backward, and the gradient of the bias' scales."""
    cast_w = rounded(given.w, given.dtype)
    y = fprop(recipe, given, cast_w)
    value, magnitude = y.value, y.magnitude
    if given.bias is not None:
        bias = given.bias if given.scales is None else given.scales[:, None] * given.bias
        value, magnitude = value + bias, magnitude + np.abs(bias)
    dx, dw = dgrad(recipe, given, cast_w), wgrad(recipe, given)
    weights = np.ones((len(given.dy), 1)) if given.scales is None else given.scales[:, None].astype(np.float64)
    terms = given.dy.astype(np.float64) * weights
    by_bias = given.dy.astype(np.float64) * (0.0 if given.bias is None else given.bias)
    return Results(
        Product(rounded(value, given.dtype), magnitude, y.factors),
        Product(rounded(dx.value, given.dtype), dx.magnitude, dx.factors),
        Product(rounded(dw.value, given.grad_dtype or given.weight_dtype), dw.magnitude, dw.factors),
        Product(rounded(terms.sum(0), given.weight_dtype), np.abs(terms).sum(0)),
        Product(by_bias.sum(1).astype(F32), np.abs(by_bias).sum(1)),
    )


def codes(recipe: Recipe, given: Operands, operand: str, orientation: str) -> Quantized:
    """An operand's codes; a column orientation is that of its transpose."""
    tensor, dtype = getattr(given, operand), given.weight_dtype if operand == "w" else given.dtype
    return quantize(
        recipe.scheme(operand, orientation),
        tensor if orientation == "row" else tensor.T,
        dtype,
        multiplier=given.multipliers[operand],
        seed=given.seed,
        stream=int(orientation == "column"),
    )


def fprop(recipe: Recipe, given: Operands, cast_w: NDArray[np.float32]) -> Product:
    if recipe.mode("fprop") == "quantized":
        return product(codes(recipe, given, "x", "row"), codes(recipe, given, "w", "row"))
    return product(given.x, cast_w)


def dgrad(recipe: Recipe, given: Operands, cast_w: NDArray[np.float32]) -> Product:
    mode = recipe.mode("dgrad")
    if mode == "quantized":
        return product(codes(recipe, given, "dy", "row"), codes(recipe, given, "w", "column"))
    if mode == "dequantized":
        return product(given.dy, codes(recipe, given, "w", "row").decoded(given.dtype)[:, : given.w.shape[1]].T)
    return product(given.dy, cast_w.T)


def wgrad(recipe: Recipe, given: Operands) -> Product:
    mode = recipe.mode("wgrad")
    if mode == "quantized":
        return product(codes(recipe, given, "dy", "column"), codes(recipe, given, "x", "column"))
    if mode == "dequantized":
        return product(given.dy.T, codes(recipe, given, "x", "row").decoded(given.dtype)[:, : given.x.shape[1]].T)
    return product(given.dy.T, given.x.T)


def group_rows(sizes: list[int], rows: int) -> list[slice]:
    """The rows of each group, of so many in all."""
    ends = np.cumsum([0, *sizes])
    assert ends[-1] <= rows
    return [slice(int(start), int(stop)) for start, stop in pairwise(ends)]


# -- delayed scaling ---------------------------------------------------------------------------------------------------


class Slot:
    """One tensor's window and multiplier."""

    def __init__(self, largest: float, recipe: Recipe) -> None:
        self.largest, self.recipe = largest, recipe
        self.window: list[float] = []
        self.multiplier, self.amax, self.nonfinite = 1.0, 0.0, 0
        self.lent: float | None = None  # the smallest multiplier of other experts, for one that has seen nothing

    def observe(self, x: NDArray[np.float32]) -> None:
        """NaN wins over everything, so that it is counted."""
        amax = float(np.abs(x).max(initial=0))
        self.amax = math.nan if math.isnan(amax + self.amax) and not math.isinf(amax) else max(self.amax, amax)

    def used(self, x: NDArray[np.float32]) -> float:
        """The multiplier that casts x: while nothing is known that of x itself, 1 if x is zero, NaN if not finite."""
        if self.recipe.get("cold_start", "current") == "one" or self.window:
            return self.multiplier
        if self.lent is not None:
            return self.lent
        amax = float(np.abs(x).max(initial=0))
        if not math.isfinite(amax):
            return math.nan
        if amax == 0:
            return self._margin()
        with np.errstate(over="ignore"):  # kept in float32's range before the margin, in a window after it
            multiplier = min(F32(self.largest) / F32(amax), F32(LARGEST["float32"]))
        return float(F32(multiplier * F32(self._margin())))

    def step(self) -> None:
        amax, self.amax = self.amax, 0.0
        if not math.isfinite(amax):
            self.nonfinite += 1
        elif amax > 0:
            self.window = [*self.window, amax][-int(str(self.recipe.get("history", 1024))) :]
            newest = self.recipe.get("algorithm", "max") == "most_recent"
            self.multiplier = self._from(amax if newest else max(self.window))

    def _margin(self) -> float:
        return 2.0 ** -int(str(self.recipe.get("margin", 0)))

    def _from(self, amax: float) -> float:
        with np.errstate(over="ignore"):
            multiplier = F32(F32(self.largest) / F32(amax) * F32(self._margin()))
        return float(min(multiplier, F32(LARGEST["float32"])))


class Memory:
    """The slots of x, w and dy of a layer, or of one expert."""

    def __init__(self, recipe: Recipe) -> None:
        self.assignments = {name: Slot(recipe.scheme(name, "row").fmt.max, recipe) for name in ("x", "w", "dy")}

    def multipliers(self, x: NDArray[np.float32], w: NDArray[np.float32], dy: NDArray[np.float32]) -> Multipliers:
        return {name: self.assignments[name].used(tensor) for name, tensor in (("x", x), ("w", w), ("dy", dy))}

    def step(self) -> None:
        for assignment in self.assignments.values():
            assignment.step()


def step_experts(memories: list[Memory]) -> None:
    """Ends the step of all experts of a layer. Those that have seen an amax lend the smallest of their multipliers."""
    for memory in memories:
        memory.step()
    for name in ("x", "w", "dy"):
        assignments = [memory.assignments[name] for memory in memories]
        known = [assignment.multiplier for assignment in assignments if assignment.window]
        for assignment in assignments:
            assignment.lent = min(known, default=None)


def accumulated(main: NDArray[np.float32], dw: Product, dtype: str) -> Product:
    """dW, already in main_grad's dtype, added to what was there."""
    return Product(rounded(main + dw.value, dtype), dw.magnitude + np.abs(main), dw.factors)
