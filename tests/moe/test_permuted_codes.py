"""permute and unpermute of a QTensor: the rows of codes with their scales, as a cast of the permuted rows has them."""

import pytest
import torch

import octavo
from octavo import moe
from octavo.errors import UnsupportedConfig, UnsupportedShape
from octavo.quant import MX, NVFP4, Block1D, Block2D, Rowwise, Tensorwise
from tests.support.linear_oracle import spiky
from tests.support.steps import compiled

SPECS = [Tensorwise(), Rowwise(), Block1D(), MX(), NVFP4()]
INDEX = torch.tensor([[0, 2], [2, 1], [2, -1], [3, 0], [1, 3]])  # one assignment is dropped


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("align", [1, 4])
def test_codes_and_scales_of_permuted_rows(spec, align):
    x = spiky(5, 160)
    rows, permutation = moe.permute(spec.quantize(x), INDEX, 4, align=align)
    assert type(rows) is octavo.QTensor and rows.shape == (permutation.assignments.shape[0], 160)
    values, _ = moe.permute(x, permutation)
    want, live = spec.quantize(values), permutation.assignments >= 0
    assert torch.equal(rows.dequantize()[live], want.dequantize()[live])
    assert torch.equal(rows.codes.view(torch.uint8)[live], want.codes.view(torch.uint8)[live])
    if spec.block[0] == 1:
        assert torch.equal(rows.scale[live], want.scale[live]) and rows.scale.stride() == want.scale.stride()
    assert not rows.dequantize()[~live].any()


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_unpermute_sums_the_values(spec):
    x, probs = spiky(5, 160), torch.rand(5, 2)
    rows, permutation = moe.permute(spec.quantize(x), INDEX, 4)
    assert torch.equal(moe.unpermute(rows, permutation, probs), moe.unpermute(rows.dequantize(), permutation, probs))


@pytest.mark.usefixtures("fresh_compiler")
def test_in_a_graph():
    q = Block1D().quantize(spiky(5, 160))
    call = compiled(lambda q: moe.permute(q, INDEX, 4)[0].dequantize())
    assert torch.equal(call(q), moe.permute(q, INDEX, 4)[0].dequantize())
    codes = compiled(lambda codes: moe.permute(codes, INDEX, 4)[0])(q.codes)
    assert codes.dtype == q.codes.dtype and torch.equal(codes.float(), moe.permute(q.codes, INDEX, 4)[0].float())


def test_what_does_not_fit():
    with pytest.raises(UnsupportedShape, match="blocks have 128 rows"):
        moe.permute(Block2D().quantize(spiky(5, 160)), INDEX, 4)
    layer = octavo.Linear(160, 160, recipe="fp8-block")
    with pytest.raises(UnsupportedConfig, match="without a gradient"):
        moe.permute(layer(spiky(5, 160), fp8_output=True), INDEX, 4)
