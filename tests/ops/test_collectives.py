"""Collectives as operations, in two processes."""

import copy
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist

import octavo
from octavo import ops, quant
from octavo._torch.fakes import FakeTensorMode
from octavo.communication import collectives
from octavo.errors import UnsupportedConfig, UnsupportedShape
from octavo.quant import QTensor
from tests.support import ranks as tests_ranks

KINDS = (ops.AllGather, ops.ReduceScatter, ops.AllReduce, ops.SumGradient)


def _both(group, rank):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = {**_each(group, rank), **_with_a_group(group, rank), **_of_codes(group, rank)}
    found["warned"] = [str(w.message) for w in said if "collective" in str(w.message)]
    return found


def _each(group, rank):
    """Each operation by itself and behind another in a Sequential: y and dx, with dy = rank + 1."""
    found = {}
    for kind in KINDS:
        x = (torch.arange(8.0).view(4, 2) + 10 * rank).requires_grad_()
        y = octavo.Sequential(ops.ConstantScale(2.0), kind(group))(x)
        (y * (rank + 1)).sum().backward()
        found[kind.__name__] = torch.tensor(y.tolist()), torch.tensor(x.grad.tolist())
        found[f"type of {kind.__name__}"] = type(y).__name__
    return found


def _with_a_group(group, rank):
    """A copy, an explanation and a graph of collectives that hold a group, and what they refuse."""
    model = octavo.Sequential(
        ops.AllGather(group), octavo.Linear(4, 4, recipe="fp8-current"), ops.ReduceScatter(group), ops.AllReduce(group),
        ops.SumGradient(group),
    )  # fmt: skip
    twin, x = copy.deepcopy(model), torch.arange(16.0).view(4, 4) * (rank + 1)
    report, explanation = octavo.explain(model, x), model.explain(x)
    ways = [model, twin, torch.compile(copy.deepcopy(model), backend="aot_eager", fullgraph=True)]
    made = [_step(call, x) for call in ways]
    scatter = octavo.Sequential(ops.ConstantScale(2.0), ops.ReduceScatter(group))
    return {
        "shared": [twin[i].group is group and twin[i] is not model[i] for i in (0, 2, 3)],
        "pickled": pickle.loads(pickle.dumps(model[0])).group is group,
        "equal": [all(torch.equal(a, b) for a, b in zip(made[0], other, strict=True)) for other in made],
        "graphs": (report.graphs, [b.reason for b in report.breaks]),
        "alone": explanation.alone,
        "refused": _unsupported_reason(scatter, torch.ones(3, 4)),
        "refused scalar": _unsupported_reason(ops.ReduceScatter(group), torch.ones(())),
        "after": scatter(torch.ones(2, 4)).tolist(),  # nothing was sent, so that both processes are still in step
    }


def _step(call, x):
    x = x.clone().requires_grad_()
    y = call(x)
    y.sum().backward()
    return y.detach(), x.grad


def _unsupported_reason(module, x):
    try:
        module(x)
    except (UnsupportedShape, UnsupportedConfig) as error:
        return str(error)
    return "was not refused"


def _of_codes(group, rank):
    """Gathered codes of each scheme, and a product of them with a gradient."""
    found = {}
    for spec in (quant.Rowwise(), quant.Block1D(), quant.MX(), quant.Tensorwise(), quant.NVFP4()):
        x = torch.randn(32, 256, generator=torch.Generator().manual_seed(rank)) * 4**rank
        q = spec.quantize(x)
        token = torch.zeros(1).expand(x.shape).requires_grad_()
        held = QTensor(q.codes, q.scale, spec, q.shape, q.dtype, q.global_scale, anchor=token)
        y = ops.AllGather(group)(held)
        values = y.dequantize() if isinstance(y, QTensor) else y
        values.sum().backward()
        found[type(spec).__name__] = (
            q.dequantize(),
            values.detach(),
            type(y).__name__,
            torch.tensor(token.grad.tolist()),
        )
    return found


def _destroyed(group, rank):
    """What a module says whose group was destroyed."""
    mine = dist.new_group([0, 1, 2, 3])
    op = ops.AllReduce(mine)
    before, name = op(torch.ones(2)), op.group_name
    dist.destroy_process_group(mine)
    return before, _unsupported_reason(op, torch.ones(2)), name


def _made_again(group, rank, store):
    """A module's results before and after all groups are destroyed and made again."""
    op = ops.AllReduce(dist.group.WORLD)
    call = torch.compile(copy.deepcopy(op), backend="aot_eager", fullgraph=True)
    x = torch.ones(2)
    found = [op(x), call(x)]
    dist.barrier()
    dist.destroy_process_group()
    tests_ranks.join(store)
    return [*found, op(x), call(x)]


@pytest.fixture(scope="module")
def found(ranks):
    """The findings of each of the two processes."""
    return ranks.run(_both, size=2)


def test_two_processes_exchange_values_and_gradients(found):
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
        y, dx = own["SumGradient"]
        assert torch.equal(y, xs[rank]) and torch.equal(dx, 2 * 3 * ones)
        assert [own[f"type of {kind.__name__}"] for kind in KINDS] == ["Tensor"] * 4  # nothing that waits to be read


def test_a_copy_shares_the_group_and_computes_the_same(found):
    for own in found:
        assert own["shared"] == [True] * 3
        assert own["equal"] == [True] * 3


def test_a_pickle_has_the_name_of_the_group(found):
    assert all(own["pickled"] for own in found)


@pytest.mark.parametrize("key", ["Rowwise", "Block1D", "MX", "Tensorwise", "NVFP4"])
def test_gathered_codes_stand_for_the_values_of_all_processes(found, key):
    whole = torch.cat([own[key][0] for own in found])
    for own in found:
        _, values, kind, gradient = own[key]
        assert torch.equal(values, whole)
        assert kind == ("Tensor" if key in ("Tensorwise", "NVFP4") else "QTensor")
        assert torch.equal(gradient, torch.full((32, 256), 2.0))  # dy is 1 in both processes


def test_a_group_that_was_made_again_serves(ranks, tmp_path):
    for found in ranks.run(_made_again, str(tmp_path / "store")):
        assert all(torch.equal(y, torch.full((2,), 4.0)) for y in found)


def test_a_group_that_was_destroyed_is_refused_by_name(ranks):
    for before, gone, name in ranks.run(_destroyed):
        assert torch.equal(before, torch.full((2,), 4.0))
        assert f"torch.distributed has no process group named {name!r}. It was destroyed" in gone


class _Stranger:
    group_name = "nowhere"


@pytest.mark.parametrize(
    "group", [_Stranger(), object(), 3, ("mesh", "tp")], ids=["a name of no group", "an object", "a number", "a pair"]
)
def test_a_group_that_torch_does_not_know_is_refused(group):
    with pytest.raises(UnsupportedConfig, match=r"A group (is a ProcessGroup|given as a pair)"):
        ops.AllReduce(group)
    with pytest.raises(UnsupportedConfig, match="is not initialized"):
        ops.AllReduce("nowhere")


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


@pytest.fixture
def over_gloo(monkeypatch):
    for name, value in (("backend_name", "gloo"), ("process_group", None), ("registered_name", "0")):
        monkeypatch.setattr(collectives, name, lambda *_, value=value: value)


@pytest.mark.parametrize(
    "collective",
    [
        lambda x: collectives.scatter_sum(x, 2, "0", "This Linear"),
        lambda x: collectives.gather(x, 2, "0", "This Linear"),
        lambda x: collectives.total(x, "0", "This Linear"),
        lambda x: collectives.largest(x, "0", "This Linear"),
    ],
    ids=["reduce-scatter", "all-gather", "all-reduce", "maximum"],
)
def test_gloo_on_a_gpu_is_refused(over_gloo, collective):
    with FakeTensorMode(), pytest.raises(UnsupportedConfig, match=r"cuda tensors over .* uses gloo .* Use NCCL"):
        collective(torch.empty(4, 2, device="cuda"))


def test_gloo_on_a_gpu_is_refused_while_a_graph_is_traced(over_gloo):
    torch._dynamo.reset()

    def sends(x):
        collectives.refuse_gloo(x.device, "0", "This Linear")
        return x + 1

    with pytest.raises(Exception, match=r"uses gloo for them.* Use NCCL"):
        torch.compile(sends, fullgraph=True, backend="aot_eager")(torch.ones(2))
