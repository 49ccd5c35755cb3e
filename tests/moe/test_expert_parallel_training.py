"""Experts over ranks with what else training has: graphs, delayed scales, losses and loads of all ranks, FSDP2, tensor
parallelism, checkpoints."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import octavo
from octavo import moe
from octavo.distributed import sharded_state_dict
from octavo.errors import Unsupported
from tests.support.linear_oracle import assert_same
from tests.support.split_experts import D, E, N, T, data, everyones, in_one_process, joined, mixture, step
from tests.support.steps import assert_equal, relative_error


def _compiled(group, rank, recipe, capacity):
    """Eager and compiled, two batches each."""
    found = []
    for compiles in (False, True):
        model = mixture(recipe, dispatcher=moe.ExpertParallel(group, engine="padded", capacity=capacity))
        call = torch.compile(model, fullgraph=True, backend="aot_eager") if compiles else model
        found.append([t for tokens in (T, T) for t in step(model, *data(rank, tokens), call=call)] + [model.load])
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "capacity"), [("fp8-block", 30), ("fp8-delayed", None)])
def test_graphs_of_two_ranks_have_the_bits_of_eager(ranks, recipe, capacity):
    answers = ranks.run(_compiled, recipe, capacity, size=2)
    for eager, compiled in answers:
        assert_equal(compiled, eager)
    if capacity is None:
        found = joined([eager[4:8] for eager, _ in answers])
        assert_equal(found, in_one_process(recipe, 2, False, steps=2))


def _compiled_with_losses(group, rank):
    """Everything that a graph sends: rows, numbers of tokens, loads."""
    found = []
    for compiles in (False, True):
        model = mixture(
            "fp8-block", dispatcher=moe.ExpertParallel(group, capacity=40), loss_group=group, aux_loss_coef=0.1,
            z_loss_coef=0.1, expert_bias=True, shared_ffn_size=64,
        )  # fmt: skip

        def run(x, tokens, model=model):
            y = model(x, tokens=tokens)
            moe.update_bias(model.expert_bias, model.load, group=model.loss_group)
            return y, model.aux_loss

        call = torch.compile(run, fullgraph=True, backend="aot_eager") if compiles else run
        x, dy = data(rank)
        y, loss = call(x.requires_grad_(), torch.tensor(30 + rank))
        ((y * dy).sum() + loss).backward()
        found.append([y.detach(), loss.detach(), model.expert_bias, x.grad, *(p.grad for p in model.parameters())])
    return found


@pytest.mark.slow
def test_a_graph_sends_losses_and_loads(ranks):
    for eager, compiled in ranks.run(_compiled_with_losses, size=2):
        assert_equal(compiled, eager)


@pytest.mark.usefixtures("fresh_compiler")
def test_one_graph_takes_any_number_of_tokens():
    settings = {"engine": "padded", "capacity": 60}
    model, twin = (mixture("fp8-block", dispatcher=moe.ExpertParallel(**settings)) for _ in range(2))
    call = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (T, 33):
        assert_equal(step(model, *data(tokens, tokens), call=call), step(twin, *data(tokens, tokens)))
    assert model.overflow() == twin.overflow() > 0


REFUSED = {
    "exact numbers": ({}, "reads on the host how many rows change ranks, which a graph cannot"),
    "shared memory": ({"engine": "symmetric"}, "has ranks write to each other's memory, which no operator"),
    "codes": ({"engine": "padded", "payload": "codes"}, "passes codes of dy to backward beside autograd"),
}


@pytest.mark.usefixtures("forgetful_compiler")
@pytest.mark.parametrize("case", REFUSED)
def test_what_a_graph_cannot_hold_is_refused(case):
    settings, message = REFUSED[case]
    model = mixture("fp8-block", dispatcher=moe.ExpertParallel(**settings))
    with pytest.raises(Exception, match=message):
        torch.compile(model, fullgraph=True, backend="aot_eager")(data(0)[0])
    with pytest.raises(Unsupported, match=message):
        torch.compile(model, backend="aot_eager")(data(0)[0])


# -- all ranks together ------------------------------------------------------------------------------------------------


def _replicated(group, rank):
    """Two pairs of ranks with the same experts: steps that agree on amaxes over all four."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    model = mixture("fp8-delayed", ep_group=mesh["ep"])
    for _ in range(2):
        model.zero_grad()
        x, dy = data(rank)
        model(x.requires_grad_()).backward(dy)
        octavo.step(model, group)
    return {key: t for key, t in octavo.state_dict(model).items() if "inverse_scale" in key or "encode" in key}


def test_each_expert_agrees_on_amaxes_with_the_ranks_that_have_it(ranks):
    found = ranks.run(_replicated)
    model = mixture("fp8-delayed", dispatcher=moe.LocalDispatch())
    x, dy = everyones(4)
    for _ in range(2):
        model.zero_grad()
        model(x.detach().requires_grad_()).backward(dy)
        octavo.step(model)
    want = octavo.state_dict(model)
    assert found[0].keys() <= want.keys() and found[0]
    for key in found[0]:
        # x, w and dy have a scale for each expert, one operand after the other
        parts = [answer[key].view(-1, E // 2) for answer in found]
        assert_same(parts[2], parts[0])
        assert_same(parts[3], parts[1])
        whole, right = torch.cat(parts[:2], 1), want[key].view(-1, E)
        if "fc1" in key and "forward" in key:
            assert_same(whole, right)
        assert relative_error(whole, right) < 0.02  # each pair scaled its first step by its own amaxes


def _balanced(group, rank, sizes):
    """Losses and the moved bias, of tokens of this rank among those of all."""
    model = mixture("bf16", ep_group=group, loss_group=group, aux_loss_coef=0.5, z_loss_coef=0.25, expert_bias=True)
    x, _ = data(rank, sizes[rank])
    model(x)
    model.aux_loss.backward()
    moe.update_bias(model.expert_bias, model.load, group=group)
    return model.aux_loss.detach(), model.router.weight.grad, model.expert_bias


def test_losses_and_the_bias_count_the_tokens_of_all_ranks(ranks):
    sizes = (40, 8)
    model = mixture("bf16", aux_loss_coef=0.5, z_loss_coef=0.25, expert_bias=True)
    model(everyones(2, sizes)[0])
    model.aux_loss.backward()
    moe.update_bias(model.expert_bias, model.load)
    losses, grads, biases = zip(*ranks.run(_balanced, sizes, size=2), strict=True)
    torch.testing.assert_close(sum(losses) / 2, model.aux_loss.detach())
    assert relative_error(sum(grads) / 2, model.router.weight.grad) < 5e-3  # two bfloat16 gradients
    for bias in biases:
        assert_same(bias, model.expert_bias)


# -- experts that are split further ------------------------------------------------------------------------------------


def _sharded(group, rank):
    """A step with FSDP2: experts over the pairs of ranks that have the same ones, the rest over all ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    model = mixture("fp8-block", ep_group=mesh["ep"])
    fully_shard(model.experts, mesh=mesh["dp"])
    model.experts.set_gradient_divide_factor(4.0)  # a mean over all ranks, whose tokens an expert sees
    model.experts.set_force_sum_reduction_for_comms(True)  # gloo multiplies nothing
    fully_shard(model, mesh=DeviceMesh("cpu", range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    x, dy = data(rank)
    y = model(x)
    y.backward(dy)
    gradients = [p.grad.full_tensor() for p in (model.experts.fc1.weight, model.router.weight)]
    optimizer.step()
    return [y.detach(), *gradients, model(x).detach()]


def test_fsdp_shards_the_experts_of_a_rank(ranks):
    y, _, dw1, _ = in_one_process("fp8-block", 4, True)
    found = ranks.run(_sharded)
    assert_same(torch.cat([answer[0] for answer in found]), y)
    assert relative_error(4 * torch.cat([found[0][1], found[1][1]]), dw1) < 0.01  # sums of bfloat16 gradients
    for i in (1, 2):
        assert_same(found[2][i], found[0][i])
    model = mixture("fp8-block", dispatcher=moe.LocalDispatch())
    x, dy = everyones(4)
    model(x).backward(dy)
    assert relative_error(4 * found[0][2], model.router.weight.grad) < 0.02
    assert relative_error(torch.cat([answer[3] for answer in found]), y) > 0  # the step was taken


def _with_features_split(group, rank, recipe, engine):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "tp"))
    model = mixture(recipe, dispatcher=moe.ExpertParallel(mesh["ep"], engine=engine), tp_group=mesh["tp"])
    found = step(model, *data(rank // 2))
    return found, tuple(model.experts.fc2.weight.shape)


@pytest.mark.parametrize(
    ("recipe", "engine"),
    [("fp8-block", "auto"), ("fp8-block", "symmetric"), pytest.param("mxfp8", "auto", marks=pytest.mark.slow)],
)
def test_features_of_experts_are_split_over_other_ranks(ranks, recipe, engine):
    found = ranks.run(_with_features_split, recipe, engine)
    assert found[0][1] == (E // 2, D, N // 2)
    y, dx, _, dw2 = in_one_process(recipe, 2, False)
    for tp in (0, 1):
        mine = joined([found[tp][0][:2], found[2 + tp][0][:2]])
        assert relative_error(mine[0], y) < 8e-3  # two bfloat16 sums
        assert relative_error(mine[1], dx) < 0.05
    whole = torch.cat([torch.cat([found[ep * 2 + tp][0][3] for tp in (0, 1)], 2) for ep in (0, 1)])
    assert relative_error(whole, dw2) < 0.05


# -- checkpoints -------------------------------------------------------------------------------------------------------


def _saved(group, rank, folder):
    model = mixture("fp8-block", ep_group=group)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)  # other values than those that the next model starts with
    dcp.save(sharded_state_dict(model), checkpoint_id=folder, process_group=group)
    return model.experts.fc1.weight.detach()


def _loaded(group, rank, folder, other):
    model = mixture("fp8-block", ep_group=group)
    state = sharded_state_dict(model)
    dcp.load(state, checkpoint_id=folder, process_group=group)
    model.load_state_dict({k: v.to_local() if hasattr(v, "to_local") else v for k, v in state.items()})
    dcp.save(sharded_state_dict(model), checkpoint_id=other, process_group=group)
    return model.experts.fc1.weight.detach(), model.router.weight.detach()


def test_a_checkpoint_of_four_ranks_loads_on_two_and_on_one(ranks, tmp_path):
    saved = torch.cat(ranks.run(_saved, str(tmp_path / "four")))
    found = ranks.run(_loaded, str(tmp_path / "four"), str(tmp_path / "two"), size=2)
    assert_same(torch.cat([fc1 for fc1, _ in found]), saved)
    stock = {name: torch.zeros_like(t) for name, t in mixture("bf16").state_dict().items()}
    dcp.load(stock, checkpoint_id=str(tmp_path / "two"), no_dist=True)
    assert_same(stock["experts.fc1.weight"], saved)
    assert_same(stock["router.weight"], found[0][1])
    assert_same(saved, 2 * mixture("bf16").experts.fc1.weight.detach())  # equal seeds: parts of one process's weights
