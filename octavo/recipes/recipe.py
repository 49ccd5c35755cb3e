"""`Recipe`: for each of the three GEMMs, a quantizer for each operand and the accumulation of the sum.

    fprop   y  = x · wᵀ        operands x, w      contracted over in_features
    dgrad   dx = dy · w        operands dy, w     over out_features
    wgrad   dw = dyᵀ · x       operands dy, x     over tokens

A user picks a `Recipe`; `linear()` resolves it to a `LinearQuant`, which is all that a layer sees.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from octavo.errors import UnsupportedConfig, check_choice
from octavo.quant.quantizer import Quantizer
from octavo.values import Value, shown

GEMMS = ("fprop", "dgrad", "wgrad")
MODES = ("quantized", "high_precision", "dequantized")
LONGEST = 4096  # characters of a recipe's string


@dataclass(frozen=True)
class GemmQuant:
    """One GEMM: how its operands are quantized, in the order of the table above, and how its sum is accumulated.

    mode "quantized" multiplies codes; "high_precision" the unquantized operands; "dequantized" the dequantized values
    of the forward codes of x and w, and dy as it is."""

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
        return self if mode == "quantized" else GemmQuant(mode=mode)


@dataclass(frozen=True)
class LinearQuant:
    """The three GEMMs of a linear layer."""

    fprop: GemmQuant  # x, w
    dgrad: GemmQuant  # dy, w
    wgrad: GemmQuant  # dy, x

    @property
    def parts(self) -> int:
        """Counts the tensors of a quantized x: codes, scale, and a global scale in two-level schemes."""
        return 3 if self.fprop.left is not None and self.fprop.left.two_level else 2

    @property
    def draws(self) -> bool:
        """Whether backward rounds stochastically."""
        row, column = self.dgrad.left, self.wgrad.left
        return (row is not None and row.draws) or (column is not None and column.draws)

    @classmethod
    def of(
        cls,
        *,
        x: tuple[Quantizer, Quantizer],
        w: tuple[Quantizer, Quantizer],
        dy: tuple[Quantizer, Quantizer],
        fast: tuple[str, ...] = (),
    ) -> "LinearQuant":
        """Builds one from each tensor's (row, column) quantizers, and the names of the GEMMs that accumulate fast."""
        mode = {gemm: "fast" if gemm in fast else "precise" for gemm in GEMMS}
        return cls(
            fprop=GemmQuant(x[0], w[0], mode["fprop"]),
            dgrad=GemmQuant(dy[0], w[1], mode["dgrad"]),
            wgrad=GemmQuant(dy[1], x[1], mode["wgrad"]),
        )


class Recipe(Value):
    """A training precision. A subclass declares its settings and `gemms`; all subclasses have the overrides below.

    `wgrad="bf16"` (or fprop=, dgrad=) keeps one GEMM in the operands' own precision. `backward="high_precision"` keeps
    both backward GEMMs there, and saves unquantized activations; `backward="dequantized"` runs them on the dequantized
    values of the forward codes, so that the gradient is exactly that of the quantized forward."""

    stateful = False  # needs a DelayedState
    _resolved: ClassVar[LinearQuant]

    def gemms(self) -> LinearQuant:
        raise NotImplementedError(f"{type(self).__name__} must define gemms() -> LinearQuant")

    def linear(self) -> LinearQuant:
        """Returns the resolved recipe: every operand's quantizer, with the overrides applied."""
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
        return replace(quant, **{gemm: getattr(quant, gemm).as_mode(mode) for gemm, mode in modes.items()})

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


def check_gemm_names(names: object, *, what: str) -> None:
    if not isinstance(names, tuple) or any(n not in GEMMS for n in names) or len(set(names)) != len(names):
        raise UnsupportedConfig(f"{what} is a tuple of names from {', '.join(GEMMS)}, each once, got {names!r}.")


def check_length(text: str) -> None:
    """Raises if a recipe's string is far longer than any recipe needs."""
    if len(text) > LONGEST:
        raise UnsupportedConfig(
            f"A recipe's string has at most {LONGEST} characters, got {len(text)}: {shown(text)!r}. "
            "Leave out the settings that have their defaults."
        )
