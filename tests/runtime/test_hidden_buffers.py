"""A layer's hidden buffers in graphs: like a module's buffers they have constant sizes and fixed addresses."""

import pytest
import torch

import octavo
from tests.support.linear_oracle import spiky
from tests.support.state_tensors import named_state, state_tensors

pytestmark = pytest.mark.usefixtures("fresh_compiler")

K, M = 48, 24
CALLS = {"plain": {}, "cached": {"is_first_microbatch": True}}


class Graphs:
    """A backend that keeps the graphs and runs them as they are."""

    def __init__(self):
        self.found = []

    def __call__(self, graph, inputs):
        self.found.append([node for node in graph.graph.nodes if node.op == "placeholder"])
        return graph.forward


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("recipe", ["fp8-delayed", "nvfp4"])
def test_their_addresses_are_static_and_their_sizes_constants(recipe, call, dynamic):
    layer, graphs = octavo.Linear(K, K, recipe=recipe), Graphs()
    compiled = torch.compile(layer, fullgraph=True, backend=graphs, dynamic=dynamic)
    for step in range(3):
        compiled(spiky(M, K, seed=step).requires_grad_(), **CALLS[call]).sum().backward()
        octavo.step(layer)
    static = [
        [n for n in nodes if "_dynamo_static_input_type" in n.meta.get("tensor_dict", {})] for nodes in graphs.found
    ]
    # besides x, and the number of its rows
    assert [len(nodes) - len(marked) for nodes, marked in zip(graphs.found, static, strict=True)] == [
        1 + (dynamic is True)
    ] * len(static)
    for marked in static:
        assert len(marked) > 2
        for node in marked:
            assert all(type(size) is int for size in node.meta["example_value"].shape), node.name
    assert len(graphs.found) == (2 if recipe == "fp8-delayed" else 1)  # the first step measures


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("recipe", ["fp8-delayed", "nvfp4"])
def test_a_training_run_writes_hidden_buffers_in_place(recipe, call):
    layer = octavo.Linear(K, K, recipe=recipe)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    compiled(spiky(M, K), **CALLS[call]).sum().backward()
    before = {name: tensor.data_ptr() for name, tensor in named_state(layer)}
    for step in range(3):
        compiled(spiky(M, K, seed=step), **CALLS[call]).sum().backward()
        octavo.step(layer)
    assert before and before == {name: tensor.data_ptr() for name, tensor in named_state(layer)}


@pytest.mark.gpu
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("recipe", ["fp8-delayed", "nvfp4"])
def test_cuda_graphs_write_hidden_buffers_at_fixed_addresses(recipe, call):
    made = [octavo.Linear(K, K, recipe=recipe, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    made[1].load_state_dict(made[0].state_dict())
    octavo.load_state_dict(made[1], octavo.state_dict(made[0]))
    compiled = torch.compile(made[0], fullgraph=True, mode="reduce-overhead")
    torch._dynamo.utils.counters.clear()
    for step in range(6):
        x = spiky(M, K, seed=step).to("cuda", torch.bfloat16)
        for layer, forward in zip(made, (compiled, made[1]), strict=True):
            torch.compiler.cudagraph_mark_step_begin()
            forward(x, **CALLS[call]).float().square().mean().backward()
            octavo.step(layer)
            layer.zero_grad()  # gradients are outputs of the graph, which its next run overwrites
        for (name, mine), theirs in zip(named_state(made[0]), state_tensors(made[1]), strict=True):
            assert torch.equal(mine, theirs), (step, name)
    assert not torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
