"""Codes turned around: column codes made from row codes have the bytes of a second cast."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from octavo import backend
from octavo.formats import E5M2
from octavo.quant import MX, NVFP4, Block1D, Block2D, Rowwise, Tensorwise
from octavo.quant.byte_transpose import reference, transpose_bytes
from octavo.quant.grouped import quantize_groups, transposed
from octavo.quant.groups import equal, split
from octavo.quant.quantizer import CastArgs, TensorProto
from tests.support.same_tensors import assert_same, raw
from tests.support.waiting import no_waiting

SQUARE = [
    Tensorwise(), Tensorwise(E5M2, pow2=True), Block2D(), Block2D(E5M2, "fp32"), MX(square=True), NVFP4(square=True),
]  # fmt: skip
WEIGHTS = SQUARE[:4]
SHAPES = [(128, 128), (256, 384), (16, 48), (100, 260), (33, 7), (1, 300), (1, 1)]


def random_bytes(rows: int, columns: int) -> torch.Tensor:
    return torch.randint(0, 256, (rows, columns), dtype=torch.uint8)


@pytest.mark.parametrize("shape", [*SHAPES, (0, 16), (16, 0)], ids=str)
def test_every_byte_goes_to_its_place(shape):
    codes = random_bytes(*shape)
    out = torch.empty(shape[::-1], dtype=torch.uint8)
    transpose_bytes(codes, out)
    assert out.tolist() == [[int(codes[i, j]) for i in range(shape[0])] for j in range(shape[1])]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("spec", SQUARE, ids=str)
def test_a_transpose_of_codes_writes_what_a_second_cast_writes(spec, shape, dtype):
    w = torch.randn(shape).to(dtype)
    assert_same(spec.quantize(w).transpose(), spec.quantize(w, axis=0))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, 1e-45, 3e38], ids=str)
@pytest.mark.parametrize("spec", WEIGHTS, ids=str)
def test_values_that_are_no_numbers(spec, value):
    w = torch.randn(200, 300)
    w[7, 130:] = value
    assert_same(spec.quantize(w).transpose(), spec.quantize(w, axis=0))


def test_a_given_multiplier():
    """Delayed scaling: the codes that forward made stand for the multiplier of forward, whatever came after."""
    w, inverse_scale = torch.randn(64, 48), torch.tensor([0.37])
    row, column = Tensorwise().quantize_both(w, inverse_scale=inverse_scale)
    assert_same(row.transpose(), column)


@pytest.mark.parametrize("size", [1, 100, 128, 300])
@pytest.mark.parametrize("spec", SQUARE, ids=str)
def test_stacked_weights(spec, size):
    """The weights of many experts at once, both ways."""
    stack, groups = torch.randn(4 * size, 272), equal(4, size, torch.device("cpu"))
    row, column = quantize_groups(stack, spec, spec, groups)
    assert_same(transposed(row).q, column.q)
    assert_same(transposed(column).q, row.q)
    assert (transposed(row).orientation, transposed(column).orientation) == ("column", "row")


@pytest.mark.parametrize("spec", SQUARE, ids=str)
def test_ragged_groups(spec):
    x, groups = torch.randn(300, 150), split(torch.tensor([65, 128, 0, 97]), 300)
    row, column = quantize_groups(x, spec, spec, groups)
    for found, want in zip(transposed(row).members(), column.members(), strict=True):
        assert_same(found, want)


def test_multipliers_of_stacked_weights():
    stack, groups = torch.randn(300, 64), equal(3, 100, torch.device("cpu"))
    row, column = quantize_groups(
        stack, Tensorwise(), Tensorwise(), groups, CastArgs(inverse_scale=torch.rand(3) + 0.1)
    )
    assert_same(transposed(row).q, column.q)


@pytest.mark.parametrize("spec", [Block1D(), Rowwise(), MX(), NVFP4()], ids=str)
def test_long_blocks_are_refused(spec):
    x, groups = torch.randn(300, 64), equal(3, 100, torch.device("cpu"))
    row, _ = quantize_groups(x, spec, None, groups)
    with pytest.raises(TypeError, match="transposing its codes would quantize twice"):
        transposed(row)
    with pytest.raises(TypeError, match="transposing its codes would quantize twice"):
        spec.quantize(x).transpose()


def test_a_tracer_sees_the_shapes():
    with FakeTensorMode():
        q = Block2D().proto(TensorProto.of(torch.empty(256, 384))).empty()
        turned = q.transpose()
        assert (turned.codes.shape, turned.scale.shape) == ((384, 256), (3, 2))


def test_compiled_code_turns_bytes_around(fresh_compiler):
    def turned(codes: torch.Tensor) -> torch.Tensor:
        out = torch.empty(codes.shape[::-1], dtype=torch.uint8)
        transpose_bytes(codes, out)
        return out

    codes = random_bytes(36, 20)
    assert torch.equal(torch.compile(turned, fullgraph=True, backend="aot_eager")(codes), codes.T)


# -- on the device -----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES, (4, 4), (4, 4096), (4096, 12), (132, 516), (0, 16), (16, 0)], ids=str)
def test_every_configuration_writes_the_reference_bytes(shape):
    from octavo.quant.byte_transpose import triton as kernel

    codes = random_bytes(*shape).cuda()
    want = torch.empty(shape[::-1], dtype=torch.uint8, device="cuda")
    reference.transpose(codes, want)
    for config in kernel.CONFIGS:
        out = torch.full_like(want, 0xA5)
        kernel.transpose(codes, out, config)
        assert torch.equal(out, want), config


@pytest.mark.gpu
def test_memory_without_alignment_and_with_strides():
    base = random_bytes(65, 260).cuda().view(-1)
    for first in (1, 2, 4, 8, 16):
        codes = base[first : first + 64 * 256].view(64, 256)
        out = torch.empty(256, 64, dtype=torch.uint8, device="cuda")
        transpose_bytes(codes, out)
        assert torch.equal(out, codes.T), first
    strided = base.view(65, 260)[:64, :256]
    transpose_bytes(strided, out)
    assert torch.equal(out, strided.T)


@pytest.mark.gpu
@pytest.mark.parametrize("spec", SQUARE, ids=str)
def test_a_transpose_of_codes_writes_what_a_second_cast_writes_on_the_device(spec):
    for shape in SHAPES:
        w = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
        row, want = spec.quantize(w), spec.quantize(w, axis=0)
        turned = row.transpose()
        with backend.use("reference"):
            by_torch = row.transpose()
        for a, b, c in zip(turned.tensors(), by_torch.tensors(), want.tensors(), strict=True):
            assert torch.equal(raw(a), raw(c)), shape
            assert torch.equal(raw(b), raw(c)), shape


@pytest.mark.gpu
@pytest.mark.gpu_smoke
@pytest.mark.parametrize("spec", WEIGHTS, ids=str)
def test_stacked_weights_on_the_device(spec):
    stack, groups = torch.randn(4 * 200, 272, device="cuda"), equal(4, 200, torch.device("cuda"))
    row, column = quantize_groups(stack, spec, spec, groups)
    transposed(row)  # compiles
    with no_waiting():
        found = transposed(row).q
    assert torch.equal(found.codes.view(torch.uint8), column.q.codes.view(torch.uint8))
    assert torch.equal(found.scale, column.q.scale)


@pytest.mark.gpu
@pytest.mark.usefixtures("large_memory")
def test_offsets_beyond_two_to_the_31():
    codes = torch.zeros(2**16 + 128, 2**15 + 128, dtype=torch.uint8, device="cuda")
    codes[-130:, -130:] = random_bytes(130, 130).cuda()
    out = torch.empty(codes.shape[::-1], dtype=torch.uint8, device="cuda")
    transpose_bytes(codes, out)
    assert torch.equal(out[-200:, -200:], codes[-200:, -200:].T)
    assert not out[:-200].any()


@pytest.mark.parametrize("spec", WEIGHTS, ids=str)
def test_column_codes_are_the_codes_of_the_transposed_matrix(spec):
    w = torch.randn(24, 40)
    assert_same(spec.quantize(w).transpose(), spec.quantize(w.T.contiguous()))
