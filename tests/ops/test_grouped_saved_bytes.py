"""Bytes that a GroupedLinear keeps for backward and for backward_dw, and when it lets go of them."""

import gc
import weakref

import pytest
import torch
from torch import nn

import octavo
from octavo.quant.groups import blocks_for
from tests.support.experts import LAYOUTS, G, K, N, batch, delayed, experts, give, grid, sizes, step
from tests.support.recipe_traits import QUANTIZED, stored_bytes
from tests.support.saved_bytes import kept
from tests.support.state_tensors import state_tensors


def column_bytes(recipe, rows, columns, groups):
    """The most that codes contracted over rows take, in whole blocks: codes, then scales."""
    quantizer = octavo.recipe(recipe).linear().wgrad.right
    return stored_bytes(quantizer, columns, 128 * blocks_for(rows, groups), groups)


SMALL = 2048  # where groups lie, seeds, flags


@grid(QUANTIZED, layout=LAYOUTS)
def test_backward_keeps_codes_of_columns_and_nothing_wider(recipe, layout):
    x, w = column_bytes(recipe, 256, 128, 2), column_bytes(recipe, 256, 128, 2)
    assert kept(recipe, layout) <= x + w + SMALL
    assert kept(recipe, layout, first=False) <= x + SMALL
    assert kept(recipe, layout, x_grad=False) <= x + SMALL
    assert kept(recipe, layout, w_grad=False) <= w + SMALL
    assert kept(recipe, layout, x_grad=False, w_grad=False) <= SMALL
    assert x < 4 * 256 * 128 * {1: 0.45, 2: 0.25}[octavo.recipe(recipe).linear().wgrad.right.fmt.packed]  # of float32


@grid(QUANTIZED, layout=LAYOUTS)
def test_what_was_kept_goes_with_backward(recipe, layout):
    layer, (x, dy), alive = experts(recipe, **layout), batch(), []

    def pack(tensor):
        if not isinstance(tensor, nn.Parameter) and tensor.untyped_storage().data_ptr() not in owned:
            alive.append(weakref.ref(tensor))
        return tensor

    owned = {t.untyped_storage().data_ptr() for t in (*layer.parameters(), *state_tensors(layer))}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = layer(x.clone().requires_grad_(), sizes())
    assert alive
    y.backward(dy)
    gc.collect()
    assert not [ref().shape for ref in alive if ref() is not None]


def living_bytes():
    """Bytes of all tensors that Python holds, each storage once."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, nn.Parameter) and thing.layout == torch.strided and not thing.is_meta:
            storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    return sum(storages.values())


@pytest.mark.parametrize(("recipe", "layout"), [("bf16", "single"), ("fp8-current", "per group"), ("nvfp4", "single")])
def test_what_waited_for_backward_dw_goes_with_it(recipe, layout):
    layer = delayed(recipe, LAYOUTS[layout], fuse_wgrad_accumulation=True)
    give(layer, torch.zeros(G, N, K))
    step(layer, *batch())
    layer.backward_dw()
    layer.zero_grad()
    before = living_bytes()
    x, dy = batch(seed=2)
    layer(x, sizes()).backward(dy)
    del x, dy
    assert living_bytes() > before
    layer.backward_dw()
    layer.zero_grad()
    assert living_bytes() <= before
