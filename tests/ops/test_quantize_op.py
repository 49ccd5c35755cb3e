"""ops.Quantize: the codes of fprop, a gradient that goes straight through or is quantized, and what takes its codes."""

import copy

import pytest
import torch
from torch import nn

import octavo
from octavo import ops
from octavo.quant import QTensor
from tests.support.linear_oracle import assert_same, codes_of, make, spec_of, spiky
from tests.support.recipe_traits import QUANTIZED, has_four_bits, is_stateful
from tests.support.steps import assert_equal, compiled, step

pytestmark = pytest.mark.usefixtures("fresh_compiler")
M, K, N = 32, 48, 40
quantized = pytest.mark.parametrize("recipe", QUANTIZED)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


@quantized
@DTYPES
def test_quantize_gives_the_codes_of_fprop(recipe, dtype):
    x = spiky(M, K, dtype=dtype)
    q = ops.Quantize(recipe=recipe)(x)
    assert isinstance(q, QTensor)
    assert q.spec == spec_of(recipe) and q.shape == (M, K) and q.dtype == dtype
    if not is_stateful(recipe):  # whose scale is its own to choose
        for a, b in zip(q.tensors(), codes_of(recipe, x).tensors(), strict=True):
            assert a.stride() == b.stride()
            assert_same(a.float(), b.float())


@quantized
def test_the_gradient_goes_straight_through(recipe):
    x, dy = spiky(M, K).requires_grad_(), spiky(M, K, seed=1)
    y = ops.Quantize(recipe=recipe)(x).dequantize()
    assert y.requires_grad
    y.backward(dy)
    assert_same(x.grad, dy)


@quantized
def test_backward_quantizes_the_gradient(recipe):
    x, dy = spiky(M, K).requires_grad_(), spiky(M, K, seed=1)
    y = ops.Quantize(forward=False, backward=True, recipe=recipe)(x)
    assert isinstance(y, torch.Tensor)
    assert torch.equal(y, x)
    y.backward(dy)
    assert x.grad.dtype == dy.dtype
    assert not torch.equal(x.grad, dy)
    error = (x.grad - dy).square().mean().sqrt() / dy.square().mean().sqrt()
    assert error < (0.3 if has_four_bits(recipe) else 0.12)


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-rowwise", "fp8-block", "mxfp8"])
@pytest.mark.parametrize("forward", [True, False])
def test_the_quantized_gradient_is_what_the_codes_of_dgrad_stand_for(recipe, forward):
    x, dy = spiky(M, K).requires_grad_(), spiky(M, K, seed=1)
    y = ops.Quantize(forward=forward, backward=True, recipe=recipe)(x)
    (y.dequantize() if forward else y).backward(dy)
    assert_same(x.grad, octavo.recipe(recipe).linear().dgrad.left.quantize(dy).dequantize())


@pytest.mark.parametrize("flags", [(True, False), (False, True), (True, True), (False, False)], ids=str)
def test_quantize_without_a_recipe_is_the_identity(flags):
    x, dy = spiky(M, K).requires_grad_(), spiky(M, K, seed=1)
    for op in (ops.Quantize(*flags), ops.Quantize(*flags, recipe="bf16")):
        x.grad = None
        y = op(x)
        assert torch.equal(y, x)
        y.backward(dy)
        assert_same(x.grad, dy)


@pytest.mark.parametrize("recipe", ["fp8-current", "mxfp8"])
def test_quantize_follows_an_ambient_recipe(recipe):
    op, x = ops.Quantize(), spiky(M, K)
    with octavo.autocast(recipe):
        q = op(x)
    assert isinstance(q, QTensor) and q.spec == spec_of(recipe)
    assert isinstance(op(x), torch.Tensor)


def test_what_is_quantized_already_stays_as_it_is():
    q = codes_of("fp8-current", spiky(M, K))
    found = ops.Quantize(recipe="fp8-current")(q)
    assert found is q or all(torch.equal(a, b) for a, b in zip(found.tensors(), q.tensors(), strict=True))
    other = ops.Quantize(recipe="mxfp8")(q)
    assert isinstance(other, QTensor)


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-rowwise", "fp8-block", "mxfp8"])
def test_a_linear_takes_what_quantize_gives(recipe):
    layer, (x, dy) = make(recipe), (spiky(M, K), spiky(M, N, seed=1))
    twin = copy.deepcopy(layer)
    model = octavo.Sequential(ops.Quantize(recipe=recipe), layer)
    assert_same(model(x).detach(), twin(x).detach())
    plain = nn.Sequential(ops.Quantize(recipe=recipe), twin)
    assert_equal(step(model, x, dy), step(plain, x, dy))


@pytest.mark.parametrize("recipe", ["fp8-current", "nvfp4"])
def test_quantize_compiled(recipe):
    op, x, dy = ops.Quantize(recipe=recipe), spiky(M, K), spiky(M, K, seed=1)
    assert_equal(step(op, x, dy, call=compiled(lambda t: op(t).dequantize())), [op(x).dequantize(), dy])


@quantized
def test_identity_passes_codes_on(recipe):
    model, x = octavo.Sequential(ops.Quantize(recipe=recipe), ops.Identity()), spiky(M, K)
    q = model(x)
    assert isinstance(q, QTensor)
    assert not torch.equal(q.dequantize(), x)  # or nothing was quantized
    dy = spiky(M, K, seed=1)
    assert_equal(step(model, x, dy, call=lambda t: model(t).dequantize()), [q.dequantize().detach(), dy])


@quantized
def test_no_tokens_through_quantize(recipe):
    x = torch.zeros(0, K).requires_grad_()
    y = ops.Quantize(recipe=recipe, backward=True)(x).dequantize()
    assert y.shape == (0, K)
    y.backward(torch.zeros(0, K))
    assert x.grad.shape == (0, K)
