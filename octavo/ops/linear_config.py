"""Settings of a call of a linear layer: which GEMMs it runs, on which operands, and what backward keeps of them."""

from dataclasses import dataclass, fields
from functools import cached_property
from typing import NamedTuple

import torch

from octavo.errors import check_choice
from octavo.quant.quantizer import Quantizer, QuantizerPair
from octavo.quant.scale_blocks import are_transposed, is_square
from octavo.quant.tensorwise import Tensorwise
from octavo.recipes import BF16, LinearQuant, Recipe
from octavo.runtime.contract import DTYPES
from octavo.runtime.deferred_wgrad import dy_buffer_count
from octavo.scaling import delayed_scaling
from octavo.values import Value, register


def call_key(name: str, recipe: Recipe, **settings: str | bool) -> str:
    """Return the string of a call's config without making the config: a compiler traces this function, and the parser
    caches."""
    # quoted by hand: a compiler may not know repr()
    pairs = [f"{field}='{v}'" if isinstance(v, str) else f"{field}={v}" for field, v in settings.items()]
    return name + "(recipe=" + recipe.key + "," + ",".join(pairs) + ")"


_CHOICES = {
    "x": ("plain", "codes"),
    "weight": ("plain", "codes", "quantized"),
    "main_grad": ("", "add", "overwrite"),
    "deferred_wgrad": ("", "queue", "buffers"),
    "tail": ("zero", "untouched"),
    "x_columns": ("forward", "backward", "from_x"),
    "dtype": tuple(DTYPES),
    "weight_dtype": tuple(DTYPES),
    "bias_dtype": ("", *DTYPES),
    "scales_dtype": ("", *DTYPES),
}
# the form in which an unchanged operand is kept, by the mode of its backward GEMM
_KEPT = {"quantized": "column", "high_precision": "plain", "dequantized": "row"}


class OperandCast(NamedTuple):
    """How forward casts x or w."""

    pair: QuantizerPair  # the quantizers of both orientations, None for one that is not made
    scaling: slice  # the operand's part of `Inputs.scaling`
    all_reduced: slice  # the operand's part of `Inputs.all_reduced`: row's amax and column's, or nothing


@dataclass(frozen=True, repr=False, eq=False)
class LinearSettings(Value):
    """Settings that the linear and the grouped linear layer share, and properties that follow from them."""

    recipe: Recipe = BF16()  # noqa: RUF009  # a frozen value
    dtype: str = "float32"  # of y
    weight_dtype: str = "float32"
    bias_dtype: str = ""  # empty: no bias
    wants_dx: bool = False
    wants_dw: bool = False  # returned, in a buffer, or left to `backward_dw()`
    wants_db: bool = False
    wants_ds: bool = False  # of the scales of the bias
    x: str = "plain"  # or "codes" of fprop's quantizer; x itself is then the anchor of their gradient, if they have one
    x_has_columns: bool = False  # these codes come with the columns that dw needs
    weight: str = "plain"  # or "codes", passed besides the weight; or "quantized": a quantized weight, only codes
    w_has_columns: bool = True  # such codes come with the columns that dx needs
    observe: bool = False  # delayed: running amaxes of x and w are raised in place, and in backward that of dy
    measures_x: bool = False  # delayed: x is uncalibrated, and scaled by its own amax until a step
    measures_w: bool = False
    measures_dy: bool = False
    main_grad: str = ""  # dw goes to a buffer: "add", "overwrite"
    dummy_grad: bool = False  # and zeros are returned in its place, so that hooks fire
    # dw is left to `backward_dw()`: backward puts its operands into a "queue", or in a graph into "buffers" that
    # forward returns (`octavo.runtime.deferred_wgrad`)
    deferred_wgrad: str = ""
    # or "backward": a fused operation makes x's column codes again for dw; or "from_x": backward keeps x itself, and
    # casts it once more where it can by the same scale
    x_columns: str = "forward"
    recompute_w_columns: bool = False  # in backward, from the weight itself: one more read, and nothing kept
    x_all_reduced: bool = False  # x's amaxes are given, row's and column's, all-reduced
    w_all_reduced: bool = False

    # settings that only one of the two layers has, as the other one has them
    quantize_output = False
    scales_dtype = ""
    dgrad_out = False
    scales_dy_alone = False
    group_tensors = 0  # intermediates after x's that say where groups are
    # whether forward keeps x's amax, which it measured: backward casts x's columns by it and does not measure
    keeps_x_amax = False
    keeps_w_amax = False  # the same of w's amax. One that is all-reduced is an input, and backward needs no other
    keeps_width = True  # whether K must be kept separately, as the shape of an empty tensor

    def validate(self) -> None:
        for field in fields(self):  # type: ignore[arg-type]  # registered, it is a dataclass
            value = getattr(self, field.name)
            if field.name in _CHOICES:
                check_choice(value, _CHOICES[field.name], what=field.name)

    @cached_property
    def quant(self) -> LinearQuant:
        return self.recipe.linear()

    @cached_property
    def shipped(self) -> bool:
        """Whether all quantizers are Octavo's own. A replay would miss what a user's quantizer does in Python."""
        gemms = self.quant.fprop, self.quant.dgrad, self.quant.wgrad
        return all(spec is None or spec.shipped for gemm in gemms for spec in (gemm.left, gemm.right))

    @cached_property
    def y_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    # -- operands that backward keeps ----------------------------------------------------------------------------------

    @cached_property
    def wgrad_mode(self) -> str:
        """The mode of the recipe's wgrad, unless x arrives in a form that changes it."""
        return self.quant.wgrad.mode

    @cached_property
    def kept_x(self) -> str:
        """The form in which backward needs x: "" (not at all), "plain", "row", "column"; or "again": x itself, to make
        its column codes once more."""
        if not self.wants_dw:
            return ""
        if self.x == "codes":
            return "column" if self.x_has_columns and self.wgrad_mode == "quantized" else "row"
        if self.x_columns == "backward" and self.wgrad_mode == "quantized":
            return ""
        # In the first step of delayed scaling, forward's inverse scale is not at hand, nor is an amax that ranks agreed
        # on; a dw that a graph defers reads what forward left.
        other = self.measures_x or self.x_all_reduced or self.deferred_wgrad == "buffers"
        from_x = self.x_columns == "from_x" and self.wgrad_mode == "quantized" and not other
        return "again" if from_x else _KEPT[self.wgrad_mode]

    @cached_property
    def kept_w(self) -> str:
        """The form in which backward needs w: "" (not at all), "plain", "row", "column"; "again": the weight itself, to
        make its column codes once more; or "transposed": row codes, to be transposed. Row codes that are not
        transposed are dequantized: a second rounding would add to the first."""
        if not self.wants_dx:
            return ""
        mode = self.quant.dgrad.mode
        if mode != "quantized":
            return "row" if self.weight == "quantized" else _KEPT[mode]
        if self.weight != "plain" and not self.w_has_columns:
            return "transposed" if are_transposed(self.quant.fprop.right, self.quant.dgrad.right) else "row"
        # in the first step of delayed scaling, forward's inverse scale is not at hand
        again = self.recompute_w_columns and self.weight == "plain" and not self.measures_w
        return "again" if again else "column"

    @cached_property
    def made_x(self) -> str:
        """The orientation of x's codes that forward makes for backward: "" or "row", "column"."""
        return "" if of_orientation(self.kept_x, self.x_pair) is None else self.kept_x

    @cached_property
    def made_w(self) -> str:
        """The orientation of w's codes that forward makes for backward: "" or "row", "column"."""
        return "" if of_orientation(self.kept_w, self.w_pair) is None else self.kept_w

    # -- quantizers of both orientations, None for one that is not made ------------------------------------------------

    @cached_property
    def casts_x(self) -> bool:
        """Whether forward quantizes x."""
        return self.x == "plain" and self.quant.fprop.left is not None

    @cached_property
    def casts_w(self) -> bool:
        """Whether forward quantizes w."""
        return any(spec is not None for spec in self.w_pair)

    @cached_property
    def x_pair(self) -> QuantizerPair:
        """The quantizers with which forward casts x."""
        if self.x == "codes":
            return None, None
        return self.quant.fprop.left, self.quant.wgrad.right if self.kept_x == "column" else None

    @cached_property
    def w_pair(self) -> QuantizerPair:
        """The quantizers with which forward casts w."""
        if self.weight != "plain":
            return None, None
        return self.quant.fprop.right, self.quant.dgrad.right if self.kept_w == "column" else None

    @cached_property
    def dy_pair(self) -> QuantizerPair:
        """The quantizers with which backward casts dy."""
        return (
            self.quant.dgrad.left if self.wants_dx and self.kept_w != "row" else None,
            self.quant.wgrad.left if self.wants_dw and self.wgrad_mode == "quantized" else None,
        )

    @cached_property
    def x_cast(self) -> OperandCast:
        return OperandCast(self.x_pair, self.x_scaling, slice(0, 2 if self.x_all_reduced else 0))

    @cached_property
    def w_cast(self) -> OperandCast:
        first = 2 if self.x_all_reduced else 0
        return OperandCast(self.w_pair, self.w_scaling, slice(first, first + 2 if self.w_all_reduced else first))

    @cached_property
    def is_stochastic(self) -> bool:
        """Whether backward rounds stochastically."""
        return any(spec is not None and spec.is_stochastic for spec in self.dy_pair)

    # -- delayed scaling: where each operand's part of `Inputs.scaling` is ---------------------------------------------

    @cached_property
    def x_scaling(self) -> slice:
        return delayed_scaling.part_of(delayed_scaling.X, self.measures_x)

    @cached_property
    def w_scaling(self) -> slice:
        return delayed_scaling.part_of(delayed_scaling.W, self.measures_w)

    @cached_property
    def dy_scaling(self) -> slice:
        """dy's part of `Inputs.scaling`; empty if backward does not cast dy."""
        if self.dy_pair == (None, None):
            return slice(0)
        return delayed_scaling.part_of(delayed_scaling.DY, self.measures_dy)

    # -- the weight gradient -------------------------------------------------------------------------------------------

    @cached_property
    def returns_dw(self) -> bool:
        """Whether backward returns a gradient of the weight: dw, or zeros that stand for it."""
        return self.wants_dw and not self.deferred_wgrad and (not self.main_grad or self.dummy_grad)

    @cached_property
    def dy_buffers(self) -> int:
        """The number of buffers for dy that forward returns for a deferred dw."""
        return dy_buffer_count(self.dy_pair[1]) if self.deferred_wgrad == "buffers" else 0

    @cached_property
    def output_parts(self) -> int:
        """The number of tensors of a quantized y, the first of the auxiliary outputs."""
        return self.quant.parts if self.quantize_output else 0

    @cached_property
    def dy_buffer_auxiliary(self) -> slice:
        """The places of dy's buffers among the auxiliary outputs."""
        return slice(self.output_parts, self.output_parts + self.dy_buffers)

    @cached_property
    def deferred_span(self) -> tuple[int, int]:
        """The span of a deferred dw's tensors in a flat list of all that forward makes: dy's buffers, x as a copy or as
        codes, and the places of groups."""
        places = self.dy_buffer_auxiliary
        spec = of_orientation(self.made_x, self.x_pair)
        of_x = 1 if self.kept_x == "plain" else 0 if spec is None else 3 if spec.two_level else 2
        return 1 + places.start, 1 + places.stop + of_x + self.group_tensors  # y is the first


def of_orientation(orientation: str, pair: QuantizerPair) -> Quantizer | None:
    """Return the quantizer of the "row" or of the "column"; None for any other word."""
    return pair[0] if orientation == "row" else pair[1] if orientation == "column" else None


@register("linear")
class Config(LinearSettings):
    """The settings of a call of the dense layer: with its tensors, they decide what it does."""

    quantize_output: bool = False

    @cached_property
    def wgrad_mode(self) -> str:
        """The recipe's wgrad mode, except that x given as codes in long blocks cannot be transposed: its values are
        used."""
        spec = self.quant.fprop.left
        if self.x == "codes" and self.quant.wgrad.mode != "dequantized" and not self.x_has_columns:
            turns = self.quant.wgrad.mode == "quantized" and spec is not None and is_square(spec.block)
            return "quantized" if turns else "dequantized"
        return self.quant.wgrad.mode

    @cached_property
    def keeps_x_amax(self) -> bool:  # type: ignore[override]
        if self.x_columns != "backward" or not self.casts_x or not self.wants_dw or self.kept_x:
            return False
        return not self.x_all_reduced and self._measures(self.quant.fprop.left, self.quant.wgrad.right)

    @cached_property
    def keeps_w_amax(self) -> bool:  # type: ignore[override]
        if self.kept_w != "again" or self.w_all_reduced:
            return False
        return self._measures(self.quant.fprop.right, self.quant.dgrad.right)

    def _measures(self, row: Quantizer | None, column: Quantizer | None) -> bool:
        """Return whether forward measures an amax of the whole tensor for the row, from which the column's scale
        follows."""
        return not self.recipe.stateful and isinstance(row, Tensorwise) and row == column

    @cached_property
    def keeps_width(self) -> bool:  # type: ignore[override]
        """Whether K must be kept separately: packed row codes do not tell their number of columns, and there may be no
        saved operand at all."""
        packed = self.quant.fprop.left is not None and self.quant.fprop.left.fmt.packed > 1
        nothing = self.wants_dw and not self.kept_x and not self.kept_w
        rows = self.kept_x == "row" or self.kept_w in ("row", "transposed")
        return nothing or (packed and rows)
