"""The numbers of an inspection against plain definitions of them, and what one call of a layer runs to get them."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

import octavo
from octavo.inspection import measure, statistics
from octavo.inspection.measure import read
from octavo.inspection.statistics import BINS, LARGEST, LOWEST, ROWS, SCALES, SHAPE, SUMS, TENSORS, Cast
from octavo.ops import operands
from octavo.quant import MX, NVFP4, Block1D, Block2D, Rowwise, Tensorwise
from octavo.recipes import SHIPPED

QUANTIZERS = (
    Tensorwise(), Tensorwise(octavo.formats.E5M2), Rowwise(), Block1D(), Block2D(), Block1D(scale="fp32"), MX(),
    MX(square=True), NVFP4(), NVFP4(square=True),
)  # fmt: skip
SIZES = ((1, 1), (7, 33), (130, 300), (257, 16), (1, 1000), (300, 1))
SPECIAL = (0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, 2.0**-126, 3e38, 1.0, -1.0)


def plain_histogram(values, numbers):
    """Counts one value after another."""
    counts = [0.0] * BINS
    for value, number in zip(values.flatten().tolist(), numbers.expand(values.shape).flatten().tolist(), strict=True):
        if math.isfinite(value) and value > 0:
            power = math.frexp(value)[1] - 1
            counts[min(max(power - LOWEST, 0), BINS - 1)] += number
    return counts


def recorded(record, *arguments):
    """The first row of sums and largest values, by name, and its histogram of scales."""
    stats = torch.zeros(SHAPE, dtype=torch.float64)
    record(stats, TENSORS[0], *arguments)
    assert not stats[1:].any()
    return dict(zip(SUMS + LARGEST, stats[0].tolist(), strict=False)), stats[0, SCALES]


def largest_values(q):
    """Returns the largest value that each scale of q can represent, for every element."""
    matrix = q.q if isinstance(q, octavo.quant.GroupedTensor) else q
    fmt = matrix.spec.fmt
    byte = int(fmt.encode(torch.tensor([fmt.max])).view(torch.uint8)[0])
    byte = byte | byte << 4 if fmt.packed == 2 else byte
    codes = torch.full(matrix.codes.shape, byte, dtype=torch.uint8).view(fmt.dtype)
    filled = replace(matrix, codes=codes)
    return (filled if matrix is q else replace(q, q=filled)).dequantize(torch.float32)


def source(rows, columns):
    return torch.randn(rows, columns) * torch.logspace(-6, 3, rows)[:, None]


# -- histograms --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 1, 2, ROWS - 1, ROWS, ROWS + 1, 5 * ROWS + 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_histogram_counts_every_value_once(number, dtype):
    values = torch.randn(number, dtype=dtype).exp2() * torch.randint(-80, 40, (number,)).to(dtype).exp2()
    numbers = torch.randint(1, 9, (number,)).double()
    assert statistics._histogram(values, numbers).tolist() == plain_histogram(values, numbers)


def test_a_histogram_leaves_out_zeros_and_what_is_not_finite_and_ends_with_what_is_beyond():
    values = torch.tensor([SPECIAL, [math.nan] * len(SPECIAL)]).T
    found = statistics._histogram(values, torch.tensor([2.0, 3.0], dtype=torch.float64))
    assert found.tolist() == plain_histogram(values, torch.tensor([2.0, 3.0]))
    assert (found[0], found[-1], found[-LOWEST], found.sum()) == (2 * 2, 2, 2, 2 * 4)


def test_a_power_of_two_begins_its_bin():
    powers = torch.arange(LOWEST, LOWEST + BINS).double().exp2().float()
    below = torch.nextafter(powers, torch.zeros(()))
    one = torch.ones((), dtype=torch.float64)
    assert statistics._histogram(powers, one).tolist() == [1.0] * BINS
    assert statistics._histogram(below, one).tolist() == [2.0, *[1.0] * (BINS - 2), 0.0]


# -- scales ------------------------------------------------------------------------------------------------------------


def check_scales(q, values, columns):
    cast, want = read(q, columns), largest_values(q)[:, :columns]
    assert torch.equal(cast.values, values)
    assert torch.equal(cast.spread(cast.limit).expand(want.shape).nan_to_num(-1.0), want.nan_to_num(-1.0))
    counted = plain_histogram(want / cast.fmt.max, torch.ones(()))
    assert cast.scales().tolist() == counted


@pytest.mark.parametrize("spec", QUANTIZERS, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_limits_and_scales_are_those_of_every_element(spec, size):
    q = spec.quantize(source(*size))
    check_scales(q, q.dequantize(torch.float32), size[1])


@pytest.mark.parametrize("spec", QUANTIZERS, ids=str)
def test_scales_of_blocks_that_are_not_finite_or_zero(spec):
    x = source(64, 80)
    x[0, 0], x[40, 70], x[20:36] = math.nan, math.inf, 0.0
    q = spec.quantize(x)
    cast = read(q, 80)
    assert cast.scales().tolist() == plain_histogram(largest_values(q) / cast.fmt.max, torch.ones(()))


@pytest.mark.parametrize("spec", QUANTIZERS, ids=str)
@pytest.mark.parametrize("sizes", [(10, 0, 30), (0, 0, 0), (50, 0, 0), (1, 0, 2)], ids=str)
@pytest.mark.parametrize("columns", [48, 33, 1])
def test_limits_and_scales_of_groups(spec, sizes, columns):
    x = torch.nn.functional.pad(source(50, columns), (0, -columns % 16))
    q = spec.quantize_groups(x, torch.tensor(sizes))
    check_scales(q, q.dequantize(torch.float32)[:, :columns], columns)


@pytest.mark.parametrize("spec", QUANTIZERS, ids=str)
@pytest.mark.parametrize("size", [(0, 32), (0, 33)], ids=str)
def test_a_matrix_without_rows_has_no_scales(spec, size):
    assert read(spec.quantize(torch.zeros(size)), size[1]).scales().tolist() == [0.0] * BINS


# -- casts and results -------------------------------------------------------------------------------------------------


def plain_operand(x, cast):
    """The numbers of a cast, from definitions, in float64."""
    limit = cast.spread(cast.limit).expand(x.shape).double()
    x, values = x.double(), cast.values.double()
    own, both = x.isfinite(), x.isfinite() & values.isfinite()
    kept, seen = x.where(own, 0.0), x.where(both, 0.0)
    rounding = 1 + statistics._half_step(cast.fmt)
    return {
        "calls": 1, "total": x.numel(), "nonfinite": (~own).sum(), "nonzero": (kept != 0).sum(),
        "underflow": ((seen != 0) & (values == 0)).sum(), "compared": 1, "amax": kept.abs().max(),
        "saturated": ((seen.abs() > (limit.float() * rounding).double()) & (limit > 0)).sum(),
        "signal": seen.square().sum(), "noise": (values.where(both, 0.0) - seen).square().sum(),
        "silent": not kept.any() and own.all(),
    }  # fmt: skip


def check_numbers(found, want):
    for name, value in found.items():
        exactly = name not in ("signal", "noise", "cosine", "deficit")
        wanted = float(want.get(name, 0))
        assert value == (wanted if exactly else pytest.approx(wanted, rel=1e-7, abs=1e-12)), name


@pytest.mark.parametrize("spec", QUANTIZERS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["random", "special", "zeros", "turned", "tiny", "huge"])
def test_numbers_of_a_cast(spec, dtype, kind):
    x = torch.randn(70, 77) * {"zeros": 0.0, "tiny": 1e-30, "huge": 1e30}.get(kind, 1.0)
    if kind == "special":
        x.view(-1)[: len(SPECIAL)] = torch.tensor(SPECIAL)
    x = x.to(dtype)
    cast = read(spec.quantize(x), 77)
    if kind == "turned":
        x = -3 * x  # as of a weight that was written to after its cast: saturates, and differs in sign
    found, _ = recorded(statistics.record_operand, x, cast)
    check_numbers(found, plain_operand(x, cast))


def test_codes_without_their_source_have_an_amax_and_scales():
    cast = read(MX().quantize(torch.full((4, 70), 3.0)), 70)
    found, scales = recorded(statistics.record_operand, None, cast)
    assert (found["total"], found["amax"], found["compared"], scales.sum()) == (280, 3.0, 0, 280)


def plain_result(made, exact):
    made, exact = made.double(), exact.double()
    own, both = made.isfinite(), made.isfinite() & exact.isfinite()
    kept, a, b = made.where(own, 0.0), made.where(both, 0.0), exact.where(both, 0.0)
    has = bool(a.any() or b.any())
    product = a.norm() * b.norm()
    cosine = float((a * b).sum() / product) if product > 0 else 0.0
    return {
        "calls": 1, "total": made.numel(), "nonfinite": (~own).sum(), "nonzero": (kept != 0).sum(), "compared": 1,
        "amax": kept.abs().max(), "signal": b.square().sum(), "noise": (a - b).square().sum(), "cosine": cosine,
        "silent": not kept.any() and own.all(), "cosines": has, "deficit": max(has - cosine, 0.0),
    }  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["near", "equal", "apart", "faint", "special", "no shadow", "nothing", "zeros"])
def test_numbers_of_a_result(dtype, kind):
    exact = torch.randn(3, 50, 77)
    made = exact.to(dtype) if kind == "near" else torch.randn(3, 50, 77).to(dtype)
    if kind == "equal":
        exact = made.float()
    elif kind == "faint":  # a cast by a scale far too small
        made = (made * 2.0**-9).to(dtype)
        exact = exact * 1e12
    elif kind == "special":
        made.view(-1)[: len(SPECIAL)] = torch.tensor(SPECIAL).to(dtype)
        exact.view(-1)[3 : 3 + len(SPECIAL)] = torch.tensor(SPECIAL)
    elif kind == "no shadow":
        exact.zero_()
    elif kind == "nothing":
        made.fill_(math.nan)
    elif kind == "zeros":
        made, exact = 0 * made, 0 * exact
    found, _ = recorded(statistics.record_result, made, exact)
    check_numbers(found, plain_result(made, exact))
    if kind == "equal":
        assert found["noise"] == 0


def test_tensors_without_elements():
    for shape in ((0, 16), (4, 0), (0, 0)):
        nothing = torch.zeros(shape)
        found, _ = recorded(statistics.record_result, nothing, nothing)
        assert found == dict.fromkeys(found, 0.0) | {"calls": 1, "compared": 1}
        cast = Cast(nothing, torch.zeros(1, 1), None, octavo.formats.E4M3)
        found, scales = recorded(statistics.record_operand, nothing, cast)
        assert found == dict.fromkeys(found, 0.0) | {"calls": 1, "compared": 1} and not scales.any()


# -- what a call runs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", SHIPPED)
def test_the_shadow_multiplies_once_for_each_result(recipe, monkeypatch):
    made, real = Counter(), operands.product

    def noted(a, b, *rest):
        made[a.dtype if isinstance(a, torch.Tensor) else "codes"] += 1
        return real(a, b, *rest)

    layer = octavo.Linear(64, 32, recipe=recipe, dtype=torch.bfloat16)
    x = torch.randn(16, 64, dtype=torch.bfloat16, requires_grad=True)
    monkeypatch.setattr(operands, "product", noted)
    with octavo.inspect(layer):
        layer(x).square().mean().backward()
    assert made[torch.float32] == 3
    assert made["codes"] + made[torch.bfloat16] == 5  # y, dx, dw; and for dw once more, which needs a forward


@pytest.mark.parametrize("recipe", SHIPPED)
@pytest.mark.parametrize("grouped", [False, True])
def test_the_weight_gradient_that_is_measured_has_the_bits_of_the_layer(recipe, grouped, monkeypatch):
    seen, real = {}, measure.record_result

    def noted(stats, tensor, made, exact):
        seen[tensor] = made
        real(stats, tensor, made, exact)

    monkeypatch.setattr(measure, "record_result", noted)
    layer, rest = octavo.Linear(64, 48, recipe=recipe), ()
    if grouped:
        layer, rest = octavo.GroupedLinear(2, 64, 48, recipe=recipe), (torch.tensor([20, 7]),)
    for _ in range(2):
        layer.zero_grad()
        with octavo.inspect(layer):
            layer(torch.randn(30, 64, requires_grad=True), *rest).square().mean().backward()
        assert torch.equal(seen["dw"], layer.weight.grad)
        octavo.step(layer)
