"""The contracts of a permutation's layers, without a function around them: sort, permute, unpermute, probabilities."""

import pytest
import torch

from octavo.layers import permute, permute_probs, token_sort, unpermute
from tests.layers.checks import check_backward, check_forward

TOKENS, TOP_K, EXPERTS, WIDTH = 30, 2, 5, 8
leading = pytest.mark.parametrize("shape", [(TOKENS,), (5, 6), (0,), ()], ids=str)
masked = pytest.mark.parametrize("is_mask", [False, True], ids=["index", "mask"])


def permutation(shape, is_mask, rows=None, align=4):
    """The extras of a sort: sizes, positions, slots, and experts or None."""
    if is_mask:
        routing = torch.rand(*shape, EXPERTS) < 0.4
    else:
        routing = torch.randint(-1, EXPERTS, (*shape, TOP_K))
    config = token_sort.Config(experts=EXPERTS, top_k=TOP_K if is_mask else 0, align=align)
    inputs = token_sort.Inputs(routing, None if rows is None else torch.empty(rows, 0))
    made = check_forward(token_sort.layer, config, inputs)
    assert made.outputs == () and made.extras[1].shape == (*shape, TOP_K)
    return made.extras if is_mask else (*made.extras, None)


@leading
@masked
@pytest.mark.parametrize("rows", [None, 0, 40])
def test_the_contract_of_the_sort(shape, is_mask, rows):
    sizes, positions, slots, _ = permutation(shape, is_mask, rows)
    assert sizes.sum() <= slots.shape[0] and (rows is None or slots.shape[0] == rows)
    assert int((positions >= 0).sum()) == int((slots >= 0).sum())
    config = token_sort.Config(experts=EXPERTS)
    assert not token_sort.layer.has_backward(config)
    assert token_sort.layer.backward(config, (), (), ()) == (None, None)


@leading
@masked
@pytest.mark.parametrize("grads", ["", "x"])
@pytest.mark.parametrize("tail", ["zero", "untouched"])
def test_the_contract_of_permute(shape, is_mask, grads, tail):
    _, positions, slots, _ = permutation(shape, is_mask)
    config = permute.Config(tail, grads)
    inputs = permute.Inputs(torch.randn(*shape, WIDTH), positions, slots)
    made = check_forward(permute.layer, config, inputs)
    check_backward(permute.layer, config, inputs, made, (torch.randn(slots.shape[0], WIDTH),))
    assert permute.layer.backward(config, permute.layer.save(config, inputs, made), (), (None,)) == (None,) * 3


@leading
@masked
@pytest.mark.parametrize("grads", ["", "x", "p", "xp"])
@pytest.mark.parametrize("probs", [None, torch.float32, torch.bfloat16], ids=str)
def test_the_contract_of_unpermute(shape, is_mask, grads, probs):
    if probs is None and "p" in grads:
        grads = grads.replace("p", "")
    _, positions, slots, experts = permutation(shape, is_mask)
    width = EXPERTS if is_mask else TOP_K
    given = None if probs is None else torch.rand(*shape, width).to(probs)
    config = unpermute.Config(grads=grads)
    inputs = unpermute.Inputs(torch.randn(slots.shape[0], WIDTH), positions, slots, given, experts)
    made = check_forward(unpermute.layer, config, inputs)
    check_backward(unpermute.layer, config, inputs, made, (torch.randn(*shape, WIDTH),))
    assert unpermute.layer.backward(config, unpermute.layer.save(config, inputs, made), (), (None,)) == (None,) * 5


@leading
@masked
@pytest.mark.parametrize("grads", ["", "p"])
def test_the_contract_of_probabilities(shape, is_mask, grads):
    _, positions, slots, experts = permutation(shape, is_mask)
    config = permute_probs.Config(grads)
    inputs = permute_probs.Inputs(torch.rand(*shape, EXPERTS if is_mask else TOP_K), positions, slots, experts)
    made = check_forward(permute_probs.layer, config, inputs)
    check_backward(permute_probs.layer, config, inputs, made, (torch.randn(slots.shape[0]),))
    assert permute_probs.layer.backward(config, permute_probs.layer.save(config, inputs, made), (), (None,))[0] is None
