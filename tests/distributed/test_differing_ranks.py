"""Ranks that differ in what they must share: settings, parameters, the order of layers. They raise, once."""

import warnings

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import octavo
from tests.support.linear_shards import message

K, N, TOKENS = 64, 32, 8


def x_of(mode):
    return torch.ones(TOKENS, K // 2 if mode == "row" else K)


# -- settings ----------------------------------------------------------------------------------------------------------


def _one_bias(group, rank, mode, kind, in_a_run):
    """A layer that has a bias on rank 0 alone, or one in another dtype, or one that it returns."""
    settings = {"recipe": "fp8-block", "parallel_mode": mode, "tp_group": group, "bias": kind != "none" or rank == 0}
    if kind == "returned" and rank == 0:
        settings["return_bias"] = True
    layer = octavo.Linear(K, N, **settings)
    if kind == "dtype" and rank == 0:
        layer.bias = nn.Parameter(layer.bias.detach().bfloat16())
    if kind == "weight" and rank == 0:
        layer.bfloat16()
    return message(octavo.Sequential(layer, octavo.ops.GELU()) if in_a_run else layer, x_of(mode))


@pytest.mark.parametrize("mode", ["column", "row"])
@pytest.mark.parametrize(
    ("kind", "in_a_run"), [("none", False), ("none", True), ("dtype", True), ("weight", False), ("returned", False)]
)
def test_a_parameter_on_one_rank_alone_is_refused(ranks, mode, kind, in_a_run):
    for rank, text in enumerate(ranks.run(_one_bias, mode, kind, in_a_run, size=2)):
        assert f"must call it alike. Rank {rank} has fp8-block" in text and f"rank {1 - rank} differs" in text


def _one_grouped_bias(group, rank, mode):
    layer = octavo.GroupedLinear(2, K, N, bias=rank == 0, recipe="fp8-block", parallel_mode=mode, tp_group=group)
    return message(layer, x_of(mode), torch.tensor([3, 5]))


@pytest.mark.parametrize("mode", ["column", "row"])
def test_a_bias_of_experts_on_one_rank_alone_is_refused(ranks, mode):
    for text in ranks.run(_one_grouped_bias, mode, size=2):
        assert "must call it alike" in text and "bias" in text


def _one_state(group, rank):
    """Scaling state that rank 0 alone has loaded."""
    layers = [octavo.Linear(K, N, recipe="fp8-delayed", parallel_mode="row", tp_group=group) for _ in range(2)]
    layers[0](x_of("row")).sum().backward()
    octavo.step(layers[0])
    if rank == 0:
        octavo.load_state_dict(layers[1], octavo.state_dict(layers[0]))
    return message(layers[1], x_of("row"))


def test_scaling_state_that_one_rank_alone_has_is_refused(ranks):
    with_state, without = ranks.run(_one_state, size=2)
    assert "must call it alike" in with_state and "no scale yet" not in with_state
    assert "must call it alike" in without and "no scale yet for x and w" in without


# -- replicated parameters ---------------------------------------------------------------------------------------------


def _other_bias(group, rank, kind):
    """A bias of a row layer, which all ranks add, with other values on rank 1."""
    if kind == "linear":
        layer, extra_inputs = octavo.Linear(K, N, recipe="fp8-block", parallel_mode="row", tp_group=group), ()
    else:
        single = kind == "experts"
        layer = octavo.GroupedLinear(
            2, K, N, recipe="fp8-block", parallel_mode="row", tp_group=group, single_grouped_bias=single
        )
        extra_inputs = (torch.tensor([3, 5]),)
    bias = list(layer.named_parameters())[-1][1]
    with torch.no_grad():
        bias.view(-1)[-1] += rank
    refused = message(layer, x_of("row"), *extra_inputs)
    with torch.no_grad():
        bias.view(-1)[-1] -= rank
        bias.copy_(bias.round(decimals=2))
    after = layer(x_of("row"), *extra_inputs).shape
    with torch.no_grad():
        bias.view(-1)[-1] += rank
    layer(x_of("row"), *extra_inputs)  # it is asked once
    return refused, after


@pytest.mark.parametrize("kind", ["linear", "experts", "many experts"])
def test_a_bias_that_differs_between_ranks_is_refused(ranks, kind):
    for rank, (refused, after) in enumerate(ranks.run(_other_bias, kind, size=2)):
        assert "has parameters that all ranks have in common" in refused
        assert f"their values on rank {1 - rank} are not those on rank {rank}" in refused
        assert after == (TOKENS, N)


def _other_norm(group, rank, kind):
    if kind == "own":
        norm = octavo.ops.LayerNorm(K).sum_gradients_over(group)
        model = octavo.Sequential(norm)
    else:
        settings = {"recipe": "bf16", "tp_group": group, "sequence_parallel": kind.endswith("sequence")}
        if kind.startswith("mlp"):
            model = octavo.LayerNormMLP(K, N, set_parallel_mode=True, **settings)
        else:
            model = octavo.LayerNormLinear(K, N, parallel_mode="column", **settings)
        norm = model.norm
    with torch.no_grad():
        norm.bias[3] = rank
    refused = message(model, torch.randn(TOKENS, K))
    with torch.no_grad():
        norm.bias[3] = 0
    model(torch.randn(TOKENS, K))
    return refused


@pytest.mark.parametrize("kind", ["own", "mlp", "mlp, sequence", "linear", "linear, sequence"])
def test_a_norm_that_differs_between_ranks_is_refused(ranks, kind):
    for rank, text in enumerate(ranks.run(_other_norm, kind, size=2)):
        assert "LayerNorm" in text and f"their values on rank {1 - rank} are not those on rank {rank}" in text


# -- the order of layers -----------------------------------------------------------------------------------------------


def _other_order(group, rank, kind):
    """Two layers of one shape, which rank 1 calls in another order; or rank 0 made one more before."""

    def made():
        return octavo.Linear(K, 48, recipe="fp8-block", parallel_mode="column", tp_group=group)

    if kind == "named":
        model = nn.ModuleList([nn.Linear(K, 48), nn.Linear(K, 48)])
        octavo.convert(model, "fp8-block")
        for layer in model:
            layer.set_tensor_parallel_group(group, "column")
        first, second = model
    else:
        if kind == "one more" and rank == 0:
            made()
        first, second = made(), made()
    if kind == "later":
        first(x_of("column")), second(x_of("column"))
    if kind != "one more" and rank == 1:
        first, second = second, first
    text = message(first, x_of("column")), message(second, x_of("column"))
    if kind == "one more" and rank == 1:
        made()  # so that later jobs of this process count alike
    return text


@pytest.mark.parametrize("kind", ["first", "later", "named"])
def test_layers_of_one_shape_in_another_order_are_refused(ranks, kind):
    for found in ranks.run(_other_order, kind, size=2):
        for text in found:
            assert "is split over 2 ranks, which must call it alike" in text
            assert ("at '" if kind == "named" else "such layers that it has made") in text


def test_a_rank_that_made_more_layers_calls_them_as_it_likes(ranks):
    for found in ranks.run(_other_order, "one more", size=2):
        assert found == ("was not refused",) * 2


# -- what it costs -----------------------------------------------------------------------------------------------------


class Asked(TorchDispatchMode):
    """Counts the all-gathers of int64, by which ranks compare."""

    number = 0

    def __torch_dispatch__(self, function, types, arguments=(), settings=None):
        self.number += "all_gather" in str(function) and arguments[0].dtype == torch.int64
        return function(*arguments, **(settings or {}))


def _sent(group, rank):
    torch.manual_seed(0)
    settings = {"set_parallel_mode": True, "sequence_parallel": True, "tp_group": group}
    block = octavo.LayerNormMLP(K, N, recipe="fp8-block", **settings)
    counts = []
    for _ in range(3):
        with Asked() as asked:
            block(torch.ones(TOKENS, K))
        counts.append(asked.number)
    for module in block:
        module._ranks_checked = False
    torch.compile(block, backend="aot_eager", fullgraph=True)(torch.ones(TOKENS, K))
    return counts, any(module._ranks_checked for module in block)


def test_a_norm_asks_once_and_a_graph_never(ranks):
    for counts, asked_in_a_graph in ranks.run(_sent, size=2):
        assert counts == [3, 2, 2]  # on a CPU a Linear asks at each call
        assert not asked_in_a_graph


# -- optimizers --------------------------------------------------------------------------------------------------------


def _steps(group, rank, when):
    """The warnings of a step of an optimizer, made before or after `fully_shard`, and whether the weights moved."""
    mesh = DeviceMesh.from_group(group, "cpu")
    model = nn.Sequential(octavo.Linear(K, N, recipe="fp8-block"), nn.LayerNorm(N), octavo.Linear(N, N))
    made = {}
    for moment in ("before", "after"):
        if moment == when:
            made["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
        if moment == "before":
            fully_shard(model, mesh=mesh)
    before = model[0].weight.full_tensor().clone()
    model(torch.ones(TOKENS, K)).square().sum().backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made["optimizer"].step()
        made["optimizer"].step()
    return [str(one.message) for one in caught], not torch.equal(before, model[0].weight.full_tensor())


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_optimizer_made_before_fully_shard_is_told(ranks, when):
    for texts, moved in ranks.run(_steps, when, size=2):
        assert moved == (when == "after") and len(texts) == (when == "before")
        assert not texts or "Make it after fully_shard" in texts[0]
