"""Layers with keep_weight_codes=False: the same bits with less memory, with and without a cache of the weights."""

import pytest
import torch

import octavo
from octavo.quant.scale_blocks import are_transposed
from tests.support.experts import LAYERS, assert_steps, batch, change, every, experts, forward, layers, quantized, step
from tests.support.steps import assert_state, compiled


@every
@pytest.mark.parametrize("layout", [LAYERS["single"], LAYERS["linear"]], ids=["groups", "linear"])
def test_the_same_bits_without_a_cache(recipe, layout):
    layer, twin = experts(recipe, keep_weight_codes=False, **layout), experts(recipe, **layout)
    for seed in range(3):
        assert_steps(step(layer, *batch(seed=seed)), step(twin, *batch(seed=seed)), f"step {seed}")
        octavo.step(layer), octavo.step(twin)
    assert_state(layer, twin)


@quantized
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("how", ["eager", "compiled"])
@layers
def test_the_same_bits_with_a_cache_which_of_groups_holds_rows_alone_where_they_can_be_transposed(recipe, how, layout):
    layer, twin = experts(recipe, keep_weight_codes=False, **layout), experts(recipe, **layout)
    call = compiled(layer) if how == "compiled" else None
    for seed, first in enumerate((True, False, False)):
        data = batch(seed=seed)
        found = step(layer, *data, call=call, is_first_microbatch=first)
        assert_steps(found, step(twin, *data, is_first_microbatch=first), f"microbatch {seed}")
    quant = octavo.recipe(recipe).linear()
    down, across = quant.fprop.right.block
    turns = quant.fprop.right == quant.dgrad.right and down == across
    assert are_transposed(quant.fprop.right, quant.dgrad.right) == turns
    # a Linear's cache has both orientations
    assert (layer._codes.parts(layer, "column") == ()) == (turns and not isinstance(layer, octavo.Linear))
    assert layer._codes.parts(layer, "row") != ()


@layers
def test_a_weight_that_changed_before_backward_is_an_error(layout):
    layer, (x, dy) = experts("fp8-block", keep_weight_codes=False, **layout), batch()
    y = forward(layer, x.requires_grad_())
    change(layer, by=1.0)
    with pytest.raises(RuntimeError):
        y.backward(dy[: len(y)])


def test_the_kept_bytes():
    kept = []
    for keeps in (True, False):
        layer, (x, _) = experts("fp8-block", k=256, n=128, keep_weight_codes=keeps), batch(k=256, n=128)
        found = {}

        def pack(t, found=found):
            found[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            layer(x.requires_grad_(), torch.tensor([30, 0, 17]))
        found.pop(layer.weight.untyped_storage().data_ptr(), None)
        kept.append(sum(found.values()))
    assert kept[0] - kept[1] >= 3 * 256 * 128
