"""Quantized tensors between layers, with their gradients, and weights stored as codes alone."""

import copy
import weakref

import pytest
import torch
from torch import nn

import octavo
from octavo.errors import UnsupportedConfig
from octavo.quant import QTensor
from octavo.quant.scale_blocks import is_square
from tests.support.linear_oracle import (
    assert_result,
    assert_same,
    expected,
    make,
    product,
    run,
    seed_of,
    spec_of,
    spiky,
)
from tests.support.recipe_traits import QUANTIZED, STATELESS, has_four_bits, is_stateful, is_stochastic
from tests.support.same_tensors import assert_same as assert_same_codes
from tests.support.state_tensors import state_tensors
from tests.support.steps import batch

quantized = pytest.mark.parametrize("recipe", QUANTIZED)
stateless = pytest.mark.parametrize("recipe", STATELESS)


# -- out -----------------------------------------------------------------------------------------------------------


@quantized
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lead", [(21,), (2, 3), ()], ids=str)
def test_a_quantized_output_is_y_quantized(recipe, dtype, lead):
    layer, x = make(recipe, dtype=dtype), spiky(*lead, 48, dtype=dtype)
    y = layer(x).detach()
    q = layer(x, fp8_output=True)
    assert isinstance(q, QTensor)
    assert q.spec == spec_of(recipe)
    assert (q.shape, q.dtype) == (tuple(y.shape), dtype)
    assert_same_codes(q, spec_of(recipe).quantize(y))
    assert (tuple(q.anchor.shape), q.anchor.dtype) == (tuple(y.shape), dtype)
    assert all(stride == 0 for stride in q.anchor.stride())
    assert q.anchor.requires_grad and not q.codes.requires_grad


@quantized
def test_the_token_carries_the_gradient_of_y(recipe):
    layer, (x, dy) = make(recipe), batch()
    seed, leaf = seed_of(layer), x.clone().requires_grad_()
    layer(leaf, fp8_output=True).anchor.backward(dy)
    want = expected(recipe, x, layer.weight, layer.bias, dy, seed=seed)
    assert_same(leaf.grad, want.dx)
    assert_same(layer.weight.grad, want.dw)
    assert_same(layer.bias.grad, want.db)


@quantized
def test_a_quantized_output_without_grad(recipe):
    layer, (x, _) = make(recipe), batch()
    with torch.no_grad():
        q = layer(x, fp8_output=True)
        assert_same_codes(q, spec_of(recipe).quantize(layer(x)))
    assert q.anchor is None or not q.anchor.requires_grad


def test_bf16_has_no_quantized_output():
    with pytest.raises(UnsupportedConfig, match="fp8_output"):
        make("bf16")(batch()[0], fp8_output=True)
    with pytest.raises(UnsupportedConfig, match="fp8_output"):
        make(None)(batch()[0], fp8_output=True)


@quantized
def test_values_of_a_quantized_output_pass_their_gradient_on(recipe):
    (x, dy), layer = batch(m=24), make(recipe)
    leaf, twin_leaf, twin = x.clone().requires_grad_(), x.clone().requires_grad_(), copy.deepcopy(layer)
    layer(leaf, fp8_output=True).dequantize().backward(dy)
    twin(twin_leaf).backward(dy)
    assert_same(leaf.grad, twin_leaf.grad)
    assert_same(layer.weight.grad, twin.weight.grad)


def test_a_slice_of_a_quantized_output_passes_its_gradient_on():
    layer, x = make("fp8-rowwise"), batch(m=24)[0].requires_grad_()
    layer(x, fp8_output=True)[8:16].dequantize().sum().backward()
    assert x.grad[8:16].abs().sum() > 0
    assert x.grad[:8].abs().sum() == x.grad[16:].abs().sum() == 0


# -- in ------------------------------------------------------------------------------------------------------------


def want_from_codes(recipe, q, layer, dy, seed):
    """y, dx and dw of a layer that was given codes: their other orientation where that is lossless, else no codes."""
    want = expected(recipe, q.dequantize(torch.float32), layer.weight, layer.bias, dy, seed=seed)
    quant = octavo.recipe(recipe).linear()  # fp8-delayed: of a fresh layer, whose multipliers are the tensors' own
    w = quant.fprop.right.quantize(layer.weight.detach())
    y = (product(q, w) + layer.bias.detach().float()).to(q.dtype)
    if is_square(q.spec.block):
        left_spec = quant.wgrad.left
        dw = product(left_spec.quantize(dy, 0), q.transpose())
    else:
        dw = product(dy.T.contiguous(), q.dequantize(q.dtype).T)
    return y, want.dx, dw


@quantized
def test_codes_are_used_as_they_are(recipe):
    layer, (x, dy) = make(recipe), batch()
    q = spec_of(recipe).quantize(x)
    seed = seed_of(layer)
    y = layer(q)
    y.backward(dy)
    want_y, _, want_dw = want_from_codes(recipe, q, layer, dy, seed)
    assert_same(y.detach(), want_y)
    assert_same(layer.weight.grad, want_dw)
    assert_same(layer.bias.grad, dy.double().sum(0).float())


@quantized
def test_two_layers_with_codes_between_them(recipe):
    one, two, x = make(recipe, 48, 40), make(recipe, 40, 24, seed=3), batch()[0]
    dy, leaf = spiky(21, 24, seed=5), x.clone().requires_grad_()
    seeds = seed_of(one), seed_of(two)
    between = one(leaf, fp8_output=True)
    y = two(between)
    y.backward(dy)
    want_y, want_dx, want_dw = want_from_codes(
        recipe, spec_of(recipe).quantize(one_y(recipe, one, x)), two, dy, seeds[1]
    )
    assert_same(y.detach(), want_y)
    assert_same(two.weight.grad, want_dw)
    first = expected(recipe, x, one.weight, one.bias, want_dx, seed=seeds[0])  # straight through the codes
    assert_same(leaf.grad, first.dx)
    assert_same(one.weight.grad, first.dw)
    assert_same(one.bias.grad, first.db)


def one_y(recipe, layer, x):
    dy = torch.zeros(x.shape[0], layer.out_features)
    return expected(recipe, x, layer.weight, layer.bias, dy, seed=torch.tensor([1, 1])).y


@pytest.mark.parametrize(
    ("recipe", "spec"),
    [
        ("fp8-current", "fp8-block"),
        ("fp8-block", "mxfp8"),
        ("mxfp8", "nvfp4"),
        ("fp8-block(scale='fp32')", "fp8-block"),
    ],
)
def test_codes_of_another_quantizer_are_refused(recipe, spec):
    q = spec_of(spec).quantize(batch()[0])
    with pytest.raises(UnsupportedConfig) as said:
        make(recipe)(q)
    assert str(q.spec) in str(said.value)


def test_codes_are_refused_where_nothing_is_quantized():
    q = spec_of("fp8-current").quantize(batch()[0])
    for recipe in ("bf16", None, "fp8-current(fprop='bf16')"):
        with pytest.raises(UnsupportedConfig):
            make(recipe)(q)


@quantized
def test_codes_in_without_grad(recipe):
    layer, (x, dy) = make(recipe), batch()
    q = spec_of(recipe).quantize(x)
    with torch.no_grad():
        y = layer(q)
    assert_same(y, want_from_codes(recipe, q, layer, dy, seed=torch.tensor([1, 1]))[0])


# -- weights as codes ------------------------------------------------------------------------------------------------


def quantized_linear(recipe, **settings):
    plain, layer = make(recipe, **settings), make(recipe, **settings)
    octavo.load_state_dict(layer, octavo.state_dict(plain))
    octavo.quantize_weights(layer, keep_columns=True)  # without them dx of some recipes is made of values
    return plain, layer


@stateless
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_codes_give_what_the_weight_gave(recipe, dtype):
    plain, layer = quantized_linear(recipe, dtype=dtype)
    x, dy = batch(dtype=dtype)
    seed = seed_of(layer)
    want, found = run(plain, x, dy), run(layer, x, dy)
    assert_same(found.y, want.y)
    assert_same(found.dx, want.dx)
    assert_same(found.db, want.db)
    # the gradient is dense; whether its GEMM runs on codes is the recipe's business, and both are right
    high = expected(f"{recipe}(wgrad='bf16')", x, plain.weight, plain.bias, dy, seed=seed).dw
    assert torch.equal(found.dw, want.dw) or torch.equal(found.dw, high)
    assert found.dw.shape == (40, 48) and found.dw.is_contiguous()


@quantized
def test_the_weight_takes_the_memory_of_its_codes(recipe):
    _, layer = quantized_linear(recipe, k=256, n=128)
    assert isinstance(layer.weight, nn.Parameter)
    assert (tuple(layer.weight.shape), layer.weight.dtype) == ((128, 256), torch.float32)
    codes = 2 * 128 * 256  # in both orientations
    assert layer.weight.untyped_storage().nbytes() <= codes * (0.57 if recipe == "nvfp4" else 1.07)
    bytes_of_state = sum(b.numel() * b.element_size() for b in state_tensors(layer))
    assert bytes_of_state <= (3 * 1024 * 4 + 256 if is_stateful(recipe) else 64)


@quantized
@pytest.mark.parametrize("settings", [{}, {"fused": True}, {"foreach": True}], ids=str)
def test_an_optimizer_step_on_codes_is_loud(recipe, settings):
    """A fused one would write a weight over the memory of one element."""
    _, layer = quantized_linear(recipe)
    layer(batch()[0]).sum().backward()
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        with pytest.raises(UnsupportedConfig, match="frozen as codes"):
            kind(layer.parameters(), lr=0.1, **settings).step()


@stateless
def test_the_state_dict_holds_the_values_and_loading_quantizes(recipe):
    plain, layer = quantized_linear(recipe)
    state = layer.state_dict()
    assert list(state) == ["weight", "bias"]
    want = octavo.recipe(recipe).linear().fprop.right.quantize(plain.weight.detach()).dequantize(torch.float32)
    assert_same(state["weight"], want)
    linear = nn.Linear(48, 40)
    linear.load_state_dict(state, strict=True)
    other = make(recipe, seed=7)
    layer.load_state_dict(other.state_dict(), strict=True)
    octavo.load_state_dict(layer, octavo.state_dict(other))
    x, dy = batch(3)
    found, fresh = run(layer, x, dy), run(other, x, dy)
    for name in ("y", "dx", "db"):
        assert_same(getattr(found, name), getattr(fresh, name), name)


@stateless
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_codes_with_main_grad(recipe, dtype):
    _, layer = quantized_linear(recipe, fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.zeros(40, 48, dtype=dtype)
    x, dy = batch()
    assert run(layer, x, dy).dw is None
    want = (dy.double().T @ x.double()).float()
    error = (layer.weight.main_grad.float() - want).norm() / want.norm()
    assert error < (0.25 if has_four_bits(recipe) else 0.07)


@stateless
def test_a_cast_of_the_module_leaves_the_codes(recipe):
    plain, layer = quantized_linear(recipe)
    layer.to(torch.bfloat16)
    x, dy = batch(dtype=torch.bfloat16)
    want = expected(recipe, x, plain.weight, plain.bias.bfloat16(), dy, seed=seed_of(layer))
    found = run(layer, x, dy)
    assert_same(found.y, want.y)
    assert_same(found.dx, want.dx)


@pytest.mark.parametrize("recipe", [None, "bf16"])
def test_codes_need_a_recipe_that_makes_some(recipe):
    with pytest.raises(UnsupportedConfig, match="recipe"):
        octavo.quantize_weights(make(recipe))


def test_every_layer_of_a_model_is_quantized():
    model = nn.Sequential(make("fp8-block"), nn.ReLU(), make("mxfp8", 40, 24))
    want = model(batch()[0]).detach()
    octavo.quantize_weights(model)
    assert_same(model(batch()[0]).detach(), want)
    assert all(type(layer.weight).__name__ == "QuantizedWeight" for layer in (model[0], model[2]))


@quantized
def test_delayed_codes_do_not_depend_on_when_they_are_asked_for(recipe):
    """Codes are fixed once made: two runs of one batch agree, and stay near the exact product."""
    _, layer = quantized_linear(recipe)
    x, dy = batch()
    first, second = run(layer, x, dy), run(layer, x, dy)
    assert_same(first.y, second.y)
    if not is_stochastic(recipe) and not is_stateful(recipe):
        assert_result(first, second)


def test_a_flag_that_is_a_tensor_may_change_and_is_not_kept():
    layer, x, flag = octavo.Linear(16, 8, recipe="fp8-current"), torch.randn(4, 16), torch.tensor(True)
    y = layer(x)
    assert isinstance(layer(x, fp8_output=flag), QTensor)
    flag.fill_(False)
    assert torch.equal(layer(x, fp8_output=flag), y)
    kept = weakref.ref(flag)
    del flag
    assert kept() is None
