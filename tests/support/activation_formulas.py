"""Activations as formulas, written a second time, and values to try them on."""

import pytest
import torch
import torch.nn.functional as F

FORMULAS = {  # of x, or gated of a and b
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "qgelu": lambda x: x / (1 + torch.exp(-1.702 * x)),
    "relu": F.relu,
    "srelu": lambda x: F.relu(x) ** 2,
    "silu": F.silu,
    "linear": lambda x: 1.0 * x,
    "glu": lambda a, b: torch.sigmoid(a) * b,
    "geglu": lambda a, b: F.gelu(a, approximate="tanh") * b,
    "qgeglu": lambda a, b: a / (1 + torch.exp(-1.702 * a)) * b,
    "reglu": lambda a, b: F.relu(a) * b,
    "sreglu": lambda a, b: F.relu(a) ** 2 * b,
    "swiglu": lambda a, b: F.silu(a) * b,
    "clamped-swiglu": lambda a, b: clamped_swiglu(a, b, 7.0, 1.702, 1.0),
    "situglu": lambda a, b: situglu(a, b, 4.0, 25.0),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def at_most(limit, x):
    """Clamps x from above; the gradient passes at the limit itself. That of torch's clamp does not since 2.15."""
    return torch.where(x > limit, limit, x)


def clamped_swiglu(a, b, limit, alpha, offset):
    a, b = at_most(limit, a), -at_most(limit, -at_most(limit, b))
    return a * torch.sigmoid(alpha * a) * (b + offset)


def situglu(a, b, beta1, beta2):
    return beta1 * torch.tanh(a / beta1) * torch.sigmoid(a) * beta2 * torch.tanh(b / beta2)


def taken_apart(x, interleave=0):
    """a and b of the last dim."""
    if interleave:
        pairs = x.unflatten(-1, (-1, 2, interleave))
        return pairs[..., 0, :].flatten(-2), pairs[..., 1, :].flatten(-2)
    return x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]


def applied(formula, gated, x, interleave=0):
    return formula(*taken_apart(x, interleave)) if gated else formula(x)


def assert_rounded_once(found, want, what=""):
    """found is want in its own dtype, give or take what float64 itself leaves open (torch's gelu cancels)."""
    info = torch.finfo(found.dtype)
    allowed = info.eps / 2 * (1 + 1e-6) * want.abs() + info.smallest_normal * info.eps + 1e-13
    error = (found.double() - want).abs()
    assert found.shape == want.shape, what
    assert (error <= allowed).all(), f"{what}: off by {(error / allowed).max():.3g} times what rounding allows"


def data(*shape, dtype=torch.float32, seed=0, size=3.0):
    """Signed, with outliers, as a leaf would be."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * size
    x.view(-1)[::17] *= 5
    return x.to(dtype)


def sizes(fn):
    return 2 if fn.gated else 1


def seed_of(seed, step=0, device="cpu"):
    return torch.tensor([seed, step], device=device)
