"""Which ranks agree on a layer's scales, and which draw the same numbers for stochastic rounding."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

import octavo
from octavo.distributed import set_amax_group
from octavo.model import step_warnings
from tests.support.linear_oracle import assert_same
from tests.support.wire import Wire

K, M = 32, 16


class OwnHalf:
    """A dispatcher: each of two ranks has half of the experts, and drops the tokens of the others."""

    def __init__(self, rank, number):
        self.first, self.number = rank * number, number

    def dispatch(self, x, index, weights, num_experts):
        index = torch.where((index >= self.first) & (index < self.first + self.number), index - self.first, -1)
        rows, permutation = octavo.moe.permute(x, index, self.number)
        return octavo.moe.Dispatched(rows, permutation.sizes, (permutation, weights))

    def combine(self, rows, dispatched):
        return octavo.moe.unpermute(rows, *dispatched.state)


def run(module, scale=1.0):
    torch.manual_seed(0)
    module(scale * torch.randn(M, K, requires_grad=True)).square().sum().backward()


def scales(module):
    return {name: t for name, t in octavo.state_dict(module).items() if name.endswith("encode")}


def of_experts(group, rank):
    moe = octavo.MoE(K, K, 4, 1, dispatcher=OwnHalf(rank, 2), num_local_experts=2, recipe="fp8-delayed")
    own = octavo.MoE(K, K, 4, 1, dispatcher=OwnHalf(rank, 2), num_local_experts=2, recipe="fp8-delayed")
    own.load_state_dict(moe.state_dict())
    for model, step_group in ((moe, group), (own, None)):
        run(model, 1 + 9 * rank)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            octavo.step(model, step_group)
    return scales(moe), scales(own)


def test_experts_of_one_rank_do_not_take_the_scales_of_another(ranks):
    (first, own), (second, others) = ranks.run(of_experts, size=2)
    for name in first:
        assert_same(first[name], own[name], name)
        assert_same(second[name], others[name], name)
    assert any(not torch.equal(first[name], second[name]) for name in first)


def of_groups(group, rank):
    """Two layers over all four ranks, two over this rank's pair, one alone."""
    pairs = [dist.new_group(pair) for pair in ([0, 1], [2, 3])]
    model = nn.ModuleList([octavo.Linear(K, K, recipe="fp8-delayed") for _ in range(5)])
    set_amax_group(model[2:4], pairs[rank // 2])
    set_amax_group(model[4:], "alone")
    for layer in model:
        run(layer, 2.0**rank)
    octavo.step(model, group)  # compares how many amaxes the ranks have
    for layer in model:
        run(layer, 4.0**rank)
    with Wire() as wire:
        octavo.step(model, group)
    inverse = [octavo.state_dict(layer)["scaling.forward.encode"][0].item() for layer in model]
    return inverse, [kind for kind, *_ in wire.sent]


def test_each_group_makes_one_all_reduce(ranks):
    found = ranks.run(of_groups)
    assert all(sent == ["all_reduce", "all_reduce"] for _, sent in found)
    inverse = torch.tensor([found for found, _ in found], device="cpu", dtype=torch.float64)
    relative = inverse / inverse[3]  # of the rank with the largest amaxes, which all ranks of a group take
    assert relative[:, :2].eq(1).all()
    assert relative[:, 2].tolist() == relative[:, 3].tolist() == [16, 16, 1, 1]
    assert relative[:, 4].tolist() == [64, 16, 4, 1]


def said(group, rank):
    step_warnings._said_of_ranks.clear()
    model = nn.Sequential(octavo.Linear(K, K, recipe="fp8-delayed"))
    found = []
    for way in ("own group", "none", "none", "other recipe"):
        if way == "other recipe":
            step_warnings._said_of_ranks.clear()
            model = nn.Sequential(octavo.Linear(K, K, recipe="fp8-block"))
        run(model)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            octavo.step(model, group if way == "own group" else None)
        found.append([str(one.message) for one in caught])
    step_warnings._said_of_ranks.clear()
    set_amax_group(model, "alone")
    model[0].recipe = "fp8-delayed"
    run(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        octavo.step(model)
    return [*found, [str(one.message) for one in caught]]


def test_a_step_without_a_group_warns_once(ranks):
    for found in ranks.run(said):
        assert [len(texts) for texts in found] == [0, 1, 0, 0, 0]
        assert "one of 4 ranks" in found[1][0] and "set_amax_group" in found[1][0]


def drawn(group, rank, split):
    """Gradients of a layer with equal x and dy on all ranks, its state, and gradients after a load of another's."""
    torch.manual_seed(0)
    pairs = [dist.new_group(pair) for pair in ([0, 1], [2, 3])]
    beside = []
    if split:
        beside.append(octavo.Linear(K, K, recipe="nvfp4", parallel_mode="row", tp_group=pairs[rank // 2]))
    torch.manual_seed(0)
    layer = octavo.Linear(K, K, recipe="nvfp4")
    run(layer)
    first = layer.weight.grad.clone()
    state = octavo.state_dict(layer)
    layer.weight.grad = None
    run(layer)
    second = layer.weight.grad.clone()
    octavo.load_state_dict(layer, state)
    layer.weight.grad = None
    run(layer)
    assert_same(layer.weight.grad, second, "after a load")
    return first, state["rounding.seed"], len(beside)


@pytest.mark.parametrize("split", [False, True], ids=["data parallel", "beside split layers"])
def test_ranks_with_other_rows_draw_other_numbers(ranks, split):
    found = ranks.run(drawn, split)
    for _, seed, _ in found:
        assert_same(seed, found[0][1], "a checkpoint")
    same = [[torch.equal(a, b) for b, *_ in found] for a, *_ in found]
    groups = [0, 0, 2, 2] if split else [0, 1, 2, 3]
    assert same == [[a == b for b in groups] for a in groups]
