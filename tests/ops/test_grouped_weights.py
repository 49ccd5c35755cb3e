"""Weights of the groups in memory: one allocation for all, shared, trained, watched between forward and backward."""

import copy

import pytest
import torch
from torch import nn

import octavo
from tests.support.experts import sizes

G, K, N, R = 3, 32, 48, 32
SPLITS = (10, 5, 17)
EACH = {"single_grouped_weight": False, "single_grouped_bias": False}
each = pytest.mark.parametrize("layout", [{}, EACH], ids=["single", "per group"])


# -- changed before backward -------------------------------------------------------------------------------------------


def make(seed=0, n=N, **settings):
    torch.manual_seed(seed)
    return octavo.GroupedLinear(G, K, n, **settings)


def leaf(seed=1):
    torch.manual_seed(seed)
    return torch.randn(R, K).requires_grad_()


@each
def test_a_weight_that_changed_before_backward_is_noticed(layout):
    layer, x = make(**layout), leaf()
    y = layer(x, sizes(SPLITS))
    with torch.no_grad():
        next(layer.parameters()).mul_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def given_gradients(layer):
    for p in layer._weight_parts():
        p.main_grad = torch.zeros_like(p)


def all_frozen(layer):
    for p in layer._weight_parts():
        p.requires_grad_(False)


WAYS = {
    "trained": ({}, lambda layer: None),
    "frozen": ({}, all_frozen),
    "one frozen": ({}, lambda layer: layer._weight_parts()[0].requires_grad_(False)),
    "main_grad": ({"fuse_wgrad_accumulation": True}, given_gradients),
    "delayed": ({"delay_wgrad_compute": True}, lambda layer: None),
}


@pytest.mark.parametrize("which", [0, -1])
@pytest.mark.parametrize("recipe", ["bf16", "fp8-block(dgrad='bf16')", "fp8-current"])
@pytest.mark.parametrize("way", WAYS)
@each
def test_a_weight_that_changes_before_backward_is_refused_or_does_not_matter(layout, way, recipe, which):
    settings, prepare = WAYS[way]
    layer, twin = (make(recipe=recipe, **layout, **settings) for _ in range(2))
    x, other = leaf(), leaf()
    prepare(layer), prepare(twin)
    y, want = layer(x, sizes(SPLITS)), twin(other, sizes(SPLITS))
    want.sum().backward()
    with torch.no_grad():
        layer._weight_parts()[which].mul_(3)
    if recipe == "fp8-current":  # codes are copies
        y.sum().backward()
        assert torch.equal(x.grad, other.grad)
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
        assert x.grad is None


def test_weights_that_lie_apart_are_copied_by_forward():
    layer, twin = make(**EACH), make(**EACH)
    x, other = leaf(), leaf()
    layer.weight1.data = layer.weight1.data.clone()
    y = layer(x, sizes(SPLITS))
    with torch.no_grad():
        layer.weight1.mul_(3)
    y.sum().backward()
    twin(other, sizes(SPLITS)).sum().backward()
    assert torch.equal(x.grad, other.grad)


# -- one allocation ----------------------------------------------------------------------------------------------------


def lies_together(layer):
    first, *rest = layer._weight_parts()
    return all(p.data_ptr() == first.data_ptr() + (i + 1) * first.nbytes for i, p in enumerate(rest))


def test_weights_of_the_groups_stay_in_one_allocation():
    layer = make(**EACH)
    for other in (
        layer, copy.deepcopy(layer), make(**EACH).to(torch.bfloat16), make(**EACH, device="meta").to_empty(device="cpu")
    ):  # fmt: skip
        assert lies_together(other)
    layer.load_state_dict({k: v.clone() for k, v in make(3).state_dict().items()}, assign=True)
    assert lies_together(layer)


def test_shared_memory_stays_shared():
    for layer in (make(**EACH), copy.deepcopy(make(**EACH))):
        assert all(p.is_shared() for p in layer.share_memory().parameters())


def test_an_optimizer_moves_weights_that_lie_together():
    layer, twin = make(**EACH), make()
    for model in (layer, twin):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for seed in range(3):
            optimizer.zero_grad()
            model(leaf(seed), sizes(SPLITS)).square().sum().backward()
            optimizer.step()
    assert torch.equal(torch.stack(layer._weight_parts()), twin.weight)
    assert isinstance(layer.weight0, nn.Parameter)


@pytest.mark.parametrize("recipe", octavo.recipes.SHIPPED)
def test_weights_of_one_element_each(recipe):
    """By its strides a weight [1, 1] looks like the placeholder of a weight stored as codes, which is not read."""
    layers = [octavo.GroupedLinear(2, 1, 1, recipe=recipe, **layout) for layout in ({}, EACH)]
    layers[1].load_state_dict(layers[0].state_dict())
    octavo.load_state_dict(layers[1], octavo.state_dict(layers[0]))
    x, found = torch.randn(5, 1), []
    for layer in layers:
        leaf_x = x.clone().requires_grad_()
        y = layer(leaf_x, torch.tensor([2, 3]))
        y.backward(torch.ones(5, 1))
        found.append(
            (y.detach(), leaf_x.grad, torch.stack([p.grad.flatten() for p in layer._weight_parts()]).flatten())
        )
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other) and one.count_nonzero()
