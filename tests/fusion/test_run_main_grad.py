"""Weight gradients of a run that go to main_grad or are deferred: of its first layer, beside custom rules, refused."""

import pytest
import torch

import octavo
from octavo import ops
from octavo.errors import Unsupported
from tests.support.custom_operations import LinearGelu
from tests.support.linear_oracle import assert_same
from tests.support.sequentials import H, batch, linear, mlp, rows
from tests.support.steps import assert_equal, compiled, step


@pytest.mark.parametrize("wrap", [lambda m: m, compiled], ids=["eager", "compiled"])
@pytest.mark.parametrize("after", [ops.GELU, lambda: ops.ConstantScale(2.0), lambda: ops.RMSNorm(H)])
def test_a_first_layer_whose_only_gradient_is_in_a_buffer(wrap, after):
    layer = linear(bias=False, fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.zeros(H, H)
    model, x = octavo.Sequential(layer, after()), rows()
    want = torch.autograd.grad(model[1](x @ layer.weight.T).sum(), layer.weight)[0]
    wrap(model)(x).sum().backward()
    torch.testing.assert_close(layer.weight.main_grad, want)


def test_a_first_layer_whose_gradient_is_deferred():
    layer = linear(bias=False, delay_wgrad_compute=True)
    octavo.Sequential(layer, ops.GELU())(rows()).sum().backward()
    layer.backward_dw()
    assert layer.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("missing", [False, True])
def test_a_layer_that_no_gradient_reaches_is_not_said_to_have_one(missing):
    first, last = linear(fuse_wgrad_accumulation=True), linear(fuse_wgrad_accumulation=True)
    model = octavo.Sequential(first, ops.MakeExtraOutput(), last)
    for layer in (first, last):
        layer.weight.grad_added_to_main_grad = False
        layer.weight.main_grad = torch.zeros(H, H)
    if missing:
        del last.weight.main_grad
    _, extra = model(rows().requires_grad_())
    extra.sum().backward()
    assert first.weight.grad_added_to_main_grad and first.weight.main_grad.abs().sum() > 0
    assert not last.weight.grad_added_to_main_grad


@pytest.mark.parametrize("wrap", [lambda m: m, compiled], ids=["eager", "compiled"])
def test_a_rule_of_somebody_elses_leaves_other_layers_their_buffers(wrap):
    last = linear(fuse_wgrad_accumulation=True)
    last.weight.main_grad = torch.zeros(H, H)
    rule = ops.Backward(ops.Rule("mine", (octavo.Linear, ops.GELU), LinearGelu))
    model = octavo.Sequential(linear(), ops.GELU(), last, rules=(rule,))
    assert model.explain(rows().requires_grad_()).fired == ("mine",)
    wrap(model)(rows().requires_grad_()).sum().backward()
    assert last.weight.main_grad.abs().sum() > 0
    assert model[0].weight.grad.abs().sum() > 0


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
