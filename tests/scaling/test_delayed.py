"""Delayed scaling end to end: which amaxes are seen, when they take effect, and what must leave no mark."""

import warnings

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import octavo
from octavo.errors import UnsupportedConfig
from tests.support.linear_oracle import Memory, assert_result, assert_same, check, make, run, spiky
from tests.support.state_tensors import named_state

RECIPE = "fp8-delayed(history=4)"


def batch(i, m=21, dtype=torch.float32):
    """Magnitudes that go up and down by powers of about three."""
    return spiky(m, 48, seed=10 + i, dtype=dtype) * 3.0 ** (i * 7 % 5 - 2), spiky(m, 40, seed=20 + i, dtype=dtype) * (
        3.0 ** (i * 5 % 7 - 6)
    )


def change(layer, i):
    with torch.no_grad():
        layer.weight.mul_(0.5 + 0.3 * (i % 4))


def snapshot(model):
    return {name: value.clone() for name, value in octavo.state_dict(model).items()}


def assert_unmoved(model, before):
    now = octavo.state_dict(model)
    assert list(now) == list(before)
    for name, value in now.items():
        assert_same(value, before[name], name)


class Traced:
    """A layer and its oracle, stepped together."""

    def __init__(self, recipe, **settings):
        self.recipe, self.layer, self.memory = recipe, make(recipe, **settings), Memory(recipe)

    def microbatch(self, x, dy, **settings):
        found = check(self.layer, self.recipe, x, dy, inverse_scale=self.memory.inverse_scale, **settings)
        self.memory.observe(x=x, w=self.layer.weight, dy=dy)
        return found

    def step(self):
        octavo.step(self.layer)
        self.memory.step()
        self.memory.assert_state(octavo.state_dict(self.layer))


# -- runs against the oracle ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize(("length", "margin"), [(1, 0), (2, 1), (4, -1), (4, 0), (1024, 0)])
def test_a_run_follows_the_oracle(length, margin, algorithm, dtype):
    """Seven steps of two microbatches: every result to the bit, and the windows after each step."""
    traced = Traced(f"fp8-delayed(history={length},algorithm='{algorithm}',margin={margin})", dtype=dtype)
    for i in range(7):
        traced.microbatch(*batch(2 * i, dtype=dtype))
        traced.microbatch(*batch(2 * i + 1, dtype=dtype))
        traced.step()
        change(traced.layer, i)
    encodes = traced.memory.inverse_scale
    assert all(e not in (0.0, 1.0) for e in encodes.values())


@pytest.mark.parametrize("override", ["wgrad='bf16'", "dgrad='bf16'", "fprop='bf16'", "backward='dequantized'"])
def test_a_run_with_an_override(override):
    """Operands that an override leaves out are not seen, or not used: either way what is quantized is right."""
    recipe = f"fp8-delayed(history=4,{override})"
    traced = Traced(recipe)
    x, dy = batch(0)
    traced.microbatch(x, dy)
    octavo.step(traced.layer)
    traced.memory.step()
    traced.microbatch(x, dy)


def test_scales_change_at_step_and_not_before():
    layer, (x, dy) = make(RECIPE), batch(1)
    run(layer, *batch(0))
    octavo.step(layer)
    first = run(layer, x, dy)
    assert_result(run(layer, x, dy), first)
    octavo.step(layer)
    assert not torch.equal(run(layer, x, dy).y, first.y)


# -- several calls a step --------------------------------------------------------------------------------------------


def test_a_layer_called_twice_in_a_step_remembers_the_larger():
    traced = Traced(RECIPE)
    traced.microbatch(*batch(4))
    traced.microbatch(*batch(0))
    traced.step()
    layer = traced.layer
    x0, x1 = batch(2)[0].requires_grad_(), batch(3)[0]
    (layer(x0) + layer(x1)).sum().backward()  # in one graph, too
    ones = torch.ones(21, 40)
    traced.memory.observe(x=torch.stack((x0.detach(), x1)), w=layer.weight, dy=ones)
    traced.step()


def test_cached_weights_keep_every_microbatch_equal_to_the_first():
    """The weight's amax enters once a step, and a step without a refresh does not roll its window."""
    traced = Traced(RECIPE)
    x, dy = batch(1)
    for step in range(4):
        first = None
        for flag in (True, False, False):
            found = check(
                traced.layer, RECIPE, x, dy, inverse_scale=traced.memory.inverse_scale, is_first_microbatch=flag
            )
            first = found if first is None else first
            assert_result(found, first)
        traced.memory.observe(x=x, w=traced.layer.weight, dy=dy)
        traced.step()
        change(traced.layer, step)


def test_a_step_of_cached_weights_alone_leaves_their_window():
    traced = Traced(RECIPE)
    idle = torch.optim.SGD(traced.layer.parameters())  # has the weight, and would be heard if it changed it
    x, dy = batch(1)
    traced.microbatch(x, dy, is_first_microbatch=True)
    traced.step()
    w_codes = traced.memory.inverse_scale["w"]
    for _ in range(2):  # the same codes, so the multiplier they were made with
        run(traced.layer, x, dy, is_first_microbatch=False)
        traced.memory.observe(x=x, dy=dy)
        traced.step()
    assert traced.memory.inverse_scale["w"] == w_codes
    assert not idle.state


def test_a_layer_that_was_not_used_keeps_its_scales():
    model = nn.ModuleList([make(RECIPE), make(RECIPE)])
    run(model[0], *batch(0))
    octavo.step(model)
    before = snapshot(model[1])
    for i in range(3):
        run(model[0], *batch(i))
        octavo.step(model)
    assert_unmoved(model[1], before)


# -- steps that are not finite -------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")], ids=str)
@pytest.mark.parametrize("where", ["x", "dy"])
def test_a_non_finite_step_is_forgotten(bad, where):
    """Against a layer that skipped the step: same scales, same windows, same bits afterwards."""
    traced = Traced(RECIPE)
    traced.microbatch(*batch(0))
    traced.step()
    x, dy = batch(1)
    (x if where == "x" else dy)[3, 5] = bad
    run(traced.layer, x, dy)
    traced.memory.observe(x=x, w=traced.layer.weight, dy=dy)
    traced.step()
    for i in range(2, 4):
        traced.microbatch(*batch(i))
        traced.step()
    assert all(torch.isfinite(v).all() for v in octavo.state_dict(traced.layer).values())


# -- recompute -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_is_seen_once_and_gives_the_same_bytes(reentrant):
    def model():
        return nn.Sequential(make(RECIPE, 48, 40, seed=1), nn.GELU(), make(RECIPE, 40, 48, seed=3))

    plain, again = model(), model()
    for i in range(4):
        results = []
        for m in (plain, again):
            x = batch(i)[0].requires_grad_()
            y = m(x) if m is plain else checkpoint(m, x, use_reentrant=reentrant)
            y.square().mean().backward()
            results.append([y.detach(), x.grad, *(p.grad for p in m.parameters())])
            m.zero_grad()
            octavo.step(m)
        for a, b in zip(*results, strict=True):
            assert_same(a, b)
        assert_unmoved(again, snapshot(plain))


# -- what does not move it -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("training", [True, False])
def test_forwards_without_grad_use_the_scales_and_do_not_move_them(mode, training):
    traced = Traced(RECIPE)
    x, dy = batch(0)
    traced.microbatch(x, dy)
    traced.step()
    before = snapshot(traced.layer)
    traced.layer.train(training)
    with mode():
        y = traced.layer(x)
        traced.layer(1000 * x)
    assert_unmoved(traced.layer, before)
    traced.layer.train()
    assert_same(traced.microbatch(x, dy).y, y)
    traced.step()  # the 1000 did not enter


def test_evaluation_with_grad_does_not_move_the_scales_either():
    layer, (x, _) = make(RECIPE).eval(), batch(0)
    layer(x.requires_grad_())
    octavo.step(layer)
    assert not octavo.state_dict(layer)["scaling.forward.history"].any()


def test_a_first_use_without_grad_leaves_a_fresh_state():
    layer, (x, dy) = make(RECIPE), batch(1)
    with torch.no_grad():
        layer(1000 * x)
    octavo.step(layer)
    check(layer, RECIPE, x, dy)


# -- one delayed recipe a module -------------------------------------------------------------------------------------


def test_a_second_delayed_recipe_is_refused_and_the_first_goes_on():
    layer, (x, dy) = make(None), batch(0)
    with octavo.autocast(RECIPE):
        check(layer, RECIPE, x, dy)
    with octavo.autocast("fp8-delayed(history=8)"), pytest.raises(UnsupportedConfig, match="delayed"):
        layer(x)
    with octavo.autocast("fp8-block"):
        check(layer, "fp8-block", x, dy)
    octavo.step(layer)
    memory = Memory(RECIPE)
    memory.observe(x=x, w=layer.weight, dy=dy)
    memory.step()
    memory.assert_state(octavo.state_dict(layer))
    with octavo.autocast(RECIPE):
        check(layer, RECIPE, x, dy, inverse_scale=memory.inverse_scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_casting_the_module_leaves_the_state_in_float32(dtype):
    traced = Traced(RECIPE)
    traced.microbatch(*batch(1))
    traced.step()
    before = snapshot(traced.layer)
    traced.layer.to(dtype)
    assert_unmoved(traced.layer, before)
    traced.microbatch(*batch(2, dtype=dtype))
    traced.step()


@pytest.mark.parametrize("how", ["data", "replaced", "moved"])
def test_memory_that_is_exchanged_is_the_one_that_is_written(how):
    """As FSDP moves buffers, and `module.to`."""
    layer, x = octavo.Linear(16, 16, recipe="fp8-delayed"), torch.ones(4, 16)
    layer(x)
    for name, buffer in list(named_state(layer)):
        if how == "data":
            buffer.data = buffer.data.clone()
        elif how == "replaced":
            layer._hidden._buffers[name] = buffer.clone()
    if how == "moved":
        layer._apply(lambda t: t.clone())
    layer._hidden.scaling_forward_running_amax.zero_()
    layer(100 * x)
    assert layer._hidden.scaling_forward_running_amax[0] == 100
    layer._hidden.scaling_forward_inverse_scale.fill_(2)
    assert layer._scaling.of_call(layer)[0][0] == 2


def test_a_frozen_layer_in_training_learns_its_scales_too():
    layer = make("fp8-delayed", bias=False).requires_grad_(False)
    x = batch(0)[0] * 1e-4
    for _ in range(2):
        layer(x)
        octavo.step(layer)
    y, want = layer(x), nn.functional.linear(x, layer.weight)
    assert (y - want).norm() / want.norm() < 0.1


def test_a_cold_cache_keeps_the_recipes_margin():
    recipe = "fp8-delayed(cold_start='current',margin=3)"
    data = batch(0)
    a, b = run(make(recipe), *data, is_first_microbatch=True), run(make(recipe), *data)
    assert_same(a.y, b.y)


def test_leaving_a_delayed_recipe_leaves_its_memory_behind():
    layer = make("fp8-delayed")
    octavo.convert(layer, "fp8-current", overwrite=True)
    assert octavo.state_dict(layer) == {}
    octavo.convert(layer, "fp8-delayed(history=4)", overwrite=True)
    assert octavo.state_dict(layer)["scaling.forward.history"].shape == (2, 4)


def test_a_recipe_that_is_refused_is_not_set():
    layer = make("fp8-delayed")
    with pytest.raises(UnsupportedConfig, match="remembers amaxes"):
        layer.recipe = "fp8-delayed(history=4)"
    assert str(layer.recipe) == "fp8-delayed"


# -- one operand at a time -----------------------------------------------------------------------------------------


def test_the_amax_of_dy_sets_the_scale_of_dy_in_the_next_step():
    layer, (x, dy) = make(RECIPE), batch(0)
    run(layer, x, dy)
    octavo.step(layer)
    state = octavo.state_dict(layer)
    assert state["scaling.backward.history"].max() == dy.abs().max()
    assert_same(state["scaling.backward.encode"], torch.tensor([57344.0]) / dy.abs().max())


def test_layers_of_fake_tensors_read_no_address():
    with warnings.catch_warnings(), FakeTensorMode():
        warnings.simplefilter("error")
        layer = octavo.Linear(64, 32, recipe="fp8-delayed")
        for _ in range(2):
            layer(torch.randn(4, 64)).sum().backward()
            octavo.step(layer)
        assert layer(torch.randn(4, 64)).shape == (4, 32)
