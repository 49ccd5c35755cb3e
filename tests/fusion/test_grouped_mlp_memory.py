"""The caller's memory for y and dx of a fused grouped MLP: the fused operation writes to it without a copy and leaves
its tail alone, tails change no bit of anything, and memory that does not fit is refused before it is written to."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import octavo
from octavo import moe, ops
from octavo.ops import GRAD_INPUT_BUFFER_KEY, OUTPUT_BUFFER_KEY
from tests.support.grouped_mlps import FFN, ROWS, RULES, SIZES, USED, G, H, batch, mlp, sizes
from tests.support.linear_oracle import assert_same, spiky
from tests.support.recipe_traits import QUANTIZED
from tests.support.sequentials import fill, recipes
from tests.support.steps import assert_equal, assert_state, step

NAN = float("nan")


class Room:
    """Rows for y or dx inside a larger allocation."""

    def __init__(self, width=H, rows=ROWS, value=7.0, dtype=torch.float32):
        self.all = torch.full((rows + 13, width), value, dtype=dtype)
        self.rows, self.value = self.all[4 : 4 + rows], value

    def assert_holds(self, want, used=USED):
        """The rows in use, and nothing else, were written."""
        assert_same(self.rows[:used], want[:used])
        around = torch.cat((self.all[:4], self.all[4 + used :]))
        assert_same(around, torch.full_like(around, self.value))


def given(out=None, dgrad=None, last=2):
    found = {} if out is None else {last: {OUTPUT_BUFFER_KEY: out}}
    return found | ({} if dgrad is None else {0: {GRAD_INPUT_BUFFER_KEY: dgrad}})


# -- written in place --------------------------------------------------------------------------------------------------


@recipes(QUANTIZED)
@pytest.mark.parametrize("value", [7.0, NAN], ids=str)
def test_the_fused_operation_writes_to_slices_step_after_step(recipe, value):
    model, twin = mlp(recipe), mlp(recipe)
    out, dgrad = Room(value=value), Room(value=value)
    kwargs = given(out.rows, dgrad.rows)
    for seed in range(3):
        (x, of, probs, again), dy = batch(seed=seed)
        leaf, scales = x.clone().requires_grad_(), probs.clone().requires_grad_()
        report = model.explain(leaf, of, scales, again, op_kwargs=kwargs)
        assert report.fired == RULES and [run.backward for run in report.runs] == [RULES]
        want = step(twin, (x, of, probs, again), dy)
        model.zero_grad()
        y = model(leaf, of, scales, again, op_kwargs=kwargs)
        assert y.data_ptr() == out.rows.data_ptr() and y.shape == (ROWS, H) and y.requires_grad
        out.assert_holds(want[0])
        y.backward(dy)
        dgrad.assert_holds(want[1])
        assert_same(leaf.grad[:USED], want[1][:USED], "x.grad")
        assert_same(scales.grad, want[3], "dprobs")
        assert_equal([p.grad for p in model.parameters()], want[5:], "dw")
        octavo.step(model), octavo.step(twin)
    assert_state(model, twin)


@pytest.mark.parametrize("keys", ["modules", "indices", "negative indices"])
def test_operations_are_named_by_themselves_or_by_index_and_widths_may_differ(keys):
    wide, narrow = 24, 40
    layers = (
        octavo.GroupedLinear(G, wide, 2 * FFN, bias=False, recipe="fp8-block"),
        ops.ScaledSwiGLU(),
        octavo.GroupedLinear(G, FFN, narrow, bias=False, recipe="fp8-block"),
    )
    model = fill(octavo.Sequential(*layers))
    twin = copy.deepcopy(model)
    (_, of, probs, again), _ = batch()
    x, dy = spiky(ROWS, wide, seed=1), spiky(ROWS, narrow, seed=2)
    first, last = {"modules": (model[0], model[2]), "indices": (0, 2), "negative indices": (-3, -1)}[keys]
    out, dgrad, leaf = Room(narrow), Room(wide), x.clone().requires_grad_()
    kwargs = {last: {OUTPUT_BUFFER_KEY: out.rows}, first: {GRAD_INPUT_BUFFER_KEY: dgrad.rows}}
    y = model(leaf, of, probs, again, op_kwargs=kwargs)
    y.backward(dy)
    want = step(twin, (x, of, probs, again), dy)
    assert y.data_ptr() == out.rows.data_ptr()
    out.assert_holds(want[0])
    dgrad.assert_holds(want[1])
    assert_equal([p.grad for p in model.parameters()], want[5:])
    wrong = {last: {OUTPUT_BUFFER_KEY: Room(wide).rows}}
    with pytest.raises(ValueError, match=f"out must be .*{narrow}"):
        model(leaf, of, probs, again, op_kwargs=wrong)


def test_memory_of_layers_between_ordinary_modules():
    layers = mlp("fp8-block")
    model = octavo.Sequential(nn.Identity(), *layers, nn.Tanh(), ops.ConstantScale(2.0))
    twin = copy.deepcopy(model)
    (x, of, probs, again), dy = batch(poison=0.0)
    out, dgrad = Room(), Room()
    leaf = x.clone().requires_grad_()
    kwargs = {3: {OUTPUT_BUFFER_KEY: out.rows}, 1: {GRAD_INPUT_BUFFER_KEY: dgrad.rows}}
    assert model.explain(leaf, of, probs, again, op_kwargs=kwargs).fired == RULES
    out.rows[USED:] = 0.0  # tanh reads it
    model(leaf, of, probs, again, op_kwargs=kwargs).backward(dy)
    want = step(twin, (x, of, probs, again), dy)
    assert_same(out.rows[:USED].tanh() * 2, want[0][:USED])
    dgrad.assert_holds(want[1])
    for none in (None, {}):
        assert_same(model(leaf, of, probs, again, op_kwargs=none).detach(), want[0])


def test_a_returned_y_is_used_again_detached_and_refused_as_it_is():
    model, out = mlp("fp8-current"), Room().rows
    (x, of, probs, again), dy = batch()
    for _ in range(3):
        y = model(x, of, probs, again, op_kwargs=given(out))
        y.backward(dy)
        out = y.detach()
    with pytest.raises(ValueError, match="requires_grad"):
        model(x, of, probs, again, op_kwargs=given(y))


def test_an_x_with_two_consumers_gets_the_sum_and_the_memory_one_share():
    model, twin, dgrad = mlp("fp8-current"), mlp("fp8-current"), Room()
    (x, of, probs, again), dy = batch(poison=0.0)
    share = step(twin, (x, of, probs, again), dy)[1]
    leaf = x.clone().requires_grad_()
    y = model(leaf, of, probs, again, op_kwargs=given(dgrad=dgrad.rows))
    torch.autograd.backward((y, 3 * leaf), (dy, torch.ones(ROWS, H)))
    dgrad.assert_holds(share)
    assert_same(leaf.grad[:USED], (share + 3)[:USED])


def test_a_second_backward_writes_the_same_again():
    model, dgrad = mlp("fp8-block"), Room()
    (x, of, probs, again), dy = batch()
    leaf = x.clone().requires_grad_()
    y = model(leaf, of, probs, again, op_kwargs=given(dgrad=dgrad.rows))
    y.backward(dy, retain_graph=True)
    first, weights = dgrad.rows.clone(), [p.grad.clone() for p in model.parameters()]
    dgrad.all.fill_(dgrad.value)
    y.backward(dy)
    dgrad.assert_holds(first)
    assert_same(leaf.grad[:USED], 2 * first[:USED])
    assert_equal([p.grad for p in model.parameters()], [2 * w for w in weights])


def test_a_checkpoint_takes_memory_by_keyword():
    model, twin, out, dgrad = mlp("fp8-block"), mlp("fp8-block"), Room(), Room()
    (x, of, probs, again), dy = batch()
    want = step(twin, (x, of, probs, again), dy)
    leaf = x.clone().requires_grad_()
    y = checkpoint(model, leaf, of, probs, again, op_kwargs=given(out.rows, dgrad.rows), use_reentrant=False)
    y.backward(dy)
    out.assert_holds(want[0])
    dgrad.assert_holds(want[1])
    assert_equal([p.grad for p in model.parameters()], want[5:])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_memory_without_gradients(mode):
    model, out = mlp("fp8-block"), Room()
    inputs, _ = batch()
    want = model(*inputs).detach()
    with mode():
        y = model(*inputs, op_kwargs=given(out.rows))
    assert y.data_ptr() == out.rows.data_ptr()
    out.assert_holds(want)


# -- tails -------------------------------------------------------------------------------------------------------------


@recipes(["fp8-delayed", "fp8-current", "fp8-block", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("poison", [NAN, float("inf"), 1e4], ids=str)
def test_a_poisoned_tail_changes_no_bit(recipe, poison):
    """In x, dy, probabilities and the bias' scales: of y, of any gradient, of the amaxes that a recipe remembers."""
    found, models = [], []
    for tail in (0.0, poison):
        model = mlp(recipe, bias=True, second={"scale_bias": True})
        (x, of, probs, again), dy = batch(poison=tail)
        other = spiky(ROWS, seed=9).abs()
        other[USED:] = tail
        out, dgrad = Room(value=poison), Room(value=poison)
        y, dx, *grads = step(model, (x, of, probs, again, other), dy, op_kwargs=given(out.rows, dgrad.rows))
        out.assert_holds(y)
        dgrad.assert_holds(dx)
        found.append([t[:USED] if t.shape[:1] == (ROWS,) else t for t in (y, dx, *grads) if t is not None])
        models.append(model)
    assert len(found[0]) == 8 and all(t.isfinite().all() for t in found[0])
    assert_equal(*found)
    assert_state(*models)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("tail", ["zero", "untouched"])
def test_permute_does_not_read_the_tail_of_dgrad_out(device, tail):
    """The operation before the fused one takes its gradient from memory whose tail holds NaN."""
    torch.manual_seed(1)
    hidden, ffn, tokens, capacity, dtype = 128, 64, 40, 128, torch.bfloat16
    common = {"bias": False, "recipe": "fp8-block", "device": device, "dtype": dtype, "tail": tail}
    model = octavo.Sequential(
        octavo.GroupedLinear(G, hidden, 2 * ffn, **common), ops.ScaledSwiGLU(),
        octavo.GroupedLinear(G, ffn, hidden, **common),
    )  # fmt: skip
    index = torch.randint(-1, G, (tokens, 2), device=device)
    found = []
    for dirty in (False, True):
        x = torch.arange(tokens * hidden, device=device).view(tokens, hidden).sin().to(dtype).requires_grad_()
        probs = torch.linspace(0.1, 1.0, 2 * tokens, device=device).view(tokens, 2).requires_grad_()
        rows, permutation = moe.permute(x, index, G, capacity=capacity, tail=tail)
        of, scales = permutation.sizes, moe.permute_probs(probs, permutation)
        out, dgrad = (torch.full((capacity, hidden), NAN, dtype=dtype, device=device) for _ in range(2))
        y = model(rows, of, scales, of, op_kwargs=given(out, dgrad) if dirty else None)
        total = moe.unpermute(y, permutation)
        total.backward(torch.ones_like(total))
        found.append([total.detach(), x.grad, probs.grad])
        if dirty:
            used = int(of.sum())
            assert dgrad[used:].isnan().all() and out[used:].isnan().all() and dgrad[:used].isfinite().all()
    assert all(t.isfinite().all() and t.any() for t in found[1])
    assert_equal(*found)


# -- refused -----------------------------------------------------------------------------------------------------------


WRONG = {
    "rows": (lambda: torch.empty(ROWS + 1, H), rf"\({ROWS + 1}, {H}\)"),
    "columns": (lambda: torch.empty(ROWS, H + 1), rf"\({ROWS}, {H + 1}\)"),
    "one dim": (lambda: torch.empty(ROWS * H), rf"\({ROWS * H},\)"),
    "three dims": (lambda: torch.empty(1, ROWS, H), rf"\(1, {ROWS}, {H}\)"),
    "dtype": (lambda: torch.empty(ROWS, H, dtype=torch.bfloat16), "got torch.bfloat16"),
    "device": (lambda: torch.empty(ROWS, H, device="meta"), "on meta"),
    "strides": (lambda: torch.empty(H, ROWS).T, rf"strides \(1, {ROWS}\)"),
    "requires_grad": (lambda: torch.empty(ROWS, H, requires_grad=True), "requires_grad=True"),
}


@pytest.mark.parametrize("name", ["out", "dgrad_out"])
@pytest.mark.parametrize(("make", "words"), WRONG.values(), ids=WRONG)
def test_memory_that_does_not_fit_is_a_value_error_and_leaves_no_trace(name, make, words):
    model, twin = mlp("fp8-delayed(cold_start='one')"), mlp("fp8-delayed(cold_start='one')")
    (x, of, probs, again), dy = batch()
    kwargs = given(make()) if name == "out" else given(dgrad=make())
    with pytest.raises(ValueError, match=rf"{name} must be torch\.float32 \({ROWS}, {H}\).*{words}"):
        model(x.clone().requires_grad_(), of, probs, again, op_kwargs=kwargs)
    assert_state(model, twin)
    assert_equal(step(model, (x, of, probs, again), dy), step(twin, (x, of, probs, again), dy))


TAKEN = {
    "the first weight": lambda model, probs, of: model[0].weight,
    "the first bias": lambda model, probs, of: model[0].bias,
    "the second weight": lambda model, probs, of: model[2].weight,
    "the probabilities": lambda model, probs, of: probs,
    "the first sizes": lambda model, probs, of: of,
}


@pytest.mark.parametrize("needs", [True, False], ids=["with gradients", "without"])
@pytest.mark.parametrize("what", TAKEN.values(), ids=TAKEN)
def test_memory_for_y_over_what_an_operation_takes_is_refused_before_it_is_written(what, needs):
    model, arena = mlp("fp8-block", bias=True), torch.zeros(64, 1024)
    (x, of, probs, again), _ = batch()
    victim = what(model, probs, of)
    inside = arena.view(-1).view(victim.dtype)[: victim.numel()].view(victim.shape)
    inside.copy_(victim.detach())
    if isinstance(victim, nn.Parameter):
        victim.data = inside
    probs, of = (inside if t is victim else t for t in (probs, of))
    before, out = inside.clone(), arena.view(-1)[: ROWS * H].view(ROWS, H)
    with torch.set_grad_enabled(needs), pytest.raises(ValueError, match="out lies in the memory"):
        model(x.requires_grad_(needs), of, probs, again, op_kwargs=given(out))
    assert_same(inside, before)


def test_y_over_an_x_that_is_kept_as_codes():
    model, twin = mlp("fp8-block"), mlp("fp8-block")
    (x, of, probs, again), dy = batch()
    want = step(twin, (x, of, probs, again), dy)
    leaf = x.clone().requires_grad_()
    y = model(leaf, of, probs, again, op_kwargs=given(leaf.detach()))
    y.backward(dy)
    assert_same(leaf.detach()[:USED], want[0][:USED])
    assert_same(leaf.grad[:USED], want[1][:USED])
    assert_equal([p.grad for p in model.parameters()], want[5:])


@pytest.mark.parametrize("what", ["x", "the probabilities", "y", "x.grad"])
def test_memory_for_dx_over_what_is_still_needed_is_refused(what):
    model, arena, out = mlp("fp8-block"), torch.zeros(ROWS, H), Room()
    (x, of, probs, again), _ = batch()
    if what == "the probabilities":
        probs = arena.view(-1)[:ROWS].copy_(probs)
    leaf = x.clone().requires_grad_()
    if what == "x.grad":
        leaf.grad = torch.zeros_like(leaf)
    dgrad = {"x": leaf.detach(), "the probabilities": arena, "y": out.rows, "x.grad": leaf.grad}[what]
    with pytest.raises(ValueError, match="dgrad_out lies in"):
        model(leaf, of, probs, again, op_kwargs=given(out.rows, dgrad))


def test_sizes_that_are_overwritten_between_forward_and_backward_do_not_matter():
    model, twin = mlp("fp8-block"), mlp("fp8-block")
    (x, of, probs, _), dy = batch()
    want = step(twin, (x, of, probs, of), dy)
    leaf = x.clone().requires_grad_()
    y = model(leaf, of, probs, of)
    of.copy_(sizes(SIZES[::-1]))
    y.backward(dy)
    assert_same(leaf.grad, want[1])
    assert_equal([p.grad for p in model.parameters()], want[5:])
