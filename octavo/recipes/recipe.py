"""`Recipe`: for each of the three GEMMs, a quantizer for each operand and the accumulation of the sum.

    fprop   y  = x · wᵀ        operands x, w      contracted over in_features
    dgrad   dx = dy · w        operands dy, w     over out_features
    wgrad   dw = dyᵀ · x       operands dy, x     over tokens

A user picks a `Recipe`; `linear()` resolves it to a `LinearQuant`, which is all that a layer sees.
"""

from dataclasses import dataclass, field, replace
from typing import ClassVar

from octavo.errors import UnsupportedConfig, check_choice
from octavo.formats import E4M3, E5M2, check_format
from octavo.quant.pairs import check_pair
from octavo.quant.quantizer import Quantizer
from octavo.values import Value, excerpt

OPERANDS = {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}
GEMMS = tuple(OPERANDS)
MODES = ("quantized", "high_precision", "dequantized")
LONGEST = 4096  # characters of a recipe's string


@dataclass(frozen=True)
class GemmQuant:
    """One GEMM of a linear layer: a quantizer for each operand, and the accumulation of the sum.

    Args:
        left: the quantizer of the first operand: x in fprop, dy in dgrad and wgrad. None unless mode is "quantized".
        right: the quantizer of the second operand: w in fprop and dgrad, x in wgrad. None unless mode is "quantized".
        accumulation: "precise", the default, or "fast": whether the GPU may accumulate FP8 products in fewer bits.
        mode: "quantized", the default, multiplies codes. "high_precision" multiplies the unquantized operands.
            "dequantized" multiplies dy as it is by the values that the forward codes of x or w stand for.

    Raises:
        UnsupportedConfig: a setting has another value, or mode and quantizers do not fit each other.

    Example:
        >>> octavo.recipe("fp8-current").linear().dgrad
        GemmQuant(left=tensorwise(fmt=E5M2), right=tensorwise, accumulation='precise', mode='quantized')
    """

    left: Quantizer | None = None
    right: Quantizer | None = None
    accumulation: str = "precise"
    mode: str = "quantized"

    def __post_init__(self) -> None:
        check_choice(self.accumulation, ("fast", "precise"), what="accumulation")
        check_choice(self.mode, MODES, what="mode")
        if (self.mode == "quantized") != (self.left is not None and self.right is not None):
            raise UnsupportedConfig(
                f"A GEMM with mode {self.mode!r} has two quantizers if it is 'quantized' and none otherwise, "
                f"got {self.left} and {self.right}."
            )

    def as_mode(self, mode: str) -> "GemmQuant":
        """Return this GEMM in another mode.

        Args:
            mode: "quantized", "high_precision" or "dequantized".

        Returns:
            This object for "quantized", else a GEMM without quantizers.

        Example:
            >>> octavo.recipe("mxfp8").linear().wgrad.as_mode("high_precision").left is None
            True
        """
        return self if mode == "quantized" else GemmQuant(mode=mode)


@dataclass(frozen=True)
class LinearQuant:
    """The three GEMMs of a linear layer, as `Recipe.linear()` resolves them.

    Args:
        fprop: y = x · wᵀ, with operands x and w.
        dgrad: dx = dy · w, with operands dy and w.
        wgrad: dw = dyᵀ · x, with operands dy and x.

    Example:
        >>> quant = octavo.recipe("fp8-block(wgrad='bf16')").linear()
        >>> quant.fprop.left, quant.fprop.right, quant.dgrad.left, quant.wgrad.mode
        (block-1d, block-2d, block-1d, 'high_precision')
    """

    fprop: GemmQuant  # x, w
    dgrad: GemmQuant  # dy, w
    wgrad: GemmQuant  # dy, x

    @property
    def parts(self) -> int:
        """The number of tensors of a quantized x: codes, scale, and a global scale in two-level schemes."""
        return 3 if self.fprop.left is not None and self.fprop.left.two_level else 2

    @property
    def is_stochastic(self) -> bool:
        """Whether backward rounds stochastically."""
        row, column = self.dgrad.left, self.wgrad.left
        return (row is not None and row.is_stochastic) or (column is not None and column.is_stochastic)

    @property
    def quantizes_weight(self) -> bool:
        """Whether a GEMM multiplies codes of w."""
        return self.fprop.right is not None or self.dgrad.right is not None

    @classmethod
    def of(
        cls,
        *,
        x: tuple[Quantizer, Quantizer],
        w: tuple[Quantizer, Quantizer],
        dy: tuple[Quantizer, Quantizer],
        fast: tuple[str, ...] = (),
    ) -> "LinearQuant":
        """Return the three GEMMs from the quantizers of each tensor. `Recipe.gemms` of a recipe of yours calls it.

        Args:
            x: the quantizers of x for fprop, contracted over in_features, and for wgrad, contracted over tokens.
            w: those of w for fprop, contracted over in_features, and for dgrad, contracted over out_features.
            dy: those of dy for dgrad, contracted over out_features, and for wgrad, contracted over tokens.
            fast: names of the GEMMs that may accumulate fast; the others are precise.

        Returns:
            The three GEMMs, all quantized. The recipe checks that the quantizers of each GEMM fit each other.

        Raises:
            UnsupportedConfig: `fast` is no tuple of names of GEMMs.

        Example:
            >>> x, dy = octavo.quant.Tensorwise(), octavo.quant.Tensorwise(octavo.formats.E5M2)
            >>> octavo.recipes.LinearQuant.of(x=(x, x), w=(x, x), dy=(dy, dy), fast=("fprop",)).fprop
            GemmQuant(left=tensorwise, right=tensorwise, accumulation='fast', mode='quantized')
        """
        check_gemm_names(fast, what="LinearQuant.of: fast")
        mode = {gemm: "fast" if gemm in fast else "precise" for gemm in GEMMS}
        return cls(
            fprop=GemmQuant(x[0], w[0], mode["fprop"]),
            dgrad=GemmQuant(dy[0], w[1], mode["dgrad"]),
            wgrad=GemmQuant(dy[1], x[1], mode["wgrad"]),
        )


class Recipe(Value):
    """Base class of recipes: how the three GEMMs of a linear layer are quantized.

    Pass a recipe, or its string, to `octavo.convert`, `octavo.autocast` or a layer. A recipe of your own is a
    registered subclass that declares its settings and defines `gemms`. Every recipe but `bf16` takes these overrides,
    by name; one of your own takes those that it declares as fields:

        fprop      "quantized" by default; "bf16" runs the GEMM of forward in the operands' own precision
        dgrad      "quantized" by default; "bf16" does so for the GEMM of dx
        wgrad      "quantized" by default; "bf16" does so for the GEMM of dw, which sums over all tokens. Try it first
                   if training with quantized gradients loses accuracy
        backward   "quantized" by default. "high_precision" runs both backward GEMMs in the operands' own precision and
                   keeps x unquantized. "dequantized" multiplies dy as it is by the values that the forward codes of w
                   and x stand for

    Args:
        *args: the subclass's settings, in order.
        **settings: the subclass's settings, by name.

    Raises:
        UnsupportedConfig: a setting has a value without a meaning, or no GEMM takes the two quantizers of a GEMM that
            the recipe quantizes.
        UnknownSetting: the recipe has no such setting.

    Example:
        >>> r = octavo.recipes.Block(scale="fp32")
        >>> str(r), octavo.recipe(str(r)) == r
        ("fp8-block(scale='fp32')", True)
        >>> octavo.Linear(256, 256, recipe=r).recipe
        fp8-block(scale='fp32')
    """

    stateful = False  # needs a DelayedState
    _resolved: ClassVar[LinearQuant]

    def gemms(self) -> LinearQuant:
        """Return the quantizers of the three GEMMs. Every recipe defines it; layers call `linear`, which applies the
        overrides to it.

        Returns:
            The three GEMMs before the overrides, usually by `LinearQuant.of`.

        Raises:
            NotImplementedError: the subclass does not define it.

        Example:
            >>> octavo.recipe("fp8-block(wgrad='bf16')").gemms().wgrad.mode
            'quantized'
        """
        raise NotImplementedError(f"{type(self).__name__} must define gemms() -> LinearQuant")

    def linear(self) -> LinearQuant:
        """Return the three GEMMs of the recipe, with the overrides applied: all that a layer sees of a recipe.

        Returns:
            A quantizer for each operand of fprop, dgrad and wgrad, their accumulation and mode.

        Example:
            >>> octavo.recipe("mxfp8").linear().fprop
            GemmQuant(left=mx, right=mx, accumulation='precise', mode='quantized')
        """
        return self._resolved

    def __post_init__(self) -> None:
        super().__post_init__()
        check_length(self.key)
        object.__setattr__(self, "_resolved", self._resolve())  # at construction, so that traced code only reads it

    def _resolve(self) -> LinearQuant:
        quant = self.gemms()
        backward = getattr(self, "backward", "quantized")
        modes = {"fprop": "quantized", "dgrad": backward, "wgrad": backward}
        for gemm in GEMMS:
            if getattr(self, gemm, "quantized") == "bf16":
                modes[gemm] = "high_precision"
        resolved = {gemm: getattr(quant, gemm).as_mode(mode) for gemm, mode in modes.items()}
        for gemm, (left, right) in OPERANDS.items():  # a pair that an override leaves out may be any
            pair = resolved[gemm]
            if pair.left is not None and pair.right is not None:
                where = f"The operands {left} and {right} of {gemm} in {type(self).__name__}"
                check_pair(pair.left, pair.right, operands=where)
        return replace(quant, **resolved)

    def validate(self) -> None:
        name = type(self).__name__
        for gemm in GEMMS:
            check_choice(getattr(self, gemm, "quantized"), ("quantized", "bf16"), what=f"{name}.{gemm}")
        check_choice(getattr(self, "backward", "quantized"), MODES, what=f"{name}.backward")
        if getattr(self, "backward", "quantized") == "dequantized" and getattr(self, "fprop", "quantized") == "bf16":
            raise UnsupportedConfig(
                f"{name}(backward='dequantized') reuses the forward codes, and fprop='bf16' makes none. "
                "Use backward='high_precision' with it."
            )
        check_gemm_names(getattr(self, "fast", ()), what=f"{name}.fast")


@dataclass(frozen=True, repr=False, eq=False)
class Overridable(Recipe):
    """The base of recipes that quantize: the overrides as fields. They are keywords, so that a recipe's own settings
    come first, in calls and in its string."""

    fprop: str = field(default="quantized", kw_only=True)
    dgrad: str = field(default="quantized", kw_only=True)
    wgrad: str = field(default="quantized", kw_only=True)
    backward: str = field(default="quantized", kw_only=True)

    def validate(self) -> None:
        super().validate()
        check_format(getattr(self, "grad_format", E4M3), (E4M3, E5M2), what=f"{type(self).__name__}.grad_format")


def check_gemm_names(names: object, *, what: str) -> None:
    if not isinstance(names, tuple) or any(n not in GEMMS for n in names) or len(set(names)) != len(names):
        raise UnsupportedConfig(f"{what} is a tuple of names from {', '.join(GEMMS)}, each once, got {names!r}.")


def check_length(text: str) -> None:
    """Raise if a recipe's string is far longer than any recipe needs."""
    if len(text) > LONGEST:
        raise UnsupportedConfig(
            f"A recipe's string has at most {LONGEST} characters, got {len(text)}: {excerpt(text)!r}. "
            "Leave out the settings that have their defaults."
        )
