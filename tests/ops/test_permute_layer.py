"""The contracts of a permutation's layers, without a function around them: sort, permute, unpermute, probabilities."""

import pytest
import torch

from octavo.moe import permute_probs_layer, token_sort_layer
from octavo.ops import permute_layer, unpermute_layer
from tests.support.contract_checks import check_backward, check_forward, wants

TOKENS, TOP_K, EXPERTS, WIDTH = 30, 2, 5, 8
leading = pytest.mark.parametrize("shape", [(TOKENS,), (5, 6), (0,), ()], ids=str)
masked = pytest.mark.parametrize("is_mask", [False, True], ids=["index", "mask"])


def permutation(shape, is_mask, rows=None, align=4):
    """The auxiliary outputs of a sort: sizes, positions, assignments, and experts or None."""
    if is_mask:
        routing = torch.rand(*shape, EXPERTS) < 0.4
    else:
        routing = torch.randint(-1, EXPERTS, (*shape, TOP_K))
    config = token_sort_layer.Config(experts=EXPERTS, top_k=TOP_K if is_mask else 0, align=align)
    inputs = token_sort_layer.Inputs(routing, None if rows is None else torch.empty(rows, 0))
    made = check_forward(token_sort_layer.layer, config, inputs)
    assert made.outputs == () and made.auxiliary[1].shape == (*shape, TOP_K)
    return made.auxiliary if is_mask else (*made.auxiliary, None)


@leading
@masked
@pytest.mark.parametrize("rows", [None, 0, 40])
def test_the_contract_of_the_sort(shape, is_mask, rows):
    sizes, positions, assignments, _ = permutation(shape, is_mask, rows)
    assert sizes.sum() <= assignments.shape[0] and (rows is None or assignments.shape[0] == rows)
    assert int((positions >= 0).sum()) == int((assignments >= 0).sum())
    config = token_sort_layer.Config(experts=EXPERTS)
    assert not token_sort_layer.layer.has_backward(config)
    assert token_sort_layer.layer.backward(config, (), (), ()) == (None, None)


@leading
@masked
@pytest.mark.parametrize("grads", ["", "dx"])
@pytest.mark.parametrize("tail", ["zero", "untouched"])
def test_the_contract_of_permute(shape, is_mask, grads, tail):
    _, positions, assignments, _ = permutation(shape, is_mask)
    config = permute_layer.Config(tail, **wants(grads))
    inputs = permute_layer.Inputs(torch.randn(*shape, WIDTH), positions, assignments)
    made = check_forward(permute_layer.layer, config, inputs)
    check_backward(permute_layer.layer, config, inputs, made, (torch.randn(assignments.shape[0], WIDTH),))
    assert (
        permute_layer.layer.backward(config, permute_layer.layer.save(config, inputs, made), (), (None,)) == (None,) * 3
    )


@leading
@masked
@pytest.mark.parametrize("grads", ["", "dx", "dprobs", "dx dprobs"])
@pytest.mark.parametrize("probs", [None, torch.float32, torch.bfloat16], ids=str)
def test_the_contract_of_unpermute(shape, is_mask, grads, probs):
    if probs is None and "dprobs" in grads:
        grads = grads.replace("dprobs", "")
    _, positions, assignments, experts = permutation(shape, is_mask)
    width = EXPERTS if is_mask else TOP_K
    given = None if probs is None else torch.rand(*shape, width).to(probs)
    config = unpermute_layer.Config(**wants(grads))
    inputs = unpermute_layer.Inputs(torch.randn(assignments.shape[0], WIDTH), positions, assignments, given, experts)
    made = check_forward(unpermute_layer.layer, config, inputs)
    check_backward(unpermute_layer.layer, config, inputs, made, (torch.randn(*shape, WIDTH),))
    assert (
        unpermute_layer.layer.backward(config, unpermute_layer.layer.save(config, inputs, made), (), (None,))
        == (None,) * 5
    )


@leading
@masked
@pytest.mark.parametrize("grads", ["", "dprobs"])
def test_the_contract_of_probabilities(shape, is_mask, grads):
    _, positions, assignments, experts = permutation(shape, is_mask)
    config = permute_probs_layer.Config(**wants(grads))
    inputs = permute_probs_layer.Inputs(
        torch.rand(*shape, EXPERTS if is_mask else TOP_K), positions, assignments, experts
    )
    made = check_forward(permute_probs_layer.layer, config, inputs)
    check_backward(permute_probs_layer.layer, config, inputs, made, (torch.randn(assignments.shape[0]),))
    assert (
        permute_probs_layer.layer.backward(config, permute_probs_layer.layer.save(config, inputs, made), (), (None,))[0]
        is None
    )
