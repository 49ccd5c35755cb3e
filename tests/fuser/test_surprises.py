"""What users do to a Sequential that nobody planned for: odd sizes, odd values, hooks, one layer in two places, layers
converted where they stand, many threads, grouped layers, wrong gradient buffers."""

import copy
import threading

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.func import functional_call
from torch.nn.utils.parametrizations import weight_norm

import octavo
from octavo import ops
from octavo.errors import Unsupported
from octavo.kernels.activation import ACTIVATIONS
from tests.fuser.custom import Emit, Powered, Take
from tests.fuser.models import (
    FFN,
    H,
    M,
    assert_equal,
    assert_state,
    assert_unfused,
    batch,
    compiled,
    every,
    fill,
    mlp,
    recipes,
    residual,
    sample,
    step,
    unfused,
)
from tests.modules.oracle import assert_same, spiky

NAN, INF = float("nan"), float("inf")


# -- sizes and values --------------------------------------------------------------------------------------------------


@every
@pytest.mark.parametrize("act", [ops.SwiGLU, ops.GELU], ids=lambda act: act.NAME)
@pytest.mark.parametrize(("h", "f", "m"), [(35, 37, 5), (33, 130, 1), (129, 17, 131), (1, 1, 3), (16, 16, 0)], ids=str)
def test_sizes_that_are_multiples_of_nothing(recipe, act, h, f, m):
    wide = 2 * f if ACTIVATIONS[act.NAME].gated else f
    model = octavo.Sequential(
        ops.MakeExtraOutput(channel="r", output_to_caller=False),
        ops.RMSNorm(h),
        octavo.Linear(h, wide, recipe=recipe),
        act(),
        octavo.Linear(f, h, recipe=recipe),
        ops.AddExtraInput(source="r"),
    )
    assert_unfused(fill(model), spiky(m, h, seed=m), spiky(m, h, seed=3))


@every
@pytest.mark.parametrize("value", [NAN, INF, -INF, 1e38, 1e-42], ids=str)
@pytest.mark.parametrize("where", ["x", "dy"])
def test_values_that_are_no_numbers_and_extreme_ones_end_up_where_they_do_unfused(recipe, value, where):
    x, dy = batch()
    (x if where == "x" else dy)[3, 5] = value
    assert_unfused(residual(recipe), x, dy)


@every
@pytest.mark.parametrize("where", ["x", "dy"])
def test_nothing_but_zeros(recipe, where):
    x, dy = batch()
    assert_unfused(residual(recipe), 0 * x if where == "x" else x, 0 * dy if where == "dy" else dy)


@pytest.mark.parametrize("recipe", ["bf16", "fp8-current"])
def test_strides_do_not_matter(recipe):
    model, (x, dy) = residual(recipe), batch()
    want = step(model, x, dy)
    leaf = x.t().contiguous().t().requires_grad_()
    model.zero_grad()
    y = model(leaf)
    y.backward(dy.t().contiguous().t())
    assert_equal([y.detach(), leaf.grad, *(p.grad for p in model.parameters())], want)


def test_a_gradient_that_is_one_element_everywhere():
    model, twin, (x, _) = residual("fp8-current"), residual("fp8-current"), batch()
    model.zero_grad()
    leaf = x.clone().requires_grad_()
    model(leaf).sum().backward()
    want = step(twin, x, torch.ones(M, H))
    assert_equal([leaf.grad, *(p.grad for p in model.parameters())], want[1:])


# -- modules as torch knows them ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", [0, 1, 2, 3])
def test_hooks_of_an_operation_fire(index):
    model, (x, dy), seen = mlp("fp8-current"), batch(), []
    want = step(mlp("fp8-current"), x, dy)
    model[index].register_forward_pre_hook(lambda *_: seen.append("before"))
    model[index].register_forward_hook(lambda *_: seen.append("after"))
    model[index].register_full_backward_hook(lambda *_: seen.append("backward"))
    assert_equal(step(model, x, dy), want)
    assert seen == ["before", "after", "backward"]


def test_a_hook_may_change_what_an_operation_gives():
    model, x = octavo.Sequential(ops.ConstantScale(2.0), ops.ConstantScale(3.0)), torch.ones(2, 4)
    handle = model[0].register_forward_hook(lambda module, args, y: y + 1)
    assert torch.equal(model(x), 9 * x)
    handle.remove()
    assert torch.equal(model(x), 6 * x)


def test_a_parametrized_weight():
    model = mlp("bf16")
    weight_norm(model[1])
    plain, (x, dy) = nn.Sequential(*copy.deepcopy(list(model))), batch()
    assert_equal(step(model, x, dy), step(plain, x, dy))


def test_parameters_given_for_one_call():
    model, twin, x = mlp("fp8-current"), mlp("fp8-current"), batch()[0]
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(2)
    given = {name: p.detach() * 2 for name, p in model.named_parameters()}
    assert_same(functional_call(model, given, (x,)).detach(), twin(x).detach())


@recipes(["bf16", "fp8-current", "fp8-delayed"])
def test_one_layer_in_two_places(recipe):
    layer = fill(octavo.Linear(H, H, recipe=recipe))
    other = copy.deepcopy(layer)
    model, plain = octavo.Sequential(layer, ops.GELU(), layer), nn.Sequential(other, ops.GELU(), other)
    for seed in range(3):
        x, dy = batch(seed=seed)
        assert_equal(step(model, x, dy), step(plain, x, dy), f"step {seed}")
        octavo.step(model), octavo.step(plain)
    assert_state(layer, other)


def test_one_layer_in_two_sequentials():
    layer, (x, dy) = fill(octavo.Linear(H, H, recipe="fp8-current")), batch()
    norm, act = fill(ops.RMSNorm(H)), ops.GELU()
    one, two = octavo.Sequential(norm, layer), octavo.Sequential(layer, act)
    want = [layer(norm(x)).detach(), act(layer(x)).detach()]
    assert_equal([one(x).detach(), two(x).detach()], want)
    (one(x) + two(x)).backward(dy)
    assert layer.weight.grad is not None


def test_ordinary_linears_inside_are_converted_and_then_fuse():
    model, x = octavo.Sequential(ops.RMSNorm(H), nn.Linear(H, H)), batch()[0]
    assert model.explain(x.clone().requires_grad_()).fired == ()
    octavo.convert(model, "fp8-current")
    assert isinstance(model[1], octavo.Linear)
    assert "norm-linear" in model.explain(x.clone().requires_grad_()).fired
    twin = copy.deepcopy(model)
    assert_same(model(x).detach(), twin[1](twin[0](x)).detach())
    octavo.revert(model)
    assert type(model[1]) is nn.Linear
    torch.testing.assert_close(model(x), model[1](model[0](x)))


def test_threads():
    model, (x, dy), wrong = mlp("fp8-current"), batch(), []
    want = step(copy.deepcopy(model), x, dy)[:2]

    def work():
        for _ in range(5):
            leaf = x.clone().requires_grad_()
            y = model(leaf)
            y.backward(dy)
            wrong.extend(i for i, (a, b) in enumerate(zip((y, leaf.grad), want, strict=True)) if not torch.equal(a, b))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_explaining_a_whole_model_knows_the_layers_inside():
    text = str(octavo.explain(nn.Sequential(mlp("fp8-current")), batch()[0]))
    assert "octavo::run" in text
    assert "not compiled" not in text
    assert "norm-linear" in text or "mlp" in text


# -- additions in place ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["bf16", "fp8-current"])
@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_and_an_addition_into_the_residuals_memory(recipe, bias):
    layer = fill(octavo.Linear(H, H, bias=bias, recipe=recipe))
    model, (x, extra) = octavo.Sequential(layer, ops.AddExtraInput(in_place=True)), batch()
    want, room = layer(x).detach() + extra, extra.clone()
    y = model(x.requires_grad_(), room)
    assert y.data_ptr() == room.data_ptr()
    assert_same(y.detach(), want)
    y.backward(torch.ones(M, H))
    assert x.grad is not None and layer.weight.grad is not None


# -- grouped layers ----------------------------------------------------------------------------------------------------


@every
def test_experts_in_a_sequential_are_the_modules_one_after_the_other(recipe):
    layers = [octavo.GroupedLinear(3, *sizes, recipe=recipe) for sizes in ((H, 2 * FFN), (FFN, H))]
    model = fill(octavo.Sequential(ops.RMSNorm(H), layers[0], ops.ScaledSwiGLU(), layers[1], ops.ConstantScale(0.5)))
    twin, probs = copy.deepcopy(model), torch.rand(M)

    def by_hand(x, sizes, probs, again):
        norm, first, act, second, scale = twin
        return scale(second(act(first(norm(x), sizes), probs), again))

    for seed, splits in enumerate(([10, 0, 14], [24, 0, 0], [3, 20, 1])):
        (x, dy), sizes = batch(seed=seed), torch.tensor(splits)
        inputs = (x, sizes, probs, sizes)
        assert_equal(step(model, inputs, dy), step(twin, inputs, dy, call=by_hand), str(splits))
        octavo.step(model), octavo.step(twin)
    assert_state(model, twin)


# -- gradient buffers that are wrong -----------------------------------------------------------------------------------


@pytest.mark.parametrize("index", [1, 3])
@pytest.mark.parametrize("shape", [(3, 5), (1,), (0,)], ids=str)
def test_a_main_grad_of_the_wrong_size_is_refused_and_the_next_step_is_right(index, shape):
    model, twin = mlp("fp8-current", linear={"fuse_wgrad_accumulation": True}), mlp("fp8-current")
    x, dy = batch()
    for op in (model[1], model[3]):
        op.weight.main_grad = torch.zeros_like(op.weight)
    model[index].weight.main_grad = torch.zeros(shape)
    with pytest.raises((Unsupported, RuntimeError), match=rf"\({shape[0]},"):
        step(model, x, dy)
    for op in (model[1], model[3]):
        op.weight.main_grad = torch.zeros_like(op.weight)
    found, want = step(model, x, dy), step(twin, x, dy)
    assert_equal(found[:3], want[:3])
    for i in (1, 3):
        assert_same(model[i].weight.main_grad, twin[i].weight.grad, str(i))


# -- graphs ------------------------------------------------------------------------------------------------------------


def test_a_graph_for_each_recipe_and_no_more():
    model = mlp(None)
    twin = copy.deepcopy(model)

    def under(m, t, recipe):
        with octavo.autocast(recipe):
            return m(t)

    call = compiled(lambda t, recipe: under(model, t, recipe))
    for _ in range(2):
        for recipe in ("fp8-current", "mxfp8", "bf16"):
            x, dy = batch()
            found = step(model, x, dy, call=lambda t, r=recipe: call(t, r))
            assert_equal(found, step(twin, x, dy, call=lambda t, r=recipe: under(twin, t, r)), recipe)
    assert counters["stats"]["unique_graphs"] == 3


def test_custom_operations_with_channels_in_one_graph_of_any_batch_size():
    model = fill(
        octavo.Sequential(
            Emit().set_extra_output_channel(0, "a"),
            Powered(H),
            Take().set_extra_input_channel(0, "a"),
            octavo.Linear(H, H, recipe="fp8-current"),
        )
    )
    twin, call = copy.deepcopy(model), compiled(model, dynamic=True)
    for m in (4, 9, 33):
        x, dy = batch(m)
        assert_equal(step(model, x, (dy, dy), call=call), step(twin, x, (dy, dy)), f"{m} tokens")
    assert counters["stats"]["unique_graphs"] == 1


@sample
def test_no_tokens_compiled(recipe):
    model, (x, dy) = residual(recipe), batch(0)
    twin = copy.deepcopy(model)
    assert_equal(step(model, x, dy, call=compiled(model)), step(twin, x, dy))


def test_a_hundred_operations():
    model = octavo.Sequential(*[ops.ConstantScale(1 + i / 1000) for i in range(100)])
    x, dy = batch()
    want = step(unfused(model), x, dy)
    assert_equal(step(model, x, dy), want)
    assert_equal(step(model, x, dy, call=compiled(model)), want)
