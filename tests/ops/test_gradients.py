"""Gradients as autograd hands them around: accumulation, retained graphs, partial requests, memory, recomputation."""

import gc
import weakref

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import octavo
from octavo.recipes import SHIPPED
from tests.support.linear_oracle import Result, assert_result, assert_same, expected, make, run, seed_of
from tests.support.recipe_traits import QUANTIZED
from tests.support.steps import batch

every = pytest.mark.parametrize("recipe", SHIPPED)


@every
def test_gradients_accumulate_over_microbatches(recipe):
    layer, total = make(recipe), torch.zeros(40, 48)
    for i in range(3):
        x, dy = batch(i)
        total += expected(recipe, x, layer.weight, layer.bias, dy, seed=seed_of(layer)).dw
        layer(x).backward(dy)
    assert_same(layer.weight.grad, total)


@every
def test_a_retained_graph_gives_its_gradients_again(recipe):
    """Stochastic rounding draws anew each time, from the next step of its seed."""
    layer, (x, dy) = make(recipe), batch()
    leaf = x.clone().requires_grad_()
    y = layer(leaf)
    for retain in (True, True, False):
        want = expected(recipe, x, layer.weight, layer.bias, dy, seed=seed_of(layer))
        y.backward(dy, retain_graph=retain)
        assert_result(Result(y.detach(), leaf.grad, layer.weight.grad, layer.bias.grad), want)
        leaf.grad = layer.weight.grad = layer.bias.grad = None
    with pytest.raises(RuntimeError, match="second time"):
        y.backward(dy)


def test_a_stochastic_backward_advances_its_step_by_one_and_keeps_its_seed():
    layer, (x, dy) = make("nvfp4"), batch()
    for _ in range(3):
        seed, step = seed_of(layer).tolist()
        run(layer, x, dy)
        assert seed_of(layer).tolist() == [seed, step + 1]
        with torch.no_grad():
            layer(x)
        assert seed_of(layer).tolist() == [seed, step + 1]


def test_two_stochastic_layers_draw_differently():
    one, two, (x, dy) = make("nvfp4"), make("nvfp4"), batch()
    assert not torch.equal(run(one, x, dy).dx, run(two, x, dy).dx)


def test_two_stochastic_layers_from_the_meta_device_draw_differently():
    layers = [octavo.Linear(48, 40, device="meta", recipe="nvfp4") for _ in range(2)]
    for layer in layers:
        layer.to_empty(device="cpu")
        layer.reset_parameters()
    assert not torch.equal(seed_of(layers[0]), seed_of(layers[1]))


def test_manual_seed_fixes_stochastic_rounding():
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        results.append(run(make("nvfp4"), *batch()))
    assert_result(*results)


@every
def test_autograd_grad_of_a_part(recipe):
    layer, (x, dy) = make(recipe), batch()
    leaf = x.clone().requires_grad_()
    for name in ("dx", "dw", "db"):
        target = {"dx": leaf, "dw": layer.weight, "db": layer.bias}[name]
        want = expected(recipe, x, layer.weight, layer.bias, dy, seed=seed_of(layer))
        (found,) = torch.autograd.grad(layer(leaf), target, dy)
        assert_same(found, getattr(want, name))
    assert layer.weight.grad is None and leaf.grad is None


@every
def test_parameter_hooks_fire_once(recipe):
    layer, fired = make(recipe), []
    for p in layer.parameters():
        p.register_hook(lambda g: fired.append(tuple(g.shape)))
        p.register_post_accumulate_grad_hook(lambda p: fired.append(tuple(p.shape)))
    run(layer, *batch())
    assert sorted(fired) == [(40,), (40,), (40, 48), (40, 48)]


@every
def test_module_hooks_and_full_backward_hooks_fire(recipe):
    layer, fired = make(recipe), []
    layer.register_forward_hook(lambda m, args, y: fired.append("forward"))
    layer.register_full_backward_hook(lambda m, dx, dy: fired.append("backward"))
    run(layer, *batch())
    assert fired == ["forward", "backward"]


@every
def test_outputs_and_gradients_own_their_memory(recipe):
    """Writing into one leaves the others, and the parameters, as they were."""
    layer, (x, dy) = make(recipe), batch()
    weight, leaf = layer.weight.detach().clone(), x.clone().requires_grad_()
    want = expected(recipe, x, weight, layer.bias, dy, seed=seed_of(layer))
    y = layer(leaf)
    y.detach().zero_()
    y.backward(dy)
    assert_same(leaf.grad, want.dx)
    assert_same(layer.weight.grad, want.dw)
    leaf.grad.zero_()
    layer.weight.grad.zero_()
    assert_same(layer.weight.detach(), weight)
    assert torch.equal(dy, batch()[1])


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_x_may_be_overwritten_after_forward(recipe):
    """Codes were saved, not x: a quantized layer does not mind an in-place activation behind it."""
    layer, (x, dy) = make(recipe), batch()
    want = expected(recipe, x, layer.weight, layer.bias, dy, seed=seed_of(layer))
    base = x.clone().requires_grad_()
    inner = base * 1
    y = layer(inner)
    inner.detach().zero_()
    y.backward(dy)
    assert_same(base.grad, want.dx)
    assert_same(layer.weight.grad, want.dw)


# -- released after backward ---------------------------------------------------------------------------------------


def tensors_alive():
    gc.collect()
    return {id(t): t.numel() for t in gc.get_objects() if issubclass(type(t), torch.Tensor)}


@pytest.mark.parametrize("recipe", [*SHIPPED, "fp8-block(backward='high_precision')", "mxfp8(backward='dequantized')"])
@pytest.mark.parametrize("fuse", [False, True])
def test_what_was_saved_is_released_by_backward_though_y_lives_on(recipe, fuse):
    layer, (x, dy) = make(recipe, fuse_wgrad_accumulation=fuse), batch(m=64)
    layer.weight.main_grad = torch.zeros(40, 48)
    run(layer, x, dy)  # whatever is made once is made now
    leaf, held = x.clone().requires_grad_(), []
    before = tensors_alive()

    class Holder:
        def __init__(self, tensor):
            self.tensor = tensor

    def pack(tensor):
        holder = Holder(tensor)
        held.append(weakref.ref(holder))
        return holder

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda holder: holder.tensor):
        y = layer(leaf)
    assert any(ref() is not None for ref in held)
    y.backward(dy)
    leaf.grad = layer.weight.grad = layer.bias.grad = None
    assert all(ref() is None for ref in held)
    left = {key: n for key, n in tensors_alive().items() if key not in before and key != id(y) and n >= 40}
    assert not left, f"{len(left)} tensors of {sorted(left.values())} elements outlive backward"


# -- recomputation -------------------------------------------------------------------------------------------------


@every
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_layer_gives_the_same_bits(recipe, reentrant):
    plain, again = make(recipe), make(recipe)
    octavo.load_state_dict(again, octavo.state_dict(plain))
    for i in range(3):
        x, dy = batch(i)
        want = run(plain, x, dy)
        found = run(Checkpointed(again, reentrant), x, dy)
        assert_result(found, want)
        octavo.step(plain)
        octavo.step(again)
    for key, value in octavo.state_dict(plain).items():
        assert torch.equal(octavo.state_dict(again)[key], value), key


class Checkpointed:
    """A layer whose call is checkpointed, with the parameters where `run` looks for them."""

    def __init__(self, layer, reentrant, **settings):
        self.layer, self.settings = layer, {"use_reentrant": reentrant, **settings}
        self.weight, self.bias, self.parameters = layer.weight, layer.bias, layer.parameters

    def __call__(self, x):
        return checkpoint(self.layer, x, **self.settings)


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_selective_checkpointing_gives_the_same_bits(recipe):
    plain, again = make(recipe), make(recipe)
    octavo.load_state_dict(again, octavo.state_dict(plain))

    def policy(ctx, op, *args, **kwargs):
        return CheckpointPolicy.PREFER_RECOMPUTE

    selective = {"context_fn": lambda: create_selective_checkpoint_contexts(policy)}
    assert_result(run(Checkpointed(again, False, **selective), *batch()), run(plain, *batch()))
