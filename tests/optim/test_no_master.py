"""octavo.optim.AdamW without a master copy: codes are all there is of a weight, and small updates arrive on average."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

import octavo
from octavo.errors import UnsupportedConfig
from tests.support.training import layer_of_codes

RECIPES = ("fp8-current", "fp8-delayed", "fp8-rowwise", "fp8-block", "mxfp8")


linear = partial(layer_of_codes, octavo.Linear, 256, 128, recipe="fp8-block", dtype=torch.bfloat16)


def constant_steps(layer, optimizer, steps):
    for _ in range(steps):
        for p in layer.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()


@pytest.mark.parametrize("recipe", RECIPES)
def test_updates_smaller_than_the_distance_of_codes_arrive_on_average(recipe):
    layer = linear(recipe=recipe)
    before = layer.weight.base_values(torch.float32)
    optimizer = octavo.optim.AdamW(layer.parameters(), lr=1e-4, weight_decay=0.0, master="none")
    constant_steps(layer, optimizer, 20)
    assert "master" not in optimizer.state[layer.weight]
    moved = (layer.weight.base_values(torch.float32) - before).mean().item()
    assert moved == pytest.approx(-20e-4, rel=0.1)


@pytest.mark.parametrize("recipe", ["fp8-block", "fp8-rowwise", "mxfp8"])
@pytest.mark.parametrize("single", [False, True], ids=["a parameter a group", "one parameter"])
@pytest.mark.parametrize("sizes", [(256, 128), (48, 40)], ids=["aligned", "padded"])
def test_groups_are_written_too(single, sizes, recipe):
    torch.manual_seed(0)
    layer = octavo.GroupedLinear(3, *sizes, bias=False, recipe=recipe, single_grouped_weight=single)
    octavo.quantize_weights(layer, trainable=True)
    before = [p.base_values(torch.float32) for p in layer.parameters()]
    optimizer = octavo.optim.AdamW(layer.parameters(), lr=1e-4, weight_decay=0.0, master="none")
    constant_steps(layer, optimizer, 20)
    for p, old in zip(layer.parameters(), before, strict=True):
        moved = (p.base_values(torch.float32) - old).mean().item()
        assert moved == pytest.approx(-20e-4, rel=0.15)
    x = torch.randn(30, sizes[0])
    assert layer(x, torch.tensor([10, 0, 20])).isfinite().all()


def test_a_model_learns_and_resumes_with_the_same_bits():
    def build():
        torch.manual_seed(0)
        model = nn.Sequential(
            octavo.Linear(64, 96, recipe="fp8-block"), nn.GELU(), octavo.Linear(96, 8, recipe="fp8-block")
        )
        model = model.bfloat16()
        octavo.quantize_weights(model, trainable=True)
        return model, octavo.optim.AdamW(model.parameters(), lr=3e-3, master="none", states="8bit")

    def train(model, optimizer, steps):
        losses = []
        for i in steps:
            x = torch.randn(64, 64, generator=torch.Generator().manual_seed(i % 4)).bfloat16()
            loss = (model(x) - x[:, :8]).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    model, optimizer = build()
    losses = train(model, optimizer, range(20))
    again, its = build()
    again.load_state_dict(copy.deepcopy(model.state_dict()))
    its.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for target, source in zip(again.parameters(), model.parameters(), strict=True):
        with torch.no_grad():
            target.copy_(source)  # the codes themselves: a state dict has values in bfloat16
    losses += train(model, optimizer, range(20, 60))
    assert losses[-1] < 0.5 * losses[0]
    assert train(again, its, range(20, 60)) == losses[20:]


def test_plain_parameters_in_bfloat16_have_no_copy_and_others_do():
    parameters = [nn.Parameter(torch.ones(64, 64, dtype=dtype)) for dtype in (torch.bfloat16, torch.float16)]
    optimizer = octavo.optim.AdamW(parameters, lr=1e-4, weight_decay=0.0, master="none")
    for _ in range(20):
        for p in parameters:
            p.grad = torch.ones_like(p)
        optimizer.step()
    assert ["master" in optimizer.state[p] for p in parameters] == [False, True]
    assert parameters[0].float().mean().item() == pytest.approx(1 - 20e-4, abs=3e-4)


def test_codes_that_it_cannot_write_are_refused():
    for layer, why in ((linear(recipe="nvfp4"), "E2M1"), (linear(keep_columns=True), "keep_columns")):
        layer.weight.grad = torch.ones_like(layer.weight)
        with pytest.raises(UnsupportedConfig, match=why):
            octavo.optim.AdamW(layer.parameters(), master="none").step()


def test_a_master_copy_of_a_file_is_dropped_or_made():
    layer = linear(dtype=torch.float32)
    kept = octavo.optim.AdamW(layer.parameters(), lr=1e-3)
    constant_steps(layer, kept, 1)
    none = octavo.optim.AdamW(layer.parameters(), lr=1e-3, master="none")
    none.load_state_dict(kept.state_dict())
    constant_steps(layer, none, 1)
    assert "master" not in none.state[layer.weight]
    kept.load_state_dict(none.state_dict())
    constant_steps(layer, kept, 1)
    assert kept.state[layer.weight]["step"] == 3


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_gpu_writes_codes_that_move_as_far(recipe):
    layer = linear(recipe=recipe).cuda()
    before = layer.weight.base_values(torch.float32)
    optimizer = octavo.optim.AdamW(layer.parameters(), lr=1e-4, weight_decay=0.0, master="none")
    constant_steps(layer, optimizer, 20)
    moved = (layer.weight.base_values(torch.float32) - before).mean().item()
    assert moved == pytest.approx(-20e-4, rel=0.1)
