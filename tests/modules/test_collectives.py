"""Collectives as operations, in two processes."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import octavo
from octavo import ops
from octavo.errors import UnsupportedShape

KINDS = (ops.AllGather, ops.ReduceScatter, ops.AllReduce)


def _process(rank, store, results):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = {**_each(rank), **_with_a_group(rank)}
    found["warned"] = [str(w.message) for w in said if "collective" in str(w.message)]
    torch.save(found, f"{results}.{rank}")
    dist.destroy_process_group()


def _each(rank):
    """Each operation by itself and behind another in a Sequential: y and dx, with dy = rank + 1."""
    found = {}
    for kind in KINDS:
        x = (torch.arange(8.0).view(4, 2) + 10 * rank).requires_grad_()
        y = octavo.Sequential(ops.ConstantScale(2.0), kind())(x)
        (y * (rank + 1)).sum().backward()
        found[kind.__name__] = torch.tensor(y.tolist()), torch.tensor(x.grad.tolist())
        found[f"type of {kind.__name__}"] = type(y).__name__
    return found


def _with_a_group(rank):
    """A copy, an explanation and a graph of collectives that hold a group, and what they refuse."""
    group = dist.new_group([0, 1])
    model = octavo.Sequential(
        ops.AllGather(group), octavo.Linear(4, 4, recipe="fp8-current"), ops.ReduceScatter(group), ops.AllReduce(group)
    )
    twin, x = copy.deepcopy(model), torch.arange(16.0).view(4, 4) * (rank + 1)
    report, told = octavo.explain(model, x), model.explain(x)
    ways = [model, twin, torch.compile(copy.deepcopy(model), backend="aot_eager", fullgraph=True)]
    made = [_step(call, x) for call in ways]
    scatter = octavo.Sequential(ops.ConstantScale(2.0), ops.ReduceScatter(group))
    return {
        "shared": [twin[i].group is group and twin[i] is not model[i] for i in (0, 2, 3)],
        "equal": [all(torch.equal(a, b) for a, b in zip(made[0], other, strict=True)) for other in made],
        "graphs": (report.graphs, [b.reason for b in report.breaks]),
        "alone": told.alone,
        "refused": _refusal(scatter, torch.ones(3, 4)),
        "refused scalar": _refusal(ops.ReduceScatter(group), torch.ones(())),
        "after": scatter(torch.ones(2, 4)).tolist(),  # nothing was sent, so that both processes are still in step
    }


def _step(call, x):
    x = x.clone().requires_grad_()
    y = call(x)
    y.sum().backward()
    return y.detach(), x.grad


def _refusal(module, x):
    try:
        module(x)
    except UnsupportedShape as error:
        return str(error)
    return "was not refused"


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The findings of each of the two processes."""
    folder = tmp_path_factory.mktemp("processes")
    mp.spawn(_process, (str(folder / "store"), str(folder / "found")), nprocs=2)
    return [torch.load(folder / f"found.{rank}") for rank in (0, 1)]


def test_two_processes(found):
    xs = [2 * (torch.arange(8.0).view(4, 2) + 10 * rank) for rank in (0, 1)]
    ones = torch.ones(4, 2)
    halves = torch.cat([ones[:2], 2 * ones[2:]])  # dy is 1 in the first process and 2 in the second
    for rank, own in enumerate(found):
        y, dx = own["AllGather"]
        assert torch.equal(y, torch.cat(xs)) and torch.equal(dx, 2 * 3 * ones)
        y, dx = own["ReduceScatter"]
        assert torch.equal(y, sum(xs)[2 * rank : 2 * rank + 2]) and torch.equal(dx, 2 * halves)
        y, dx = own["AllReduce"]
        assert torch.equal(y, sum(xs)) and torch.equal(dx, 2 * (rank + 1) * ones)
        assert [own[f"type of {kind.__name__}"] for kind in KINDS] == ["Tensor"] * 3  # nothing that waits to be read


def test_a_copy_shares_the_group_and_computes_the_same(found):
    for own in found:
        assert own["shared"] == [True] * 3
        assert own["equal"] == [True] * 3


def test_what_holds_a_group_is_explained(found):
    for own in found:
        assert own["graphs"] == (1, [])
        speaks = "collectives are never fused"
        assert [text for text in own["alone"] if speaks in text] == [f"{kind.__name__}: {speaks}" for kind in KINDS]


def test_no_name_that_torch_has_deprecated(found):
    for own in found:
        assert own["warned"] == []


def test_rows_that_do_not_divide_are_refused_before_anything_is_sent(found):
    for own in found:
        assert (
            "ReduceScatter leaves each process an equal part of x's rows, its first dim, and x of (3, 4) does not "
            "divide by the 2 processes of the group. Pad the rows to a multiple of 2"
        ) in own["refused"]
        assert "x of () does not divide by the 2 processes" in own["refused scalar"]
        assert own["after"] == [[4.0] * 4]
