"""Rows quantized in groups: every group has the bytes that its rows alone would have, and the tail is nobody's."""

import importlib

import pytest
import torch

from octavo import backend
from octavo.errors import UnsupportedConfig, UnsupportedShape
from octavo.formats import E5M2
from octavo.quant import MX, NVFP4, Block1D, Block2D, Rowwise, TensorProto, Tensorwise
from octavo.quant.grouped import GroupedTensor, quantize_groups
from octavo.quant.groups import Groups, split
from octavo.quant.quantizer import Given
from tests.quant.ragged import SPLITS, layout, many, no_waiting, pieces
from tests.quant.sameness import assert_same

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SPECS = [Block1D(), Block1D(scale="fp32"), Block1D(E5M2), Block1D(E5M2, "fp32"), Block1D(eps=1e-3)]
UNALIGNED = [[65, 128, 0, 97], [15, 1, 0, 1011]]
FINE = Block1D()
POISONS = [float("nan"), float("inf"), -float("inf"), 1e4]


def wide(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Every row and column at its own magnitude, so that a scale of the wrong place shows."""
    down, across = torch.randint(-6, 6, (rows, 1)), torch.randint(-2, 3, (1, columns))
    return (torch.randn(rows, columns) * torch.exp2(down + across)).to(dtype)


def grouped(
    x: torch.Tensor, sizes: list[int], row=FINE, column=FINE
) -> tuple[GroupedTensor | None, GroupedTensor | None]:
    return quantize_groups(x, row, column, split(torch.tensor(sizes, device=x.device), x.shape[0]))


def used(q: GroupedTensor) -> list[torch.Tensor]:
    """Codes, as bytes, and scales of the blocks in use, on the CPU."""
    rows = 128 * int(q.groups.block[-1])
    codes, scale = q.q.codes.view(torch.uint8), q.q.scale
    if q.side == "column":
        codes, scale = codes.T, scale.T
        return [codes[:rows].cpu(), scale[: rows // 128].cpu()]
    return [codes[:rows].cpu(), scale[: rows // q.q.spec.block[0]].cpu()]


def assert_same_used(a: GroupedTensor, b: GroupedTensor, what: object = "") -> None:
    for name, x, y in zip(("codes", "scales"), used(a), used(b), strict=True):
        x, y = (t.reshape(-1).view(torch.uint8) for t in (x, y))  # as bytes, NaN is equal to itself
        assert torch.equal(x, y), f"{what} {a.side} {name}: {(x != y).sum()} of {y.numel()} bytes differ"


# -- a group by itself -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [1, 33, 129, 256, 300])
@pytest.mark.parametrize("sizes", UNALIGNED, ids=str)
def test_every_group_has_the_bytes_of_its_rows_alone(sizes, columns, dtype):
    x = wide(sum(sizes) + 30, columns, dtype)
    row, column = grouped(x, sizes)
    alone = [Block1D().quantize_both(part) for part in pieces(x, sizes)]
    for (want_row, want_column), found_row, found_column in zip(alone, row.members(), column.members(), strict=True):
        assert_same(found_row, want_row)
        assert_same(found_column, want_column)


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("sizes", SPLITS, ids=str)
def test_every_setting_and_split(sizes, spec):
    x = wide(sum(sizes) + 5, 150, torch.bfloat16)
    row, column = grouped(x, sizes, spec, spec)
    assert (row.side, column.side) == ("row", "column")
    for part, found_row, found_column in zip(pieces(x, sizes), row.members(), column.members(), strict=True):
        want_row, want_column = spec.quantize_both(part)
        assert_same(found_row, want_row)
        assert_same(found_column, want_column)


@pytest.mark.parametrize("sizes", UNALIGNED, ids=str)
def test_codes_and_scales_lie_in_the_blocks_of_their_group(sizes):
    """What the kernels read, without `members`."""
    x = wide(sum(sizes) + 30, 300, torch.bfloat16)
    row, column = grouped(x, sizes)
    _, block, *_ = layout(sizes, x.shape[0])
    padded = row.groups.padded
    assert (row.q.codes.shape, row.q.scale.shape) == ((padded, 300), (padded, 3))
    assert (column.q.codes.shape, column.q.scale.shape) == ((300, padded), (300, padded // 128))
    assert row.q.scale.stride() == (1, padded)
    assert column.q.scale.T.is_contiguous()
    for g, part in enumerate(pieces(x, sizes)):
        want_row, want_column = Block1D().quantize_both(part)
        first, last = 128 * block[g], 128 * block[g] + sizes[g]
        assert torch.equal(row.q.codes[first:last].view(torch.uint8), want_row.codes.view(torch.uint8))
        assert torch.equal(row.q.scale[first:last], want_row.scale)
        assert torch.equal(column.q.codes[:, first:last].view(torch.uint8), want_column.codes.view(torch.uint8))
        assert torch.equal(column.q.scale[:, block[g] : block[g + 1]], want_column.scale)
        assert not row.q.codes[last : 128 * block[g + 1]].view(torch.uint8).any()
        assert not column.q.codes[:, last : 128 * block[g + 1]].view(torch.uint8).any()


def test_square_blocks_start_anew_with_every_group():
    sizes = [65, 128, 0, 97]
    x = wide(300, 200, torch.bfloat16)
    row, column = grouped(x, sizes, Block2D(), Block2D())
    _, block, *_ = layout(sizes, 300)
    for g, part in enumerate(pieces(x, sizes)):
        want_row, want_column = Block2D().quantize_both(part)
        first, last = 128 * block[g], 128 * block[g] + sizes[g]
        assert torch.equal(row.q.codes[first:last].view(torch.uint8), want_row.codes.view(torch.uint8))
        assert torch.equal(row.q.scale[block[g] : block[g + 1]], want_row.scale)
        assert_same(column.members()[g], want_column)


def test_square_blocks_have_members_too():
    row, _ = grouped(wide(300, 200, torch.bfloat16), [65, 128, 0, 97], Block2D(), None)
    for part, found in zip(pieces(wide(300, 200, torch.bfloat16), [65, 128, 0, 97]), row.members(), strict=True):
        assert found.shape == part.shape


def test_many_groups():
    for count in (1, 64, 65, 256):
        sizes = many(count)
        x = wide(sum(sizes) + 3, 40, torch.bfloat16)
        row, column = grouped(x, sizes)
        for part, found_row, found_column in zip(pieces(x, sizes), row.members(), column.members(), strict=True):
            want_row, want_column = Block1D().quantize_both(part)
            assert_same(found_row, want_row)
            assert_same(found_column, want_column)


def test_one_orientation_alone_and_two_of_different_settings():
    sizes, x = [65, 128, 0, 97], wide(300, 150, torch.bfloat16)
    row, column = grouped(x, sizes)
    alone, nothing = grouped(x, sizes, column=None)
    assert nothing is None
    assert_same_used(alone, row)
    nothing, alone = grouped(x, sizes, row=None)
    assert nothing is None
    assert_same_used(alone, column)
    fine = grouped(x, sizes, Block1D(E5M2), Block1D(scale="fp32"))
    assert_same_used(fine[0], grouped(x, sizes, Block1D(E5M2), None)[0])
    assert_same_used(fine[1], grouped(x, sizes, None, Block1D(scale="fp32"))[1])


def test_a_group_with_large_values_leaves_its_neighbours_alone():
    sizes, x = [65, 128, 0, 97], wide(300, 150, torch.bfloat16)
    loud = x.clone()
    loud[65 : 65 + 128] = 3e38
    loud[65] = float("nan")
    for found, want in zip(grouped(loud, sizes), grouped(x, sizes), strict=True):
        for g in (0, 2, 3):
            assert_same(found.members()[g], want.members()[g])


# -- the tail ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", POISONS, ids=str)
@pytest.mark.parametrize("sizes", [[65, 128, 0, 97], [0, 0, 0], [256, 128, 0]], ids=str)
def test_the_tail_is_never_read(sizes, poison):
    """As many rows again as there are groups for: no amax sees them."""
    total = sum(sizes)
    x = wide(2 * total + 10, 150, torch.bfloat16)
    x[total:] = 0
    poisoned = x.clone()
    poisoned[total:] = poison
    for found, want in zip(grouped(poisoned, sizes), grouped(x, sizes), strict=True):
        assert_same_used(found, want)
        values = found.dequantize()
        assert values.shape == x.shape
        assert torch.equal(values, want.dequantize())
        assert values.isfinite().all()
        assert not values[total:].any()


def test_what_lies_past_the_last_group_does_not_matter():
    """Codes and scales there are undefined: NaN is as good as any."""
    sizes, x = [65, 128, 0, 97], wide(300, 150, torch.bfloat16)
    for found in grouped(x, sizes):
        want, rows = found.dequantize(), 128 * int(found.groups.block[-1])
        codes, scale = found.q.codes.view(torch.uint8), found.q.scale
        if found.side == "row":
            codes[rows:], scale[rows:] = 0x7F, float("nan")
        else:
            codes[:, rows:], scale[:, rows // 128 :] = 0x7F, float("nan")
        assert torch.equal(found.dequantize(), want)


def test_rows_that_do_not_fit_are_cut_off():
    x = wide(200, 150, torch.bfloat16)
    for found, want in zip(grouped(x, [150, 100, 7]), grouped(x, [150, 50, 0]), strict=True):
        assert_same_used(found, want)


# -- a GroupedTensor ---------------------------------------------------------------------------------------------------


def test_members_alias_the_storage():
    sizes = [65, 128, 0, 97]
    for found in grouped(wide(300, 150, torch.bfloat16), sizes):
        for member, size in zip(found.members(), sizes, strict=True):
            assert member.shape == ((size, 150) if found.side == "row" else (150, size))
            for own, whole in zip(member.tensors(), found.q.tensors(), strict=True):
                assert own.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        found.members()[3].codes.view(torch.uint8).fill_(0)
        values = found.dequantize()
        assert not values[65 + 128 :].any()
        assert values[: 65 + 128].any()


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dequantize_is_that_of_each_group(spec, dtype):
    sizes, x = [65, 128, 0, 97], wide(300, 150, dtype)
    row, column = grouped(x, sizes, spec, spec)
    parts = [spec.quantize_both(part) for part in pieces(x, sizes)]
    tail = torch.zeros(10, 150, dtype=dtype)
    assert torch.equal(row.dequantize(), torch.cat([a.dequantize() for a, _ in parts] + [tail]))
    assert torch.equal(column.dequantize(), torch.cat([b.dequantize().T for _, b in parts] + [tail]))
    for found in (row, column):
        assert found.dequantize(torch.float32).dtype == torch.float32
        error = (found.dequantize(torch.float32)[:290] - x[:290].float()).norm() / x[:290].float().norm()
        assert error < (0.06 if spec.fmt == E5M2 else 0.03)


def test_dequantized_values_come_back_the_same():
    sizes, x = [65, 128, 0, 97], wide(300, 150, torch.bfloat16)
    for side in (0, 1):
        values = grouped(x, sizes)[side].dequantize()
        assert torch.equal(grouped(values, sizes)[side].dequantize(), values)


@pytest.mark.parametrize(("rows", "columns"), [(0, 5), (0, 0), (7, 0)])
def test_nothing_at_all(rows, columns):
    for sizes in ([0], [0, 0, 0]):
        for found in grouped(torch.empty(rows, columns), sizes):
            assert found.dequantize().shape == (rows, columns)
            assert [m.shape for m in found.members()] == [(0, columns) if found.side == "row" else (columns, 0)] * len(
                sizes
            )


# -- what x may be -----------------------------------------------------------------------------------------------------


def test_leading_dims_are_rows_and_strides_do_not_matter():
    sizes, x = [65, 128, 0, 97], wide(300, 150, torch.bfloat16)
    want = grouped(x, sizes)
    groups = want[0].groups
    for other in (x.view(3, 100, 150), x.T.contiguous().T, wide(300, 300, torch.bfloat16)[:, ::2].copy_(x)):
        for found, same in zip(quantize_groups(other, Block1D(), Block1D(), groups), want, strict=True):
            assert_same_used(found, same)
    row = x[:1].expand(300, 150)
    assert_same_used(grouped(row, sizes)[0], grouped(row.contiguous(), sizes)[0])


def test_no_gradient_flows():
    row, column = grouped(torch.randn(20, 16, requires_grad=True), [3, 9])
    assert not row.dequantize().requires_grad
    assert not column.dequantize().requires_grad


def test_a_skip_flag_leaves_everything():
    sizes, x = [65, 128, 0, 97], wide(300, 150, torch.bfloat16)
    want = grouped(x, sizes)
    pair, before = tuple(q.q for q in want), [t.clone() for q in want for t in used(q)]
    given = Given(groups=want[0].groups, skip=torch.ones(1))
    Block1D().fill(3 * x, pair, given)
    assert all(torch.equal(a, b) for a, b in zip(before, [t for q in want for t in used(q)], strict=True))
    Block1D().fill(3 * x, pair, given._replace(skip=torch.zeros(1)))
    for found, fresh in zip(want, grouped(3 * x, sizes), strict=True):
        assert_same_used(found, fresh)


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [299, 301, 0])
def test_groups_of_another_number_of_rows_are_refused(rows):
    groups = split(torch.tensor([65, 128, 0, 97]), 300)
    with pytest.raises(UnsupportedShape) as refused:
        quantize_groups(torch.zeros(rows, 16), Block1D(), None, groups)
    assert str(refused.value) == f"These groups are of 300 rows, tail included, and x has {rows}."


@pytest.mark.parametrize("spec", [Tensorwise(), Rowwise(), MX(), NVFP4(), Rowwise(pow2=False)], ids=str)
def test_a_scheme_that_knows_no_groups_is_refused(spec):
    groups = split(torch.tensor([3, 5]), 10)
    for row, column in ((spec, None), (None, spec), (Block1D(), spec)):
        with pytest.raises(UnsupportedConfig) as refused:
            quantize_groups(torch.zeros(10, 16), row, column, groups)
        assert str(refused.value) == (f"{spec} cannot quantize rows in groups in this version. Use fp8-block or bf16.")


def test_only_blocks_say_that_they_take_groups():
    taking = [s for s in (Tensorwise(), Rowwise(), MX(), NVFP4(), Block1D(), Block2D()) if s.takes_groups]
    assert taking == [Block1D(), Block2D()]


# -- on the device -----------------------------------------------------------------------------------------------------


def cast(twin: str, spec, x: torch.Tensor, groups: Groups, sides: str = "rc", **settings) -> list[GroupedTensor]:
    """By that twin, into outputs full of NaN."""
    like = TensorProto((groups.padded, x.shape[1]), x.dtype, x.device)
    pair = spec.proto(like).empty() if "r" in sides else None, spec.proto(like, 0).empty() if "c" in sides else None
    for q in pair:
        if q is not None:
            q.codes.view(torch.uint8).fill_(0x7F)
            q.scale.fill_(float("nan"))
    module = importlib.import_module(f"{spec.package}.{twin}")
    module.cast(x, *pair, Given(groups=groups), **settings)
    return [GroupedTensor(q, groups, side) for q, side in zip(pair, ("row", "column"), strict=True) if q is not None]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spec", [Block1D(), Block1D(E5M2, "fp32"), Block2D()], ids=str)
def test_every_configuration_writes_the_reference_bytes(spec, dtype):
    """On the blocks in use; the tail is NaN."""
    configs = importlib.import_module(f"{spec.package}.triton").CONFIGS
    for columns in (33, 256, 300):
        for sizes in SPLITS:
            x = wide(sum(sizes) + 75, columns, dtype)
            x[sum(sizes) :] = float("nan")
            groups = split(torch.tensor(sizes), x.shape[0])
            want = cast("reference", spec, x, groups)
            on_gpu = split(torch.tensor(sizes, device="cuda"), x.shape[0])
            found = {"torch on cuda": cast("reference", spec, x.cuda(), on_gpu)}
            found |= {str(config): cast("triton", spec, x.cuda(), on_gpu, config=config) for config in configs}
            for name, pair in found.items():
                for got, same in zip(pair, want, strict=True):
                    assert_same_used(got, same, (name, sizes, columns))


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 3, 65, 256])
@pytest.mark.parametrize("sides", ["r", "c", "rc"])
def test_any_number_of_groups_and_either_orientation(count, sides):
    sizes = many(count)
    x = wide(sum(sizes) + 100, 272, torch.bfloat16)
    x[sum(sizes) :] = float("inf")
    want = cast("reference", Block1D(), x, split(torch.tensor(sizes), x.shape[0]), sides)
    got = cast("triton", Block1D(), x.cuda(), split(torch.tensor(sizes, device="cuda"), x.shape[0]), sides)
    for g, w in zip(got, want, strict=True):
        assert_same_used(g, w, count)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_public_entry_matches_the_cpu(dtype):
    for sizes, rows in (([65, 128, 0, 97], 400), ([300, 300], 450), ([-3, 100], 128), ([0], 0), ([0, 0], 9)):
        x = wide(rows, 150, dtype)
        want, got = grouped(x, sizes), grouped(x.cuda(), sizes)
        with backend.use("reference"):
            torch_on_cuda = grouped(x.cuda(), sizes)
        for g, t, w in zip(got, torch_on_cuda, want, strict=True):
            assert_same_used(g, w, sizes)
            assert_same_used(t, w, sizes)
            assert torch.equal(g.dequantize().cpu(), w.dequantize())


@pytest.mark.gpu
def test_strided_and_expanded_rows_on_the_device():
    sizes, base = [65, 128, 0, 97], wide(300, 300, torch.bfloat16)
    for view in (base.T, base[:, ::2], base[:1].expand(300, 300), base[:, :1].expand(300, 70)):
        moved = base.cuda().as_strided(view.shape, view.stride(), view.storage_offset())
        for g, w in zip(grouped(moved, sizes), grouped(view, sizes), strict=True):
            assert_same_used(g, w, view.stride())


@pytest.mark.gpu
def test_a_skip_flag_on_the_device_leaves_everything():
    sizes, x = [65, 128, 0, 97], wide(300, 150, torch.bfloat16).cuda()
    want = grouped(x, sizes)
    pair, before = tuple(q.q for q in want), [t for q in want for t in used(q)]
    given = Given(groups=want[0].groups, skip=torch.ones(1, device="cuda"))
    Block1D().fill(3 * x, pair, given)
    assert all(torch.equal(a, b) for a, b in zip(before, [t for q in want for t in used(q)], strict=True))
    Block1D().fill(3 * x, pair, given._replace(skip=torch.zeros(1, device="cuda")))
    for found, fresh in zip(want, grouped(3 * x, sizes), strict=True):
        assert_same_used(found, fresh)


@pytest.mark.gpu
def test_nothing_waits_for_the_device():
    x, splits = wide(300, 150, torch.bfloat16).cuda(), torch.tensor([65, 128, 0, 97], device="cuda")

    def work() -> list[torch.Tensor]:
        pair = quantize_groups(x, Block1D(), Block1D(), split(splits, 300))
        return [q.dequantize() for q in pair]

    for twin in ("triton", "reference"):
        with backend.use(twin):
            want = work()  # compiles
            with no_waiting():
                found = work()
            assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


@pytest.mark.gpu
def test_replays_follow_the_sizes():
    x, splits = wide(1100, 272, torch.bfloat16).cuda(), torch.tensor([300, 0, 212, 400], device="cuda")

    def work() -> tuple[GroupedTensor | None, GroupedTensor | None]:
        return quantize_groups(x, Block1D(), Block1D(), split(splits, 1100))

    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pair = work()
    for sizes in ([400, 212, 0, 300], [300, 0, 0, 400], [0, 1100, 0, 0], [0, 0, 0, 0], [3, 0, 1, 9], [500, 1, 99, 500]):
        splits.copy_(torch.tensor(sizes))
        x.copy_(wide(1100, 272, torch.bfloat16))
        x[sum(sizes) :] = float("nan")
        for q in pair:  # what an earlier replay left is no excuse
            q.q.codes.view(torch.uint8).fill_(0x7F)
            q.q.scale.fill_(float("nan"))
        graph.replay()
        for found, want in zip(pair, grouped(x.cpu(), sizes), strict=True):
            assert_same_used(found, want, sizes)


@pytest.mark.gpu
def test_same_bits_a_hundred_times():
    x, sizes = wide(1100, 272, torch.bfloat16).cuda(), [15, 1, 0, 1011]
    first = grouped(x, sizes)
    for _ in range(100):
        for found, want in zip(grouped(x, sizes), first, strict=True):
            assert_same_used(found, want)


@pytest.mark.gpu
def test_offsets_beyond_two_to_the_31():
    """The last group of more than 2^31 elements, against its rows alone."""
    rows, columns = 300_011, 7168
    x = torch.zeros(rows, columns, device="cuda", dtype=torch.bfloat16)
    x[-200:] = torch.randn(200, columns, device="cuda", dtype=torch.bfloat16)
    row, column = grouped(x, [rows - 150, 0, 150])
    want_row, want_column = Block1D().quantize_both(x[-150:])
    for member, want in ((row.members()[2], want_row), (column.members()[2], want_column)):
        assert torch.equal(member.codes.view(torch.uint8), want.codes.view(torch.uint8))
        assert torch.equal(member.scale, want.scale)
