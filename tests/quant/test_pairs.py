"""The pairs of quantizers that a GEMM multiplies: the rule, the sentence of a refusal, and the pairs that it names."""

import itertools

import pytest

import octavo.quant as Q
from octavo.errors import UnsupportedConfig
from octavo.formats import E4M3, E5M2
from octavo.quant import pairs
from octavo.values import register

SCALED = "must be scaled alike along the contraction. Quantize both with the same block length and kind of scale: "
E5M2S = "no chip multiplies E5M2 by E5M2. Keep one of them in E4M3: "
SQUARE = "no block GEMM takes 128x128 scales on both sides. Quantize the one that is not a weight with Block1D: "
BASIS = "must be in the same basis, or the rotation does not cancel. Rotate both or neither: "

REFUSED = [
    (Q.Rowwise(), Q.Block2D(), SCALED + "Rowwise goes with Tensorwise or Rowwise, Block2D with Block1D."),
    (Q.Block1D(), Q.MX(), SCALED + "Block1D goes with Block1D or Block2D, MX with MX or MX(square=True)."),
    (Q.MX(), Q.NVFP4(), SCALED + "MX goes with MX or MX(square=True), NVFP4 with NVFP4 or NVFP4(square=True)."),
    (Q.Tensorwise(E5M2), Q.Tensorwise(E5M2), E5M2S + "Tensorwise(fmt=E5M2) goes with Tensorwise or Rowwise."),
    (
        Q.Block1D(E5M2), Q.Block2D(E5M2),
        E5M2S + "Block1D(fmt=E5M2) goes with Block1D or Block2D, Block2D(fmt=E5M2) with Block1D.",
    ),
    (Q.Block2D(), Q.Block2D(), SQUARE + "Block2D goes with Block1D."),
    (
        Q.NVFP4(rht=True), Q.NVFP4(square=True),
        BASIS + "NVFP4(rht=True) goes with NVFP4(rht=True), NVFP4(square=True) with NVFP4 or NVFP4(square=True).",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("a", "b", "said"), REFUSED, ids=str)
def test_a_refusal_names_both_quantizers_the_rule_and_partners(a, b, said):
    with pytest.raises(UnsupportedConfig) as caught:
        pairs.check_pair(a, b, operands="x and w")
    assert str(caught.value) == f"x and w are {a} and {b}, and {said}"


ALL = [
    *[make(fmt) for make in (Q.Tensorwise, Q.Rowwise, Q.Block1D, Q.Block2D, Q.MX) for fmt in (E4M3, E5M2)],
    Q.MX(square=True), Q.NVFP4(), Q.NVFP4(square=True), Q.NVFP4(stochastic=True), Q.NVFP4(rht=True),
    Q.NVFP4(rht=True, stochastic=True),
]  # fmt: skip
FAMILIES = ({"Tensorwise", "Rowwise"}, {"Block1D", "Block2D"}, {"MX"}, {"NVFP4"})


def fits(a, b):
    """The table of docs/numerics.md, written out."""
    kinds = {type(a).__name__, type(b).__name__}
    alike = any(kinds <= family for family in FAMILIES) and kinds != {"Block2D"}
    return alike and getattr(a, "rht", False) == getattr(b, "rht", False) and not a.fmt == b.fmt == E5M2


def test_the_pairs_that_fit_are_those_of_the_page():
    for a, b in itertools.product(ALL, repeat=2):
        if fits(a, b):
            pairs.check_pair(a, b)
        else:
            with pytest.raises(UnsupportedConfig, match=r"^The operands of gemm are "):
                pairs.check_pair(a, b)


def test_the_partners_that_a_refusal_names_fit():
    for q in ALL:
        named = pairs.partners(q)
        assert named, q
        for other in named:
            pairs.check_pair(q, other)
            pairs.check_pair(other, q)


@register("test-pairs-short")
class Short(Q.Block1D):
    """A quantizer from outside, with blocks that no scheme of Octavo's has."""

    block = (1, 64)


def test_a_quantizer_from_outside_goes_with_itself():
    pairs.check_pair(Short(), Short())
    with pytest.raises(UnsupportedConfig, match=r"Short goes with Short, Rowwise with Tensorwise or Rowwise\.$"):
        pairs.check_pair(Short(), Q.Rowwise())


def test_a_quantizer_without_a_partner_says_so():
    with pytest.raises(UnsupportedConfig, match=r"Short\(fmt=E5M2\) goes with no quantizer of Octavo's\.$"):
        pairs.check_pair(Short(E5M2), Short(E5M2))
