"""octavo.autocast inside and around compiled calls: nested recipes, state made on the way, the backwards."""

import copy

import pytest
import torch
from torch import nn

import octavo
from tests.support.compiled_twins import K, N, assert_results, assert_step, batch, graphs, pair, results, stepped
from tests.support.linear_oracle import assert_same, make
from tests.support.steps import assert_state, compiled

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def nested(model):
    def call(x):
        with octavo.autocast("fp8-delayed"):
            x = model[0](x)
            with octavo.autocast("nvfp4"):
                x = model[1](x)
                with octavo.autocast("fp8-block"):
                    x = model[2](x)
                x = model[3](x)
            return model[4](x)

    return call


@pytest.mark.parametrize("cold", [False, True], ids=["after an eager forward", "cold"])
def test_three_nested_recipes_of_which_two_have_state(cold):
    model = nn.ModuleList([make(None, K, K, seed=i) for i in range(5)])
    if not cold:
        nested(model)(batch(9, n=K)[0])
    twin = copy.deepcopy(model)
    call, plain = compiled(nested(model)), nested(twin)
    for i in range(3):
        x, dy = batch(i, n=K)
        if cold and i == 0:  # seeds are drawn where state is made: give the twin the same ones
            call(x)
            octavo.load_state_dict(twin, octavo.state_dict(model))
        assert_step((model, twin), (call, plain), (x, dy))
        stepped(model, twin)
    assert_state(model, twin)
    assert {key.split(".")[0] for key in octavo.state_dict(model)} >= {"0", "1", "3", "4"}


@pytest.mark.parametrize(
    ("recipe", "where"),
    [
        ("fp8-delayed", "inside"),
        ("fp8-delayed(cold_start='current')", "around"),
        ("nvfp4", "inside"),
        ("nvfp4", "around"),
    ],
)
def test_ambient_state_that_no_eager_forward_made_is_made_on_the_way(recipe, where):
    layer, twin = pair(None)
    recipe = octavo.recipe(recipe)

    def ambient(call):
        def under(x):
            with octavo.autocast(recipe):
                return call(x)

        return under

    call = compiled(ambient(layer)) if where == "inside" else ambient(compiled(layer))
    for i in range(3):
        x, dy = batch(i)
        if i == 0:
            leaf = x.clone().requires_grad_()
            y = call(leaf)
            if str(recipe) == "nvfp4":
                octavo.load_state_dict(twin, octavo.state_dict(layer))
            y.backward(dy)
            found = {"y": y.detach(), "dx": leaf.grad, "weight": layer.weight.grad, "bias": layer.bias.grad}
            assert_results(found, results(twin, ambient(twin), x, dy))
        else:
            assert_step((layer, twin), (call, ambient(twin)), (x, dy))
        stepped(layer, twin)
    assert octavo.state_dict(layer)
    assert_state(layer, twin)


@pytest.mark.parametrize("recipe", ["fp8-block", "fp8-block(scale='fp32',wgrad='bf16')"])
def test_a_recipe_written_out_inside_the_graph(recipe):
    layer, twin = pair(None)

    def ambient(m):
        def call(x):
            with octavo.autocast(recipe):
                return m(x)

        return call

    run = compiled(ambient(layer))
    with torch.no_grad():
        assert_same(run(batch(0)[0]), ambient(twin)(batch(0)[0]))
        assert graphs() == 1


@pytest.mark.parametrize("recipe", ["fp8-delayed", "fp8-block"])
def test_an_ambient_recipe_leaves_a_plain_linear_alone(recipe):
    model, twin = (nn.Sequential(nn.Linear(K, N), nn.Tanh(), nn.Linear(N, K)) for _ in range(2))
    twin.load_state_dict(model.state_dict())

    def ambient(x):
        with octavo.autocast(recipe):
            return model(x)

    assert_step((model, twin), (compiled(ambient), twin), batch(0, n=K))


def test_recipes_around_the_calls_each_keep_their_own_backward():
    """Three calls under three recipes, then the backwards in reverse order under none of them."""
    model, twin = (nn.ModuleList([make(None, seed=i) for i in range(3)]) for _ in range(2))
    calls = [compiled(layer) for layer in model]
    gradients = []
    for layers, run in ((model, calls), (twin, list(twin))):
        outputs, leaves = [], []
        for i, recipe in enumerate(("fp8-current", "mxfp8", "fp8-block(backward='dequantized')")):
            leaves.append(batch(i)[0].requires_grad_())
            with octavo.autocast(recipe):
                outputs.append(run[i](leaves[i]))
        for i in (2, 1, 0):
            outputs[i].backward(batch(i)[1])
        gradients.append(
            [y.detach() for y in outputs] + [x.grad for x in leaves] + [p.grad for p in layers.parameters()]
        )
    for found, want in zip(*gradients, strict=True):
        assert_same(found, want)


def test_a_layer_that_followed_a_recipe_in_eager_mode_is_compiled_outside_of_it():
    layer, x = octavo.Linear(64, 96), torch.randn(8, 64)
    with octavo.autocast("fp8-block"):
        layer(x)
    call = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(call(x), layer(x))
