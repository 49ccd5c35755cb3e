"""GroupedLinear with backward in high precision or on dequantized codes: each group has the bits of a Linear."""

import pytest
import torch

import octavo
from tests.support.linear_oracle import assert_same, spiky
from tests.support.recipe_traits import QUANTIZED
from tests.support.steps import assert_equal, compiled, step

MODES = ("high_precision", "dequantized")
SIZES, ROWS, N, K = (5, 0, 9), 16, 48, 64  # and a tail of two rows


def layer_in(recipe, **settings):
    torch.manual_seed(0)
    return octavo.GroupedLinear(3, K, N, recipe=recipe, **settings)


def alone(layer, recipe):
    """A Linear for each group, with its part of the weights."""
    made = [octavo.Linear(K, N, recipe=recipe) for _ in SIZES]
    with torch.no_grad():
        for i, one in enumerate(made):
            one.weight.copy_(layer.weight[i])
            one.bias.copy_(layer.bias[i])
    return made


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("recipe", QUANTIZED)
def test_each_group_has_the_bits_of_a_linear(recipe, mode):
    recipe = f"{recipe}(backward={mode!r})"
    layer, x, dy = layer_in(recipe), spiky(ROWS, K), spiky(ROWS, N, seed=5)
    y, dx, dw, db = step(layer, x, dy, m_splits=torch.tensor(SIZES))
    at = 0
    for i, (size, one) in enumerate(zip(SIZES, alone(layer, recipe), strict=True)):
        rows = slice(at, at + size)
        found = step(one, x[rows], dy[rows])
        for a, b in zip((y[rows], dx[rows], dw[i]), found, strict=False):
            assert_same(a, b)
        torch.testing.assert_close(db[i], found[3])
        at += size
    assert not y[at:].any() and not dx[at:].any()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("recipe", ["fp8-block", "fp8-delayed", "nvfp4"])
def test_a_graph_has_the_bits_of_eager_mode(recipe):
    layer = layer_in(f"{recipe}(backward='dequantized')")
    x, dy, sizes = spiky(ROWS, K), spiky(ROWS, N, seed=5), torch.tensor(SIZES)
    want = step(layer, x, dy, m_splits=sizes)
    assert_equal(step(layer, x, dy, call=compiled(layer), m_splits=sizes), want)


def test_dequantized_is_the_gradient_of_the_quantized_forward():
    layer = layer_in("fp8-block(backward='dequantized')", bias=False)
    x, dy = spiky(ROWS, K), spiky(ROWS, N, seed=5)
    _, dx, dw = step(layer, x, dy, m_splits=torch.tensor(SIZES))
    quant = octavo.recipe("fp8-block").linear().fprop
    w = [quant.right.quantize(one).dequantize() for one in layer.weight.detach()]
    rows = slice(5, 14)
    torch.testing.assert_close(dx[rows], dy[rows] @ w[2])
    torch.testing.assert_close(dw[2], dy[rows].T @ quant.left.quantize(x[rows]).dequantize())


@pytest.mark.parametrize("mode", MODES)
def test_rows_of_the_tail_are_not_read(mode):
    layer, sizes = layer_in(f"fp8-block(backward={mode!r})"), torch.tensor(SIZES)
    x, dy = spiky(ROWS, K), spiky(ROWS, N, seed=5)
    want = step(layer, x, dy, m_splits=sizes)
    x[14:], dy[14:] = float("nan"), float("inf")
    assert_equal(step(layer, x, dy, m_splits=sizes), want)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("option", ["main_grad", "deferred", "a weight for each group", "a cached weight", "codes"])
def test_backward_modes_combine_with_other_options(mode, option):
    recipe, sizes = f"fp8-block(backward={mode!r})", torch.tensor(SIZES)
    plain, x, dy = layer_in(recipe), spiky(ROWS, K), spiky(ROWS, N, seed=5)
    y, dx, dw, _ = step(plain, x, dy, m_splits=sizes)
    settings = {
        "main_grad": {"fuse_wgrad_accumulation": True}, "deferred": {"delay_wgrad_compute": True},
        "a weight for each group": {"single_grouped_weight": False},
    }  # fmt: skip
    layer = layer_in(recipe, **settings.get(option, {}))
    layer.load_state_dict(plain.state_dict())
    given = {"m_splits": sizes} | ({"is_first_microbatch": True} if option == "a cached weight" else {})
    if option == "main_grad":
        layer.weight.main_grad = torch.ones_like(layer.weight)
    if option == "codes":
        octavo.quantize_weights(layer)
    x = x.requires_grad_()
    found = layer(x, **given)
    found.backward(dy)
    assert_same(found.detach(), y)
    if (mode, option) != ("high_precision", "codes"):  # there is no weight in high precision then
        assert_same(x.grad, dx)
    if option == "deferred":
        layer.backward_dw()
    if option == "main_grad":
        torch.testing.assert_close(layer.weight.main_grad, 1 + dw)
    elif option == "a weight for each group":
        assert_same(layer.weight2.grad, dw[2])
    elif option != "codes":
        assert_same(layer.weight.grad, dw)


def test_experts_train_so():
    torch.manual_seed(0)
    moe = octavo.MoE(32, 48, num_experts=4, top_k=2, recipe="fp8-block(backward='dequantized')")
    x = torch.randn(24, 32)
    made = moe(x)
    (made[0] if isinstance(made, tuple) else made).square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in moe.parameters())


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("recipe", ["fp8-delayed", "fp8-block", "fp8-rowwise"])
def test_a_gpu_agrees_with_the_reference(recipe, mode):
    torch.manual_seed(0)
    layer = octavo.GroupedLinear(
        3, 512, 384, recipe=f"{recipe}(backward={mode!r})", device="cuda", dtype=torch.bfloat16
    )
    sizes = torch.tensor([300, 0, 213], device="cuda")
    x, dy = (spiky(520, n, seed=n, dtype=torch.bfloat16).cuda() for n in (512, 384))
    found = step(layer, x, dy, m_splits=sizes)
    again = step(layer, x, dy, m_splits=sizes)
    with octavo.backend.use("reference"):
        want = step(layer, x, dy, m_splits=sizes)
    assert_equal(found, again)
    for name, a, b in zip(("y", "dx", "dw", "db"), found, want, strict=True):
        error = (a.double() - b.double()).norm() / b.double().norm()
        assert error < 1e-2, (name, float(error))
