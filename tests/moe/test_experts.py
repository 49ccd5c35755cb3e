"""octavo.moe.Experts: y and gradients against the operations one by one and against float64, memory, graphs."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F

import octavo
from octavo import moe
from tests.fuser.models import FUSED_AT_ONCE, Graphs, assert_equal, assert_state, compiled, error, fill, recipes
from tests.modules.oracle import QUANTIZED, assert_same, spiky

E, D, N, T, K = 5, 48, 32, 40, 2
NAMES = ("y", "dx", "dprobs", "dw1", "dw2")
# relative error, root of the mean square, of a fused step against the operations one by one
NEAR = {**dict.fromkeys(QUANTIZED, 0.08), "fp8-current": 0.15, "fp8-delayed": 0.35, "nvfp4": 0.5}
ONE = FUSED_AT_ONCE["fp8-delayed"]


def experts(recipe, *, rules=(), **settings):
    model = fill(moe.Experts(E, D, N, recipe=recipe, **settings))
    if rules is None:
        model.rules = None
    return model


def batch(seed=0, *, tokens=T, slots=K, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    x, dy = (spiky(tokens, D, seed=seed + i, size=8.0, dtype=dtype) for i in (1, 51))
    probs, indices = torch.rand(tokens, E, generator=generator).softmax(-1).topk(slots)
    return x, indices, probs, dy


def step(model, x, indices, probs, dy, call=None, **given):
    model.zero_grad()
    x, probs = x.clone().requires_grad_(), probs.clone().requires_grad_()
    y = (model if call is None else call)(x, indices, probs, **given)
    y.backward(dy)
    return [y.detach().clone(), x.grad, probs.grad, *(p.grad for p in model.parameters())]


def in_float64(model, x, indices, probs, dy):
    """SwiGLU experts by a loop, unquantized."""
    w1, w2 = (p.detach().double().requires_grad_() for p in (model.fc1.weight, model.fc2.weight))
    x, probs = x.double().requires_grad_(), probs.double().requires_grad_()
    y = torch.zeros_like(x)
    for e in range(E):
        tokens, slots = torch.where(indices == e)
        a, b = (x[tokens] @ w1[e].T).chunk(2, -1)
        y = y.index_add(0, tokens, probs[tokens, slots, None] * ((F.silu(a) * b) @ w2[e].T))
    y.backward(dy.double())
    return [y.detach(), x.grad, probs.grad, w1.grad, w2.grad]


@recipes(QUANTIZED)
def test_fused_y_has_the_bits_of_the_operations_and_gradients_are_near(recipe):
    model, twin = experts(recipe), experts(recipe, rules=None)
    data = batch()
    assert model.explain(*data[:3]).fired == ("experts",)
    found, want = step(model, *data), step(twin, *data)
    assert_same(found[0], want[0])
    for name, a, b in zip(NAMES, found, want, strict=True):
        assert error(a, b) < NEAR[recipe.split("(")[0]], f"{name}: {error(a, b):.3g}"


@recipes(["bf16", "fp8-current", "fp8-block", "mxfp8"])
def test_against_float64(recipe):
    model, data = experts(recipe), batch()
    for name, a, b in zip(NAMES, step(model, *data), in_float64(model, *data), strict=True):
        assert error(a, b) < (1e-5 if recipe == "bf16" else 0.16), f"{name}: {error(a, b):.3g}"


@pytest.mark.parametrize("case", ["one expert gets all", "dropped slots", "all dropped", "one slot", "no tokens"])
@recipes(["fp8-delayed", "fp8-block", "nvfp4"])
def test_odd_routings(recipe, case):
    model, twin = experts(recipe), experts(recipe, rules=None)
    x, indices, probs, dy = batch(slots=1 if case == "one slot" else K, tokens=0 if case == "no tokens" else T)
    if case == "one expert gets all":
        indices = torch.full_like(indices, 3)
    if case == "dropped slots":
        indices[::3, 0] = -1
    if case == "all dropped":
        indices = torch.full_like(indices, -1)
    found, want = step(model, x, indices, probs, dy), step(twin, x, indices, probs, dy)
    assert_same(found[0], want[0])
    for a, b in zip(found, want, strict=True):
        assert a.isfinite().all()
        if b.any():
            assert error(a, b) < NEAR[recipe.split("(")[0]]
        else:
            assert not a.any()
    if case == "dropped slots":
        assert not found[2][::3, 0].any()


@pytest.mark.parametrize("activation", ["gelu", "clamped-swiglu", "situglu", "srelu"])
def test_other_activations(activation):
    model, twin = experts("fp8-block", activation=activation), experts("fp8-block", activation=activation, rules=None)
    data = batch()
    assert model.explain(*data[:3]).fired == ("experts",)
    found, want = step(model, *data), step(twin, *data)
    assert_same(found[0], want[0])
    assert all(error(a, b) < NEAR["fp8-block"] for a, b in zip(found, want, strict=True))


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
    assert ("experts" in model.explain(*data[:3]).fired) == ("bias" not in settings)


def test_a_second_bias_is_refused_in_a_sentence():
    told = experts("fp8-block", bias=True).explain(*batch()[:3])
    assert any(r.rule == "experts" and "bias" in r.sentence for r in told.refused)
    assert "grouped-mlp" in told.fired


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
        assert ("experts" in model.explain(*data[:3]).fired) == (seed > 0)
        assert all(t.isfinite().all() for t in step(model, *data))
        octavo.step(model)


def test_it_keeps_x_and_h_and_no_codes_of_them():
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
    with pytest.raises(ValueError, match="slot of each token"):
        model(x, indices, probs[:, :1])
    with pytest.raises(ValueError, match="slot of each token"):
        model(x[:-1], indices, probs)
    with pytest.raises(ValueError, match="two dims or more"):
        model(x[0], indices[0], probs[0])
    with pytest.raises(ValueError, match="two dims or more"):
        model(x, indices[:, :0], probs[:, :0])
    for wrong in (indices.float(), indices.tolist(), indices == 0):
        with pytest.raises(TypeError, match="indices as a tensor of int32 or int64"):
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
            assert error(a, b) < 0.2, f"step {seed}, {name}: {error(a, b):.3g}"
        octavo.step(model)
    assert model.explain(*data[:3]).fired == ("experts",)


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
    """Rows may be fewer or more than slots, and pads take part in nothing."""
    model, twin = experts(recipe), experts(recipe, rules=None)
    x, indices, probs, dy = batch()
    permutation = moe.sort(indices, E, **options)
    assert model.explain(x, permutation, probs).fired == ("experts",)
    found, want = step(model, x, permutation, probs, dy), step(twin, x, permutation, probs, dy)
    assert_same(found[0], want[0])
    assert all(error(a, b) < NEAR[recipe.split("(")[0]] for a, b in zip(found, want, strict=True))
    kept = torch.where(permutation.positions >= 0, indices, -1)
    assert_equal(found[:3], step(experts(recipe), x, kept, probs, dy)[:3])


def test_a_permutation_that_does_not_fit_is_refused():
    model, (x, indices, probs, _) = experts("fp8-block"), batch()
    with pytest.raises(ValueError, match="an index of 7"):
        model(x, moe.sort(indices, 7), probs)
    mask = torch.zeros(T, E, dtype=torch.bool).scatter_(1, indices, True)
    with pytest.raises(ValueError, match="a mask of 5"):
        model(x, moe.sort(mask, top_k=K), probs)


def test_a_pickled_module_keeps_its_rules():
    model, data = experts("fp8-block"), batch()
    assert pickle.loads(pickle.dumps(model)).explain(*data[:3]).fired == ("experts",)
    model.rules = None
    assert pickle.loads(pickle.dumps(model)).rules is None
