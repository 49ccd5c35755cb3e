"""What decides what a call of a linear layer does, but for its tensors: which GEMMs there are, in which operands, and
what backward keeps for its own."""

from dataclasses import fields
from functools import cached_property

import torch
from torch import Tensor

from octavo.errors import UnsupportedConfig, check_choice
from octavo.layers.contract import DTYPES
from octavo.quant.blocks import is_square
from octavo.quant.qtensor import Parts
from octavo.quant.quantizer import QuantizerPair
from octavo.recipes import BF16, LinearQuant, Recipe
from octavo.values import Value, register
from octavo.wgrad import deferred as post

Slots = tuple[Tensor | None, Tensor | None, Tensor | None]  # the same in a fixed number of places
NOTHING: Slots = (None, None, None)


def padded(parts: Parts) -> Slots:
    """A QTensor's tensors in a fixed number of places."""
    first, second, third = (*parts, None, None)[:3]
    return first, second, third


def call_key(name: str, recipe: Recipe, **settings: str | bool) -> str:
    """The string of a call's config, written without making one: a compiler traces this, and the parser remembers."""
    # quoted here: what repr() is, a compiler may not know
    pairs = [f"{field}='{v}'" if isinstance(v, str) else f"{field}={v}" for field, v in settings.items()]
    return name + "(recipe=" + recipe.key + "," + ",".join(pairs) + ")"


_CHOICES = {
    "x": ("plain", "codes"),
    "weight": ("plain", "codes", "held"),
    "observe": ("", "returned", "in_place"),
    "main_grad": ("", "add", "overwrite"),
    "delay": ("", "mailbox", "post"),
    "tail": ("zero", "untouched"),
    "x_columns": ("forward", "backward"),
    "dtype": tuple(DTYPES),
    "weight_dtype": tuple(DTYPES),
    "bias_dtype": ("", *DTYPES),
    "scales_dtype": ("", *DTYPES),
}
_LETTERS = {"grads": "xwbs", "measured": "xwd"}


class Matmuls(Value):
    """The settings, and what follows from them, of the layers of one weight and of many."""

    recipe: Recipe
    dtype: str
    weight: str
    measured: str
    delay: str

    def validate(self) -> None:
        for field in fields(self):  # type: ignore[arg-type]  # registered, it is a dataclass
            value = getattr(self, field.name)
            if field.name in _CHOICES:
                check_choice(value, _CHOICES[field.name], what=field.name)
            elif field.name in _LETTERS and not set(value) <= set(_LETTERS[field.name]):
                raise UnsupportedConfig(f"{field.name} takes letters of {_LETTERS[field.name]!r}, got {value!r}.")

    @cached_property
    def quant(self) -> LinearQuant:
        return self.recipe.linear()

    @cached_property
    def shipped(self) -> bool:
        """Whether all quantizers are Octavo's: a user's may launch kernels that Octavo does not know of."""
        gemms = self.quant.fprop, self.quant.dgrad, self.quant.wgrad
        return all(spec is None or spec.shipped for gemm in gemms for spec in (gemm.left, gemm.right))

    @cached_property
    def kept_w(self) -> str:
        """What backward needs of w."""
        raise NotImplementedError

    @cached_property
    def w_pair(self) -> QuantizerPair:
        """Quantizers of the orientations of w that forward makes."""
        if self.weight != "plain":
            return None, None
        return self.quant.fprop.right, self.quant.dgrad.right if self.kept_w == "column" else None

    @cached_property
    def dy_pair(self) -> QuantizerPair:
        """Quantizers of the orientations of dy that backward makes."""
        raise NotImplementedError

    @cached_property
    def draws(self) -> bool:
        """Whether backward rounds stochastically."""
        return any(spec is not None and spec.draws for spec in self.dy_pair)

    @cached_property
    def slots(self) -> int:
        """How many tensors wait for dy in the post."""
        return post.slots(self.delay, self.dy_pair[1])

    @cached_property
    def y_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]


@register("linear")
class Config(Matmuls):
    """Everything that decides what a call does, but for its tensors."""

    recipe: Recipe = BF16()
    dtype: str = "float32"  # of y
    weight_dtype: str = "float32"
    bias_dtype: str = ""  # empty: no bias
    grads: str = ""  # which gradients are wanted: letters of "xwb"
    x: str = "plain"  # or "codes"
    weight: str = "plain"  # or "codes", given besides the weight; or "held": given, and there is nothing else
    observe: str = ""  # delayed scaling's amaxes are measured, and "returned" or raised "in_place"
    measured: str = ""  # delayed: letters of "xwd" (d is dy): no step may have seen them, and they scale themselves
    quantize_output: bool = False
    main_grad: str = ""  # dw goes to a buffer: "add", "overwrite"
    dummy_grad: bool = False  # and zeros are returned in its place, so that hooks fire
    delay: str = ""  # dw is put off: its operands go to a "mailbox", or in a graph to the "post" (see `posted`)
    x_columns: str = "forward"  # or "backward": whoever runs this layer has x's column codes made again for dw
    recompute_w_columns: bool = False  # in backward, from the weight itself: one more read, and nothing kept

    @cached_property
    def wgrad_mode(self) -> str:
        """The recipe's, but x that came as codes in long blocks cannot be turned around: its values are used."""
        spec = self.quant.fprop.left
        if self.x == "codes" and self.quant.wgrad.mode != "dequantized":
            turns = self.quant.wgrad.mode == "quantized" and spec is not None and is_square(spec.block)
            return "quantized" if turns else "dequantized"
        return self.quant.wgrad.mode

    @cached_property
    def kept_x(self) -> str:
        """What backward needs of x: "" or "plain", "row", "column"."""
        if "w" not in self.grads:
            return ""
        if self.x == "codes":
            return "row"
        if self.x_columns == "backward" and self.wgrad_mode == "quantized":
            return ""
        return {"quantized": "column", "high_precision": "plain", "dequantized": "row"}[self.wgrad_mode]

    @cached_property
    def kept_w(self) -> str:
        """What backward needs of w."""
        if "x" not in self.grads:
            return ""
        if self.weight == "held" and self.quant.dgrad.mode != "quantized":
            return "row"
        again = self.recompute_w_columns and self.weight == "plain" and self.quant.dgrad.mode == "quantized"
        if again and "w" not in self.measured:  # or forward's multiplier is not at hand
            return "again"
        return {"quantized": "column", "high_precision": "plain", "dequantized": "row"}[self.quant.dgrad.mode]

    @cached_property
    def keeps_width(self) -> bool:
        """Whether K must be kept by itself: packed row codes do not tell how many columns they stand for, nor does
        nothing at all."""
        packed = self.quant.fprop.left is not None and self.quant.fprop.left.fmt.packed > 1
        nothing = "w" in self.grads and not self.kept_x and not self.kept_w
        return nothing or (packed and "row" in (self.kept_x, self.kept_w))

    @cached_property
    def x_pair(self) -> QuantizerPair:
        """Quantizers of the orientations of x that forward makes."""
        if self.x == "codes":
            return None, None
        return self.quant.fprop.left, self.quant.wgrad.right if self.kept_x == "column" else None

    @cached_property
    def dy_pair(self) -> QuantizerPair:
        return (
            self.quant.dgrad.left if "x" in self.grads else None,
            self.quant.wgrad.left if "w" in self.grads and self.wgrad_mode == "quantized" else None,
        )

    @cached_property
    def posted(self) -> tuple[int, int]:
        """Where among all that forward makes, as a flat list, the post is: dy's slots, then x, as codes or a copy."""
        start = 1 + (self.observe == "returned") + (self.quant.parts if self.quantize_output else 0)
        spec = dict(zip(("row", "column"), self.x_pair, strict=True)).get(self.kept_x)
        of_x = post.slots_of_x(self.kept_x, spec)
        return start, start + self.slots + of_x
