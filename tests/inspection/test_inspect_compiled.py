"""octavo.inspect and torch.compile: the same numbers as in eager mode, one graph, and the old graph after the block."""

import copy

import pytest
import torch
from torch._dynamo.utils import counters

import octavo
from octavo.inspection import inspected_layer
from octavo.recipes import SHIPPED
from tests.support.inspected import pair, train

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.mark.parametrize("recipe", SHIPPED)
def test_a_graph_records_what_eager_mode_records(recipe):
    model, x = pair(recipe), torch.randn(20, 64, requires_grad=True)
    twin = copy.deepcopy(model)
    call = torch.compile(model, backend="aot_eager", fullgraph=True)
    train(call, x)  # compiled before the block
    train(twin, x)
    with octavo.inspect(model) as report, octavo.inspect(twin) as eager:
        for _ in range(2):
            train(call, x)
            train(twin, x)
    assert report.to_dict() == eager.to_dict()
    assert {row.calls for row in report.rows()} == {2}
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


def test_the_block_compiles_once_and_the_old_graph_serves_after_it():
    model, x = octavo.LayerNormMLP(64, 96, recipe="fp8-block"), torch.randn(32, 64, requires_grad=True)
    call = torch.compile(model, backend="aot_eager", fullgraph=True)
    train(call, x)
    compiled = counters["stats"]["unique_graphs"]
    with octavo.inspect(model) as report:
        for _ in range(3):
            train(call, x)
    assert counters["stats"]["unique_graphs"] == compiled + 1
    train(call, x)
    assert counters["stats"]["unique_graphs"] == compiled + 1
    assert {row.calls for row in report.rows()} == {3}


def test_steps_that_are_not_measured_have_a_graph_of_their_own():
    model, x = pair("mxfp8"), torch.randn(20, 64)
    call = torch.compile(model, backend="aot_eager", fullgraph=True)
    with octavo.inspect(model, every=2) as report:
        for _ in range(6):
            train(call, x)
            report.next_step()
    assert {row.calls for row in report.rows()} == {3}
    assert counters["stats"]["unique_graphs"] == 2


def test_explain_shows_the_operators_of_an_inspected_model():
    model, x = pair("mxfp8"), torch.randn(20, 64, requires_grad=True)
    with octavo.inspect(model):
        inside = octavo.explain(model, x)
    assert inside.count("octavo::inspect_y", "forward") == inside.count("octavo::inspect_dy", "backward") == 2
    assert octavo.explain(model, x).count("octavo::inspect_y", "forward") == 0


def test_grouped_layers_compile_while_they_are_inspected():
    layer, sizes = octavo.GroupedLinear(2, 32, 32, recipe="mxfp8"), torch.tensor([6, 10])
    x = torch.randn(20, 32, requires_grad=True)
    call = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with octavo.inspect(layer) as report:
        call(x, sizes).square().mean().backward()
    assert {row.tensor: row.calls for row in report.rows()} == dict.fromkeys(("x", "w", "dy", "y", "dx", "dw"), 1)


def test_the_operators_describe_their_results():
    layer, x = octavo.Linear(64, 32, recipe="mxfp8"), torch.randn(3, 8, 64, requires_grad=True)
    seen = []
    real = torch.ops.octavo

    class Noted(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.name().startswith("octavo::inspect"):
                seen.append((func, args))
            return func(*args, **kwargs or {})

    with octavo.inspect(layer), Noted():
        train(layer, x)
    assert {func for func, _ in seen} == {
        getattr(real, name).default for name in ("inspect_x", "inspect_y", "inspect_dy", "inspect_dx")
    }
    for func, args in seen:
        tensors = torch.utils._pytree.tree_map(lambda t: t.detach() if isinstance(t, torch.Tensor) else t, args)
        torch.library.opcheck(func, tensors, test_utils=("test_faketensor", "test_autograd_registration"))
    assert inspected_layer.STATS not in layer._hidden._buffers
