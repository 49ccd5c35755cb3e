"""Norms into codes: the same bytes as the normalised rows written and then cast."""

import pytest
import torch

from octavo import backend
from octavo.errors import UnsupportedShape
from octavo.formats import E4M3, E5M2
from octavo.kernels import norm as norms
from octavo.kernels.norm import Residual
from octavo.kernels.norm import cast as kernel
from octavo.quant import MX, Block1D, Block2D, Rowwise, Tensorwise
from octavo.quant.casts import fill_pair
from octavo.quant.quantizer import CastArgs
from tests.support.filled_codes import DTYPES, ODD, SPECS, assert_same_bytes, contents, empty_pair, given_to
from tests.support.norm_operands import NORMS, operands
from tests.support.pairs import pairs, triples

every = pytest.mark.parametrize("name", NORMS)


def check(norm, x, weight, bias, spec, sides="rc", extra=None, **settings):
    """Codes, scales, the amax observed, mean and rstd; with `extra` the sum of x and extra too."""
    results = []
    for fused in (True, False):
        pair, given = empty_pair(spec, *x.shape, x.dtype, x.device, sides), given_to(spec, x.device, 63.0)
        z = None if extra is None else torch.full(x.shape, 7.0, dtype=x.dtype, device=x.device)
        residual = None if z is None else Residual(extra, z)
        if not fused:
            y, mean, rstd = norms.forward(norm, x if z is None else torch.add(x, extra, out=z), weight, bias)
            fill_pair(y, pair, given)
        elif settings:
            twin = backend.implementation("octavo.kernels.norm.cast", x)
            mean, rstd = twin.forward(norm, x, weight, bias, pair, given, residual, **settings)
        else:
            mean, rstd = kernel.forward(norm, x, weight, bias, pair, given, residual)
        assert (mean is None) == (not norm.centers)
        found = [t.cpu().view(torch.uint8) for t in (mean, rstd, z) if t is not None]
        results.append([*contents(pair, given), *found])
    assert_same_bytes(*results, what=f"{spec} {sides}")


# -- anywhere ----------------------------------------------------------------------------------------------------------


@every
@pytest.mark.parametrize("spec", [*SPECS, MX(), Rowwise()], ids=str)
def test_fills_what_a_cast_of_y_would(name, spec):
    x, _, weight, bias = operands(NORMS[name], 37, 96, torch.bfloat16)
    for sides in ("r", "c", "rc"):
        check(NORMS[name], x, weight, bias, spec, sides)


@every
@pytest.mark.parametrize("spec", [*SPECS, MX(), Rowwise()], ids=str)
def test_fills_what_a_cast_of_the_norm_of_a_sum_would(name, spec):
    for dtype in DTYPES:
        x, extra, weight, bias = operands(NORMS[name], 37, 96, dtype)
        check(NORMS[name], x, weight, bias, spec, extra=extra)


@every
@pytest.mark.parametrize("m", [0, 1])
def test_hardly_any_rows(name, m):
    x, extra, weight, bias = operands(NORMS[name], m, 8, torch.bfloat16)
    for spec in (Tensorwise(), Block1D()):
        check(NORMS[name], x, weight, bias, spec)
        check(NORMS[name], x, weight, bias, spec, extra=extra)


def test_codes_of_another_shape_are_refused():
    x, _, weight, bias = operands(NORMS["rms"], 5, 16, torch.bfloat16)
    pair = empty_pair(Block1D(), 16, 5, x.dtype, "cpu", "c")
    with pytest.raises(UnsupportedShape, match="y is 5 x 16"):
        kernel.forward(NORMS["rms"], x, weight, bias, pair, CastArgs())


def test_what_is_one_pass():
    half = torch.bfloat16
    for spec in SPECS:
        assert kernel.fuses(spec, spec, spec.takes_inverse_scale, half) == ""
    assert "finds its scale from all of the normalised rows" in kernel.fuses(Tensorwise(), None, False, half)
    assert "no kernel that casts the normalised rows" in kernel.fuses(MX(), MX(), False, half)


# -- on a GPU ----------------------------------------------------------------------------------------------------------

WIDTHS = [(1, 37), (37, 1), (130, 130), (257, 1008), (300, 4096), (41, 9000)]  # rows of the last are read by parts


@pytest.mark.gpu
@pairs(size=WIDTHS, name=list(NORMS), spec=[Tensorwise(), Block1D(), Block2D(E4M3, "fp32")])
def test_triton_fills_the_same_bytes(name, size, spec):
    x, _, weight, bias = operands(NORMS[name], *size, torch.bfloat16, "cuda")
    check(NORMS[name], x, weight, bias, spec)


def odd_operands(norm, dtype):
    x, _, weight, bias = operands(norm, 130, 272, dtype, "cuda")
    for i, value in enumerate(ODD):
        x[11 * i, 5 * i] = torch.tensor(value).to(dtype)
    return x, weight, bias


@pytest.mark.gpu
@triples(spec=SPECS, dtype=DTYPES, sides=["r", "c", "rc"], name=["layer", "rms"])
def test_triton_fills_the_same_bytes_for_every_side_and_dtype(name, spec, dtype, sides):
    check(NORMS[name], *odd_operands(NORMS[name], dtype), spec, sides)


LAYOUTS = {
    "turned": lambda x, weight, bias: (x.T.contiguous().T, weight, bias),
    "cut": lambda x, *vectors: (x[:, 3:260], *(None if w is None else w[3:260].contiguous() for w in vectors)),
    "without weight": lambda x, weight, bias: (x, None, bias),
    "without bias": lambda x, weight, bias: (x, weight, None),
}


@pytest.mark.gpu
@pairs(spec=SPECS, layout=LAYOUTS, name=["layer", "rms"])
def test_triton_fills_the_same_bytes_for_every_layout(name, spec, layout):
    check(NORMS[name], *layout(*odd_operands(NORMS[name], torch.bfloat16)), spec)


@pytest.mark.gpu
@pairs(
    size=[*WIDTHS, (77, 128), (19, 8192), (3, 8208)],
    name=list(NORMS),
    dtype=DTYPES,
    spec=[Tensorwise(), Block1D(), Rowwise()],
)
def test_triton_fills_the_same_bytes_for_a_sum(name, size, dtype, spec):
    x, extra, weight, bias = operands(NORMS[name], *size, dtype, "cuda")
    check(NORMS[name], x, weight, bias, spec, extra=extra)


def moved(t, by):
    """t at an address that is no multiple of 16 bytes."""
    return torch.cat((t.new_zeros(by), t.reshape(-1)))[by:].view(t.shape)


@pytest.mark.gpu
@pairs(spec=[Tensorwise(), Block1D(), Rowwise()], dtype=DTYPES, n=[272, 257, 4096], name=["layer", "rms"])
def test_triton_fills_the_same_bytes_for_a_sum_of_anything(name, dtype, n, spec):
    """However x and extra lie in memory, and whatever their values are."""
    x, extra, weight, bias = operands(NORMS[name], 130, n, dtype, "cuda")
    for i, value in enumerate(ODD):
        x[11 * i, 5 * i] = extra[11 * i + 1, 3] = torch.tensor(value).to(dtype)
    x[120, 1] = extra[120, 1] = torch.finfo(dtype).max
    x[121, 1], extra[121, 1] = torch.inf, -torch.inf
    x[122], extra[122] = x[123], -x[123]  # zero
    x[124] = extra[124] = torch.finfo(dtype).smallest_normal / 4  # subnormal, and so is the sum
    for sides in ("r", "c", "rc"):
        check(NORMS[name], x, weight, bias, spec, sides, extra=extra)
    check(NORMS[name], x, weight, bias, spec, extra=x)
    for a, b in (
        (moved(x, 1), extra), (x, moved(extra, 3)), (moved(x, 2), moved(extra, 5)), (x.T.contiguous().T, extra),
        (x, extra[:1].expand(extra.shape)), (torch.cat((x, x), 1)[:, :n], extra), (x[:1], extra[:1]),
    ):  # fmt: skip
        check(NORMS[name], a, weight, bias, spec, extra=b)


@pytest.mark.gpu
def test_triton_fills_the_same_bytes_in_every_configuration():
    from octavo.kernels.norm.cast.triton import CONFIGS

    x, _, weight, bias = operands(NORMS["layer"], 257, 1040, torch.bfloat16, "cuda")
    for config in CONFIGS:
        check(NORMS["layer"], x, weight, bias, Tensorwise(E5M2), config=config)
        if config.rows == config.columns == 128:
            check(NORMS["layer"], x, weight, bias, Block1D(), config=config)


@pytest.mark.gpu
@pytest.mark.gpu_smoke
def test_triton_hardly_any_rows():
    for name in NORMS:
        for m in (0, 1):
            x, extra, weight, bias = operands(NORMS[name], m, 8, torch.bfloat16, "cuda")
            check(NORMS[name], x, weight, bias, Tensorwise())
            check(NORMS[name], x, weight, bias, Tensorwise(), extra=extra)
