"""The contract of a chain, without the fuser: its results and gradients are those of its stages, called one by one."""

import pytest
import torch

from octavo.ops import activation_layer, add_layer, fork_layer, linear_layer, norm_layer
from octavo.recipes import recipe
from octavo.runtime import chain
from octavo.runtime.chain import Fields, layer
from tests.support.contract_checks import abstract, check_alike, wants

M, K = 6, 32


def residual(grads="dx dw"):
    """norm -> fork -> Linear -> silu -> add of what the fork returned."""
    stages = (
        norm_layer.Config(weight_dtype="float32", **wants(grads)),
        fork_layer.Config(**wants("dx")),
        linear_layer.Config(recipe("fp8-current"), **wants(grads)),
        activation_layer.Config("silu", **wants("dx")),
        add_layer.Config(**wants("dx dextra")),
    )
    return chain.Config(stages, routes=((4, 1, 1, 0),), hidden=((1, 0),))


def inputs_of(config):
    """x, then the fields of each stage but for its x."""
    w, gamma = torch.randn(K, K), torch.randn(K)
    stages = (
        norm_layer.Inputs(None, gamma), fork_layer.Inputs(None), linear_layer.Inputs(None, w),
        activation_layer.Inputs(None), add_layer.Inputs(None, None),
    )  # fmt: skip
    return Fields([torch.randn(M, K), *[field for stage in stages for field in stage[1:]]])


def one_by_one(config, inputs, dy):
    """y, and the gradients of x, gamma and w, from the stages' own functions."""
    first, _, product, act, total = config.stages
    x, gamma, w = inputs[0], inputs[1], inputs[3]

    def call(which, stage, *fields):
        given = which.layer.Inputs(*fields)
        result = which.layer.forward(stage, given)
        return result.outputs[0], which.layer.save(stage, given, result)

    n, of_norm = call(norm_layer, first, x, gamma)
    h, of_linear = call(linear_layer, product, n, w)
    a, of_act = call(activation_layer, act, h)
    y, _ = call(add_layer, total, a, n)
    dh = activation_layer.layer.backward(act, of_act, (), (dy,))[0]
    dn, dw = linear_layer.layer.backward(product, of_linear, linear_layer.Buffers(), (dh,))[:2]
    dx, dgamma = norm_layer.layer.backward(first, of_norm, (), (dn + dy,))[:2]
    return y, dx, dgamma, dw


def test_a_chain_computes_what_its_stages_compute():
    config, dy = residual(), torch.randn(M, K)
    inputs = inputs_of(config)
    made = layer.forward(config, inputs)
    buffers = Fields([None] * layer.buffers_size(config))
    grads = layer.backward(config, layer.save(config, inputs, made), buffers, (dy,))
    y, *wanted = one_by_one(config, inputs, dy)
    assert torch.equal(made.outputs[0], y)
    assert all(torch.equal(g, w) for g, w in zip((grads[0], grads[1], grads[3]), wanted, strict=True))
    assert [g is not None for g in grads] == list(layer.wants(config))


@pytest.mark.parametrize("grads", ["", "dx", "dx dw"])
def test_forward_returns_what_abstract_describes(grads):
    config = residual(grads)
    inputs = inputs_of(config)
    made, described = layer.forward(config, inputs), layer.abstract(config, Fields(map(abstract, inputs)))
    assert len(made.intermediates) == layer.intermediates_size(config)
    for kind, tensors, protos in zip(made._fields, made, described, strict=True):
        check_alike(tensors, protos, kind)


def test_forward_and_save_at_once_saves_the_same():
    config = residual()
    inputs = inputs_of(config)
    saved = layer.save(config, inputs, layer.forward(config, inputs))
    _, at_once = layer.forward_and_save(config, inputs, True)
    assert len(saved) == layer.saved_size(config)
    for one, other in zip(saved, at_once, strict=True):
        assert one is other is None or torch.equal(one.float(), other.float())


def test_a_fork_adds_no_tensor_to_what_is_kept():
    """Its y and its side output are the norm's y, which no stage needs in backward: the norm keeps x."""
    config = residual()
    made = layer.forward(config, inputs_of(config))
    assert config.forks == (False, True, False, False, False)
    assert [t is not None for t in made.intermediates[: len(config.stages) - 1]] == [False, False, True, False]


def test_gradients_are_announced():
    config, dy = residual(), torch.randn(M, K)
    inputs = inputs_of(config)
    saved = layer.save(config, inputs, layer.forward(config, inputs))
    grads = layer.backward(config, saved, Fields([None] * layer.buffers_size(config)), (dy,))
    check_alike(grads, layer.abstract_gradients(config, saved, abstract(dy)), "gradients")
