"""Masks of experts as bits: the mask back, and the permutation of the mask."""

import pytest
import torch

from octavo import moe
from octavo.errors import UnsupportedConfig, UnsupportedDtype, UnsupportedShape
from tests.support.steps import compiled


def mask_of(tokens, experts):
    return torch.rand(tokens, experts, generator=torch.Generator().manual_seed(0)) < 0.3


@pytest.mark.parametrize("experts", [1, 7, 8, 9, 256])
@pytest.mark.parametrize("lead", [(5,), (2, 3), (0,)])
def test_the_mask_comes_back(experts, lead):
    mask = mask_of(max(torch.Size(lead).numel(), 1), experts)[: torch.Size(lead).numel()].reshape(*lead, experts)
    bits = moe.pack_mask(mask)
    assert bits.shape == (*lead, -(-experts // 8)) and bits.dtype == torch.uint8
    assert torch.equal(moe.unpack_mask(bits, experts), mask)


def test_the_first_expert_is_the_lowest_bit():
    mask = torch.zeros(1, 16, dtype=torch.bool)
    mask[0, 0] = mask[0, 15] = True
    assert moe.pack_mask(mask).tolist() == [[1, 128]]


@pytest.mark.parametrize("top_k", [None, 3])
def test_bits_sort_as_the_mask_does(top_k):
    mask, x = mask_of(11, 12), torch.randn(11, 4)
    rows, want = moe.permute(x, mask, top_k=top_k)
    found, permutation = moe.permute(x, moe.pack_mask(mask), 12, top_k=top_k)
    assert all(map(torch.equal, permutation, want)) and torch.equal(found, rows)


@pytest.mark.usefixtures("fresh_compiler")
def test_in_a_graph():
    mask = mask_of(11, 12)
    call = compiled(lambda mask: moe.sort(moe.pack_mask(mask), 12).positions)
    assert torch.equal(call(mask), moe.sort(mask).positions)


def test_what_does_not_fit():
    with pytest.raises(UnsupportedDtype, match=r"takes a mask, bool \[\.\.\., E\], got torch.int64"):
        moe.pack_mask(torch.ones(2, 3).long())
    with pytest.raises(UnsupportedShape, match="12 experts have 2 bytes"):
        moe.unpack_mask(torch.zeros(4, 1, dtype=torch.uint8), 12)
    with pytest.raises(UnsupportedConfig, match="Pass num_experts"):
        moe.sort(torch.zeros(4, 1, dtype=torch.uint8))
