"""Operations of a run as torch knows modules: hooks, parametrizations, a forward of their own, one in two places."""

import copy
import threading

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.utils.parametrizations import weight_norm

import octavo
from octavo import ops
from tests.support.linear_oracle import assert_same
from tests.support.sequentials import H, batch, fill, mlp, recipes, rows
from tests.support.steps import assert_equal, assert_state, step


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


def test_a_module_replaced_by_attribute_is_the_one_that_runs():
    model, new, x = octavo.LayerNormMLP(H, 32), octavo.Linear(H, 32), rows()
    model(x)
    model.fc1 = new
    model(x).sum().backward()
    assert new.weight.grad is not None


def test_a_forward_of_somebody_elses_is_called():
    class Zero(octavo.Linear):
        def forward(self, x):
            return super().forward(x) * 0

    model = octavo.Sequential(Zero(H, H), ops.GELU())
    assert model(rows()).abs().sum() == 0
    assert any("forward is not Octavo's" in why for why in model.explain(rows()).alone)


def test_threads_get_the_bits_of_one_thread():
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


def test_an_explanation_calls_no_hooks_and_writes_to_no_buffer():
    grouped, called = octavo.GroupedLinear(2, H, H), []
    model = octavo.Sequential(ops.GELU(), grouped)
    model[0].register_forward_hook(lambda *_: called.append(1))
    buffer = torch.full((8, H), 7.0)
    said = model.explain(rows(), torch.tensor([3, 5]), op_kwargs={1: {ops.OUTPUT_BUFFER_KEY: buffer}})
    assert called == [] and (buffer == 7).all()
    assert "GELU: it has hooks" in said.alone
