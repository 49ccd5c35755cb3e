"""Recipes around a run: a graph for each, state made while one is traced, blocks under torch.autocast."""

import copy

import torch
from torch._dynamo.utils import counters

import octavo
from octavo import ops
from tests.support.sequentials import H, batch, linear, mlp, recipes, rows
from tests.support.steps import assert_equal, compiled, step


def test_a_graph_for_each_recipe_and_no_more():
    model = mlp(None)
    twin = copy.deepcopy(model)

    def under(m, t, recipe):
        with octavo.autocast(recipe):
            return m(t)

    call = compiled(lambda t, recipe: under(model, t, recipe))
    for _ in range(2):
        for recipe in ("fp8-current", "mxfp8", "bf16"):
            x, dy = batch()
            found = step(model, x, dy, call=lambda t, r=recipe: call(t, r))
            assert_equal(found, step(twin, x, dy, call=lambda t, r=recipe: under(twin, t, r)), recipe)
    assert counters["stats"]["unique_graphs"] == 3


@recipes(["fp8-delayed", "nvfp4"])
def test_state_that_is_made_while_a_graph_is_traced(recipe):
    model = octavo.Sequential(ops.RMSNorm(H), linear())
    call = compiled(model)
    with octavo.autocast(recipe):
        call(rows()).sum().backward()
    torch._dynamo.reset()
    cold = octavo.Sequential(ops.RMSNorm(H), linear(recipe="fp8-current"))
    assert compiled(cold)(rows(), op_kwargs={1: {"is_first_microbatch": True}}).shape == (8, H)


def test_blocks_under_torch_autocast_and_with_an_ambient_recipe():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert octavo.LayerNormMLP(H, 32, recipe="fp8-current")(rows()).dtype == torch.bfloat16
    block = octavo.LayerNormMLP(H, 32, activation_recompute=True)
    with octavo.autocast("fp8-current"):
        y = block(rows().requires_grad_())
    y.sum().backward()
    assert block.fc1.weight.grad is not None
