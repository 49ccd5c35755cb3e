"""Where ragged groups lie: against a count of one block at a time, for whatever sizes the device may hold."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo import backend
from octavo.errors import UnsupportedDevice, UnsupportedDtype, UnsupportedShape
from octavo.quant.groups import MAX_GROUPS, Groups, abstract, blocks_for, split
from octavo.quant.groups.reference import in_blocks, pack
from tests.support.ragged_groups import SPLITS, laid_out, layout, many
from tests.support.waiting import no_waiting

INTEGERS = [torch.int32, torch.int64]
SIZE = st.one_of(st.sampled_from([0, 0, 1, 127, 128, 129, 256]), st.integers(0, 700), st.integers(-300, -1))
SIZES = st.lists(SIZE, min_size=1, max_size=40)


def assert_lies(groups: Groups, sizes: list[int], rows: int) -> None:
    start, block, *blocks = layout(sizes, rows)
    assert groups.start.tolist() == start
    assert groups.block.tolist() == block
    assert (groups.number, groups.rows) == (len(sizes), rows)
    unused = groups.owner.shape[0] - len(blocks[0])
    assert unused >= 0, "more blocks in use than there are"
    for found, used, past in zip((groups.owner, groups.source, groups.live), blocks, (-1, 0, 0), strict=True):
        assert found.tolist() == used + [past] * unused
    assert all(t.dtype == torch.int32 and t.is_contiguous() for t in groups.tensors())


# -- the layout ------------------------------------------------------------------------------------------------------


@settings(max_examples=300)
@given(sizes=SIZES, spare=st.one_of(st.just(0), st.integers(-900, 900)), dtype=st.sampled_from(INTEGERS))
def test_any_sizes_in_any_number_of_rows(sizes, spare, dtype):
    """Sums below, equal to and above the rows."""
    rows = max(sum(max(n, 0) for n in sizes) + spare, 0)
    splits = torch.tensor(sizes, dtype=dtype)
    groups = laid_out(splits, rows)
    assert_lies(groups, sizes, rows)
    if min(sizes) < 0 or sum(sizes) > rows:
        with pytest.raises(UnsupportedShape, match=f"at most the {rows} rows, got"):
            split(splits, rows)
    else:
        assert all(torch.equal(a, b) for a, b in zip(split(splits, rows).tensors(), groups.tensors(), strict=True))
    assert groups.sizes() == [b - a for a, b in pairwise(layout(sizes, rows)[0])]
    assert groups.padded == 128 * blocks_for(rows, len(sizes))


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("sizes", SPLITS, ids=str)
@pytest.mark.parametrize("spare", [0, 1, 200])
def test_the_splits_that_other_tests_use(sizes, spare, dtype):
    rows = sum(sizes) + spare
    assert_lies(split(torch.tensor(sizes, dtype=dtype), rows), sizes, rows)


@pytest.mark.parametrize(
    ("sizes", "rows", "kept"),
    [
        ([100, 100, 100], 250, [100, 100, 50]),
        ([100, 100, 100], 200, [100, 100, 0]),
        ([100, 100, 100], 30, [30, 0, 0]),
        ([100, 100, 100], 0, [0, 0, 0]),
        ([2**31 - 1, 2**31 - 1], 300, [300, 0]),
        ([-5, 200, -(2**31), 7], 300, [0, 200, 0, 7]),
        ([-5, -7], 10, [0, 0]),
    ],
    ids=str,
)
def test_what_does_not_fit_is_cut_off_and_negative_sizes_are_empty(sizes, rows, kept):
    for dtype in INTEGERS:
        groups = laid_out(torch.tensor(sizes, dtype=dtype), rows)
        assert groups.sizes() == kept
        assert_lies(groups, sizes, rows)


@pytest.mark.parametrize("sizes", [[2**62, 2**62, 5], [5, 2**62, 2**62], [2**63 - 1, 1]], ids=str)
def test_a_sum_beyond_64_bits_is_cut_off_too(sizes):
    groups = laid_out(torch.tensor(sizes), 1000)
    assert (groups.source + groups.live <= 1000).all()
    assert_lies(groups, sizes, 1000)


@pytest.mark.parametrize("count", [1, 2, 3, 40, MAX_GROUPS])
def test_no_rows_and_all_zero(count):
    for rows in (0, 1, 500):
        groups = split(torch.zeros(count, dtype=torch.int32), rows)
        assert_lies(groups, [0] * count, rows)
        assert groups.sizes() == [0] * count


def test_many_groups():
    for count in (64, 65, 128, 256, 1000):
        sizes = many(count)
        assert_lies(split(torch.tensor(sizes), sum(sizes) + 77), sizes, sum(sizes) + 77)


def test_a_strided_vector_is_read_as_it_stands():
    sizes = torch.tensor([[3, -1], [200, -1], [0, -1], [5, -1]])[:, 0]
    assert_lies(split(sizes, 300), [3, 200, 0, 5], 300)
    assert_lies(split(torch.tensor([9]).expand(4), 300), [9] * 4, 300)


# -- how many blocks there are ---------------------------------------------------------------------------------------


@given(sizes=st.lists(st.integers(0, 700), min_size=1, max_size=40))
def test_no_split_needs_more_blocks_than_there_are(sizes):
    assert len(layout(sizes, sum(sizes))[2]) <= blocks_for(sum(sizes), len(sizes))


@given(count=st.integers(1, 40), more=st.integers(0, 2000))
def test_some_split_needs_every_block_that_is_allocated(count, more):
    """One row in every group but the last: each has a block nearly to itself."""
    sizes = [1] * (count - 1) + [1 + more]
    assert len(layout(sizes, sum(sizes))[2]) == blocks_for(sum(sizes), count)


def test_some_split_needs_every_block_with_fewer_rows_than_groups():
    assert blocks_for(0, 40) == 0
    assert blocks_for(3, 40) == 3


def test_abstract_is_what_split_returns():
    for count, rows in ((1, 0), (3, 300), (40, 1000)):
        groups = split(torch.zeros(count, dtype=torch.int64), rows)
        for proto, made in zip(abstract(rows, count, torch.device("cpu")), groups.tensors(), strict=True):
            assert proto.unsupported_reason(made) == ""


# -- into blocks and back --------------------------------------------------------------------------------------------


@given(sizes=SIZES, spare=st.integers(0, 300))
def test_rows_go_into_blocks_and_come_back(sizes, spare):
    rows = sum(max(n, 0) for n in sizes) + spare
    groups = laid_out(torch.tensor(sizes), rows)
    start, _, owner, source, live = layout(sizes, rows)
    x = torch.arange(1.0, rows + 1)[:, None].expand(rows, 2).clone()
    x[start[-1] :] = float("nan")
    inside = in_blocks(x, groups)
    assert inside.shape == (groups.padded, 2)
    for b in range(len(owner)):
        assert torch.equal(inside[128 * b : 128 * b + live[b]], x[source[b] : source[b] + live[b]])
        assert not inside[128 * b + live[b] : 128 * (b + 1)].any()
    back = pack(inside, groups)
    assert torch.equal(back[: start[-1]], x[: start[-1]])
    assert back.shape == x.shape
    assert not back[start[-1] :].any()


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint8, torch.float32, torch.bool], ids=str)
def test_sizes_of_another_dtype_are_refused(dtype):
    with pytest.raises(
        UnsupportedDtype, match=rf"Group sizes must be int32 or int64, got {dtype}\. Use \.to\(torch\.int32\)\."
    ):
        split(torch.ones(3).to(dtype), 10)


@pytest.mark.parametrize("shape", [(0,), (), (2, 2), (3, 1), (MAX_GROUPS + 1,)], ids=str)
def test_sizes_that_are_no_vector_are_refused(shape):
    with pytest.raises(UnsupportedShape) as refused:
        split(torch.ones(shape, dtype=torch.int32), 10)
    if len(shape) == 1:
        assert str(refused.value) == f"There are 1 to 4096 groups, got {shape[0]}. Give one size for each group."
    else:
        assert str(refused.value) == (
            f"Group sizes must be a vector of 1 to 4096 elements, got {shape}. Give one size for each group."
        )


def test_sizes_without_values_are_refused():
    with pytest.raises(
        UnsupportedDevice, match=r"Group sizes on the meta device have no values\. Put them and x on a CPU or a GPU\."
    ):
        split(torch.ones(3, dtype=torch.int32, device="meta"), 10)


def test_more_rows_than_32_bits_count_are_refused():
    for rows in (2**31, 2**31 - 128 * (MAX_GROUPS + 1)):
        with pytest.raises(UnsupportedShape, match=rf"counted in 32 bits, got {rows}\. Run them in pieces\."):
            split(torch.ones(3, dtype=torch.int32), rows)


# -- on the device ---------------------------------------------------------------------------------------------------

CASES = [
    *[(sizes, sum(sizes) + spare) for sizes in SPLITS for spare in (0, 200)],
    *[(many(count), sum(many(count)) + 50) for count in (1, 2, 3, 8, 64, 65, 128, 256, 1000, MAX_GROUPS)],
    *[([0] * count, rows) for count in (1, 3, 256) for rows in (0, 1, 500)],
    ([100, 100, 100], 250), ([100, 100, 100], 30), ([100, 100, 100], 0), ([2**31 - 1] * 5, 300),
    ([-5, 200, -(2**31), 7], 300), ([10027 // 16] * 16, 10027), ([131072] * 64, 64 * 131072), ([1] * 256, 256),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize(("sizes", "rows"), CASES, ids=lambda case: f"{len(case)} groups" if type(case) is list else "")
def test_the_kernel_finds_the_same_layout(sizes, rows, dtype):
    splits = torch.tensor(sizes, dtype=dtype, device="cuda")
    assert_lies(split(splits, rows), sizes, rows)
    with backend.use("reference"):
        assert_lies(split(splits, rows), sizes, rows)


@pytest.mark.gpu
def test_the_kernel_reads_a_strided_vector_as_it_stands():
    sizes = torch.tensor([[3, -1], [200, -1], [0, -1], [5, -1]], device="cuda")[:, 0]
    assert_lies(split(sizes, 300), [3, 200, 0, 5], 300)
    offset = torch.tensor([7, 3, 200, 0, 5], dtype=torch.int32, device="cuda")[1:]  # no 16-byte alignment
    assert_lies(split(offset, 300), [3, 200, 0, 5], 300)


@pytest.mark.gpu
@pytest.mark.gpu_smoke
def test_neither_twin_waits_for_the_device():
    splits = torch.tensor([65, 128, 0, 97], device="cuda")
    for twin in ("triton", "reference"):
        with backend.use(twin):
            split(splits, 300)  # compiles
            with no_waiting():
                groups = split(splits, 300)
            assert_lies(groups, [65, 128, 0, 97], 300)


@pytest.mark.gpu
def test_a_sum_beyond_64_bits_is_cut_off_by_the_kernel_too():
    for sizes in ([2**62, 2**62, 5], [5, 2**62, 2**62], [2**63 - 1, 1]):
        assert_lies(split(torch.tensor(sizes, device="cuda"), 1000), sizes, 1000)
