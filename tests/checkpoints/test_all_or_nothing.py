"""A load that fails halfway leaves the model, the optimizer and the generators as they were."""

import pytest
import torch
from torch import nn

import octavo
from octavo.checkpoints import checkpoint
from tests.support.small_run import assert_same, make, seed_all, train, values


class Stop(Exception):
    pass


def raises(*_, **__):
    raise Stop


class Refuses(nn.Module):
    """A module that does not take the state that it has saved."""

    def get_extra_state(self):
        return torch.ones(1)

    def set_extra_state(self, state):
        torch.manual_seed(0)
        raise Stop

    def forward(self, x):
        return x


HOOKS = {
    "before the model": lambda model, _: model.register_load_state_dict_pre_hook(raises),
    "before its last layer": lambda model, _: model.experts.register_load_state_dict_pre_hook(raises),
    "after its first layer": lambda model, _: model.up.register_load_state_dict_post_hook(raises),
    "after the model": lambda model, _: model.register_load_state_dict_post_hook(raises),
    "before the optimizer": lambda _, optimizer: optimizer.register_load_state_dict_pre_hook(raises),
    "after the optimizer": lambda _, optimizer: optimizer.register_load_state_dict_post_hook(raises),
}


def run(recipe, seed, module=None):
    model, optimizer = make(recipe, seed=seed)
    if module is not None:
        model.add_module("more", module)
    seed_all(seed)
    train(model, optimizer, 2)
    return model, optimizer


def fails_and_changes_nothing(path, model, optimizer):
    seed_all(11)
    before = values(model, optimizer)
    groups = [dict(group) for group in optimizer.param_groups]
    identities = [id(p) for p in model.parameters()]
    with pytest.raises((Stop, KeyboardInterrupt)):
        octavo.load_checkpoint(path, model, optimizer)
    assert_same(values(model, optimizer), before)
    assert [dict(group) for group in optimizer.param_groups] == groups
    assert [id(p) for p in model.parameters()] == identities
    seed_all(12)
    return train(model, optimizer, 2)


@pytest.mark.parametrize("recipe", ["fp8-delayed", "nvfp4"])
@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)
def test_a_hook_that_raises_leaves_everything_as_it_was(hook, recipe, tmp_path):
    octavo.save_checkpoint(tmp_path, *run(recipe, 1), step=2)
    model, optimizer = run(recipe, 2)
    hook(model, optimizer)
    losses = fails_and_changes_nothing(tmp_path, model, optimizer)
    untouched = run(recipe, 2)
    seed_all(12)
    assert losses == train(*untouched, 2)


def test_a_module_that_refuses_its_extra_state_leaves_everything_as_it_was(tmp_path):
    octavo.save_checkpoint(tmp_path, *run("fp8-delayed", 1, Refuses()))
    fails_and_changes_nothing(tmp_path, *run("fp8-delayed", 2, Refuses()))


@pytest.mark.parametrize("at", ["write_state", "set_rng_state"])
def test_an_interrupt_leaves_everything_as_it_was(at, tmp_path, monkeypatch):
    octavo.save_checkpoint(tmp_path, *run("fp8-delayed", 1))
    model, optimizer = run("fp8-delayed", 2)
    where, calls = (checkpoint, []) if at == "write_state" else (torch, [])
    real = getattr(where, at)

    def interrupted(*given):
        real(*given)
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(where, at, interrupted)
    fails_and_changes_nothing(tmp_path, model, optimizer)


def test_weights_held_as_codes_stay_too(tmp_path):
    models = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        models.append(nn.Sequential(octavo.Linear(32, 48, recipe="fp8-block"), octavo.Linear(48, 32, recipe="bf16")))
        octavo.quantize_weights(models[-1])
    octavo.save_checkpoint(tmp_path, models[0])
    held = models[1][0].weight
    before = {name: tensor.clone() for name, tensor in held.tensors().items()}
    models[1][1].register_load_state_dict_post_hook(raises)
    with pytest.raises(Stop):
        octavo.load_checkpoint(tmp_path, models[1])
    assert models[1][0].weight is held
    for name, tensor in before.items():
        assert torch.equal(held.tensors()[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_a_model_that_has_diverged_loads_a_checkpoint(tmp_path):
    model, optimizer = run("fp8-delayed", 1)
    octavo.save_checkpoint(tmp_path, model, optimizer)
    before = values(model, optimizer)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(float("nan") if tensor.is_floating_point() else 0)
    octavo.load_checkpoint(tmp_path, model, optimizer)
    after = values(model, optimizer)
    assert_same({**after, "python": before["python"], "generator": before["generator"]}, before)
