"""GroupedLinear, activation, GroupedLinear in a Sequential: one node each way, fused, with the bits of its layers."""

from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import octavo
from octavo import ops
from octavo.recipes import SHIPPED
from tests.support.activation_formulas import FORMULAS, applied, clamped_swiglu
from tests.support.grouped_mlps import FFN, ROWS, RULES, SIZES, USED, G, H, batch, gated, mlp, sizes
from tests.support.linear_oracle import assert_same, randn, spiky
from tests.support.recipe_traits import QUANTIZED
from tests.support.sequentials import FUSED_AT_ONCE, Graphs, fill, recipes, unfused
from tests.support.state_tensors import named_state
from tests.support.steps import assert_equal, assert_state, compiled, relative_error, step

SCALED = {
    "swiglu": ops.ScaledSwiGLU,
    "clamped": ops.ScaledClampedSwiGLU,
    "clamped, other settings": lambda: ops.ScaledClampedSwiGLU(limit=5.0, alpha=1.5, glu_linear_offset=0.5),
    "srelu": ops.ScaledSReLU,
    "situglu": ops.ScaledSiTUGLU,
    "interleaved": lambda: ops.ScaledSwiGLU(glu_interleave_size=16),
}
FLOAT64 = {  # an activation, and its formula
    "swiglu": (ops.ScaledSwiGLU, FORMULAS["swiglu"]),
    "clamped": (ops.ScaledClampedSwiGLU, lambda a, b: clamped_swiglu(a, b, 7.0, 1.702, 1.0)),
    "clamped, other settings": (
        partial(ops.ScaledClampedSwiGLU, limit=5.0, alpha=1.5, glu_linear_offset=0.5),
        lambda a, b: clamped_swiglu(a, b, 5.0, 1.5, 0.5),
    ),
    "srelu": (ops.ScaledSReLU, FORMULAS["srelu"]),
    "situglu": (ops.ScaledSiTUGLU, FORMULAS["situglu"]),
}
PLAIN = {"swiglu": ops.SwiGLU, "gelu": ops.GELU}
ONE = FUSED_AT_ONCE["fp8-delayed"]  # delayed scaling whose first step fuses


def explained(model, inputs):
    """The report on a call that wants the gradients that `step` asks for."""
    return model.explain(*(t.clone().requires_grad_() if t.is_floating_point() else t for t in inputs))


def assert_alike(model, inputs, dy, **given):
    """A step equals that of a twin without rules. Sums for a bias are added in another order."""
    twin = unfused(model)
    found, want = step(model, inputs, dy, **given), step(twin, inputs, dy, **given)
    names = [*[None] * (len(found) - len(list(model.parameters()))), *[n for n, _ in model.named_parameters()]]
    for i, (a, b, name) in enumerate(zip(found, want, names, strict=True)):
        if name is not None and "bias" in name and a is not None:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        else:
            assert_same(a, b, f"{i} {name}")
    assert_state(model, twin)
    return found


# -- values ------------------------------------------------------------------------------------------------------------


@recipes(QUANTIZED)
@pytest.mark.parametrize("make", SCALED.values(), ids=SCALED)
def test_a_scaled_mlp_has_the_bits_of_its_layers(recipe, make):
    model = mlp(recipe, make)
    inputs, dy = batch()
    assert explained(model, inputs).fired == RULES
    found = assert_alike(model, inputs, dy)
    assert all(t is None or t.isfinite().all() for t in found)
    assert found[3][:USED].abs().sum() > 0 and not found[3][USED:].any()  # gradients of the probabilities


@recipes(["fp8-current", "fp8-delayed", "nvfp4"])
@pytest.mark.parametrize("make", PLAIN.values(), ids=PLAIN)
def test_an_mlp_without_probabilities(recipe, make):
    model = mlp(recipe, make)
    inputs, dy = batch(scaled=False)
    assert explained(model, inputs).fired == RULES
    assert_alike(model, inputs, dy)


@recipes(["fp8-block", "fp8-delayed", "mxfp8"])
def test_biases_and_a_bias_scaled_by_probabilities(recipe):
    model = mlp(recipe, bias=True, second={"scale_bias": True})
    (x, of, probs, _), dy = batch()
    inputs = (x, of, probs, of, probs)
    assert explained(model, inputs).fired == RULES
    assert_alike(model, inputs, dy)


@pytest.mark.parametrize(
    "of", [(0, 0, 0), (0, 0, 47), (47, 0, 0), (1, 1, 1), (128, 0, 129)], ids=lambda of: "-".join(map(str, of))
)
@recipes(["fp8-current", "fp8-delayed", "fp8-block", "nvfp4"])
def test_empty_and_odd_groups(recipe, of):
    model = mlp(recipe)
    assert_alike(model, *batch(of))


@pytest.mark.parametrize("spare", [0, 130])
@pytest.mark.parametrize("groups", [1, 4, 65])
def test_any_number_of_groups_with_and_without_a_tail(groups, spare):
    of = (*[3 * g % 7 for g in range(groups - 1)], 9)
    model = mlp("fp8-block", groups=groups)
    assert_alike(model, *batch(of, spare))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@recipes(["fp8-delayed", "fp8-block"])
def test_a_fused_grouped_mlp_has_the_bits_of_its_layers_in_every_dtype(recipe, dtype):
    model = mlp(recipe, dtype=dtype)
    (x, of, probs, again), dy = batch(dtype=dtype)
    assert_alike(model, (x, of, probs, again), dy)


def test_sizes_in_another_tensor_and_dtype_are_accepted():
    model, twin = mlp("fp8-block"), mlp("fp8-block")
    (x, of, probs, _), dy = batch()
    found = step(model, (x, of.int(), probs, of.clone()), dy)
    want = step(twin, (x, of, probs, of), dy)
    assert_equal(
        [t for i, t in enumerate(found) if i not in (2, 4)], [t for i, t in enumerate(want) if i not in (2, 4)]
    )


@pytest.mark.parametrize(
    ("name", "interleave"), [(name, by) for name in FLOAT64 for by in (None, 32) if not (name == "srelu" and by)]
)
def test_against_float64(name, interleave):
    """Biases too, of which the second is scaled by other numbers than the activation."""
    act, formula = FLOAT64[name]
    act, ffn = act(**({"glu_interleave_size": interleave} if interleave else {})), 64
    wide = ffn * (2 if gated(act) else 1)
    common = {"recipe": "fp8-block"}
    model = fill(octavo.Sequential(
        octavo.GroupedLinear(G, H, wide, **common), act, octavo.GroupedLinear(G, ffn, H, scale_bias=True, **common)
    ))  # fmt: skip
    (_, of, probs, _), _ = batch()
    x, dy, other = 2 * randn(ROWS, H, seed=3), randn(ROWS, H, seed=4), randn(ROWS, seed=5)
    x[USED:] = dy[USED:] = other[USED:] = float("nan")
    inputs = (x, of, probs, of, other)
    assert explained(model, inputs).fired == RULES
    found = step(model, inputs, dy)
    leaves = [t[:USED].double().requires_grad_() for t in (x, probs, other)]
    params = [p.detach().double().requires_grad_() for p in model.parameters()]
    parts = []
    for g, (row, p, scale) in enumerate(zip(*(t.split(list(SIZES)) for t in leaves), strict=True)):
        w1, b1, w2, b2 = (t[g] for t in params)
        a = applied(formula, gated(act), row @ w1.T + b1, interleave or 0) * p[:, None]
        parts.append(a @ w2.T + b2 * scale[:, None])
    y = torch.cat(parts)
    y.backward(dy[:USED].double())
    want = [y.detach(), *(t.grad for t in leaves), *(t.grad for t in params)]
    names = ["y", "dx", "dprobs", "dscales", "dw1", "db1", "dw2", "db2"]
    for what, a, b in zip(names, [t for t in found if t is not None], want, strict=True):
        assert relative_error(a[: b.shape[0]], b) < 0.16, f"{what}: {relative_error(a[: b.shape[0]], b):.3g}"


@pytest.mark.parametrize("hidden", [128, 256])
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_one_group_and_four_in_memory_that_is_longer(hidden, groups, dtype):
    """Rows after the last group are half of the memory, and hold NaN; one group is no special case."""
    of = {1: (33,), 4: (20, 0, 65, 3)}[groups]
    spare, model = sum(of) + 3, mlp("fp8-block", groups=groups, hidden=hidden, dtype=dtype)
    twin = unfused(model)
    (x, of, probs, again), dy = batch(of, spare, hidden=hidden, dtype=dtype)
    n = int(of.sum())
    out, dgrad = (torch.full_like(x, float("nan")) for _ in range(2))
    leaf, scales = x.clone().requires_grad_(), probs.clone().requires_grad_()
    y = model(leaf, of, scales, again, op_kwargs={2: {"out": out}, 0: {"dgrad_out": dgrad}})
    y.backward(dy)
    want = step(twin, (x, of, probs, again), dy)
    assert_same(out[:n], want[0][:n], "y")
    assert_same(dgrad[:n], want[1][:n], "dx")
    assert_same(scales.grad, want[3], "dprobs")
    assert_equal([p.grad for p in model.parameters()], want[5:])
    assert all(t.isfinite().all() for t in (out[:n], dgrad[:n], scales.grad, *(p.grad for p in model.parameters())))


@recipes(["fp8-delayed", "fp8-block"])
def test_the_scales_of_the_second_bias_need_not_be_the_probabilities(recipe):
    model = mlp(recipe, bias=True, second={"scale_bias": True})
    (x, of, probs, _), dy = batch()
    inputs = (x, of, probs, of, spiky(ROWS, seed=8))
    assert explained(model, inputs).fired == RULES
    found = assert_alike(model, inputs, dy)
    assert found[3].abs().sum() > 0 and found[5].abs().sum() > 0


def test_sizes_that_differ_are_an_error_that_says_so():
    model = mlp("fp8-block")
    (x, of, probs, _), dy = batch()
    y = model(x.requires_grad_(), of, probs, torch.tensor([17, 0, 30]))
    with pytest.raises(RuntimeError, match="sizes that differ"):
        y.backward(dy)


def test_layers_of_other_numbers_of_groups_are_an_error_that_says_so():
    def layers(rules=()):
        first = octavo.GroupedLinear(G, H, 2 * FFN, bias=False, recipe="fp8-block")
        second = octavo.GroupedLinear(2, FFN, H, bias=False, recipe="fp8-block")
        return fill(octavo.Sequential(first, ops.ScaledSwiGLU(), second, rules=rules))

    (x, of, probs, _), dy = batch()
    inputs = (x.requires_grad_(), of, probs, torch.tensor([20, 27]))
    y = layers()(*inputs)
    with pytest.raises(ValueError, match=r"3 and 2 groups.*rules=None"):
        y.backward(dy)
    layers(rules=None)(*inputs).backward(dy)
    assert x.grad[:USED].isfinite().all()


# -- settings of the layers --------------------------------------------------------------------------------------------


LAYOUTS = {
    "a weight for each group": {"single_grouped_weight": False},
    "codes made again": {"keep_weight_codes": False},
    "an untouched tail": {"tail": "untouched"},
}


@recipes(["fp8-delayed", "fp8-block", "nvfp4"])
@pytest.mark.parametrize("settings", LAYOUTS.values(), ids=LAYOUTS)
def test_settings_of_the_layers(recipe, settings):
    model, twin = mlp(recipe, **settings), mlp(recipe, rules=None, tail=settings.get("tail", "zero"))
    model.load_state_dict(twin.state_dict())
    inputs, dy = batch()
    found, want = step(model, inputs, dy), step(twin, inputs, dy)
    n = USED if "tail" in settings else ROWS
    assert_same(found[0][:n], want[0][:n], "y")
    assert_same(found[1][:n], want[1][:n], "dx")
    if "single_grouped_weight" in settings:
        grads = [torch.stack([p.grad for p in layer.parameters()]) for layer in (model[0], model[2])]
    else:
        grads = found[5:]
    assert_equal(grads, want[5:])


@pytest.mark.parametrize("frozen", [(0,), (2,), (0, 2)], ids=str)
@recipes(["fp8-delayed", "fp8-block"])
def test_frozen_experts_get_no_gradient(recipe, frozen):
    model = mlp(recipe)
    for i in frozen:
        model[i].requires_grad_(False)
    inputs, dy = batch()
    found = assert_alike(model, inputs, dy)
    assert found[1] is not None and found[3] is not None


@recipes(["fp8-delayed", "fp8-block"])
def test_frozen_weights_with_biases_that_are_trained(recipe):
    """And a router, whose probabilities want a gradient."""
    model = mlp(recipe, bias=True, second={"scale_bias": True})
    for layer in (model[0], model[2]):
        layer.weight.requires_grad_(False)
    (x, of, probs, _), dy = batch()
    found = assert_alike(model, (x, of, probs, of, probs), dy)
    assert found[3].abs().sum() > 0
    assert all((p.grad is None) == ("weight" in name) for name, p in model.named_parameters())


@recipes(["fp8-delayed", "fp8-block"])
def test_a_call_without_gradients_leaves_the_cached_codes_for_backward(recipe):
    model, twin = mlp(recipe), mlp(recipe)
    data = [batch(seed=i) for i in range(3)]

    def cached(first):
        return {i: {"is_first_microbatch": first} for i in (0, 2)}

    step(model, *data[0], op_kwargs=cached(True))
    kept = {name: (b.data_ptr(), b.clone()) for name, b in named_state(model) if "scaling" not in name}
    assert kept
    with torch.no_grad():
        y = model(*data[1][0], op_kwargs=cached(False))
    found = step(model, *data[2], op_kwargs=cached(False))
    for name, buffer in named_state(model):
        if name in kept:
            assert buffer.data_ptr() == kept[name][0], name
            assert_same(buffer.view(torch.uint8), kept[name][1].view(torch.uint8), name)
    step(twin, *data[0])
    with torch.no_grad():
        assert_same(y, twin(*data[1][0]))
    assert_equal(found, step(twin, *data[2]))


def test_without_gradients_nothing_is_kept_and_y_is_the_same():
    model = mlp("fp8-block")
    inputs, _ = batch()
    with torch.no_grad():
        y = model(*inputs)
    assert_same(y, model(*inputs).detach())
    assert y.grad_fn is None


@recipes(["fp8-delayed", "fp8-block"])
@pytest.mark.parametrize("flag", ["on the host", "on the device"])
def test_the_weight_cache(recipe, flag):
    model, twin = mlp(recipe), mlp(recipe, rules=None)
    for i, first in enumerate((True, False)):
        inputs, dy = batch(seed=i)
        given = {j: {"is_first_microbatch": torch.tensor(first) if "device" in flag else first} for j in (0, 2)}
        assert_equal(step(model, inputs, dy, op_kwargs=given), step(twin, inputs, dy), f"microbatch {i}")


@recipes(["fp8-delayed", "fp8-block"])
def test_weights_held_as_codes(recipe):
    model = mlp(recipe)
    octavo.quantize_weights(model)
    assert_alike(model, *batch())


@recipes(["fp8-delayed", "fp8-block"])
def test_weight_gradients_that_wait(recipe):
    model, twin = mlp(recipe, delay_wgrad_compute=True), mlp(recipe, rules=None)
    inputs, dy = batch()
    assert explained(model, inputs).fired == RULES
    found, want = step(model, inputs, dy), step(twin, inputs, dy)
    assert_equal(found[:5], want[:5])
    assert all(p.grad is None for p in model.parameters())
    for layer in (model[0], model[2]):
        layer.backward_dw()
    assert_equal([p.grad for p in model.parameters()], want[5:])


@recipes(["fp8-delayed", "fp8-block", "nvfp4"])
def test_main_grad_is_added_to_in_place(recipe):
    model, twin = mlp(recipe, fuse_wgrad_accumulation=True), mlp(recipe, rules=None)
    inputs, dy = batch()
    for p in model.parameters():
        p.main_grad = torch.full_like(p, 0.25)
    found, want = step(model, inputs, dy), step(twin, inputs, dy)
    assert_equal(found[:5], want[:5])
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.main_grad, q.grad + 0.25, rtol=1e-5, atol=1e-5)


@recipes(["fp8-delayed", "fp8-block", "nvfp4"])
@pytest.mark.parametrize("layout", [True, False], ids=["one weight", "a weight for each group"])
def test_main_grad_is_overwritten_and_hooks_get_zeros(recipe, layout):
    model, twin = mlp(recipe, fuse_wgrad_accumulation=True, single_grouped_weight=layout), mlp(recipe)
    model.load_state_dict(twin.state_dict())
    inputs, dy = batch()
    for p in model.parameters():
        p.main_grad, p.overwrite_main_grad = torch.full(p.shape, float("nan")), True
        p.grad_added_to_main_grad = False
    assert explained(model, inputs).fired == RULES
    found, want = step(model, inputs, dy), step(twin, inputs, dy)
    assert_equal(found[:5], want[:5])
    for mine, theirs in ((model[0], twin[0]), (model[2], twin[2])):
        own = list(mine.parameters())
        assert_same(torch.stack([p.main_grad for p in own]).view_as(theirs.weight), theirs.weight.grad)
        assert all(p.grad_added_to_main_grad and not p.grad.any() for p in own)


def test_a_backward_that_fails_has_not_written_to_main_grad():
    model = mlp("fp8-block", fuse_wgrad_accumulation=True)
    inputs, dy = batch()
    model[2].weight.main_grad = torch.zeros_like(model[2].weight)
    y = model(*inputs)
    with pytest.raises(ValueError, match="main_grad"):  # the first layer's is missing
        y.backward(dy)
    assert not model[2].weight.main_grad.any()


def test_an_activation_checkpoint_recomputes_the_same_bits():
    model, twin = mlp("fp8-block"), mlp("fp8-block")
    inputs, dy = batch()
    again = step(model, inputs, dy, call=lambda *a: checkpoint(model, *a, use_reentrant=False))
    assert_equal(again, step(twin, inputs, dy))


# -- what fires --------------------------------------------------------------------------------------------------------


def test_two_recipes_are_refused_in_a_sentence_and_run_as_they_are():
    model = mlp("fp8-block", second={"recipe": "fp8-current"})
    inputs, dy = batch()
    report = explained(model, inputs)
    assert "grouped-mlp" not in report.fired
    assert any(r.rule == "grouped-mlp" and "different recipes" in r.sentence for r in report.refused)
    assert_alike(model, inputs, dy)


MATCHES = {
    "no activation": (lambda: (), (), "fp8-block"),
    "two activations": (lambda: (ops.SwiGLU(), ops.SReLU()), (), "fp8-block"),
    "a constant": (lambda: (ops.ScaledSwiGLU(), ops.ConstantScale(2.0)), ("probs",), "fp8-block"),
    "dgrad in high precision": (lambda: (ops.ScaledSwiGLU(),), ("probs",), "fp8-block(dgrad='bf16')"),
    "wgrad in high precision": (lambda: (ops.ScaledSwiGLU(),), ("probs",), "fp8-block(wgrad='bf16')"),
}


@pytest.mark.parametrize("case", MATCHES)
def test_what_does_not_match_runs_as_it_is(case):
    """`explain` gives a reason only where the pattern of the rule matches."""
    make, extra, recipe = MATCHES[case]
    acts = make()
    between = H if not acts else 2 * FFN
    model = fill(octavo.Sequential(
        octavo.GroupedLinear(G, H, between, bias=False, recipe=recipe), *acts,
        octavo.GroupedLinear(G, FFN if acts else H, H, bias=False, recipe=recipe),
    ))  # fmt: skip
    (x, of, probs, _), dy = batch()
    inputs = (x, of, *((probs,) if extra else ()), of)
    report = explained(model, inputs)
    assert "grouped-mlp" not in report.fired
    reasons = [r.sentence for r in report.refused if r.rule == "grouped-mlp"]
    assert len(reasons) == ("precision" in case) and all("high precision" in why or "codes" in why for why in reasons)
    assert_alike(model, inputs, dy)


def test_widths_that_do_not_fit_are_refused():
    model = octavo.Sequential(
        octavo.GroupedLinear(G, H, 2 * FFN, recipe="fp8-block"), ops.ScaledSwiGLU(),
        octavo.GroupedLinear(G, FFN + 1, H, recipe="fp8-block"),
    )  # fmt: skip
    with pytest.raises(ValueError, match=rf"takes inputs \[\.\.\., {FFN + 1}\].*got \({ROWS}, {FFN}\)"):
        model(*batch()[0])


def test_bf16_has_no_cast_to_fuse():
    model = mlp("bf16")
    inputs, dy = batch()
    assert explained(model, inputs).fired == ()
    assert_alike(model, inputs, dy)


def test_the_first_step_of_delayed_scaling_is_unfused_and_later_ones_fuse():
    model, twin = mlp("fp8-delayed"), mlp("fp8-delayed", rules=None)
    for seed in range(3):
        inputs, dy = batch((20, 10, 17), seed=seed)  # a group without rows would go on being measured
        assert ("grouped-mlp" in explained(model, inputs).fired) == (seed > 0)
        assert_equal(step(model, inputs, dy), step(twin, inputs, dy), f"step {seed}")
        octavo.step(model), octavo.step(twin)
        assert_state(model, twin)


@recipes(["fp8-delayed", "fp8-block"])
def test_one_grouped_layer_and_an_activation(recipe):
    before = fill(octavo.Sequential(octavo.GroupedLinear(G, H, 2 * FFN, recipe=recipe), ops.ScaledSwiGLU()))
    after = fill(octavo.Sequential(ops.ScaledSwiGLU(), octavo.GroupedLinear(G, H // 2, FFN, recipe=recipe)))
    (x, of, probs, _), _ = batch()
    dy = spiky(ROWS, FFN, seed=4)
    assert explained(before, (x, of, probs)).fired == ("grouped-linear-activation",)
    assert_alike(before, (x, of, probs), dy)
    assert explained(after, (x, probs, of)).fired == ("activation-grouped-linear",)
    assert_alike(after, (x, probs, of), dy)


# -- the caller's memory -----------------------------------------------------------------------------------------------


def memory(width=H):
    return torch.full((ROWS, width), 7.0)


@recipes(SHIPPED)
@pytest.mark.parametrize("given", [("out",), ("dgrad_out",), ("out", "dgrad_out")], ids=" and ".join)
@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_memory_for_y_and_dx_is_written_in_place(recipe, given, how):
    model, twin = mlp(recipe), mlp(recipe)
    (x, of, probs, again), dy = batch()
    want = step(twin, (x, of, probs, again), dy)
    out, dgrad = memory(), memory()
    kwargs = ({-1: {"out": out}} if "out" in given else {}) | (
        {0: {"dgrad_out": dgrad}} if "dgrad_out" in given else {}
    )
    leaf = x.clone().requires_grad_()

    def call(*inputs):
        return model(*inputs, op_kwargs=kwargs)

    y = (compiled(call) if how == "compiled" else call)(leaf, of, probs, again)
    if how == "eager":  # aot_eager returns a copy; Inductor does not
        assert (y.data_ptr() == out.data_ptr()) == ("out" in given)
    assert_same(y.detach()[:USED], want[0][:USED], "y")
    y.backward(dy)
    assert_same(leaf.grad[:USED], want[1][:USED], "dx")
    assert_equal([p.grad for p in model.parameters()], want[5:])
    for name, buffer in (("out", out), ("dgrad_out", dgrad)):
        assert (buffer[USED:] == 7.0).all(), name
        assert (buffer[:USED] == 7.0).all() != (name in given), name


def test_inductor_returns_the_memory_itself():
    model, twin, out = mlp("fp8-block"), mlp("fp8-block"), memory()
    (x, of, probs, again), dy = batch()
    want = step(twin, (x, of, probs, again), dy)
    call = compiled(lambda *inputs: model(*inputs, op_kwargs={-1: {"out": out}}), backend="inductor")
    y = call(x.clone().requires_grad_(), of, probs, again)
    assert y.data_ptr() == out.data_ptr()
    assert_same(out[:USED], want[0][:USED])
    y.backward(dy)
    assert_equal([p.grad for p in model.parameters()], want[5:])


@pytest.mark.parametrize(("place", "name", "width"), [(0, "out", 2 * FFN), (2, "dgrad_out", FFN)])
def test_memory_for_a_value_inside_the_fused_operation_is_a_value_error(place, name, width):
    (x, of, probs, again), dy = batch()
    model = mlp("fp8-block")
    with pytest.raises(ValueError, match=r"grouped-mlp.*rules=None"):
        model(x, of, probs, again, op_kwargs={place: {name: memory(width)}})
    plain = mlp("fp8-block", rules=None)  # each layer keeps its own
    buffer = memory(width)
    leaf = x.clone().requires_grad_()
    plain(leaf, of, probs, again, op_kwargs={place: {name: buffer}}).backward(dy)
    assert not (buffer[:USED] == 7.0).all() and (buffer[USED:] == 7.0).all()
    assert_same(leaf.grad, step(mlp("fp8-block", rules=None), (x, of, probs, again), dy)[1])


def test_memory_that_overlaps_dy_is_refused():
    model = mlp("fp8-block")
    inputs, dy = batch()
    leaf = inputs[0].clone().requires_grad_()
    y = model(leaf, *inputs[1:], op_kwargs={0: {"dgrad_out": dy}})
    with pytest.raises(ValueError, match="dgrad_out"):
        y.backward(dy)


# -- graphs ------------------------------------------------------------------------------------------------------------


@recipes(["bf16", "fp8-delayed", "fp8-current", "fp8-block", "nvfp4"])
def test_a_compiled_grouped_mlp_is_one_node_each_way_with_the_bits_of_eager(recipe):
    model, twin, graphs = mlp(recipe), mlp(recipe), Graphs()
    call = compiled(model, backend=graphs)
    for seed, of in enumerate([SIZES, (0, 47, 0), (10, 20, 17)]):
        inputs, dy = batch(of, seed=seed)
        assert_equal(step(model, inputs, dy, call=call), step(twin, inputs, dy), f"step {seed}")
        octavo.step(model), octavo.step(twin)
    assert graphs.runs() == ((1, 1) if recipe != "fp8-delayed" else graphs.runs())
    assert_state(model, twin)


def test_compiled_a_delayed_weight_gradient_leaves_the_run_and_says_so():
    model = mlp("fp8-block", delay_wgrad_compute=True)
    twin = mlp("fp8-block", rules=None)
    inputs, dy = batch()
    found = step(model, inputs, dy, call=compiled(model))
    want = step(twin, inputs, dy)
    assert_equal(found[:5], want[:5])
    for layer in (model[0], model[2]):
        layer.backward_dw()
    assert_equal([p.grad for p in model.parameters()], want[5:])


# -- what a review found -----------------------------------------------------------------------------------------------


@recipes(["fp8-delayed", "fp8-block"])
def test_a_first_bias_that_is_scaled_keeps_its_gradients(recipe):
    model = mlp(recipe, bias=True, scale_bias=True)
    (x, of, probs, _), dy = batch()
    twin = unfused(model)
    inputs = (x, of, probs, probs, of, probs)
    assert "grouped-mlp" not in explained(model, inputs).fired
    found, want = step(model, inputs, dy), step(twin, inputs, dy)
    assert found[3] is not None
    assert_equal(found, want)


@pytest.mark.parametrize("recipe", ["bf16", "fp8-block"])
@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_memory_for_y_that_overlaps_what_an_operation_needs_is_refused(recipe, how):
    model = octavo.Sequential(ops.SReLU(), octavo.GroupedLinear(G, H, H, bias=False, recipe=recipe))
    x = batch()[0][0].nan_to_num().requires_grad_()

    def call(x):
        return model(x, sizes(), op_kwargs={1: {"out": out}})

    out = x.detach()
    refused = r"out lies in the memory|share storage|view input mutations"  # the last two are AOTAutograd's words
    with pytest.raises(Exception, match=refused):
        (compiled(call) if how == "compiled" else call)(x)


def test_a_users_operation_before_a_grouped_layer():
    """Inside a run its output has no known shape: the grouped layer begins another one."""
    from tests.support.custom_operations import Powered

    layer = fill(octavo.GroupedLinear(G, H, H, recipe="fp8-block", scale_bias=True))
    model = octavo.Sequential(Powered(H), layer)
    (x, of, probs, _), dy = batch()
    out = memory()
    y = model(x.requires_grad_(), of, probs, op_kwargs={1: {"out": out}})
    y.backward(dy)
    assert y.data_ptr() == out.data_ptr() and layer.weight.grad is not None
    with pytest.raises(ValueError, match=f"{H}"):
        octavo.Sequential(Powered(H + 1), layer)(torch.ones(ROWS, H + 1), of, probs)


def test_a_graph_refuses_a_run_that_is_too_long_for_memory():
    layers = [octavo.GroupedLinear(G, H, H, bias=False, recipe="fp8-block") for _ in range(18)]
    model, out = octavo.Sequential(*layers), memory()
    x = batch()[0][0].nan_to_num().requires_grad_()
    with pytest.raises(Exception, match="Cut the Sequential into two"):
        compiled(lambda x: model(x, *[sizes()] * 18, op_kwargs={-1: {"out": out}}))(x)


def test_memory_does_not_change_what_dropout_draws():
    found = []
    for given in ({}, {0: {"out": memory(2 * FFN)}}):
        layers = (octavo.GroupedLinear(G, H, 2 * FFN, recipe="fp8-block"), ops.Dropout(0.5), ops.SwiGLU())
        model = fill(octavo.Sequential(*layers))
        torch.manual_seed(3)
        found.append(model(batch()[0][0].nan_to_num(), sizes(), op_kwargs=given).detach()[:USED])
    assert_same(*found)
