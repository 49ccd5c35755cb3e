"""Four ranks in one process (torch's LocalTensorMode over the fake backend): any sizes, a step and gathered codes."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import octavo
from octavo import quant
from octavo.communication import collectives
from octavo.communication.gathered_rows import gather_columns
from octavo.ops import inputs, split_layer

local = pytest.importorskip("torch.distributed._local_tensor")
RANKS = 4


@pytest.fixture(scope="module", autouse=True)
def _four_ranks():
    """Layers take torch's tensors of all ranks in these tests."""
    before, check = inputs.OURS, split_layer.check_ranks
    inputs.OURS = (*before, local.LocalTensor)
    split_layer.check_ranks = lambda *_: None  # which reads what the others have
    dist.init_process_group("fake", rank=0, world_size=RANKS)
    yield
    dist.destroy_process_group()
    inputs.OURS, split_layer.check_ranks = before, check


def split(t, dim):
    return local.LocalTensor({rank: part.contiguous() for rank, part in enumerate(t.detach().chunk(RANKS, dim))})


def parts(t):
    return [t._local_tensors[rank] for rank in range(RANKS)]


def copies(t):
    return local.LocalTensor({rank: t.detach().clone() for rank in range(RANKS)})


def together(t, dim):
    """All ranks' parts of a tensor; its value on one of them if they all have the same."""
    found = parts(t)
    if dim is None:
        assert all(torch.equal(part, found[0]) for part in found)
        return found[0]
    return torch.cat(found, dim)


def trained(recipe, mode, sequence, m, k, n, seed):
    """y, dx, dw and db of a layer in one process, and those of its parts, put together."""
    torch.manual_seed(seed)
    whole, x, dy = octavo.Linear(k, n, recipe=recipe), torch.randn(m, k), torch.randn(m, n)
    x = (x * 10.0 ** torch.randint(-3, 3, (m, 1))).requires_grad_()
    y = whole(x)
    y.backward(dy)
    column = mode == "column"
    rows = 0 if sequence else None
    with local.LocalTensorMode(RANKS):
        layer = octavo.Linear(k, n, recipe=recipe, parallel_mode=mode, sequence_parallel=sequence)
        layer.weight = torch.nn.Parameter(split(whole.weight, 0 if column else 1))
        layer.bias = torch.nn.Parameter(split(whole.bias, 0) if column else copies(whole.bias))
        own = split(x, 1) if not column else split(x, 0) if sequence else copies(x)
        made = layer(own.requires_grad_())
        made.backward(split(dy, 1) if column else split(dy, 0) if sequence else copies(dy))
    found = (
        together(made, 1 if column else rows), together(own.grad, rows if column else 1),
        together(layer.weight.grad, 0 if column else 1), together(layer.bias.grad, 0 if column else None),
    )  # fmt: skip
    return found, (y.detach(), x.grad, whole.weight.grad, whole.bias.grad)


def near(found, right):
    return (found - right).norm() <= 1e-5 * right.norm()


quarters = st.integers(1, 12).map(lambda n: RANKS * n)
sizes = {"sequence": st.booleans(), "m": quarters, "seed": st.integers(0, 9)}


@settings(max_examples=30)
@given(recipe=st.sampled_from(["bf16", "fp8-rowwise", "mxfp8"]), k=st.integers(1, 70), n=quarters, **sizes)
def test_a_column_layer_of_any_sizes_has_the_bits_of_one_process(recipe, sequence, m, k, n, seed):
    (y, dx, dw, db), right = trained(recipe, "column", sequence, m, k, n, seed)
    assert torch.equal(y, right[0]) and torch.equal(dw, right[2]) and torch.equal(db, right[3])
    if recipe != "mxfp8" or n % (32 * RANKS) == 0:  # else blocks of dy, and of w for dx, end where a rank's features do
        assert near(dx, right[1])


@settings(max_examples=15)
@given(k=st.integers(1, 70), n=quarters, **sizes)
def test_ranks_agree_on_the_scale_of_x(sequence, m, k, n, seed):
    found, right = trained("fp8-current", "column", sequence, m, k, n, seed)
    assert torch.equal(found[0], right[0])


@settings(max_examples=25)
@given(k=quarters, n=st.integers(1, 40), **sizes)
def test_a_row_layer_of_any_sizes_sums_the_products_of_one_process(sequence, m, k, n, seed):
    (y, dx, dw, db), right = trained("fp8-current", "row", sequence, m, k, n, seed)
    assert torch.equal(dx, right[1]) and torch.equal(dw, right[2])
    assert near(y, right[0]) and near(db, right[3])


SPECS = (quant.Rowwise(), quant.Block1D(), quant.Block1D(scale="fp32"), quant.MX(), quant.NVFP4(rht=True))


@settings(max_examples=30)
@given(spec=st.sampled_from(SPECS), blocks=st.integers(0, 2), k=st.integers(1, 150), seed=st.integers(0, 9))
def test_gathered_codes_are_those_of_all_rows(spec, blocks, k, seed):
    """By row, and by column where the rows of a rank fill blocks."""
    m = RANKS * blocks * (spec.block[1] or 5)
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(seed))
    amax = {"amax": spec.amax(x)} if spec.two_level else {}
    columns_amax = {"amax": spec.amax(x, 0)} if spec.two_pass else {}
    row, column = spec.quantize(x, **amax), spec.quantize(x, 0, **columns_amax)
    own = [spec.quantize(part, **amax) for part in x.chunk(RANKS)] if m else [row] * RANKS
    own_columns = [spec.quantize(part, 0, **columns_amax) for part in x.chunk(RANKS)] if m else [column] * RANKS

    def of_ranks(tensors):
        return local.LocalTensor(dict(enumerate(tensors)))

    with local.LocalTensorMode(RANKS):
        codes = parts(collectives.gather(of_ranks([q.codes.view(torch.uint8) for q in own]), RANKS, "", "test"))
        scales = parts(collectives.gathered_scales(of_ranks([q.scale for q in own]), RANKS, "", "test"))
        given_parts = [of_ranks(tensors) for tensors in zip(*[q.tensors() for q in own_columns], strict=True)]
        turned = gather_columns(tuple(given_parts), spec, RANKS, "", "test")
        found_columns = [parts(t) for t in turned[:2]]
    for rank in range(RANKS):
        assert torch.equal(codes[rank], row.codes.view(torch.uint8))
        assert torch.equal(scales[rank], row.scale) and scales[rank].stride() == row.scale.stride()
        assert torch.equal(found_columns[0][rank].view(torch.uint8), column.codes.view(torch.uint8))
        assert torch.equal(found_columns[1][rank], column.scale)


def test_each_rank_gathers_the_rows_of_all_ranks():
    x = torch.randn(2 * RANKS, 3)
    with local.LocalTensorMode(RANKS):
        found = parts(collectives.gather(split(x, 0), RANKS, "", "test"))
    assert [rank for rank, rows in enumerate(found) if not torch.equal(rows, x)] == []
