"""octavo.ops one by one: eager against formulas in float64, compiled against eager, one node each way."""

import copy
import functools
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import octavo
from octavo import errors, ops
from octavo.kernels.activation import ACTIVATIONS, reference
from octavo.ops.activation import Activation
from octavo.ops.inputs import values_of
from tests.support.activation_formulas import (
    DTYPES,
    FORMULAS,
    applied,
    assert_rounded_once,
    clamped_swiglu,
    data,
    situglu,
    taken_apart,
)
from tests.support.linear_oracle import assert_same
from tests.support.recipe_traits import STATELESS
from tests.support.recorded_operators import hides_writes, recorded, without_gradients
from tests.support.steps import assert_equal, compiled, step

pytestmark = pytest.mark.usefixtures("fresh_compiler")

WIDTH = 24  # of x; every gated op halves it


class Seeded(nn.Module):
    """Dropout with a seed of its own: what its owner would keep as a buffer."""

    def __init__(self, p):
        super().__init__()
        self.dropout = ops.Dropout(p)
        self.register_buffer("seed", torch.tensor([11, 3]))

    def forward(self, x):
        return self.dropout(x, self.seed)


def gated(name):
    return lambda x: applied(FORMULAS[name], ACTIVATIONS[name].gated, x)


def layer_norm(x, w, b=None, eps=1e-5):
    return nn.functional.layer_norm(x, w.shape, w, b, eps)


def rms_norm(x, w, eps=1e-5):
    return nn.functional.rms_norm(x, w.shape, w, eps)


PLAIN = {
    "gelu": ops.GELU, "qgelu": ops.QGELU, "relu": ops.ReLU, "srelu": ops.SReLU, "silu": ops.SiLU, "glu": ops.GLU,
    "geglu": ops.GEGLU, "qgeglu": ops.QGEGLU, "reglu": ops.ReGLU, "sreglu": ops.SReGLU, "swiglu": ops.SwiGLU,
    "clamped-swiglu": ops.ClampedSwiGLU, "situglu": ops.SiTUGLU,
}  # fmt: skip
OPS = {  # name -> (module, what it is of x, then its parameters, or scales)
    **{name: (make, gated(name)) for name, make in PLAIN.items()},
    "swiglu by 3": (
        lambda: ops.SwiGLU(glu_interleave_size=3),
        lambda x: FORMULAS["swiglu"](*taken_apart(x, 3)),
    ),
    "clamped-swiglu by 4": (
        lambda: ops.ClampedSwiGLU(limit=0.75, alpha=1.5, glu_linear_offset=0, glu_interleave_size=4),
        lambda x: clamped_swiglu(*taken_apart(x, 4), 0.75, 1.5, 0.0),
    ),
    "situglu by 4": (
        lambda: ops.SiTUGLU(beta1=3, beta2=12.0, glu_interleave_size=4),
        lambda x: situglu(*taken_apart(x, 4), 3.0, 12.0),
    ),
    "scaled swiglu": (ops.ScaledSwiGLU, lambda x, s: gated("swiglu")(x) * s[..., None]),
    "scaled srelu": (ops.ScaledSReLU, lambda x, s: FORMULAS["srelu"](x) * s[..., None]),
    "scaled clamped-swiglu": (
        lambda: ops.ScaledClampedSwiGLU(limit=2.0, glu_interleave_size=2),
        lambda x, s: clamped_swiglu(*taken_apart(x, 2), 2.0, 1.702, 1.0) * s[..., None],
    ),
    "scaled situglu": (ops.ScaledSiTUGLU, lambda x, s: gated("situglu")(x) * s[..., None]),
    "scaled situglu by 2": (
        lambda: ops.ScaledSiTUGLU(2, beta1=3.0, beta2=12.0),
        lambda x, s: situglu(*taken_apart(x, 2), 3.0, 12.0) * s[..., None],
    ),
    "layer norm": (lambda: ops.LayerNorm(WIDTH), layer_norm),
    "layer norm without bias": (
        lambda: ops.LayerNorm(WIDTH, bias=False, eps=0.3),
        lambda x, w: layer_norm(x, w, eps=0.3),
    ),
    "layer norm, zero centered": (
        lambda: ops.LayerNorm(WIDTH, zero_centered_gamma=True),
        lambda x, w, b: layer_norm(x, w + 1, b),
    ),
    "layer norm over two dims": (lambda: ops.LayerNorm((3, WIDTH)), layer_norm),
    "rms norm": (lambda: ops.RMSNorm(WIDTH), rms_norm),
    "rms norm, zero centered": (
        lambda: ops.RMSNorm((WIDTH,), zero_centered_gamma=True),
        lambda x, w: rms_norm(x, w + 1),
    ),
    "l2": (ops.L2Normalization, lambda x: x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)),
    "constant scale": (lambda: ops.ConstantScale(-2.5), lambda x: -2.5 * x),
    "bias": (lambda: ops.Bias(WIDTH), lambda x, b: x + b),
    "dropout": (lambda: Seeded(0.25), None),
}  # fmt: skip
LEAD = (2, 3)

every = pytest.mark.parametrize("name", OPS)


def make(name, dtype=torch.float32):
    op = OPS[name][0]().to(dtype)
    for i, p in enumerate(op.parameters()):
        p.data.copy_(data(*p.shape, seed=20 + i, size=1.0))
    return op


def batch(name, lead=LEAD, dtype=torch.float32, seed=0, width=WIDTH):
    """Inputs and dy."""
    x = data(*lead, width, dtype=dtype, seed=seed)
    inputs = [x]
    if "scaled" in name:
        inputs.append(torch.rand(lead, generator=torch.Generator().manual_seed(seed)))
    out = width // 2 if "glu" in name else width
    return inputs, data(*lead, out, dtype=dtype, seed=seed + 1)


# -- what they are -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name, (_, formula) in OPS.items() if formula])  # a mask has none
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lead", [(), (3,), (1, 3), (4, 3, 3)], ids=str)
def test_values_and_gradients(name, dtype, lead):
    formula = OPS[name][1]
    lead = lead or ((3,) if "two dims" in name else ())
    op = make(name, dtype)
    inputs, dy = batch(name, lead, dtype)
    found = step(op, inputs, dy)
    leaves = [t.detach().double().requires_grad_() for t in (*inputs, *op.parameters())]
    y = formula(*leaves)
    want = [y.detach(), *torch.autograd.grad(y, leaves, dy.double())]
    for i, (a, b) in enumerate(zip(found, want, strict=True)):
        assert a.shape == b.shape
        assert a.dtype == (dtype if i < 2 else (inputs + list(op.parameters()))[i - 1].dtype)
        torch.testing.assert_close(
            a.double(), b, rtol=torch.finfo(a.dtype).eps, atol=2e-5, msg=lambda m, i=i: f"{i}: {m}"
        )


def test_the_first_half_is_the_one_that_is_activated():
    x = torch.tensor([[2.0, 3.0]])
    assert ops.ReGLU()(-x * torch.tensor([1.0, -1.0])).item() == 0.0
    assert ops.ReGLU()(x * torch.tensor([1.0, -1.0])).item() == -6.0
    a, b = x.chunk(2, -1)
    torch.testing.assert_close(ops.GLU()(x), nn.functional.glu(torch.cat((b, a), -1)))


@pytest.mark.parametrize("betas", [(4.0, 25.0), (3.0, 12.0)])
@pytest.mark.parametrize("interleave", [None, 32])
@pytest.mark.parametrize("recipe", ["bf16", "fp8-current", "fp8-block", "mxfp8"])
def test_situglu_between_casts(betas, interleave, recipe):
    """Of the values of the codes before it; its y is cast after it, its dy before."""
    op = ops.SiTUGLU(beta1=betas[0], beta2=betas[1], glu_interleave_size=interleave)
    before, after = ops.Quantize(recipe=recipe), ops.Quantize(backward=True, recipe=recipe)
    x, dy = data(17, 192, dtype=torch.bfloat16), data(17, 96, dtype=torch.bfloat16, seed=1)
    leaf = x.clone().requires_grad_()
    y = values_of(after(op(before(leaf))))
    (dx,) = torch.autograd.grad(y, leaf, dy)

    quant = octavo.recipe(recipe).linear()
    cast = [lambda t, q=q: t if q is None else q.quantize(t).dequantize() for q in (quant.fprop.left, quant.dgrad.left)]
    wide = cast[0](x).double().requires_grad_()
    want = situglu(*taken_apart(wide, interleave or 0), *betas)
    (want_dx,) = torch.autograd.grad(want, wide, cast[1](dy).double())
    assert_same(y.detach(), cast[0](want.detach().bfloat16()))
    assert_rounded_once(dx, want_dx)


@pytest.mark.parametrize("scale", [1.0, 0.0, -2.5, 3.5, 2])
@pytest.mark.parametrize("shape", [(), (1, 13), (4, 4, 2)], ids=str)
def test_constant_scale_multiplies_x_and_dy(scale, shape):
    x = torch.randn(shape, requires_grad=True)
    y = ops.ConstantScale(scale)(x)
    assert torch.equal(y, x * scale)
    (dx,) = torch.autograd.grad(y, x, torch.ones(shape))
    assert torch.equal(dx, torch.full(shape, float(scale)))


@pytest.mark.parametrize("size", [1, 7, 32, 1000])
@pytest.mark.parametrize("lead", [(), (1, 3), (4, 3, 8)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("recipe", ["bf16", "fp8-current", "mxfp8"])
def test_bias_of_any_width_between_casts(size, lead, dtype, recipe):
    """Of the values of the codes before it; its y is cast after it, its dy before."""
    op, quant = ops.Bias(size, dtype=dtype), octavo.recipe(recipe).linear()
    op.bias.data.copy_(data(size, seed=20, size=1.0))
    x, dy = data(*lead, size, dtype=dtype), data(*lead, size, dtype=dtype, seed=1)
    leaf = x.clone().requires_grad_()
    y = values_of(ops.Quantize(backward=True, recipe=recipe)(op(ops.Quantize(recipe=recipe)(leaf))))
    y.backward(dy)

    cast = [lambda t, q=q: t if q is None else q.quantize(t).dequantize() for q in (quant.fprop.left, quant.dgrad.left)]
    g = cast[1](dy)
    assert_same(y.detach(), cast[0]((cast[0](x).double() + op.bias.detach().double()).to(dtype)))
    assert_same(leaf.grad, g)
    sums = g.double().reshape(-1, size)
    allowed = torch.finfo(dtype).eps * sums.sum(0).abs() + 1e-6 * sums.abs().sum(0)  # float32's, and one rounding
    assert op.bias.grad.dtype == dtype
    assert ((op.bias.grad.double() - sums.sum(0)).abs() <= allowed).all()


NORMS = {
    "layer norm": (ops.LayerNorm, layer_norm), "rms norm": (ops.RMSNorm, rms_norm),
    "bias": (ops.Bias, lambda x, b: x + b),
}  # fmt: skip


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("within", [None, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("as_compiled", [False, True], ids=["eager", "compiled"])
def test_half_precision_parameters_under_autocast(name, dtype, within, as_compiled):
    """y and dx have x's dtype, gradients of parameters theirs, whatever autocast's is."""
    make_op, formula = NORMS[name]
    op, (x, dy) = make_op(32, dtype=torch.float16), (data(6, 32, dtype=dtype, seed=s) for s in (0, 1))
    for i, p in enumerate(op.parameters()):
        p.data.copy_(data(32, seed=20 + i, size=1.0))
    with torch.autocast("cpu", within or torch.bfloat16, enabled=within is not None):
        found = step(op, x, dy, call=compiled(op) if as_compiled else op)
    leaves = [t.detach().double().requires_grad_() for t in (x, *op.parameters())]
    y = formula(*leaves)
    want = [y.detach(), *torch.autograd.grad(y, leaves, dy.double())]
    for i, (a, b) in enumerate(zip(found, want, strict=True)):
        assert a.dtype == (dtype if i < 2 else torch.float16)
        torch.testing.assert_close(a.double(), b, rtol=torch.finfo(a.dtype).eps, atol=2e-5)


def test_mixed_dtypes_keep_their_own():
    norm, bias = ops.LayerNorm(8), ops.Bias(8)
    x = data(5, 8, dtype=torch.bfloat16).requires_grad_()
    y = bias(norm(x))
    y.sum().backward()
    assert y.dtype == x.grad.dtype == torch.bfloat16
    assert {p.grad.dtype for p in (norm.weight, norm.bias, bias.bias)} == {torch.float32}


@every
def test_autocast_changes_nothing(name):
    op = make(name)
    inputs, dy = batch(name)
    want = step(op, inputs, dy)
    with torch.autocast("cpu", torch.bfloat16):
        found = step(op, inputs, dy)
    assert_equal(found, want)


@pytest.mark.parametrize(
    ("shape", "to"), [((1, 2, 3, 4), (2, 12)), ((5, 4, 3, 2), (-1, 6)), ((30,), (2, 3, -1)), ((6, 7), (3, -1, 7))]
)
def test_a_view_shares_the_memory_of_x(shape, to):
    x = torch.randn(shape, requires_grad=True)
    y = ops.Reshape(to)(x)
    assert torch.equal(y, x.reshape(to))
    assert y.data_ptr() == x.data_ptr()
    y.backward(torch.ones_like(y))
    assert torch.equal(x.grad, torch.ones(shape))
    assert ops.Identity()(x) is x


@pytest.mark.parametrize("recipe", ["bf16", *STATELESS])
@pytest.mark.parametrize("inside", [False, True], ids=["alone", "in a Sequential"])
def test_a_view_of_codes_is_one_of_their_values(recipe, inside):
    cast, view = ops.Quantize(recipe=recipe), ops.Reshape((-1, 3, 16))
    model = octavo.Sequential(cast, view) if inside else nn.Sequential(cast, view)
    x, dy = data(6, 48).requires_grad_(), data(6, 3, 16, seed=1)
    y = model(x)
    assert type(y) is torch.Tensor
    assert_same(y.detach(), values_of(cast(x.detach())).reshape(6, 3, 16))
    y.backward(dy)
    assert_same(x.grad, dy.reshape(6, 48))
    assert ops.Identity()(codes := cast(x)) is codes


@every
def test_strides_do_not_matter(name):
    op = make(name)
    inputs, dy = batch(name, (4, 3))
    want = step(op, inputs, dy)
    turned = [inputs[0].transpose(0, -1).contiguous().transpose(0, -1), *inputs[1:]]
    leaves = [t.requires_grad_() for t in turned]
    op.zero_grad()
    y = op(*leaves)
    assert y.is_contiguous()
    y.backward(dy.transpose(0, -1).contiguous().transpose(0, -1))
    assert_equal([y.detach(), *(t.grad for t in leaves), *(p.grad for p in op.parameters())], want)


@every
def test_no_tokens(name):
    op = make(name)
    inputs, dy = batch(name, (0, 3)) if "two dims" in name else batch(name, (0,))
    found = step(op, inputs, dy)
    assert found[0].shape == dy.shape
    for t, grad in zip([*inputs, *op.parameters()], found[1:], strict=True):
        assert grad.shape == t.shape
        assert not grad.any()


@every
def test_without_gradients_nothing_is_kept(name):
    op = make(name)
    inputs, _ = batch(name)
    want = op(*inputs).detach()
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            y = op(*inputs)
        assert not y.requires_grad
        assert_same(y, want)


@every
def test_a_second_backward_gives_the_same_and_a_second_derivative_is_refused(name):
    op = make(name)
    (x, *rest), dy = batch(name)
    x.requires_grad_()
    y = op(x, *rest)
    first, second = (torch.autograd.grad(y, x, dy, retain_graph=True)[0] for _ in range(2))
    assert_same(first, second)
    (dx,) = torch.autograd.grad(y, x, dy.requires_grad_(), create_graph=True)
    with pytest.raises(errors.UnsupportedConfig, match="differentiated once"):
        dx.sum().backward()


# -- parameters --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (ops.LayerNorm(8), nn.LayerNorm(8)),
        (ops.LayerNorm((4, 8), bias=False), nn.LayerNorm((4, 8), bias=False)),
        (ops.RMSNorm(8), nn.RMSNorm(8, eps=1e-5)),
    ],
    ids=["layer", "layer without bias", "rms"],
)
def test_stock_checkpoints_load(ours, theirs):
    for p in theirs.parameters():
        nn.init.normal_(p)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    x = torch.randn(5, 4, 8)
    torch.testing.assert_close(ours(x), theirs(x))


def test_zero_centered_gamma_starts_at_one():
    x = torch.randn(5, 8)
    assert not ops.RMSNorm(8, zero_centered_gamma=True).weight.any()
    assert torch.equal(ops.RMSNorm(8, zero_centered_gamma=True)(x), ops.RMSNorm(8)(x))


def test_parameters_come_to_life_on_a_device_later():
    norm = ops.LayerNorm(8, device="meta", dtype=torch.bfloat16)
    assert norm.weight.is_meta
    norm.to_empty(device="cpu").reset_parameters()
    assert norm(torch.randn(2, 8)).isfinite().all()


@pytest.mark.parametrize("frozen", ["weight", "bias", "weight and bias", "input", "all but bias"])
def test_frozen_parts_do_no_work(frozen, monkeypatch):
    op = make("layer norm")
    op.weight.requires_grad_("weight" not in frozen and "all" not in frozen)
    op.bias.requires_grad_(frozen != "bias" and "and bias" not in frozen)
    (x,), dy = batch("layer norm")
    x.requires_grad_(frozen not in ("input", "all but bias"))
    asked = []
    real = octavo.kernels.norm.backward

    def unchanged(*args, added):
        asked.append({name for name, v in args[5]._asdict().items() if v})
        assert (args[2] is None) == (frozen == "all but bias")  # x is not kept for the bias alone
        return real(*args, added)

    monkeypatch.setattr(octavo.kernels.norm, "backward", unchanged)
    op(x).backward(dy)
    wanted = {"x": x, "weight": op.weight, "bias": op.bias}
    assert asked == [{name for name, t in wanted.items() if t.requires_grad}]
    for t in wanted.values():
        assert (t.grad is not None) == t.requires_grad


SCALED = {
    "swiglu": ops.ScaledSwiGLU, "swiglu by 32": functools.partial(ops.ScaledSwiGLU, 32),
    "clamped-swiglu": ops.ScaledClampedSwiGLU,
    "clamped-swiglu by 32": functools.partial(ops.ScaledClampedSwiGLU, glu_interleave_size=32),
    "situglu": ops.ScaledSiTUGLU, "situglu by 32": functools.partial(ops.ScaledSiTUGLU, 32, beta1=3.0, beta2=12.0),
    "srelu": ops.ScaledSReLU,
}  # fmt: skip


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize(("lead", "width"), [((71,), 192), ((5, 7), 128)], ids=str)
@pytest.mark.parametrize("x_grad", [False, True])
@pytest.mark.parametrize("scales_grad", [False, True])
def test_scales_have_a_gradient_only_if_they_want_one(name, lead, width, x_grad, scales_grad):
    op = SCALED[name]()
    (x, scales), dy = batch(f"scaled {name}", lead, width=width)
    want = step(op, (x, scales), dy)
    y = op(x.requires_grad_(x_grad), scales.requires_grad_(scales_grad))
    assert y.requires_grad == (x_grad or scales_grad)
    if y.requires_grad:
        y.backward(dy)
    assert_same(x.grad, want[1] if x_grad else None)
    assert_same(scales.grad, want[2] if scales_grad else None)


def test_the_gradient_of_a_bias_alone_takes_one_sum(monkeypatch):
    op, x = ops.Bias(8), torch.randn(5, 8)
    monkeypatch.setattr(reference, "backward", None)
    op(x).backward(torch.ones(5, 8))
    assert torch.equal(op.bias.grad, torch.full((8,), 5.0))


def test_what_needs_no_input_keeps_none():
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        x = torch.randn(64, 64, requires_grad=True)
        ops.ConstantScale(2.0)(x)
        ops.Bias(64)(x)
        assert not kept
        ops.Dropout(0.5)(x)
        assert kept == [2]


# -- dropout -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.0, 0.0625, 0.5, 0.75, 1.0])
@pytest.mark.parametrize("shape", [(101,), (2, 4, 16), (128, 128)], ids=str)
def test_dropout_drops_the_same_elements_in_both_directions(p, shape):
    op = ops.Dropout(p)
    x = torch.rand(shape) + 1
    x.requires_grad_()
    y = op(x)
    y.backward(torch.ones(shape))
    kept = y != 0
    assert torch.equal(x.grad != 0, kept)
    torch.testing.assert_close(y[kept], x[kept] / max(1 - p, 0.1))
    share = 1 - kept.double().mean().item()
    assert abs(share - p) <= 3.3 * math.sqrt(p * (1 - p) / x.numel())
    op.eval()
    assert op(x) is x


def test_dropout_follows_torchs_generator_or_its_seed():
    op, x = ops.Dropout(0.5), torch.ones(64, 64)
    torch.manual_seed(1)
    first, second = op(x), op(x)
    torch.manual_seed(1)
    assert torch.equal(op(x), first)
    assert not torch.equal(second, first)
    seed = torch.tensor([4, 0])
    assert torch.equal(op(x, seed), op(x, seed))
    assert not torch.equal(op(x, seed), op(x, seed + 1))


@pytest.mark.parametrize(("reentrant", "as_compiled"), [(False, False), (True, False), (False, True)])
def test_a_checkpoint_drops_the_same_elements(reentrant, as_compiled):
    first, second = ops.Dropout(0.5), ops.Dropout(0.3)

    def call(x):
        return checkpoint(lambda t: second(torch.sin(first(t))), x, use_reentrant=reentrant)

    run = compiled(call) if as_compiled else call
    x = torch.ones(32, 32, requires_grad=True)
    y = run(x)
    op = ops.Dropout(0.5)
    assert op(torch.ones(8)).shape == (8,)  # others draw in between
    y.sum().backward()
    assert torch.equal(x.grad != 0, y != 0)


@pytest.mark.parametrize("scaled", ["", "Scaled"])
def test_a_repr_shows_the_settings_by_the_names_of_the_arguments(scaled):
    clamped, soft = getattr(ops, f"{scaled}ClampedSwiGLU"), getattr(ops, f"{scaled}SiTUGLU")
    made = clamped(limit=3.0, glu_linear_offset=0.5, glu_interleave_size=4)
    settings = "limit=3.0, alpha=1.702, glu_linear_offset=0.5, glu_interleave_size=4"
    assert repr(made) == f"{scaled}ClampedSwiGLU({settings})"
    assert repr(eval(repr(made), vars(ops))) == repr(made)
    assert repr(soft()) == f"{scaled}SiTUGLU(beta1=4.0, beta2=25.0)"


# -- refusals ----------------------------------------------------------------------------------------------------------


def unsupported_reasons():
    x = torch.randn(4, 6)
    yield "odd width", lambda: ops.SwiGLU()(x[:, :5]), errors.UnsupportedShape, r"multiple of 2, got \(4, 5\)"
    yield "a number", lambda: ops.GLU()(torch.tensor(1.0)), errors.UnsupportedShape, "two halves"
    yield "interleave", lambda: ops.SwiGLU(glu_interleave_size=2)(x), errors.UnsupportedShape, "multiple of 4"
    yield "no interleave", lambda: ops.SwiGLU(glu_interleave_size=0), errors.UnsupportedConfig, "Leave it out"
    yield "dtype", lambda: ops.GELU()(x.double()), errors.UnsupportedDtype, "Cast x first"
    yield "dtype of a norm", lambda: ops.RMSNorm(6)(x.long()), errors.UnsupportedDtype, "Cast x first"
    yield (
        "dtype of a weight",
        lambda: ops.RMSNorm(6).double()(x),
        errors.UnsupportedDtype,
        "parameters in .*, got torch.float64. Cast the module",
    )
    yield "scales", lambda: ops.ScaledSReLU()(x, x[0]), errors.UnsupportedShape, r"got \(6,\) for \(4, 6\). Reshape"
    yield (
        "scales' dtype",
        lambda: ops.ScaledSReLU()(x, x[:, 0].double()),
        errors.UnsupportedDtype,
        "takes scales in float32, .*Cast scales first",
    )
    yield "width", lambda: ops.LayerNorm(5)(x), errors.UnsupportedShape, r"\[..., 5\], got \(4, 6\)"
    yield "rank", lambda: ops.LayerNorm((2, 4, 6))(x), errors.UnsupportedShape, "normalized_shape"
    yield "no width", lambda: ops.RMSNorm(0), errors.UnsupportedConfig, "at least 1"
    yield "eps", lambda: ops.RMSNorm(6, eps=-1.0), errors.UnsupportedConfig, "eps must be"
    yield "bias", lambda: ops.Bias(5)(x), errors.UnsupportedShape, r"\[..., 5\], got \(4, 6\)"
    offset = functools.partial(ops.ClampedSwiGLU, glu_linear_offset=math.nan)
    yield "offset", offset, errors.UnsupportedConfig, "glu_linear_offset of ClampedSwiGLU must be a finite number"
    yield "limit", lambda: ops.ClampedSwiGLU(limit=0), errors.UnsupportedConfig, "SwiGLU clamps nothing"
    yield "alpha", lambda: ops.ClampedSwiGLU(alpha=math.nan), errors.UnsupportedConfig, "finite"
    for beta in (0.0, -4.0, math.nan, math.inf):
        yield f"beta1 {beta}", lambda b=beta: ops.SiTUGLU(beta1=b), errors.UnsupportedConfig, "beta1 bounds a half"
        yield f"beta2 {beta}", lambda b=beta: ops.ScaledSiTUGLU(beta2=b), errors.UnsupportedConfig, "beta2 bounds"
    for kind in (ops.ScaledSwiGLU, ops.ScaledClampedSwiGLU, ops.ScaledSiTUGLU, ops.ScaledSReLU):
        again, says = functools.partial(kind, activation_recompute_in_mlp=True), f"{kind.__name__} keeps x and the"
        yield f"recompute {kind.__name__}", again, errors.UnsupportedConfig, says
    yield "scale", lambda: ops.ConstantScale(math.inf), errors.UnsupportedConfig, "finite"
    yield "p", lambda: ops.Dropout(1.5), errors.UnsupportedConfig, "probability"
    yield "seed", lambda: ops.Dropout(0.5)(x, torch.tensor([1])), errors.UnsupportedConfig, "int64 tensor"
    yield "devices", lambda: ops.RMSNorm(6, device="meta")(x), errors.UnsupportedDevice, "Move them together"


@pytest.mark.parametrize(
    ("call", "error", "says"), [r[1:] for r in unsupported_reasons()], ids=[r[0] for r in unsupported_reasons()]
)
def test_refusals_say_what_to_do(call, error, says):
    with pytest.raises(error, match=says):
        call()


# -- in a graph --------------------------------------------------------------------------------------------------------


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_is_eager_bit_for_bit_in_one_node_each_way(name, dtype):
    op = make(name, dtype)
    twin, seen = copy.deepcopy(op), []

    def backend(gm, example_inputs):
        def capture(inner, _):
            seen.append([str(n.target) for n in inner.graph.nodes if n.op == "call_function"])
            return inner.forward

        return aot_autograd(fw_compiler=capture, bw_compiler=capture)(gm, example_inputs)

    call = compiled(op, backend=backend)
    for seed in (0, 5):
        inputs, dy = batch(name, dtype=dtype, seed=seed)
        assert_equal(step(op, inputs, dy, call=call), step(twin, inputs, dy))
    forward, backward = ([n for n in graph if "getitem" not in n] for graph in seen)
    assert forward == ["octavo.run.default"]
    assert backward == ["octavo.run_bwd.default"]
    with torch.no_grad():
        assert_same(compiled(op)(*inputs), twin(*inputs))


@pytest.mark.parametrize("name", ["swiglu", "layer norm"])
def test_inductor_gives_the_bits_of_eager(name):
    op = make(name)
    twin, call = copy.deepcopy(op), compiled(op, backend="inductor")
    for seed in (0, 5):
        inputs, dy = batch(name, seed=seed)
        assert_equal(step(op, inputs, dy, call=call), step(twin, inputs, dy))


@every
def test_one_graph_serves_many_batch_sizes(name):
    op = make(name)
    twin, call = copy.deepcopy(op), compiled(op, dynamic=True)
    for seed, m in enumerate((4, 7, 33, 5)):
        inputs, dy = batch(name, (m, 3), seed=seed)
        assert_equal(step(op, inputs, dy, call=call), step(twin, inputs, dy))
    assert counters["stats"]["unique_graphs"] == 1


def test_equal_settings_share_a_graph():
    pair = nn.Sequential(*[nn.Sequential(ops.LayerNorm(8), ops.GELU(), ops.Bias(8)) for _ in range(12)])
    call = compiled(lambda block, x: block(x))
    for block in pair:
        call(block, torch.randn(4, 8)).sum().backward()
    assert counters["stats"]["unique_graphs"] == 1


@every
def test_operators_pass_their_own_tests(name):
    op = make(name)
    (x, *rest), dy = batch(name)
    calls = recorded(lambda t: op(t, *rest), x.requires_grad_(), dy)
    assert [str(f) for f, _ in calls] == ["octavo.run.default", "octavo.run_bwd.default"]
    for func, args in calls:
        if hides_writes(func, args):
            torch.library.opcheck(
                func, without_gradients(args), test_utils=("test_faketensor", "test_aot_dispatch_dynamic")
            )
        else:
            torch.library.opcheck(func, args)


@every
def test_shapes_without_data(name):
    inputs, dy = batch(name)
    with FakeTensorMode(allow_non_fake_inputs=True):
        op = OPS[name][0]()
        y = op(*[torch.empty(t.shape, requires_grad=True) for t in inputs])
    assert y.shape == dy.shape


def test_a_model_of_basic_operations_trains_compiled_as_eagerly():
    model = nn.Sequential(
        ops.RMSNorm(16), ops.Linear(16, 64), ops.SwiGLU(), ops.Linear(32, 16), ops.Bias(16), ops.ConstantScale(0.5),
        ops.Reshape((-1, 16)), ops.L2Normalization(), ops.Identity(),
    )  # fmt: skip
    twin, call = copy.deepcopy(model), compiled(model)
    for seed in range(3):
        x, dy = data(4, 2, 16, seed=seed), data(8, 16, seed=seed + 1)
        assert_equal(step(model, [x], dy, call=call), step(twin, [x], dy))
        for m in (model, twin):
            torch.optim.SGD(m.parameters(), 0.1).step()
    assert counters["stats"]["unique_graphs"] == 1


def test_the_example_in_the_docs_runs(monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    docs = Path(octavo.__file__).parents[1] / "docs"
    page = (docs / "operations.md").read_text()
    names = {}
    exec(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1], names)
    assert names["y"].shape == (8, 256)
    names_of = ("fusing", "writing-an-operation", "writing-a-fused-operation", "operation-reference")
    names_of += ("fused-operation-reference", "by-hand")
    pages = page + "".join((docs / f"{name}.md").read_text() for name in names_of)
    assert [name for name in ops.__all__ if name not in pages] == []


def test_the_facade_names_every_activation():
    exported = [getattr(ops, name) for name in ops.__all__]
    kinds = [cls for cls in exported if isinstance(cls, type) and issubclass(cls, Activation)]
    named = {cls.NAME for cls in kinds if cls is not Activation}
    assert named == ACTIVATIONS.keys()
    assert octavo.ops.Linear is octavo.Linear
    assert octavo.ops.GroupedLinear is octavo.GroupedLinear
    assert all(name in ops.__all__ for name, v in vars(ops).items() if isinstance(v, type) and v is not Any)


# -- on a GPU ----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@every
def test_compiled_is_eager_on_a_gpu(name):
    op = make(name, torch.bfloat16).cuda()
    twin, call = copy.deepcopy(op), compiled(op, backend="inductor")
    for seed in (0, 5):
        inputs, dy = batch(name, (64, 3), torch.bfloat16, seed)
        inputs, dy = [t.cuda() for t in inputs], dy.cuda()
        assert_equal(step(op, inputs, dy, call=call), step(twin, inputs, dy))


@pytest.mark.gpu
@every
def test_captured_in_a_cuda_graph(name):
    op = make(name, torch.bfloat16).cuda()
    inputs, dy = batch(name, (64, 3), torch.bfloat16)
    static, static_dy = [t.cuda().requires_grad_() for t in inputs], dy.cuda()
    leaves = [*static, *op.parameters()]

    def run():
        y = op(*static)
        return [y.detach(), *torch.autograd.grad(y, leaves, static_dy)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for seed in (3, 7):
        inputs, dy = batch(name, (64, 3), torch.bfloat16, seed)
        with torch.no_grad():
            for kept, t in zip([*static, static_dy], [*inputs, dy], strict=True):
                kept.copy_(t)
        graph.replay()
        assert_equal([t.clone() for t in found], run())


@pytest.mark.gpu
def test_vectors_may_be_strided():
    (x, scales), dy = batch("scaled swiglu", (64,), torch.bfloat16)
    x, scales, dy = x.cuda(), scales.cuda(), dy.cuda()
    op = ops.ScaledSwiGLU()
    want = step(op, (x, scales), dy)
    apart = torch.stack((scales, scales), 1)[:, 0].requires_grad_()
    x.requires_grad_()
    y = op(x, apart)
    assert_equal([y.detach(), *torch.autograd.grad(y, (x, apart), dy)], want)


@pytest.mark.gpu
def test_dropout_draws_anew_at_every_replay():
    op, x = ops.Dropout(0.5), torch.ones(64, 64, device="cuda")
    op(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = op(x)
    masks = []
    for _ in range(2):
        graph.replay()
        masks.append(y.clone())
    assert not torch.equal(*masks)


@pytest.mark.parametrize("x", [None, [1.0], "x", torch.zeros(4, 8).numpy()], ids=["None", "list", "word", "numpy"])
@pytest.mark.parametrize("build", [lambda: octavo.Linear(8, 8), ops.GELU, lambda: ops.RMSNorm(8)])
def test_what_is_no_tensor_is_called_that(build, x):
    for module in (build(), octavo.Sequential(build(), ops.GELU())):
        with pytest.raises(errors.UnsupportedDtype, match=rf"takes a tensor, got {type(x).__name__}\. Make one"):
            module(x)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float64])
@pytest.mark.parametrize("build", [lambda: octavo.Linear(8, 8), ops.GELU, lambda: ops.RMSNorm(8)])
def test_dtypes_that_are_not_taken_are_named_in_runs_too(build, dtype):
    for module in (build(), octavo.Sequential(build(), ops.GELU()), octavo.Sequential(build())):
        with pytest.raises(errors.UnsupportedDtype, match=f"got {dtype}. Cast x first"):
            module(torch.zeros(4, 8).to(dtype))


@pytest.mark.parametrize("module", [ops.Dropout(0.5), octavo.Sequential(ops.GELU(), ops.Dropout(0.5))])
def test_a_seed_that_is_no_tensor_is_called_that(module):
    given = {"op_kwargs": {1: {"seed": 3}}} if isinstance(module, octavo.Sequential) else {"seed": 3}
    with pytest.raises(errors.UnsupportedDtype, match=r"The seed of Dropout is an int64 tensor .*, got 3"):
        module(torch.randn(4, 8), **given)
