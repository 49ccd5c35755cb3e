"""Averages and copies of a model that take its buffers in pairs, while layers make their state as they go."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import octavo
from tests.support.linear_oracle import assert_same, spiky
from tests.support.state_tensors import named_state

K, M = 32, 16
RECIPES = ("fp8-delayed", "nvfp4", "fp8-block")


def model_with_own_recipes(recipe):
    torch.manual_seed(0)
    return nn.Sequential(octavo.Linear(K, K, recipe=recipe), nn.BatchNorm1d(K), octavo.Linear(K, K, recipe=recipe))


def model_without(recipe):
    return model_with_own_recipes(None)


def train(model, recipe, steps=2, seed=0):
    """Makes all kinds of state: scales or a counter, and codes of the weights."""
    for step in range(steps):
        with octavo.autocast(recipe), octavo.microbatch(first=True):
            model(spiky(M, K, seed=seed + step)).square().mean().backward()
        octavo.step(model)
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.1 * p.grad)
                p.grad = None


def average(make, recipe, when, **settings):
    model = make(recipe)
    if when == "after":
        train(model, recipe)
    averaged = AveragedModel(model, **settings)
    for _ in range(2):
        train(model, recipe)
        averaged.update_parameters(model)
    return averaged


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("make", [model_with_own_recipes, model_without])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    "settings", [{"use_buffers": True}, {}, {"use_buffers": True, "multi_avg_fn": get_ema_multi_avg_fn(0.5)}],
    ids=["buffers", "copied", "ema"],
)  # fmt: skip
def test_an_average_made_before_or_after_the_first_forward(make, recipe, when, settings):
    averaged, plain = (average(make, name, when, **settings) for name in (recipe, "bf16"))
    assert [n for n, _ in averaged.module.named_buffers()] == [n for n, _ in plain.module.named_buffers()]
    x = spiky(M, K, seed=9)
    averaged.eval(), plain.eval()
    with torch.no_grad(), octavo.autocast(recipe):
        found, want = averaged(x), plain(x)
    assert ((found - want).norm() / want.norm()).item() < 0.3


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_hand_written_average_pairs_buffers(recipe):
    model = model_without(recipe)
    ema = copy.deepcopy(model)
    train(model, recipe)
    for mine, theirs in zip(ema.buffers(), model.buffers(), strict=True):
        mine.copy_(theirs)
    assert len(list(named_state(model))) > 0 == len(list(named_state(ema)))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_model_lists_the_buffers_that_it_was_built_with(recipe):
    model = model_without(recipe)
    names = [name for name, _ in model.named_buffers()]
    modules = [name for name, _ in model.named_modules()]
    saved = list(model.state_dict())
    train(model, recipe)
    with octavo.inspect(model):
        train(model, recipe)
        assert [name for name, _ in model.named_buffers()] == names
    assert [name for name, _ in model.named_modules()] == modules and list(model.state_dict()) == saved


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("recipe", ["fp8-delayed", "nvfp4"])
def test_copies_have_the_state_and_share_no_memory(recipe, how):
    model = model_with_own_recipes(recipe)
    train(model, recipe)
    if how == "deepcopy":
        twin = copy.deepcopy(model)
    else:
        stream = io.BytesIO()
        torch.save(model, stream)
        stream.seek(0)
        twin = torch.load(stream, weights_only=False)
    mine, theirs = dict(named_state(model)), dict(named_state(twin))
    assert mine.keys() == theirs.keys() and mine
    for name, tensor in mine.items():
        assert_same(theirs[name], tensor, name)
        assert theirs[name].data_ptr() != tensor.data_ptr()
    x = spiky(M, K, seed=5)
    assert_same(twin(x), model(x))


@pytest.mark.parametrize(
    "move", [nn.Module.half, nn.Module.double, lambda m: m.to(torch.bfloat16), lambda m: m.to_empty(device="cpu")],
    ids=["half", "double", "bfloat16", "to_empty"],
)  # fmt: skip
@pytest.mark.parametrize("recipe", ["fp8-delayed", "nvfp4"])
def test_state_keeps_dtype_values_and_place_where_the_module_is_cast(recipe, move):
    model = model_with_own_recipes(recipe)
    train(model, recipe)
    before = {n: (t.data_ptr(), t.clone()) for n, t in named_state(model) if "codes" not in n and "weight" not in n}
    move(model)
    after = dict(named_state(model))
    assert before and set(before) == set(after)
    for name, (address, tensor) in before.items():
        assert_same(after[name], tensor, name)
        assert after[name].data_ptr() == address


def test_functional_call_with_all_parameters_and_buffers():
    model = model_with_own_recipes("fp8-delayed")
    train(model, "fp8-delayed")
    model.eval()
    x = spiky(M, K, seed=5)
    given = {name: t.detach().clone() for name, t in (*model.named_parameters(), *model.named_buffers())}
    assert_same(torch.func.functional_call(model, given, x), model(x))


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["fp8-delayed", "nvfp4"])
def test_state_follows_parameters_that_were_moved_alone(recipe):
    """As fully_shard moves those of a model on the CPU to the devices of its mesh."""
    model = model_with_own_recipes(recipe)
    twin = copy.deepcopy(model).cuda()
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.cuda()
    x = spiky(M, K, seed=5).cuda()
    assert_same(model(x), twin(x))
    model(x).sum().backward()
    assert all(t.is_cuda for _, t in named_state(model))
