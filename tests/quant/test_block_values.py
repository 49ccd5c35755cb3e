"""Block1D.dequantize multiplies in place: it has the bits of the rule that every quantizer shares."""

import pytest
import torch

import octavo.quant as Q
from octavo.formats import E5M2
from octavo.quant.quantizer import Quantizer
from tests.support.linear_oracle import assert_same, spiky

SPECS = [Q.Block1D(), Q.Block1D(scale="fp32"), Q.Block1D(E5M2)]
FLOATS = [torch.float32, torch.bfloat16, torch.float16]


def extreme(dtype):
    """The largest numbers, the smallest, zeros, and blocks with NaN and Inf."""
    x = spiky(9, 300).to(dtype)
    x[1] = torch.finfo(dtype).max
    x[2], x[3, ::2] = torch.finfo(dtype).tiny, 0.0
    x[4], x[5, 7], x[6, 270] = 0.0, float("nan"), float("inf")
    x[7] *= torch.finfo(dtype).tiny
    return x


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("into", FLOATS, ids=str)
def test_values_are_those_of_the_shared_rule(spec, dtype, into):
    q = spec.quantize(extreme(dtype))
    before = [t.clone() for t in q.tensors()]
    assert_same(q.dequantize(into), Quantizer.dequantize(spec, q, into))
    for a, b in zip(q.tensors(), before, strict=True):
        assert_same(a.float(), b.float())


@pytest.mark.parametrize("shape", [(1, 1), (5, 0), (0, 5), (0, 128), (3, 127), (3, 128), (3, 129), (2, 3, 256), (7,)])
@pytest.mark.parametrize("axis", [-1, 0])
def test_every_shape(shape, axis):
    if axis == 0 and len(shape) < 2:
        shape = (*shape, 1)
    q = Q.Block1D().quantize(torch.randn(shape).bfloat16(), axis)
    found = q.dequantize()
    assert found.is_contiguous()
    assert_same(found, Quantizer.dequantize(q.spec, q))


def test_codes_in_other_strides():
    q = Q.Block1D().quantize(torch.randn(40, 300))
    turned = [t.T.clone(memory_format=torch.contiguous_format).T for t in q.tensors()]
    assert_same(Q.Block1D().assemble(turned, q.shape, q.dtype).dequantize(), q.dequantize())
