"""Graphs send what eager calls send, also where nothing uses the result of a collective: other ranks wait for it."""

import pytest
import torch
import torch.distributed as dist

import octavo
from octavo.ops import split_layer

pytestmark = pytest.mark.usefixtures("fresh_compiler")

MODES = (("column", False), ("column", True), ("row", False), ("row", True))
BACKENDS = ("aot_eager", pytest.param("inductor", marks=pytest.mark.slow))


@pytest.fixture
def two_ranks(monkeypatch):
    """A group of two ranks that sends nothing, and layers that do not compare their calls, as in a graph."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  # which registers the backend

    monkeypatch.setattr(split_layer, "check_ranks", lambda *call: None)
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def sent(step):
    """The collectives of a step, in order."""
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        step()
    names = [event.name.removeprefix("_c10d_functional::") for event in seen.events() if "c10d_f" in event.name]
    return [name.rstrip("_") for name in names if "wait" not in name]  # a compiler may reduce in place: all_reduce_


class Forgotten(torch.autograd.Function):
    """Returns x, and no gradient for it in backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return None


def y_unused(layer, x):
    layer(x)
    return x.sum()


def dx_unused(layer, x):
    return layer(Forgotten.apply(x)).sum() + x.sum()


def is_compiled_alike(layer, program, x, backend):
    def eager():
        return program(layer, x)

    compiled = torch.compile(eager, backend=backend, fullgraph=True)
    trains = x.requires_grad
    right = sent(lambda: eager().backward() if trains else eager())
    assert sent(lambda: compiled().backward() if trains else compiled()) == right
    return right


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-block"])
@pytest.mark.parametrize(("mode", "sequence"), MODES)
def test_a_graph_keeps_the_collectives_of_a_linear(recipe, mode, sequence, backend):
    layer = octavo.Linear(256, 256, recipe=recipe, parallel_mode=mode, sequence_parallel=sequence)
    x = torch.randn(256, layer.in_features, requires_grad=True)
    forward = is_compiled_alike(layer, y_unused, x, backend)
    both = is_compiled_alike(layer, dx_unused, x, backend)
    agrees = recipe == "fp8-current"
    assert (len(forward) > 0) == (agrees or (mode, sequence) != ("column", False))
    assert (len(both) > len(forward)) == ((mode, sequence) != ("row", False))
    layer.requires_grad_(False)
    assert (len(is_compiled_alike(layer, y_unused, x.detach(), backend)) > 0) == (len(forward) > 0)


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["AllGather", "AllReduce", "ReduceScatter"])
def test_a_graph_keeps_the_collectives_of_an_operation(name, backend):
    x = torch.randn(8, 16, requires_grad=True)
    assert len(is_compiled_alike(getattr(octavo.ops, name)(), y_unused, x, backend)) == 1


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize("mode", ["column", "row"])
def test_a_graph_keeps_the_collectives_of_a_grouped_linear(mode):
    layer = octavo.GroupedLinear(2, 256, 256, recipe="fp8-block", parallel_mode=mode)
    x, splits = torch.randn(64, layer.in_features, requires_grad=True), torch.tensor([24, 40])
    program = y_unused if mode == "row" else dx_unused
    assert is_compiled_alike(lambda x: layer(x, splits), program, x, "aot_eager") == ["all_reduce"]


def _one_rank_drops_y(group, rank, backend, trains):
    """y on the first rank alone: the other one's graph has no use for it."""
    layer = octavo.Linear(64, 32, bias=False, recipe="fp8-current", parallel_mode="row", tp_group=group)
    layer.requires_grad_(trains)
    with torch.no_grad():
        layer.weight.fill_(1.0)

    def program(x):
        y = layer(x)
        return y + x.sum() * 0 if rank == 0 else x.sum()

    x = torch.full((4, layer.in_features), 1.0 + rank, requires_grad=trains)
    found = torch.compile(program, backend=backend, fullgraph=True)(x)
    if trains:
        found.sum().backward()
    dist.barrier(group)
    return found.detach()


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_that_drops_y_does_not_keep_the_other_waiting(ranks, backend, trains):
    y, _ = ranks.run(_one_rank_drops_y, backend, trains, size=2)
    torch.testing.assert_close(y, torch.full((4, 32), 32 * (1.0 + 2.0)))
