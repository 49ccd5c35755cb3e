"""Hooks of all modules (torch.nn.modules.module.register_module_forward_hook and its relatives) see each operation."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn.modules import module as hooks_of_all
from torch.utils.flop_counter import FlopCounterMode

import octavo
from octavo import ops
from tests.support.steps import compiled

H = 32
MODELS = {
    "Sequential": lambda: octavo.Sequential(ops.RMSNorm(H), ops.Linear(H, H, recipe="fp8-block")),
    "nested": lambda: octavo.Sequential(
        ops.RMSNorm(H), octavo.Sequential(ops.Linear(H, H, recipe="fp8-block"), ops.GELU()), ops.Linear(H, H)
    ),
    "LayerNormLinear": lambda: octavo.LayerNormLinear(H, H, recipe="fp8-block"),
    "LayerNormMLP": lambda: octavo.LayerNormMLP(H, H, recipe="fp8-block"),
    "recomputed": lambda: octavo.LayerNormMLP(H, H, recipe="fp8-block", activation_recompute=True),
    "MoE": lambda: octavo.MoE(H, H, 4, 2, recipe="fp8-block"),
    "dispatched": lambda: octavo.MoE(H, H, 4, 2, recipe="fp8-block", dispatcher=octavo.moe.LocalDispatch()),
}
every = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
REGISTER = ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"]


@contextmanager
def hooked(kind, hook):
    handle = getattr(hooks_of_all, f"register_module_{kind}")(hook)
    try:
        yield
    finally:
        handle.remove()


@every
@pytest.mark.parametrize("kind", REGISTER)
def test_a_hook_of_all_modules_sees_every_module(make, kind):
    model, seen = make(), []
    x = torch.randn(8, H, requires_grad=True)
    with hooked(kind, lambda module, *_: seen.append(id(module)) and None):
        model(x).square().sum().backward()
    missing = [type(m).__name__ for m in model.modules() if id(m) not in seen]
    assert not missing


@every
def test_runs_are_back_once_the_hook_is_removed(make):
    model, x = make(), torch.randn(8, H)
    before = model(x)
    with hooked("forward_hook", lambda *_: None):
        assert torch.allclose(model(x), before, atol=0.1)
    assert torch.equal(model(x), before)
    if isinstance(model, octavo.Sequential):
        assert model.explain(x).runs[0].ops[:2] == ("LayerNorm" if "LayerNorm" in str(model) else "RMSNorm", "Linear")


def test_what_a_hook_returns_takes_the_place_of_an_operations_output():
    model = MODELS["Sequential"]()
    with hooked("forward_hook", lambda module, _, y: y * 0 if isinstance(module, nn.Linear) else None):
        assert not model(torch.randn(8, H)).any()


def test_explain_says_that_hooks_of_all_modules_keep_operations_apart():
    model = MODELS["LayerNormMLP"]()
    with hooked("forward_hook", lambda *_: None):
        explanation = model.explain(torch.randn(8, H))
    assert not explanation.fired and explanation.alone[0] == "LayerNorm: hooks of all modules are registered"


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
def test_a_graph_has_the_hooks_of_all_modules_that_were_there_when_it_was_compiled():
    model, x = MODELS["Sequential"](), torch.randn(8, H)  # torch guards on no hook: later ones are not seen
    with hooked("forward_hook", lambda module, _, y: y * 0 if isinstance(module, nn.Linear) else None):
        assert not compiled(model)(x).any()


def test_trackers_of_torchs_own_change_no_bit():
    model, x = MODELS["LayerNormMLP"](), torch.randn(8, H, requires_grad=True)
    y = model(x)
    with FlopCounterMode(display=False) as counter:
        assert torch.equal(model(x), y)
        assert model.explain(x).fired
    assert counter.get_total_flops() > 0
