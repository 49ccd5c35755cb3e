"""Sums down columns, against float64."""

import pytest
import torch

from octavo.kernels.column_sums import column_sums
from tests.support.activation_formulas import data

SHAPES = [(1, 1), (4, 256), (63, 33), (64, 32), (65, 1000), (528, 2048), (1024, 17), (1025, 17), (5000, 96)]
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
shapes = pytest.mark.parametrize("shape", SHAPES)
device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@device
@dtypes
@shapes
def test_column_sums_are_near_the_exact_ones(shape, dtype, device):
    x = data(*shape, dtype=dtype).to(device)
    exact, size = x.double().sum(0), x.double().abs().sum(0)
    for out in (torch.float32, torch.bfloat16):
        found = column_sums(x, out)
        assert found.dtype == out and found.shape == exact.shape
        bound = size * 2**-20 + exact.abs() * torch.finfo(out).eps / 2
        assert ((found.double() - exact).abs() <= bound).all()


@device
def test_of_nothing_and_of_rows_apart(device):
    assert torch.equal(column_sums(torch.empty(0, 5, device=device), torch.float32), torch.zeros(5, device=device))
    assert column_sums(torch.empty(3, 0, device=device), torch.float32).shape == (0,)
    wide = data(40, 64).to(device)
    for x in (wide[:, ::2], wide[::2], wide.T, wide[:1].expand(7, 64)):
        torch.testing.assert_close(column_sums(x, torch.float32), x.double().sum(0).float(), rtol=1e-5, atol=1e-5)


@device
def test_what_is_not_a_number_stays_in_its_column(device):
    x = torch.ones(70, 40, device=device)
    x[69, 3], x[2, 39] = torch.nan, torch.inf
    found = column_sums(x, torch.bfloat16)
    assert found[3].isnan() and found[39].isposinf()
    assert (found[torch.arange(40, device=device) % 36 != 3] == 70).all()


@pytest.mark.gpu
@pytest.mark.gpu_smoke
def test_the_same_bits_again():
    x = data(264, 4096).cuda()
    first = column_sums(x, torch.float32)
    assert all(torch.equal(first, column_sums(x, torch.float32)) for _ in range(20))
