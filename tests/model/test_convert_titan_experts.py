"""octavo.convert on torchtitan's experts, by a stand-in of the same attributes."""

import copy
import pickle
import sys
import types

import pytest
import torch
from torch import nn

import octavo
from octavo.errors import UnsupportedConfig
from octavo.recipes import SHIPPED
from tests.support.recipe_traits import by_bits
from tests.support.titan_experts import HOME, GroupedExperts, Module

BOUNDS = by_bits(unquantized=1e-5, eight=0.1, four=0.4)  # relative error of y and of each gradient


class Replaced(GroupedExperts):
    def _grouped_mm(self, x, i):
        return x


SIZES = torch.tensor([20, 0, 12])


def experts(seed=0, kind=GroupedExperts, **settings):
    torch.manual_seed(seed)
    return kind(**settings)


def gradients(module, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    x, dy = (torch.randn(32, 64, generator=generator).to(dtype) for _ in range(2))
    y = module(x.requires_grad_(), SIZES)
    return [y.detach(), *torch.autograd.grad(y, [x, *module.parameters()], dy)]


@pytest.mark.parametrize("recipe", SHIPPED)
def test_results_are_near_the_modules_own_in_float64(recipe):
    module = experts()
    exact = gradients(copy.deepcopy(module).double(), dtype=torch.float64)
    octavo.convert(module, recipe)
    for found, wanted in zip(gradients(module), exact, strict=True):
        assert (found - wanted).norm() < BOUNDS[recipe] * wanted.norm()


@pytest.mark.parametrize("recipe", ["fp8-delayed", "fp8-block"])
def test_a_graph_of_converted_experts_computes_what_eager_does(recipe, fresh_compiler):
    eager, module = experts(), experts()
    for one in (eager, module):
        octavo.convert(one, recipe)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for step in range(2):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step))
        torch.testing.assert_close(compiled(x, SIZES), eager(x, SIZES))


def test_parameters_keys_and_class_stay():
    module = nn.ModuleDict({"experts": experts()})
    before, keys = dict(module.named_parameters()), list(module.state_dict())
    report = octavo.convert(module, "fp8-delayed")
    assert [(row.path, row.recipe, row.weights) for row in report] == [("experts", "fp8-delayed", 3 * 3 * 64 * 48)]
    assert list(module.state_dict()) == keys
    assert all(p is before[name] for name, p in module.named_parameters(remove_duplicate=False))
    assert isinstance(module["experts"], GroupedExperts)
    assert "experts.octavo.gate.scaling.forward.history" in octavo.state_dict(module)


def test_every_module_inside_keeps_the_protocol():
    module = experts()
    octavo.convert(module, "fp8-block")
    assert all(isinstance(one, Module) for one in module.modules())


def test_revert_restores_class_and_results():
    module, plain = experts(), experts()
    octavo.convert(module, "fp8-block")
    octavo.revert(module)
    assert type(module) is GroupedExperts and vars(module).keys() == vars(plain).keys() and not module._modules
    assert all(map(torch.equal, gradients(module), gradients(plain)))


def test_copies_and_pickles_have_weights_of_their_own(monkeypatch):
    for name in (HOME.split(".")[0], HOME):
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(GroupedExperts=GroupedExperts))
    module = experts()
    octavo.convert(module, "fp8-block")
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert type(other) is type(module) and other.octavo.up.weight is other.w3_EFD
        assert all(map(torch.equal, gradients(other), gradients(module)))
        octavo.revert(other)
        assert type(other) is GroupedExperts


def test_a_second_conversion_overwrites():
    module = experts()
    octavo.convert(module, "fp8-block")
    octavo.convert(module, "mxfp8", overwrite=True)
    layers = module.octavo.gate, module.octavo.up, module.octavo.down
    assert {str(layer.recipe) for layer in layers} == {"mxfp8"}


def test_rows_after_the_last_expert_are_not_read():
    module = experts()
    octavo.convert(module, "fp8-block")
    x = torch.randn(40, 64)
    y = module(x.index_fill(0, torch.arange(32, 40), torch.nan), SIZES)
    assert torch.equal(y[:32], module(x[:32], SIZES)) and y[32:].count_nonzero() == 0


def test_what_cannot_be_converted_is_named_and_left():
    patched = experts()
    patched.forward = lambda *_: None
    cases = {r"torch\.float64": experts(dtype=torch.float64), "its forward was replaced": patched}
    for said, module in {"_grouped_mm of its own": experts(kind=Replaced), **cases}.items():
        with pytest.warns(UserWarning, match=said):
            octavo.convert(nn.Sequential(nn.Linear(4, 4), module), "fp8-block")
        assert not hasattr(module, "octavo")


def test_a_forward_that_was_replaced_later_keeps_revert_away():
    module = experts()
    octavo.convert(module, "fp8-block")
    inner = module.forward
    module.forward = lambda *arguments: inner(*arguments)
    with pytest.raises(UnsupportedConfig, match="its forward was replaced"):
        octavo.revert(module)
