"""A Linear split over ranks, against the same layer in one process: equal bits where no sum is split over ranks."""

import itertools

import pytest
import torch

import octavo
from octavo.errors import UnsupportedConfig, UnsupportedShape
from tests.support import linear_shards as shards
from tests.support.linear_shards import K, N, alone, cut, loaded, message, split, steps_of, whole
from tests.support.mixed_recipe import MIXED
from tests.support.recipe_traits import is_stochastic
from tests.support.steps import relative_error
from tests.support.wire import Wire

RECIPES = ("bf16", "fp8-current", "fp8-delayed", "fp8-rowwise", "fp8-block", "mxfp8", "nvfp4")
MODES = tuple(itertools.product(("column", "row"), (False, True)))
Y, DX, DW, DB = range(4)
SUMS = 4e-3  # two sums in bf16, one rounded in parts
OWN_SCALES = {
    "fp8-current": 0.07,
    "nvfp4": 0.2,
    MIXED: 0.2,
}  # dy has a rank's own amax, or random numbers: errors of each format


def _split(group, rank, *arguments):
    return split(group, *arguments)


def _split_without_codes(group, rank, *arguments):
    return split(group, *arguments, keep_weight_codes=False)


def bounds(recipe, mode):
    """How far y, dx, dw and db may be from one process's; 0 is equal. Larger ones than SUMS are from bf16's."""
    noise = OWN_SCALES.get(recipe, 0)
    if mode == "column":
        return 0, noise or SUMS, noise, 0
    stochastic = noise if is_stochastic(recipe) else 0
    return SUMS, stochastic, stochastic, SUMS


def assert_near(found, right, plain, allowed):
    for name, part, wanted, exact, bound in zip(("y", "dx", "dw", "db"), found, right, plain, allowed, strict=True):
        assert part.shape == wanted.shape and part.dtype == wanted.dtype
        distance = relative_error(part, wanted if bound <= SUMS else exact)
        assert torch.equal(part, wanted) if bound == 0 else distance <= bound, (name, distance)


def check(ranks, recipe, mode, sequence, compiled, size, **options):
    number = steps_of(recipe)
    found = whole(ranks.run(_split, recipe, mode, sequence, compiled, number, options, size=size), mode, sequence)
    assert_near(found, alone(recipe, number, **options), alone("bf16", **options), bounds(recipe, mode))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("mode", "sequence"), MODES)
def test_two_ranks_compute_what_one_process_does(ranks, recipe, mode, sequence):
    check(ranks, recipe, mode, sequence, False, 2)


@pytest.mark.parametrize(("mode", "sequence"), MODES)
def test_ranks_agree_on_the_scales_of_backward_alone_where_a_recipe_mixes_two_schemes(ranks, mode, sequence):
    check(ranks, MIXED, mode, sequence, False, 2)


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-block", "nvfp4(stochastic=False)"])
@pytest.mark.parametrize("mode", ["column", "row"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_codes_that_backward_makes_again_have_the_scale_that_ranks_agreed_on(ranks, recipe, mode, compiled):
    arguments = recipe, mode, False, compiled, 1
    kept, again = (ranks.run(way, *arguments, size=2) for way in (_split, _split_without_codes))
    for one, other in zip(kept, again, strict=True):
        for name, wanted, found in zip(("y", "dx", "dw", "db"), one, other, strict=True):
            assert torch.equal(found, wanted), name


@pytest.mark.parametrize(
    ("recipe", "mode", "sequence"),
    [("fp8-current", "column", True), ("fp8-block", "column", True), ("fp8-delayed", "row", True)],
)
def test_a_graph_of_two_ranks_computes_what_one_process_does(ranks, recipe, mode, sequence):
    check(ranks, recipe, mode, sequence, True, 2)


@pytest.mark.parametrize(
    ("recipe", "mode", "sequence"),
    [("fp8-current", "column", True), ("fp8-block", "row", True), ("fp8-rowwise", "column", True)],
)
def test_four_ranks_compute_what_one_process_does(ranks, recipe, mode, sequence):
    check(ranks, recipe, mode, sequence, False, 4)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("mode", "sequence"), MODES)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("size", [2, 4])
def test_every_recipe_and_mode(ranks, recipe, mode, sequence, compiled, size):
    check(ranks, recipe, mode, sequence, compiled, size)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("mode", "sequence"), MODES)
def test_every_dtype(ranks, recipe, dtype, mode, sequence):
    check(ranks, recipe, mode, sequence, False, 2, dtype=dtype)


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-delayed", "fp8-rowwise", "nvfp4"])
@pytest.mark.parametrize(("mode", "sequence"), [("column", True), ("row", False)])
def test_an_outlier_on_the_last_rank_scales_all_ranks(ranks, recipe, mode, sequence):
    check(ranks, recipe, mode, sequence, False, 4, outlier=True)


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-delayed", "fp8-rowwise", "fp8-block", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("tokens", [8, 200])
def test_tokens_that_fill_no_block(ranks, recipe, tokens):
    check(ranks, recipe, "column", True, False, 2, tokens=tokens)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("mode", "sequence"), MODES)
def test_no_tokens(ranks, recipe, mode, sequence):
    arguments = recipe, mode, sequence, False, 2, {"tokens": 0}
    for y, dx, dw, _ in ranks.run(_split, *arguments, size=2):
        assert y.shape[0] == dx.shape[0] == 0
        assert not dw.any()


# -- other settings ----------------------------------------------------------------------------------------------------


def _microbatches(group, rank, recipe, mode, compiled):
    """Two microbatches with a cached weight, against a layer that casts it each time."""
    made = []
    for cached in (False, True):
        torch._dynamo.reset()
        x, dy, w, b = shards.tensors()
        layer = octavo.Linear(K, N, dtype=x.dtype, recipe=recipe, parallel_mode=mode, tp_group=group)
        column = mode == "column"
        loaded(layer, cut(w, group, 0 if column else 1), cut(b, group, 0) if column else b)
        x, dy = (x, cut(dy, group, 1)) if column else (cut(x, group, 1), dy)
        call = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
        for first in (True, False):
            y = call(x.contiguous(), is_first_microbatch=first if cached else None)
            y.backward(dy)
        made.append((y.detach(), layer.weight.grad.clone()))
    return [torch.equal(a, b) for a, b in zip(*made, strict=True)]


@pytest.mark.parametrize(
    ("recipe", "mode", "compiled"),
    [("fp8-current", "column", False), ("fp8-current", "row", False), ("fp8-delayed", "column", False),
     ("fp8-block", "row", False), ("fp8-current", "column", True)],
)  # fmt: skip
def test_a_cached_weight_has_the_same_codes(ranks, recipe, mode, compiled):
    for equal in ranks.run(_microbatches, recipe, mode, compiled, size=2):
        assert equal == [True, True]


def _columns_again(group, rank, recipe, compiled):
    """dx of a layer whose backward makes the weight's column codes again, and of one that keeps them."""
    made = []
    for keep in (True, False):
        torch._dynamo.reset()
        x, dy, w, b = shards.tensors(outlier=True)
        layer = octavo.Linear(
            K, N, dtype=x.dtype, recipe=recipe, parallel_mode="column", tp_group=group, keep_weight_codes=keep
        )
        loaded(layer, cut(w, group, 0), cut(b, group, 0))
        call = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
        leaf = x.requires_grad_()
        call(leaf).backward(cut(dy, group, 1).contiguous())
        made.append(leaf.grad)
    return torch.equal(*made)


@pytest.mark.parametrize(("recipe", "compiled"), [("fp8-current", False), ("fp8-current", True), ("fp8-block", False)])
def test_column_codes_made_again_are_those_of_forward(ranks, recipe, compiled):
    assert ranks.run(_columns_again, recipe, compiled, size=2) == [True, True]


def _destinations(group, rank, recipe, sequence):
    """dw by autograd, in main_grad, and by backward_dw."""
    made = []
    for settings in ({}, {"fuse_wgrad_accumulation": True}, {"delay_wgrad_compute": True}):
        x, dy, w, b = shards.tensors()
        layer = octavo.Linear(
            K, N, dtype=x.dtype, recipe=recipe, parallel_mode="column", sequence_parallel=sequence, tp_group=group,
            **settings,
        )  # fmt: skip
        loaded(layer, cut(w, group, 0), cut(b, group, 0))
        layer.weight.main_grad = torch.zeros_like(layer.weight)
        x = (cut(x, group, 0) if sequence else x).contiguous()
        layer(x).backward(cut(dy, group, 1).contiguous())
        layer.backward_dw()
        made.append(layer.weight.main_grad if "fuse_wgrad_accumulation" in settings else layer.weight.grad)
    return [torch.equal(made[0], other) for other in made]


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-block", "bf16"])
@pytest.mark.parametrize("sequence", [False, True])
def test_a_weight_gradient_goes_where_it_is_told(ranks, recipe, sequence):
    for equal in ranks.run(_destinations, recipe, sequence, size=2):
        assert equal == [True] * 3


def _born(group, rank, mode):
    torch.manual_seed(7)
    layer = octavo.Linear(64, 32, parallel_mode=mode, tp_group=group)
    after = torch.rand(1)
    return layer.weight.detach(), layer.bias.detach(), after, repr(layer)


@pytest.mark.parametrize("mode", ["column", "row"])
def test_parts_are_initialised_as_those_of_one_weight(ranks, mode):
    torch.manual_seed(7)
    right, after = torch.nn.Linear(64, 32), torch.rand(1)
    found = ranks.run(_born, mode)
    assert torch.equal(torch.cat([own[0] for own in found], 0 if mode == "column" else 1), right.weight)
    bias = torch.cat([own[1] for own in found]) if mode == "column" else found[0][1]
    assert torch.equal(bias, right.bias)
    assert all(torch.equal(own[2], after) for own in found)
    assert f"parallel_mode='{mode}', sequence_parallel=False, tp_group='" in found[0][3]


def _set_later(group, rank):
    x, dy, w, b = shards.tensors()
    layer = loaded(octavo.Linear(K, N // group.size(), dtype=x.dtype, recipe="fp8-current"), *(
        cut(t, group, 0) for t in (w, b)
    ))  # fmt: skip
    layer.set_tensor_parallel_group(group, "column", True)
    return shards.steps(layer, layer, cut(x, group, 0).contiguous(), cut(dy, group, 1).contiguous(), 1)


def test_a_group_can_be_set_later(ranks):
    found = whole(ranks.run(_set_later, size=2), "column", True)
    assert_near(found, alone("fp8-current"), alone("bf16"), bounds("fp8-current", "column"))


def _graph(group, rank, recipe, mode, sequence):
    """Targets of a layer's graphs, forward and backward, and how many graphs five numbers of tokens take."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.utils import counters

    graphs = []

    def show(module, inputs):
        graphs.append([str(node.target) for node in module.graph.nodes if node.op == "call_function"])
        return module

    layer = octavo.Linear(
        K, N, dtype=torch.bfloat16, recipe=recipe, parallel_mode=mode, sequence_parallel=sequence, tp_group=group
    )
    k = layer.in_features
    call = torch.compile(layer, backend=aot_autograd(fw_compiler=show, bw_compiler=show), fullgraph=True)
    call(torch.randn(256, k, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
    one = [[t for t in graph if "octavo" in t or "c10d" in t] for graph in graphs]
    torch._dynamo.reset()
    counters.clear()
    call = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for tokens in (256, 512, 768, 1280, 384):
        x = torch.randn(tokens, k, dtype=torch.bfloat16, requires_grad=True)
        torch._dynamo.maybe_mark_dynamic(x, 0)
        y = call(x)
        y.sum().backward()
        assert x.grad.shape == x.shape
    return one, counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(
    ("mode", "sequence"),
    [pytest.param(*mode, marks=[] if mode == ("column", True) else pytest.mark.slow) for mode in MODES],
)
def test_a_graph_has_one_node_each_way_and_the_collectives_beside_it(ranks, mode, sequence):
    (forward, backward), graphs = ranks.run(_graph, "fp8-block", mode, sequence, size=2)[0]
    count = [sum("octavo.run" in target for target in graph) for graph in (forward, backward)]
    assert count == [2 if (mode, sequence) == ("column", True) else 1, 1]  # a rank casts its own rows first
    sent = [[t.split(".")[1] for t in graph if "c10d" in t and "wait" not in t] for graph in (forward, backward)]
    wanted = {
        ("column", False): ([], ["all_reduce"]),
        ("column", True): (["all_gather_into_tensor"] * 4, ["reduce_scatter_tensor"]),
        ("row", False): (["all_reduce"], []),
        ("row", True): (["reduce_scatter_tensor"], ["all_gather_into_tensor", "all_reduce"]),
    }[mode, sequence]
    assert (sent[0], sorted(sent[1])) == wanted
    assert graphs <= 2


def _explained(group, rank, recipe, mode, sequence):
    layer = octavo.Linear(64, 64, recipe=recipe, parallel_mode=mode, sequence_parallel=sequence, tp_group=group)
    report = octavo.explain(torch.nn.Sequential(layer), torch.ones(8, layer.in_features))
    return report.layers[0].parallel, str(report)


@pytest.mark.parametrize(
    ("recipe", "mode", "sequence", "wanted"),
    [("fp8-block(wgrad='bf16')", "column", True, "rows of x are gathered as values: dw takes x unquantized"),
     ("fp8-current", "column", True, "split over 2 ranks; rows of x are gathered as codes"),
     ("mxfp8", "column", True, "as codes, or as values where those of a rank do not fill blocks of 32"),
     ("fp8-block", "column", False, "dx is summed over them"), ("fp8-block", "row", False, "y is summed over them"),
     ("fp8-block", "row", True, "y is summed, and its rows are scattered")],
)  # fmt: skip
def test_explain_says_what_is_sent(ranks, recipe, mode, sequence, wanted):
    for text, report in ranks.run(_explained, recipe, mode, sequence, size=2):
        assert wanted in text and text in report


def _layers_of_a_model(group, rank, recipe):
    """How many graphs the layers of a converted model take, each compiled by itself."""
    from torch._dynamo.utils import counters

    counters.clear()
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
    octavo.convert(model, recipe)
    for layer in model:
        layer.set_tensor_parallel_group(group, "row", True)
        layer.compile(backend="aot_eager", fullgraph=True)
    for layer in model:
        layer(torch.ones(8, 64, requires_grad=True)).sum().backward()
    return counters["stats"]["unique_graphs"]


def test_layers_of_a_model_share_a_graph(ranks):
    assert ranks.run(_layers_of_a_model, "fp8-current", size=2) == [1, 1]


# -- delayed scaling ---------------------------------------------------------------------------------------------------


def _three_layers(group, rank, mode):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[
        octavo.Linear(64, 64, recipe="fp8-delayed", parallel_mode="column", tp_group=group) for _ in range(3)
    ])  # fmt: skip
    for layer in model:
        layer(torch.full((4, 64), 2.0**rank)).sum().backward()
    with Wire() as first:
        octavo.step(model, group if mode == "given" else None)
    for layer in model:
        layer(torch.full((4, 64), 2.0**rank)).sum().backward()
    with Wire() as second:
        octavo.step(model, group if mode == "given" else None)
    encodes = [layer._hidden.scaling_forward_inverse_scale[0].item() for layer in model]
    return [name for name, *_ in first.sent], [name for name, *_ in second.sent], encodes


@pytest.mark.parametrize("mode", ["given", "own"])
def test_a_step_agrees_on_all_amaxes_in_one_collective(ranks, mode):
    for first, second, encodes in ranks.run(_three_layers, mode):
        assert first == second == ["all_reduce"]
        assert encodes == [448.0 / 8] * 3


def _uneven(group, rank):
    model = torch.nn.Sequential(*[octavo.Linear(8, 8, recipe="fp8-delayed") for _ in range(1 + rank)])
    model(torch.ones(2, 8)).sum().backward()
    return message(octavo.step, model, group)


def test_ranks_with_different_numbers_of_layers_are_told(ranks):
    for text in ranks.run(_uneven, size=2):
        assert "must hold the same layers in fp8-delayed. By rank they have [3, 6] amaxes" in text


# -- refusals ----------------------------------------------------------------------------------------------------------


def _refused(group, rank):
    found = {}

    def built(**settings):
        return octavo.Linear(62, 30, tp_group=group, **settings)

    found["column"] = message(lambda: built(parallel_mode="column"))
    found["row"] = message(lambda: built(parallel_mode="row"))
    row = octavo.Linear(64, 32, parallel_mode="row", sequence_parallel=True, tp_group=group)
    found["rows"] = message(row, torch.ones(6, 16))
    found["features"] = message(row, torch.ones(8, 64))
    found["codes"] = message(lambda: row(torch.ones(8, 16), fp8_output=True))
    found["dims"] = message(row, torch.ones(16))
    found["after"] = row(torch.ones(8, 16)).shape  # nothing was sent before, so that ranks are in step
    return found


def test_what_does_not_divide_is_refused_before_anything_is_sent(ranks):
    for text in ranks.run(_refused):
        assert "30 do not divide by the 4 ranks" in text["column"]
        assert "62 do not divide by the 4 ranks" in text["row"]
        assert "x of (6, 16) does not divide by the 4 processes" in text["rows"]
        assert "takes inputs [..., 16], got (8, 64)" in text["features"]
        assert "fp8_output=True returns codes of y, and y is summed" in text["codes"]
        assert "takes x [rows, ..., features], of two dims or more, got (16,)" in text["dims"]
        assert text["after"] == (2, 32)


def _different(group, rank, what):
    recipe = "fp8-block" if what == "recipes" and rank else "fp8-current"
    layer = octavo.Linear(
        64, 64, recipe=recipe, parallel_mode="column", sequence_parallel=True, tp_group=group,
        gather_again=what == "gather_again" and rank == 1,
    )  # fmt: skip
    layer.weight.requires_grad_(what != "dw" or rank == 0)
    tokens = 16 if "tokens" in what and rank else 8
    if what == "tokens later":
        layer(torch.ones(8, 64))
    text = message(layer, torch.ones(tokens, 64, requires_grad=what == "dx" and rank == 1))
    if what in ("tokens", "tokens later", "dx"):
        layer(torch.ones(8, 64))  # and the ranks are still in step
    return text


@pytest.mark.parametrize("what", ["recipes", "tokens", "tokens later", "dx", "dw", "gather_again"])
def test_ranks_that_differ_are_told(ranks, what):
    for rank, text in enumerate(ranks.run(_different, what, size=2)):
        assert f"Rank {rank} has fp8-" in text and f"rank {1 - rank} differs. " in text
        assert "Linear(64, 32) is split over 2 ranks, which must call it alike" in text


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"sequence_parallel": True}, "parallel_mode is None"), ({"parallel_mode": "diagonal"}, "diagonal"),
     ({"gather_again": True}, "a column layer with sequence_parallel=True, .* this layer has parallel_mode=None"),
     ({"row_codes_only": True}, "for sequence_parallel=True without gather_again"),
     ({"gather_again": True, "parallel_mode": "column"}, "parallel_mode='column' and sequence_parallel=False. Lea"),
     ({"gather_again": True, "parallel_mode": "row", "sequence_parallel": True}, "parallel_mode='row' and"),
     ({"tp_group": "tp"}, "parallel_mode is None"), ({"parallel_mode": "row", "tp_group": "tp"}, "not initialized")],
)  # fmt: skip
def test_settings_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(UnsupportedConfig, match=message):
        octavo.Linear(8, 8, **settings)


def test_a_layer_without_a_mode_takes_no_group():
    with pytest.raises(UnsupportedConfig, match="has no parallel_mode"):
        octavo.Linear(8, 8).set_tensor_parallel_group(None)


# -- one rank ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("mode", "sequence"), MODES)
def test_one_rank_takes_the_plain_path(recipe, mode, sequence, monkeypatch):
    right = alone(recipe, tokens=32)
    torch.manual_seed(0)
    x, dy, w, b = shards.tensors(tokens=32)
    layer = octavo.Linear(K, N, dtype=x.dtype, recipe=recipe, parallel_mode=mode, sequence_parallel=sequence)
    monkeypatch.setattr(layer, "_forward_in_parallel", None)
    found = shards.steps(loaded(layer, w, b), layer, x, dy, 1)
    assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))


def test_rows_without_dims_are_refused():
    with pytest.raises(UnsupportedShape):
        octavo.Linear(8, 8, parallel_mode="column")(torch.ones(()))
