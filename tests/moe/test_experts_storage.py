"""octavo.moe.Experts(fc1_output_storage="fp8"): the bits of y, the error of gradients, the memory it keeps, graphs."""

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import octavo
from octavo import moe
from tests.support.linear_oracle import assert_same
from tests.support.recipe_traits import QUANTIZED, by_bits
from tests.support.routed_experts import NAMES, D, E, K, N, T, batch, experts, step
from tests.support.sequentials import Graphs, recipes
from tests.support.steps import assert_equal, assert_state, compiled, relative_error

# relative error, root of the mean square, of gradients against those from an unquantized output of fc1
NEAR = by_bits(unquantized=0.0, eight=0.07, four=0.15)


def stored(recipe, **settings):
    return experts(recipe, fc1_output_storage="fp8", **settings)


def assert_near(found, want, bound):
    """The same bits of y, and gradients near those of an unquantized output of fc1, but others."""
    assert_same(found[0], want[0])
    for name, a, b in zip(NAMES[1:], found[1:], want[1:], strict=True):
        assert relative_error(a, b) < bound, f"{name}: {relative_error(a, b):.3g}"
    assert relative_error(found[2], want[2]) > 1e-3  # the probabilities' gradient is a sum over decoded values


@recipes(QUANTIZED)
def test_y_has_the_same_bits_and_gradients_are_near(recipe):
    model, twin, data = stored(recipe), experts(recipe), batch()
    assert model.explain(*data[:3]).fired == ("experts",)
    assert_near(step(model, *data), step(twin, *data), NEAR[recipe.split("(")[0]])


@pytest.mark.parametrize("activation", ["gelu", "clamped-swiglu", "situglu", "srelu"])
def test_other_activations(activation):
    model, twin = (make("fp8-block", activation=activation) for make in (stored, experts))
    assert_near(step(model, *batch()), step(twin, *batch()), 0.1)  # srelu squares the error


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bits(dtype):
    model, twin = (make("fp8-block", dtype=dtype) for make in (stored, experts))
    data = batch(dtype=dtype)
    assert_near(step(model, *data), step(twin, *data), NEAR["fp8-block"])


@pytest.mark.parametrize("case", ["one expert gets all", "dropped assignments", "all dropped", "no tokens"])
@recipes(["fp8-delayed", "fp8-block", "nvfp4"])
def test_odd_routings(recipe, case):
    model, twin = stored(recipe), experts(recipe)
    x, indices, probs, dy = batch(tokens=0 if case == "no tokens" else T)
    if case == "one expert gets all":
        indices = torch.full_like(indices, 3)
    if case == "dropped assignments":
        indices[::3, 0] = -1
    if case == "all dropped":
        indices = torch.full_like(indices, -1)
    found, want = step(model, x, indices, probs, dy), step(twin, x, indices, probs, dy)
    assert_same(found[0], want[0])
    for a, b in zip(found, want, strict=True):
        assert a.isfinite().all()
        assert relative_error(a, b) < 0.15 if b.any() else not a.any()


@recipes(["fp8-delayed", "fp8-current", "fp8-block", "mxfp8"])
def test_no_result_depends_on_rows_after_the_last_expert(recipe, monkeypatch):
    x, indices, probs, dy = batch()
    indices[::3] = -1
    steps, empty = [], torch.empty
    for value in (0.0, float("nan"), 1e30):

        def filled(*shape, value=value, **settings):
            made = empty(*shape, **settings)
            return made.fill_(value) if made.dtype == torch.float32 else made

        monkeypatch.setattr(torch, "empty", filled)
        steps.append(step(stored(recipe), x, indices, probs, dy))
    assert_equal(steps[1], steps[0], "NaN")
    assert_equal(steps[2], steps[0], "1e30")
    assert all(t.isfinite().all() for t in steps[0])


@pytest.mark.usefixtures("fresh_compiler")
@recipes(QUANTIZED)
def test_compiled_has_the_bits_of_eager(recipe):
    model, twin, graphs = stored(recipe), stored(recipe), Graphs()
    call = compiled(lambda *data: model(*data), backend=graphs)
    for seed in range(3):
        data = batch(seed)
        assert_equal(step(model, *data, call=call), step(twin, *data), f"step {seed}")
        octavo.step(model), octavo.step(twin)
    assert graphs.runs()[1] == 1
    assert_state(model, twin)


@pytest.mark.usefixtures("fresh_compiler")
def test_one_graph_for_several_numbers_of_tokens():
    model, twin, graphs = stored("fp8-block"), stored("fp8-block"), Graphs()
    call = compiled(lambda *data: model(*data), backend=graphs, dynamic=True)
    for tokens in (T, 24, 57):
        data = batch(tokens=tokens)
        assert_equal(step(model, *data, call=call), step(twin, *data), f"{tokens} tokens")
    assert graphs.runs()[1] == 1


@recipes(["fp8-delayed", "fp8-block"])
def test_main_grad_and_cached_weights(recipe):
    model, twin = stored(recipe, fuse_wgrad_accumulation=True), stored(recipe)
    for p in model.parameters():
        p.main_grad = torch.zeros_like(p)
    found, want = step(model, *batch(), is_first_microbatch=True), step(twin, *batch())
    assert_equal(found[:3], want[:3])
    assert_equal([p.main_grad for p in model.parameters()], want[3:])


@recipes(["fp8-block", "nvfp4"])
def test_a_checkpoint_has_the_same_gradients(recipe):
    model, twin = stored(recipe), stored(recipe)
    found = step(model, *batch(), call=lambda *data: checkpoint(model, *data, use_reentrant=False))
    assert_equal(found, step(twin, *batch()))


def test_saved_tensors_that_a_hook_brings_back_in_other_strides():
    model, twin, data = stored("fp8-block"), stored("fp8-block"), batch()

    def turned(t):
        return t.T.clone(memory_format=torch.contiguous_format).T if t.dim() == 2 else t.clone()

    with torch.autograd.graph.saved_tensors_hooks(turned, lambda t: t):
        found = step(model, *data)
    assert_equal(found, step(twin, *data))


def test_frozen_experts_still_give_gradients_to_tokens_and_probabilities():
    model, twin = stored("fp8-block"), stored("fp8-block")
    model.requires_grad_(False)
    assert_equal(step(model, *batch())[:3], step(twin, *batch())[:3])


def test_without_gradients_nothing_is_kept():
    model, (x, indices, probs, _) = stored("fp8-block"), batch()
    with torch.no_grad():
        assert model.explain(x, indices, probs).saved_tensors[2].activations == 0
        assert_same(model(x, indices, probs), experts("fp8-block")(x, indices, probs))


# -- memory ------------------------------------------------------------------------------------------------------------


def kept(storage):
    """The ledger of a call, and bytes that autograd saves, weights apart."""
    model = experts("fp8-block", keep_weight_codes=False, dtype=torch.bfloat16, fc1_output_storage=storage)
    x, indices, probs, _ = batch(dtype=torch.bfloat16)
    x, probs = x.requires_grad_(), probs.requires_grad_()
    weights, found = {p.data_ptr() for p in model.parameters()}, {}

    def pack(t):
        found[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    saved_tensors = model.explain(x, indices, probs).saved_tensors
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(x, indices, probs)
    return saved_tensors, sum(n for at, n in found.items() if at not in weights)


def test_the_ledger_and_autograd_count_the_codes():
    (plain, before), (coded, after) = kept("unquantized"), kept("fp8")
    rows, wide = T * K, 2 * N
    assert [e.op for e in coded] == ["Permute", "GroupedLinear", "SwiGLU", "GroupedLinear", "Unpermute"]
    assert (plain[2].activations, coded[2].activations) == (2 * rows * wide, rows * wide + 4 * rows * -(-wide // 128))
    assert before - after == plain[2].activations - coded[2].activations
    others = [(a, b) for i, (a, b) in enumerate(zip(plain, coded, strict=True)) if i != 2]
    assert all(a == b for a, b in others)


# -- where it has no effect --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["a bias", "no rules", "bf16", "no scales yet"])
def test_without_the_rule_the_output_of_fc1_is_kept_as_it_is(case):
    recipe = {"bf16": "bf16", "no scales yet": "fp8-delayed"}.get(case, "fp8-block")
    settings = {"bias": case == "a bias", "rules": None if case == "no rules" else ()}
    model, twin = stored(recipe, **settings), experts(recipe, **settings)
    data = batch()
    explanation, want = model.explain(*data[:3]), twin.explain(*data[:3])
    assert "experts" not in explanation.fired
    assert explanation.saved_tensors == want.saved_tensors
    assert_equal(step(model, *data), step(twin, *data))
    if case != "no rules":
        (why,) = [r.sentence for r in explanation.refused if r.rule == "experts"]
        (plain,) = [r.sentence for r in want.refused if r.rule == "experts"]
        assert why == f"{plain}; the output of fc1 is kept unquantized"


def test_delayed_scaling_stores_codes_from_its_first_fused_step_on():
    model = stored("fp8-delayed")
    for seed in range(2):
        explanation = model.explain(*batch(seed)[:3])
        assert (explanation.saved_tensors[2].activations == T * K * (2 * N + 4)) == (seed > 0)
        step(model, *batch(seed))
        octavo.step(model)


def test_a_copy_keeps_the_setting():
    model = stored("fp8-block")
    assert_equal(step(copy.deepcopy(model), *batch()), step(model, *batch()))
    assert copy.deepcopy(model).fc1_output_storage == "fp8"
    assert model.state_dict().keys() == experts("fp8-block").state_dict().keys()


@pytest.mark.parametrize("wrong", ["bf16", "FP8", "e4m3", None, True, torch.bfloat16])
def test_another_storage_is_refused(wrong):
    with pytest.raises(octavo.errors.UnsupportedConfig, match="fc1_output_storage must be one of 'unquantized', 'fp8'"):
        moe.Experts(E, D, N, fc1_output_storage=wrong)
