"""moe.sort_chunks: rows of each rank and expert in the order of experts, and chunks in a given order."""

import pytest
import torch

from octavo import moe
from octavo.errors import Unsupported
from tests.support.linear_oracle import assert_same
from tests.support.steps import compiled

SIZES = torch.tensor([[2, 0, 3], [1, 4, 0], [0, 0, 0], [5, 1, 1]])


def arrived(sizes, stride=None):
    """Rows of each rank, one after another, or each rank in a part of `stride` rows; and the rows by expert."""
    chunks = [[torch.randn(n, 4) for n in line] for line in sizes.tolist()]
    parts = [torch.cat(line) for line in chunks]
    if stride is not None:
        parts = [torch.cat([part, torch.full((stride - len(part), 4), torch.nan)]) for part in parts]
    return torch.cat(parts), torch.cat([line[e] for e in range(sizes.shape[1]) for line in chunks])


@pytest.mark.parametrize("stride", [None, 7, 9])
def test_rows_are_in_the_order_of_experts_and_of_ranks(stride):
    x, want = arrived(SIZES, stride)
    permutation = moe.sort_chunks(SIZES, len(x), stride=stride)
    rows, _ = moe.permute(x, permutation)
    assert_same(rows[: len(want)], want)
    assert permutation.sizes.tolist() == [8, 5, 4]
    back = moe.unpermute(rows, permutation)
    assert_same(back, x.nan_to_num(0))


def test_rows_after_the_chunks_are_left():
    x, want = arrived(SIZES)
    padded = torch.cat([x, torch.full((6, 4), torch.nan)])
    assert_same(moe.permute(padded, moe.sort_chunks(SIZES, len(padded)))[0][: len(want)], want)


def test_chunks_follow_a_given_order_with_gradients_and_probabilities():
    """What upstream's moe_sort_chunks_by_index does, and by_index_with_probs."""
    sizes, order = [3, 0, 2, 4], [2, 3, 0, 1]
    x, probs = torch.randn(9, 4, requires_grad=True), torch.rand(9, 1, requires_grad=True)
    want = torch.cat([torch.split(x, sizes)[i] for i in order])
    for given in (order, torch.tensor(order, dtype=torch.int32)):
        permutation = moe.sort_chunks(torch.tensor(sizes), 9, order=given)
        rows = moe.permute(x, permutation)[0]
        assert_same(rows.detach(), want.detach())
        assert permutation.sizes.tolist() == [2, 4, 3, 0]
    moved = moe.permute_probs(probs, permutation)
    assert_same(moved.detach(), torch.cat([torch.split(probs[:, 0], sizes)[i] for i in order]).detach())
    y = moe.unpermute(rows, permutation, probs)
    assert_same(y.detach(), (x * probs).detach())
    dx, dprobs = torch.autograd.grad(y.sum(), (x, probs))
    assert_same(dx, probs.detach().expand_as(x))
    torch.testing.assert_close(dprobs, x.detach().sum(1, keepdim=True))


@pytest.mark.usefixtures("fresh_compiler")
def test_a_graph_follows_sizes_that_change():
    call = compiled(lambda x, sizes: moe.permute(x, moe.sort_chunks(sizes, 40, stride=10))[0])
    for sizes in (SIZES, SIZES.flip(0), SIZES - SIZES):
        x, want = arrived(sizes, 10)
        assert_same(call(x, sizes)[: len(want)], want)


REFUSED = {
    "floats": ((SIZES.float(), 20), {}, "int32 or int64, got torch.float32"),
    "three dims": ((SIZES[None], 20), {}, r"\[ranks, experts\], or \[chunks\] with order=, got \(1, 4, 3\)"),
    "no order": ((SIZES[0], 20), {}, r"sizes \(3,\), no order"),
    "an order beside ranks": ((SIZES, 20), {"order": [0, 1, 2]}, r"sizes \(4, 3\), an order"),
    "a chunk twice": ((SIZES[0], 20), {"order": [0, 0, 2]}, r"each of the 3 chunks once, got \[0, 0, 2\]"),
    "more rows than there are": ((SIZES, 16), {}, "at most 16 rows"),
    "more rows than a rank has": ((SIZES, 20), {"stride": 5}, "of each rank have at most 5 rows"),
    "a negative size": ((SIZES - 1, 99), {}, "Count the rows anew"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(case):
    given, more, message = REFUSED[case]
    with pytest.raises(Unsupported, match=message):
        moe.sort_chunks(*given, **more)
