"""Experts of other packages over ranks: `octavo.convert`, then a plan with `octavo.moe.ExpertwiseParallel`."""

import copy
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import octavo
from octavo import moe
from octavo.distributed import sharded_state_dict
from octavo.errors import UnsupportedConfig
from octavo.model.third_party import third_party_experts
from tests.support.dispatched_experts import PACKAGE, Config, Gated, Ungated, package
from tests.support.linear_oracle import assert_same
from tests.support.linear_shards import mesh_of
from tests.support.steps import assert_equal
from tests.support.titan_experts import GroupedExperts

E, D, FFN, K, T = 4, 64, 96, 2, 24
WEIGHTS = {"gated": ("gate_up_proj", "down_proj"), "ungated": ("up_proj", "down_proj"),
           "titan": ("w1_EFD", "w3_EFD", "w2_EDF")}  # fmt: skip


class Block(nn.Module):
    """A router, and experts as transformers or torchtitan call them."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.router = kind, nn.Linear(D, E, bias=False, dtype=torch.bfloat16)
        if kind == "titan":
            self.experts = GroupedExperts(E, D, FFN, dtype=torch.bfloat16)
        else:
            self.experts = (Gated if kind == "gated" else Ungated)(Config(), E, D, FFN, dtype=torch.bfloat16)

    def forward(self, x):
        weights, index = self.router(x).softmax(-1).topk(K)
        if self.kind != "titan":
            return x + self.experts(x, index, weights)
        rows, permutation = moe.permute(x, index, E, tail="zero")
        return x + moe.unpermute(self.experts(rows, permutation.sizes.int()), permutation, weights)


def block(kind, recipe="fp8-block"):
    sys.modules.setdefault(PACKAGE, package())
    torch.manual_seed(5)
    made = Block(kind)
    octavo.convert(made.experts, recipe)
    return made


def data(rank):
    torch.manual_seed(10 + rank)
    return torch.randn(T, D).bfloat16(), torch.randn(T, D).bfloat16()


def step(model, x, dy, group=None):
    leaf = x.clone().requires_grad_()
    y = model(leaf)
    y.backward(dy)
    octavo.step(model, group)
    return [y.detach(), leaf.grad, *(model.experts.get_parameter(name).grad for name in WEIGHTS[model.kind])]


def split(kind, group, recipe="fp8-block", **settings):
    model = block(kind, recipe)
    return parallelize_module(model, mesh_of(group), {"experts": moe.ExpertwiseParallel(**settings)})


class Alone(moe.LocalDispatch):
    """A dispatcher within the process, as split experts call one."""

    ranks, group = 1, ""


def in_one_process(kind, recipe):
    """The block with all experts, which runs its layers one by one, as split experts do."""
    model = block(kind, recipe)
    third_party_experts.revert(model.experts)
    model.experts.__dict__["_octavo_dispatcher"] = Alone()
    third_party_experts.convert(model.experts, "", octavo.recipe(recipe), True)
    return model


def _steps(group, rank, kind, recipe, settings):
    model = split(kind, group, recipe, **settings)
    optimizer, found = torch.optim.SGD(model.experts.parameters(), lr=0.1), []
    for _ in range(2):
        optimizer.zero_grad()
        found.append(step(model, *data(rank)))
        optimizer.step()
    return found


CASES = {
    "gated": ("gated", "fp8-block", {"payload": "values"}),
    "titan": ("titan", "fp8-block", {}),
    "gated, delayed": ("gated", "fp8-delayed", {}),
    "ungated, padded": ("ungated", "fp8-current", {"engine": "padded"}),
    "titan, symmetric": ("titan", "bf16", {"engine": "symmetric"}),
}


@pytest.mark.parametrize("case", CASES)
def test_ranks_compute_what_one_process_does(ranks, case):
    kind, recipe, settings = CASES[case]
    answers = ranks.run(_steps, kind, recipe, settings, size=2)
    model = in_one_process(kind, recipe)
    optimizer = torch.optim.SGD(model.experts.parameters(), lr=0.1)
    for i in range(2):
        optimizer.zero_grad()
        want = step(model, *(torch.cat(parts) for parts in zip(data(0), data(1), strict=True)))
        optimizer.step()
        found = [torch.cat(parts) for parts in zip(*[answer[i] for answer in answers], strict=True)]
        assert_equal(found, want, f"{case}, step {i}")


def _compiled(group, rank, kind):
    found = []
    for compiles in (False, True):
        model = split(kind, group, engine="padded")
        call = torch.compile(model, fullgraph=True, backend="aot_eager") if compiles else model
        x, dy = data(rank)
        leaf = x.requires_grad_()
        y = call(leaf)
        y.backward(dy)
        found.append([y.detach(), leaf.grad, *(model.experts.get_parameter(name).grad for name in WEIGHTS[kind])])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gated", "titan"])
def test_graphs_have_the_bits_of_eager(ranks, kind):
    for eager, compiled in ranks.run(_compiled, kind, size=2):
        assert_equal(compiled, eager)


def _replicated(group, rank):
    """Two pairs of ranks with the same experts: steps that agree on amaxes over all four."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    model = block("gated", "fp8-delayed")
    parallelize_module(model, mesh["ep"], {"experts": moe.ExpertwiseParallel()})
    for _ in range(2):
        step(model, *data(rank), group)
    return {key: t for key, t in octavo.state_dict(model).items() if "encode" in key}


@pytest.mark.slow
def test_each_expert_agrees_on_amaxes_with_the_ranks_that_have_it(ranks):
    found = ranks.run(_replicated)
    assert found[0]
    for key in found[0]:
        assert_same(found[2][key], found[0][key])
        assert_same(found[3][key], found[1][key])
    assert any(not torch.equal(found[0][key], found[1][key]) for key in found[0])


def _saved(group, rank, kind, folder):
    model = split(kind, group)
    with torch.no_grad():
        for p in model.experts.parameters():
            p.mul_(2)
    dcp.save(sharded_state_dict(model), checkpoint_id=folder, process_group=group)


def _loaded(group, rank, kind, folder):
    model = split(kind, group)
    state = sharded_state_dict(model)
    dcp.load(state, checkpoint_id=folder, process_group=group)
    return [model.experts.get_parameter(name).detach() for name in WEIGHTS[kind]], sorted(state)


@pytest.mark.parametrize("kind", ["gated", "titan"])
def test_a_checkpoint_of_four_ranks_loads_on_two_and_into_the_model_of_its_package(ranks, tmp_path, kind):
    folder = str(tmp_path)
    ranks.run(_saved, kind, folder)
    answers = ranks.run(_loaded, kind, folder, size=2)
    model = Block(kind)
    stock = {name: torch.zeros_like(t) for name, t in model.state_dict().items()}
    assert answers[0][1] == sorted(stock)
    dcp.load(stock, checkpoint_id=folder, no_dist=True)
    for i, name in enumerate(WEIGHTS[kind]):
        assert_same(torch.cat([found[i] for found, _ in answers]), stock[f"experts.{name}"])
        assert_same(stock[f"experts.{name}"], 2 * block(kind).experts.get_parameter(name).detach())


def _refused(group, rank):
    mesh, found = mesh_of(group), []

    def message(call):
        with pytest.raises(UnsupportedConfig) as error:
            call()
        found.append(str(error.value))

    plain = Block("titan")
    message(lambda: parallelize_module(plain, mesh, {"experts": moe.ExpertwiseParallel()}))
    model = split("titan", group)
    message(lambda: parallelize_module(model, mesh, {"experts": moe.ExpertwiseParallel()}))
    message(lambda: octavo.revert(model))
    odd = block("titan")
    odd.experts = GroupedExperts(3, D, FFN)
    octavo.convert(odd.experts, "fp8-block")
    message(lambda: parallelize_module(odd, mesh, {"experts": moe.ExpertwiseParallel()}))
    assert len(odd.experts.w1_EFD) == 3 and not isinstance(plain.experts.w1_EFD, DTensor)
    copied = copy.deepcopy(model)
    assert_same(copied(data(rank)[0]).detach(), model(data(rank)[0]).detach())
    return found


def test_what_cannot_be_split_is_refused_and_left(ranks):
    for found in ranks.run(_refused, size=2):
        assert "got GroupedExperts. Convert the model first" in found[0]
        assert "are split already" in found[1]
        assert "has the experts of this rank alone" in found[2]
        assert "and 3 do not divide by 2" in found[3]


def test_an_unknown_engine_is_refused():
    with pytest.raises(UnsupportedConfig, match="engine"):
        moe.ExpertwiseParallel(engine="nccl")
