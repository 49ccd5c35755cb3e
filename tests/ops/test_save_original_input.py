"""save_original_input=True: backward casts x once more, to the bits of the codes that forward would have kept."""

import pytest
import torch

import octavo
from octavo.recipes import SHIPPED
from tests.support.linear_oracle import assert_same, spiky
from tests.support.sequentials import fill
from tests.support.steps import assert_equal, assert_state, compiled, step, update

pytestmark = pytest.mark.usefixtures("fresh_compiler")
QUANTIZED = [name for name in SHIPPED if name != "bf16"]
SIZES = torch.tensor([5, 0, 9])


def linear(recipe, **settings):
    torch.manual_seed(0)
    return octavo.Linear(64, 48, recipe=recipe, **settings), {}


def grouped(recipe, **settings):
    torch.manual_seed(0)
    return octavo.GroupedLinear(3, 64, 48, recipe=recipe, **settings), {"m_splits": SIZES}


LAYERS = pytest.mark.parametrize("make", [linear, grouped])


def saved_tensors(call):
    """The tensors that a call saves for backward."""
    found = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t) or t, lambda t: t):
        call()
    return found


def batch(i=0):
    return spiky(14, 64, seed=i), spiky(14, 48, seed=i + 5)


@LAYERS
@pytest.mark.parametrize("recipe", QUANTIZED)
def test_all_results_have_the_bits_of_codes(make, recipe):
    (layer, given), (plain, _) = make(recipe, save_original_input=True), make(recipe)
    graph = compiled(layer)
    for i in range(3):  # the first step of delayed scaling measures x
        want = step(plain, *batch(i), **given)
        found = step(layer, *batch(i), call=graph if i == 2 else None, **given)
        assert_equal(found, want)
        update(layer), update(plain)
    assert_state(layer, plain)


@LAYERS
def test_x_itself_is_saved_and_no_codes_of_it(make):
    layer, given = make("fp8-block", save_original_input=True)
    x = batch()[0].requires_grad_()
    saved = saved_tensors(lambda: layer(x, **given))
    assert any(t.data_ptr() == x.data_ptr() for t in saved)
    plain, _ = make("fp8-block")
    others = saved_tensors(lambda: plain(x, **given))
    assert not any(t.data_ptr() == x.data_ptr() for t in others)
    found, want = (sum(t.dtype == torch.float8_e4m3fn for t in tensors) for tensors in (saved, others))
    assert (found, want) == (1, 2)  # those of w, and of x and w


@LAYERS
@pytest.mark.parametrize("option", ["main_grad", "deferred", "no weight gradient", "wgrad='bf16'"])
def test_other_options(make, option):
    recipe = f"fp8-block({option})" if "=" in option else "fp8-block"
    settings = {"main_grad": {"fuse_wgrad_accumulation": True}, "deferred": {"delay_wgrad_compute": True}}
    (layer, given), (plain, _) = make(recipe, save_original_input=True, **settings.get(option, {})), make(recipe)
    layer.weight.main_grad = torch.zeros_like(layer.weight)
    x, dy = batch()
    if option == "no weight gradient":
        layer.weight.requires_grad_(False), plain.weight.requires_grad_(False)
    want = step(plain, x, dy, **given)
    found = step(layer, x, dy, **given)
    if option == "deferred":
        layer.backward_dw()
    dw = layer.weight.main_grad if option == "main_grad" else layer.weight.grad
    assert_equal(found[:2], want[:2])
    assert_same(dw, plain.weight.grad)


def test_a_deferred_gradient_in_a_graph_keeps_codes():
    layer, _ = linear("fp8-block", save_original_input=True, delay_wgrad_compute=True)
    plain, _ = linear("fp8-block")
    x, dy = batch()
    want, found = step(plain, x, dy), step(layer, x, dy, call=compiled(layer))
    layer.backward_dw()
    assert_equal(found[:2], want[:2])
    assert_same(layer.weight.grad, plain.weight.grad)


def test_x_that_is_codes_stays_codes():
    first, second = (linear("fp8-block", save_original_input=s)[0] for s in (False, True))
    x = octavo.recipe("fp8-block").linear().fprop.left.quantize(batch()[0])
    assert_same(second(x), first(x))


def test_the_caller_may_not_write_to_x_before_backward():
    layer, _ = linear("fp8-block", save_original_input=True)
    x = batch()[0]
    y = layer(x)
    x.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_block_runs_its_norm_and_linear_one_by_one():
    settings = {"normalization": "RMSNorm", "recipe": "fp8-block"}
    block = fill(octavo.LayerNormLinear(64, 48, save_original_input=True, **settings))
    plain = octavo.Sequential(*fill(octavo.LayerNormLinear(64, 48, **settings)), rules=None)
    assert_equal(step(block, *batch()), step(plain, *batch()))
    assert "save_original_input=True keeps x itself" in str(block.explain(batch()[0].requires_grad_()))


@pytest.mark.gpu
@LAYERS
@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-delayed", "fp8-block"])
def test_on_a_gpu(make, recipe):
    (layer, given), (plain, _) = make(recipe, save_original_input=True), make(recipe)
    layer.cuda(), plain.cuda()
    given = {name: t.cuda() for name, t in given.items()}
    for i in range(4):
        x, dy = (t.cuda() for t in batch(i))
        assert_equal(step(layer, x, dy, **given), step(plain, x, dy, **given))
        octavo.step(layer), octavo.step(plain)


def test_a_reverted_layer_is_plain_and_converts_again():
    model = torch.nn.Sequential(octavo.Linear(64, 48, recipe="fp8-block", save_original_input=True))
    octavo.revert(model)
    assert type(model[0]) is torch.nn.Linear and "save_original_input" not in vars(model[0])
    octavo.convert(model, "fp8-block")
    assert not model[0].save_original_input
