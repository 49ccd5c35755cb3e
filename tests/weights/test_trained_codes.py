"""Weights that are codes and are trained: by optimizers that know nothing of codes, through layers of every kind."""

import copy
import pickle
from functools import partial

import pytest
import torch
from torch import nn

import octavo
from octavo.errors import UnsupportedConfig
from tests.support import training
from tests.support.recipe_traits import QUANTIZED
from tests.support.training import layer_of_codes

OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=3e-3),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=3e-3, foreach=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=3e-3),
    "Adam": lambda p: torch.optim.Adam(p, lr=3e-3, amsgrad=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=3e-3, fused=True),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=3e-3),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=3e-2),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=3e-3),
    "Muon": lambda p: torch.optim.Muon(p, lr=3e-3),
}


OPTIMIZERS = {name: make for name, make in OPTIMIZERS.items() if hasattr(torch.optim, name.split()[0])}


linear = partial(layer_of_codes, octavo.Linear, 48, 40, recipe="fp8-block")
train = partial(training.train, shape=(16, 48))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_other_optimizers_train_what_they_would_train_in_float32(name):
    """Updates that are far smaller than the distance of two codes add up."""
    layer = linear()
    plain = octavo.Linear(48, 40, bias=False, recipe="fp8-block")
    with torch.no_grad():
        plain.weight.copy_(layer.weight.dequantize())
    train(layer, OPTIMIZERS[name](layer.parameters()), range(5))
    train(plain, OPTIMIZERS[name](plain.parameters()), range(5))
    want = octavo.recipe("fp8-block").linear().fprop.right.quantize(plain.weight.detach())
    assert torch.equal(layer.weight.row_codes, want.codes.view(torch.uint8))


def test_a_fused_kernel_of_one_dtype_is_refused():
    layer = linear(dtype=torch.bfloat16)
    before = layer.weight.row_codes.clone()
    with pytest.raises(UnsupportedConfig, match="Leave fused out"):
        train(layer, torch.optim.AdamW(layer.parameters(), fused=True), range(1))
    assert torch.equal(layer.weight.row_codes, before)


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Muon"])
def test_other_optimizers_train_weights_in_bfloat16_too(name):
    if name not in OPTIMIZERS:
        pytest.skip("this torch does not have it")
    layer = linear(dtype=torch.bfloat16)
    before = layer.weight.dequantize().detach().float()
    train(layer, OPTIMIZERS[name](layer.parameters()), range(10))
    after = layer.weight.dequantize().detach().float()
    assert (before != after).float().mean() > 0.02


def test_a_weight_that_is_frozen_as_codes_refuses_a_step_and_says_how_to_train_it():
    layer = linear(trainable=False)
    layer(torch.ones(2, 48)).sum().backward()
    before = layer.weight.row_codes.clone()
    for make in (torch.optim.AdamW, octavo.optim.AdamW):
        with pytest.raises(UnsupportedConfig, match="trainable=True"):
            make(layer.parameters()).step()
    assert torch.equal(layer.weight.row_codes, before)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_a_copy_is_trainable_too(copied):
    layer = copied(linear())
    before = layer.weight.row_codes.clone()
    train(layer, octavo.optim.AdamW(layer.parameters(), lr=0.1), range(1))
    assert not torch.equal(layer.weight.row_codes, before)


def test_a_loaded_weight_replaces_the_values_that_another_optimizer_trains():
    layer = linear()
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-6)
    train(layer, optimizer, range(1))
    layer.load_state_dict({"weight": torch.full((40, 48), 0.5)})
    train(layer, optimizer, range(1))
    assert torch.equal(layer.weight.dequantize().detach(), torch.full((40, 48), 0.5))


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-block", "mxfp8"])
@pytest.mark.parametrize("single", [False, True], ids=["a parameter a group", "one parameter"])
def test_experts_train(recipe, single):
    torch.manual_seed(0)
    layer = octavo.GroupedLinear(3, 32, 48, bias=False, recipe=recipe, single_grouped_weight=single)
    octavo.quantize_weights(layer, trainable=True)
    sizes = torch.tensor([7, 0, 9])
    for make in (octavo.optim.AdamW, torch.optim.SGD):
        before = [p.dequantize().detach().clone() for p in layer.parameters()]
        layer(torch.randn(16, 32), sizes).square().mean().backward()
        optimizer = make(layer.parameters(), lr=0.5)
        optimizer.step()
        optimizer.zero_grad()
        after = [p.dequantize().detach() for p in layer.parameters()]
        changed = torch.stack(
            [
                torch.stack([(a != b).any() for a, b in zip(x, y, strict=True)]) if single else (x != y).any()
                for x, y in zip(before, after, strict=True)
            ]
        ).view(-1)
        assert changed.tolist()[0::2] == [True, True]


def test_clipping_and_averages_see_values():
    model = nn.Sequential(linear())
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = octavo.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(8, 48)).square().sum().backward()
    assert nn.utils.clip_grad_norm_(model.parameters(), 1e-3) > 1e-3
    optimizer.step()
    average.update_parameters(model)
    x = torch.randn(4, 48)
    torch.testing.assert_close(average(x), model(x))


def test_a_compiled_step_runs_outside_of_the_graph():
    layer = linear()
    twin = copy.deepcopy(layer)
    optimizers = [octavo.optim.AdamW(m.parameters(), lr=0.1) for m in (layer, twin)]
    steps = [torch.compile(optimizers[0].step, backend="aot_eager"), optimizers[1].step]
    for model, step in zip((layer, twin), steps, strict=True):
        model(torch.ones(8, 48)).square().mean().backward()
        step()
    assert torch.equal(layer.weight.row_codes, twin.weight.row_codes)


def test_a_compiled_layer_sees_each_step():
    layer = linear()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    twin = copy.deepcopy(layer)
    optimizers = [octavo.optim.AdamW(m.parameters(), lr=0.1) for m in (layer, twin)]
    for i in range(3):
        x = torch.randn(8, 48, generator=torch.Generator().manual_seed(i))
        for call, optimizer in ((compiled, optimizers[0]), (twin, optimizers[1])):
            call(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(layer.weight.row_codes, twin.weight.row_codes)


# -- octavo.quantized_init ---------------------------------------------------------------------------------------------


def test_layers_built_in_the_block_have_the_codes_of_those_that_are_quantized_later():
    torch.manual_seed(0)
    with octavo.quantized_init("fp8-block"):
        built = nn.Sequential(octavo.Linear(48, 40), octavo.LayerNormMLP(40, 64, recipe="mxfp8"))
    torch.manual_seed(0)
    later = nn.Sequential(octavo.Linear(48, 40, recipe="fp8-block"), octavo.LayerNormMLP(40, 64, recipe="mxfp8"))
    octavo.quantize_weights(later, trainable=True)
    for a, b in zip(built.parameters(), later.parameters(), strict=True):
        assert type(a) is type(b)
        assert torch.equal(a.detach().clone(), b.detach().clone())
    octavo.Linear(8, 8)
    assert type(octavo.Linear(8, 8).weight) is nn.Parameter  # the block has ended


def test_a_layer_with_a_recipe_that_quantizes_nothing_stays_plain():
    with octavo.quantized_init("fp8-block"):
        assert type(octavo.Linear(8, 8, recipe="bf16").weight) is nn.Parameter
    with pytest.raises(UnsupportedConfig, match="bf16 quantizes no weight"):
        octavo.quantized_init("bf16")


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_the_first_step_takes_the_initial_values_that_were_preserved(recipe):
    torch.manual_seed(0)
    with octavo.quantized_init(recipe, preserve_high_precision=True):
        layer = octavo.Linear(48, 40, bias=False)
    initial = layer.weight.high_precision_init.clone()
    optimizer = octavo.optim.AdamW(layer.parameters(), lr=0.0)
    train(layer, optimizer, range(1))
    assert torch.equal(optimizer.state[layer.weight]["master"], initial)
    assert not hasattr(layer.weight, "high_precision_init")


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-block", "fp8-block(scale='fp32')", "nvfp4"])
def test_a_model_quantized_with_its_values_preserved_trains_as_one_that_casts(recipe):
    """Scales of the weight follow from the weight alone here, and codes of wᵀ from those of w."""
    torch.manual_seed(0)
    casts = octavo.Linear(48, 40, bias=False, recipe=recipe)
    codes = copy.deepcopy(casts)
    octavo.quantize_weights(codes, trainable=True, preserve_high_precision=True)
    optimizer = octavo.optim.AdamW(codes.parameters(), lr=3e-3)
    train(codes, optimizer, range(5))
    train(casts, torch.optim.AdamW(casts.parameters(), lr=3e-3, foreach=False), range(5))
    assert torch.equal(optimizer.state[codes.weight]["master"], casts.weight)


def test_values_are_preserved_for_an_optimizer_only():
    layer = octavo.Linear(48, 40, recipe="fp8-block")
    with pytest.raises(UnsupportedConfig, match="trainable=True"):
        octavo.quantize_weights(layer, preserve_high_precision=True)
    assert type(layer.weight) is nn.Parameter


def load(layer, values):
    layer.load_state_dict({"weight": values})


def set_values(layer, values):
    layer.weight.data.copy_(values)


@pytest.mark.parametrize("write", [load, set_values])
@pytest.mark.parametrize("recipe", QUANTIZED)
def test_weights_that_were_loaded_are_not_replaced_by_the_preserved_initial_values(recipe, write):
    with octavo.quantized_init(recipe, preserve_high_precision=True):
        layer = octavo.Linear(48, 40, bias=False)
    values = torch.randn(40, 48)
    write(layer, values)
    loaded = layer.weight.dequantize().clone()
    optimizer = octavo.optim.AdamW(layer.parameters(), lr=0.0)
    train(layer, optimizer, range(1))
    assert torch.equal(optimizer.state[layer.weight]["master"], loaded)


def test_a_layer_built_on_the_meta_device_is_initialised_as_codes():
    with torch.device("meta"), octavo.quantized_init("fp8-block"):
        layer = octavo.Linear(48, 40)
    assert layer.weight.is_meta
    layer.to_empty(device="cpu").reset_parameters()
    assert 0.05 < layer.weight.dequantize().std() < 0.12
    assert layer(torch.randn(3, 48)).isfinite().all()
