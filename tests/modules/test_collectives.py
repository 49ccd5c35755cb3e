"""Collectives as operations, in two processes."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import octavo
from octavo import ops

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated")


def _both(rank, store, results):
    """Each operation by itself and behind another in a Sequential: y and dx, with dy = rank + 1."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    found = {}
    for kind in (ops.AllGather, ops.ReduceScatter, ops.AllReduce):
        x = (torch.arange(8.0).view(4, 2) + 10 * rank).requires_grad_()
        y = octavo.Sequential(ops.ConstantScale(2.0), kind())(x)
        (y * (rank + 1)).sum().backward()
        found[kind.__name__] = torch.tensor(y.tolist()), torch.tensor(x.grad.tolist())
    torch.save(found, f"{results}.{rank}")
    dist.destroy_process_group()


def test_two_processes(tmp_path):
    mp.spawn(_both, (str(tmp_path / "store"), str(tmp_path / "found")), nprocs=2)
    first, second = (torch.load(tmp_path / f"found.{rank}") for rank in (0, 1))
    xs = [2 * (torch.arange(8.0).view(4, 2) + 10 * rank) for rank in (0, 1)]
    ones = torch.ones(4, 2)
    halves = torch.cat([ones[:2], 2 * ones[2:]])  # dy is 1 in the first process and 2 in the second
    for rank, found in enumerate((first, second)):
        y, dx = found["AllGather"]
        assert torch.equal(y, torch.cat(xs)) and torch.equal(dx, 2 * 3 * ones)
        y, dx = found["ReduceScatter"]
        assert torch.equal(y, sum(xs)[2 * rank : 2 * rank + 2]) and torch.equal(dx, 2 * halves)
        y, dx = found["AllReduce"]
        assert torch.equal(y, sum(xs)) and torch.equal(dx, 2 * (rank + 1) * ones)
