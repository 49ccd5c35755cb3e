"""octavo.optim.AdamW over parameters that FSDP2 has sharded, on two ranks."""

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import octavo
from octavo.errors import UnsupportedConfig
from tests.support.training import train


def sharded(group, dtype=torch.float32):
    torch.manual_seed(0)
    layers = [octavo.Linear(*sizes, recipe="fp8-block", dtype=dtype) for sizes in ((48, 33), (33, 16))]  # uneven parts
    model = nn.Sequential(layers[0], nn.GELU(), layers[1])
    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train_rank(model, optimizer, rank, steps):
    train(model, optimizer, [10 * i + rank for i in steps], shape=(8, 48))


def wholes(model):
    return [p.full_tensor().detach().clone() for p in model.parameters()]


def takes_the_bits_of_torch(group, rank):
    ours, theirs = sharded(group), sharded(group)
    train_rank(ours, octavo.optim.AdamW(ours.parameters(), lr=1e-2), rank, range(3))
    train_rank(theirs, torch.optim.AdamW(theirs.parameters(), lr=1e-2, foreach=False), rank, range(3))
    return all(map(torch.equal, wholes(ours), wholes(theirs)))


def resumes(group, rank):
    """Through torch's distributed state dicts, whose tensors are DTensors."""
    model = sharded(group, torch.bfloat16)
    optimizer = octavo.optim.AdamW(model.parameters(), lr=1e-2, states="bfloat16")
    train_rank(model, optimizer, rank, range(2))
    state = get_optimizer_state_dict(model, optimizer)
    kinds = {
        type(t).__name__ for entry in state["state"].values() for n, t in entry.items() if n in ("master", "exp_avg")
    }
    again = sharded(group, torch.bfloat16)
    again.load_state_dict(model.state_dict())
    its = octavo.optim.AdamW(again.parameters(), lr=1e-2, states="bfloat16")
    set_optimizer_state_dict(again, its, state)
    train_rank(model, optimizer, rank, range(2, 4))
    train_rank(again, its, rank, range(2, 4))
    masters = [its.state[p]["master"] for p in again.parameters()]
    return (
        kinds, all(map(torch.equal, wholes(model), wholes(again))), all(isinstance(t, DTensor) for t in masters),
        [tuple(t.shape) for t in masters] == [tuple(p.shape) for p in again.parameters()],
    )  # fmt: skip


def refuses_blocks(group, rank):
    model = sharded(group)
    with pytest.raises(UnsupportedConfig, match="states='bfloat16'"):
        train_rank(model, octavo.optim.AdamW(model.parameters(), states="8bit"), rank, range(1))
    return True


def test_each_rank_updates_its_part_as_torch_does(ranks):
    assert ranks.run(takes_the_bits_of_torch, size=2) == [True, True]


def test_states_are_sharded_and_travel(ranks):
    assert ranks.run(resumes, size=2) == [({"DTensor"}, True, True, True)] * 2


def test_blocks_of_elements_are_refused(ranks):
    assert ranks.run(refuses_blocks, size=2) == [True, True]
