"""Sequentials under torch.compile, and what else is done to whole models: bit for bit what eager mode gives, in as
many nodes as `explain` says there are runs.

Graphs run as they were traced (aot_eager), but for a sample of Inductor; most of the grid is behind the marker slow."""

import copy
import io

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import octavo
from octavo import ops
from tests.support.fusion_cases import CASES, data
from tests.support.fusion_cases import build as build_case
from tests.support.linear_oracle import Memory, assert_same, spiky
from tests.support.recipe_traits import is_stochastic
from tests.support.sequentials import (
    FFN,
    FUSED_AT_ONCE,
    SHIPPED,
    Graphs,
    H,
    M,
    assert_near,
    batch,
    every,
    fill,
    mlp,
    recipes,
    reference_step,
    residual,
    sample,
    unfused,
)
from tests.support.steps import assert_equal, assert_state, compiled, step, update

MODELS = {"mlp": mlp, "residual": residual}
models = pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)


def runs(model, *inputs):
    """How many `explain` says there are."""
    given = [t.clone().requires_grad_() if t.is_floating_point() else t for t in inputs]
    return len(model.explain(*given).runs)


# -- nodes, and the same bits ------------------------------------------------------------------------------------------


@every
@models
def test_compiled_is_eager_in_as_many_nodes_as_there_are_runs(recipe, build):
    model, graphs = build(recipe), Graphs()
    twin, call = copy.deepcopy(model), compiled(model, graphs)
    for seed in range(3):
        x, dy = batch(seed=seed)
        assert_equal(step(model, x, dy, call=call), step(twin, x, dy), f"step {seed}")
        update(model), update(twin)
    assert_state(model, twin)
    assert counters["stats"]["unique_graphs"] == 1
    assert graphs.runs() == (runs(twin, x), runs(twin, x))


def compiled_cases():
    """Every fusion in one recipe; in all of them behind the marker."""
    for name in CASES:
        for recipe in SHIPPED:
            marks = () if recipe == "fp8-current" else (pytest.mark.slow,)
            yield pytest.param(name, FUSED_AT_ONCE.get(recipe, recipe), id=f"{name}-{recipe}", marks=marks)


@pytest.mark.parametrize(("name", "recipe"), compiled_cases())
def test_every_fusion_compiled_is_eager(name, recipe):
    model, graphs = build_case(name, recipe), Graphs()
    twin, call = copy.deepcopy(model), compiled(model, graphs)
    inputs, dys = data(twin)
    assert_equal(step(model, inputs, dys, call=call), step(twin, inputs, dys))
    assert graphs.runs()[0] == runs(twin, *inputs)


def test_without_rules_every_operation_has_its_node_or_is_in_a_run():
    model, graphs = unfused(mlp("fp8-current")), Graphs()
    twin, (x, dy) = copy.deepcopy(model), batch()
    assert_equal(step(model, x, dy, call=compiled(model, graphs)), step(twin, x, dy))
    assert graphs.runs()[0] == runs(twin, x)


@pytest.mark.parametrize("recipe", ["fp8-current", "nvfp4"])
def test_half_precision_compiled(recipe):
    model = mlp(recipe, dtype=torch.bfloat16, bias=True)
    twin, (x, dy) = copy.deepcopy(model), batch(dtype=torch.bfloat16)
    assert_equal(step(model, x, dy, call=compiled(model)), step(twin, x, dy))


def test_views_are_no_nodes_of_ours():
    model, graphs = octavo.Sequential(ops.Identity(), ops.Reshape((-1, 8)), ops.MakeExtraOutput()), Graphs()
    x, dys = spiky(4, 16), [spiky(8, 8, seed=i) for i in (1, 2)]
    found = step(model, x, dys, call=compiled(model, graphs))
    assert_equal(found, [x.view(8, 8), x.view(8, 8), (dys[0] + dys[1]).view(4, 16)])
    assert graphs.runs() == (0, 0) == (runs(model, x), 0)


@pytest.mark.parametrize(
    "build",
    [ops.GELU, lambda: ops.RMSNorm(H), lambda: octavo.Linear(H, H, recipe="fp8-current"), lambda: ops.Bias(H)],
    ids=["gelu", "norm", "linear", "bias"],
)
def test_an_operation_alone_is_one_node_each_way(build):
    model, graphs = fill(octavo.Sequential(build())), Graphs()
    twin, (x, dy) = copy.deepcopy(model), batch()
    assert_equal(step(model, x, dy, call=compiled(model, graphs)), step(twin, x, dy))
    assert graphs.runs() == (1, 1) == (runs(twin, x), 1)


def test_ordinary_modules_between_runs_are_in_the_same_graph():
    parts = list(mlp("fp8-current"))
    model, graphs = octavo.Sequential(*parts[:2], nn.Softplus(), *parts[2:], nn.Tanh()), Graphs()
    twin, (x, dy) = copy.deepcopy(model), batch()
    assert_equal(step(model, x, dy, call=compiled(model, graphs)), step(twin, x, dy))
    assert counters["stats"]["unique_graphs"] == 1
    assert graphs.runs()[0] == runs(twin, x) >= 2


@sample
def test_compiled_without_gradients(recipe):
    model, x = residual(recipe), batch()[0]
    want = copy.deepcopy(model)(x).detach()
    with torch.no_grad():
        assert_same(compiled(model)(x), want)


@sample
def test_one_graph_serves_many_batch_sizes(recipe):
    model = residual(recipe)
    twin, call = copy.deepcopy(model), compiled(model, dynamic=True)
    for seed, m in enumerate((4, 7, 33, 64, 5)):
        x, dy = batch(m, seed=seed)
        assert_equal(step(model, x, dy, call=call), step(twin, x, dy), f"{m} tokens")
    assert counters["stats"]["unique_graphs"] == 1


def test_equal_blocks_share_a_graph():
    blocks = [mlp("fp8-current") for _ in range(8)]
    call = compiled(lambda block, x: block(x))
    for block in blocks:
        call(block, batch()[0]).sum().backward()
    assert counters["stats"]["unique_graphs"] == 1


def test_a_frozen_weight_compiled():
    model = residual("fp8-current")
    model[2].weight.requires_grad_(False)
    twin, (x, dy) = copy.deepcopy(model), batch()
    for frozen in ((), (0,)):
        torch._dynamo.reset()
        found = step(model, x, dy, call=compiled(model), frozen=frozen)
        assert_equal(found, step(twin, x, dy, frozen=frozen))


@pytest.mark.parametrize("recipe", ["fp8-current"])
def test_inductor_gives_the_bits_of_eager(recipe):
    model = mlp(recipe)
    twin, call = copy.deepcopy(model), compiled(model, "inductor")
    for seed in range(2):
        x, dy = batch(seed=seed)
        assert_equal(step(model, x, dy, call=call), step(twin, x, dy), f"step {seed}")
        update(model), update(twin)


@pytest.mark.slow
@every
@models
def test_inductor_for_every_recipe(recipe, build):
    model = build(recipe)
    twin, call = copy.deepcopy(model), compiled(model, "inductor")
    for seed in range(2):
        x, dy = batch(seed=seed)
        assert_equal(step(model, x, dy, call=call), step(twin, x, dy), f"step {seed}")


@pytest.mark.parametrize("overwrite", [False, True], ids=["add", "overwrite"])
def test_compiled_main_grad(overwrite):
    model, twin = (mlp("fp8-current", linear={"fuse_wgrad_accumulation": True}) for _ in range(2))
    for m in (model, twin):
        for op in (m[1], m[3]):
            op.weight.main_grad = torch.full_like(op.weight, float("nan") if overwrite else 0.5)
            op.weight.overwrite_main_grad = overwrite
            op.weight.grad_added_to_main_grad = False
    call = compiled(model)
    for seed in range(2):
        x, dy = batch(seed=seed)
        assert_equal(step(model, x, dy, call=call), step(twin, x, dy))
        for i in (1, 3):
            assert_same(model[i].weight.main_grad, twin[i].weight.main_grad, f"{i}")
            assert model[i].weight.grad_added_to_main_grad is True


def test_compiled_deferred_weight_gradients():
    model, twin = mlp("fp8-current", linear={"delay_wgrad_compute": True}), mlp("fp8-current")
    call = compiled(model)
    for seed in range(2):
        x, dy = batch(seed=seed)
        found, want = step(model, x, dy, call=call), step(twin, x, dy)
        assert found[3] is None and found[4] is None
        for op in (model[1], model[3]):
            op.backward_dw()
        assert_equal([*found[:3], model[1].weight.grad, model[3].weight.grad], want)


@pytest.mark.parametrize("recipe", ["fp8-current", "mxfp8"])
def test_weights_held_as_codes(recipe):
    model, (x, dy) = residual(recipe), batch()
    octavo.quantize_weights(model, keep_columns=True)
    for p in (model[2].weight, model[4].weight):
        p.requires_grad_(False)
    twin = copy.deepcopy(model)
    want = step(residual(recipe), x, dy)
    found = step(model, x, dy, call=compiled(model))
    assert_equal(found, step(twin, x, dy))
    assert_equal(found[:3], want[:3])


def test_grouped_layers_in_a_sequential_compiled():
    layers = [octavo.GroupedLinear(3, *sizes, recipe="fp8-current") for sizes in ((H, 2 * FFN), (FFN, H))]
    model = fill(octavo.Sequential(layers[0], ops.ScaledSwiGLU(), layers[1]))
    twin, call, probs = copy.deepcopy(model), compiled(model), torch.rand(M)
    for seed, splits in enumerate(([10, 0, 14], [3, 20, 1], [0, 0, 0])):
        (x, dy), sizes = batch(seed=seed), torch.tensor(splits)
        inputs = (x, sizes, probs, sizes.clone())
        assert_equal(step(model, inputs, dy, call=call), step(twin, inputs, dy), str(splits))
    assert counters["stats"]["unique_graphs"] == 1


# -- checkpoints of activations, second backwards, offloading ----------------------------------------------------------


@sample
@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
def test_recomputed_in_backward_is_the_same(recipe, reentrant):
    model = residual(recipe)
    twin, (x, dy) = copy.deepcopy(model), batch()
    for seed in range(2):
        found = step(model, x + seed, dy, call=lambda t: checkpoint(model, t, use_reentrant=reentrant))
        assert_equal(found, step(twin, x + seed, dy), f"step {seed}")
        octavo.step(model), octavo.step(twin)
    assert_state(model, twin)


def test_dropout_recomputed_in_backward_drops_the_same():
    parts = list(mlp("fp8-current"))
    model = octavo.Sequential(*parts[:3], ops.Dropout(0.5), parts[3])
    twin, (x, dy) = copy.deepcopy(model), batch()
    torch.manual_seed(3)
    found = step(model, x, dy, call=lambda t: checkpoint(model, t, use_reentrant=False))
    torch.manual_seed(3)
    assert_equal(found, step(twin, x, dy))


def test_recomputed_and_compiled():
    model = residual("fp8-current")
    twin, (x, dy) = copy.deepcopy(model), batch()
    call = compiled(lambda t: checkpoint(model, t, use_reentrant=False))
    assert_equal(step(model, x, dy, call=call), step(twin, x, dy))


@every
def test_a_second_backward_gives_the_same(recipe):
    """Nothing that backward needs is gone after the first. What is drawn by a counter is drawn anew."""
    model, (x, dy) = residual(recipe), batch()
    leaf = x.requires_grad_()
    y = model(leaf)
    leaves = [leaf, *model.parameters()]
    first, second = (torch.autograd.grad(y, leaves, dy, retain_graph=True) for _ in range(2))
    if is_stochastic(recipe):
        for a, b in zip(first, second, strict=True):
            assert a.shape == b.shape and b.isfinite().all()
    else:
        assert_equal(first, second)
    with pytest.raises(RuntimeError, match=r"second time|freed"):
        torch.autograd.grad(y, leaves, dy), torch.autograd.grad(y, leaves, dy)


def test_saved_tensors_may_be_kept_elsewhere():
    model = residual("fp8-current")
    twin, (x, dy) = copy.deepcopy(model), batch()
    with torch.autograd.graph.save_on_cpu():
        found = step(model, x, dy)
    assert_equal(found, step(twin, x, dy))


@recipes(["bf16", "fp8-delayed", "fp8-current", "mxfp8"])
def test_two_microbatches_in_flight(recipe):
    model = residual(recipe)
    twin, pairs = copy.deepcopy(model), [batch(seed=i) for i in range(2)]
    model.zero_grad()
    leaves = [x.clone().requires_grad_() for x, _ in pairs]
    outputs = [model(leaf) for leaf in leaves]
    for y, (_, dy) in zip(outputs, pairs, strict=True):
        y.backward(dy)
    wants = [step(twin, x, dy) for x, dy in pairs]
    for y, leaf, want in zip(outputs, leaves, wants, strict=True):
        assert_equal([y.detach(), leaf.grad], want[:2])
    for i, p in enumerate(model.parameters()):
        assert_same(p.grad, wants[0][2 + i] + wants[1][2 + i], str(i))


# -- delayed scaling ---------------------------------------------------------------------------------------------------


def test_scales_follow_the_amaxes_of_three_steps():
    recipe = "fp8-delayed(margin=2,history=8)"
    linear = octavo.Linear(H, H, bias=False, recipe=recipe)
    model, memory = fill(octavo.Sequential(ops.ConstantScale(2.0), linear, ops.ConstantScale(0.5))), Memory(recipe)
    for i in range(3):
        x, dy = batch(seed=i)
        step(model, x * 2.0**i, dy)
        memory.observe(x=2 * x * 2.0**i, w=linear.weight, dy=0.5 * dy)
        octavo.step(model), memory.step()
        memory.assert_state(octavo.state_dict(model), "1.")


@pytest.mark.parametrize("settings", ["", "(margin=2,history=4)", "(cold_start='one')"])
def test_three_delayed_steps_are_those_of_layers_by_themselves(settings):
    model = residual(f"fp8-delayed{settings}")
    inner = nn.Sequential(*copy.deepcopy(list(model)[1:-1]))
    for i in range(3):
        x, dy = batch(seed=i)
        found = step(model, x * 2.0**i, dy)
        assert_equal(found, step(inner, x * 2.0**i, dy, call=lambda t: t + inner(t)), f"step {i}")
        update(model), update(inner)
    own, want = octavo.state_dict(model), octavo.state_dict(inner)
    for index, other in (("2", "1"), ("4", "3")):
        keys = [key for key in own if key.startswith(f"{index}.")]
        assert keys
        for key in keys:
            assert_same(own[key], want[key.replace(f"{index}.", f"{other}.", 1)], key)


def test_nothing_is_observed_in_eval_or_without_gradients():
    model, x = mlp("fp8-delayed"), batch()[0]
    before = copy.deepcopy(octavo.state_dict(model))
    with torch.no_grad():
        model(x)
    model.eval()(x)
    octavo.step(model)
    for key, value in octavo.state_dict(model).items():
        assert_same(value, before[key], key)


# -- dtypes and torch.autocast -----------------------------------------------------------------------------------------


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("start", DTYPES, ids=str)
@pytest.mark.parametrize("end", DTYPES, ids=str)
def test_a_cast_model_has_gradients_of_its_new_dtype_and_the_inputs_keep_theirs(start, end):
    model = mlp("fp8-current", dtype=start, bias=True)
    x, dy = batch(dtype=start)
    step(model, x, dy)
    model.to(end)
    found = step(model, x, dy)
    assert found[0].dtype == found[1].dtype == start
    assert {t.dtype for t in found[2:]} == {end}
    assert_equal(found, step(unfused(model), x, dy))


@sample
@pytest.mark.parametrize("ours_first", [True, False], ids=["ours outside", "torch's outside"])
def test_autocasts_nest_either_way(recipe, ours_first):
    model = mlp(None, bias=True)
    plain = nn.Sequential(*copy.deepcopy(list(model)))
    (x, dy), theirs = batch(), torch.autocast("cpu", torch.bfloat16)
    first, second = (octavo.autocast(recipe), theirs) if ours_first else (theirs, octavo.autocast(recipe))

    def under(m):
        def call(t):
            with first, second:
                return m(t)

        return step(m, x, dy.bfloat16(), call=call)

    found = under(model)
    assert found[0].dtype == torch.bfloat16
    assert found[1].dtype == torch.float32
    assert_equal(found, under(plain))


def test_a_graph_of_a_run_follows_both_autocasts():
    model = mlp(None)
    twin, (x, dy) = copy.deepcopy(model), batch()

    def under(m):
        def call(t):
            with octavo.autocast("fp8-current"), torch.autocast("cpu", torch.bfloat16):
                return m(t)

        return call

    assert_equal(
        step(model, x, dy.bfloat16(), call=compiled(under(model))), step(twin, x, dy.bfloat16(), call=under(twin))
    )


# -- training and inference --------------------------------------------------------------------------------------------


@recipes(["fp8-current", "fp8-delayed"])
@pytest.mark.parametrize("train_first", [True, False], ids=["train first", "infer first"])
@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
def test_training_and_inference_in_turn(recipe, train_first, is_compiled):
    model, twin = residual(recipe), residual(recipe)
    call = compiled(model) if is_compiled else model
    for i in range(2):
        x, dy = batch(seed=i)
        for training in (train_first, not train_first):
            if training:
                assert_equal(step(model, x, dy, call=call), step(twin, x, dy), f"step {i}")
                update(model), update(twin)
            else:
                with torch.inference_mode():
                    assert_same(call(x), twin(x), f"inference {i}")


@sample
def test_a_model_made_in_inference_mode_infers(recipe):
    with torch.inference_mode():
        model = residual(recipe)
        y = model(batch()[0])
    assert_same(y, residual(recipe)(batch()[0]).detach())


# -- checkpoints -------------------------------------------------------------------------------------------------------


@every
def test_a_run_resumed_from_a_file_is_bitwise_the_same(recipe):
    def steps(model, start):
        found = []
        for i in range(start, start + 2):
            found += step(model, *batch(seed=i))
            update(model)
        return found

    model = residual(recipe)
    steps(model, 0)
    file = io.BytesIO()
    torch.save({"weights": model.state_dict(), "recipe": octavo.state_dict(model)}, file)
    want = steps(model, 2)
    file.seek(0)
    kept = torch.load(file, weights_only=True)
    resumed = fill(residual(recipe), seed=70)
    resumed.load_state_dict(kept["weights"], strict=True)
    octavo.load_state_dict(resumed, kept["recipe"])
    assert_equal(steps(resumed, 2), want)
    assert_state(resumed, model)


# -- from the meta device ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("called_before", [False, True], ids=["", "called before"])
@sample
def test_a_model_from_the_meta_device_trains(recipe, called_before):
    with torch.device("meta"):
        model = octavo.Sequential(
            ops.RMSNorm(H), octavo.Linear(H, 2 * FFN, recipe=recipe), ops.SwiGLU(), octavo.Linear(FFN, H, recipe=recipe)
        )
    dead = list(model.parameters())
    assert all(p.is_meta for p in dead)
    if called_before:
        assert model(torch.empty(M, H, device="meta")).shape == (M, H)
    model.to_empty(device="cpu")
    for op in model:
        if hasattr(op, "reset_parameters"):
            op.reset_parameters()
    fill(model)
    twin = mlp(recipe, bias=True)
    twin.load_state_dict(model.state_dict())
    x, dy = batch()
    found = step(model, x, dy)
    assert all(p.grad is not None and not p.grad.is_meta for p in model.parameters())
    assert all(p.grad is None for p in dead if p.is_meta)
    if not is_stochastic(recipe):  # whose counter starts elsewhere
        assert_equal(found, step(twin, x, dy))
    else:
        assert_near(found, reference_step(model, x, dy), recipe)
