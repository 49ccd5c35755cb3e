"""`octavo.buffer` in a compiled function: refused in one whole graph, and called outside of a graph that may break."""

import pytest
import torch

import octavo

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def shifted(x):
    return x + octavo.buffer(2, 3, device="cpu", dtype=torch.float32).zero_()


def test_a_buffer_is_not_made_in_a_graph():
    call = torch.compile(shifted, backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"calls it for \(2, 3\). Call it before"):
        call(torch.ones(2, 3))


def test_a_buffer_breaks_a_graph_that_may_break():
    x = torch.ones(2, 3)
    assert torch.equal(torch.compile(shifted, backend="aot_eager")(x), x)
