"""A Sequential that was changed, in any way and before any kind of call: what runs, what is compiled and what is
explained are of what it is now."""

import copy
import pickle

import pytest
import torch
from torch import nn

import octavo
from octavo import ops
from octavo.errors import UnsupportedConfig
from tests.support.own_rules import X, pair, rule
from tests.support.saved_modules import saved_and_loaded
from tests.support.sequentials import Graphs, rows
from tests.support.steps import assert_equal, compiled_anew, step

H = 32
RECIPE = "fp8-current"


def nothing(*_):
    return None


def inner(model):
    return model[1]


def hook(model):
    inner(model).register_forward_pre_hook(nothing)


def requires(model):
    model.require = ("norm-linear",)


def no_rules(model):
    model.rules, inner(model).require = None, ()


def other_linear(model):
    inner(model).fc1 = octavo.Linear(H, H, recipe=RECIPE)


def recomputes(model):
    inner(model).activation_recompute = True


def appends_inside(model):
    inner(model).append(ops.SiLU())


def appends(model):
    model.append(ops.SiLU())


EDITS = (hook, requires, no_rules, other_linear, recomputes, appends_inside, appends)


def model_of():
    return octavo.Sequential(ops.GELU(), octavo.LayerNormMLP(H, H, recipe=RECIPE), ops.SReLU())


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("when", ["never called", "compiled before"])
def test_an_edit_is_compiled(edit, when):
    model, x, dy = model_of(), rows(), rows()
    if when == "compiled before":
        call = compiled_anew(model)
        call(x.requires_grad_()).backward(dy)
    edit(model)
    if when == "never called":
        call = compiled_anew(model)
    found = step(copy.deepcopy(model), x.detach(), dy)
    model.zero_grad()
    leaf = x.detach().requires_grad_()
    y = call(leaf)
    y.backward(dy)
    assert_equal([y, leaf.grad, *[p.grad for p in model.parameters()]], found)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), saved_and_loaded])
def test_a_copy_is_compiled_without_a_call_before(copied):
    model, x = model_of(), rows()
    assert torch.equal(compiled_anew(copied(model))(x), model(x))


def test_rules_of_everybodys_that_come_and_go_are_compiled():
    call = compiled_anew(pair())
    assert (call(X) == 36).all()
    for factor in (10, 100):
        leave = ops.register_forward_fusion(rule("everyone's", factor))
        try:
            assert (call(X) == 36 * factor).all()
        finally:
            leave()
        assert (call(X) == 36).all()


def test_a_sequential_fuses_once_a_layer_inside_is_converted_and_not_once_it_is_reverted():
    model, x = octavo.Sequential(ops.RMSNorm(H), nn.Linear(H, H), ops.GELU()), rows().requires_grad_()
    plain = model(x)
    octavo.convert(model, RECIPE)
    model.require = ("norm-linear",)
    model(x)
    assert len(model.groups) == 1 and len(model.explain(x).runs) == 1
    assert model(x, op_kwargs={1: {"is_first_microbatch": True}}).shape == x.shape
    octavo.revert(model)
    model.require = ()
    assert len(model.groups) == 3
    assert torch.equal(model(x), plain)
    assert model.explain(x).alone == ("Linear: it is no operation of Octavo's, and is called as it is",)


def test_a_block_with_a_recipe_of_its_own_is_not_reverted():
    block, x = octavo.LayerNormLinear(H, H, recipe=RECIPE), rows()
    want = block(x)
    octavo.revert(block)
    assert torch.equal(block(x), want)


def test_a_block_whose_linear_was_replaced_says_what_is_missing():
    block = octavo.LayerNormLinear(H, H, recipe=RECIPE)
    block[1] = nn.Linear(H, H)
    with pytest.raises(UnsupportedConfig, match=r"LayerNorm; Linear, called as it is\. A plain octavo\.Sequential"):
        block(rows())


# -- Sequentials inside that are called as they are --------------------------------------------------------------------


def hooked(module):
    module.register_forward_pre_hook(nothing)
    return module


def with_rules(module):
    module.rules = None
    return module


as_it_is = pytest.mark.parametrize("kept", [hooked, with_rules])


@as_it_is
def test_extra_inputs_and_outputs_pass_through(kept):
    def build():
        return octavo.Sequential(
            ops.AddExtraInput(), octavo.Sequential(ops.GELU(), ops.AddExtraInput(), ops.MakeExtraOutput()),
            octavo.Sequential(ops.AddExtraInput()), ops.MakeExtraOutput(), ops.SiLU(),
        )  # fmt: skip

    x, *extra_inputs = (rows() for _ in range(4))
    want = build()(x, *extra_inputs)
    model = build()
    kept(model[1])
    for call in (model, compiled_anew(model)):
        assert_equal(call(x, *extra_inputs), want)
    with pytest.raises(ValueError, match="takes 1 extra input besides x, got 0"):
        octavo.Sequential(octavo.ops.AddExtraInput())(x)
    with pytest.raises(ValueError, match="takes 3 extra inputs besides x, got 1"):
        model(x, x)


@as_it_is
@pytest.mark.parametrize("target", [0, -2, lambda m: m[0], lambda m: m[0][0]])
def test_keywords_pass_through(kept, target):
    model = octavo.Sequential(octavo.Sequential(octavo.Linear(H, H, recipe=RECIPE), ops.GELU()), ops.SiLU())
    kept(model[0])
    x, at = rows(), target(model) if callable(target) else target
    assert torch.equal(model(x, op_kwargs={at: {"is_first_microbatch": True}}), model(x))
    with torch.no_grad():
        model[0][0].weight.mul_(2)
    with pytest.raises(UnsupportedConfig, match="is_first_microbatch=False uses cached codes"):
        model(x, op_kwargs={at: {"is_first_microbatch": False}})
    with pytest.raises(TypeError, match="No operation there takes the keyword 'nonsense'"):
        model(x, op_kwargs={at: {"nonsense": 1}})
    with pytest.raises(TypeError, match="keyed by a module"):
        model(x, op_kwargs={False: {"is_first_microbatch": True}})  # no index, though it equals 0


@as_it_is
def test_channels_stay_inside(kept):
    filled = octavo.Sequential(ops.GELU(), ops.MakeExtraOutput(channel="skip"))
    model = octavo.Sequential(filled, ops.SiLU(), ops.AddExtraInput(source="skip"))
    kept(filled)
    with pytest.raises(ValueError, match=r"'skip', and no operation fills it .*hooks of its own"):
        model(rows())


@as_it_is
def test_an_explanation_has_as_many_runs_as_a_graph_has_nodes(kept):
    model = octavo.Sequential(
        octavo.Sequential(ops.RMSNorm(H), octavo.Linear(H, H, recipe=RECIPE)), ops.GELU(),
        octavo.LayerNormMLP(H, H, recipe=RECIPE, activation_recompute=True),
    )  # fmt: skip
    kept(model[0])
    x = rows().requires_grad_()
    assert [run.ops for run in model.explain(x).runs] == [
        ("RMSNorm", "Linear"), ("GELU",), ("LayerNorm", "Linear", "GELU", "Linear"),
    ]  # fmt: skip
    graphs = Graphs()
    torch.compiler.reset()
    torch.compile(model, backend=graphs, fullgraph=True)(x).backward(rows())
    assert graphs.runs()[0] == 3


# -- modules replaced behind the container's back ----------------------------------------------------------------------


def test_a_module_written_to_modules_is_the_one_that_runs():
    model, x = octavo.Sequential(ops.GELU(), octavo.Linear(H, H, recipe=RECIPE)), rows()
    call = compiled_anew(model)
    call(x), model(x)
    for new in (ops.SiLU(), nn.Tanh(), ops.GELU()):
        model._modules["0"] = new
        want = model[1](new(x))
        assert torch.equal(model(x), want) and torch.equal(call(x), want)
    other = octavo.Linear(H, H, recipe=RECIPE)
    model._modules["1"] = other  # of the same class: nothing but the object differs
    want = other(model[0](x))
    assert torch.equal(model(x), want) and torch.equal(call(x), want)
    assert [run.ops for run in model.explain(x).runs] == [("GELU", "Linear")]
    assert torch.equal(copy.deepcopy(model)(x), want)


def test_modules_that_trade_places_in_modules():
    model, x = octavo.Sequential(ops.RMSNorm(H), ops.ConstantScale(3.0), ops.Bias(H), ops.Bias(H)), rows()
    fill_biases(model)
    call = compiled_anew(model)
    call(x), model(x)
    own = model._modules
    own["1"], own["2"] = own["2"], own["1"]
    want = model[3](3 * (model[0](x) + model[1].bias))
    assert torch.equal(model(x), want) and torch.equal(call(x), want)
    own["1"], own["3"] = own["3"], own["1"]
    want = model[3](3 * (model[0](x) + model[1].bias))
    assert torch.equal(model(x), want) and torch.equal(call(x), want)


def fill_biases(model):
    with torch.no_grad():
        for i, op in enumerate(model):
            if isinstance(op, ops.Bias):
                op.bias.fill_(float(i))


def test_a_module_written_to_the_modules_of_a_sequential_inside():
    block = octavo.LayerNormMLP(H, H, recipe=RECIPE)
    model, x = octavo.Sequential(block, ops.GELU()), rows()
    call = compiled_anew(model)
    call(x), model(x)
    block._modules["fc1"] = octavo.Linear(H, H, recipe=RECIPE)
    want = ops.GELU()(block.fc2(block.activation(block.fc1(block.norm(x)))))
    assert torch.equal(model(x), want) and torch.equal(call(x), want)


def test_none_written_to_modules_is_refused_and_a_deleted_one_is_gone():
    model, x = octavo.Sequential(ops.GELU(), ops.ConstantScale(2.0)), rows()
    model(x)
    model._modules["1"] = None
    with pytest.raises(TypeError, match=r"'1' of a Sequential is None\. Leave it out"):
        model(x)
    del model._modules["1"]
    assert torch.equal(model(x), ops.GELU()(x))
