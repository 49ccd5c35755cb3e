"""Weights that are codes in programs that know nothing of them: averages, updates by hand, ties, other recipes."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

import octavo
from octavo.errors import UnsupportedConfig
from octavo.weights import master_values
from tests.support.linear_oracle import assert_same
from tests.support.training import layer_of_codes

X = torch.linspace(-1, 1, 8 * 64).view(8, 64)


def linear(dtype=torch.bfloat16, n=48, trainable=True):
    return layer_of_codes(octavo.Linear, 64, n, recipe="fp8-block", dtype=dtype, trainable=trainable)


# -- averages and updates by hand --------------------------------------------------------------------------------------


def lerp(average, weight):
    average.lerp_(weight, 0.01)


def difference(average, weight):
    average.sub_(0.01 * (average - weight))


def foreach(average, weight):
    torch._foreach_lerp_([average], [weight], 0.01)


@pytest.mark.parametrize("update", [lerp, foreach])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_moving_average_adds_up(update, dtype):
    """One update moves the average by a hundredth of the way, which is less than the distance of two codes."""
    model = linear(dtype=dtype)
    average = copy.deepcopy(model).weight
    exact = average.dequantize().detach().float()
    with torch.no_grad():
        model.weight.copy_(model.weight.dequantize() * 1.5)
        for _ in range(100):
            update(average, model.weight)
            exact.lerp_(model.weight.dequantize().float(), 0.01)
    want = octavo.recipe("fp8-block").linear().fprop.right.quantize(exact).codes.view(torch.uint8)
    assert (average.row_codes == want).float().mean() > 0.99


def test_an_average_of_differences_goes_on_from_its_codes():
    """A difference is computed of what is read, the codes; the update itself is kept in float32."""
    model = linear()
    average = next(model.parameters()).clone().detach()
    start = average.dequantize().float()
    with torch.no_grad():
        model.weight.copy_(model.weight.dequantize() * 1.5)
        for _ in range(100):
            difference(average, model.weight)
    way = (average.dequantize().float() - start).norm() / (model.weight.dequantize().float() - start).norm()
    assert 0.5 < way < 0.8


def test_an_averaged_model_averages_in_float32_or_refuses():
    model = nn.Sequential(linear())
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    exact = model[0].weight.dequantize().detach().float()
    for i in range(20):
        with torch.no_grad():
            model[0].weight.copy_(linear().weight.dequantize() * (1 + 0.05 * i))
        average.update_parameters(model)
        exact.lerp_(model[0].weight.dequantize().detach().float(), 0.1 if i else 1.0)
    found = average.module[0].weight
    want = octavo.recipe("fp8-block").linear().fprop.right.quantize(exact).codes.view(torch.uint8)
    assert (found.row_codes == want).float().mean() > 0.99


def test_an_average_that_would_be_lost_is_refused_and_values_are_the_way_out():
    model = nn.Sequential(linear())
    average = AveragedModel(model, avg_fn=get_ema_avg_fn(0.9))
    average.update_parameters(model)
    with pytest.raises(UnsupportedConfig, match="get_ema_multi_avg_fn"):
        average.update_parameters(model)
    average = AveragedModel(model, avg_fn=get_ema_avg_fn(0.9))
    octavo.revert(average.module)
    for _ in range(3):
        average.update_parameters(model)
    torch.testing.assert_close(average.module[0].weight, model[0].weight.dequantize(), rtol=0.01, atol=0.01)


def test_updates_by_hand_add_up():
    ones = torch.ones(48, 64)
    for write in (lambda w: w.add_(ones, alpha=-1e-4), lambda w: w.data.sub_(1e-4 * ones)):
        layer = linear()
        before = layer.weight.dequantize().detach().float()
        with torch.no_grad():
            for _ in range(100):
                write(layer.weight)
        moved = (layer.weight.dequantize().float() - before).mean()
        assert -0.0115 < moved < -0.0085


def test_initialisation_keeps_no_values():
    layer = linear()
    nn.init.trunc_normal_(layer.weight, std=0.02)
    assert master_values._masters.get(layer.weight.row_codes) is None
    with torch.no_grad():
        layer.weight.add_(torch.ones(48, 64))
    assert master_values._masters.get(layer.weight.row_codes) is not None
    layer(X.bfloat16()).float().sum().backward()
    octavo.optim.AdamW(layer.parameters()).step()  # which has values of its own
    assert master_values._masters.get(layer.weight.row_codes) is None


def test_a_frozen_weight_keeps_no_values_beside_its_codes():
    layer = linear(trainable=False)
    before = layer.weight.dequantize().detach().clone()
    with torch.no_grad():
        layer.weight.add_(1e-7)
    assert_same(layer.weight.dequantize(), before)


# -- other recipes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("how", ["own recipe", "outside of autocast", "autocast"])
@pytest.mark.parametrize("kind", ["linear", "one parameter", "a parameter a group"])
def test_a_recipe_that_quantizes_nothing_multiplies_the_values(kind, how, compiled):
    torch._dynamo.reset()
    torch.manual_seed(0)
    if kind == "linear":
        layer, args = octavo.Linear(64, 48, dtype=torch.bfloat16), ()
    else:
        layer = octavo.GroupedLinear(2, 64, 48, dtype=torch.bfloat16, single_grouped_weight=kind == "one parameter")
        args = (torch.tensor([3, 5]),)
    layer.recipe = "fp8-block"
    octavo.quantize_weights(layer, trainable=True)
    plain = copy.deepcopy(layer)
    octavo.revert(plain)
    plain.recipe, layer.recipe = "bf16", "bf16" if how == "own recipe" else None
    call = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    found = []
    for model in (call, plain):
        x = X.bfloat16().requires_grad_()
        with octavo.autocast("bf16") if how == "autocast" else nullcontext():
            y = model(x, *args)
        y.float().square().sum().backward()
        found.append((y.detach(), x.grad))
    for a, b in zip(*found, strict=True):
        assert_same(a, b)
    for p, q in zip(layer.parameters(), plain.parameters(), strict=True):
        assert_same(p.grad, q.grad)
    layer.recipe = "fp8-block"
    assert layer(X.bfloat16(), *args).isfinite().all()


def test_another_quantized_recipe_is_refused():
    layer = linear()
    with pytest.raises(UnsupportedConfig, match="stored as codes of fp8-block"):
        layer.recipe = "fp8-current"
    with pytest.raises(UnsupportedConfig, match="stored as codes of fp8-block"):
        layer.recipe = "fp8-block(fprop='bf16')"  # dgrad would round the weight again


# -- ties, transforms, wrappers ----------------------------------------------------------------------------------------


def test_layers_share_a_weight_that_is_codes():
    model = nn.Sequential(linear(n=64), linear(n=64))
    model[1].weight = model[0].weight
    optimizer = octavo.optim.AdamW(model.parameters(), lr=0.1)
    for m in (model, copy.deepcopy(model)):
        assert len(list(m.parameters())) == 1
        assert m[0].weight is m[1].weight
    model(X.bfloat16()).float().square().sum().backward()
    before = model[1].weight.row_codes.clone()
    optimizer.step()
    assert not torch.equal(model[1].weight.row_codes, before)


def test_an_embedding_shares_a_weight_that_is_codes():
    head, embedding = linear(n=64), nn.Embedding(64, 64)
    embedding.weight = head.weight
    head(embedding(torch.arange(4))).float().sum().backward()
    assert head.weight.grad.shape == (64, 64)


def test_functional_call_takes_other_codes_and_no_values():
    layer, other = linear(), linear()
    with torch.no_grad():
        other.weight.mul_(2)
    plain = octavo.Linear(64, 48, bias=False, recipe="fp8-block", dtype=torch.bfloat16)
    for model in (layer, plain):
        assert_same(functional_call(model, {"weight": other.weight}, (X.bfloat16(),)), other(X.bfloat16()))
    with pytest.raises(UnsupportedConfig, match="replaced by another"):
        functional_call(layer, {"weight": torch.ones(48, 64).bfloat16()}, (X.bfloat16(),))


def test_transforms_are_refused_in_a_sentence():
    layer = linear()
    with pytest.raises(UnsupportedConfig, match="vmap"):
        torch.vmap(layer)(X.bfloat16().view(2, 4, 64))
    for transform in (torch.func.grad, lambda f: lambda w: torch.func.jvp(f, (w,), (torch.ones_like(w),))):
        with pytest.raises(UnsupportedConfig):
            transform(lambda w: functional_call(layer, {"weight": w}, (X.bfloat16(),)).sum())(layer.weight)


def test_weights_are_swapped():
    layer, other = linear(), linear()
    with torch.no_grad():
        other.weight.mul_(2)
    want = other(X.bfloat16())
    torch.utils.swap_tensors(layer.weight, other.weight)
    assert_same(layer(X.bfloat16()), want)
