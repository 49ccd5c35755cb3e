"""The kernels of a permutation: the sort against a loop, rows against torch, gradients against autograd."""

from fractions import Fraction

import pytest
import torch

from octavo import backend
from octavo.kernels import permute
from octavo.kernels.permute import PAD, TAIL, Assignments, reference
from tests.support.pairs import pairs, turns

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
device = pytest.mark.parametrize("device", DEVICES)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DENSE = {"index": False, "mask": True}
# tokens, assignments, experts, rows (None: as many as may be needed), align
CASES = {
    "one of each": (1, 1, 1, None, 1),
    "odd": (37, 2, 7, None, 1),
    "several blocks": (300, 5, 16, None, 1),
    "aligned": (300, 2, 16, None, 16),
    "aligned and cut": (300, 5, 16, 1024, 128),
    "cut": (130, 4, 40, 300, 1),
    "room to spare": (20, 2, 7, 100, 4),
    "no room": (20, 2, 7, 0, 1),
    "no tokens": (0, 2, 7, 16, 8),
    "many experts": (257, 8, 1024, None, 1),
    "many assignments": (70, 32, 33, None, 4),
}


def index_of(case, device="cpu", dtype=torch.int64):
    tokens, assignments, experts, _, _ = case
    return torch.randint(-1, experts + 1, (tokens, assignments), dtype=dtype).to(device)


def sorted_of(case, index):
    _, _, experts, rows, align = case
    rows = permute.most_rows(index.numel(), experts, align) if rows is None else rows
    return permute.sort(index, experts, rows, align)


def by_hand(index, experts, rows, align):
    """Sizes, positions and assignments, one assignment after the other."""
    flat = index.flatten().tolist()
    order, sizes = [], []
    for expert in range(experts):
        own = [i for i, e in enumerate(flat) if e == expert]
        own += [PAD] * (-len(own) % align)
        sizes.append(min(len(own), max(rows - len(order), 0)))
        order += own
    order = (order + [TAIL] * rows)[:rows]
    positions = [-1] * len(flat)
    for row, assignment in enumerate(order):
        if assignment >= 0:
            positions[assignment] = row
    return torch.tensor(sizes), torch.tensor(positions, dtype=torch.int32), torch.tensor(order, dtype=torch.int32)


@device
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_the_sort_is_that_of_a_loop(case, kind, device):
    index = index_of(case, device, kind)
    made = sorted_of(case, index)
    sizes, positions, assignments = by_hand(index, case[2], made.assignments.shape[0], case[4])
    assert torch.equal(made.sizes.cpu(), sizes)
    assert torch.equal(made.positions.cpu().flatten(), positions)
    assert torch.equal(made.assignments.cpu(), assignments)
    assert made.sizes.dtype == torch.int64 and made.positions.shape == index.shape


@device
def test_the_sort_of_one_popular_expert_and_of_numbers_beyond_32_bits(device):
    index = torch.full((600, 3), 5, device=device)
    index[7, 1], index[8, 2] = 2**32 + 5, -(2**40)
    made = permute.sort(index, 8, 1800, 1)
    assert made.sizes.tolist() == [0, 0, 0, 0, 0, 1798, 0, 0]
    assert made.positions[7].tolist() == [21, -1, 22] and made.assignments[-2:].tolist() == [TAIL, TAIL]


@device
@pytest.mark.parametrize("shape", [(1, 1), (40, 7), (33, 16), (65, 130), (9, 1024)])
def test_a_mask_as_a_list_of_experts(shape, device):
    mask = torch.rand(shape, device=device) < 0.2
    for top_k in {1, min(3, shape[1]), shape[1]}:
        found = permute.listed(mask, top_k)
        for token, row in enumerate(mask.tolist()):
            chosen = [expert for expert, there in enumerate(row) if there][:top_k]
            assert found[token].tolist() == chosen + [-1] * (top_k - len(chosen))


def inputs(case, width, dtype, device, dense):
    """(assignments, sources, x, rows, probs); rows without an assignment, and probabilities without a row, are NaN."""
    tokens, top_k, experts = case[:3]
    if dense:
        top_k = min(top_k, experts)
        index = permute.listed(torch.rand(tokens, experts, device=device) < top_k / experts, top_k)
    else:
        index = index_of(case, device)
    made = sorted_of(case, index)
    assignments = Assignments(made.positions, index if dense else None)
    x = torch.randn(tokens, width, device=device).to(dtype)
    matrix = torch.randn(made.assignments.shape[0], width, device=device).to(dtype)
    matrix[made.assignments < 0] = torch.nan
    probs = torch.rand(tokens, experts if dense else top_k, device=device)
    if not dense:
        probs[made.positions < 0] = torch.nan
    return assignments, made.assignments, x, matrix, probs


def prob_of(probs, assignments, token, k):
    return probs[token, k if assignments.experts is None else assignments.experts[token, k]]


@turns(devices=True, case=CASES, dense=DENSE, dtype=DTYPES)
def test_rows_there_and_back(case, dense, dtype, device):
    """Against torch's own sums, to the last bit where no product is rounded."""
    assignments, sources, x, rows, probs = inputs(case, 40, dtype, device, dense)
    moved = permute.scatter(x, assignments.positions, sources, True)
    want = torch.zeros_like(moved)
    there = sources >= 0
    want[there] = x[sources[there].long() // assignments.positions.shape[1]]
    assert torch.equal(moved, want)
    plain, weighted = (torch.zeros(x.shape, device=device, dtype=torch.float64) for _ in range(2))
    for token, k in (assignments.positions >= 0).nonzero().tolist():
        row = rows[assignments.positions[token, k].long()].double()
        plain[token] += row
        weighted[token] += row * prob_of(probs, assignments, token, k)
    for found, exact in (
        (permute.combine(rows, assignments, None), plain),
        (permute.combine(rows, assignments, probs), weighted),
    ):
        torch.testing.assert_close(found, exact.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=1e-5)


@turns(devices=True, case=CASES, dense=DENSE, dtype=DTYPES)
def test_gradients_of_the_sum(case, dense, dtype, device):
    assignments, sources, dy, rows, probs = inputs(case, 65, dtype, device, dense)
    drows, dprobs = permute.combine_backward(dy, rows, assignments, sources, probs, True, True)
    want, exact = torch.zeros_like(rows), torch.zeros(probs.shape, dtype=torch.float64, device=device)
    for token, k in (assignments.positions >= 0).nonzero().tolist():
        row = assignments.positions[token, k].long()
        want[row] = (dy[token].float() * prob_of(probs, assignments, token, k)).to(dtype)
        prob_of(exact, assignments, token, k).copy_((dy[token].double() * rows[row].double()).sum())
    assert torch.equal(drows, want)
    torch.testing.assert_close(dprobs, exact.float(), rtol=1e-5, atol=1e-4)
    alone, nothing = permute.combine_backward(dy, None, assignments, sources, probs, True, True)
    assert nothing is None and torch.equal(alone, want)
    no_rows, again = permute.combine_backward(dy, rows, assignments, sources, probs, True, False)
    assert no_rows is None and torch.equal(again, dprobs)
    unweighted, _ = permute.combine_backward(dy, None, assignments, sources, None, True, True)
    assert torch.equal(unweighted, permute.scatter(dy, assignments.positions, sources, True))


@turns(devices=True, case=CASES, dense=DENSE, dtype=DTYPES)
def test_probabilities_of_rows_and_back(case, dense, dtype, device):
    assignments, sources, _, rows, probs = inputs(case, 1, dtype, device, dense)
    probs, grad = probs.to(dtype), rows[:, 0].contiguous()
    want, back = torch.zeros(sources.shape, dtype=dtype, device=device), torch.zeros_like(probs)
    for token, k in (assignments.positions >= 0).nonzero().tolist():
        row = assignments.positions[token, k].long()
        want[row] = prob_of(probs, assignments, token, k)
        prob_of(back, assignments, token, k).copy_(grad[row])
    assert torch.equal(permute.take(probs, assignments, sources), want)
    assert torch.equal(permute.take_backward(grad, assignments, tuple(probs.shape)), back)


@device
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8])
def test_codes_are_moved_as_bytes(dtype, device):
    made = sorted_of(CASES["aligned"], index_of(CASES["aligned"], device))
    codes = torch.randint(0, 256, (300, 48), dtype=torch.uint8, device=device)
    moved = permute.scatter(codes.view(dtype), made.positions, made.assignments, True)
    assert moved.dtype == dtype
    assert torch.equal(moved.view(torch.uint8), permute.scatter(codes, made.positions, made.assignments, True))


@device
def test_strided_tokens_and_rows(device):
    made = sorted_of(CASES["odd"], index_of(CASES["odd"], device))
    wide, rows = torch.randn(37, 80, device=device), torch.randn(made.assignments.shape[0], 80, device=device)
    for x in (wide[:, ::2], wide.T[:37, :37], wide[:1].expand(37, 80)):
        moved = permute.scatter(x, made.positions, made.assignments, True)
        assert torch.equal(moved, permute.scatter(x.contiguous(), made.positions, made.assignments, True))
    assignments = Assignments(made.positions)
    assert torch.equal(
        permute.combine(rows[:, ::2], assignments, None), permute.combine(rows[:, ::2].contiguous(), assignments, None)
    )


def test_the_reference_rounds_a_product_and_its_sum_once():
    a, b = torch.randn(3000), torch.randn(3000)
    c = torch.cat((-(a * b)[:1000], torch.randn(1000), (a * b)[2000:] * 2.0**24))
    found = reference._fused(a, b, c)
    exact = [
        Fraction(x) * Fraction(y) + Fraction(z) for x, y, z in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
    ]
    for got, want in zip(found.tolist(), exact, strict=True):
        near = [torch.nextafter(torch.tensor(got), torch.tensor(s * torch.inf)).item() for s in (-1, 1)]
        assert all(abs(Fraction(got) - want) <= abs(Fraction(other) - want) for other in near)
    special = reference._fused(
        torch.tensor([torch.inf, torch.inf, 0.0, 1e30]), torch.tensor([1.0, 0.0, -1.0, 1e30]), torch.zeros(4)
    )
    assert special[0].isposinf() and special[1].isnan() and special[2] == 0 and special[3].isposinf()


# -- on a GPU ----------------------------------------------------------------------------------------------------------


LARGE = {"1000 tokens": (1000, 8, 128, None, 1), "aligned": (1000, 5, 64, 6000, 128), "cut": (513, 3, 7, 1500, 1)}


@pytest.mark.gpu
@pairs(width=[1, 40, 1024, 1500, 7168], dtype=DTYPES, case=LARGE, dense=DENSE)
def test_the_kernels_write_the_bits_of_the_reference(case, width, dense, dtype):
    assignments, sources, x, rows, probs = inputs(case, width, dtype, "cuda", dense)

    def everything():
        drows, dprobs = permute.combine_backward(x, rows, assignments, sources, probs, True, True)
        exact = (
            permute.scatter(x, assignments.positions, sources, True), permute.combine(rows, assignments, None),
            permute.combine(rows, assignments, probs), drows, permute.take(probs, assignments, sources),
        )  # fmt: skip
        return exact, dprobs

    found, dprobs = everything()
    with backend.use("reference"):
        want, exact = everything()
    assert all(map(torch.equal, found, want))
    torch.testing.assert_close(dprobs, exact, rtol=1e-4, atol=1e-3)
    again, same = everything()
    assert all(map(torch.equal, found, again)) and torch.equal(dprobs, same)


@pytest.mark.gpu
@pytest.mark.gpu_smoke
def test_an_untouched_tail_is_not_written():
    case = (100, 2, 8, 512, 16)
    made = sorted_of(case, index_of(case, "cuda"))
    out = torch.full((512, 64), 7.0, device="cuda")
    x = torch.randn(100, 64, device="cuda")
    backend.implementation("octavo.kernels.permute", x).scatter(
        x, out, Assignments(made.positions), made.assignments, None, False
    )
    assert (out[made.assignments == TAIL] == 7).all() and (out[made.assignments == PAD] == 0).all()
    assert torch.equal(out[made.assignments >= 0], x[made.assignments[made.assignments >= 0].long() // 2])


@pytest.mark.gpu
@pytest.mark.usefixtures("large_memory")
def test_offsets_beyond_32_bits():
    """Rows whose elements are more than 2³¹ apart."""
    tokens, width = 40_000, 60_000
    index = torch.arange(tokens, device="cuda").flip(0)[:, None] % 2
    made = permute.sort(index, 2, tokens, 1)
    x = torch.arange(tokens, device="cuda").to(torch.float16)[:, None].expand(tokens, width)
    moved = permute.scatter(x, made.positions, made.assignments, True)
    want = (made.assignments // 1).to(torch.float16)
    assert torch.equal(moved[:, 0], want) and torch.equal(moved[:, -1], want)
    y = permute.combine(moved, Assignments(made.positions), None)
    assert torch.equal(y[:, -1], x[:, -1])
