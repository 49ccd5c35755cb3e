"""Converted experts of the registry under FSDP, in two processes."""

import copy
import sys

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import octavo
from tests.support.dispatched_experts import PACKAGE, Model, package


def steps(rank, file):
    torch.set_num_threads(1)
    sys.modules[PACKAGE] = package()
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    whole = Model()
    late = fully_shard(copy.deepcopy(whole), mesh=mesh)
    with pytest.warns(UserWarning, match="gate_up_proj is sharded"):
        octavo.convert(late, "fp8-delayed")
    octavo.convert(whole, "fp8-delayed")
    sharded = copy.deepcopy(whole)
    for block in sharded.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    x = torch.randn(16, 64)  # the same in both processes, so the mean gradient is each one's
    for _ in range(3):
        ys = [model(x) for model in (whole, sharded)]
        assert torch.equal(*ys)
        for y in ys:
            y.sum().backward()
        grads = dict(whole.named_parameters())
        for name, p in sharded.named_parameters():
            assert torch.equal(p.grad.full_tensor(), grads[name].grad), name
        for model in (whole, sharded):
            octavo.step(model)
            model.zero_grad()
    dist.barrier()  # gloo aborts a process whose peer leaves while it still listens
    dist.destroy_process_group()


def test_sharded_experts_train_as_whole_ones(tmp_path):
    context = mp.spawn(steps, args=(tmp_path / "store",), nprocs=2, join=True)
    assert context is None  # no process raised
