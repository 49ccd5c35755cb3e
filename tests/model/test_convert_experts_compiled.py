"""Converted experts of the registry in one graph."""

import sys
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

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


class _Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


class _Adapted(nn.Module):
    """Experts, or adapted ones, with an adapter of PEFT's, which parametrizes a weight for the time of each forward."""

    def __init__(self, inside, experts, name):
        super().__init__()
        self.inside, self.experts, self.name = inside, experts, name

    def forward(self, *arguments):
        with self.adapted():
            return self.inside(*arguments)

    @contextmanager
    def adapted(self):
        parametrize.register_parametrization(self.experts, self.name, _Doubled())
        try:
            with parametrize.cached():
                yield
        finally:
            parametrize.remove_parametrizations(self.experts, self.name, leave_parametrized=False)


def test_a_compiled_model_takes_weights_that_are_parametrized_in_each_forward(fresh_compiler, monkeypatch):
    monkeypatch.setitem(sys.modules, PACKAGE, package())
    experts = Gated(Config(), ffn=32)
    octavo.convert(experts, "fp8-current")
    model = _Adapted(_Adapted(experts, experts, "down_proj"), experts, "gate_up_proj")
    arguments, dy = call(0, tokens=16)
    wanted = model(*arguments)
    compiled = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        found = compiled(*arguments)
        found.backward(dy)
        assert torch.equal(found, wanted)
