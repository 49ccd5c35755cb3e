"""Delayed scaling before any step has seen its tensors: it measures them, and stops as soon as it knows."""

import copy
import pickle

import pytest
import torch
from torch import nn

import octavo
from octavo import ops
from octavo.model import step as steps
from tests.support.cold_starts import SPLITS, G, K, M, N, batch, cold, error, experts, results
from tests.support.linear_oracle import Memory, assert_result, assert_same, make, run, spiky
from tests.support.saved_modules import saved_and_loaded
from tests.support.sequentials import Graphs
from tests.support.steps import assert_equal, compiled


def block(recipe="fp8-delayed"):
    torch.manual_seed(0)
    return octavo.LayerNormMLP(K, 2 * K, normalization="RMSNorm", activation="swiglu", recipe=recipe)


# -- the fault ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["linear", "grouped"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_fresh_layer_in_eval_takes_small_inputs(kind, mode):
    x, extra_inputs = 1e-3 * torch.randn(M, K), () if kind == "linear" else (SPLITS,)
    layer = (make("fp8-delayed") if kind == "linear" else experts("fp8-delayed")).eval()
    exact = copy.deepcopy(layer)
    exact.recipe = "bf16"
    for p in (*layer.parameters(), *exact.parameters()):
        if p.dim() == layer.bias.dim():
            p.data.zero_()
    with mode():
        assert error(layer(x, *extra_inputs), exact(x, *extra_inputs)) < 0.05
        assert_same(layer(x, *extra_inputs), layer(x, *extra_inputs))


@pytest.mark.parametrize("build", [lambda r: make(r, bias=False), block], ids=["linear", "mlp"])
def test_the_first_gradients_of_a_mean_loss_are_not_lost(build):
    x, grads = torch.randn(64, K), {}
    for recipe in ("fp8-delayed", "fp8-delayed(cold_start='one')", "bf16"):
        model = build(recipe)
        (model(x).mean() / 1000).backward()  # as of many more rows
        grads[recipe] = torch.cat([p.grad.flatten() for p in model.parameters() if p.dim() > 1])
    assert error(grads["fp8-delayed"], grads["bf16"]) < 0.1
    assert not grads["fp8-delayed(cold_start='one')"].any()


def test_the_first_step_is_current_scaling():
    x, dy = batch(1)
    assert_result(run(make("fp8-delayed"), x, dy), run(make("fp8-current"), x, dy))
    assert_equal(results(experts("fp8-delayed"), x, dy, SPLITS), results(experts("fp8-current"), x, dy, SPLITS))


def test_the_old_behaviour_is_a_setting():
    layer, (x, dy) = make("fp8-delayed(cold_start='one')"), batch()
    ones = octavo.Linear(K, N, recipe="fp8-delayed")
    ones.load_state_dict(layer.state_dict())
    fresh = octavo.state_dict(ones)
    octavo.load_state_dict(ones, {k: torch.ones_like(v) if k.endswith("head") else v for k, v in fresh.items()})
    assert cold(layer) == cold(ones) == [""]
    assert_result(run(layer, x, dy), run(ones, x, dy))


# -- when it stops -----------------------------------------------------------------------------------------------------


def test_a_step_ends_the_cold_start_and_later_calls_use_delayed_scales():
    """The config too: fused kernels, recorded calls and graphs are found by it."""
    one, layer, (x, dy) = make("fp8-delayed(cold_start='one')"), make("fp8-delayed"), batch()
    for subject in (one, layer):
        run(subject, x, dy)
        octavo.step(subject)
    assert_result(run(layer, x, dy), run(one, x, dy))
    key = key_of(one, x)
    assert key_of(layer, x) == key.replace("fp8-delayed(cold_start='one')", "fp8-delayed", 1) != key
    assert cold(layer) == [""]


def test_every_microbatch_of_the_first_step_measures():
    layer, memory = make("fp8-delayed"), Memory("fp8-delayed")
    for i, size in enumerate((1e-4, 1.0, 1e3)):
        x, dy = batch(i, size)
        assert_result(run(layer, x, dy), run(make("fp8-current"), x, dy))
        memory.observe(x=x, w=layer.weight, dy=dy)
    octavo.step(layer)
    memory.step()
    memory.assert_state(octavo.state_dict(layer))


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_was_not_finite_is_measured_again(bad):
    layer, (x, dy) = make("fp8-delayed"), batch()
    worse = dy.clone()
    worse[0, 0] = bad
    run(layer, x, worse)
    octavo.step(layer)
    assert cold(layer) == ["d"]
    state = octavo.state_dict(layer)
    assert state["scaling.backward.encode"] == 1
    small = 1e-6 * dy  # a multiplier of 1 would flush it
    found = run(layer, x, small)
    assert error(found.dx, small @ layer.weight.detach()) < 0.1
    octavo.step(layer)
    assert cold(layer) == [""]


def test_a_step_leaves_a_layer_cold_that_has_seen_nothing():
    model = nn.ModuleList([make("fp8-delayed"), make("fp8-delayed")])
    octavo.step(model)
    assert cold(model) == ["xwd", "xwd"]
    run(model[0], *batch())
    octavo.step(model)
    assert cold(model) == ["", "xwd"]
    x, dy = batch(3, 1e-4)
    assert_result(run(model[1], x, dy), run(make("fp8-current"), x, dy))


def test_a_layer_that_is_unfrozen_late_measures_its_first_gradient():
    layer, (x, dy) = make("fp8-delayed").requires_grad_(False), batch(0, 1e-5)
    for _ in range(40):
        layer(x)
        octavo.step(layer)
    assert cold(layer) == ["d"]
    layer.requires_grad_(True)
    found = run(layer, x, dy)
    assert error(found.dw, dy.T @ x) < 0.1
    octavo.step(layer)
    assert cold(layer) == [""]


@pytest.mark.parametrize("settings", ["fprop='bf16'", "backward='high_precision'", "dgrad='bf16',wgrad='bf16'"])
def test_operands_that_a_recipe_leaves_alone_are_not_waited_for(settings):
    layer, (x, dy) = make(f"fp8-delayed({settings})"), batch()
    run(layer, x, dy)
    octavo.step(layer)
    assert cold(layer) == [""]


def test_the_device_is_not_asked_for_ever(monkeypatch):
    """Each answer has the host wait."""
    asked = []
    look = steps.look
    monkeypatch.setattr(steps, "look", lambda found: (asked.append(len(found)), look(found)))
    done, unused, x = make("fp8-delayed", 4, 4), make("fp8-delayed", 4, 4), torch.ones(1, 4)
    model = nn.ModuleList([done, unused])
    for _ in range(130):
        run(done, x, x)
        unused(x)  # nothing comes back
        octavo.step(model)
    assert cold(model) == ["", "d"]
    assert asked == [2] + [1] * (7 + 2)  # after steps 1 to 8, 64 and 128


def test_a_layer_goes_on_measuring_after_a_step_that_cannot_wait(monkeypatch):
    """In a capture the device has no answer yet; what is captured is right all the same."""
    monkeypatch.setattr(steps, "is_capturing", lambda: True)
    layer, twin, (x, dy) = make("fp8-delayed"), make("fp8-delayed(cold_start='one')"), batch()
    for subject in (layer, twin):
        run(subject, x, dy)
        octavo.step(subject)
    assert cold(layer) == ["xwd"]
    assert_result(run(layer, *batch(5, 0.1)), run(twin, *batch(5, 0.1)))  # the device knows, and uses what it has seen


def test_a_layer_goes_on_measuring_after_a_compiled_step():
    torch._dynamo.reset()
    layer, twin, graphs = make("fp8-delayed"), make("fp8-delayed"), Graphs()
    step = compiled(lambda: octavo.step(layer), graphs)
    for i in range(10):
        assert_result(run(layer, *batch(i, 0.1)), run(twin, *batch(i, 0.1)))
        step(), octavo.step(twin)
    assert cold(layer) == ["xwd"] and len(graphs.forward) == 1
    octavo.step(layer)
    assert cold(layer) == [""]


# -- fused runs --------------------------------------------------------------------------------------------------------


def test_a_block_fuses_from_its_second_step_on():
    model, x = block(), torch.randn(M, K)
    first = model.explain(x.clone().requires_grad_())
    assert not first.fired
    said = {r.rule: r.sentence for r in first.refused}
    assert "first step" in said["norm-linear"] and "first step" in said["mlp"]
    model(x).mean().backward()
    octavo.step(model)
    assert {"mlp", "norm-linear"} <= set(model.explain(x.clone().requires_grad_()).fired)


def test_a_required_fusion_waits_for_the_first_step():
    x = torch.randn(M, K)
    model = octavo.Sequential(ops.RMSNorm(K), octavo.Linear(K, N, recipe="fp8-delayed"), require="norm-linear")
    model(x).mean().backward()
    octavo.step(model)
    assert model.explain(x).fired == ("norm-linear",)


def test_layers_that_know_and_layers_that_do_not_run_together():
    torch.manual_seed(0)
    layers = [ops.RMSNorm(K), octavo.Linear(K, K, recipe="fp8-delayed"), ops.GELU(),
              octavo.Linear(K, K, recipe="fp8-delayed")]  # fmt: skip
    model = octavo.Sequential(*layers)
    other = octavo.Sequential(*copy.deepcopy(layers), rules=None)
    for subject in (model, other):
        results(subject[1], *[spiky(M, K, seed=s) for s in (1, 2)])
        octavo.step(subject[1])
    x, dy = spiky(M, K, seed=3), spiky(M, K, seed=4) * 1e-5
    found = model.explain(x.clone().requires_grad_())
    assert set(found.fired) == {"norm-linear", "activation-bias"}
    for _ in range(3):
        assert_equal(results(model, x, dy), results(other, x, dy))
        octavo.step(model), octavo.step(other)
    assert "mlp" in model.explain(x.clone().requires_grad_()).fired


# -- graphs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "number", "dynamic"), [("linear", 10, False), ("linear", 2, True), ("grouped", 2, False), ("mlp", 2, True)]
)
def test_compiled_layers_share_two_graphs(kind, number, dynamic):
    """One for the first step and one for all later ones, however many layers there are."""
    torch._dynamo.reset()
    build = {
        "linear": lambda: make("fp8-delayed", K, K),
        "grouped": lambda: octavo.GroupedLinear(G, K, K, recipe="fp8-delayed"),
        "mlp": block,
    }[kind]
    extra_inputs = (SPLITS,) if kind == "grouped" else ()
    model, graphs = nn.ModuleList([build() for _ in range(number)]), []
    twin = copy.deepcopy(model)

    def backend(module, inputs):
        graphs.append(module)
        return module.forward

    for layer in model:
        layer.compile(fullgraph=True, dynamic=dynamic, backend=backend)
    for i in range(3):
        x = spiky(M, K, seed=i) * 10.0**-i
        for ours, theirs in zip(model, twin, strict=True):
            assert_equal(results(ours, x, x, *extra_inputs), results(theirs, x, x, *extra_inputs))
        octavo.step(model), octavo.step(twin)
        assert len(graphs) == (1 if i == 0 else 2)
    assert not any(cold(model))


def test_a_compiled_model_that_is_trained_evaluated_and_checkpointed():
    torch._dynamo.reset()
    model, graphs = nn.Sequential(make("fp8-delayed", K, K), nn.GELU(), make("fp8-delayed", K, N, seed=3)), Graphs()
    twin = copy.deepcopy(model)

    def checkpointed(subject, x):
        return torch.utils.checkpoint.checkpoint(subject, x, use_reentrant=False)

    call = compiled(lambda x: checkpointed(model, x), graphs)
    for i in range(3):
        found = []
        for subject, forward in ((model, call), (twin, twin)):
            x = (spiky(M, K, seed=i) * 1e-3).requires_grad_()
            y = forward(x)
            y.mean().backward()
            found.append([y.detach(), x.grad, *[p.grad for p in subject.parameters()]])
            subject.zero_grad()
            octavo.step(subject)
        assert_equal(*found)
    assert cold(model) == cold(twin) == ["", ""]
    for name, value in octavo.state_dict(model).items():
        assert_same(value, octavo.state_dict(twin)[name], name)


# -- codes of the weight -----------------------------------------------------------------------------------------------


def test_a_weight_cache_of_a_cold_layer_is_scaled_by_the_weight():
    layer, current, (x, dy) = make("fp8-delayed"), make("fp8-current"), batch()
    with torch.no_grad():
        layer.weight.mul_(1e-4), current.weight.mul_(1e-4)
    for flag in (True, False, False):
        assert_result(run(layer, x, dy, is_first_microbatch=flag), run(current, x, dy, is_first_microbatch=flag))
    octavo.step(layer), octavo.refresh_weights(layer)
    assert cold(layer) == [""]
    assert_same(run(layer, x, dy, is_first_microbatch=False).y, run(current, x, dy, is_first_microbatch=False).y)


def test_held_codes_of_a_cold_layer():
    layer, current, (x, dy) = make("fp8-delayed"), make("fp8-current"), batch()
    octavo.quantize_weights(layer), octavo.quantize_weights(current)
    for _ in range(3):
        assert_result(run(layer, x, dy), run(current, x, dy))
        octavo.step(layer)
    assert cold(layer) == ["w"]  # nothing casts it
    assert "measured" not in layer.LAYER.config(key_of(layer, x)).key


def key_of(layer, x):
    """The config of a call with x."""
    return layer.op_stage(x, (), {}, as_nodes=False).key


# -- copies and checkpoints --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), pytest.param(saved_and_loaded, id="through_torch")],
)
def test_a_copy_knows_what_its_original_knew(copied):
    layer, (x, dy) = make("fp8-delayed"), batch()
    assert cold(copied(layer)) == ["xwd"]
    run(layer, x, dy)
    octavo.step(layer)
    found = copied(layer)
    assert cold(found) == [""]
    assert_result(run(found, *batch(2)), run(layer, *batch(2)))


@pytest.mark.parametrize("ambient", [False, True])
def test_a_resumed_layer_does_not_measure(ambient):
    layer, (x, dy) = make("fp8-delayed"), batch()
    run(layer, x, dy)
    octavo.step(layer)
    resumed = make(None if ambient else "fp8-delayed")
    octavo.load_state_dict(resumed, octavo.state_dict(layer))
    with octavo.autocast("fp8-delayed"):
        assert_result(run(resumed, *batch(2, 0.1)), run(layer, *batch(2, 0.1)))
    assert cold(resumed) == [""]


def test_the_state_of_a_fresh_layer_brings_the_first_step_back():
    """As after the warm-ups of a capture."""
    layer, (x, dy) = make("fp8-delayed"), batch()
    fresh = octavo.state_dict(layer)
    run(layer, 1000 * x, dy)
    octavo.step(layer)
    octavo.load_state_dict(layer, fresh)
    assert cold(layer) == ["xwd"]
    assert_result(run(layer, x, dy), run(make("fp8-current"), x, dy))
    octavo.step(layer)
    assert cold(layer) == [""]


def test_a_layer_from_a_file_with_letters_measures_the_same_operands():
    layer = make("fp8-delayed")
    layer(torch.randn(M, K)).sum().backward()
    want = layer._scaling.uncalibrated
    state = {**layer._scaling.__getstate__(), "uncalibrated": "xwd", "_asked": "x"}
    layer._scaling.__setstate__(state)
    assert want == layer._scaling.uncalibrated == (True, True, True)
    assert layer._scaling._asked == (True, False, False)
