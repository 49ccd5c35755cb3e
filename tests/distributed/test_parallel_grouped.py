"""A GroupedLinear split over ranks by its features, against one process."""

import pytest
import torch

import octavo
from octavo.errors import Unsupported
from tests.support.linear_shards import cut, joined, steps_of
from tests.support.steps import relative_error

GROUPS, K, N, ROWS = 3, 256, 512, 96
SPLITS = (40, 0, 50)  # and a tail of 6 rows
SUMS = 6e-3
OWN_SCALES = {"fp8-current": 0.07, "nvfp4": 0.25}  # dy has a rank's own amax, or random numbers: errors of each format


def layer(recipe, mode=None, group=None, **settings):
    torch.manual_seed(2)
    return octavo.GroupedLinear(
        GROUPS, K, N, dtype=torch.bfloat16, recipe=recipe, parallel_mode=mode, tp_group=group, **settings
    )


def data(scaled):
    g = torch.Generator().manual_seed(5)
    x, dy = (torch.randn(ROWS, n, generator=g).bfloat16() for n in (K, N))
    return x, dy, torch.rand(ROWS, generator=g) if scaled else None


def step(module, call, x, dy, scales, number=1):
    """y, dx, dw and db of the last of several steps."""
    for _ in range(number):
        module.zero_grad()
        leaf = x.clone().requires_grad_()
        y = call(leaf, torch.tensor(SPLITS), scales=scales)
        y.backward(dy)
        octavo.step(module)
    return y.detach(), leaf.grad, module.weight.grad, module.bias.grad


def _split(group, rank, recipe, mode, compiled, scaled, settings=None):
    module = layer(recipe, mode, group, scale_bias=scaled, **(settings or {}))
    x, dy, scales = data(scaled)
    x, dy = (x, cut(dy, group, 1)) if mode == "column" else (cut(x, group, 1), dy)
    call = torch.compile(module, backend="aot_eager", fullgraph=True) if compiled else module
    return step(module, call, x.contiguous(), dy.contiguous(), scales, steps_of(recipe))


CASES = [
    ("bf16", False, True, 2),
    ("fp8-block", False, True, 2),
    ("fp8-current", False, False, 2),
    ("fp8-current", True, False, 2),
    ("fp8-delayed", False, False, 2),
    ("nvfp4", False, False, 2),
    *[
        pytest.param(recipe, *case, marks=pytest.mark.slow)
        for recipe in ("bf16", "fp8-current", "fp8-delayed", "fp8-rowwise", "fp8-block", "mxfp8", "nvfp4")
        for case in ((True, False, 2), (False, False, 4))
    ],
]


@pytest.mark.parametrize("mode", ["column", "row"])
@pytest.mark.parametrize(("recipe", "compiled", "scaled", "size"), CASES)
def test_ranks_compute_what_one_process_does(ranks, recipe, mode, compiled, scaled, size):
    module = layer(recipe, scale_bias=scaled)
    y, dx, dw, db = step(module, module, *data(scaled), steps_of(recipe))
    found = list(zip(*ranks.run(_split, recipe, mode, compiled, scaled, size=size), strict=True))
    noise = OWN_SCALES.get(recipe, 0)
    if mode == "column":
        assert torch.equal(torch.cat(found[0], 1), y)
        assert relative_error(found[1][0], dx) <= (noise or SUMS)
        assert relative_error(torch.cat(found[2], 1), dw) <= noise
        assert torch.equal(torch.cat(found[3], 1), db)
    else:
        noise = noise if recipe == "nvfp4" else 0
        assert relative_error(found[0][0], y) <= SUMS and not found[0][0][sum(SPLITS) :].any()
        assert relative_error(torch.cat(found[1], 1), dx) <= noise
        assert relative_error(torch.cat(found[2], 2), dw) <= noise
        assert relative_error(found[3][0], db) <= SUMS


# -- amaxes that ranks agree on ----------------------------------------------------------------------------------------


def _outlier(group, rank, recipe, mode, value, many):
    """y of a layer with an outlier in one expert's weight, and in one row of x: on the last rank alone."""
    found = []
    for parts in (None, group):
        module = layer(recipe, None if parts is None else mode, parts, bias=False, single_grouped_weight=not many)
        x, *_ = data(False)
        x[3, -1] = value
        last = parts is None or rank == group.size() - 1
        with torch.no_grad():
            if last:
                module._whole_weight()[2, -1, -1] = 3.0
        own = x if parts is None or mode == "column" else cut(x, group, 1).contiguous()
        found.append(module(own, torch.tensor(SPLITS)).detach())
    right, own = found
    return (cut(right, group, 1) if mode == "column" else right), own


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-delayed", "nvfp4"])
@pytest.mark.parametrize(("mode", "many"), [("column", False), ("column", True), ("row", False)])
def test_an_outlier_on_the_last_rank_scales_all_ranks(ranks, recipe, mode, many):
    for right, own in ranks.run(_outlier, recipe, mode, 300.0, many, size=2):
        assert torch.equal(own, right) if mode == "column" else relative_error(own, right) <= SUMS


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_spoils_its_group_on_all_ranks(ranks, value):
    for right, own in ranks.run(_outlier, "fp8-current", "row", value, False, size=2):
        assert torch.equal(own.isfinite(), right.isfinite()) and not own[3].isfinite().any()
        assert own[SPLITS[0] :].isfinite().all()


def _microbatches(group, rank, recipe, mode, compiled):
    """Two microbatches with cached weights, and with codes of them that backward makes again, against a layer that
    keeps them."""
    made = []
    for cached, keep in ((False, True), (True, True), (False, False), (True, False)):
        module = layer(recipe, mode, group, keep_weight_codes=keep)
        x, dy, _ = data(False)
        x, dy = (x, cut(dy, group, 1)) if mode == "column" else (cut(x, group, 1), dy)
        torch._dynamo.reset()
        call = torch.compile(module, backend="aot_eager", fullgraph=True) if compiled else module
        for first in (True, False):
            leaf = x.clone().requires_grad_()
            y = call(leaf, torch.tensor(SPLITS), is_first_microbatch=first if cached else None)
            y.backward(dy.contiguous())
        made.append((y.detach(), leaf.grad, module.weight.grad))
    return [all(torch.equal(a, b) for a, b in zip(made[0], other, strict=True)) for other in made[1:]]


@pytest.mark.parametrize(
    ("recipe", "mode", "compiled"),
    [("fp8-current", "column", False), ("fp8-current", "row", False), ("fp8-delayed", "column", False),
     ("fp8-current", "column", True)],
)  # fmt: skip
def test_weights_cast_at_other_times_have_the_same_codes(ranks, recipe, mode, compiled):
    for equal in ranks.run(_microbatches, recipe, mode, compiled, size=2):
        assert equal == [True] * 3


def _different(group, rank, what):
    module = layer("fp8-block" if what == "recipes" and rank else "fp8-current", "column", group)
    x = torch.ones(ROWS, K, dtype=torch.bfloat16, requires_grad=what == "dx" and rank == 1)
    try:
        module(x, torch.tensor(SPLITS))
    except Unsupported as problem:
        return str(problem)
    return "was not refused"


@pytest.mark.parametrize("what", ["recipes", "dx"])
def test_ranks_that_differ_are_told(ranks, what):
    for rank, text in enumerate(ranks.run(_different, what, size=2)):
        assert f"GroupedLinear({GROUPS}, {K}, {N // 2}) is split over 2 ranks, which must call it alike" in text
        assert f"Rank {rank} has fp8-" in text and f"rank {1 - rank} differs" in text


# -- runs --------------------------------------------------------------------------------------------------------------


def _experts(group, rank, recipe="fp8-block"):
    """Two layers and an activation of experts, as one run."""
    torch.manual_seed(4)
    settings = {"dtype": torch.bfloat16, "recipe": recipe, "bias": False, "tp_group": group}
    model = octavo.Sequential(
        octavo.GroupedLinear(GROUPS, K, 2 * N, parallel_mode="column", column_blocks=2, **settings),
        octavo.ops.SwiGLU(),
        octavo.GroupedLinear(GROUPS, N, K, parallel_mode="row", **settings),
    )
    sizes = torch.tensor((40, 6, 50) if recipe == "fp8-delayed" else SPLITS)  # which waits for an amax of each group
    for _ in range(3 if recipe == "fp8-delayed" else 1):
        model.zero_grad()
        x = data(False)[0].requires_grad_()
        y = model(x, sizes, sizes)
        y.sum().backward()
        octavo.step(model)
    text = model.explain(x.detach().requires_grad_(), sizes, sizes)
    return y.detach(), x.grad, model[0].weight.grad, model[2].weight.grad, text.fired


@pytest.mark.parametrize("recipe", ["fp8-block", "fp8-delayed"])
def test_experts_between_a_column_and_a_row_layer_are_one_run(ranks, recipe):
    right = _experts(None, 0, recipe)
    found = ranks.run(_experts, recipe, size=2)
    for own in found:
        assert own[4] == right[4] != ()
        assert relative_error(own[0], right[0]) <= SUMS and relative_error(own[1], right[1]) <= SUMS
    assert torch.equal(joined([own[2] for own in found], 2, 1), right[2])
    assert torch.equal(torch.cat([own[3] for own in found], 2), right[3])


def test_a_row_layer_whose_ranks_agree_on_x_is_no_part_of_a_run(ranks):
    right = _experts(None, 0, "fp8-current")
    for own in ranks.run(_experts, "fp8-current", size=2):
        assert (right[4], own[4]) == (("grouped-mlp",), ("grouped-linear-activation",))
        assert relative_error(own[0], right[0]) <= SUMS


@octavo.values.register("per-token-rows")
class PerToken(octavo.recipes.Recipe):
    """A scale for each row of x, which ranks need not agree on, and one for each weight, which they do."""

    def gemms(self):
        x, w = octavo.quant.Rowwise(), octavo.quant.Tensorwise()
        return octavo.recipes.LinearQuant.of(x=(x, x), w=(w, w), dy=(x, x))


def _weights_in_a_run(group, rank):
    """A row layer in a run, whose x is not there yet when ranks agree on its weights."""
    return _experts(group, rank, "per-token-rows")


def test_ranks_agree_on_weights_inside_of_a_run(ranks):
    right = _weights_in_a_run(None, 0)
    for own in ranks.run(_weights_in_a_run, size=2):
        assert own[4] == right[4] != ()
        assert relative_error(own[0], right[0]) <= SUMS


def _refused(group, rank):
    found = []
    x, sizes = torch.ones(ROWS, K, dtype=torch.bfloat16), torch.tensor(SPLITS)
    for call in (
        lambda: octavo.GroupedLinear(2, 8, 9, parallel_mode="column", tp_group=group),
        lambda: layer("bf16", "column", group)(x, sizes, dgrad_out=torch.empty_like(x)),
        lambda: layer("bf16", "row", group)(x[:, : K // 2], sizes, out=torch.empty(ROWS, N, dtype=x.dtype)),
    ):
        try:
            call()
        except Unsupported as problem:
            found.append(str(problem))
    return found


def test_what_cannot_be_split_is_refused(ranks):
    for uneven, dgrad_out, out in ranks.run(_refused, size=2):
        assert "9 do not divide by the 2 ranks" in uneven
        assert "dgrad_out is memory of one rank, and a column layer sums over ranks" in dgrad_out
        assert "out is memory of one rank, and a row layer sums over ranks" in out
