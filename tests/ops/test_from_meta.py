"""Layers built without memory: what recipes remember is there once the weights are, however these come."""

import copy
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import octavo
from octavo.recipes import SHIPPED
from tests.support.linear_oracle import assert_same, spiky
from tests.support.state_tensors import state_tensors

K, G, M = 48, 3, 24
SPLITS = torch.tensor([10, 6, 8])
EACH = {"single_grouped_weight": False, "single_grouped_bias": False}


def mlp(recipe):
    return octavo.LayerNormMLP(K, 2 * K, normalization="RMSNorm", activation="swiglu", recipe=recipe)


def converted(recipe):
    model = nn.Sequential(nn.Linear(K, K), nn.GELU(), nn.Linear(K, K))
    octavo.convert(model, recipe)
    return model


BUILDS = {
    "linear": lambda recipe: octavo.Linear(K, K, recipe=recipe),
    "experts": lambda recipe: octavo.GroupedLinear(G, K, K, recipe=recipe),
    "experts, one by one": lambda recipe: octavo.GroupedLinear(G, K, K, recipe=recipe, **EACH),
    "mlp": mlp,
    "converted": converted,
}
stateful = pytest.mark.parametrize("recipe", ["fp8-delayed", "nvfp4"])


def on_meta(build, recipe):
    with torch.device("meta"):
        return build(recipe)


@contextmanager
def init_empty_weights(include_buffers):
    """As accelerate does it: what is registered goes to the meta device."""
    registers = nn.Module.register_parameter, nn.Module.register_buffer

    def register_parameter(module, name, param):
        registers[0](module, name, param)
        if param is not None:
            module._parameters[name] = nn.Parameter(module._parameters[name].to("meta"), param.requires_grad)

    def register_buffer(module, name, buffer, persistent=True):
        registers[1](module, name, buffer, persistent=persistent)
        if buffer is not None:
            module._buffers[name] = module._buffers[name].to("meta")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Module, "register_parameter", register_parameter)
        if include_buffers:
            patch.setattr(nn.Module, "register_buffer", register_buffer)
        yield


def assigned(model, weights):
    model.load_state_dict(weights, assign=True)


def emptied(model, weights):
    model.to_empty(device="cpu").load_state_dict(weights)


def set_one_by_one(model, weights):
    """As accelerate's set_module_tensor_to_device."""
    for path, value in weights.items():
        owner, _, name = path.rpartition(".")
        model.get_submodule(owner)._parameters[name] = nn.Parameter(value.clone())


ARRIVALS = {"assigned": assigned, "to_empty": emptied, "one by one": set_one_by_one}


def results(model, call, i):
    x = spiky(M, K, seed=i).requires_grad_()
    extra_inputs = (SPLITS,) if isinstance(model, octavo.GroupedLinear) else ()
    y = call(x, *extra_inputs)
    y.backward(spiky(*y.shape, seed=i + 9))
    found = [y.detach(), x.grad, *[p.grad for p in model.parameters()]]
    model.zero_grad(set_to_none=True)
    octavo.step(model)
    return found


def assert_trains(model, twin):
    """The two train alike, and what the model remembers stays where it is."""
    octavo.load_state_dict(twin, octavo.state_dict(model))
    addresses = []
    for i in range(3):
        for a, b in zip(results(model, model, i), results(twin, twin, i), strict=True):
            assert_same(a, b)
        assert all(not t.is_meta for t in (*model.parameters(), *model.buffers(), *state_tensors(model)))
        addresses.append([t.data_ptr() for t in state_tensors(model)])
    assert addresses[0] == addresses[1] == addresses[2]
    for name, value in octavo.state_dict(model).items():
        assert_same(value, octavo.state_dict(twin)[name], name)


@stateful
@pytest.mark.parametrize("arrival", ARRIVALS)
@pytest.mark.parametrize("kind", BUILDS)
def test_state_comes_with_the_weights(kind, arrival, recipe):
    model, twin = on_meta(BUILDS[kind], recipe), BUILDS[kind](recipe)
    ARRIVALS[arrival](model, twin.state_dict())
    fresh = copy.deepcopy(model)
    results(fresh, fresh, 0)  # where nothing but a call tells a layer that its weight is there
    assert_trains(model, twin)


@stateful
@pytest.mark.parametrize("arrival", ARRIVALS)
@pytest.mark.parametrize("when", ["before the weights", "after the weights"])
def test_what_was_remembered_comes_too(when, arrival, recipe):
    twin = mlp(recipe)
    for i in range(2):
        results(twin, twin, i)
    model, state = on_meta(mlp, recipe), octavo.state_dict(twin)
    if when == "before the weights":
        octavo.load_state_dict(model, state)
        for name, value in octavo.state_dict(model).items():
            assert_same(value, state[name], name)
    ARRIVALS[arrival](model, twin.state_dict())
    if when == "after the weights":
        octavo.load_state_dict(model, state)
    for i in range(2, 4):
        for a, b in zip(results(model, model, i), results(twin, twin, i), strict=True):
            assert_same(a, b)


@stateful
@pytest.mark.parametrize("include_buffers", [False, True])
@pytest.mark.parametrize("arrival", ["assigned", "one by one"])
def test_init_empty_weights(arrival, include_buffers, recipe):
    with init_empty_weights(include_buffers):
        model = mlp(recipe)
    assert all(p.is_meta for p in model.parameters())
    twin = mlp(recipe)
    ARRIVALS[arrival](model, twin.state_dict())
    octavo.load_state_dict(model, octavo.state_dict(twin))
    assert_trains(model, twin)


@stateful
def test_buffers_that_were_sent_to_meta_while_weights_were_not(recipe):
    twin = BUILDS["linear"](recipe)
    model = nn.Linear(K, K)
    model.load_state_dict(twin.state_dict())
    with init_empty_weights(include_buffers=True):
        octavo.convert(model, recipe)
    octavo.load_state_dict(model, octavo.state_dict(twin))
    assert_trains(model, twin)


@stateful
@pytest.mark.parametrize("kind", ["linear", "experts"])
def test_a_first_call_that_is_compiled(kind, recipe):
    torch._dynamo.reset()
    model, twin = on_meta(BUILDS[kind], recipe), BUILDS[kind](recipe)
    octavo.load_state_dict(model, octavo.state_dict(twin))
    set_one_by_one(model, twin.state_dict())
    call = torch.compile(model, fullgraph=True, backend="aot_eager")
    for i in range(3):
        for a, b in zip(results(model, call, i), results(twin, twin, i), strict=True):
            assert_same(a, b)


@stateful
def test_shapes_may_be_asked_for_before(recipe):
    model, twin = on_meta(mlp, recipe), mlp(recipe)
    assert model(torch.empty(M, K, device="meta")).shape == (M, K)
    octavo.load_state_dict(model, octavo.state_dict(twin))
    set_one_by_one(model, twin.state_dict())
    assert_trains(model, twin)


@pytest.mark.parametrize("recipe", SHIPPED)
def test_the_meta_device_tells_shapes(recipe):
    layer = octavo.Linear(48, 40, device="meta", recipe=recipe)
    x = torch.empty(2, 3, 48, device="meta", requires_grad=True)
    y = layer(x)
    assert y.shape == (2, 3, 40)
    y.sum().backward()
    assert (x.grad.shape, layer.weight.grad.shape) == (x.shape, (40, 48))


@stateful
def test_a_layer_that_follows_autocast(recipe):
    twin, model = octavo.Linear(K, K), on_meta(lambda _: octavo.Linear(K, K), None)
    with octavo.autocast(recipe):
        model(torch.empty(M, K, device="meta"))
        results(twin, twin, 0)
        octavo.load_state_dict(model, octavo.state_dict(twin))
        assigned(model, twin.state_dict())
        assert_trains(model, twin)


@stateful
@pytest.mark.parametrize("kind", ["linear", "experts"])
def test_memory_that_is_taken_away_leaves_what_was_remembered(kind, recipe):
    """`to_empty` of a layer that has been trained: weights are anything, until they are loaded."""
    model = BUILDS[kind](recipe)
    results(model, model, 0)
    twin, weights = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    model._apply(lambda t: torch.full_like(t, 77))
    model.to_empty(device="cpu")
    model.load_state_dict(weights)
    assert_trains(model, twin)


def test_a_trained_model_that_goes_to_meta_and_back_starts_afresh():
    model, twin = mlp("fp8-delayed"), mlp("fp8-delayed")
    weights = copy.deepcopy(model.state_dict())
    results(model, model, 0)
    model.to("meta")
    assigned(model, weights), twin.load_state_dict(weights)
    assert_trains(model, twin)
