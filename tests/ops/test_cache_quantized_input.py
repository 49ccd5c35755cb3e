"""Activations with cache_quantized_input: backward keeps codes of x in the place of x."""

import copy

import pytest
import torch

import octavo
from octavo import ops
from octavo.errors import UnsupportedConfig
from tests.support.linear_oracle import assert_same, spiky
from tests.support.steps import assert_equal, compiled, relative_error, step

KINDS = [
    ops.GELU, ops.QGELU, ops.ReLU, ops.SReLU, ops.SiLU, ops.GLU, ops.GEGLU, ops.QGEGLU, ops.ReGLU, ops.SReGLU,
    ops.SwiGLU, ops.ClampedSwiGLU, ops.SiTUGLU,
]  # fmt: skip
GATED = {ops.GLU, ops.GEGLU, ops.QGEGLU, ops.ReGLU, ops.SReGLU, ops.SwiGLU, ops.ClampedSwiGLU, ops.SiTUGLU}
SHAPES = [(37,), (2, 13), (32, 1, 32)]  # of y


def case(kind, shape, dtype=torch.float32):
    width = 2 * shape[-1] if kind in GATED else shape[-1]
    return spiky(*shape[:-1] or (1,), width, size=4.0).to(dtype).view(*shape[:-1], width), torch.randn(
        shape, dtype=dtype
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_y_is_the_same_and_dx_has_the_error_of_fp8(kind, shape):
    x, dy = case(kind, shape)
    plain, cached = step(kind(), x, dy), step(kind(cache_quantized_input=True), x, dy)
    assert_same(cached[0], plain[0])
    torch.testing.assert_close(cached[1], plain[1], rtol=0.125, atol=0.0675 * float(plain[1].abs().max()))
    assert relative_error(cached[1], plain[1]) < 0.07  # of a squared ReLU the most


@pytest.mark.parametrize("kind", [ops.GELU, ops.SwiGLU, ops.SiTUGLU])
@pytest.mark.usefixtures("fresh_compiler")
def test_a_graph_has_the_bits_of_eager_mode(kind):
    x, dy = case(kind, (32, 1, 32), torch.bfloat16)
    op = octavo.Sequential(ops.ConstantScale(2.0), kind(cache_quantized_input=True))
    assert_equal(step(op, x, dy, call=compiled(op)), step(op, x, dy))


@pytest.mark.parametrize("kind", [ops.GELU, ops.SwiGLU])
def test_a_byte_for_each_element_is_kept(kind):
    x, _ = case(kind, (256, 256), torch.bfloat16)
    kept = []

    def pack(t):
        kept.append(t.nbytes)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        kind(cache_quantized_input=True)(x.requires_grad_())
    assert sum(kept) == x.numel() + 4 * x.numel() // 128


@pytest.mark.parametrize("recipe", ["bf16", "fp8-current", "fp8-delayed"])
def test_the_activation_stands_between_linears_and_fuses_with_none(recipe):
    def block(cached):
        torch.manual_seed(0)
        return octavo.Sequential(
            ops.Linear(64, 128, recipe=recipe),
            ops.SwiGLU(cache_quantized_input=cached),
            ops.Linear(64, 64, recipe=recipe),
        )

    x, dy = spiky(16, 64), spiky(16, 64, seed=3)
    cached, plain = block(True), block(False)
    plain.rules = None
    found, want = step(cached, x, dy), step(plain, x, dy)
    assert_same(found[0], want[0])
    assert relative_error(found[1], want[1]) < 0.1
    assert not {"activation-linear", "mlp"} & set(cached.explain(x.requires_grad_()).fired)


def test_the_setting_may_be_assigned_and_copied():
    op = ops.SwiGLU()
    op.cache_quantized_input = True
    assert "cache_quantized_input=True" in repr(op)
    x, dy = case(ops.SwiGLU, (4, 32))
    assert_equal(step(copy.deepcopy(op), x, dy), step(ops.SwiGLU(cache_quantized_input=True), x, dy))
    op.cache_quantized_input = False
    assert_equal(step(op, x, dy), step(ops.SwiGLU(), x, dy))
    with pytest.raises(UnsupportedConfig, match="cache_quantized_input of SwiGLU"):
        op.cache_quantized_input = "fp8"


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_agrees_with_the_reference(kind):
    x, dy = (t.cuda() for t in case(kind, (300, 264), torch.bfloat16))
    op = kind(cache_quantized_input=True)
    found = [step(op, x, dy) for _ in range(4)]  # as written, recorded, replayed
    with octavo.backend.use("reference"):
        want = step(op, x, dy)
    for run in found:
        assert_equal(run, found[0])
    for a, b in zip(found[0], want, strict=True):
        assert relative_error(a, b) < 5e-3
