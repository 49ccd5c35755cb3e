"""Rows quantized in groups: every group has the bytes that its rows alone would have, and the tail is nobody's."""

import copy
import importlib
import pickle
from itertools import cycle
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils import _pytree

import octavo
from octavo import backend
from octavo.errors import UnsupportedConfig, UnsupportedDtype, UnsupportedShape
from octavo.formats import E5M2
from octavo.quant import MX, NVFP4, Block1D, Block2D, Rowwise, Tensorwise
from octavo.quant.casts import fill_pair, quantize_pair
from octavo.quant.grouped import (
    GroupedTensor,
    fill_groups,
    grouped_assemble,
    grouped_proto,
    groups_amax,
    member,
    quantize_groups,
    restore,
)
from octavo.quant.groups import Groups, equal, split
from octavo.quant.quantizer import CastArgs
from tests.support.pairs import some, turns
from tests.support.ragged_groups import SPLITS, both, laid_out, layout, many, pieces
from tests.support.same_tensors import assert_same, assert_same_used, poison, raw, used
from tests.support.waiting import no_waiting

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SPECS = [Block1D(), Block1D(scale="fp32"), Block1D(E5M2), Block1D(E5M2, "fp32"), Block1D(eps=1e-3)]
UNALIGNED = [[65, 128, 0, 97], [15, 1, 0, 1011]]
FINE = Block1D()
SCHEMES = [
    Tensorwise(), Tensorwise(E5M2, pow2=True, eps=1e-3), Rowwise(), Rowwise(E5M2, pow2=False), Block1D(), Block2D(),
    MX(), MX(E5M2, "floor"), MX(square=True), NVFP4(), NVFP4(square=True), NVFP4(rht=True), NVFP4(stochastic=True),
    NVFP4(rht=True, stochastic=True),
]  # fmt: skip
SEED = (0x1234_5678_9ABC, 7)
POISONS = [float("nan"), float("inf"), -float("inf"), 1e4]


def wide(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Every row and column at its own magnitude, so that a scale of the wrong place shows."""
    down, across = torch.randint(-6, 6, (rows, 1)), torch.randint(-2, 3, (1, columns))
    return (torch.randn(rows, columns) * torch.exp2(down + across)).to(dtype)


def brought(x: torch.Tensor, *specs: Any) -> CastArgs:
    """What these quantizers cannot do without."""
    return CastArgs(
        seed=torch.tensor(SEED, device=x.device) if any(s is not None and s.is_stochastic for s in specs) else None
    )


def grouped(
    x: torch.Tensor, sizes: list[int], row=FINE, column=FINE
) -> tuple[GroupedTensor | None, GroupedTensor | None]:
    groups = split(torch.tensor(sizes, device=x.device), x.shape[0])
    return quantize_groups(x, row, column, groups, brought(x, row, column))


def assert_alone(pair: tuple[GroupedTensor, GroupedTensor], x: torch.Tensor, sizes: list[int], given: CastArgs) -> None:
    """The rule: every group has the bytes of its rows alone, and what is nobody's in its blocks is zero."""
    specs = [q.q.spec for q in pair]
    for g, part in enumerate(pieces(x, sizes)):
        own = given._replace(
            inverse_scale=None if given.inverse_scale is None else given.inverse_scale[g : g + 1],
            running_amax=None if given.running_amax is None else torch.zeros(1),
        )
        for q, want in zip(pair, quantize_pair(part, *specs, own), strict=True):
            assert_same(q.members()[g], want)
    block = layout(sizes, x.shape[0])[1]
    for q in pair:
        for g, found in enumerate(q.members()):
            after, packed = found.codes.shape[q.orientation == "column"], q.q.spec.fmt.packed
            codes = q.q.codes.view(torch.uint8)
            if q.orientation == "row":
                assert not codes[128 * block[g] + after : 128 * block[g + 1]].any()
            else:
                assert not codes[:, 128 * block[g] // packed + after : 128 * block[g + 1] // packed].any()


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
    assert (row.orientation, column.orientation) == ("row", "column")
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


# -- every scheme ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", SPLITS, ids=str)
@pytest.mark.parametrize("spec", SCHEMES, ids=str)
def test_every_scheme_by_the_rule(spec, sizes):
    x = wide(sum(sizes) + 30, 150, torch.bfloat16)
    x[sum(sizes) :] = float("nan")
    assert_alone(grouped(x, sizes, spec, spec), x, sizes, brought(x, spec))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spec", SCHEMES, ids=str)
def test_every_width_and_dtype(spec, dtype):
    sizes = [17, 0, 130, 3]
    for columns in (1, 16, 33, 129):
        x = wide(160, columns, dtype)
        assert_alone(grouped(x, sizes, spec, spec), x, sizes, brought(x, spec))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38], ids=str)
@pytest.mark.parametrize("spec", SCHEMES, ids=str)
def test_a_value_that_is_no_number_stays_in_its_group(spec, value):
    """In a block that is not full, too: what is nobody's is zero beside it."""
    sizes, x = [65, 100, 0, 97], wide(300, 40, torch.float32)
    x[65 + 99, 7] = value
    assert_alone(grouped(x, sizes, spec, spec), x, sizes, brought(x, spec))


@settings(max_examples=40)
@example(spec=NVFP4(rht=True, stochastic=True), sizes=[0, 1, 129, 0], columns=17, tail=0)
@given(
    spec=st.sampled_from(SCHEMES),
    sizes=st.lists(st.one_of(st.just(0), st.integers(1, 40), st.integers(100, 300)), min_size=1, max_size=6),
    columns=st.integers(1, 70),
    tail=st.integers(0, 40),
)
def test_any_split_by_the_rule(spec, sizes, columns, tail):
    x = wide(sum(sizes) + tail, columns, torch.bfloat16)
    x[sum(sizes) :] = float("nan")
    assert_alone(grouped(x, sizes, spec, spec), x, sizes, brought(x, spec))


@pytest.mark.parametrize("spec", SCHEMES, ids=str)
@pytest.mark.parametrize("axis", [-1, 0])
def test_the_method_of_a_quantizer(spec, axis):
    """One orientation, of sizes as they are; leading dims are rows."""
    x, sizes = wide(300, 150, torch.bfloat16), torch.tensor([65, 128, 0, 97])
    want = grouped(x, sizes.tolist(), *((None, spec) if axis == 0 else (spec, None)))[axis == 0]
    for rows in (x, x.view(3, 100, 150)):
        found = spec.quantize_groups(rows, sizes, axis, seed=brought(x, spec).seed)
        assert type(found) is octavo.GroupedTensor
        assert_same_used(found, want)
        assert torch.equal(found.dequantize()[290:], torch.zeros(10, 150))


def test_the_method_refuses_sizes_that_are_no_tensor():
    with pytest.raises(UnsupportedDtype, match="Group sizes must be a tensor, got list"):
        FINE.quantize_groups(torch.ones(4, 4), [4])


def test_the_method_refuses_a_seed_that_it_would_ignore():
    with pytest.raises(UnsupportedConfig, match="rounds to nearest"):
        FINE.quantize_groups(torch.ones(4, 4), torch.tensor([4]), seed=torch.tensor(SEED))


def test_two_schemes_at_once():
    sizes, x = [65, 128, 0, 97], wide(300, 150, torch.bfloat16)
    for row, column in (
        (Rowwise(), Block1D()),
        (MX(), NVFP4()),
        (NVFP4(stochastic=True), NVFP4(rht=True, stochastic=True)),
        (Tensorwise(), Tensorwise(E5M2)),
    ):
        assert_alone(grouped(x, sizes, row, column), x, sizes, brought(x, row, column))


def test_seeds_decide_how_groups_are_rounded():
    sizes, x, spec = [65, 128, 0, 97], wide(300, 150, torch.bfloat16), NVFP4(stochastic=True)
    groups = split(torch.tensor(sizes), 300)
    first, same, other = (
        quantize_groups(x, spec, spec, groups, CastArgs(seed=torch.tensor(seed))) for seed in ((1, 2), (1, 2), (1, 3))
    )
    for a, b, c in zip(first, same, other, strict=True):
        assert_same_used(a, b)
        assert not torch.equal(used(a)[0], used(c)[0])


def test_equal_groups_round_alike():
    """The counter is a group's own: the same rows have the same codes wherever their group lies."""
    part, spec = wide(37, 150, torch.bfloat16), NVFP4(rht=True, stochastic=True)
    for q in grouped(part.repeat(3, 1), [37, 37, 37], spec, spec):
        for other in q.members()[1:]:
            assert_same(other, q.members()[0])


@pytest.mark.parametrize("sizes", SPLITS, ids=str)
def test_given_multipliers_and_observed_amaxes(sizes):
    x = wide(sum(sizes) + 30, 150, torch.bfloat16)
    x[sum(sizes) :] = float("nan")
    before = torch.arange(len(sizes)) * 2.0
    given = CastArgs(inverse_scale=torch.rand(len(sizes)) + 0.1, running_amax=before.clone())
    pair = quantize_groups(x, Tensorwise(), Tensorwise(), split(torch.tensor(sizes), x.shape[0]), given)
    assert_alone(pair, x, sizes, given)
    largest = [float(part.abs().max()) if part.numel() else 0.0 for part in pieces(x, sizes)]
    assert torch.equal(given.running_amax, torch.maximum(before, torch.tensor(largest)))
    for q in pair:
        assert torch.equal(q.q.scale.view(-1), torch.ones(len(sizes)) / given.inverse_scale)


@pytest.mark.parametrize("spec", [s for s in SCHEMES if s.two_pass], ids=str)
@pytest.mark.parametrize("sizes", [[65, 128, 0, 97], [0, 0]], ids=str)
def test_the_amax_of_every_group(sizes, spec):
    x = wide(sum(sizes) + 9, 150, torch.bfloat16)
    x[sum(sizes) :] = float("nan")
    groups = split(torch.tensor(sizes), x.shape[0])
    row, column = groups_amax(x, spec, spec, groups)
    parts = [spec.amax_both(part) for part in pieces(x, sizes)]
    if isinstance(spec, Rowwise):
        assert (row.shape, column.shape) == ((groups.padded,), (len(sizes), 150))
        for (a, b), first, found in zip(parts, groups.block.tolist(), column, strict=False):
            assert torch.equal(row[128 * first :][: a.numel()], a.view(-1))
            assert torch.equal(found, b.view(-1))
    else:
        assert torch.equal(row, torch.cat([a.view(1) for a, _ in parts]))
        assert torch.equal(column, torch.cat([b.view(1) for _, b in parts]))
    assert groups_amax(x, spec, None, groups)[1] is None
    assert groups_amax(x, None, spec, groups)[0] is None


def test_schemes_of_one_pass_need_no_amax():
    x, groups = wide(20, 16, torch.bfloat16), split(torch.tensor([3, 9]), 20)
    assert groups_amax(x, Block1D(), MX(), groups) == (None, None)
    row, column = groups_amax(x, Tensorwise(), Block1D(), groups)
    assert row.shape == (2,)
    assert column is None


@pytest.mark.parametrize("spec", SCHEMES, ids=str)
def test_a_given_amax_is_each_group_s(spec):
    """A cast that is told what it would find writes the same."""
    sizes, x = [65, 128, 0, 97], wide(300, 150, torch.bfloat16)
    groups, want = split(torch.tensor(sizes), 300), grouped(x, sizes, spec, spec)
    reference = importlib.import_module(f"{spec.package}.reference")
    amax = reference.amax(x, spec, spec, None, groups)
    for found, same in zip(
        quantize_groups(x, spec, spec, groups, brought(x, spec)._replace(amax=amax)), want, strict=True
    ):
        assert_same_used(found, same)


@pytest.mark.parametrize("spec", SCHEMES, ids=str)
def test_filling_what_is_there(spec):
    sizes, x = [65, 128, 0, 97], wide(300, 150, torch.bfloat16)
    pair, want = grouped(x, sizes, spec, spec), grouped(3 * x, sizes, spec, spec)
    fill_groups(3 * x, pair, brought(x, spec))
    for found, same in zip(pair, want, strict=True):
        assert_same_used(found, same)
    fill_groups(x, (None, None))
    fill_groups(x, (pair[0], None), brought(x, spec))
    assert_same_used(pair[0], grouped(x, sizes, spec, None)[0])
    assert_same_used(pair[1], want[1])


@pytest.mark.parametrize("spec", SCHEMES, ids=str)
def test_a_skip_flag_leaves_every_byte(spec):
    sizes, x = [65, 128, 0, 97], wide(300, 150, torch.bfloat16)
    pair = grouped(x, sizes, spec, spec)
    for q in pair:
        poison(q.q)
    before = [raw(t) for q in pair for t in q.tensors()]
    given = brought(x, spec)
    if spec.takes_inverse_scale:
        given = given._replace(inverse_scale=torch.ones(4), running_amax=torch.zeros(4))
    fill_groups(3 * x, pair, given._replace(skip=torch.ones(1)))
    assert all(torch.equal(a, raw(b)) for a, b in zip(before, (t for q in pair for t in q.tensors()), strict=True))
    assert given.running_amax is None or not given.running_amax.any()
    fill_groups(3 * x, pair, given._replace(skip=torch.zeros(1)))
    assert_alone(pair, 3 * x, sizes, given)


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
        if found.orientation == "row":
            codes[rows:], scale[rows:] = 0x7F, float("nan")
        else:
            codes[:, rows:], scale[:, rows // 128 :] = 0x7F, float("nan")
        assert torch.equal(found.dequantize(), want)


def test_rows_that_do_not_fit_are_cut_off():
    x = wide(200, 150, torch.bfloat16)
    groups = laid_out(torch.tensor([150, 100, 7]), 200)
    for found, want in zip(quantize_groups(x, FINE, FINE, groups), grouped(x, [150, 50, 0]), strict=True):
        assert_same_used(found, want)


# -- a GroupedTensor ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", SCHEMES, ids=str)
def test_members_alias_the_storage(spec):
    sizes = [65, 128, 0, 97]
    for found in grouped(wide(300, 150, torch.bfloat16), sizes, spec, spec):
        for own_group, size in zip(found.members(), sizes, strict=True):
            assert own_group.shape == ((size, 150) if found.orientation == "row" else (150, size))
            for own, whole in zip(own_group.tensors(), found.q.tensors(), strict=True):
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
            assert [m.shape for m in found.members()] == [
                (0, columns) if found.orientation == "row" else (columns, 0)
            ] * len(sizes)


LAYOUTS = {  # of 5 groups, 1024 rows inside, 48 columns: scale and its strides, row and column
    Tensorwise(): (((5, 1), (1, 1)), ((1, 5), (5, 1))),
    Rowwise(): (((1024, 1), (1, 1024)), ((48, 5), (1, 48))),
    Block1D(): (((1024, 1), (1, 1024)), ((48, 8), (1, 48))),
    Block2D(): (((8, 1), (1, 1)), ((1, 8), (8, 1))),
    MX(): (((1024, 2), (1, 1024)), ((48, 32), (1, 48))),
    MX(square=True): (((32, 2), (2, 1)), ((2, 32), (32, 1))),
    NVFP4(): (((1024, 3), (1, 1024)), ((48, 64), (1, 48))),
    NVFP4(square=True): (((64, 3), (3, 1)), ((3, 64), (64, 1))),
}


@pytest.mark.parametrize("spec", LAYOUTS, ids=str)
def test_layouts(spec):
    for side, (shape, strides) in zip(("row", "column"), LAYOUTS[spec], strict=True):
        proto = grouped_proto(spec, 1024, 5, 48, side, torch.bfloat16, torch.device("cpu"))
        q, packed = proto.empty(), spec.fmt.packed
        assert q.codes.shape == ((1024, 48 // packed) if side == "row" else (48, 1024 // packed))
        assert q.codes.is_contiguous()
        assert (q.scale.shape, q.scale.stride()) == (shape, strides)
        assert proto.shape == ((1024, 48) if side == "row" else (48, 1024))
        assert (None if q.global_scale is None else q.global_scale.shape) == ((5,) if spec.two_level else None)


@pytest.mark.parametrize("spec", SCHEMES, ids=str)
def test_assembled_from_bytes_and_flat_scales(spec):
    x, sizes = wide(300, 150, torch.bfloat16), [65, 128, 0, 97]
    for found in grouped(x, sizes, spec, spec):
        codes, scale, *more = found.q.tensors()
        flat = scale.as_strided((scale.numel(),), (1,))
        q = grouped_assemble(spec, (codes.view(torch.uint8), flat, *more), 4, found.orientation, 150, x.dtype)
        assert (q.shape, q.dtype, q.spec) == (found.q.shape, found.q.dtype, spec)
        assert (q.codes.dtype, q.scale.shape, q.scale.stride()) == (codes.dtype, scale.shape, scale.stride())
        assert_same_used(GroupedTensor(q, found.groups, found.orientation), found)
        assert grouped_assemble(spec, tuple(found.q.tensors()), 4, found.orientation, 150, x.dtype).scale is scale


@pytest.mark.parametrize("spec", SCHEMES, ids=str)
def test_every_scheme_dequantizes_each_group(spec):
    sizes, x = [65, 128, 0, 97], wide(300, 150, torch.bfloat16)
    pair = grouped(x, sizes, spec, spec)
    parts = [quantize_pair(part, spec, spec, brought(x, spec)) for part in pieces(x, sizes)]
    tail = torch.zeros(10, 150, dtype=x.dtype)
    for side, found in enumerate(pair):
        want = torch.cat([(p[side].dequantize().T if side else p[side].dequantize()) for p in parts] + [tail])
        assert torch.equal(found.dequantize(), want)
        assert found.dequantize(torch.float32).dtype == torch.float32
        rows = 128 * int(found.groups.block[-1])  # what lies past the last group is as good as any
        codes = found.q.codes.view(torch.uint8)
        (codes[rows:] if side == 0 else codes[:, rows // spec.fmt.packed :]).fill_(0x7F)
        assert torch.equal(found.dequantize(), want)


@pytest.mark.parametrize("number", [1, 4])
@pytest.mark.parametrize("size", [1, 128, 200])
def test_stacked_matrices(size, number):
    """Groups of one size, whose members are found without asking for it."""
    groups, height = equal(number, size, torch.device("cpu")), -(-size // 128) * 128
    x = wide(number * size, 48, torch.bfloat16)
    assert (groups.rows, groups.padded, groups.sizes()) == (number * size, number * height, [size] * number)
    start, block, owner, source, live = layout([size] * number, number * size)
    assert [t.tolist() for t in groups.tensors()] == [start, block, owner, source, live]
    for spec in SCHEMES:
        for q in quantize_groups(x, spec, spec, groups, brought(x, spec)):
            for g, own in enumerate(q.members()):
                assert_same(member(q.q, q.orientation, g, g * height, size), own)


def test_stacks_of_nothing():
    groups = equal(3, 0, torch.device("cpu"))
    assert (groups.rows, groups.padded, groups.sizes()) == (0, 0, [0, 0, 0])


@pytest.mark.parametrize("spec", SCHEMES, ids=str)
def test_saved_and_restored(spec):
    x = wide(300, 150, torch.bfloat16)
    for found in grouped(x, [65, 128, 0, 97], spec, spec):
        tensors, how = found.save()
        assert all(type(t) is torch.Tensor for t in tensors)
        assert len(tensors) == len(list(found.tensors())) == 7 + spec.two_level
        back = restore(tensors, how)
        assert all(a is b for a, b in zip(back.tensors(), found.tensors(), strict=True))
        assert (back.orientation, back.groups.rows, back.q.shape) == (found.orientation, 300, found.q.shape)
        assert torch.equal(back.dequantize(), found.dequantize())


def test_passes_through_autograd():
    class Through(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            tensors, ctx.how = grouped(x, [3, 9], NVFP4(), None)[0].save()
            ctx.save_for_backward(*tensors)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
            return dy * restore(ctx.saved_tensors, ctx.how).dequantize(dy.dtype)

    x = torch.randn(20, 16, requires_grad=True)
    Through.apply(x).sum().backward()
    assert torch.equal(x.grad, grouped(x, [3, 9], NVFP4(), None)[0].dequantize())


@pytest.mark.parametrize("spec", [Tensorwise(), NVFP4()], ids=str)
def test_a_tree_of_tensors(spec):
    for found in grouped(wide(300, 150, torch.bfloat16), [65, 128, 0, 97], spec, spec):
        leaves, tree = _pytree.tree_flatten(found)
        assert [t for t in leaves if t is not None] == list(found.tensors())
        back = _pytree.tree_unflatten([None if t is None else t.clone() for t in leaves], tree)
        assert (back.orientation, back.groups.rows) == (found.orientation, 300)
        assert_same_used(back, found)


def test_copied_but_not_pickled():
    found = grouped(wide(300, 150, torch.bfloat16), [65, 128, 0, 97], NVFP4(), None)[0]
    other = copy.deepcopy(found)
    assert_same_used(other, found)
    other.q.codes.zero_()
    assert found.q.codes.any()
    with pytest.raises(TypeError, match="not pickled"):
        pickle.dumps(found)


def test_shown_without_data():
    row, column = grouped(wide(300, 150, torch.bfloat16), [65, 128, 0, 97])
    assert repr(row) == "GroupedTensor(300x150 in 4 groups, row, block-1d, cpu)"
    assert repr(column) == "GroupedTensor(300x150 in 4 groups, column, block-1d, cpu)"
    blocks = row.groups.owner.shape[0]
    assert row.nbytes() == blocks * 128 * (150 + 4 * 2) + 4 * (5 + 5 + 3 * blocks)


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
    given = CastArgs(groups=want[0].groups, skip=torch.ones(1))
    fill_pair(3 * x, pair, given)
    assert all(torch.equal(a, b) for a, b in zip(before, [t for q in want for t in used(q)], strict=True))
    fill_pair(3 * x, pair, given._replace(skip=torch.zeros(1)))
    for found, fresh in zip(want, grouped(3 * x, sizes), strict=True):
        assert_same_used(found, fresh)


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [299, 301, 0])
def test_groups_of_another_number_of_rows_are_refused(rows):
    groups = split(torch.tensor([65, 128, 0, 97]), 300)
    with pytest.raises(UnsupportedShape) as refused:
        quantize_groups(torch.zeros(rows, 16), Block1D(), None, groups)
    assert str(refused.value) == f"These groups are of 300 rows, tail included, and x has {rows}."


@pytest.mark.parametrize("spec", [s for s in SCHEMES if not s.takes_inverse_scale], ids=str)
def test_a_multiplier_for_a_scheme_that_finds_its_own_is_refused(spec):
    x, groups = torch.zeros(10, 16), split(torch.tensor([3, 5]), 10)
    with pytest.raises(UnsupportedConfig, match="derives its scales from the data"):
        quantize_groups(x, spec, None, groups, brought(x, spec)._replace(inverse_scale=torch.ones(2)))


def test_stochastic_rounding_without_a_seed_is_refused():
    groups = split(torch.tensor([3, 5]), 10)
    with pytest.raises(UnsupportedConfig, match="needs seed="):
        quantize_groups(torch.zeros(10, 16), None, NVFP4(stochastic=True), groups)


@pytest.mark.parametrize("name", ["inverse_scale", "running_amax"])
@pytest.mark.parametrize(
    "wrong", [torch.ones(3), torch.ones(2, 1), torch.ones(2).double(), torch.ones(4)[::2]], ids=str
)
def test_as_many_multipliers_and_amaxes_as_groups(name, wrong):
    groups = split(torch.tensor([3, 5]), 10)
    with pytest.raises(UnsupportedShape, match=f"{name} of 2 groups is float32"):
        quantize_groups(torch.zeros(10, 16), Tensorwise(), None, groups, CastArgs(**{name: wrong}))


@pytest.mark.parametrize("spec", SCHEMES, ids=str)
def test_what_does_not_fit_is_not_written_into(spec):
    x = wide(300, 150, torch.bfloat16)
    pair = grouped(x, [65, 128, 0, 97], spec, spec)
    for other in (x[:, :100], wide(300, 200, torch.bfloat16)):
        with pytest.raises(UnsupportedShape, match="fill_groups cannot write x"):
            fill_groups(other, pair, brought(x, spec))


# -- on the device -----------------------------------------------------------------------------------------------------


# one of each kind of kernel: what a compilation of its own decides
KERNELS = [
    Tensorwise(), Rowwise(), Block1D(), Block1D(E5M2, "fp32"), Block2D(), MX(), MX(square=True),
    NVFP4(), NVFP4(square=True), NVFP4(rht=True), NVFP4(rht=True, stochastic=True),
]  # fmt: skip


def cast(
    twin: str, spec, x: torch.Tensor, groups: Groups, sides: str = "rc", given: CastArgs | None = None, **settings
) -> list[GroupedTensor]:
    """By that twin, into poisoned outputs."""
    pair = [
        grouped_proto(spec, groups.padded, groups.number, x.shape[1], side, x.dtype, x.device).empty()
        if side[0] in sides
        else None
        for side in ("row", "column")
    ]
    for q in pair:
        if q is not None:
            poison(q)
    given = (brought(x, spec) if given is None else given)._replace(groups=groups)
    module = importlib.import_module(f"{spec.package}.{twin}")
    if spec.two_pass and given.inverse_scale is None:
        specs = [None if q is None else q.spec for q in pair]
        given = given._replace(amax=module.amax(x, *specs, given.skip, groups))
    module.cast(x, *pair, given, **settings)
    return [GroupedTensor(q, groups, side) for q, side in zip(pair, ("row", "column"), strict=True) if q is not None]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spec", KERNELS, ids=str)
def test_every_configuration_writes_the_reference_bytes(spec, dtype):
    """On the blocks in use; the tail is NaN."""
    configs = importlib.import_module(f"{spec.package}.triton").CONFIGS
    for sizes, columns in zip(SPLITS, cycle((33, 256, 300)), strict=False):
        x = wide(sum(sizes) + 75, columns, dtype)
        x[sum(sizes) :] = float("nan")
        here, there = both(sizes, x.shape[0])
        want = cast("reference", spec, x, here)
        found = {"torch on cuda": cast("reference", spec, x.cuda(), there)}
        found |= {str(config): cast("triton", spec, x.cuda(), there, config=config) for config in configs}
        for name, pair in found.items():
            for got, same in zip(pair, want, strict=True):
                assert_same_used(got, same, (name, sizes, columns))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("spec", [spec for spec in SCHEMES if spec not in KERNELS], ids=str)
def test_every_other_setting_on_the_device(spec, dtype):
    for sizes, columns in (([65, 128, 0, 97], 150), ([0, 15, 1, 1011, 0], 272)):
        x = wide(sum(sizes) + 75, columns, dtype)
        x[sum(sizes) :] = float("nan")
        here, there = both(sizes, x.shape[0])
        for got, want in zip(cast("triton", spec, x.cuda(), there), cast("reference", spec, x, here), strict=True):
            assert_same_used(got, want, (sizes, columns))


@pytest.mark.gpu
@pytest.mark.parametrize("spec", KERNELS, ids=str)
def test_values_that_are_no_numbers_on_the_device(spec):
    """In blocks that are not full, too, whose other rows stay zero."""
    sizes = [65, 100, 0, 97]
    for value in (float("nan"), float("inf"), -float("inf"), 3e38, 1e-40, 0.0):
        x = wide(300, 150, torch.float32)
        x[65 + 99, 7] = value
        x[65 + 100 : 65 + 110] = value
        here, there = both(sizes, 300)
        for got, want in zip(cast("triton", spec, x.cuda(), there), cast("reference", spec, x, here), strict=True):
            assert_same_used(got, want, value)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 3, 65, 256])
@pytest.mark.parametrize("sides", ["r", "c", "rc"])
@pytest.mark.parametrize("spec", KERNELS, ids=str)
def test_any_number_of_groups_and_either_orientation(spec, count, sides):
    sizes = many(count)
    x = wide(sum(sizes) + 100, 272, torch.bfloat16)
    x[sum(sizes) :] = float("inf")
    here, there = both(sizes, x.shape[0])
    want, got = cast("reference", spec, x, here, sides), cast("triton", spec, x.cuda(), there, sides)
    for g, w in zip(got, want, strict=True):
        assert_same_used(g, w, count)


@pytest.mark.gpu
@pytest.mark.parametrize("spec", KERNELS, ids=str)
def test_more_groups_than_blocks(spec):
    """Scales of groups without rows are written by the tiles of others, and by somebody where there are none."""
    for sizes, rows in (([0] * 40 + [3], 3), ([0] * 300, 1), ([0] * 7, 0), ([1] * 64, 64)):
        x = wide(rows, 150, torch.bfloat16)
        here, there = both(sizes, rows)
        for g, w in zip(cast("triton", spec, x.cuda(), there), cast("reference", spec, x, here), strict=True):
            assert_same_used(g, w, (sizes, rows))


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["tile", "rowwise.triton", "nvfp4.triton"])
def test_every_configuration_of_the_amax_finds_the_same(kernel):
    module = importlib.import_module(f"octavo.quant.{kernel}")
    sizes = [65, 128, 0, 97]
    here, there = both(sizes, 300)
    for columns in (150, 256):
        x = wide(300, columns, torch.bfloat16)
        x[290:] = float("nan")
        for config in module.CONFIGS if kernel == "nvfp4.triton" else module.AMAX_CONFIGS:
            if kernel == "tile":
                found, want = (module.tensor_amax(x.cuda(), None, config, there),), groups_amax(x, *TENSOR, here)[:1]
            else:
                specs = (Rowwise(), Rowwise()) if kernel == "rowwise.triton" else (NVFP4(), NVFP4(rht=True))
                found = module.amax(x.cuda(), *specs, None, there, config)
                want = groups_amax(x, *specs, here)
            for a, b in zip(found, want, strict=True):
                rows = 128 * int(here.block[-1]) if a.shape == (here.padded,) else None  # past the last group: anything
                assert torch.equal(a[:rows].cpu(), b[:rows]), (config, columns)


TENSOR = (Tensorwise(), None)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", SPLITS, ids=str)
def test_given_multipliers_and_observed_amaxes_on_the_device(sizes):
    for dtype in DTYPES:
        x = wide(sum(sizes) + 30, 150, dtype)
        x[sum(sizes) :] = float("nan")
        inverse_scale, before = torch.rand(len(sizes)) + 0.1, torch.arange(len(sizes)) * 2.0
        here = CastArgs(inverse_scale=inverse_scale, running_amax=before.clone())
        there = CastArgs(inverse_scale=inverse_scale.cuda(), running_amax=before.cuda())
        groups = both(sizes, x.shape[0])
        want = quantize_groups(x, Tensorwise(), Tensorwise(), groups[0], here)
        got = quantize_groups(x.cuda(), Tensorwise(), Tensorwise(), groups[1], there)
        for g, w in zip(got, want, strict=True):
            assert_same_used(g, w, dtype)
        assert torch.equal(there.running_amax.cpu(), here.running_amax)


@pytest.mark.gpu
@turns(spec=KERNELS, dtype=DTYPES)
def test_the_public_entry_matches_the_cpu(spec, dtype):
    for sizes, rows in (([65, 128, 0, 97], 400), ([300, 150], 450), ([0], 0), ([0, 0], 9)):
        x = wide(rows, 150, dtype)
        want, got = grouped(x, sizes, spec, spec), grouped(x.cuda(), sizes, spec, spec)
        with backend.use("reference"):
            torch_on_cuda = grouped(x.cuda(), sizes, spec, spec)
        for g, t, w in zip(got, torch_on_cuda, want, strict=True):
            assert_same_used(g, w, sizes)
            assert_same_used(t, w, sizes)
            assert torch.equal(g.dequantize().cpu(), w.dequantize())


@pytest.mark.gpu
def test_nvfp4_pairs_of_different_settings_share_a_read():
    sizes, x = [65, 128, 0, 97], wide(300, 150, torch.bfloat16)
    row, column = NVFP4(stochastic=True), NVFP4(rht=True, stochastic=True)
    for g, w in zip(grouped(x.cuda(), sizes, row, column), grouped(x, sizes, row, column), strict=True):
        assert_same_used(g, w)


@pytest.mark.gpu
@pytest.mark.parametrize("spec", KERNELS, ids=str)
def test_strided_and_expanded_rows_on_the_device(spec):
    sizes, base = [65, 128, 0, 97], wide(300, 300, torch.bfloat16)
    for view in (base.T, base[:, ::2], base[:1].expand(300, 300), base[:, :1].expand(300, 70)):
        moved = base.cuda().as_strided(view.shape, view.stride(), view.storage_offset())
        for g, w in zip(grouped(moved, sizes, spec, spec), grouped(view, sizes, spec, spec), strict=True):
            assert_same_used(g, w, view.stride())


@pytest.mark.gpu
@pytest.mark.parametrize("spec", KERNELS, ids=str)
def test_a_skip_flag_on_the_device_leaves_everything(spec):
    sizes, x = [65, 128, 0, 97], wide(300, 150, torch.bfloat16).cuda()
    pair = grouped(x, sizes, spec, spec)
    for q in pair:
        poison(q.q)
    before, given = [raw(t) for q in pair for t in q.tensors()], brought(x, spec)
    fill_groups(3 * x, pair, given._replace(skip=torch.ones(1, device="cuda")))
    assert all(torch.equal(a, raw(b)) for a, b in zip(before, (t for q in pair for t in q.tensors()), strict=True))
    fill_groups(3 * x, pair, given._replace(skip=torch.zeros(1, device="cuda")))
    for found, fresh in zip(pair, grouped(3 * x, sizes, spec, spec), strict=True):
        assert_same_used(found, fresh)


@pytest.mark.gpu
@pytest.mark.gpu_smoke
@pytest.mark.parametrize("spec", KERNELS, ids=str)
def test_stacked_matrices_on_the_device(spec):
    x = wide(4 * 200, 272, torch.bfloat16)
    here, there = (equal(4, 200, torch.device(device)) for device in ("cpu", "cuda"))
    assert all(torch.equal(a, b.cpu()) for a, b in zip(here.tensors(), there.tensors(), strict=True))
    want = quantize_groups(x, spec, spec, here, brought(x, spec))
    got = quantize_groups(x.cuda(), spec, spec, there, brought(x.cuda(), spec))
    for g, w in zip(got, want, strict=True):
        assert_same_used(g, w)


@pytest.mark.gpu
@pytest.mark.parametrize("spec", KERNELS, ids=str)
def test_nothing_waits_for_the_device(spec):
    """Of the kernels: the references read the sizes."""
    x, splits = wide(300, 150, torch.bfloat16).cuda(), torch.tensor([65, 128, 0, 97], device="cuda")
    given, skip = brought(x, spec), torch.zeros(1, device="cuda")
    if spec.takes_inverse_scale:
        given = given._replace(inverse_scale=torch.ones(4, device="cuda"), running_amax=torch.zeros(4, device="cuda"))

    def work() -> list[torch.Tensor]:
        groups = split(splits, 300)
        groups_amax(x, spec, spec, groups)
        pair = quantize_groups(x, spec, spec, groups, given)
        fill_groups(x, pair, given._replace(inverse_scale=None, running_amax=None, skip=skip))
        return [q.dequantize() for q in pair]

    want = work()  # compiles
    with no_waiting():
        found = work()
        equal(4, 75, x.device)
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("spec", KERNELS, ids=str)
def test_replays_follow_the_sizes(spec):
    x, splits = wide(1100, 272, torch.bfloat16).cuda(), torch.tensor([300, 0, 212, 400], device="cuda")
    given = brought(x, spec)

    def work() -> tuple[GroupedTensor | None, GroupedTensor | None]:
        return quantize_groups(x, spec, spec, split(splits, 1100), given)

    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pair = work()
    for sizes in ([400, 212, 0, 300], [300, 0, 0, 400], [0, 1100, 0, 0], [0, 0, 0, 0], [3, 0, 1, 9], [500, 1, 99, 500]):
        splits.copy_(torch.tensor(sizes))
        x.copy_(wide(1100, 272, torch.bfloat16))
        x[sum(sizes) :] = float("nan")
        for q in pair:  # what an earlier replay left is no excuse
            poison(q.q)
        graph.replay()
        for found, want in zip(pair, grouped(x.cpu(), sizes, spec, spec), strict=True):
            assert_same_used(found, want, sizes)


@pytest.mark.gpu
@pytest.mark.parametrize("spec", KERNELS, ids=str)
def test_same_bits_a_hundred_times(spec):
    x, sizes = wide(1100, 272, torch.bfloat16).cuda(), [15, 1, 0, 1011]
    first = grouped(x, sizes, spec, spec)
    for _ in range(100):
        for found, want in zip(grouped(x, sizes, spec, spec), first, strict=True):
            assert_same_used(found, want)


@pytest.mark.gpu
@some("spec", KERNELS, [Tensorwise(), Rowwise(), Block1D(), MX(), NVFP4(rht=True)])
@pytest.mark.usefixtures("large_memory")
def test_offsets_beyond_two_to_the_31(spec):
    """The last group of more than 2^31 elements, against its rows alone."""
    rows, columns = 300_011, 7168
    x = torch.zeros(rows, columns, device="cuda", dtype=torch.bfloat16)
    x[-200:] = torch.randn(200, columns, device="cuda", dtype=torch.bfloat16)
    pair = grouped(x, [rows - 150, 0, 150], spec, spec)
    alone = quantize_pair(x[-150:], spec, spec, brought(x, spec))
    for found, want in zip(pair, alone, strict=True):
        for a, b in zip(found.members()[2].tensors(), want.tensors(), strict=True):
            assert torch.equal(raw(a), raw(b))


def test_each_group_is_cast_by_the_scale_of_its_own_rows():
    x = torch.cat((torch.full((3, 128), 7.0), torch.full((2, 128), 14.0)))
    q = Tensorwise().quantize_groups(x, torch.tensor([3, 2]))
    assert [1 / member.scale.item() for member in q.members()] == [64.0, 32.0]
