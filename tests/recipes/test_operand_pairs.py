"""Recipes whose quantizers do not fit each other are refused when they are built, with the GEMM and both operands."""

import pytest
import torch

import octavo
import octavo.quant as Q
from octavo.errors import UnsupportedConfig
from octavo.formats import E5M2
from octavo.recipes import LinearQuant, Recipe, register


@register("test-pairs")
class Pairs(Recipe):
    x: tuple = (Q.Tensorwise(), Q.Tensorwise())
    w: tuple = (Q.Tensorwise(), Q.Tensorwise())
    dy: tuple = (Q.Tensorwise(), Q.Tensorwise())
    wgrad: str = "quantized"
    backward: str = "quantized"

    def gemms(self):
        return LinearQuant.of(x=self.x, w=self.w, dy=self.dy)


def both(quantizer):
    return quantizer, quantizer


ROW, SQUARE, LINE, E5 = both(Q.Rowwise()), both(Q.Block2D()), both(Q.Block1D()), both(Q.Tensorwise(E5M2))

REFUSED = [
    (
        {"x": ROW, "w": SQUARE, "dy": ROW},
        "operands x and w of fprop in Pairs are rowwise and block-2d, and must be scaled",
    ),
    ({"x": SQUARE, "w": SQUARE, "dy": LINE}, "x and w of fprop in Pairs are block-2d and block-2d, and no block GEMM"),
    ({"x": LINE, "w": SQUARE, "dy": SQUARE}, "dy and w of dgrad in Pairs are block-2d and block-2d, and no block GEMM"),
    (
        {"x": E5, "dy": E5},
        r"dy and x of wgrad in Pairs are tensorwise\(fmt=E5M2\) and tensorwise\(fmt=E5M2\), and no chip",
    ),
    ({"x": both(Q.NVFP4(rht=True)), "w": both(Q.NVFP4()), "dy": both(Q.NVFP4())}, r"x and w of fprop .* same basis"),
    (
        {"x": both(Q.MX()), "w": both(Q.NVFP4()), "dy": both(Q.MX())},
        "x and w of fprop in Pairs are mx and nv, and must be",
    ),
]


@pytest.mark.parametrize(("quantizers", "message"), REFUSED, ids=str)
def test_a_pair_that_no_gemm_takes_is_refused_when_the_recipe_is_built(quantizers, message):
    with pytest.raises(UnsupportedConfig, match=f"{message}.* goes with "):
        Pairs(**quantizers)


def test_the_recipe_says_which_pairs_fit():
    with pytest.raises(UnsupportedConfig) as caught:
        Pairs(x=ROW, w=SQUARE, dy=ROW)
    assert str(caught.value) == (
        "The operands x and w of fprop in Pairs are rowwise and block-2d, and must be scaled alike along the "
        "contraction. Quantize both with the same block length and kind of scale: Rowwise goes with Tensorwise or "
        "Rowwise, Block2D with Block1D."
    )


@pytest.mark.parametrize("override", [{"wgrad": "bf16"}, {"backward": "high_precision"}], ids=str)
def test_a_pair_that_an_override_leaves_out_is_not_refused(override):
    recipe = Pairs(x=E5, dy=E5, **override)
    assert recipe.linear().wgrad.left is None
    layer = octavo.Linear(32, 16, recipe=recipe)
    layer(torch.randn(8, 32)).sum().backward()
    assert layer.weight.grad.isfinite().all()


@pytest.mark.parametrize("fast", [("forward",), ("fprop", "fprop"), "fprop", ["fprop"], None], ids=str)
def test_fast_is_a_tuple_of_names_of_gemms(fast):
    q = both(Q.Tensorwise())
    with pytest.raises(UnsupportedConfig, match=r"fast is a tuple of names from fprop, dgrad, wgrad, each once, got "):
        LinearQuant.of(x=q, w=q, dy=q, fast=fast)
