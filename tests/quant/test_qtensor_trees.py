"""A QTensor for a compiler: flattened and put together again, and the shapes that quantizing fakes gives."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

import octavo
import octavo.quant as Q
from tests.support.linear_oracle import spiky
from tests.support.same_tensors import assert_same as assert_same_codes
from tests.support.same_tensors import facts

SPECS = [Q.Tensorwise(), Q.Rowwise(), Q.Block1D(), Q.Block2D(), Q.MX(), Q.MX(square=True), Q.NVFP4()]


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("shape", [(12, 70), (0, 16), (1, 1), (33, 128)], ids=str)
def test_a_qtensor_flattened_and_put_together_keeps_its_bytes(spec, shape):
    q = spec.quantize(spiky(*shape) if 0 not in shape else torch.zeros(*shape))
    leaves, tree = pytree.tree_flatten(q)
    assert sum(isinstance(leaf, torch.Tensor) for leaf in leaves) == len([*q.tensors()])
    again = pytree.tree_unflatten(leaves, tree)
    assert type(again) is octavo.QTensor
    assert (again.spec, tuple(again.shape), again.dtype) == (q.spec, tuple(q.shape), q.dtype)
    assert_same_codes(again, q)


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("usage", ["row", "column", "both"])
def test_quantizing_fakes_gives_fakes_of_the_real_shapes(spec, usage):
    """Allocation is what is written: shape, strides and dtype of codes and scales, in either orientation."""

    def quantize(x):
        if usage == "both":
            return [*spec.quantize_both(x)]
        return [spec.quantize(x, -1 if usage == "row" else 0)]

    for shape in ((33, 129),):
        real = quantize(spiky(*shape))
        with FakeTensorMode() as mode:
            fake = quantize(mode.from_tensor(spiky(*shape)))
        for a, b in zip(fake, real, strict=True):
            assert all(isinstance(t, FakeTensor) for t in a.tensors())
            assert [facts(t) for t in a.tensors()] == [facts(t) for t in b.tensors()]
            assert tuple(a.shape) == tuple(b.shape)
