"""Pairs of operands that no GEMM multiplies: refused by gemm, and by the product that layers call, on every route."""

import pytest
import torch

import octavo
import octavo.quant as Q
from octavo.errors import UnsupportedConfig
from octavo.formats import E5M2
from octavo.kernels.gemm import gemm, product

REFUSED_PAIRS = [
    (Q.Tensorwise(E5M2), Q.Tensorwise(E5M2), r"E5M2 by E5M2\. Keep one of them in E4M3"),
    (Q.MX(E5M2), Q.MX(E5M2), r"E5M2 by E5M2\. Keep one of them in E4M3"),
    (Q.Block1D(E5M2), Q.Block2D(E5M2), r"E5M2 by E5M2\. Keep one of them in E4M3"),
    (Q.Rowwise(), Q.Block1D(), r"are rowwise and block-1d, and must be scaled alike along the contraction"),
    (Q.Rowwise(), Q.Block2D(), r"are rowwise and block-2d, and must be scaled alike along the contraction"),
    (Q.Block1D(), Q.MX(), r"are block-1d and mx, and must be scaled alike along the contraction"),
    (Q.MX(), Q.NVFP4(), r"are mx and nv, and must be scaled alike along the contraction"),
    (Q.NVFP4(), Q.Tensorwise(), r"are nv and tensorwise, and must be scaled alike along the contraction"),
    (Q.Block2D(), Q.Block2D(), r"are block-2d and block-2d, and no block GEMM takes 128x128 scales on both sides"),
    (Q.NVFP4(rht=True), Q.NVFP4(), r"are nv\(rht=True\) and nv, and must be in the same basis.*Rotate both or neither"),
    (Q.NVFP4(square=True), Q.NVFP4(rht=True), r"same basis.*Rotate both or neither"),
]
refused = pytest.mark.parametrize(("left", "right", "message"), REFUSED_PAIRS, ids=str)


def operands(left, right, rows=4, device="cpu"):
    x, w = torch.randn(rows, 32, device=device), torch.randn(16, 32, device=device)
    return left.quantize(x), right.quantize(w)


@refused
def test_gemm_refuses_pairs_that_do_not_fit(left, right, message):
    with pytest.raises(UnsupportedConfig, match=message):
        gemm(*operands(left, right))


@refused
def test_the_product_that_layers_call_refuses_pairs_that_do_not_fit(left, right, message):
    for rows in (4, 0, 4):  # the second time, too: a refusal is not cached as a route
        with pytest.raises(UnsupportedConfig, match=message):
            product(*operands(left, right, rows), torch.float32, None, "precise")


@pytest.mark.gpu
@refused
def test_the_kernels_refuse_pairs_as_the_reference_does(left, right, message):
    pair = operands(left, right, device="cuda")
    for force in ("reference", "triton"):
        with octavo.backend.use(force), pytest.raises(UnsupportedConfig, match=message):
            product(*pair, torch.bfloat16, None, "precise")
