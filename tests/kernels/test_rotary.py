"""Rotary positions: the heads of q, k and v against torch's own operations in float64, and their gradients."""

import pytest
import torch

from octavo.kernels.rotary import heads_of, rotate, rotate_back, rows_of
from octavo.ops.attention import RotaryFactors

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
CASES = [(2, 5, 4, 4, 16), (1, 7, 6, 2, 24), (3, 1, 1, 1, 2), (2, 9, 9, 3, 128), (0, 4, 2, 2, 8)]  # B, T, H, S, D


def case(sizes, dtype, device):
    batch, length, heads, shared, channels = sizes
    torch.manual_seed(0)
    qkv = torch.randn(batch, length, (heads + 2 * shared) * channels).to(device, dtype).requires_grad_()
    factors = RotaryFactors(length, channels, 10000.0).to(device)
    own, other = factors.own, factors.other
    return qkv, own, other, heads, shared


def exact(qkv, own, other, heads, shared):
    """The same in float64, pair by pair."""
    rows = rows_of(qkv.double(), heads + 2 * shared)
    half = rows.shape[-1] // 2
    cosine, sine = own[..., :half].double(), other[..., half:].double()

    def turned(x):
        low, high = x[..., :half], x[..., half:]
        return torch.cat((low * cosine - high * sine, high * cosine + low * sine), -1)

    q, k, v = rows[:, :, :heads], rows[:, :, heads : heads + shared], rows[:, :, heads + shared :]
    return turned(q), turned(k), v


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", CASES, ids=str)
def test_heads_and_their_gradients_are_those_of_float64(sizes, dtype, device):
    qkv, *rest = case(sizes, dtype, device)
    twin = qkv.detach().double().requires_grad_()
    found, want = heads_of(qkv, *rest), exact(twin, *rest)
    # of other layouts: as attention's gradients come, of [B, heads, T, D]
    grads = [torch.randn_like(t.transpose(1, 2).contiguous()).transpose(1, 2) for t in found]
    torch.autograd.backward(found, grads)
    torch.autograd.backward(want, [g.double() for g in grads])
    for got, exactly in zip((*found, qkv.grad), (*want, twin.grad), strict=True):
        assert got.dtype == dtype and got.shape == exactly.shape
        error = (got.double() - exactly).abs()
        assert bool((error <= 1.01 * torch.finfo(dtype).eps * (exactly.abs() / 2 + 4 * torch.finfo(torch.float32).eps)
                     + 4 * torch.finfo(torch.float32).eps).all())  # fmt: skip
    assert torch.equal(found[2].double(), want[2]), "v is as it was"


@pytest.mark.parametrize("device", DEVICES)
def test_zeros_have_the_same_sign_on_every_device(device):
    """Where the sine is zero, at the first position, its sign decides that of a zero."""
    _, own, other, *_ = case((1, 1, 1, 1, 8), torch.float32, "cpu")
    low, high = torch.tensor([0.0, -0.0, -0.0, -0.0]), torch.tensor([-0.0, 0.0, 1.0, -1.0])
    for first, second in ((low, high), (high, low)):
        given = torch.cat((first, second)).view(1, 1, 1, 8)
        q, _ = rotate(torch.cat((given,) * 3, -1).view(1, 1, 24).to(device), own.to(device), other.to(device), 1, 1)
        found = rotate_back(*(given.to(device),) * 3, own.to(device), other.to(device)).view(3, 8)
        cosine, sine = own[0, 0, :4], other[0, 0, 4:]
        want = torch.cat((first * cosine + second * -sine, second * cosine + first * sine))
        back = torch.cat((first * cosine + second * sine, second * cosine + first * -sine))
        assert torch.equal(q.cpu().view(8).view(torch.int32), want.view(torch.int32))
        assert torch.equal(found[0].cpu().view(torch.int32), back.view(torch.int32))
        assert torch.equal(found[2].cpu().view(torch.int32), given.view(8).view(torch.int32))


@pytest.mark.parametrize("device", DEVICES)
def test_a_graph_has_the_same_bits(device):
    torch._dynamo.reset()
    call = torch.compile(heads_of, fullgraph=True, backend="aot_eager")
    for given in (call, heads_of):
        qkv, *rest = case((2, 5, 4, 2, 16), torch.bfloat16, device)
        found = given(qkv, *rest)
        sum(t.float().square().sum() for t in found).backward()
        if given is call:
            first = [*found, qkv.grad]
    assert all(torch.equal(a, b) for a, b in zip(first, [*found, qkv.grad], strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_a_gradient_of_v_is_copied_as_it_is(device):
    qkv, *rest = case((1, 3, 2, 2, 8), torch.bfloat16, device)
    found = heads_of(qkv, *rest)
    dv = torch.randn_like(found[2])
    dv[0, 0, 0, 0], dv[0, 1, 1, 5], dv[0, 2, 0, 2] = float("inf"), float("nan"), -0.0
    torch.autograd.backward(found, [torch.zeros_like(found[0]), torch.zeros_like(found[1]), dv])
    got = rows_of(qkv.grad, 6)[:, :, 4:]
    assert torch.equal(got.contiguous().view(torch.int16), dv.view(torch.int16))


@pytest.mark.gpu
@pytest.mark.gpu_smoke
def test_kernels_have_the_bits_of_the_reference_where_products_are_exact():
    qkv, own, other, heads, shared = case((2, 33, 8, 4, 64), torch.bfloat16, "cuda")
    own, other = own.bfloat16(), other.bfloat16()  # products of two bfloat16 are exact in float32
    found = heads_of(qkv, own, other, heads, shared)
    want = heads_of(qkv.detach().cpu(), own.cpu(), other.cpu(), heads, shared)
    for got, reference in zip(found, want, strict=True):
        assert torch.equal(got.cpu(), reference)


def test_the_gradient_of_rotated_heads_is_rotated_back():
    """A rotation keeps lengths, so heads as their own gradient give back the rows that they came from."""
    qkv, *rest = case((2, 5, 4, 2, 16), torch.float32, "cpu")
    heads = heads_of(qkv, *rest)
    torch.autograd.backward(heads, [t.detach() for t in heads])
    torch.testing.assert_close(qkv.grad, qkv.detach())
