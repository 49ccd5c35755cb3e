"""The router's logits in float32: against float64, their gradients, what backward keeps, graphs, and odd inputs."""

import pytest
import torch

import octavo
from octavo.moe import Router
from octavo.moe.router_logits_layer import halves
from tests.support.steps import relative_error, step

K, E = 96, 24
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
devices = pytest.mark.parametrize("device", DEVICES)
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)


def router(device, dtype=torch.bfloat16, **settings):
    return Router(K, E, device=device, dtype=dtype, **settings)


def rows(device, dtype=torch.bfloat16, shape=(50,)):
    return torch.randn(*shape, K, device=device).to(dtype).requires_grad_()


@devices
@dtypes
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(50,), (3, 7), (1,)], ids=str)
def test_logits_and_gradients_are_those_of_float32(device, dtype, weight_dtype, shape):
    layer, x = router(device, weight_dtype), rows(device, dtype, shape)
    dy = torch.randn(*shape, E, device=device)
    y, dx, dw = step(layer, x, dy)
    exact_x, exact_w, exact_dy = x.detach().double(), layer.weight.detach().double(), dy.double()
    assert (y.dtype, dx.dtype, dw.dtype) == (torch.float32, dtype, weight_dtype)
    assert (y.shape, dx.shape, dw.shape) == ((*shape, E), x.shape, layer.weight.shape)
    assert relative_error(y, exact_x @ exact_w.T) < 1e-6
    rounding = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 2e-6}
    assert relative_error(dx, exact_dy @ exact_w) < rounding[dtype]
    assert relative_error(dw, exact_dy.flatten(0, -2).T @ exact_x.flatten(0, -2)) < rounding[weight_dtype]


@devices
def test_backward_keeps_no_other_copy_of_x(device):
    layer, x, saved = router(device), rows(device), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer(x)
    assert {t.data_ptr() for t in saved} == {x.data_ptr(), layer.weight.data_ptr()}


@devices
@pytest.mark.usefixtures("fresh_compiler")
def test_a_graph_has_the_bits_of_eager_mode_and_keeps_no_float32(device):
    layer, x, dy = router(device), rows(device), torch.randn(50, E, device=device)
    want, saved = step(layer, x, dy), []
    call = torch.compile(layer, fullgraph=True, backend="aot_eager" if device == "cpu" else "inductor")
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        found = step(layer, x, dy, call=call)
    for a, b in zip(found, want, strict=True):
        assert torch.equal(a, b)
    assert {t.dtype for t in saved} == {torch.bfloat16}


@devices
@pytest.mark.parametrize("frozen", ["x", "weight", "both"])
def test_frozen_inputs_take_no_gradient(device, frozen):
    layer, x = router(device), rows(device)
    x.requires_grad_(frozen == "weight")
    layer.weight.requires_grad_(frozen == "x")
    y = layer(x)
    assert y.requires_grad == (frozen != "both")
    if y.requires_grad:
        y.sum().backward()
    assert (x.grad is not None, layer.weight.grad is not None) == (frozen == "weight", frozen == "x")


@devices
def test_no_tokens_at_all(device):
    layer, x = router(device), rows(device, shape=(0,))
    y, dx, dw = step(layer, x, torch.zeros(0, E, device=device))
    assert (y.shape, dx.shape) == ((0, E), (0, K)) and not dw.any()


@devices
def test_what_is_not_finite_stays_where_it_is(device):
    layer, x = router(device), rows(device)
    dy = torch.randn(50, E, device=device)
    dy[3, 5], dy[7, 1] = float("inf"), float("nan")
    _, dx, _ = step(layer, x, dy)
    assert dx.isfinite().all(1).logical_not().nonzero().flatten().tolist() == [3, 7]
    with torch.no_grad():
        x[4, 2] = float("nan")
        assert layer(x).isfinite().all(1).logical_not().nonzero().flatten().tolist() == [4]


def test_two_halves_are_a_float32_up_to_sixteen_bits():
    dy = torch.randn(1000, 8) * torch.logspace(-30, 30, 8)
    high, low = halves(dy).double().chunk(2, 1)
    assert ((high + low - dy.double()).abs() <= 2.0**-16 * dy.double().abs()).all()


def test_autocast_and_default_dtype_do_not_matter():
    layer, x = router("cpu"), rows("cpu")
    want = layer(x)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            found = layer(x)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, want) and found.dtype == torch.float32


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_mixture_keeps_no_float32_copy_of_x():
    moe = octavo.MoE(64, 32, 4, 2, recipe="fp8-current", dtype=torch.bfloat16)
    x, saved = torch.randn(20, 64, dtype=torch.bfloat16, requires_grad=True), []
    call = torch.compile(moe, fullgraph=True, backend="aot_eager")
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        call(x)
    assert [tuple(t.shape) for t in saved if t.dtype == torch.float32 and t.numel() == x.numel()] == []
