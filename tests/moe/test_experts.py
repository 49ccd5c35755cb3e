"""octavo.moe.Experts: y and gradients against the operations one by one and against float64, memory, graphs."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import octavo
from octavo import moe
from octavo.errors import UnsupportedDtype
from tests.support.experts import same_seed
from tests.support.linear_oracle import assert_same, spiky
from tests.support.recipe_traits import QUANTIZED, fused_error
from tests.support.routed_experts import NAMES, D, E, K, N, T, batch, experts, step
from tests.support.sequentials import FUSED_AT_ONCE, Graphs, fill, recipes
from tests.support.steps import assert_equal, assert_state, compiled, relative_error

ONE = FUSED_AT_ONCE["fp8-delayed"]


def explained(model, data):
    """The report on a call that wants the gradients that `step` asks for."""
    x, indices, probs = data[:3]
    return model.explain(x.clone().requires_grad_(), indices, probs.clone().requires_grad_())


def in_float64(model, x, indices, probs, dy):
    """SwiGLU experts by a loop, unquantized."""
    w1, w2 = (p.detach().double().requires_grad_() for p in (model.fc1.weight, model.fc2.weight))
    x, probs = x.double().requires_grad_(), probs.double().requires_grad_()
    y = torch.zeros_like(x)
    for e in range(E):
        tokens, assignments = torch.where(indices == e)
        a, b = (x[tokens] @ w1[e].T).chunk(2, -1)
        y = y.index_add(0, tokens, probs[tokens, assignments, None] * ((F.silu(a) * b) @ w2[e].T))
    y.backward(dy.double())
    return [y.detach(), x.grad, probs.grad, w1.grad, w2.grad]


@recipes(QUANTIZED)
def test_fused_y_has_the_bits_of_the_operations_and_gradients_are_near(recipe):
    model, twin = experts(recipe), experts(recipe, rules=None)
    data = batch()
    assert explained(model, data).fired == ("experts",)
    found, want = step(model, *data), step(twin, *data)
    assert_same(found[0], want[0])
    for name, a, b in zip(NAMES, found, want, strict=True):
        assert relative_error(a, b) < fused_error(recipe), f"{name}: {relative_error(a, b):.3g}"


@recipes(["bf16", "fp8-current", "fp8-block", "mxfp8"])
def test_against_float64(recipe):
    model, data = experts(recipe), batch()
    for name, a, b in zip(NAMES, step(model, *data), in_float64(model, *data), strict=True):
        assert relative_error(a, b) < (1e-5 if recipe == "bf16" else 0.16), f"{name}: {relative_error(a, b):.3g}"


@pytest.mark.parametrize(
    "case", ["one expert gets all", "dropped assignments", "all dropped", "one assignment", "no tokens"]
)
@recipes(["fp8-delayed", "fp8-block", "nvfp4"])
def test_odd_routings(recipe, case):
    model, twin = experts(recipe), experts(recipe, rules=None)
    x, indices, probs, dy = batch(
        assignments=1 if case == "one assignment" else K, tokens=0 if case == "no tokens" else T
    )
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
        if b.any():
            assert relative_error(a, b) < fused_error(recipe)
        else:
            assert not a.any()
    if case == "dropped assignments":
        assert not found[2][::3, 0].any()


@pytest.mark.parametrize("activation", ["gelu", "clamped-swiglu", "situglu", "srelu"])
def test_other_activations(activation):
    model, twin = experts("fp8-block", activation=activation), experts("fp8-block", activation=activation, rules=None)
    data = batch()
    assert explained(model, data).fired == ("experts",)
    found, want = step(model, *data), step(twin, *data)
    assert_same(found[0], want[0])
    assert all(relative_error(a, b) < fused_error("fp8-block") for a, b in zip(found, want, strict=True))


def test_leading_dims_are_kept():
    model, twin = experts("fp8-block"), experts("fp8-block")
    x, indices, probs, dy = batch()
    shaped = [t.view(4, T // 4, -1) for t in (x, indices, probs, dy)]
    found, want = step(model, *shaped), step(twin, x, indices, probs, dy)
    assert found[0].shape == shaped[0].shape and found[2].shape == shaped[2].shape
    assert_equal([a.reshape(b.shape) for a, b in zip(found, want, strict=True)], want)


@pytest.mark.parametrize(
    "settings", [{"keep_weight_codes": False}, {"single_grouped_weight": False}, {"bias": True}], ids=str
)
@recipes(["fp8-delayed", "fp8-block"])
def test_settings(recipe, settings):
    model, twin = experts(recipe, **settings), experts(recipe, bias=settings.get("bias", False))
    model.load_state_dict(twin.state_dict())
    data = batch()
    found, want = step(model, *data), step(twin, *data)
    assert_equal(found[:3], want[:3])
    assert ("experts" in explained(model, data).fired) == ("bias" not in settings)


def test_a_second_bias_is_refused_in_a_sentence():
    report = explained(experts("fp8-block", bias=True), batch())
    assert any(r.rule == "experts" and "bias" in r.sentence for r in report.refused)
    assert "grouped-mlp" in report.fired


def test_frozen_experts_still_give_gradients_to_tokens_and_probabilities():
    model, twin = experts("fp8-block"), experts("fp8-block")
    model.requires_grad_(False)
    data = batch()
    found, want = step(model, *data), step(twin, *data)
    assert_equal(found[:3], want[:3])
    assert found[3] is found[4] is None


def test_x_that_wants_no_gradient():
    model, twin = experts("fp8-block"), experts("fp8-block")
    x, indices, probs, dy = batch()
    model(x, indices, probs).backward(dy)
    want = step(twin, x, indices, probs, dy)
    assert_equal([p.grad for p in model.parameters()], want[3:])


@recipes(["fp8-delayed", "fp8-block"])
def test_main_grad_and_cached_weights(recipe):
    model, twin = experts(recipe, fuse_wgrad_accumulation=True), experts(recipe)
    for p in model.parameters():
        p.main_grad = torch.zeros_like(p)
    for i in range(2):
        data = batch(i)
        found = step(model, *data, is_first_microbatch=i == 0)
        want = step(twin, *data)
        assert_equal(found[:3], want[:3], f"microbatch {i}")
        assert_equal([p.main_grad for p in model.parameters()], want[3:]) if i == 0 else None
    assert all(p.grad is None for p in model.parameters())


@recipes(["fp8-delayed", "fp8-block"])
def test_weight_gradients_that_wait(recipe):
    model, twin = experts(recipe, delay_wgrad_compute=True), experts(recipe)
    data = batch()
    found, want = step(model, *data), step(twin, *data)
    assert_equal(found[:3], want[:3])
    assert found[3] is found[4] is None
    model.fc1.backward_dw(), model.fc2.backward_dw()
    assert_equal([p.grad for p in model.parameters()], want[3:])


def test_delayed_scaling_runs_its_first_step_one_by_one_and_then_fuses():
    model = experts("fp8-delayed")
    for seed in range(3):
        data = batch(seed)
        assert ("experts" in explained(model, data).fired) == (seed > 0)
        assert all(t.isfinite().all() for t in step(model, *data))
        octavo.step(model)


def test_experts_keep_x_and_h_and_no_codes_of_them():
    """Bytes that autograd saves, weights' codes apart: x, h, probabilities and the permutation."""
    model, (x, indices, probs, _) = experts("fp8-block", keep_weight_codes=False, dtype=torch.bfloat16), batch()
    kept = {}

    def pack(t):
        kept[t.data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(x.bfloat16().requires_grad_(), indices, probs.requires_grad_())
    weights = sum(p.numel() * 2 for p in model.parameters())
    rows = T * K
    limit = 2 * T * D + 2 * rows * 2 * N + 4 * (2 * rows + rows) + 4096
    assert sum(kept.values()) - weights <= limit


@pytest.mark.usefixtures("fresh_compiler")
@recipes(["bf16", "fp8-current", "fp8-block", "nvfp4"])
def test_compiled_with_changing_routing(recipe):
    model, twin, graphs = experts(recipe), experts(recipe), Graphs()
    call = compiled(lambda *data, **given: model(*data, **given), backend=graphs)
    for seed in range(3):
        data = batch(seed)
        assert_equal(step(model, *data, call=call), step(twin, *data), f"step {seed}")
        octavo.step(model), octavo.step(twin)
    assert graphs.runs()[1] == 1  # backward is one node
    assert_state(model, twin)


def test_a_state_dict_is_that_of_its_layers():
    model = experts("fp8-block")
    assert set(model.state_dict()) == {"fc1.weight", "fc2.weight"}
    twin = copy.deepcopy(model)
    assert_equal(step(twin, *batch()), step(model, *batch()))


def test_shapes_that_do_not_fit_are_refused():
    model, (x, indices, probs, _) = experts("fp8-block"), batch()
    with pytest.raises(ValueError, match="assignment of each token"):
        model(x, indices, probs[:, :1])
    with pytest.raises(ValueError, match="assignment of each token"):
        model(x[:-1], indices, probs)
    with pytest.raises(ValueError, match="two dims or more"):
        model(x[0], indices[0], probs[0])
    with pytest.raises(ValueError, match="K from 1 up"):
        model(x, indices[:, :0], probs[:, :0])
    for wrong in (indices.float(), indices.tolist(), indices == 0):
        with pytest.raises(TypeError, match="an index as a tensor of int32 or int64"):
            model(x, wrong, probs)
    for wrong in (probs.double(), probs.long()):
        with pytest.raises(TypeError, match="probs"):
            model(x, indices, wrong)
    with pytest.raises(ValueError, match="indices on meta"):
        model(x, indices.to("meta"), probs)
    with pytest.raises(ValueError, match="activation"):
        moe.Experts(E, D, N, activation="swish")


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_the_first_fused_step_of_delayed_scaling_is_no_worse_than_others(how):
    """Small probabilities: a history of p · dy would saturate dy."""
    model = experts("fp8-delayed")
    call = compiled(lambda *data: model(*data)) if how == "compiled" else None
    for seed in range(4):
        x, indices, probs, dy = batch(0)
        data = x, indices, torch.full_like(probs, 0.02), dy
        for name, a, b in zip(NAMES, step(model, *data, call=call), in_float64(model, *data), strict=True):
            assert relative_error(a, b) < 0.2, f"step {seed}, {name}: {relative_error(a, b):.3g}"
        octavo.step(model)
    assert explained(model, data).fired == ("experts",)


def test_a_dropped_slot_has_no_gradient_even_of_nan():
    model, twin = experts("fp8-block"), experts("fp8-block", rules=None)
    x, indices, probs, dy = batch()
    indices[3], dy[3] = -1, float("nan")
    for each in (model, twin):
        assert not step(each, x, indices, probs, dy)[2][3].any()


def test_a_bias_that_is_scaled_is_refused():
    with pytest.raises(ValueError, match="scale_bias"):
        moe.Experts(E, D, N, bias=True, scale_bias=True)


@pytest.mark.parametrize("options", [{}, {"capacity": 60}, {"capacity": 200}, {"align": 16}], ids=str)
@recipes(["fp8-delayed", "fp8-block", "nvfp4"])
def test_an_index_that_is_sorted_already(recipe, options):
    """Rows may be fewer or more than assignments, and pads take part in nothing."""
    model, twin = experts(recipe), experts(recipe, rules=None)
    x, indices, probs, dy = batch()
    permutation = moe.sort(indices, E, **options)
    assert model.explain(x, permutation, probs).fired == ("experts",)
    found, want = step(model, x, permutation, probs, dy), step(twin, x, permutation, probs, dy)
    assert_same(found[0], want[0])
    assert all(relative_error(a, b) < fused_error(recipe) for a, b in zip(found, want, strict=True))
    kept = torch.where(permutation.positions >= 0, indices, -1)
    assert_equal(found[:3], step(experts(recipe), x, kept, probs, dy)[:3])


def test_a_permutation_that_does_not_fit_is_refused():
    model, (x, indices, probs, _) = experts("fp8-block"), batch()
    with pytest.raises(ValueError, match="an index of 7"):
        model(x, moe.sort(indices, 7), probs)
    mask = torch.zeros(T, E, dtype=torch.bool).scatter_(1, indices, True)
    with pytest.raises(ValueError, match="a mask of 5"):
        model(x, moe.sort(mask, top_k=K), probs)


# -- copies, other devices, odd inputs ---------------------------------------------------------------------------------


def test_explain_names_the_rule_that_has_the_operations():
    """Not a condition that holds for the call and was changed by the rule that fired."""
    report = explained(experts("fp8-block"), batch())
    assert {r.rule for r in report.refused} == {"grouped-mlp", "activation-grouped-linear", "grouped-linear-activation"}
    assert all(r.sentence == "experts has taken one of these operations" for r in report.refused)
    assert all(r.by == "experts" for r in report.refused)


def test_experts_inside_another_sequential_are_refused_in_a_sentence():
    model = experts("fp8-block")
    for build in (lambda: octavo.Sequential(octavo.ops.RMSNorm(D), model), lambda: octavo.Sequential().append(model)):
        with pytest.raises(ValueError, match=r"indices and probs.*Call it between two Sequentials"):
            build()
    before = octavo.Sequential(octavo.ops.RMSNorm(D))
    assert model(before(batch()[0]), *batch()[1:3]).shape == (T, D)


@pytest.mark.parametrize("way", ["pickle", "torch.save", "deepcopy"])
@pytest.mark.parametrize("rules", [(), None], ids=["fused", "unfused"])
def test_a_copy_runs_as_its_original(way, rules):
    model = experts("fp8-delayed", rules=rules)
    for seed in range(2):
        step(model, *batch(seed))
        octavo.step(model)
    if way == "deepcopy":
        twin = copy.deepcopy(model)
    elif way == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        torch.save(model, file := io.BytesIO())
        twin = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    assert explained(twin, batch()) == explained(model, batch())
    assert ("experts" in explained(twin, batch()).fired) == (rules is not None)
    assert_equal(step(twin, *batch(3)), step(model, *batch(3)))
    assert_state(twin, model)


def test_rules_of_the_callers_survive_a_pickle_too():
    model = experts("fp8-block")
    model.rules = ()
    assert pickle.loads(pickle.dumps(model)).rules == ()
    assert "experts" not in explained(pickle.loads(pickle.dumps(model)), batch()).fired


@pytest.mark.parametrize("settings", [{}, {"single_grouped_weight": False}], ids=str)
@recipes(["fp8-delayed", "fp8-block", "nvfp4"])
def test_experts_built_on_the_meta_device_tell_shapes_and_run_once_they_have_weights(recipe, settings):
    model, twin, data = moe.Experts(E, D, N, recipe=recipe, device="meta", **settings), experts(recipe), batch()
    empty = [t.to("meta") for t in data]
    assert explained(model, empty).fired == ("experts",)
    assert explained(model, empty).saved_tensors == explained(twin, data).saved_tensors
    x = empty[0].requires_grad_()
    y = model(x, *empty[1:3])
    y.backward(empty[3])
    assert y.is_meta and y.shape == x.grad.shape == (T, D)
    model.zero_grad()
    model.to_empty(device="cpu")
    model.load_state_dict(twin.state_dict())
    same_seed(model)
    assert_equal(step(model, *data)[:3], step(twin, *data)[:3])


def test_what_the_meta_device_cannot_do_is_said():
    model = moe.Experts(E, D, N, recipe="fp8-block", device="meta")
    x, indices, probs, _ = (t.to("meta") for t in batch())
    with pytest.raises(ValueError, match="meta device have no values"):
        model(x, indices, probs, is_first_microbatch=True)
    with pytest.raises(ValueError, match="meta device have no values"):
        octavo.quantize_weights(model)
    model.fc1.delay_wgrad_compute = True
    with pytest.raises(ValueError, match="meta device have no values"):
        model(x.requires_grad_(), indices, probs)


@pytest.mark.usefixtures("fresh_compiler")
def test_one_graph_for_any_number_of_tokens():
    model, twin, graphs = experts("fp8-block"), experts("fp8-block"), Graphs()
    call = compiled(lambda *data: model(*data), backend=graphs, dynamic=True)
    for seed, tokens in enumerate((T, 17, 64, 33)):
        data = batch(seed, tokens=tokens)
        assert_equal(step(model, *data, call=call), step(twin, *data), f"{tokens} tokens")
    assert len(graphs.forward) == len(graphs.backward) == 1


@pytest.mark.parametrize(
    ("recipe", "number", "assignments"), [("fp8-current", 1, 1), ("fp8-block", 1, 1), ("fp8-current", 300, 7)]
)
def test_one_expert_and_more_than_there_are_tokens(recipe, number, assignments):
    model = fill(moe.Experts(number, 33, 17, recipe=recipe))
    twin = copy.deepcopy(model)
    twin.rules = None
    x, dy = spiky(19, 33, seed=1), spiky(19, 33, seed=2)
    indices, probs = torch.arange(19 * assignments).view(19, assignments) * 13 % number, torch.rand(19, assignments)
    assert "experts" in explained(model, (x, indices, probs)).fired
    found, want = step(model, x, indices, probs, dy), step(twin, x, indices, probs, dy)
    assert_same(found[0], want[0])
    assert all(relative_error(a, b) < fused_error(recipe) for a, b in zip(found, want, strict=True))


@pytest.mark.parametrize("what", ["x", "probs", "dy"])
@recipes(["fp8-block", "mxfp8"])
def test_a_token_that_is_not_finite_is_the_only_one(recipe, what):
    """In recipes whose scales cover a part of a row, and of the gradients those of tokens."""
    model = experts(recipe)
    x, indices, probs, dy = batch()
    {"x": x, "probs": probs, "dy": dy}[what][3] = float("nan")
    y, dx, dprobs, *_ = step(model, x, indices, probs, dy)
    others = torch.arange(T) != 3
    assert all(t[others].isfinite().all() for t in (y, dx, dprobs))
    assert not dx[3].isfinite().any() and y[3].isfinite().all() == (what == "dy")


def test_an_index_out_of_range_drops_as_minus_one_does():
    model, twin = experts("fp8-block"), experts("fp8-block")
    x, indices, probs, dy = batch()
    odd, dropped = indices.clone(), indices.clone()
    odd[0, 0], odd[1, 1], odd[2, 0], odd[5] = E, 2**31 + 1, -(2**40), torch.tensor([-7, 2**32])
    dropped[0, 0] = dropped[1, 1] = dropped[2, 0] = dropped[5] = -1
    probs[dropped < 0] = float("nan")  # of a assignment that is dropped nothing is read
    found = step(model, x, moe.sort(odd, E), probs, dy)
    assert_equal(found, step(twin, x, dropped, probs, dy))
    assert all(t.isfinite().all() for t in found)


def test_inputs_and_gradients_of_any_strides():
    model, twin = experts("fp8-block"), experts("fp8-block")
    x, indices, probs, dy = batch()
    x[:] = x[:1]
    turned = [t.T.contiguous().T for t in (indices, probs, dy)]
    leaf = x[:1].clone().requires_grad_()
    y = model(leaf.expand(T, D), turned[0], turned[1].requires_grad_())
    y.backward(turned[2])
    want = step(twin, x, indices, probs, dy)
    assert_same(y.detach(), want[0])
    torch.testing.assert_close(leaf.grad, want[1].sum(0, keepdim=True), rtol=1e-5, atol=1e-4)
    assert_equal([turned[1].grad, *(p.grad for p in model.parameters())], want[2:])
    model.zero_grad()
    model(x, indices, probs).sum().backward()  # of an expanded one
    assert_equal([p.grad for p in model.parameters()], step(twin, x, indices, probs, torch.ones_like(dy))[3:])


@recipes(["fp8-delayed", "fp8-block"])
def test_a_second_backward_and_a_checkpoint(recipe):
    model, twin = experts(recipe), experts(recipe)
    x, indices, probs, dy = batch()
    want = step(twin, x, indices, probs, dy)
    leaves = [x.clone().requires_grad_(), probs.clone().requires_grad_(), *model.parameters()]
    y = model(leaves[0], indices, leaves[1])
    for _ in range(2):
        assert_equal(torch.autograd.grad(y, leaves, dy, retain_graph=True), want[1:])
    again = experts(recipe)
    found = step(again, x, indices, probs, dy, call=lambda *data: checkpoint(again, *data, use_reentrant=False))
    assert_equal(found, want)
    assert_state(again, twin)


def test_autocast_casts_for_each_layer():
    model = experts("fp8-block")
    x, indices, probs, dy = batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = step(model, x, indices, probs, dy.bfloat16())
        report = explained(model, (x, indices, probs))
    assert found[0].dtype == torch.bfloat16 and found[1].dtype == torch.float32
    assert "experts" not in report.fired and any("autocast" in text for text in report.alone)
    for name, a, b in zip(NAMES, found, in_float64(model, x, indices, probs, dy), strict=True):
        assert relative_error(a, b) < 0.16, f"{name}: {relative_error(a, b):.3g}"


def test_a_forward_that_fails_halfway_leaves_the_next_one_alone(monkeypatch):
    model, twin = experts("fp8-delayed"), experts("fp8-delayed")
    for seed in range(2):
        for each in (model, twin):
            step(each, *batch(seed))
            octavo.step(each)
    from octavo.fusion.rules import activation_linear

    def fail(*_):
        raise RuntimeError("out of memory")

    data = batch(2)
    with monkeypatch.context() as patch:
        patch.setattr(activation_linear.cast, "forward", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            step(model, *data)
    assert_equal(step(model, *data), step(twin, *data))
    octavo.step(model), octavo.step(twin)
    assert_state(model, twin)


def test_fused_optimizers_update_the_weights_in_place():
    models = [experts("fp8-block", single_grouped_weight=single) for single in (True, False)]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        for seed in range(3):
            step(model, *batch(seed))
            optimizer.step()
    whole, parts = models
    for name in ("fc1", "fc2"):
        own = torch.stack(list(getattr(parts, name).parameters()))
        assert_same(own, getattr(whole, name).weight.detach())
        first = next(getattr(parts, name).parameters())
        assert own[0].nbytes * E <= first.untyped_storage().nbytes()  # still one allocation
    assert_same(whole(*batch(4)[:3]).detach(), parts(*batch(4)[:3]).detach())


def test_indices_and_probs_that_are_swapped_are_named():
    experts = moe.Experts(4, 16, 8, recipe="fp8-block")
    with pytest.raises(UnsupportedDtype, match=r"weights, index = octavo.moe.route"):
        experts(torch.zeros(3, 16), *moe.route(torch.zeros(3, 4), 2))
