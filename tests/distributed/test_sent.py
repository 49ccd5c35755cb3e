"""Collectives of a split Linear: their number, whether they send codes or values, and their bytes, also in backward."""

import pytest
import torch

import octavo
from octavo.communication import collectives
from octavo.errors import ModifiedInPlace
from tests.support import linear_shards as shards
from tests.support.linear_shards import K, M, N, cut, loaded
from tests.support.wire import Wire

RECIPES = ("bf16", "fp8-current", "fp8-delayed", "fp8-rowwise", "fp8-block", "mxfp8", "nvfp4")


def _wire(group, rank, recipe, mode, sequence, tokens):
    x, *_ = shards.tensors(tokens=tokens)
    layer = octavo.Linear(
        K, N, dtype=x.dtype, recipe=recipe, parallel_mode=mode, sequence_parallel=sequence, tp_group=group
    )
    x = cut(x, group, 0) if sequence else x
    x = x if mode == "column" else cut(x, group, 1)
    x = x.contiguous().requires_grad_()
    for _ in range(2 if recipe == "fp8-delayed" else 1):  # whose first step agrees on amaxes besides
        with Wire() as wire:
            y = layer(x)
            forward, wire.sent = wire.sent, []
            y.sum().backward()
        octavo.step(layer)
    return forward, wire.sent, x.numel() * 2


def _gathers(group, rank, recipe, trains, again):
    """The bytes of each all-gather of x in an eager step, forward and backward, for each value of x. Codes and their
    scales, one after the other, are one gather."""
    x = shards.tensors()[0].repeat(1, 1024 // K)
    layer = octavo.Linear(
        1024, N, dtype=x.dtype, recipe=recipe, parallel_mode="column", sequence_parallel=True, tp_group=group,
        gather_again=again,
    )  # fmt: skip
    x = cut(x, group, 0).contiguous().requires_grad_(trains)
    layer.requires_grad_(trains)
    send, sent = collectives.sent, []

    def noted(kind, operator, where, group, t, *settings):
        if kind == "all-gather" and t.dtype != torch.int64:  # whether the ranks call the layer alike
            sent.append(t.numel() * t.element_size() / x.numel())
        return send(kind, operator, where, group, t, *settings)

    collectives.sent = noted
    try:
        y = layer(x)
        forward, sent = sent, []
        if trains:
            y.sum().backward()
    finally:
        collectives.sent = send
    return _with_scales(forward), _with_scales(sent)


def _with_scales(sent):
    found = []
    for size in sent:
        if size >= 0.25:  # codes, or values
            found.append(size)
        else:
            found[-1] += size
    return found


# bytes of a gather for each value of x, and how many there are: in forward and in backward, without and with
# gather_again, and without gradients
GATHERS = {
    "bf16": (2.0, (1, 0), (1, 1), 1),
    "fp8-current": (1.0, (1, 0), (1, 1), 1),
    "fp8-delayed": (1.0, (1, 0), (1, 1), 1),
    "fp8-rowwise": (1.004, (2, 0), (1, 1), 1),
    "fp8-block": (1.032, (2, 0), (1, 1), 1),
    "mxfp8": (1.032, (2, 0), (1, 1), 1),
    "nvfp4": (0.563, (2, 0), (1, 1), 1),
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_gather_of_codes_takes_half_of_the_bytes_of_bf16(ranks, recipe):
    most, kept, again, alone = GATHERS[recipe]
    for trains, gather_again, wanted in ((True, False, kept), (True, True, again), (False, False, (alone, 0))):
        forward, backward = ranks.run(_gathers, recipe, trains, gather_again, size=2)[0]
        assert (len(forward), len(backward)) == wanted
        assert all(0.99 * most <= size <= most for size in (*forward, *backward))
    assert recipe == "bf16" or most <= 0.52 * 2


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-delayed", "fp8-rowwise", "fp8-block", "mxfp8", "nvfp4"])
def test_codes_are_sent_as_bytes_and_gradients_in_their_dtype(ranks, recipe):
    forward, backward, plain = ranks.run(_wire, recipe, "column", True, M, size=2)[0]
    gathers = {kind for name, kind, _ in forward if name == "all_gather_into_tensor"}
    assert gathers == {"uint8"}
    assert [(name, kind, size) for name, kind, size in backward] == [("reduce_scatter_tensor", "bfloat16", 2 * plain)]


@pytest.mark.parametrize(
    ("recipe", "tokens"), [("bf16", M), ("fp8-block(wgrad='bf16')", M), ("fp8-block", 200), ("mxfp8", 80)]
)
def test_values_are_gathered_where_codes_would_differ(ranks, recipe, tokens):
    forward, _, plain = ranks.run(_wire, recipe, "column", True, tokens, size=2)[0]
    assert [sent for sent in forward if sent[0] == "all_gather_into_tensor"] == [
        ("all_gather_into_tensor", "bfloat16", plain)
    ]


@pytest.mark.parametrize(
    ("mode", "sequence", "wanted"),
    [("column", False, ([], ["all_reduce"])), ("row", False, (["all_reduce"], [])),
     ("row", True, (["reduce_scatter_tensor"], ["all_reduce", "all_gather_into_tensor"]))],
)  # fmt: skip
def test_nothing_else_is_sent(ranks, mode, sequence, wanted):
    forward, backward, _ = ranks.run(_wire, "fp8-block", mode, sequence, M, size=2)[0]
    assert ([name for name, *_ in forward], sorted(name for name, *_ in backward)) == (wanted[0], sorted(wanted[1]))


# -- what backward gathers again --------------------------------------------------------------------------------------


def _again(group, rank, recipe):
    kept = {}
    found = {}
    for again in (False, True):
        saved = {}

        def note(t, saved=saved):
            saved[t.data_ptr()] = t.numel() * t.element_size() if isinstance(t, torch.Tensor) else 0
            return t

        x, dy, w, b = shards.tensors()
        layer = octavo.Linear(
            K, N, dtype=x.dtype, recipe=recipe, parallel_mode="column", sequence_parallel=True, tp_group=group,
            gather_again=again,
        )  # fmt: skip
        loaded(layer, cut(w, group, 0), cut(b, group, 0))
        leaf = cut(x, group, 0).contiguous().requires_grad_()
        found[again] = shards.steps(layer, layer, cut(x, group, 0).contiguous(), cut(dy, group, 1).contiguous(), 1)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            y = layer(leaf)
        kept[again] = sum(saved.values())
        del y
    return [torch.equal(a, b) for a, b in zip(found[False], found[True], strict=True)], kept


@pytest.mark.parametrize(
    "recipe",
    [
        "fp8-current",
        "fp8-rowwise",
        "fp8-block",
        "mxfp8",
        "fp8-block(backward='dequantized')",
        "fp8-block(wgrad='bf16')",
        "bf16",
    ],
)
def test_codes_gathered_again_are_the_same(ranks, recipe):
    for equal, kept in ranks.run(_again, recipe, size=2):
        assert equal == [True] * 4
        assert kept[True] < kept[False]


def _overwritten(group, rank):
    layer = octavo.Linear(
        64, 64, recipe="bf16", parallel_mode="column", sequence_parallel=True, tp_group=group, gather_again=True
    )
    x = torch.ones(8, 64)
    y = layer(x)
    x.zero_()
    try:
        y.sum().backward()
    except ModifiedInPlace as found:
        return str(found)
    return "was not refused"


def test_values_that_were_overwritten_are_not_gathered_again(ranks):
    for text in ranks.run(_overwritten, size=2):
        assert "Linear(64, 32) needs its x, in backward as it was in forward" in text
