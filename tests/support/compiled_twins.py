"""A layer that is compiled beside a copy that is not: batches for both, one step of each compared bit by bit, refusals.

Graphs run under aot_eager unless a test is about Inductor: the same nodes, without code generation. Data is new in
every iteration."""

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import octavo
from octavo.recipes import SHIPPED
from tests.support import steps
from tests.support.linear_oracle import assert_same, make, spiky
from tests.support.recipe_traits import QUANTIZED

K, N, M = 48, 40, 24
ALL_RECIPES = len(SHIPPED)
every = pytest.mark.parametrize("recipe", SHIPPED)
quantized = pytest.mark.parametrize("recipe", QUANTIZED)
sample = pytest.mark.parametrize("recipe", ["fp8-current", "fp8-delayed", "nvfp4"])


def graphs():
    assert "unique_graphs" in counters["stats"], "nothing was compiled, or the counter has another name"
    return counters["stats"]["unique_graphs"]


# -- batches and layers ------------------------------------------------------------------------------------------------


def batch(i, m=M, k=K, n=N, dtype=torch.float32):
    return steps.batch(i, m, k, n, dtype=dtype, seeds=(100, 500))


def pair(recipe, k=K, n=N, **options):
    layer = make(recipe, k, n, **options)
    return layer, copy.deepcopy(layer)


# -- one step of two modules -------------------------------------------------------------------------------------------


def results(model, call, x, dy, **flags):
    """The output and every gradient of one step that starts without gradients."""
    model.zero_grad(set_to_none=True)
    leaf = x.detach().clone().requires_grad_()
    y = call(leaf, **flags)
    y.backward(dy)
    return {"y": y.detach().clone(), "dx": leaf.grad, **{name: p.grad for name, p in model.named_parameters()}}


def assert_results(found, want):
    assert found.keys() == want.keys()
    for name, value in want.items():
        assert_same(found[name], value, name)


def assert_step(twins, calls, data, **flags):
    """One step of each of two modules gives the same; returns what it gave."""
    found, want = (results(m, call, *data, **flags) for m, call in zip(twins, calls, strict=True))
    assert_results(found, want)
    return found


def stepped(*models):
    for model in models:
        octavo.step(model)


# -- refusals ----------------------------------------------------------------------------------------------------------


def said(text, *words):
    """The line of an error or warning that has all of these words; source lines of a traceback do not count."""
    lines = [line.strip() for line in str(text).splitlines()]
    hits = [line for line in lines if all(word in line for word in words) and not line.startswith(("File ", "return "))]
    assert hits, f"no sentence with {words} in:\n{text}"
    return hits[0]


def refused(call, *args, words):
    """The sentence a call was refused with."""
    with pytest.raises(Exception) as caught:  # noqa: PT011, a compiler wraps whatever is raised while it traces
        call(*args)
    return said(caught.value, *words)


# -- every recipe at once ----------------------------------------------------------------------------------------------


class Bank(nn.Module):
    """A layer of every recipe side by side, each with its own slice of x: one compilation for all of them."""

    def __init__(self, recipes=SHIPPED, **options):
        super().__init__()
        self.layers = nn.ModuleList([make(recipe, seed=i, **options) for i, recipe in enumerate(recipes)])

    def forward(self, x, **flags):
        return torch.stack([layer(x[i], **flags) for i, layer in enumerate(self.layers)])


def bank(*recipes, **options):
    model = Bank(recipes or SHIPPED, **options)
    return model, copy.deepcopy(model)


def batches(i, m=M, layers=ALL_RECIPES):
    """Slices of x and dy for a bank."""
    return spiky(layers, m, K, seed=100 + i), spiky(layers, m, N, seed=500 + i)


# -- weight gradients deferred -----------------------------------------------------------------------------------------


def flight_of(model, call, data, **flags):
    """All forwards, all backwards, then one dw after the other; everything on the way."""
    model.zero_grad(set_to_none=True)
    log, leaves = [], [x.clone().requires_grad_() for x, _ in data]
    outputs = [
        call(leaf, **(flags if i == 0 or not flags else {k: False for k in flags})) for i, leaf in enumerate(leaves)
    ]
    for y, (_, dy) in zip(outputs, data, strict=True):
        y.backward(dy)
    layers = [m for m in model.modules() if isinstance(m, octavo.Linear)]
    assert all(m.weight.grad is None for m in layers)
    log += [y.detach().clone() for y in outputs] + [leaf.grad for leaf in leaves]
    log += [m.bias.grad.clone() for m in layers]
    for _ in data:
        for m in layers:
            m.backward_dw()
            log.append(m.weight.grad.clone())
    return log


def assert_logs(found, want):
    assert len(found) == len(want)
    for i, (a, b) in enumerate(zip(found, want, strict=True)):
        assert_same(a, b, f"entry {i}")


def assert_nothing_pending(model):
    for layer in model.modules():
        if isinstance(layer, octavo.Linear):
            with pytest.warns(UserWarning, match="no backward to finish"):
                layer.backward_dw()


def quantizing(layer):
    """Calls of a layer that give codes."""
    return lambda x: layer(x, fp8_output=True)
