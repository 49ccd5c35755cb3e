"""Delayed scaling's step in the graph of a forward, before it or after it: running amaxes are read and reset in order,
whatever a compiler moves. Layers raise them without telling it."""

import pytest
import torch

import octavo
from tests.modules.oracle import make, spiky

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
        for (name, mine), theirs in zip(layer.named_buffers(), twin.buffers(), strict=True):
            assert torch.equal(mine, theirs), (i, name)
    raised = layer.get_buffer("scaling_forward_current")
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
        for (name, mine), theirs in zip(layer.named_buffers(), twin.buffers(), strict=True):
            assert torch.equal(mine, theirs), (i, name)
        assert layer.get_buffer("scaling_backward_current") == dy.abs().max()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_copies_of_the_buffers_that_a_call_passes_in_are_raised_and_the_layers_own_are_not(backend):
    layer = make("fp8-delayed")
    own = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    passed, wanted = ({name: buffer.clone() for name, buffer in own.items()} for _ in range(2))

    def program(x, buffers):
        return torch.func.functional_call(layer, buffers, (x,))

    compiled = torch.compile(program, fullgraph=True, backend=backend)
    for i in range(3):
        x, dy = 2.0**i * spiky(24, 48, seed=i), spiky(24, 40, seed=20 + i)
        compiled(x, passed).backward(dy)
        program(x, wanted).backward(dy)
        for name, buffer in layer.named_buffers():
            assert torch.equal(buffer, own[name]), name
            assert torch.equal(passed[name], wanted[name]), (i, name)
    assert passed["scaling_forward_current"].count_nonzero() == 2


def test_a_cache_that_a_stepping_graph_would_make_is_refused():
    layer = make("fp8-delayed")
    with pytest.raises(Exception, match=r"is_first_microbatch=True before you compile"):
        torch.compile(step_before, fullgraph=True, backend="aot_eager")(layer, spiky(8, 48), is_first_microbatch=True)
