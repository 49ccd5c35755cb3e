"""DistributedDataParallel as it is by default, which copies the buffers of rank 0 to all ranks: the state of recipes is
none of them, and each rank keeps its own."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import octavo
from tests.support.linear_oracle import assert_same, spiky
from tests.support.linear_shards import mesh_of
from tests.support.state_tensors import named_state

K, M, STEPS = 32, 16, 3
RECIPES = ("fp8-delayed", "nvfp4", "fp8-block")


def model_in(recipe):
    torch.manual_seed(0)
    return nn.Sequential(octavo.Linear(K, K, recipe=recipe), nn.BatchNorm1d(K), octavo.Linear(K, K))


def train(call, model, recipe, rank, group=None):
    """Runs steps of two microbatches."""
    for step in range(STEPS):
        for microbatch in range(2):
            with octavo.autocast(recipe), octavo.microbatch(first=microbatch == 0):
                call((1 + rank) * spiky(M, K, seed=step + microbatch)).square().mean().backward()
        octavo.step(model, group)
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.1 * p.grad)
                p.grad = None


def states(group, rank, recipe, own, agrees):
    model = model_in(recipe if own else None)
    wrapped = DistributedDataParallel(model, process_group=group)
    train(wrapped, model, recipe, rank, group if agrees else None)
    return (
        octavo.state_dict(model),
        {name: p.detach() for name, p in model.named_parameters()},
        len(list(named_state(model))),
    )


@pytest.mark.parametrize("own", [True, False], ids=["own recipe", "autocast"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_ranks_keep_their_own_state(ranks, recipe, own):
    (first, weights, number), (second, others, _) = ranks.run(states, recipe, own, False, size=2)
    assert number > 0
    for name, weight in weights.items():
        assert_same(others[name], weight, name)  # the gradients are averaged
    for name in first:
        if name.endswith("scaling.forward.history"):  # of x and w
            window, other = (state[name].view(2, -1)[:, :STEPS] for state in (first, second))
            assert_same(window[1], other[1], "w")
            if name.startswith("0."):
                assert_same(2 * window[0], other[0], "x")


def test_ranks_that_agree_have_equal_scales(ranks):
    (first, *_), (second, *_) = ranks.run(states, "fp8-delayed", True, True, size=2)
    for name in first:
        assert_same(second[name], first[name], name)


def fused_in_ddp(group, rank, compiles):
    layer = octavo.Linear(K, K, recipe="fp8-block", fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.zeros(K, K)
    wrapped = DistributedDataParallel(layer, process_group=group)
    call = torch.compile(wrapped, backend="aot_eager") if compiles else wrapped
    try:
        call(spiky(M, K))
        said = ""
    except Exception as error:
        said = str(error)
    with wrapped.no_sync():
        wrapped(spiky(M, K)).sum().backward()
    reduced_by_hand = bool(layer.weight.main_grad.any())
    layer.weight.grad_added_to_main_grad = False
    wrapped(spiky(M, K)).sum().backward()
    return said, reduced_by_hand, layer.weight.grad_added_to_main_grad


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
def test_gradients_in_main_grad_are_refused(ranks, compiles):
    """DDP averages weight.grad, which stays None; a trainer that reduces main_grad itself says so."""
    for said, *others in ranks.run(fused_in_ddp, compiles, size=2):
        assert "DistributedDataParallel averages weight.grad" in said and "no_sync()" in said
        assert others == [True, True]


def trained_codes(group, rank):
    """Returns the codes of a weight before and after steps of an optimizer, and what a call of a sharded one says."""
    torch.manual_seed(0)
    model, other = (nn.Sequential(octavo.Linear(K, K, recipe="fp8-block")) for _ in range(2))
    octavo.quantize_weights(other)
    fully_shard(other, mesh=mesh_of(group))
    octavo.quantize_weights(model, trainable=True)
    wrapped = DistributedDataParallel(model, process_group=group)
    optimizer = octavo.optim.AdamW(model.parameters(), lr=0.1)
    before = model[0].weight.row_codes.clone()
    for step in range(STEPS):
        wrapped((1 + rank) * spiky(M, K, seed=10 * rank + step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    try:
        other(spiky(M, K))
        said = ""
    except octavo.errors.UnsupportedConfig as error:
        said = str(error)
    return before, model[0].weight.row_codes.clone(), said


def test_ranks_train_equal_codes_and_fsdp_refuses_them(ranks):
    """DDP averages the dense gradients of weights that are codes; FSDP2 would replace such a weight."""
    (before, first, said), (_, second, _) = ranks.run(trained_codes, size=2)
    assert torch.equal(first.view(torch.uint8), second.view(torch.uint8))
    assert not torch.equal(first.view(torch.uint8), before.view(torch.uint8))
    assert "is stored as codes" in said
