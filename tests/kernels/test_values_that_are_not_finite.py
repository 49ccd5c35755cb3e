"""Infinite values and NaN in codes: an emulated product, dense, in groups or decoded first, has them where the
reference has them."""

import pytest
import torch

from octavo import backend
from octavo.formats import E4M3, E5M2
from octavo.kernels import grouped_gemm
from octavo.kernels.decode import decode
from octavo.kernels.decode import reference as decode_reference
from octavo.kernels.gemm import gemm
from octavo.kernels.gemm import reference as gemm_reference
from octavo.quant import MX, NVFP4, Block1D, Block2D, Rowwise, Tensorwise
from octavo.quant.grouped import quantize_groups
from octavo.quant.groups import equal, split

INF, NAN = float("inf"), float("nan")
VALUES = {"inf": INF, "-inf": -INF, "nan": NAN}
BYTES = {E5M2: {"inf": 0x7C, "-inf": 0xFC, "nan": 0x7F}, E4M3: {"nan": 0x7F}}
SCHEMES = {
    "tensorwise": (Tensorwise(), Tensorwise()),
    "tensorwise e5m2": (Tensorwise(E5M2), Tensorwise()),
    "rowwise e5m2": (Rowwise(E5M2), Rowwise()),
    "block": (Block1D(), Block2D()),
    "block e5m2": (Block1D(E5M2), Block2D()),
    "mx": (MX(), MX()),
    "mx e5m2": (MX(E5M2), MX()),
    "nvfp4": (NVFP4(), NVFP4()),
}
ROW, COLUMN = 3, 5


def assert_alike(got, want):
    """Infinite values and NaN are in the same places, and the rest is close."""
    for what in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(what(got), what(want)), what.__name__
    finite = torch.isfinite(want)
    assert torch.allclose(got[finite], want[finite], rtol=0.02, atol=0.02 * float(want[finite].abs().mean()) + 1e-30)


def with_byte(q, byte):
    """q with one code replaced."""
    q.codes.view(torch.uint8)[ROW, COLUMN] = byte
    return q


CODES = [
    pytest.param(name, side, byte, id=f"{name}-{side}-{value}")
    for name, pair in SCHEMES.items()
    for side, spec in zip("ab", pair, strict=True)
    for value, byte in BYTES.get(spec.fmt, {}).items()
]


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "side", "byte"), CODES)
@pytest.mark.parametrize("rows", [48, 160], ids=["as they are", "large enough to be decoded"])
def test_a_code_that_is_not_finite_reaches_the_product(name, side, byte, rows):
    a_spec, b_spec = SCHEMES[name]
    a, b = (spec.quantize(torch.randn(n, 256, device="cuda").bfloat16()) for spec, n in ((a_spec, rows), (b_spec, 96)))
    with_byte(a if side == "a" else b, byte)
    with backend.use("emulated"):
        got = gemm(a, b, out_dtype=torch.float32)
    want = gemm_reference.gemm(a, b, torch.float32, None)
    assert not torch.isfinite(want).all()
    assert_alike(got, want)


@pytest.mark.parametrize("spec", [MX(E5M2), MX(), NVFP4()], ids=str)
@pytest.mark.parametrize("byte", BYTES[E5M2].values(), ids=list(BYTES[E5M2]))
def test_decoding_keeps_a_code_of_inf(spec, byte):
    q = spec.quantize(torch.randn(32, 64))
    if spec.fmt == E5M2:
        with_byte(q, byte)
    values, codes = decode_reference.decode(q, None).float(), spec.code_values(q)
    assert torch.equal(torch.isinf(values), torch.isinf(codes))
    assert torch.equal(torch.isnan(values), torch.isnan(codes))


@pytest.mark.gpu
@pytest.mark.parametrize("byte", BYTES[E5M2].values(), ids=list(BYTES[E5M2]))
def test_decoding_on_a_gpu_keeps_a_code_of_inf(byte):
    q = with_byte(MX(E5M2).quantize(torch.randn(40, 96, device="cuda").bfloat16()), byte)
    got, want = decode(q), decode_reference.decode(q, None)
    assert torch.equal(got.contiguous().view(torch.int16), want.contiguous().view(torch.int16)) or byte == 0x7F
    assert torch.equal(got.isnan(), want.isnan())


SIZES, N, K = [70, 0, 58], 128, 256


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "side", "byte"), CODES)
def test_a_code_that_is_not_finite_reaches_the_rows_of_its_group(name, side, byte):
    a_spec, b_spec = SCHEMES[name]
    groups = split(torch.tensor(SIZES, device="cuda"), sum(SIZES))
    x, w = torch.randn(sum(SIZES), K, device="cuda").bfloat16(), torch.randn(3 * N, K, device="cuda").bfloat16()
    a, _ = quantize_groups(x, a_spec, None, groups)
    b, _ = quantize_groups(w, b_spec, None, equal(3, N, w.device))
    with_byte(a.q if side == "a" else b.q, byte)
    made = []
    for way in ("emulated", "reference"):
        out = torch.zeros(sum(SIZES), N, device="cuda")
        with backend.use(way):
            made.append(grouped_gemm.rows(a, b.q, out, height=N))
    assert not torch.isfinite(made[1]).all()
    assert_alike(*made)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "side", "byte"), CODES)
def test_a_code_that_is_not_finite_reaches_the_dw_of_its_group(name, side, byte):
    a_spec, b_spec = SCHEMES[name]
    b_spec = type(a_spec)() if name.startswith("block") else b_spec  # columns of x have blocks of 1x128 too
    groups = split(torch.tensor(SIZES, device="cuda"), sum(SIZES))
    x, dy = (torch.randn(sum(SIZES), n, device="cuda").bfloat16() for n in (K, N))
    _, a = quantize_groups(dy, None, a_spec, groups)
    _, b = quantize_groups(x, None, b_spec, groups)
    with_byte(a.q if side == "a" else b.q, byte)
    made = []
    for way in ("emulated", "reference"):
        with backend.use(way):
            made.append(grouped_gemm.grouped_wgrad(a, b, torch.zeros(3, N, K, device="cuda")))
    assert not torch.isfinite(made[1]).all()
    assert_alike(*made)


@pytest.mark.gpu
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("where", ["x", "w", "dy"])
@pytest.mark.parametrize("recipe", ["fp8-delayed", "fp8-current", "fp8-rowwise", "fp8-block", "mxfp8", "nvfp4"])
def test_a_layer_shows_a_value_that_is_not_finite_as_the_reference_does(recipe, where, value):
    """The scales of fp8-delayed are known from steps before: Inf then has a code of its own in E5M2."""
    import copy

    import octavo

    torch.manual_seed(0)
    layer = octavo.Linear(256, 128, recipe=recipe, device="cuda", dtype=torch.bfloat16)
    x, dy = (torch.randn(160, n, device="cuda").bfloat16() for n in (256, 128))
    made = []
    for way in ("emulated", "reference"):
        own = copy.deepcopy(layer)
        with backend.use(way):
            for _ in range(2):
                own(x.clone().requires_grad_()).backward(dy)
                octavo.step(own)
            own.zero_grad()
            leaf, grad = x.clone(), dy.clone()
            if where == "w":
                with torch.no_grad():
                    own.weight[ROW, COLUMN] = VALUES[value]
            else:
                (leaf if where == "x" else grad)[ROW, COLUMN] = VALUES[value]
            leaf.requires_grad_()
            y = own(leaf)
            y.backward(grad)
        made.append([t.float() for t in (y.detach(), leaf.grad, own.weight.grad)])
    assert any(not torch.isfinite(t).all() for t in made[1])
    for got, want in zip(*made, strict=True):
        assert torch.equal(torch.isfinite(got), torch.isfinite(want))
