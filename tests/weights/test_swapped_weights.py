"""Weights that are swapped in place (torch.utils.swap_tensors): no cache keeps a reference that forbids it, and codes
of the tensor that was there are not used."""

import copy

import pytest
import torch

import octavo
from octavo.errors import UnsupportedConfig
from octavo.weights import optimizer_hooks

H = 32
LAYERS = {
    "Linear": lambda recipe: octavo.Linear(H, H, recipe=recipe),
    "GroupedLinear": lambda recipe: octavo.GroupedLinear(2, H, H, recipe=recipe),
    "LayerNormMLP": lambda recipe: octavo.LayerNormMLP(H, H, recipe=recipe),
}
every = pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)


@pytest.fixture
def swaps():
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


def call(layer, first=None):
    x = torch.randn(8, H, generator=torch.Generator().manual_seed(0))
    given = (x, torch.tensor([3, 5])) if isinstance(layer, octavo.GroupedLinear) else (x,)
    with octavo.microbatch(first=first) if first is not None else torch.enable_grad():
        return layer(*given)


@every
@pytest.mark.parametrize("recipe", ["fp8-block", "fp8-delayed"])
def test_a_state_dict_is_loaded_by_swapping_after_the_cache_was_filled(make, recipe, swaps):
    layer, other = make(recipe), make(recipe)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    octavo.attach(layer, optimizer)
    for _ in range(2):
        call(layer, first=True).sum().backward()
        call(layer, first=False).sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    layer.load_state_dict(other.state_dict())
    assert all(torch.equal(p, q) for p, q in zip(layer.parameters(), other.parameters(), strict=True))
    with pytest.raises(UnsupportedConfig, match="the weight has changed since"):
        call(layer, first=False)
    if recipe == "fp8-block":
        assert torch.equal(call(layer, first=True), call(other, first=True))


@every
def test_a_module_is_cast_by_swapping_after_the_cache_was_filled(make, swaps):
    layer = make("fp8-block")
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        call(layer, first=True)
    layer.bfloat16()
    assert all(p.dtype == torch.bfloat16 for p in layer.parameters())
    assert torch.equal(call(layer, first=True), call(twin.bfloat16(), first=True))


def test_a_weight_whose_step_was_captured_is_swapped_and_its_memory_stays_known(swaps, monkeypatch):
    layer, other = LAYERS["Linear"]("fp8-block"), LAYERS["Linear"]("fp8-block")
    monkeypatch.setattr(optimizer_hooks.heard, "captured", set())
    monkeypatch.setattr(optimizer_hooks.heard, "captures", False)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    call(layer, first=True).sum().backward()
    with monkeypatch.context() as patch:
        patch.setattr(optimizer_hooks, "is_capturing", lambda: True)
        optimizer.step()
    optimizer.zero_grad()
    call(layer, first=True)
    with pytest.raises(UnsupportedConfig, match="captured in a CUDA graph"):
        call(layer, first=False)
    layer.load_state_dict(other.state_dict())  # into the same memory, which the graph writes to
    call(layer, first=True)
    with pytest.raises(UnsupportedConfig, match="captured in a CUDA graph"):
        call(layer, first=False)
    layer.load_state_dict(other.state_dict(), assign=True)  # other memory, which no graph writes to
    assert torch.equal(call(layer, first=True), call(layer, first=False))
