"""Converted experts of the registry in one graph."""

import sys

import pytest
import torch

import octavo
from octavo.recipes import SHIPPED
from tests.support.dispatched_experts import PACKAGE, Config, Gated, call, gradients, package


@pytest.mark.parametrize("recipe", SHIPPED)
def test_a_graph_of_converted_experts_computes_what_eager_does(recipe, fresh_compiler, monkeypatch):
    monkeypatch.setitem(sys.modules, PACKAGE, package())
    both = []
    for _ in range(2):
        torch.manual_seed(1)
        both.append(Gated(Config(), ffn=32))
        octavo.convert(both[-1], recipe)
    compiled = torch.compile(both[0], backend="aot_eager", fullgraph=True)
    for step in range(2):
        arguments, dy = call(step, tokens=16)
        mine = gradients(compiled, both[0].parameters(), arguments, dy)
        others = gradients(both[1], both[1].parameters(), arguments, dy)
        torch.testing.assert_close(mine, others)
        for one in both:
            octavo.step(one)
