"""delay_wgrad_compute: backward gives dx and db, backward_dw() gives dw later, oldest microbatch first."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import octavo
from octavo.errors import UnsupportedConfig
from octavo.kernels.gemm import reference
from octavo.recipes import SHIPPED
from octavo.weights import wgrad_queue
from tests.support.linear_oracle import assert_same, expected, make, seed_of
from tests.support.steps import batch

N, K = 40, 48
every = pytest.mark.parametrize("recipe", SHIPPED)


def delayed(recipe="fp8-current", **settings):
    return make(recipe, K, N, delay_wgrad_compute=True, **settings)


def wanted(layer, recipe, x, dy):
    return expected(recipe, x, layer.weight, layer.bias, dy, seed=seed_of(layer))


def test_an_existing_gradient_is_added_to():
    layer, (x, dy) = delayed(), batch()
    layer.weight.grad = torch.ones(N, K)
    layer(x).backward(dy)
    assert torch.equal(layer.weight.grad, torch.ones(N, K))
    layer.backward_dw()
    assert_same(layer.weight.grad, 1 + wanted(layer, "fp8-current", x, dy).dw)


def test_a_hook_may_change_the_gradient():
    layer, (x, dy) = delayed(), batch()
    layer.weight.register_hook(lambda g: 2 * g)
    layer(x).backward(dy)
    layer.backward_dw()
    assert_same(layer.weight.grad, 2 * wanted(layer, "fp8-current", x, dy).dw)


class Refused(RuntimeError):
    pass


def refuse_once(then=lambda g: None):
    """A hook that raises the first time."""
    left = [1]

    def hook(g):
        if left:
            left.pop()
            raise Refused("not now")
        return then(g)

    return hook


@pytest.mark.parametrize("recipe", ["bf16", "fp8-current", "nvfp4"])
def test_a_missing_main_grad_may_be_set_and_backward_dw_called_again(recipe):
    layer, (x, dy) = delayed(recipe, fuse_wgrad_accumulation=True), batch()
    want = wanted(layer, recipe, x, dy).dw
    layer(x).backward(dy)
    for wrong in (None, torch.zeros(N, K + 1)):
        layer.weight.main_grad = wrong
        with pytest.raises((ValueError, TypeError), match="main_grad"):
            layer.backward_dw()
    layer.weight.main_grad = torch.ones(N, K)
    layer.backward_dw()
    assert_same(layer.weight.main_grad, 1 + want)
    with pytest.warns(UserWarning, match="no backward to finish"):
        layer.backward_dw()
    assert_same(layer.weight.main_grad, 1 + want)


def test_what_a_graph_left_may_be_taken_again():
    layer, (x, dy) = delayed(fuse_wgrad_accumulation=True), batch()
    want = wanted(layer, "fp8-current", x, dy).dw
    layer.weight.main_grad = torch.zeros(N, K)
    torch.compile(layer, backend="aot_eager", fullgraph=True)(x).backward(dy)
    layer.weight.main_grad = None
    with pytest.raises(UnsupportedConfig, match="main_grad"):
        layer.backward_dw()
    layer.weight.main_grad = torch.zeros(N, K)
    layer.backward_dw()
    assert_same(layer.weight.main_grad, want)


@pytest.mark.parametrize("what", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("grad", [None, 1.0], ids=["no gradient yet", "added to one"])
def test_a_hook_that_raises_neither_loses_a_gradient_nor_doubles_it(what, grad):
    layer, twin = delayed(), delayed()
    for model in (layer, twin):
        model.weight.grad = None if grad is None else torch.full((N, K), grad)
        for i in range(2):
            model(batch(i)[0]).backward(batch(i)[1])
    getattr(layer.weight, what)(refuse_once())
    with pytest.raises(Refused):
        layer.backward_dw()
    while len(layer._wgrad.queue):
        layer.backward_dw()
    for _ in range(2):
        twin.backward_dw()
    assert_same(layer.weight.grad, twin.weight.grad)


def test_a_hook_that_raises_after_main_grad_was_written_to_does_not_double_it():
    layer, (x, dy), seen = delayed(fuse_wgrad_accumulation=True), batch(), []
    layer.weight.main_grad, layer.weight.grad_added_to_main_grad = torch.zeros(N, K), False
    layer.weight.register_hook(refuse_once(lambda g: seen.append(g.clone())))
    want = wanted(layer, "fp8-current", x, dy).dw
    layer(x).backward(dy)
    with pytest.raises(Refused):
        layer.backward_dw()
    layer.backward_dw()
    assert_same(layer.weight.main_grad, want)
    assert len(seen) == 1 and not seen[0].any()


def test_one_groups_hook_that_raises_does_not_double_the_others():
    sizes = torch.tensor([9, 0, 12])
    layer, twin = (
        octavo.GroupedLinear(3, K, N, recipe="fp8-current", single_grouped_weight=False, delay_wgrad_compute=True)
        for _ in range(2)
    )
    twin.load_state_dict(layer.state_dict())
    for model in (layer, twin):
        for _ in range(2):
            model(batch()[0], sizes).backward(batch()[1])
    layer.weight1.register_hook(refuse_once())
    layer.weight2.register_post_accumulate_grad_hook(refuse_once())
    unsupported_reasons = 0
    while len(layer._wgrad.queue):
        try:
            layer.backward_dw()
        except Refused:
            unsupported_reasons += 1
    assert unsupported_reasons == 2
    for _ in range(2):
        twin.backward_dw()
    for p, other in zip(layer.parameters(), twin.parameters(), strict=True):
        assert_same(p.grad, other.grad)


def test_a_gemm_that_fails_leaves_what_waits(monkeypatch):
    layer, (x, dy) = delayed(), batch()
    want = wanted(layer, "fp8-current", x, dy).dw
    layer(x).backward(dy)
    with monkeypatch.context() as patch:
        patch.setattr(reference, "gemm", refuse_once())
        with pytest.raises(TypeError):
            layer.backward_dw()
    layer.backward_dw()
    assert_same(layer.weight.grad, want)


def test_a_hook_may_take_the_next_one():
    layer, twin = delayed(), delayed()
    for model in (layer, twin):
        for i in range(2):
            model(batch(i)[0]).backward(batch(i)[1])
    layer.weight.register_post_accumulate_grad_hook(lambda p: layer.backward_dw() if len(layer._wgrad.queue) else None)
    layer.backward_dw()
    assert len(layer._wgrad.queue) == 0
    for _ in range(2):
        twin.backward_dw()
    assert_same(layer.weight.grad, twin.weight.grad)


def test_a_discarded_forward_is_not_waited_for():
    layer = delayed()
    layer(batch(0)[0])  # its output is dropped: no backward will come
    layer(batch(1)[0]).backward(batch(1)[1])
    layer.backward_dw()
    assert_same(layer.weight.grad, wanted(layer, "fp8-current", *batch(1)).dw)


def test_the_first_layer_of_a_model_where_nothing_but_the_weight_wants_a_gradient():
    layer, (x, dy) = delayed(bias=False), batch()
    layer(x).backward(dy)
    layer.backward_dw()
    assert_same(layer.weight.grad, wanted(layer, "fp8-current", x, dy).dw)


@pytest.mark.parametrize("written", ["x", "dy"])
def test_operands_written_to_before_backward_dw_are_noticed(written):
    layer, (x, dy) = delayed("bf16"), batch()
    layer(x).backward(dy)
    (x if written == "x" else dy).zero_()
    with pytest.raises(UnsupportedConfig, match="written to since"):
        layer.backward_dw()


def test_what_was_pending_is_released():
    layer, (x, dy) = delayed("bf16"), batch()
    kept = weakref.ref(x)
    layer(x).backward(dy)
    layer.backward_dw()
    del x, dy
    gc.collect()
    assert kept() is None


@pytest.fixture
def capturing(monkeypatch):
    """What a CUDA stream would say of itself."""
    said = []
    monkeypatch.setattr(wgrad_queue, "is_capturing", lambda: bool(said))
    return said


def backwards(layer, *flags, capturing):
    for i, flag in enumerate(flags):
        capturing[:] = [flag] * flag
        x, dy = batch(i)
        layer(x).backward(dy)
    capturing.clear()


def test_what_a_captured_backward_left_is_for_a_captured_backward_dw(capturing):
    """As make_graphed_callables leaves it: warm-ups, then a capture."""
    layer, plain = delayed(), make("fp8-current", K, N)
    backwards(layer, False, False, True, capturing=capturing)
    with pytest.raises(UnsupportedConfig, match=r"2 were left outside .* and 1 captured.*discard_dw\(\) drops"):
        layer.backward_dw()
    capturing.append(True)
    with pytest.raises(UnsupportedConfig, match=r"2 were left outside of captures.*Drop them"):
        layer.backward_dw()
    assert layer.weight.grad is None
    assert layer.discard_dw() == 2
    layer.backward_dw()
    x, dy = batch(2)
    plain(x).backward(dy)
    assert_same(layer.weight.grad, plain.weight.grad)
    assert layer.discard_dw() == 0


def test_what_a_captured_backward_left_is_not_for_one_outside(capturing):
    layer = delayed()
    backwards(layer, True, capturing=capturing)
    with pytest.raises(UnsupportedConfig, match=r"Capture it, in the graph of its backward"):
        layer.backward_dw()
    assert layer.discard_dw() == 0, "it is still there"
    with pytest.raises(UnsupportedConfig, match=r"discard_dw\(captured=True\)"):
        octavo.revert(layer)
    capturing.append(True)
    layer.backward_dw()


def test_a_capture_that_came_to_nothing_is_dropped(capturing):
    layer = delayed()
    backwards(layer, True, capturing=capturing)
    assert layer.discard_dw(captured=True) == 1
    x, dy = batch(3)
    layer(x).backward(dy)
    layer.backward_dw()
    plain = make("fp8-current", K, N)
    plain(x).backward(dy)
    assert_same(layer.weight.grad, plain.weight.grad)


def test_a_copy_has_no_backward_to_finish():
    layer, (x, dy) = delayed(), batch()
    layer(x).backward(dy)
    with pytest.warns(UserWarning, match="no backward to finish"):
        copy.deepcopy(layer).backward_dw()
    layer.backward_dw()


def test_what_was_left_outside_is_not_for_a_capture(capturing):
    layer = delayed()
    backwards(layer, False, capturing=capturing)
    capturing.append(True)
    with pytest.raises(UnsupportedConfig, match="which no backward writes to again"):
        layer.backward_dw()
    capturing.clear()
    layer.backward_dw()
    assert layer.weight.grad is not None


def test_backwards_that_were_discarded_are_none_to_finish():
    layer, (x, dy) = delayed(), batch()
    kept = weakref.ref(x)
    layer(x).backward(dy)
    assert layer.discard_dw() == 1
    del x
    gc.collect()
    assert kept() is None
    with pytest.warns(UserWarning, match="no backward to finish"):
        layer.backward_dw()


@every
def test_a_training_run_equals_one_without_delay(recipe):
    """Two layers, two microbatches a step, two steps; pipeline style: all dw at the end of the step."""

    def model(**settings):
        return nn.Sequential(make(recipe, K, N, seed=1, **settings), nn.Tanh(), make(recipe, N, K, seed=3, **settings))

    late, plain = model(delay_wgrad_compute=True), model()
    octavo.load_state_dict(late, octavo.state_dict(plain))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (late, plain)]
    for step in range(2):
        for m, optimizer in zip((late, plain), optimizers, strict=True):
            for i in range(2):
                m(batch(2 * step + i)[0]).square().mean().backward()
            for layer in (m[0], m[2]) if m is late else ():
                layer.backward_dw()
                layer.backward_dw()
            optimizer.step()
            optimizer.zero_grad()
            octavo.step(m)
        for a, b in zip(late.parameters(), plain.parameters(), strict=True):
            assert_same(a.detach(), b.detach())
