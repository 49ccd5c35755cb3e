"""Rows that a `source` names: a grouped cast of x[source] has the bytes of a cast of a copy of those rows."""

import importlib
from itertools import cycle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from octavo import backend, recipes
from octavo.errors import UnsupportedDevice, UnsupportedDtype, UnsupportedShape
from octavo.formats import E5M2
from octavo.quant import MX, NVFP4, Block1D, Block2D, Rowwise, Tensorwise
from octavo.quant.grouped import (
    GroupedTensor,
    fill_groups,
    grouped_proto,
    groups_amax,
    quantize_groups,
)
from octavo.quant.groups import Groups, split
from octavo.quant.groups.reference import gathered
from octavo.quant.quantizer import CastArgs, Quantizer
from tests.support.ragged_groups import SPLITS, both, laid_out
from tests.support.same_tensors import assert_same_used, poison, raw
from tests.support.waiting import no_waiting

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SCHEMES = [
    Tensorwise(), Tensorwise(E5M2, pow2=True, eps=1e-3), Rowwise(), Block1D(), Block1D(E5M2, "fp32"), Block2D(),
    MX(), MX(square=True), NVFP4(), NVFP4(rht=True, stochastic=True),
]  # fmt: skip
DIRECT = [spec for spec in SCHEMES if spec.gathers]
SEED = (0x1234_5678_9ABC, 7)
GARBAGE = (2**31 - 1, -(2**31), -2, 10**9)  # what memory past the last group may hold


def wide(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Every row at its own magnitude, so that a row in the wrong place shows."""
    return (torch.randn(rows, columns) * torch.exp2(torch.randint(-6, 6, (rows, 1)))).to(dtype)


def chosen(sizes: list[int], rows: int, tokens: int) -> torch.Tensor:
    """Tokens at random, so that some are repeated and others left out; one row in seven is padding, and the tail is
    garbage."""
    source = torch.randint(0, max(tokens, 1), (rows,), dtype=torch.int32)
    source[::7] = -1
    if tokens == 0:
        source.fill_(-1)
    tail = source[sum(sizes) :]
    tail.copy_(torch.tensor(GARBAGE, dtype=torch.int32).repeat(rows)[: tail.shape[0]])
    return source


def copied(x: torch.Tensor, source: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """The permuted tensor, row by row, with NaN in the tail."""
    rows = torch.full((source.shape[0], x.shape[1]), float("nan"), dtype=x.dtype)
    for r in range(min(sum(sizes), source.shape[0])):
        token = int(source[r])
        rows[r] = x[token] if token >= 0 else 0
    return rows


def given_to(x: torch.Tensor, spec: Quantizer, source: torch.Tensor | None = None) -> CastArgs:
    return CastArgs(seed=torch.tensor(SEED, device=x.device) if spec.is_stochastic else None, source=source)


def assert_gathers(
    x: torch.Tensor, source: torch.Tensor, sizes: list[int], row: Quantizer | None, column: Quantizer | None
) -> None:
    groups = split(torch.tensor(sizes), source.shape[0])
    lead = column if row is None else row
    assert lead is not None
    want = quantize_groups(copied(x, source, sizes), row, column, groups, given_to(x, lead))
    found = quantize_groups(x, row, column, groups, given_to(x, lead, source))
    for got, same in zip(found, want, strict=True):
        assert (got is None) == (same is None)
        if got is not None and same is not None:
            assert_same_used(got, same, (lead, sizes))


# -- the bytes of a copy -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", SPLITS, ids=str)
@pytest.mark.parametrize("spec", SCHEMES, ids=str)
def test_every_scheme_and_split(spec, sizes):
    """Unaligned and empty groups, repeated tokens, padding, and a tail of garbage."""
    rows = sum(sizes) + 30
    assert_gathers(wide(90, 150), chosen(sizes, rows, 90), sizes, spec, spec)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [1, 33, 256])
@pytest.mark.parametrize("spec", SCHEMES, ids=str)
def test_every_width_and_dtype(spec, columns, dtype):
    sizes = [65, 128, 0, 97]
    assert_gathers(wide(400, columns, dtype), chosen(sizes, 300, 400), sizes, spec, spec)


@pytest.mark.parametrize("name", recipes.SHIPPED)
def test_every_recipe(name):
    """Its quantizers of x and of dy, in the pairs that a grouped layer casts at once."""
    quant = recipes.recipe(name).gemms()
    pairs = [(quant.fprop.left, quant.wgrad.right), (quant.dgrad.left, quant.wgrad.left)]
    quantized = [pair for pair in pairs if pair != (None, None)]
    assert bool(quantized) == (name != "bf16")
    sizes, x = [65, 128, 0, 97], wide(150, 160)
    source = chosen(sizes, 300, 150)
    groups = split(torch.tensor(sizes), 300)
    for row, column in quantized:
        draws = any(spec is not None and spec.is_stochastic for spec in (row, column))
        given = CastArgs(seed=torch.tensor(SEED) if draws else None)
        want = quantize_groups(copied(x, source, sizes), row, column, groups, given)
        found = quantize_groups(x, row, column, groups, given._replace(source=source))
        for got, same in zip(found, want, strict=True):
            assert_same_used(got, same, name)


def test_one_orientation_alone_and_two_of_different_schemes():
    """A scheme that gathers beside one that does not."""
    sizes, x = [65, 128, 0, 97], wide(150, 160)
    source = chosen(sizes, 300, 150)
    for row, column in ((Block1D(), None), (None, Tensorwise()), (Tensorwise(), MX()), (Rowwise(), Block1D())):
        assert_gathers(x, source, sizes, row, column)


@settings(max_examples=60)
@given(
    spec=st.sampled_from(SCHEMES),
    sizes=st.lists(st.sampled_from([0, 0, 1, 5, 127, 128, 129]), min_size=1, max_size=8),
    tokens=st.integers(0, 40),
    tail=st.integers(0, 40),
)
def test_any_split_and_number_of_tokens(spec, sizes, tokens, tail):
    assert_gathers(wide(tokens, 48), chosen(sizes, sum(sizes) + tail, tokens), sizes, spec, spec)


@pytest.mark.parametrize("spec", SCHEMES, ids=str)
def test_numbers_that_are_no_rows_of_x_make_zero_rows(spec):
    """In a group too: nothing outside x is read."""
    x = wide(10, 48)
    wild = torch.tensor([3, 10, -1, 2**31 - 1, -(2**31), 9], dtype=torch.int32)
    tame = torch.tensor([3, -1, -1, -1, -1, 9], dtype=torch.int32)
    groups = split(torch.tensor([2, 4]), 6)
    found = quantize_groups(x, spec, spec, groups, given_to(x, spec, wild))
    for got, want in zip(found, quantize_groups(x, spec, spec, groups, given_to(x, spec, tame)), strict=True):
        assert_same_used(got, want)
    assert not found[0].dequantize()[1:5].any()


@pytest.mark.parametrize("spec", SCHEMES, ids=str)
def test_rows_of_x_that_no_group_takes_are_not_read(spec):
    """NaN in them reaches neither a code nor an amax."""
    sizes, x = [40, 60], wide(150, 48)
    source = torch.arange(0, 140, dtype=torch.int32)
    want = spec.quantize_groups(x, torch.tensor(sizes), source=source, seed=given_to(x, spec).seed)
    x[100:] = float("nan")
    found = spec.quantize_groups(x, torch.tensor(sizes), source=source, seed=given_to(x, spec).seed)
    assert_same_used(found, want)
    assert found.dequantize().isfinite().all()


@pytest.mark.parametrize("sizes", [*SPLITS, [150, 100, 90]], ids=str)
def test_given_multipliers_and_observed_amaxes(sizes):
    """Delayed scaling: the amax of each group is that of its gathered rows. The last split is cut off by the rows."""
    x, rows = wide(90, 150), min(sum(sizes) + 30, 300)
    source, groups = chosen(sizes, rows, 90), laid_out(torch.tensor(sizes), rows)
    inverse_scale, before = torch.rand(len(sizes)) + 0.1, torch.arange(len(sizes)) * 2.0
    here = CastArgs(inverse_scale=inverse_scale, running_amax=before.clone())
    there = CastArgs(inverse_scale=inverse_scale, running_amax=before.clone(), source=source)
    want = quantize_groups(copied(x, source, sizes), Tensorwise(), Tensorwise(), groups, here)
    for got, same in zip(quantize_groups(x, Tensorwise(), Tensorwise(), groups, there), want, strict=True):
        assert_same_used(got, same)
    assert torch.equal(here.running_amax, there.running_amax)


@pytest.mark.parametrize("spec", [spec for spec in SCHEMES if spec.two_pass], ids=str)
def test_the_amax_of_every_group(spec):
    sizes, x = [65, 128, 0, 97], wide(90, 150)
    source, groups = chosen(sizes, 300, 90), split(torch.tensor(sizes), 300)
    want = groups_amax(copied(x, source, sizes), spec, spec, groups)
    for a, b in zip(groups_amax(x, spec, spec, groups, source=source), want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("spec", SCHEMES, ids=str)
def test_filling_what_is_there_unless_the_flag_says_skip(spec):
    sizes, x = [65, 128, 0, 97], wide(90, 150)
    source, groups = chosen(sizes, 300, 90), split(torch.tensor(sizes), 300)
    given = given_to(x, spec, source)
    pair, want = quantize_groups(x, spec, spec, groups, given), quantize_groups(3 * x, spec, spec, groups, given)
    before = [raw(t) for q in pair for t in q.tensors()]
    fill_groups(3 * x, pair, given._replace(skip=torch.ones(1)))
    assert all(torch.equal(a, raw(b)) for a, b in zip(before, (t for q in pair for t in q.tensors()), strict=True))
    fill_groups(3 * x, pair, given._replace(skip=torch.zeros(1)))
    for got, same in zip(pair, want, strict=True):
        assert_same_used(got, same)


# -- the method of a quantizer -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("spec", SCHEMES, ids=str)
def test_the_method_of_a_quantizer(spec, axis):
    """Leading dims are rows, and strides do not matter, of x and of the source."""
    sizes, x = [65, 128, 0, 97], wide(120, 48)
    source, seed = chosen(sizes, 300, 120), given_to(x, spec).seed
    found = spec.quantize_groups(x.view(4, 30, 48), torch.tensor(sizes), axis, seed=seed, source=source)
    assert_same_used(found, spec.quantize_groups(copied(x, source, sizes), torch.tensor(sizes), axis, seed=seed))
    assert (found.groups.rows, found.dequantize().shape) == (300, (300, 48))
    strided = x.T.contiguous().T, torch.stack((source, source), 1)[:, 0]
    again = spec.quantize_groups(strided[0], torch.tensor(sizes), axis, seed=seed, source=strided[1])
    assert_same_used(again, found)


def test_gathered_rows_without_values_have_the_shapes_of_the_source():
    with FakeTensorMode():
        x, source = torch.empty(40, 64), torch.empty(300, dtype=torch.int32)
        for spec in (Block1D(), MX()):
            found = spec.quantize_groups(x, torch.empty(3, dtype=torch.int32), source=source)
            assert found.q.codes.shape == (found.groups.padded, 64)
            assert found.groups.rows == 300


def test_the_schemes_that_read_x_directly():
    assert [type(spec).__name__ for spec in DIRECT] == ["Tensorwise"] * 2 + ["Block1D"] * 2 + ["Block2D"]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int16, torch.float32], ids=str)
def test_a_source_of_another_dtype_is_refused(dtype):
    with pytest.raises(UnsupportedDtype, match=rf"source is int32, got {dtype}\. Use source\.to\(torch\.int32\)\."):
        Block1D().quantize_groups(torch.ones(4, 16), torch.tensor([2]), source=torch.zeros(2).to(dtype))


def test_a_source_that_is_no_vector_on_the_device_of_x_is_refused():
    x, sizes = torch.ones(4, 16), torch.tensor([2])
    with pytest.raises(UnsupportedDtype, match=r"source is a tensor, got list\. Use torch\.as_tensor first\."):
        Block1D().quantize_groups(x, sizes, source=[0, 1])
    with pytest.raises(UnsupportedShape, match=r"source is a vector, .*, got shape \(2, 1\)\. Flatten it\."):
        Block1D().quantize_groups(x, sizes, source=torch.zeros(2, 1, dtype=torch.int32))
    with pytest.raises(UnsupportedDevice, match=r"x is on cpu and source on meta\. Move source first\."):
        Block1D().quantize_groups(x, sizes, source=torch.zeros(2, dtype=torch.int32, device="meta"))


def test_a_source_of_another_length_than_the_groups_is_refused():
    x, groups = torch.ones(4, 16), split(torch.tensor([2]), 3)
    given = CastArgs(source=torch.zeros(4, dtype=torch.int32))
    with pytest.raises(UnsupportedShape, match=r"These groups are of 3 rows, tail included, and source has 4\."):
        quantize_groups(x, Block1D(), None, groups, given)
    with pytest.raises(UnsupportedShape, match=r"These groups are of 3 rows, tail included, and source has 4\."):
        groups_amax(x, Tensorwise(), None, groups, source=given.source)


# -- on the device -----------------------------------------------------------------------------------------------------


def poisoned(spec: Quantizer, groups: Groups, x: torch.Tensor, side: str) -> GroupedTensor:
    q = grouped_proto(spec, groups.padded, groups.number, x.shape[1], side, x.dtype, x.device).empty()
    return GroupedTensor(poison(q), groups, side)


def cast(
    twin: str, spec: Quantizer, x: torch.Tensor, groups: Groups, given: CastArgs, sides: str = "rc", **settings
) -> list[GroupedTensor]:
    """By that twin, into poisoned outputs."""
    module = importlib.import_module(f"{spec.package}.{twin}")
    pair = [poisoned(spec, groups, x, side) if side[0] in sides else None for side in ("row", "column")]
    specs = [spec if q is not None else None for q in pair]
    if spec.two_pass and given.inverse_scale is None:
        given = given._replace(amax=module.amax(x, *specs, given.skip, groups, given.source))
    module.cast(x, *[None if q is None else q.q for q in pair], given._replace(groups=groups), **settings)
    return [q for q in pair if q is not None]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spec", DIRECT, ids=str)
def test_every_configuration_writes_the_reference_bytes(spec, dtype):
    configs = importlib.import_module(f"{spec.package}.triton").CONFIGS
    for sizes, (columns, tokens) in zip(SPLITS, cycle(((33, 90), (256, 128), (300, 1), (256, 0))), strict=False):
        x, rows = wide(tokens, columns, dtype), sum(sizes) + 75
        source = chosen(sizes, rows, tokens)
        here, there = both(sizes, rows)
        want = cast("reference", spec, x, here, CastArgs(source=source))
        for config in configs:
            found = cast("triton", spec, x.cuda(), there, CastArgs(source=source.cuda()), config=config)
            for got, same in zip(found, want, strict=True):
                assert_same_used(got, same, (config, sizes, columns, tokens))


@pytest.mark.gpu
@pytest.mark.gpu_smoke
@pytest.mark.parametrize("sides", ["r", "c"])
@pytest.mark.parametrize("spec", DIRECT, ids=str)
def test_one_orientation_alone_on_the_device(spec, sides):
    sizes, x = [65, 128, 0, 97], wide(90, 150)
    source, (here, there) = chosen(sizes, 300, 90), both(sizes, 300)
    want = cast("reference", spec, x, here, CastArgs(source=source), sides)
    for got, same in zip(
        cast("triton", spec, x.cuda(), there, CastArgs(source=source.cuda()), sides), want, strict=True
    ):
        assert_same_used(got, same)


@pytest.mark.gpu
@pytest.mark.parametrize("spec", SCHEMES, ids=str)
def test_the_public_entry_matches_the_cpu(spec):
    """Wild numbers in a group too, x with strides, and a source without alignment."""
    for sizes, rows in (([65, 128, 0, 97], 400), ([300, 150], 450), ([0], 0), ([0, 0], 9)):
        x, splits = wide(200, 150), torch.tensor(sizes)
        source = chosen(sizes, rows, 200)
        source[3::50] = 200
        for view in (x, x[::2], x[:, 1::2], x.T):
            moved = x.cuda().as_strided(view.shape, view.stride(), view.storage_offset())
            shifted = torch.cat((source[:1], source)).cuda()[1:]
            for axis in (-1, 0):
                here, there = given_to(x, spec).seed, given_to(moved, spec).seed
                want = spec.quantize_groups(view, splits, axis, source=source, seed=here)
                found = spec.quantize_groups(moved, splits.cuda(), axis, source=shifted, seed=there)
                with backend.use("reference"):
                    by_torch = spec.quantize_groups(moved, splits.cuda(), axis, source=shifted, seed=there)
                assert_same_used(found, want, (sizes, view.stride()))
                assert_same_used(by_torch, want, (sizes, view.stride()))


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", [Tensorwise(), Tensorwise(E5M2)], ids=str)
@pytest.mark.parametrize("sizes", SPLITS, ids=str)
def test_given_multipliers_and_observed_amaxes_on_the_device(sizes, fmt):
    for dtype in DTYPES:
        x, rows = wide(90, 150, dtype), sum(sizes) + 30
        x[5, 7], x[80, 3] = float("inf"), float("nan")
        source, (here, there) = chosen(sizes, rows, 90), both(sizes, rows)
        inverse_scale, before = torch.rand(len(sizes)) + 0.1, torch.arange(len(sizes)) * 2.0
        on_cpu = CastArgs(inverse_scale=inverse_scale, running_amax=before.clone(), source=source)
        on_gpu = CastArgs(inverse_scale=inverse_scale.cuda(), running_amax=before.cuda(), source=source.cuda())
        want = quantize_groups(x, fmt, fmt, here, on_cpu)
        for got, same in zip(quantize_groups(x.cuda(), fmt, fmt, there, on_gpu), want, strict=True):
            assert_same_used(got, same, dtype)
        assert torch.equal(raw(on_gpu.running_amax.isnan()), raw(on_cpu.running_amax.isnan()))
        assert torch.equal(on_gpu.running_amax.nan_to_num().cpu(), on_cpu.running_amax.nan_to_num())


@pytest.mark.gpu
def test_every_configuration_of_the_amax_finds_the_same():
    from octavo.quant import tile

    sizes, x = [65, 128, 0, 97], wide(90, 256)
    source, (here, there) = chosen(sizes, 300, 90), both(sizes, 300)
    want = groups_amax(x, Tensorwise(), None, here, source=source)[0]
    for config in tile.AMAX_CONFIGS:
        assert torch.equal(tile.tensor_amax(x.cuda(), None, config, there, source.cuda()).cpu(), want)


@pytest.mark.gpu
@pytest.mark.parametrize("spec", SCHEMES, ids=str)
def test_nothing_waits_and_replays_follow_the_source(spec):
    x, splits = wide(200, 272).cuda(), torch.tensor([300, 0, 212, 400], device="cuda")
    source = chosen([912], 1100, 200).cuda()
    given = given_to(x, spec, source)

    def work() -> tuple[GroupedTensor | None, GroupedTensor | None]:
        return quantize_groups(x, spec, spec, split(splits, 1100), given)

    work()
    with no_waiting():
        work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pair = work()
    for sizes in ([400, 212, 0, 300], [0, 1100, 0, 0], [0, 0, 0, 0], [3, 0, 1, 9]):
        splits.copy_(torch.tensor(sizes))
        source.copy_(chosen(sizes, 1100, 200))
        x.copy_(wide(200, 272))
        graph.replay()
        here = given_to(x.cpu(), spec, source.cpu())
        want = quantize_groups(x.cpu(), spec, spec, split(torch.tensor(sizes), 1100), here)
        for found, same in zip(pair, want, strict=True):
            assert_same_used(found, same, sizes)


@pytest.mark.gpu
@pytest.mark.parametrize("spec", [Tensorwise(), Block1D()], ids=str)
@pytest.mark.usefixtures("large_memory")
def test_offsets_of_gathered_rows_beyond_two_to_the_31(spec):
    tokens, columns = 300_011, 7168
    x = torch.zeros(tokens, columns, device="cuda", dtype=torch.bfloat16)
    x[-200:] = torch.randn(200, columns, device="cuda", dtype=torch.bfloat16)
    source = torch.arange(tokens - 1, tokens - 201, -1, device="cuda", dtype=torch.int32)
    sizes = torch.tensor([90, 110], device="cuda")
    groups = split(sizes, 200)
    found = quantize_groups(x, spec, spec, groups, CastArgs(source=source))
    want = quantize_groups(gathered(x, source, groups), spec, spec, groups)
    for got, same in zip(found, want, strict=True):
        assert_same_used(got, same)
