"""octavo.inspect on layers that are split over ranks: it measures a rank's own product, inside of the collectives."""

import copy

import pytest
import torch
from torch import nn

import octavo
from octavo.communication import collectives
from octavo.recipes import SHIPPED
from tests.support.linear_shards import cut
from tests.support.recipe_traits import by_bits, has_four_bits

HIDDEN, FFN, TOKENS = 128, 256, 256
MODES = [("column", False), ("column", True), ("row", False), ("row", True)]
OPERANDS, RESULTS = ("x", "w", "dy"), ("y", "dx", "dw")
COSINE = by_bits(unquantized=1 - 1e-9, eight=0.998, four=0.97)  # of a rank's own product


def numbers(report):
    """The numbers of each tensor, by layer."""
    return {(row.layer, row.tensor): row._asdict() for row in report.rows()}


def train(call, x, dy, *arguments, **keywords):
    """y and dx."""
    leaf = x.detach().clone().requires_grad_()
    y = call(leaf, *arguments, **keywords)
    if isinstance(y, tuple):  # return_bias=True
        y = y[0] if y[1] is None else y[0] + y[1]
    y.backward(dy)
    return y.detach(), leaf.grad


def twice(model, x, dy, *arguments, compiled=False, **keywords):
    """The numbers and the findings of a step; and whether it has the bits of a step without inspection."""
    torch._dynamo.reset()
    twin = copy.deepcopy(model)
    calls = [torch.compile(m, backend="aot_eager", fullgraph=True) if compiled else m for m in (model, twin)]
    with octavo.inspect(model) as report:
        found = train(calls[0], x, dy, *arguments, **keywords)
    right = train(calls[1], x, dy, *arguments, **keywords)
    pairs = [*zip(found, right, strict=True)]
    pairs += [(p.grad, q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True)]
    return numbers(report), report.findings(), all(torch.equal(a, b) for a, b in pairs)


# -- Linear ------------------------------------------------------------------------------------------------------------


def tensors():
    g = torch.Generator().manual_seed(7)
    x, dy = torch.randn(TOKENS, HIDDEN, generator=g), torch.randn(TOKENS, FFN, generator=g)
    x[0, 0], dy[0, 0] = 9.0, 7.0  # the first rank has the amaxes
    return x, dy


def split_linear(group, recipe, mode, sequence, **settings):
    """A layer, this rank's x and dy, and those that its node gets."""
    torch.manual_seed(1)
    layer = octavo.Linear(
        HIDDEN, FFN, recipe=recipe, parallel_mode=mode, sequence_parallel=sequence, tp_group=group, **settings
    )
    x, dy = tensors()
    inner = (x, cut(dy, group, 1)) if mode == "column" else (cut(x, group, 1), dy)
    if not sequence:
        return layer, *inner, *inner
    outer = (cut(inner[0], group, 0), inner[1]) if mode == "column" else (inner[0], cut(inner[1], group, 0))
    return layer, *outer, *inner


def _linear(group, rank, recipe, mode, sequence, compiled=False, settings=None):
    layer, x, dy, inner_x, inner_dy = split_linear(group, recipe, mode, sequence, **(settings or {}))
    found, sentences, same = twice(layer, x.contiguous(), dy.contiguous(), compiled=compiled)
    w, bias = layer.weight.detach(), layer.bias.detach() if mode == "column" and layer.bias is not None else 0
    exact = {"y": inner_x @ w.T + bias, "dx": inner_dy @ w, "dw": inner_dy.T @ inner_x}
    return found, sentences, same, {name: t.abs().max().item() for name, t in exact.items()}


def check(found, recipe, layers=("",)):
    for rows, sentences, same, *_ in found:
        assert sentences == []
        assert same
        assert set(rows) == {(layer, tensor) for layer in layers for tensor in (*OPERANDS, *RESULTS)}
        for row in rows.values():
            assert row["calls"] == 1 and row["nonfinite"] == 0
            assert row["cosine"] is None or row["cosine"] > COSINE[recipe], row["tensor"]


@pytest.mark.parametrize("recipe", SHIPPED)
@pytest.mark.parametrize(("mode", "sequence"), MODES)
def test_a_rank_measures_its_own_products(ranks, recipe, mode, sequence):
    found = ranks.run(_linear, recipe, mode, sequence, size=2)
    check(found, recipe)
    for rows, _, _, amaxes in found:
        for name, amax in amaxes.items():
            assert rows["", name]["amax"] == pytest.approx(amax, rel=0.3 if has_four_bits(recipe) else 0.1)


@pytest.mark.parametrize(
    ("recipe", "mode", "sequence"),
    [
        ("bf16", "row", True),
        ("fp8-current", "row", False),
        ("fp8-block", "column", True),
        ("fp8-delayed", "column", True),
    ],
)
def test_a_graph_measures_what_an_eager_call_does(ranks, recipe, mode, sequence):
    eager, compiled = (ranks.run(_linear, recipe, mode, sequence, way, size=2) for way in (False, True))
    check(compiled, recipe)
    assert [one[0] for one in eager] == [one[0] for one in compiled]


@pytest.mark.parametrize("settings", [{"return_bias": True}, {"bias": False}, {"keep_weight_codes": False}], ids=str)
@pytest.mark.parametrize(("mode", "sequence"), MODES)
def test_settings_of_a_layer(ranks, mode, sequence, settings):
    check(ranks.run(_linear, "fp8-current", mode, sequence, False, settings, size=2), "fp8-current")


@pytest.mark.parametrize("recipe", ["bf16", "fp8-current", "fp8-rowwise", "fp8-block", "nvfp4"])
def test_x_that_backward_would_gather_again(ranks, recipe):
    check(ranks.run(_linear, recipe, "column", True, False, {"gather_again": True}, size=2), recipe)


def _casts(group, rank, recipe, mode, sequence):
    layer, x, dy, *_ = split_linear(group, recipe, mode, sequence)
    rows, *_ = twice(layer, x.contiguous(), dy.contiguous())
    quant, dim = octavo.recipe(recipe).linear(), 0 if mode == "column" else 1
    torch.manual_seed(1)
    weight = nn.Linear(HIDDEN, FFN).weight.detach()
    assert torch.equal(cut(weight, group, dim), layer.weight)
    wanted = {"w": [cut(t, group, dim) for t in (quant.fprop.right.quantize(weight).dequantize(), weight)]}
    whole = tensors()[0]
    values = quant.fprop.left.quantize(whole).dequantize()
    if mode == "row":
        wanted["x"] = [cut(t, group, 1) for t in (values, whole)]
    elif sequence:
        wanted["x"] = [cut(t, group, 0) for t in (values, whole)]  # casts its rows, which are gathered as codes
    else:
        wanted["x"] = [values, whole]
    return {name: (rows["", name]["sqnr"], decibels(*pair)) for name, pair in wanted.items()}


def decibels(values, source):
    return 10 * ((source.double().square().sum() / (values - source).double().square().sum()).log10().item())


@pytest.mark.parametrize("recipe", ["fp8-delayed", "fp8-current", "fp8-rowwise", "fp8-block", "mxfp8", "nvfp4"])
@pytest.mark.parametrize(("mode", "sequence"), MODES)
def test_casts_have_the_scales_that_ranks_agreed_on(ranks, recipe, mode, sequence):
    for found in ranks.run(_casts, recipe, mode, sequence, size=2):
        for measured, wanted in found.values():
            assert measured == pytest.approx(wanted, abs=1e-6)


def _sent(group, rank, recipe, mode, sequence):
    """Kind and bytes of each collective, of an inspected step and of a plain one."""
    layer, x, dy, *_ = split_linear(group, recipe, mode, sequence)
    send, sent = collectives.sent, []

    def noted(kind, operator, where, group, t, *settings):
        sent.append((kind, t.numel() * t.element_size()))
        return send(kind, operator, where, group, t, *settings)

    collectives.sent = noted
    try:
        with octavo.inspect(layer):
            train(layer, x.contiguous(), dy.contiguous())
        inspected = list(sent)
        sent.clear()
        train(layer, x.contiguous(), dy.contiguous())
    finally:
        collectives.sent = send
    return inspected, sent


@pytest.mark.parametrize("recipe", ["bf16", "fp8-current", "fp8-block"])
@pytest.mark.parametrize(("mode", "sequence"), MODES)
def test_inspection_sends_nothing_between_ranks(ranks, recipe, mode, sequence):
    for inspected, plain in ranks.run(_sent, recipe, mode, sequence, size=2):
        if (recipe, mode, sequence) == ("fp8-current", "row", True):  # dy travels as codes, but in a block as values
            (what, nbytes), *most = inspected.pop(), plain.pop(), plain.pop()
            assert most == [(what, nbytes // 4), ("all-reduce (max)", 4)]
        assert inspected == plain != []


# -- blocks, groups and DTensors ---------------------------------------------------------------------------------------


def _block(group, rank, recipe, sequence, compiled):
    torch.manual_seed(2)
    model = octavo.LayerNormMLP(
        HIDDEN, FFN, activation="swiglu", recipe=recipe, set_parallel_mode=True, sequence_parallel=sequence,
        tp_group=group,
    )  # fmt: skip
    x, dy = torch.randn(TOKENS, HIDDEN), torch.randn(TOKENS, HIDDEN)
    x, dy = (cut(x, group, 0), cut(dy, group, 0)) if sequence else (x, dy)
    found, sentences, _ = twice(model, x.contiguous(), dy.contiguous(), compiled=compiled)
    return found, sentences, True  # fusions that are off in the block round less often


@pytest.mark.parametrize("recipe", ["bf16", "fp8-current", "fp8-delayed", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("sequence", [False, True])
def test_a_block_is_measured_inside_of_its_collectives(ranks, recipe, sequence):
    check(ranks.run(_block, recipe, sequence, False, size=2), recipe, ("fc1", "fc2"))


def test_a_graph_of_a_block_is_measured(ranks):
    check(ranks.run(_block, "fp8-block", True, True, size=2), "fp8-block", ("fc1", "fc2"))


def _grouped(group, rank, recipe, mode, scaled):
    torch.manual_seed(3)
    layer = octavo.GroupedLinear(3, HIDDEN, FFN, recipe=recipe, parallel_mode=mode, tp_group=group, scale_bias=scaled)
    x, dy = tensors()
    x, dy = (x, cut(dy, group, 1)) if mode == "column" else (cut(x, group, 1), dy)
    sizes, scales = torch.tensor([100, 0, 150]), torch.rand(TOKENS) if scaled else None
    found = twice(layer, x.contiguous(), dy.contiguous(), sizes, scales=scales)
    w, rows = layer.weight.detach(), [slice(0, 100), slice(100, 250)]
    exact = torch.cat([dy[own] @ w[g] for own, g in zip(rows, (0, 2), strict=True)])
    return *found, exact.abs().max().item()


@pytest.mark.parametrize("recipe", ["bf16", "fp8-current", "fp8-delayed", "fp8-block", "nvfp4"])
@pytest.mark.parametrize("mode", ["column", "row"])
def test_groups_are_measured_inside_of_their_collectives(ranks, recipe, mode):
    found = ranks.run(_grouped, recipe, mode, recipe == "fp8-block", size=2)
    check(found, recipe)
    for rows, _, _, amax in found:
        assert rows["", "dx"]["amax"] == pytest.approx(amax, rel=0.3 if has_four_bits(recipe) else 0.1)


def _styles(group, rank, recipe, sequence):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import parallelize_module

    from octavo.distributed import ColwiseParallel, RowwiseParallel

    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(HIDDEN, FFN), nn.GELU(), nn.Linear(FFN, HIDDEN))
    octavo.convert(model, recipe)
    outside = Shard(0) if sequence else Replicate()
    plan = {"0": ColwiseParallel(input_layouts=outside), "2": RowwiseParallel(output_layouts=outside)}
    parallelize_module(model, DeviceMesh.from_group(group, "cpu"), plan)
    x, dy = torch.randn(TOKENS, HIDDEN), torch.randn(TOKENS, HIDDEN)
    x, dy = (cut(x, group, 0), cut(dy, group, 0)) if sequence else (x, dy)
    with octavo.inspect(model) as report:
        train(model, x.contiguous(), dy.contiguous())
    return numbers(report), report.findings(), True


@pytest.mark.parametrize("recipe", ["bf16", "fp8-current", "fp8-block"])
@pytest.mark.parametrize("sequence", [False, True])
def test_layers_of_a_plan_are_measured(ranks, recipe, sequence):
    check(ranks.run(_styles, recipe, sequence, size=2), recipe, ("0", "2"))
