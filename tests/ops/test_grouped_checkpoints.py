"""Checkpoints of a GroupedLinear: from any layout into any other, refused by name, resumed bit for bit."""

import copy
import io

import pytest
import torch
from torch import nn

import octavo
from octavo.errors import Unsupported
from octavo.recipes import SHIPPED
from tests.support.experts import LAYOUTS, MIXED, G, K, N, assert_steps, batch, experts, grid, layouts, mixed, own, step
from tests.support.linear_oracle import assert_same
from tests.support.steps import assert_state


@mixed
@pytest.mark.parametrize("to", MIXED.values(), ids=MIXED)
@pytest.mark.parametrize("recipe", ["bf16", "fp8-current"])
def test_a_checkpoint_of_any_layout_loads_strictly_into_any_other(recipe, layout, to):
    """Through a file, and inside a model."""
    source = nn.ModuleDict({"moe": experts(recipe, seed=3, **layout)})
    target = nn.ModuleDict({"moe": experts(recipe, seed=9, **to)})
    before = {name: id(p) for name, p in target.named_parameters()}
    file = io.BytesIO()
    torch.save(source.state_dict(), file)
    file.seek(0)
    result = target.load_state_dict(torch.load(file, weights_only=True), strict=True)
    assert not result.missing_keys and not result.unexpected_keys
    for kind in ("weight", "bias"):
        for a, b in zip(own(source["moe"], kind), own(target["moe"], kind), strict=True):
            assert_same(a, b, kind)
    assert before == {name: id(p) for name, p in target.named_parameters()}
    assert_steps(step(target["moe"], *batch()), step(source["moe"], *batch()))


@layouts
def test_a_checkpoint_with_a_missing_an_extra_or_a_misshapen_group_is_refused_by_name(layout):
    whole, parts = experts("bf16").state_dict(), experts("bf16", **LAYOUTS["per group"]).state_dict()
    layer = experts("bf16", seed=9, **layout)
    before = copy.deepcopy(layer.state_dict())
    bad = {
        "weight1": {k: v for k, v in parts.items() if k != "weight1"},
        "bias2": {k: v for k, v in parts.items() if k != "bias2"},
        "weight3": {**parts, "weight3": torch.zeros(N, K)},
        "elsewhere": {**whole, "elsewhere": torch.zeros(1)},
        "weight": {**whole, "weight": torch.zeros(G + 1, N, K)},
        "weight0": {**parts, "weight0": torch.zeros(N, K + 1)},
    }
    for name, state in bad.items():
        with pytest.raises((RuntimeError, Unsupported), match=rf"\b{name}\b"):
            copy.deepcopy(layer).load_state_dict(state, strict=True)
    for name, value in layer.state_dict().items():
        assert_same(value, before[name])


def test_a_checkpoint_loaded_loosely_names_what_is_missing():
    state = experts("bf16", **LAYOUTS["per group"]).state_dict()
    del state["bias0"], state["bias1"], state["bias2"]
    layer = experts("bf16", seed=9)
    kept_bias = layer.bias.detach().clone()
    result = layer.load_state_dict(state, strict=False)
    assert result.missing_keys and not result.unexpected_keys
    assert_same(layer.bias.detach(), kept_bias)
    assert_same(layer.weight.detach()[1], state["weight1"])


@layouts
def test_a_state_dict_is_plain_tensors_that_alias_the_parameters(layout):
    layer = experts("fp8-current", **layout)
    state = layer.state_dict()
    assert all(type(value) is torch.Tensor for value in state.values())
    for name, p in layer.named_parameters():
        assert state[name].data_ptr() == p.data_ptr()


@grid(SHIPPED, layout=LAYOUTS)
def test_a_run_resumed_from_a_file_is_bitwise_the_same(recipe, layout):
    """Weights by state_dict, what the recipe remembers by octavo.state_dict."""
    first = experts(recipe, seed=1, **layout)

    def train(layer, steps):
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
        for i in steps:
            step(layer, *batch(((30, 0, 17), (0, 47, 0))[i % 2], seed=i), ((30, 0, 17), (0, 47, 0))[i % 2])
            optimizer.step()
            octavo.step(layer)

    train(first, range(2))
    file = io.BytesIO()
    torch.save({"model": first.state_dict(), "octavo": octavo.state_dict(first)}, file)
    file.seek(0)
    saved, resumed = torch.load(file, weights_only=True), experts(recipe, seed=5, **layout)
    resumed.load_state_dict(saved["model"])
    octavo.load_state_dict(resumed, saved["octavo"])
    for layer in (first, resumed):
        train(layer, range(2, 4))
    for a, b in zip(first.parameters(), resumed.parameters(), strict=True):
        assert_same(a.detach(), b.detach())
    assert_state(first, resumed)


def test_a_checkpoint_of_both_forms_is_refused():
    each = LAYOUTS["per group"]
    state = {**experts("bf16").state_dict(), "weight1": torch.zeros(N, K), "weight2": torch.zeros(N, K)}
    with pytest.raises(RuntimeError, match="weight"):
        experts("bf16", **each).load_state_dict(state)
    state = {**experts("bf16", single_grouped_bias=False).state_dict(), "weight": torch.tensor(1.0)}
    with pytest.raises(RuntimeError, match="weight0"):
        experts("bf16", **each).load_state_dict(state)
