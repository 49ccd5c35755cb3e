"""The contract of the grouped linear layer, without a module around it."""

import itertools

import pytest
import torch

from octavo.ops.grouped_linear_layer import Buffers, Config, Inputs, layer
from octavo.recipes import SHIPPED, recipe
from octavo.runtime.contract import WeightCast
from tests.support.contract_checks import check_backward, check_forward, wants

ROWS, G, N, K = 40, 3, 32, 48
SIZES = (20, 0, 12)  # and a tail of eight rows
RECIPES = (*SHIPPED, "fp8-delayed(cold_start='current')", "fp8-block(backward='dequantized')")
GRADS = ["", "dx", "dw", "db", "dx dw", "dx dw db ds"]


def inputs_for(config: Config) -> Inputs:
    """Random tensors, and codes where the config says they come as codes."""
    x, weight, bias = torch.randn(ROWS, K), torch.randn(G, N, K), torch.randn(G, N)
    scaling = row = column = ()
    if config.recipe.stateful:
        scaling = tuple(torch.full((G,), v) for v in (2.0, 3.0, 4.0))
        if config.measures_x:
            scaling = (*scaling, *(torch.full((G,), n) for n in (0, 1, 0)))
    if config.weight != "plain":
        row, column = codes_of(config, weight, scaling[1:2])
    scales = torch.rand(ROWS) if config.scales_dtype else None
    seen = (torch.zeros(G), torch.zeros(G)) if config.observe else ()
    return Inputs(x, weight, bias, torch.tensor(SIZES), scales, None, row, column, scaling, seen)


def codes_of(config, weight, scaling):
    """Cached codes of a weight."""
    protos = layer.abstract_weight(config, weight)
    row, column = (() if p is None else tuple(p.empty().tensors()) for p in protos)
    layer.refresh(config, WeightCast(weight, row, column, scaling=scaling))
    return row, column


def configs(name):
    subject = recipe(name)
    quantizes = subject.linear().fprop.mode == "quantized"
    ways = (False, True) if subject.stateful else (False,)
    for grads, weight, observe in itertools.product(GRADS, ("plain", "codes") if quantizes else ("plain",), ways):
        measures = subject.stateful and subject.cold_start == "current"
        yield Config(
            subject, bias_dtype="float32", scales_dtype="float32", **wants(grads), weight=weight, observe=observe,
            measures_x=measures, measures_w=measures, measures_dy=measures,
        )  # fmt: skip


def buffers_for(config):
    seed = torch.tensor([5, 6]) if config.is_stochastic else None
    return Buffers(amax=torch.zeros(G) if config.observe else None, seed=seed)


@pytest.mark.parametrize("name", RECIPES)
def test_forward_returns_what_abstract_describes(name):
    for config in configs(name):
        check_forward(layer, config, inputs_for(config))


@pytest.mark.parametrize("name", RECIPES)
def test_backward_needs_only_saved_tensors(name):
    for config in configs(name):
        if config.is_stochastic:
            continue  # two backwards draw different bits, see below
        inputs = inputs_for(config)
        made = layer.forward(config, inputs)
        check_backward(layer, config, inputs, made, (torch.randn(ROWS, N),), buffers_for(config))


@pytest.mark.parametrize("name", [name for name in RECIPES if Config(recipe(name), **wants("dx dw")).is_stochastic])
def test_a_backward_advances_the_seed(name):
    config = Config(recipe(name), **wants("dx dw"))
    inputs, buffers = inputs_for(config), buffers_for(config)
    layer.backward(config, layer.save(config, inputs, layer.forward(config, inputs)), buffers, (torch.randn(ROWS, N),))
    assert buffers.seed.tolist() == [5, 7]


def test_the_tail_is_zero():
    config = Config(recipe("bf16"), **wants("dx"))
    inputs = inputs_for(config)
    made = layer.forward(config, inputs)
    dx = layer.backward(config, layer.save(config, inputs, made), Buffers(), (torch.randn(ROWS, N),))[0]
    assert not made.outputs[0][sum(SIZES) :].any() and not dx[sum(SIZES) :].any()
    assert made.outputs[0][: sum(SIZES)].any() and dx[: sum(SIZES)].any()


@pytest.mark.parametrize("name", RECIPES)
def test_a_deferred_dw_is_the_one_that_backward_returns(name):
    """From the buffers that forward returns, and that backward fills."""
    now, later = (Config(recipe(name), **wants("dw"), deferred_wgrad=how) for how in ("", "buffers"))
    inputs, dy = inputs_for(now), torch.randn(ROWS, N)
    dw = layer.backward(now, layer.save(now, inputs, layer.forward(now, inputs)), buffers_for(now), (dy,))[1]
    made = check_forward(layer, later, inputs)
    saved = layer.save(later, inputs, made)
    assert layer.backward(later, tuple(saved), buffers_for(later), (dy,)) == (None,) * len(inputs)
    start, stop = later.deferred_span
    tensors = [t for group in made for t in group if t is not None][start:stop]
    operands = layer.deferred_operands(later, tuple(tensors), (), inputs.weight)
    assert torch.equal(layer.weight_gradient(later, operands, None), dw)


def test_no_gradient_in_no_gradient_out():
    config = Config(recipe("fp8-current"), **wants("dx dw"))
    inputs = inputs_for(config)
    saved = layer.save(config, inputs, layer.forward(config, inputs))
    assert layer.backward(config, saved, Buffers(), (None,)) == (None,) * len(inputs)
