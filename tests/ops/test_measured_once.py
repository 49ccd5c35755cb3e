"""Current scaling measures each tensor once: backward casts by the amax that forward measured, to the same bits."""

from collections import Counter

import pytest
import torch

import octavo
from octavo.quant.tensorwise import reference
from tests.support.linear_oracle import spiky

M, K, H = 40, 64, 96


def linear(recipe="fp8-current", **settings):
    torch.manual_seed(1)
    return octavo.Linear(K, H, recipe=recipe, dtype=torch.bfloat16, **settings)


def mlp(recipe="fp8-current", activation="swiglu", **settings):
    torch.manual_seed(1)
    return octavo.LayerNormMLP(
        K, H, normalization="RMSNorm", activation=activation, recipe=recipe, dtype=torch.bfloat16, **settings
    )


def step(module, seed=0, call=None):
    x = spiky(M, K, seed=seed).bfloat16().requires_grad_()
    y = (call or module)(x)
    y.backward(spiky(*y.shape, seed=seed + 1).bfloat16())
    gradients = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    return [y.detach(), x.grad, *gradients]


def assert_equal(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@pytest.fixture
def measured(monkeypatch):
    """How often tensors of each shape are measured."""
    found, amax = Counter(), reference.amax

    def counted(x, *rest, **named):
        found[tuple(x.shape)] += 1
        return amax(x, *rest, **named)

    monkeypatch.setattr(reference, "amax", counted)
    return found


@pytest.mark.parametrize("keeps", [True, False])
def test_a_linear_measures_x_w_and_dy_once_each(measured, keeps):
    step(linear(keep_weight_codes=keeps))
    assert measured == {(M, K): 1, (H, K): 1, (M, H): 1}


@pytest.mark.parametrize("keeps", [True, False])
def test_an_mlp_measures_operands_of_its_products_once_each(measured, keeps):
    step(mlp(keep_weight_codes=keeps))
    weights = {(2 * H, K): 1, (K, H): 1}
    assert measured == weights | {(M, K): 2, (M, H): 1, (M, 2 * H): 1}  # x and dy; activated values; their gradient


def test_a_graph_measures_as_often(measured):
    module = mlp()
    step(module, call=torch.compile(module, backend="aot_eager", fullgraph=True))
    assert measured == {(2 * H, K): 1, (K, H): 1, (M, K): 2, (M, H): 1, (M, 2 * H): 1}


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-current(pow2=True,eps=0.5)", "fp8-current(fprop='bf16')"])
@pytest.mark.parametrize("make", [linear, mlp])
def test_bits_are_those_of_codes_that_forward_kept(make, recipe):
    if make is mlp and "bf16" in recipe:
        pytest.skip("a block requires a quantized fprop")
    again, kept = make(recipe, keep_weight_codes=False), make(recipe, keep_weight_codes=True)
    for seed in range(2):
        assert_equal(step(again, seed), step(kept, seed))


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_bits_are_those_of_modules_that_run_alone(activation):
    module = mlp(activation=activation, bias=False)
    found, x = step(module), spiky(M, K, seed=0).bfloat16().requires_grad_()
    y = x
    for one in module.children():
        y = one(y)
    y.backward(spiky(*y.shape, seed=1).bfloat16())
    assert_equal(found, [y.detach(), x.grad, *[p.grad for p in module.parameters()]])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
@pytest.mark.parametrize("make", [linear, mlp])
def test_bits_are_equal_for_weights_that_are_not_finite_or_zero(make, value):
    again, kept = make(keep_weight_codes=False), make(keep_weight_codes=True)
    for module in (again, kept):
        for p in module.parameters():
            p.data.view(-1)[:: 1 if value == 0.0 else 777] = value
    for one, other in zip(step(again), step(kept), strict=True):
        assert torch.equal(one.nan_to_num(nan=-5.0), other.nan_to_num(nan=-5.0))


def test_an_amax_is_kept_where_backward_casts_by_it():
    """One element, and only for a recipe whose scale follows from it."""
    for recipe, kept in (("fp8-current", 4), ("fp8-block", 0), ("fp8-rowwise", 0), ("nvfp4", 0)):
        module, found = linear(recipe, keep_weight_codes=False), {}
        with torch.autograd.graph.saved_tensors_hooks(lambda t, f=found: f.setdefault(id(t), t), lambda t: t):
            module(spiky(M, K).bfloat16().requires_grad_())
        singles = [t for t in found.values() if t.shape == (1, 1) and t.dtype == torch.float32]
        amax = module.weight.detach().abs().amax()
        assert sum(4 for t in singles if torch.equal(t.view(()), amax.float())) == kept, recipe


def test_a_second_backward_has_the_same_bits():
    module, x = mlp(), spiky(M, K).bfloat16().requires_grad_()
    y = module(x)
    dy = spiky(*y.shape, seed=1).bfloat16()
    first = torch.autograd.grad(y, [x, *module.parameters()], dy, retain_graph=True)
    assert_equal(first, torch.autograd.grad(y, [x, *module.parameters()], dy))
