"""Settings of operations that are assigned after construction: the next call has them, as in torch, or a sentence says
why not."""

import copy
import pickle

import pytest
import torch

import octavo
from octavo import ops
from octavo.errors import UnsupportedConfig
from tests.support.steps import compiled

pytestmark = pytest.mark.usefixtures("fresh_compiler")

CASES = [
    (ops.RMSNorm, (32,), {"eps": 0.5}),
    (ops.RMSNorm, (32,), {"zero_centered_gamma": True}),
    (ops.LayerNorm, (32,), {"eps": 0.5}),
    (ops.LayerNorm, (32,), {"zero_centered_gamma": True}),
    (ops.L2Normalization, (), {"eps": 0.5}),
    (ops.SwiGLU, (), {"glu_interleave_size": 2}),
    (ops.ClampedSwiGLU, (), {"glu_interleave_size": 2}),
    (ops.ClampedSwiGLU, (), {"limit": 0.5}),
    (ops.ClampedSwiGLU, (), {"alpha": 0.5}),
    (ops.ClampedSwiGLU, (), {"glu_linear_offset": 0.5}),
    (ops.SiTUGLU, (), {"beta1": 0.5}),
    (ops.SiTUGLU, (), {"beta2": 0.5}),
]
every = pytest.mark.parametrize(
    ("kind", "given", "settings"), CASES, ids=[f"{kind.__name__}-{next(iter(s))}" for kind, _, s in CASES]
)


def pair(kind, given, settings):
    """An operation whose settings are assigned, and one that is built with them, with the same parameters."""
    old, new = kind(*given), kind(*given, **settings)
    for p in old.parameters():
        torch.nn.init.normal_(p)
    new.load_state_dict(old.state_dict())
    return old, new


def assign(op, settings):
    for name, value in settings.items():
        setattr(op, name, value)


@every
def test_the_next_call_alone_and_its_repr_have_an_assigned_setting(kind, given, settings):
    old, new = pair(kind, given, settings)
    x = torch.randn(8, 32)
    before = old(x)
    assign(old, settings)
    assert torch.equal(old(x), new(x)) and not torch.equal(old(x), before)
    assert repr(old) == repr(new)
    for copied in (copy.deepcopy(old), pickle.loads(pickle.dumps(old))):
        assert torch.equal(copied(x), new(x))


@every
def test_the_next_call_of_a_sequential_has_an_assigned_setting(kind, given, settings):
    old, new = pair(kind, given, settings)
    linear = octavo.Linear(old(torch.randn(4, 32)).shape[-1], 32, recipe="fp8-block")
    around = [octavo.Sequential(op, linear) for op in (old, new)]
    x = torch.randn(8, 32, requires_grad=True)
    before = around[0](x)
    assign(old, settings)
    y, wanted = [model(x) for model in around]
    assert torch.equal(y, wanted) and not torch.equal(y, before)
    grads = [torch.autograd.grad(t.square().sum(), x)[0] for t in (y, wanted)]
    assert torch.equal(*grads)


@pytest.mark.parametrize("case", [CASES[0], CASES[5], CASES[7]], ids=["eps", "interleave", "limit"])
def test_a_compiled_call_has_an_assigned_setting(case):
    kind, given, settings = case
    old, new = pair(kind, given, settings)
    run, x = compiled(old), torch.randn(8, 32)
    before = run(x)
    assign(old, settings)
    assert torch.equal(run(x), new(x)) and not torch.equal(run(x), before)


@pytest.mark.parametrize("in_sequential", [False, True])
def test_dropout_drops_with_the_probability_that_it_is_assigned(in_sequential):
    op = ops.Dropout(0.5)
    model, x = octavo.Sequential(ops.ConstantScale(1.0), op) if in_sequential else op, torch.ones(64, 64)
    for p in (0.0, 1.0, 0.5, 0.0):
        op.p = p
        dropped = (model(x) == 0).float().mean().item()
        assert dropped == p if p != 0.5 else 0.4 < dropped < 0.6


def test_a_constant_scale_is_assigned_and_shown_by_its_name():
    op = ops.ConstantScale(2.0)
    op.scale = 5.0
    assert op(torch.ones(1)).item() == 5.0 and repr(op) == "ConstantScale(scale=5.0)"


def test_a_norm_over_more_dims_is_one_that_was_built_so():
    x = torch.randn(4, 2, 16)
    old, new = ops.LayerNorm(16), ops.LayerNorm((2, 16))
    old.normalized_shape, old.weight, old.bias = [2, 16], new.weight, new.bias
    assert old.normalized_shape == (2, 16) and torch.equal(old(x), new(x))


@pytest.mark.parametrize(
    ("op", "name", "value", "says"),
    [
        (ops.Dropout(0.5), "p", 1.5, "probability"),
        (ops.RMSNorm(4), "eps", -1.0, "eps must be"),
        (ops.RMSNorm(4), "zero_centered_gamma", "no", "zero_centered_gamma"),
        (ops.RMSNorm(4), "normalized_shape", 0, "at least 1"),
        (ops.ConstantScale(1.0), "scale", float("inf"), "scale of ConstantScale must be a finite number"),
        (ops.SwiGLU(), "glu_interleave_size", 0, "at least 1"),
        (ops.GELU(), "glu_interleave_size", 2, "GELU has no halves"),
        (ops.ClampedSwiGLU(), "limit", 0, "SwiGLU clamps nothing"),
        (ops.SiTUGLU(), "beta1", 0.0, "beta1 bounds a half"),
        (ops.RotaryAttention(2, 8, positions=4), "base", 0.5, "base=.*from 1 up"),
        (ops.Quantize(recipe="mxfp8"), "recipe", "no such recipe", "no such recipe"),
        (ops.AddExtraInput(source="residual"), "in_place", True, "channel 'residual'"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, torch.nn.Module) else None,
)
def test_a_setting_without_a_meaning_is_refused_and_the_old_one_stays(op, name, value, says):
    before = getattr(op, name)
    with pytest.raises(UnsupportedConfig, match=says):
        setattr(op, name, value)
    assert getattr(op, name) == before


@pytest.mark.parametrize(("name", "value"), [("base", 100.0), ("positions", 32), ("head_width", 4)])
def test_the_factors_of_rotary_positions_follow_their_settings(name, value):
    settings = {"head_width": 8, "positions": 16, "base": 10000.0}
    old = ops.RotaryAttention(2, **settings)
    setattr(old, name, value)
    new = ops.RotaryAttention(2, **{**settings, name: value})
    assert torch.equal(old.own, new.own) and torch.equal(old.other, new.other)
    assert not old.state_dict()


def test_a_cast_takes_the_name_of_a_recipe_that_it_is_assigned():
    op = ops.Quantize(recipe="fp8-current")
    op.recipe = "mxfp8"
    assert op.recipe == octavo.recipe("mxfp8") and "mx" in repr(op(torch.randn(4, 32)))
