"""A Linear that was called before takes a short way to its next call. Whatever is changed in between, the call does
what it does in a layer that takes the long way."""

import copy
import pickle
import threading
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import octavo
from octavo.runtime import call_cache as calls
from octavo.scaling.delayed_scaling import OperandMask
from tests.support.state_tensors import named_state, state_tensors

K, N, ROWS = 64, 48, 32
RECIPES = ("bf16", "fp8-delayed", "fp8-current", "fp8-block")
on_gpu = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(params=["cpu", on_gpu], autouse=True)
def device(request, monkeypatch):
    monkeypatch.setattr(calls, "DEVICES", {request.param})
    calls.forget()
    return request.param


def build(recipe, device, **more):
    return octavo.Linear(K, N, recipe=recipe, device=device, dtype=torch.bfloat16, **more)


def example(device, rows=ROWS, width=K):
    return torch.randn(rows, width, device=device, dtype=torch.bfloat16)


def step(layer, x, call=None, **arguments):
    """y, the gradients, and the state that the call and its backward leave."""
    x = x.detach().requires_grad_(x.requires_grad)
    layer.zero_grad()
    y = (layer if call is None else call)(x, **arguments)
    first = y[0] if type(y) is tuple else y
    value = first.dequantize() if isinstance(first, octavo.quant.QTensor) else first
    if value.requires_grad:
        value.backward(torch.ones_like(value))
    scaling = layer._scaling
    counted = scaling._forwards, scaling.uncalibrated, layer._codes.trained, value.requires_grad, value.shape
    return [value.detach(), x.grad, *[p.grad for p in layer.parameters()], *state_tensors(layer)], counted


class Twice(nn.Module):
    def forward(self, weight):
        return weight * 2


def replace_weight(layer):
    layer.weight = nn.Parameter(torch.full_like(layer.weight, 0.5))


def turn_weight(layer):
    layer.weight.data = layer.weight.data.T.contiguous().T


def shift_weight(layer):
    room = torch.zeros(K * N + 1, dtype=torch.bfloat16, device=layer.weight.device)
    layer.weight.data = room[1:].view(N, K).copy_(layer.weight.data)


def move_scaling(layer):
    for buffer in state_tensors(layer):
        buffer.data = buffer.data.clone()


def replace_scaling(layer):
    for name, buffer in list(named_state(layer)):
        layer._hidden._buffers[name] = buffer.clone() * (2 if buffer.is_floating_point() else 1)


def drop_bias(layer):
    layer.bias = None


def accumulate(layer):
    layer.fuse_wgrad_accumulation = True
    layer.weight.main_grad = torch.ones(N, K, device=layer.weight.device)


def write_weight(layer):
    with torch.no_grad():
        layer.weight.mul_(3)


def cover_weight_in_class(layer):
    """As SimpleFSDP does: the parameter stays in its table, and a property computes from it."""
    computed = property(lambda self: self._parameters["weight"] * 2)
    layer.__class__ = type("Covered", (type(layer),), {"weight": computed})


def cover_weight_in_layer(layer):
    layer.__dict__["weight"] = layer.weight.detach() * 2


def setting(name, value):
    return lambda layer: setattr(layer, name, value)


def forget_scales(layer):
    if layer._scaling.recipe is not None:
        layer._scaling.uncalibrated = OperandMask(x=True, w=True, dy=True)


def load_twice_the_weights(layer):
    layer.load_state_dict({name: t * 2 for name, t in layer.state_dict().items()})


CHANGES = {
    "weight replaced": replace_weight, "weight turned": turn_weight, "weight at an odd address": shift_weight,
    "weight written to": write_weight, "weight frozen": lambda layer: layer.weight.requires_grad_(False),
    "weight parametrized": lambda layer: parametrize.register_parametrization(layer, "weight", Twice()),
    "weight covered by its class": cover_weight_in_class, "weight covered by the layer": cover_weight_in_layer,
    "weight quantized": lambda layer: octavo.quantize_weights(layer), "weights loaded": load_twice_the_weights,
    "bias dropped": drop_bias, "bias frozen": lambda layer: layer.bias.requires_grad_(False),
    "all frozen": lambda layer: layer.requires_grad_(False), "float32": lambda layer: layer.float(),
    "scales moved": move_scaling, "scales replaced": replace_scaling, "scales forgotten": forget_scales,
    "scales stepped": lambda layer: octavo.step(layer),
    "state loaded": lambda layer: octavo.load_state_dict(layer, octavo.state_dict(layer)),
    "evaluation": lambda layer: layer.eval(), "main_grad": accumulate, "deferred": setting("delay_wgrad_compute", True),
    "bias returned": setting("return_bias", True), "codes made again": setting("keep_weight_codes", False),
    "another recipe": setting("recipe", "fp8-rowwise"), "bf16": setting("recipe", "bf16"),
    "no recipe": setting("recipe", None),
    "a hook": lambda layer: layer.register_forward_hook(lambda module, given, y: y * 2),
}  # fmt: skip


def attempt(call):
    """Returns the result of a call, or its error as text."""
    try:
        found, counted = call()
    except octavo.errors.Unsupported as error:
        return type(error), str(error), ()
    return counted, "", [None if t is None else t.clone() for t in found]


def both(layer, twin, device, monkeypatch, call):
    """The outcome of a call of a layer that takes the short way, and of its twin, which takes the long one."""
    found = attempt(lambda: call(layer))
    with monkeypatch.context() as patch:
        patch.setattr(calls, "DEVICES", set())
        want = attempt(lambda: call(twin))
    assert found[:2] == want[:2]
    for a, b in zip(found[2], want[2], strict=True):
        assert (a is None) == (b is None)
        assert a is None or (a.dtype == b.dtype and torch.equal(a, b))


def warmed(recipe, device, **more):
    """A layer that takes the short way, and a twin of the same state."""
    layer = build(recipe, device, **more)
    for i in range(8):
        step(layer, example(device).requires_grad_())
        if i < 2:
            octavo.step(layer)
    assert calls._hits
    twin = copy.deepcopy(layer)
    twin._scaling._forwards = layer._scaling._forwards
    return layer, twin


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_call_like_the_one_before_takes_the_short_way(recipe, device, monkeypatch):
    layer, twin = warmed(recipe, device)
    x = example(device).requires_grad_()
    with monkeypatch.context() as patch:
        patch.setattr(octavo.Linear, "_weight_side", None)  # of the long way
        step(layer, x)
    step(twin, x)
    both(layer, twin, device, monkeypatch, lambda one: step(one, x))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_layer_counts(change, recipe, device, monkeypatch):
    layer, twin = warmed(recipe, device)
    x = example(device).requires_grad_()

    def changed(one):
        CHANGES[change](one)
        return step(one, x)

    both(layer, twin, device, monkeypatch, changed)
    for _ in range(5):  # what was changed is known after a while, too
        both(layer, twin, device, monkeypatch, lambda one: step(one, x))


def under(context, **arguments):
    def call(layer, x):
        with context():
            return step(layer, x, **arguments)

    return call


def with_other_weights(layer, x):
    other = {name: p.detach() * 2 for name, p in layer.named_parameters()}
    return step(layer, x, call=lambda x: torch.func.functional_call(layer, other, (x,)))


def mapped(layer, x):
    with torch.no_grad():
        return step(layer, x, call=lambda x: torch.func.vmap(layer)(x[None])[0])


def in_a_thread(layer, x):
    found = []
    thread = threading.Thread(target=lambda: found.append(step(layer, x)))
    thread.start()
    thread.join()
    return found[0]


def checkpointed(layer, x):
    return step(layer, x, call=lambda x: checkpoint(layer, x, use_reentrant=False))


def twice_in_flight(layer, x):
    first = layer(x * 2)
    found = step(layer, x)
    first.sum().backward()
    return found


CALLS = {
    "no_grad": under(torch.no_grad), "inference_mode": under(torch.inference_mode),
    "torch.autocast": under(lambda: torch.autocast("cpu" if not torch.cuda.is_available() else "cuda", torch.float16)),
    "octavo.autocast": under(lambda: octavo.autocast("fp8-rowwise")),
    "first microbatch": under(lambda: octavo.microbatch(first=True)),
    "later microbatch": under(lambda: octavo.microbatch(first=False)),
    "is_first_microbatch": under(nullcontext, is_first_microbatch=True),
    "not is_first_microbatch": under(nullcontext, is_first_microbatch=False),
    "fp8_output": under(nullcontext, fp8_output=True),
    "x without a gradient": lambda layer, x: step(layer, x.detach()),
    "x of three dims": lambda layer, x: step(layer, x.view(2, ROWS // 2, K)),
    "x turned": lambda layer, x: step(layer, x.detach().T.contiguous().T.requires_grad_()),
    "x of other rows": lambda layer, x: step(layer, x.detach()[:7].requires_grad_()),
    "x of no rows": lambda layer, x: step(layer, x.detach()[:0].requires_grad_()),
    "x in float32": lambda layer, x: step(layer, x.detach().float().requires_grad_()),
    "x in float64": lambda layer, x: step(layer, x.detach().double().requires_grad_()),
    "x too wide": lambda layer, x: step(layer, torch.cat([x, x], 1)),
    "x without data": lambda layer, x: step(layer, x.detach().to("meta")),
    "functional_call": with_other_weights, "vmap": mapped, "a thread": in_a_thread, "checkpoint": checkpointed,
    "two calls in flight": twice_in_flight,
}  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("way", CALLS)
def test_a_call_of_another_kind_is_one(way, recipe, device, monkeypatch):
    layer, twin = warmed(recipe, device)
    x = example(device).requires_grad_()
    for i in range(4):
        both(layer, twin, device, monkeypatch, lambda one: CALLS[way](one, x))
        both(layer, twin, device, monkeypatch, lambda one: step(one, x))
        if i == 1:
            for one in (layer, twin):
                octavo.step(one)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_take_the_short_way_with_tensors_of_their_own(copied, device):
    layer, _ = warmed("fp8-delayed", device)
    other, x = copied(layer), example(device).requires_grad_()
    want = step(layer, x)[0]
    with torch.no_grad():
        layer.weight.zero_()
    assert all(torch.equal(a, b) for a, b in zip(step(other, x)[0][:3], want[:3], strict=True))


def test_replays_that_are_forgotten_are_not_run(device, monkeypatch):
    layer, _ = warmed("fp8-current", device)
    calls.forget()
    kinds = []
    real = calls.key_of
    monkeypatch.setattr(calls, "key_of", lambda *a: kinds.append(a) or real(*a))
    step(layer, example(device).requires_grad_())
    assert len(kinds) == 2, "forward and backward ran as they are written"


def test_late_steps_are_told_on_the_short_way(device, monkeypatch):
    layer, _ = warmed("fp8-delayed", device)
    layer._scaling.said, x = False, example(device).requires_grad_()

    def update():
        for _ in range(3):
            step(layer, x)
            with torch.no_grad():
                layer.weight.mul_(0.5)

    monkeypatch.setattr(octavo.Linear, "_weight_side", None)  # of the long way
    with pytest.warns(UserWarning, match=r"octavo.step\(model\) was not called"):
        update()


def test_a_class_that_looks_its_weight_up_itself_is_asked(device):
    class Doubled(octavo.Linear):
        def __getattr__(self, name):
            found = super().__getattr__(name)
            return found * 2 if name == "weight" and self.__dict__.get("doubles") else found

    class Base(octavo.Linear):
        pass

    class Derived(Base):
        pass

    x = torch.randn(4, 8).to(device)
    for layer in (Doubled(8, 8, bias=False, recipe="bf16"), Derived(8, 8, bias=False, recipe="bf16")):
        layer = layer.to(device)
        plain = layer(x)
        if isinstance(layer, Doubled):
            layer.__dict__["doubles"] = True
        else:
            Base.weight = property(lambda self: self._parameters["weight"] * 2)
        torch.testing.assert_close(layer(x), 2 * plain)


def test_a_layer_that_is_inspected_is_seen(device):
    model = nn.Sequential(warmed("fp8-current", device)[0])
    with octavo.inspect(model) as found:
        step(model[0], example(device).requires_grad_(), call=model)
    assert {row.tensor: row.calls for row in found.rows()} == dict.fromkeys(("x", "w", "dy", "y", "dx", "dw"), 1)
