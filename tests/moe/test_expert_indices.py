"""Indices that no expert has: octavo.moe.Experts refuses them where it can read them without waiting."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from octavo import moe
from octavo.errors import Unsupported


def batch(tokens=6):
    probs, indices = torch.rand(tokens, 4).softmax(-1).topk(2)
    return torch.randn(tokens, 32), indices, probs


def made(recipe="fp8-block"):
    return moe.Experts(4, 32, 48, recipe=recipe)


@pytest.mark.parametrize("recipe", ["bf16", "fp8-block"])
@pytest.mark.parametrize("wrong", [4, 13, 2**40, -2])
def test_on_a_cpu_an_index_of_no_expert_is_refused(recipe, wrong):
    experts, (x, indices, probs) = made(recipe), batch()
    indices[5, 1] = wrong
    sentence = rf"^Experts takes indices from 0 to 3, and -1 for an assignment without an expert, got {wrong}\. "
    for call in (experts, experts.explain):
        with pytest.raises(Unsupported, match=sentence):
            call(x, indices, probs)


def test_minus_one_and_no_tokens_are_taken():
    experts, (x, indices, probs) = made(), batch()
    indices[2:] = -1
    y = experts(x, indices, probs)
    assert y[:2].all() and not y[2:].any()
    assert experts(*batch(0)).shape == (0, 32)


def test_a_permutation_may_be_of_indices_that_it_drops():
    experts, (x, indices, probs) = made(), batch()
    assert not experts(x, moe.sort(indices + 9, 4), probs).any()


@pytest.mark.usefixtures("fresh_compiler")
def test_a_graph_does_not_check_indices_of_experts():
    experts, (x, indices, probs) = made(), batch()
    indices[5, 1] = 13
    compiled = torch.compile(experts, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x, indices, probs), compiled(x, torch.where(indices == 13, -1, indices), probs))


@pytest.mark.parametrize("place", ["fake", "meta"])
def test_tensors_without_values_are_not_read(place):
    with FakeTensorMode() if place == "fake" else torch.device("meta"):
        assert made()(*batch()).shape == (6, 32)
