"""`quantize` of a quantizer inside a compiled function: one node, with the bits of eager mode."""

import pytest
import torch

import octavo
from octavo.errors import UnsupportedShape
from octavo.quant import MX, Block1D, Block2D, Rowwise, Tensorwise
from tests.support.linear_oracle import spiky
from tests.support.steps import compiled

pytestmark = pytest.mark.usefixtures("fresh_compiler")
BLOCKS = Block1D()  # made outside: a compiler makes no settings
SPECS = [Tensorwise(), Rowwise(), Block1D(), Block2D(), MX(), octavo.recipe("nvfp4").linear().fprop.left]


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("axis", [-1, 0])
def test_codes_and_values_have_the_bits_of_eager_mode(spec, axis):
    def cast(x):
        q = spec.quantize(x, axis)
        return [*q.tensors(), q.dequantize()]

    x = spiky(48, 160)
    for a, b in zip(compiled(cast)(x), cast(x), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert torch.equal(a.float(), b.float())


@pytest.mark.parametrize("shape", [(7,), (3, 5, 64), (0, 64), (200, 33)], ids=str)
def test_shapes(shape):
    x = torch.randn(shape)
    found = compiled(lambda x: BLOCKS.quantize(x).dequantize())(x)
    assert torch.equal(found, Block1D().quantize(x).dequantize())


def test_one_graph_serves_any_number_of_rows():
    call = compiled(lambda x: BLOCKS.quantize(x).dequantize(), dynamic=True)
    for rows in (32, 48, 130):
        x = spiky(rows, 160)
        assert torch.equal(call(x), Block1D().quantize(x).dequantize())
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_arguments_and_what_does_not_fit():
    spec, x, scale = Tensorwise(), spiky(8, 32), torch.full((1,), 3.0)
    call = compiled(lambda x, scale: spec.quantize(x, inverse_scale=scale).dequantize())
    assert torch.equal(call(x, scale), spec.quantize(x, inverse_scale=scale).dequantize())
    with pytest.raises(Exception, match="axis must be -1") as said:
        compiled(lambda x: spec.quantize(x, 2).codes)(x)
    assert UnsupportedShape.__name__ in str(said.value) or "axis" in str(said.value)


def test_no_gradient_flows_through_it():
    x = spiky(8, 32).requires_grad_()
    found = compiled(lambda x: BLOCKS.quantize(x).dequantize() + x)(x)
    found.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


def test_the_operator_passes_its_own_tests():
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    given = spiky(8, 64), Block1D().key, False, None, None, None
    found = torch.library.opcheck(torch.ops.octavo.quantize.default, given, test_utils=tests)
    assert set(found.values()) == {"SUCCESS"}
