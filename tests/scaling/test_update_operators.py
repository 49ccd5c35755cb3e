"""Delayed scaling's step in the graph of a forward, before it or after it: running amaxes are read and reset in order,
whatever a compiler moves. Layers raise them without telling it."""

import pytest
import torch

import octavo
from tests.support.linear_oracle import make, spiky
from tests.support.state_tensors import named_state, state_tensors

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def step_after(layer, x, **flags):
    y = layer(x, **flags)
    octavo.step(layer)
    return y


def step_before(layer, x, **flags):
    octavo.step(layer)
    return layer(x, **flags)


def step_between(layer, x, **flags):
    y = layer(x, **flags)
    octavo.step(layer)
    return y + layer(8 * x, **flags)


def two_layers(layer, x, **flags):
    y = layer(x, **flags) + layer(16 * x)
    octavo.step(layer)
    return y


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("flags", [{}, {"is_first_microbatch": True}], ids=["plain", "cached"])
@pytest.mark.parametrize("program", [step_after, step_before, step_between, two_layers])
def test_amaxes_are_read_and_reset_where_the_program_says(program, flags, backend):
    layer, twin = make("fp8-delayed(history=4)"), make("fp8-delayed(history=4)")
    for each in (layer, twin):
        each(spiky(24, 48, seed=9), **flags).sum().backward()  # operands are measured until a step has seen them
        octavo.step(each)
        if program in (step_after, step_between, two_layers):
            each.requires_grad_(False)  # a backward after the step would need the scales of before, and is refused
    compiled = torch.compile(program, fullgraph=True, backend=backend)
    for i in range(4):
        x = 2.0**i * spiky(24, 48, seed=i)
        assert torch.equal(compiled(layer, x, **flags), program(twin, x, **flags)), i
        for (name, mine), theirs in zip(named_state(layer), state_tensors(twin), strict=True):
            assert torch.equal(mine, theirs), (i, name)
    raised = layer._hidden.get_buffer("scaling_forward_running_amax")
    assert (raised.count_nonzero() > 0) == (program in (step_before, step_between)), "what a step leaves"


def test_backward_after_a_step_in_the_graph_raises_the_amax_of_dy():
    """Inductor alone: other backends pass backward a copy of the buffer (docs/compile.md)."""
    layer, twin = make("fp8-delayed(history=4)"), make("fp8-delayed(history=4)")
    for each in (layer, twin):
        each(spiky(24, 48, seed=9)).sum().backward()
        octavo.step(each)
    compiled = torch.compile(step_before, fullgraph=True)
    for i in range(3):
        x, dy = 2.0**i * spiky(24, 48, seed=i), 4.0**i * spiky(24, 40, seed=20 + i)
        compiled(layer, x).backward(dy)
        step_before(twin, x).backward(dy)
        for (name, mine), theirs in zip(named_state(layer), state_tensors(twin), strict=True):
            assert torch.equal(mine, theirs), (i, name)
        assert layer._hidden.get_buffer("scaling_backward_running_amax") == dy.abs().max()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_call_with_other_parameters_raises_the_layers_own_amaxes(backend):
    layer, twin = make("fp8-delayed"), make("fp8-delayed")
    passed = {name: 2 * p.detach() for name, p in layer.named_parameters()}

    def program(layer, x):
        return torch.func.functional_call(layer, {**passed, **dict(layer.named_buffers())}, (x,))

    compiled = torch.compile(program, fullgraph=True, backend=backend)
    for i in range(3):
        x, dy = (2.0**i * spiky(24, 48, seed=i)).requires_grad_(), spiky(24, 40, seed=20 + i)
        compiled(layer, x).backward(dy)
        program(twin, x).backward(dy)
        for (name, mine), theirs in zip(named_state(layer), state_tensors(twin), strict=True):
            assert torch.equal(mine, theirs), (i, name)
    assert layer._hidden.scaling_forward_running_amax[1] == 2 * layer.weight.abs().max()


def test_a_cache_that_a_stepping_graph_would_make_is_refused():
    layer = make("fp8-delayed")
    with pytest.raises(Exception, match=r"is_first_microbatch=True before you compile"):
        torch.compile(step_before, fullgraph=True, backend="aot_eager")(layer, spiky(8, 48), is_first_microbatch=True)
