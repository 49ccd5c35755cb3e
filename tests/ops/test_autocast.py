"""octavo.autocast: which recipe a layer without one follows, from where to where, in which thread."""

import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import octavo
from octavo.errors import UnsupportedConfig
from octavo.recipes import SHIPPED, Delayed
from tests.support.linear_oracle import OTHERS, Result, assert_result, check, expected, make, run, seed_of, spiky

X, DY = spiky(21, 48, seed=10), spiky(21, 40, seed=20)


def y_of(recipe):
    return expected(recipe, X, make(None).weight, make(None).bias, DY, seed=torch.tensor([1, 1])).y


def follows(layer, recipe):
    with torch.no_grad():
        return torch.equal(layer(X), y_of(recipe))


def test_the_recipes_here_can_be_told_apart():
    outputs = [y_of(r) for r in ("bf16", "fp8-current", "fp8-block", "mxfp8(rounding='floor')", "nvfp4")]
    for i, a in enumerate(outputs):
        assert all(not torch.equal(a, b) for b in outputs[:i])


@pytest.mark.parametrize("recipe", SHIPPED + OTHERS)
def test_a_layer_without_a_recipe_follows(recipe):
    layer = make(None)
    with octavo.autocast(recipe):
        layer(X)  # a state may be made now
        check(layer, recipe, X, DY)
    assert follows(layer, "bf16")


def test_a_layers_own_recipe_wins_over_autocast():
    layer = make("fp8-block")
    with octavo.autocast("nvfp4"):
        assert follows(layer, "fp8-block")
    with octavo.autocast("fp8-current"):
        assert follows(make("bf16"), "bf16")


def test_nesting_and_leaving():
    layer = make(None)
    with octavo.autocast("fp8-current"):
        assert follows(layer, "fp8-current")
        with octavo.autocast(octavo.recipes.Block(scale="fp32")):
            assert follows(layer, "fp8-block(scale='fp32')")
            with octavo.autocast("bf16"):
                assert follows(layer, "bf16")
            assert follows(layer, "fp8-block(scale='fp32')")
        assert follows(layer, "fp8-current")
    assert follows(layer, "bf16")


def test_one_context_entered_again_inside_itself_and_afterwards():
    layer, context = make(None), octavo.autocast("fp8-current")
    with context:
        with octavo.autocast("nvfp4"), context:
            assert follows(layer, "fp8-current")
        assert follows(layer, "fp8-current")
    assert follows(layer, "bf16")
    with context:
        assert follows(layer, "fp8-current")
    assert follows(layer, "bf16")


def test_an_exception_leaves_the_context():
    layer = make(None)
    with pytest.raises(ZeroDivisionError), octavo.autocast("fp8-current"), octavo.autocast("nvfp4"):
        raise ZeroDivisionError
    assert follows(layer, "bf16")
    with octavo.autocast("fp8-block"):
        with pytest.raises(ValueError, match="47"), octavo.autocast("nvfp4"):
            layer(torch.zeros(3, 47))
        assert follows(layer, "fp8-block")


def test_a_wrong_recipe_is_refused_and_changes_nothing():
    layer = make(None)
    with octavo.autocast("fp8-block"):
        with pytest.raises(UnsupportedConfig, match="recipe"):
            octavo.autocast("fp9").__enter__()
        assert follows(layer, "fp8-block")


NO_RECIPES = {
    "None": (None, r"octavo\.autocast takes a recipe, got None\. For layers without quantization .*autocast\('bf16'\)"),
    "number": (5, r"A recipe is a name, a canonical string or a Recipe, got int\. Names: bf16, "),
    "dtype": (torch.bfloat16, r"A recipe is a name, a canonical string or a Recipe, got dtype\. Names: bf16, "),
    "class": (Delayed, r"got type Delayed, a class\. Make one of it: Delayed\(\)\."),
    "typo": ("fp8-delayd", r"There is no recipe 'fp8-delayd'\. .* Did you mean 'fp8-delayed'\?"),
}


@pytest.mark.parametrize(("given", "message"), NO_RECIPES.values(), ids=NO_RECIPES)
def test_what_is_no_recipe_is_refused_when_it_is_given(given, message):
    with pytest.raises(UnsupportedConfig, match=message):
        octavo.autocast(given)


@pytest.mark.parametrize("given", ["fp8-block", Delayed(history=3)], ids=str)
def test_a_graph_enters_autocast_by_name_and_by_value(given):
    torch._dynamo.reset()
    layer = make(None)

    def call(x):
        with octavo.autocast(given):
            return layer(x)

    with torch.no_grad():
        assert torch.equal(torch.compile(call, backend="aot_eager", fullgraph=True)(X), call(X))


@pytest.mark.parametrize("recipe", SHIPPED)
@pytest.mark.parametrize("around_backward", [None, "fp8-block", "nvfp4", "bf16"])
def test_backward_uses_what_forward_captured(recipe, around_backward):
    layer = make(None)
    leaf = X.clone().requires_grad_()
    with octavo.autocast(recipe):
        y = layer(leaf)
    seed = seed_of(layer)
    if around_backward is None:
        y.backward(DY)
    else:
        with octavo.autocast(around_backward):
            y.backward(DY)
    want = expected(recipe, X, layer.weight, layer.bias, DY, seed=seed)
    assert_result(Result(y.detach(), leaf.grad, layer.weight.grad, layer.bias.grad), want)


def test_three_recipes_in_one_graph_each_in_its_own_backward():
    recipes = ["fp8-current", "mxfp8", "fp8-block(backward='dequantized')"]
    layers, leaves, outputs = [], [], []
    for recipe in recipes:
        layers.append(make(None))
        leaves.append(X.clone().requires_grad_())
        with octavo.autocast(recipe):
            outputs.append(layers[-1](leaves[-1]))
    torch.autograd.backward(outputs, [DY] * 3)
    for recipe, layer, leaf in zip(recipes, layers, leaves, strict=True):
        want = expected(recipe, X, layer.weight, layer.bias, DY)
        assert torch.equal(leaf.grad, want.dx) and torch.equal(layer.weight.grad, want.dw)


def test_two_recipes_with_settings_that_were_never_parsed_in_one_graph():
    layer, x = octavo.Linear(32, 32), torch.randn(8, 32)

    def call(x):
        with octavo.autocast("fp8-block(grad_format=E5M2, scale='fp32')"):
            y = layer(x)
        with octavo.autocast("fp8-rowwise(grad_format=E5M2, pow2=False)"):
            return y + layer(x)

    found = torch.compile(call, fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(found, call(x))


def test_a_recipe_switched_between_steps_takes_effect():
    layer = make(None)
    for recipe in ("fp8-block", "fp8-block(backward='high_precision')", "fp8-block(backward='dequantized')", "bf16"):
        with octavo.autocast(recipe):
            check(layer, recipe, X, DY)


def test_a_thread_starts_without_the_others_recipe():
    layer, seen = make(None), {}
    inside, done = threading.Event(), threading.Event()

    def other():
        seen["before"] = follows(layer, "bf16")
        with octavo.autocast("fp8-block"):
            inside.set()
            done.wait(30)
            seen["inside"] = follows(layer, "fp8-block")
        seen["after"] = follows(layer, "bf16")

    with octavo.autocast("fp8-current"):
        thread = threading.Thread(target=other)
        thread.start()
        inside.wait(30)
        assert follows(layer, "fp8-current")
        done.set()
        thread.join()
        assert follows(layer, "fp8-current")
    assert seen == {"before": True, "inside": True, "after": True}


def test_autocast_reaches_every_layer_of_a_model_and_leaves_plain_modules_alone():
    layer, plain = make(None), nn.Linear(40, 8)
    with octavo.autocast("fp8-current"):
        y = nn.Sequential(layer, plain)(X)
    assert torch.equal(y, plain(y_of("fp8-current")))


def test_octavos_autocast_meets_that_of_torch():
    layer = make(None)
    with torch.autocast("cpu", dtype=torch.bfloat16), octavo.autocast("fp8-rowwise"):
        y = layer(X)
    want = expected("fp8-rowwise", X.bfloat16(), layer.weight, layer.bias, DY.bfloat16())
    assert torch.equal(y, want.y)


@pytest.mark.parametrize("recipe", ["fp8-delayed", "nvfp4"])
def test_state_made_under_inference_mode_serves_training(recipe):
    layer = make(None)
    with octavo.autocast(recipe), torch.inference_mode():
        layer(X)
    with octavo.autocast(recipe):
        layer(X)
        check(layer, recipe, X, DY)
    octavo.step(layer)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_that_would_recompute_without_the_recipe_is_refused(reentrant):
    layer, leaf = make(None), X.clone().requires_grad_()
    with octavo.autocast("fp8-current"):
        y = checkpoint(layer, leaf, use_reentrant=reentrant)
    with pytest.raises(UnsupportedConfig, match="inside the checkpointed function"):
        y.backward(DY)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_function_may_enter_the_recipe_itself(reentrant):
    layer, leaf = make(None), X.clone().requires_grad_()

    def block(x):
        with octavo.autocast("fp8-current"):
            return layer(x)

    y = checkpoint(block, leaf, use_reentrant=reentrant)
    y.backward(DY)
    want = expected("fp8-current", X, layer.weight, layer.bias, DY)
    assert_result(Result(y.detach(), leaf.grad, layer.weight.grad, layer.bias.grad), want)


@pytest.mark.parametrize("recipe", ["fp8-delayed(history=2)", "nvfp4"])
def test_a_run_under_autocast_resumes_in_a_fresh_model(recipe):
    straight, resumed = make(None), make(None)
    with octavo.autocast(recipe):
        run(straight, X, DY)
    octavo.step(straight)
    octavo.load_state_dict(resumed, octavo.state_dict(straight))
    with octavo.autocast(recipe):
        assert_result(run(resumed, X, DY), run(straight, X, DY))


def test_delayed_state_made_under_autocast_lasts():
    layer = make(None)
    with octavo.autocast("fp8-delayed(history=2)"):
        run(layer, X, DY)
    octavo.step(layer)
    want = run(make("fp8-current"), X, DY)
    with octavo.autocast("fp8-delayed(history=2)"):
        assert_result(run(layer, X, DY), want)
    assert octavo.state_dict(layer)["scaling.forward.history"].shape == (2, 2)
