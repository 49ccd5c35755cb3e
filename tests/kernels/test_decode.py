"""Decoding of codes to bfloat16: to the bit on a CPU, by every code and scale; the same bits from the GPU's kernel."""

import pytest
import torch

from octavo.formats import E2M1, E4M3, E5M2, pack_nibbles
from octavo.kernels.decode import decode, is_worth_it, reference
from octavo.kernels.grouped_gemm import hopper_support
from octavo.quant import MX, NVFP4, QTensor
from octavo.quant.grouped import quantize_groups
from octavo.quant.groups import split
from tests.support.ragged_groups import SPLITS

LARGEST = torch.finfo(torch.bfloat16).max
SPECS = {
    "mx": MX(),
    "mx square": MX(square=True),
    "mx e5m2": MX(E5M2),
    "nvfp4": NVFP4(),
    "nvfp4 square": NVFP4(square=True),
    "nvfp4 rht": NVFP4(rht=True),
}
every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def assert_same_bits(got: torch.Tensor, want: torch.Tensor) -> None:
    """Compares bits; all NaNs count as equal."""
    assert got.dtype == want.dtype == torch.bfloat16
    assert got.shape == want.shape
    same = (got.view(torch.int16) == want.view(torch.int16)) | (got.isnan() & want.isnan())
    assert same.all(), f"{(~same).sum()} of {got.numel()} differ"


def table(spec, device: str = "cpu") -> QTensor:
    """A QTensor with every code under every scale: a row for each scale byte, and for 16 or 32 of them if square."""
    height, reach = spec.block
    codes = torch.arange(256).to(torch.uint8)
    if spec.fmt == E2M1:
        codes = pack_nibbles(torch.arange(256).to(torch.uint8) % 16)
    rows = codes.expand(256 * height, -1).contiguous().view(spec.fmt.dtype)
    scale = torch.arange(256).to(torch.uint8)[:, None].expand(-1, 256 // reach)
    strides = (256 // reach, 1) if spec.square else (1, 256)
    scale = torch.empty_strided(scale.shape, strides, dtype=torch.uint8).copy_(scale)
    level2 = torch.full((1,), 3.0, device=device) if spec.two_level else None
    return QTensor(rows.to(device), scale.to(device), spec, (rows.shape[0], 256), torch.bfloat16, level2)


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize(("fmt", "lowest", "highest"), [(E4M3, 3, 246), (E5M2, 10, 239)], ids=str)
def test_every_code_by_every_power_of_two(fmt, lowest, highest, square):
    """Exact from one byte to another; rounded below, and above a finite code is never beyond the largest value."""
    spec = MX(fmt, square=square)
    found = decode(table(spec)).view(256, -1, 256)
    values = fmt.decode(torch.arange(256).to(torch.uint8)).double()
    for byte in range(255):
        exact = values * 2.0 ** (byte - 127)
        want = torch.where(values.isinf(), exact, exact.clamp(-LARGEST, LARGEST)).float().bfloat16()
        for row in found[byte]:
            assert_same_bits(row, want)
        finite = values.isfinite()
        assert torch.equal(want[finite].double(), exact[finite]) == (lowest <= byte <= highest)
    assert found[255].isnan().all()


@pytest.mark.parametrize("square", [False, True])
def test_every_four_bit_code_by_every_scale_is_exact(square):
    found = decode(table(NVFP4(square=square))).view(256, -1, 256)
    values = E2M1.decode(torch.arange(256).to(torch.uint8) % 16).double()
    for byte in range(256):
        exact = values * E4M3.decode(torch.tensor([byte], dtype=torch.uint8)).double()
        for row in found[byte]:
            assert_same_bits(row, exact.bfloat16())
            assert torch.equal(row.double().nan_to_num(-1), exact.nan_to_num(-1))


def test_edges_of_the_scale_bytes():
    q = MX().quantize(torch.ones(8, 32))
    q.codes.view(torch.uint8).fill_(0x7E)  # 448
    q.scale[:, 0] = torch.tensor([0, 1, 2, 3, 246, 247, 254, 255], dtype=torch.uint8)
    first = decode(q)[:, 0].double()
    want = [448 * 2.0 ** (b - 127) for b in (0, 1, 2, 3, 246)]
    assert first[:5].tolist() == want
    assert first[5:7].tolist() == [LARGEST, LARGEST]
    assert first[7].isnan()
    q.codes.view(torch.uint8).fill_(0x01)  # 2^-9
    assert decode(q)[:4, 0].tolist() == [0.0, 0.0, 0.0, 2.0**-133]  # byte 2: a tie, to even


@every_spec
@pytest.mark.parametrize(("m", "k"), [(1, 1), (33, 65), (70, 300), (64, 512), (5, 31), (0, 40), (3, 0)])
def test_values_are_those_of_dequantize(spec, m, k):
    q = spec.quantize(torch.randn(m, k) * torch.exp2(torch.randint(-20, 20, (m, 1))))
    found = decode(q)
    assert found.shape == (m, q.codes.shape[1] * spec.fmt.packed)
    if not spec.two_level:
        assert_same_bits(found, q.dequantize(torch.bfloat16))
    elif m and k:
        values = spec._rotated_back(found.float() * q.global_scale)[:, :k]
        torch.testing.assert_close(values, q.dequantize(torch.float32), rtol=1e-6, atol=0.0 if not spec.rht else 1e-3)


@every_spec
@pytest.mark.parametrize("sizes", SPLITS, ids=str)
def test_groups_are_packed(spec, sizes):
    rows = sum(sizes) + 40
    groups = split(torch.tensor(sizes), rows)
    row, _ = quantize_groups(torch.randn(rows, 75), spec, None, groups)
    found = decode(row.q, groups)
    assert found.shape[0] == rows
    assert_same_bits(found[: sum(sizes)], torch.cat([decode(q) for q in row.members()]))


def test_a_few_rows_are_not_worth_a_decoding(monkeypatch):
    monkeypatch.setattr(hopper_support, "is_hopper", lambda device: True)
    monkeypatch.setattr(hopper_support, "_PROBES", {"decoded products": lambda device: 0.0})
    monkeypatch.setattr(hopper_support, "_verdicts", {})
    for spec in (MX(), NVFP4()):
        q = spec.quantize(torch.randn(4, 64))
        assert [is_worth_it(q, m, n) for m, n in ((65, 65), (64, 4096), (4096, 64), (1, 1))] == [True] + [False] * 3
    assert not is_worth_it(MX().quantize(torch.randn(4, 0)), 65, 65)
    monkeypatch.setattr(hopper_support, "is_hopper", lambda device: False)
    assert not is_worth_it(MX().quantize(torch.randn(4, 64)), 4096, 4096)


# -- on the device -----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.gpu_smoke
@every_spec
def test_every_code_and_scale_on_the_device(spec):
    q = table(spec, "cuda")
    assert_same_bits(decode(q), reference.decode(q, None))


@pytest.mark.gpu
@every_spec
@pytest.mark.parametrize(("m", "k"), [(1, 1), (33, 65), (70, 300), (64, 512), (5, 31), (0, 40), (3, 0), (1000, 4100)])
def test_any_shape_on_the_device(spec, m, k):
    """Rows begin where a copy by tiles can begin, whatever K is."""
    q = spec.quantize(torch.randn(m, k, device="cuda") * torch.exp2(torch.randint(-20, 20, (m, 1), device="cuda")))
    found = decode(q)
    assert_same_bits(found, reference.decode(q, None))
    assert k == 0 or (found.stride(0) % 8 == 0 and found.data_ptr() % 16 == 0)


@pytest.mark.gpu
@every_spec
@pytest.mark.parametrize("sizes", SPLITS, ids=str)
def test_groups_on_the_device(spec, sizes):
    rows = sum(sizes) + 40
    groups = split(torch.tensor(sizes, device="cuda"), rows)
    x = torch.randn(rows, 300, device="cuda", dtype=torch.bfloat16)
    row, column = quantize_groups(x, spec, spec, groups)
    assert_same_bits(decode(row.q, groups)[: sum(sizes)], reference.decode(row.q, groups)[: sum(sizes)])
    used = 128 * int(groups.block[-1])
    assert_same_bits(decode(column.q)[:, :used], reference.decode(column.q, None)[:, :used])


@pytest.mark.gpu
@every_spec
def test_rows_that_pad_a_group_decode_to_zero(spec):
    """A contraction over rows goes over whole blocks of 128 of them."""
    sizes = [65, 0, 130, 1]
    groups = split(torch.tensor(sizes, device="cuda"), 196)
    _, column = quantize_groups(torch.randn(196, 80, device="cuda", dtype=torch.bfloat16), None, spec, groups)
    found, reach = decode(column.q), spec.block[1]
    for g, size in enumerate(sizes):
        first, end = 128 * int(groups.block[g]), 128 * int(groups.block[g + 1])
        assert not found[:, first + -(-size // reach) * reach : end].any()


@pytest.mark.gpu
@pytest.mark.usefixtures("large_memory")
def test_a_large_matrix_on_the_device():
    """More than 2^31 values: offsets have 64 bits."""
    m, k = 2**16 + 32, 2**15 + 64
    codes = torch.zeros(m, k, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    codes.view(torch.uint8)[-1] = 0x38  # 1.0
    scale = torch.full((k // 32, m), 127, dtype=torch.uint8, device="cuda").T
    q = QTensor(codes, scale, MX(), (m, k), torch.bfloat16)
    found = decode(q)
    assert (found[-1] == 1).all() and not found[:-1].any()
