"""GroupedTensor.of: codes that were cast elsewhere, in groups, against a cast in these groups; and rows as bytes."""

import pytest
import torch

import octavo
from octavo.errors import Unsupported
from octavo.quant import MX, NVFP4, Block1D, Block2D, Rowwise, Tensorwise
from tests.support.linear_oracle import assert_same, spiky

SPECS = [Rowwise(), Block1D(), Block1D(scale="fp32"), MX()]
SIZES = torch.tensor([130, 0, 3, 128])


def live(grouped):
    """The tensors inside, but for what lies past the last group, which is undefined."""
    end = int(grouped.groups.block[-1]) * 128
    q = grouped.q
    scale = q.scale if q.spec.block[0] is None else q.scale[:end]
    return [q.codes[:end].view(torch.uint8), scale, *grouped.groups.tensors()]


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize(("sizes", "k"), [(SIZES, 256), (SIZES, 100), (SIZES - SIZES, 64), (SIZES // 2, 160)])
def test_codes_of_rows_are_those_of_a_cast_in_groups(spec, sizes, k):
    x = spiky(270, k, seed=3, dtype=torch.bfloat16)
    q = spec.quantize(x)
    codes, scale = octavo.quant.bytes_as_rows(spec, octavo.quant.rows_as_bytes(q), k)
    found, want = octavo.GroupedTensor.of(spec, codes, scale, sizes), spec.quantize_groups(x, sizes)
    for a, b in zip(live(found), live(want), strict=True):
        assert_same(a, b)
    assert found.q.scale.stride() == want.q.scale.stride() and found.shape == want.shape
    assert_same(found.dequantize(), want.dequantize())


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_rows_are_taken_in_the_order_of_their_source(spec):
    x, source = spiky(40, 96, seed=4, dtype=torch.bfloat16), torch.randint(-1, 40, (270,), dtype=torch.int32)
    q = spec.quantize(x)
    found = octavo.GroupedTensor.of(spec, q.codes, q.scale, SIZES, source=source)
    assert_same(found.dequantize(), spec.quantize_groups(x, SIZES, source=source).dequantize())


def test_one_scale_for_each_group_and_a_global_one():
    x = spiky(270, 96, seed=5)
    for spec in (Tensorwise(), NVFP4()):
        want = spec.quantize_groups(x, SIZES)
        codes, scales, last = [], [], 0
        for q in want.members():
            codes.append(q.codes.view(torch.uint8))
            scales.append(q.scale)
            last += q.shape[0]
        tail = torch.zeros(270 - last, codes[0].shape[1], dtype=torch.uint8)
        scale = want.q.scale if spec.block[0] is None else torch.cat([*scales, torch.zeros(len(tail), 6).byte()])
        found = octavo.GroupedTensor.of(
            spec, torch.cat([*codes, tail]), scale, SIZES, dtype=torch.float32, global_scale=want.q.global_scale
        )
        assert_same(found.dequantize(), want.dequantize())


def test_no_row_arrived():
    spec = Block1D()
    found = octavo.GroupedTensor.of(spec, torch.empty(0, 64).byte(), torch.empty(0, 1), torch.tensor([0, 0]))
    assert found.shape == (0, 64) and found.dequantize().shape == (0, 64)
    source = torch.full((5,), -1, dtype=torch.int32)
    found = octavo.GroupedTensor.of(
        spec, torch.empty(0, 64).byte(), torch.empty(0, 1), torch.tensor([3, 2]), source=source
    )
    assert_same(found.dequantize(), torch.zeros(5, 64, dtype=torch.bfloat16))


@pytest.mark.usefixtures("fresh_compiler")
def test_a_graph_has_the_bits_of_eager():
    spec, sizes = Block1D(), torch.tensor([9, 0, 20])
    layer = octavo.GroupedLinear(3, 64, 32, recipe="fp8-block", bias=False)
    source = torch.randperm(30).int()

    def call(codes, scale, sizes):
        return layer(octavo.GroupedTensor.of(spec, codes, scale, sizes, source=source, dtype=torch.float32))

    q = spec.quantize(spiky(30, 64, seed=6))
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert_same(compiled(q.codes.view(torch.uint8), q.scale, sizes), call(q.codes, q.scale, sizes))


def test_a_layer_multiplies_the_codes_and_the_anchor_gets_dx():
    spec, x = Block1D(), spiky(30, 64, seed=7)
    layer, sizes = octavo.GroupedLinear(2, 64, 32, recipe="fp8-block", bias=False), torch.tensor([12, 18])
    leaf = torch.zeros(1, requires_grad=True)
    q = spec.quantize(x)
    grouped = octavo.GroupedTensor.of(spec, q.codes, q.scale, sizes, dtype=x.dtype, anchor=leaf.expand(30, 64))
    y = layer(grouped)
    assert_same(y, layer(x, sizes))
    y.sum().backward()
    assert leaf.grad.abs().sum() > 0


CODES, SCALE = torch.zeros(4, 64, dtype=torch.uint8), torch.zeros(4, 1)
REFUSED = {
    "no quantizer": (("fp8-block", CODES, SCALE), {}, "takes a quantizer, .* got str"),
    "square blocks": ((Block2D(), CODES, SCALE), {}, "covers 128 rows"),
    "values": ((Block1D(), CODES.float(), SCALE), {}, "rows of torch.float8_e4m3fn or uint8, got torch.float32"),
    "scales of other rows": ((Block1D(), CODES, SCALE[:3]), {}, r"torch.float32 \(4, 1\), got torch.float32 \(3, 1\)"),
    "scales of another format": ((MX(), CODES, SCALE), {}, r"torch.uint8 \(4, 2\), got torch.float32"),
    "no global scale": ((NVFP4(), CODES, torch.zeros(4, 8).byte()), {}, "a float32 global scale for each group"),
    "a source in floats": ((Block1D(), CODES, SCALE), {"source": torch.zeros(4)}, "int32 .rows., got torch.float32"),
    "an anchor of other rows": (
        (Block1D(), CODES, SCALE), {"anchor": torch.zeros(1).expand(5, 64)}, r"\(4, 64\), got \(5, 64\)",
    ),
    "sizes on another device": ((Block1D(), CODES.to("meta"), SCALE), {}, "codes are on meta and scale on cpu"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(case):
    given, more, message = REFUSED[case]
    with pytest.raises(Unsupported, match=message):
        octavo.GroupedTensor.of(*given, torch.tensor([2, 2]), **more)


def test_rows_that_share_a_scale_do_not_travel_alone():
    with pytest.raises(Unsupported, match="share a scale, and do not travel alone"):
        octavo.quant.rows_as_bytes(Tensorwise().quantize(torch.ones(3, 16)))
