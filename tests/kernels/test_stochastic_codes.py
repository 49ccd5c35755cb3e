"""Codes that are rounded stochastically: to a neighbour, right on average, and alike on a CPU and a GPU."""

import pytest
import torch

from octavo.formats import E4M3
from octavo.kernels.stochastic_codes import reference, stochastic_codes

BLOCKS = ((96, 256), (1, 256), (32, 128))


def scales(m, k, block, device="cpu"):
    shape = -(-m // block[0]), -(-k // block[1])
    return torch.rand(shape, generator=torch.Generator().manual_seed(2)).to(device) * 1e-2 + 1e-3


def values(m, k, factor=1.0, device="cpu"):
    return torch.randn(m, k, generator=torch.Generator().manual_seed(m + k)).to(device) * factor


def seeds(step=1, device="cpu"):
    return torch.tensor([7, step], device=device)


def rounded(x, scale, block, step=1):
    codes = torch.zeros(x.shape, dtype=torch.uint8)
    stochastic_codes(x, scale, block, codes, seeds(step))
    m, k = x.shape
    spread = scale.repeat_interleave(block[0], 0)[:m].repeat_interleave(block[1], 1)[:, :k]
    return codes.view(E4M3.dtype).float(), spread


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("factor", [1.0, 1e-4], ids=["normal", "subnormal"])
def test_a_code_is_a_neighbour_of_the_value(block, factor):
    x = values(96, 256, factor)
    found, spread = rounded(x, scales(96, 256, block), block)
    exact = (x / spread).clamp(-448, 448)
    ladder = torch.arange(256, dtype=torch.uint8).view(E4M3.dtype).float()
    ladder = ladder[ladder.isfinite()].unique()
    above = ladder[torch.searchsorted(ladder, exact).clamp(max=len(ladder) - 1)]
    below = ladder[(torch.searchsorted(ladder, exact, right=True) - 1).clamp(min=0)]
    assert ((found == above) | (found == below)).all()
    assert (found == above).any()
    assert (found == below).any()


@pytest.mark.parametrize("factor", [1.0, 1e-4], ids=["normal", "subnormal"])
def test_the_mean_of_many_roundings_is_the_value(factor):
    x, block = values(16, 64, factor), (16, 64)
    scale = torch.full((1, 1), 1e-2)
    total = torch.zeros(16, 64, dtype=torch.float64)
    for step in range(400):
        total += rounded(x, scale, block, step)[0]
    exact = (x / 1e-2).double()
    step_of = torch.maximum(exact.abs(), torch.tensor(2.0**-6, dtype=torch.float64)).log2().floor().exp2() / 8
    error = (total / 400 - exact) / step_of
    assert error.abs().mean() < 0.03  # 0.4 / sqrt(400) at most
    assert abs(error.mean()) < 0.005


def test_values_of_codes_stay_and_what_is_not_finite_keeps_its_code():
    codes = torch.arange(256, dtype=torch.uint8).view(1, 256)
    x = codes.view(E4M3.dtype).float() * 0.25
    found = codes.clone()
    stochastic_codes(x, torch.full((1, 1), 0.25), (1, 256), found, seeds())
    assert torch.equal(found, codes)
    x[0, :3] = torch.tensor([float("inf"), float("-inf"), float("nan")])
    stochastic_codes(x, torch.full((1, 1), 0.25), (1, 256), found, seeds())
    assert torch.equal(found, codes)
    stochastic_codes(torch.zeros(2, 256), torch.zeros(1, 1), (2, 256), found.expand(2, 256).clone(), seeds())


def with_edges(x):
    """x with zeros of both signs, values that mostly become zero, and what is not finite, in its first row."""
    inf, tiny = float("inf"), 1e-9
    edges = torch.tensor([inf, -inf, float("nan"), 0.0, -0.0, tiny, -tiny, -1e-42], device=x.device)
    x[0, : len(edges)] = edges
    return x


def test_zero_keeps_the_sign_of_the_value():
    x, scale = with_edges(values(16, 64, 1e-4)), torch.full((1, 1), 1e-2)
    codes = torch.full((16, 64), 5, dtype=torch.uint8)
    stochastic_codes(x, scale, (16, 64), codes, seeds())
    assert codes[0, :5].tolist() == [5, 5, 5, 0, 128]
    finite = x.isfinite()
    assert torch.equal((codes >= 128)[finite], x.signbit()[finite])
    assert (codes == 128).sum() > 10


def test_random_bits_belong_to_elements():
    """The same element draws the same bits, whether its rows come with others or alone; another step draws others."""
    x, scale = values(32, 40), torch.full((1, 1), 1e-2)
    whole = torch.zeros(32, 48, dtype=torch.uint8)
    stochastic_codes(x, scale, (32, 40), whole, seeds())
    part = torch.zeros(16, 40, dtype=torch.uint8)
    stochastic_codes(x[16:].contiguous(), scale, (32, 40), part, seeds(), first=16)
    assert torch.equal(whole[16:, :40], part)
    assert (whole[:, 40:] == 0).all()
    stochastic_codes(x[16:].contiguous(), scale, (32, 40), part, seeds(2), first=16)
    assert not torch.equal(whole[16:, :40], part)


@pytest.mark.gpu
@pytest.mark.gpu_smoke
@pytest.mark.parametrize("shape", [(96, 256), (77, 300), (1, 8), (256, 128)], ids=str)
@pytest.mark.parametrize("factor", [1.0, 1e-4], ids=["normal", "subnormal"])
def test_every_configuration_writes_the_bytes_of_the_reference(shape, factor):
    from octavo.kernels.stochastic_codes import triton

    m, k = shape
    x = with_edges(values(m, k, factor, "cuda"))
    for block in ((m, k), (1, k), (128, 128), (1, 32)):
        scale = scales(m, k, block, "cuda")
        want = torch.full((m, k + 8), 5, dtype=torch.uint8, device="cuda")
        reference.stochastic_codes(x, scale, block, want, seeds(3, "cuda"), 11)
        for config in triton.CONFIGS:
            found = torch.full((m, k + 8), 5, dtype=torch.uint8, device="cuda")
            triton.stochastic_codes(x, scale, block, found, seeds(3, "cuda"), 11, config)
            assert torch.equal(found, want), (block, config)
