"""Gradients of q, k and v into codes: the same bytes as the gradient written and then cast."""

import pytest
import torch

from octavo import backend
from octavo.formats import E5M2
from octavo.kernels.rotary import cast as kernel
from octavo.kernels.rotary import rotate_back
from octavo.kernels.tile_cast import TileCast
from octavo.ops.attention import RotaryFactors
from octavo.quant import MX, Block1D, Rowwise, Tensorwise
from octavo.quant.casts import fill_pair
from tests.support.filled_codes import DTYPES, ODD, SPECS, assert_same_bytes, contents, empty_pair, given_to
from tests.support.pairs import pairs


def gradients(sizes, dtype, device, packed=False):
    """dq, dk and dv as attention returns them, of [B, heads, T, D]; or as parts of one tensor of rows."""
    batch, length, heads, shared, channels = sizes
    torch.manual_seed(0)
    factors = RotaryFactors(length, channels, 10000.0).to(device)
    counts = heads, shared, shared
    if packed:
        rows = torch.randn(batch, length, sum(counts), channels).to(device, dtype)
        parts = rows.split(counts, 2)
    else:
        parts = [torch.randn(batch, n, length, channels).to(device, dtype).transpose(1, 2) for n in counts]
    return *parts, factors.own, factors.other


def check(operands, spec, sides="rc", **settings):
    """Codes, scales and the amax observed."""
    dq, dk = operands[:2]
    rows, width = dq.shape[0] * dq.shape[1], (dq.shape[2] + 2 * dk.shape[2]) * dq.shape[3]
    results = []
    for fused in (True, False):
        pair, given = empty_pair(spec, rows, width, dq.dtype, dq.device, sides), given_to(spec, dq.device, 63.0)
        if not fused:
            fill_pair(rotate_back(*operands).reshape(rows, width), pair, given)
        elif settings:
            backend.implementation("octavo.kernels.rotary.cast", dq).backward(
                *operands, TileCast(pair, given), **settings
            )
        else:
            kernel.backward(*operands, TileCast(pair, given))
        results.append(contents(pair, given))
    assert_same_bytes(*results, what=f"{spec} {sides}")


@pytest.mark.parametrize("spec", [*SPECS, MX(), Rowwise()], ids=str)
@pytest.mark.parametrize("sizes", [(2, 5, 4, 2, 16), (1, 1, 1, 1, 2), (0, 4, 2, 2, 8)], ids=str)
def test_fills_what_a_cast_of_the_gradient_would(spec, sizes):
    for sides in ("r", "c", "rc"):
        check(gradients(sizes, torch.bfloat16, "cpu"), spec, sides)


# -- on a GPU ----------------------------------------------------------------------------------------------------------

# B, T, H, S, D: a tile of one head, of two, of a part of one; and tiles that would reach over q and k, or k and v
SIZES = [(2, 130, 4, 4, 128), (1, 77, 6, 2, 64), (3, 40, 2, 1, 256), (2, 33, 3, 1, 64), (1, 9, 5, 1, 24)]


@pytest.mark.gpu
@pairs(spec=SPECS, sizes=SIZES, dtype=DTYPES, packed={"parts": False, "packed": True})
def test_triton_fills_the_same_bytes(sizes, dtype, spec, packed):
    check(gradients(sizes, dtype, "cuda", packed=packed), spec)


@pytest.mark.gpu
@pytest.mark.parametrize("spec", [*SPECS, MX(), Rowwise(), Tensorwise(E5M2)], ids=str)
@pytest.mark.parametrize("sides", ["r", "c", "rc"])
def test_triton_fills_the_same_bytes_for_every_side_and_odd_values(spec, sides):
    operands = gradients((2, 65, 4, 2, 128), torch.bfloat16, "cuda")
    for part in operands[:3]:
        for i, value in enumerate(ODD):
            part[1, 3 * i, i % part.shape[2], 5 * i] = value
    check(operands, spec, sides)


@pytest.mark.gpu
@pytest.mark.gpu_smoke
def test_triton_fills_the_same_bytes_without_a_known_scale_and_in_no_rows():
    check(gradients((0, 4, 2, 2, 64), torch.bfloat16, "cuda"), Block1D())
    operands = gradients((2, 65, 4, 2, 128), torch.bfloat16, "cuda")
    results = []
    for fused in (True, False):
        pair = empty_pair(Tensorwise(), 130, 1024, torch.bfloat16, "cuda", "rc")
        target = TileCast(pair)
        if fused:
            kernel.backward(*operands, target)
        else:
            fill_pair(rotate_back(*operands).reshape(130, 1024), *target)
        results.append([t.cpu().view(torch.uint8) for q in pair for t in q.tensors()])
    assert_same_bytes(*results, what="measured")
