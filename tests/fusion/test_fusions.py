"""The shipped fusions: each is chosen, and changes nothing but the speed.

Arithmetic of float32 is the same fused and unfused, bit for bit, but for one epilogue that saves a rounding. In
bfloat16 more of them do: there, fused is as near to float64 as unfused."""

import pytest
import torch

import octavo
from octavo import ops
from octavo.kernels.gemm import reference as gemm_reference
from tests.support.fusion_cases import CASES, ROUNDED_ONCE, build, data
from tests.support.linear_oracle import assert_same, spiky
from tests.support.saved_bytes import Saved
from tests.support.sequentials import (
    FFN,
    FUSED_AT_ONCE,
    QUANTIZED,
    H,
    M,
    assert_near,
    assert_unfused,
    batch,
    every,
    fill,
    fired,
    mlp,
    quantized,
    reference_step,
    residual,
    unbiased,
    unfused,
)
from tests.support.steps import assert_equal, assert_state, compiled, relative_error, step

BACKWARDS = ("high_precision", "dequantized")


# they have nothing to gain otherwise
OF_QUANTIZED = ("norm-linear", "add-norm-linear", "activation-linear", "mlp", "linear-scale")
NO_ROUNDING_SAVED = OF_QUANTIZED  # y of each operation is rounded as it is alone
SLOW = ("fp8-rowwise", "fp8-block", "mxfp8")  # recipes that others of their kind stand for


def grid(recipes):
    """Cases by recipes; a sample of recipes where they are many."""
    return pytest.mark.parametrize(
        ("name", "recipe"),
        [
            pytest.param(
                name,
                FUSED_AT_ONCE.get(recipe, recipe),
                id=f"{name}-{recipe}",
                marks=(pytest.mark.slow,) if recipe in SLOW else (),
            )
            for name in CASES
            for recipe in recipes
        ],
    )


def assert_fused(name, found, want, what=""):
    """Bit for bit, but for those that are nearer to the truth."""
    for i, (a, b) in enumerate(zip(found, want, strict=True)):
        if CASES[name][0] in ROUNDED_ONCE and i == 0:
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6 * b.abs().max().item() if b.numel() else 0.0)
        else:
            assert_same(a, b, f"{what} {i}")


# -- chosen, and the same ----------------------------------------------------------------------------------------------


@grid(("bf16", *QUANTIZED))
def test_a_rule_fires_and_fused_is_unfused_bit_for_bit(name, recipe):
    rule = CASES[name][0]
    model = build(name, recipe)
    twin = unfused(model)
    for seed in range(2):
        inputs, dys = data(twin, seed=seed)
        if recipe != "bf16" or rule not in OF_QUANTIZED:
            assert rule in fired(model, inputs)
        else:
            assert rule not in fired(model, inputs)
        assert fired(twin, inputs) == ()
        assert_fused(name, step(model, inputs, dys), step(twin, inputs, dys), f"step {seed}")
        octavo.step(model), octavo.step(twin)
    assert_state(model, twin)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("recipe", ["bf16", "fp8-current"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_in_half_precision_fused_is_as_near_to_float64_as_unfused(name, recipe, dtype):
    model = build(name, recipe, dtype)
    twin = unfused(model)
    inputs, dys = data(twin, dtype=dtype)
    found, other = step(model, inputs, dys), step(twin, inputs, dys)
    if CASES[name][0] in NO_ROUNDING_SAVED:
        assert_equal(found, other)
        return
    want = reference_step(model, inputs, dys, public=len(dys) > 1)
    for i, (a, b, c) in enumerate(zip(found, other, want, strict=True)):
        assert a.dtype == b.dtype == dtype
        if c.any():
            assert relative_error(a, c) <= 1.1 * relative_error(b, c) + torch.finfo(dtype).eps, i


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("recipe", ["bf16", "fp8-current", "nvfp4"])
def test_fused_against_float64(name, recipe):
    model = build(name, recipe)
    inputs, dys = data(model)
    want = reference_step(model, inputs, dys, public=len(dys) > 1)
    found = step(model, inputs, dys)
    zeros = [i for i, t in enumerate(want) if not t.any()]  # of a scale of 0
    for i in zeros:
        assert not found[i].any()
    keep = [i for i in range(len(want)) if i not in zeros]
    assert_near([found[i] for i in keep], [want[i] for i in keep], recipe, outputs=len(dys))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("lead", [(), (1, 7), (2, 3, 5)], ids=str)
def test_any_leading_dims(name, lead):
    model = build(name, "fp8-current")
    twin = unfused(model)
    inputs, dys = data(twin, lead)
    assert_fused(name, step(model, inputs, dys), step(twin, inputs, dys))


@pytest.mark.parametrize("name", CASES)
def test_a_fused_run_takes_no_tokens(name):
    model = build(name, "fp8-current")
    inputs, dys = data(model, (0,))
    found = step(model, inputs, dys)
    assert found[0].shape == dys[0].shape
    assert not any(t.any() for t in found)


@pytest.mark.parametrize("name", ["linear, bias", "linear, bias, gelu"])
def test_sizes_that_are_multiples_of_nothing(name):
    layers = [unbiased("fp8-current", 3, 5), ops.Bias(3), ops.GELU()][: len(CASES[name][1]("bf16"))]
    model, x, dy = fill(octavo.Sequential(*layers)), spiky(7, 5), spiky(7, 3, seed=1)
    assert CASES[name][0] in fired(model, [x])
    assert_unfused(model, x, dy)


@quantized
@pytest.mark.parametrize("act", [ops.ReLU, ops.GELU, ops.SwiGLU], ids=lambda act: act.NAME)
def test_the_gradient_of_an_activation_goes_with_that_of_the_bias(recipe, act):
    width = 2 * H if act is ops.SwiGLU else H
    model, (x, dy) = fill(octavo.Sequential(unbiased(recipe, width), ops.Bias(width), act())), batch(4, 1, 8)
    assert "activation-bias" in fired(model, [x])
    assert_unfused(model, x, dy)


@pytest.mark.parametrize("recipe", ["bf16", "fp8-current(backward='high_precision')"])
def test_the_activation_bias_rule_does_not_fire_where_nothing_is_quantized(recipe):
    model, (x, dy) = fill(octavo.Sequential(unbiased(recipe), ops.Bias(H), ops.GELU())), batch()
    explained = model.explain(x.clone().requires_grad_())
    assert "activation-bias" not in explained.fired
    assert any(r.rule == "activation-bias" and r.sentence for r in explained.refused)
    assert_unfused(model, x, dy)


@pytest.mark.parametrize("extra", [True, False], ids=["with", "without"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_gradient_of_a_norm_takes_the_residuals_along(extra, dtype):
    model = fill(octavo.Sequential(ops.MakeExtraOutput(), ops.RMSNorm(H)).to(dtype))
    x, dy = batch(dtype=dtype)
    assert "add-rmsnorm" in fired(model, [x])
    dys = (dy, spiky(M, H, seed=7, dtype=dtype) if extra else None)
    found, want = step(model, x, dys), step(unfused(model), x, dys)
    if dtype == torch.float32:
        assert_equal(found, want)
    reference = reference_step(model, x, dys, public=True)
    for a, b, c in zip(found, want, reference, strict=True):
        assert relative_error(a, c) <= 1.1 * relative_error(b, c) + torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("lead", [(M,), (3, 8)], ids=str)
def test_the_gradient_of_a_norm_and_the_residuals_are_rounded_once(dtype, lead):
    model = fill(octavo.Sequential(ops.MakeExtraOutput(), ops.RMSNorm(H)).to(dtype))
    x, dy = batch(*lead, dtype=dtype)
    dys = dy, spiky(*lead, H, seed=7, dtype=dtype)
    dx = step(model, x, dys)[2]
    exact = reference_step(model, x, dys, public=True)[2]
    halves = torch.finfo(dtype).eps / 2 * exact.abs() + 1e-6 * exact.abs().max()
    assert ((dx.double() - exact).abs() <= halves).all()
    for strange in (dys[1].mT.contiguous().mT, dys[1][..., :1].expand(*lead, H)):  # however it lies in memory
        want = step(model, x, (dy, strange.contiguous()))
        assert_equal(step(model, x, (dy, strange)), want)
        assert_equal(step(model, x, (dy, strange), call=compiled(model)), want)


@every
@pytest.mark.parametrize("extra", [True, False], ids=["with", "without"])
def test_the_gradient_of_a_linear_takes_the_residuals_along(recipe, extra):
    model, (x, dy) = fill(octavo.Sequential(ops.MakeExtraOutput(), unbiased(recipe))), batch()
    assert "linear-add" in fired(model, [x])
    dys = (dy, spiky(M, H, seed=7) if extra else None)
    assert_unfused(model, x, dys)


ADJACENT = {
    "linear, linear": lambda r: [unbiased(r), unbiased(r)],
    "linear, linear of another recipe": lambda r: [unbiased(r), unbiased("fp8-current")],
    "norm, linear, norm, linear": lambda r: [ops.RMSNorm(H), unbiased(r), ops.LayerNorm(H), unbiased(r)],
    "linear, quantize, linear": lambda r: [unbiased(r), ops.Quantize(recipe=r), unbiased(r)],
    "quantize, activation": lambda r: [ops.Quantize(recipe=r), ops.GELU()],
    "quantize of another recipe, linear": lambda r: [ops.Quantize(recipe="mxfp8"), unbiased(r)],
    "dropout, linear": lambda r: [ops.Dropout(0.0), unbiased(r)],
    "reshape, linear": lambda r: [ops.Reshape((-1, H)), unbiased(r)],
}


@pytest.mark.parametrize("name", ADJACENT)
@every
def test_any_neighbours_get_along(name, recipe):
    model, (x, dy) = fill(octavo.Sequential(*ADJACENT[name](recipe))), batch()
    assert_unfused(model, x, dy)


@pytest.mark.parametrize("recipe", QUANTIZED)
@pytest.mark.parametrize("mode", BACKWARDS)
def test_a_backward_in_high_precision_has_the_forward_of_the_recipe(recipe, mode):
    model, plain = mlp(f"{recipe}(backward='{mode}')", bias=True), mlp(recipe, bias=True)
    x, dy = batch()
    found = step(model, x, dy)
    assert_same(found[0], plain(x).detach())
    assert_equal(found, step(unfused(mlp(f"{recipe}(backward='{mode}')", bias=True)), x, dy))


@every
def test_a_whole_mlp_with_a_residual(recipe):
    model = residual(recipe)
    twin, (x, dy) = unfused(model), batch()
    assert fired(twin, [x]) == ()
    assert recipe == "bf16" or fired(model, [x])
    for seed in range(3):
        assert_equal(step(model, x * 2.0**seed, dy), step(twin, x * 2.0**seed, dy), f"step {seed}")
        octavo.step(model), octavo.step(twin)
    assert_state(model, twin)
    assert_near(step(model, x, dy), reference_step(model, x, dy), recipe)


# -- what a step costs -------------------------------------------------------------------------------------------------


@pytest.fixture
def gemms(monkeypatch):
    """How many products were formed."""
    real, calls = gemm_reference.gemm, []
    monkeypatch.setattr(gemm_reference, "gemm", lambda *a, **k: calls.append(1) or real(*a, **k))
    return calls


@pytest.mark.parametrize("rules", [(), None], ids=["fused", "unfused"])
@pytest.mark.parametrize("recipe", ["bf16", "fp8-current"])
@pytest.mark.parametrize(
    ("frozen", "products"),
    [((), 6), (("x",), 6), (("x", "0.weight"), 5), (("x", "0.weight", "1.weight"), 3), (("3.weight",), 5)],
    ids=["nothing", "x", "x and norm", "x, norm and first layer", "last layer"],
)
def test_what_nobody_wants_is_not_computed(recipe, rules, frozen, products, gemms):
    """Two layers: fprop, dgrad and wgrad of each. The first layer's dgrad is wanted by the norm before it."""
    model = mlp(recipe, rules=rules)
    for name in set(frozen) - {"x"}:
        model.get_parameter(name).requires_grad_(False)
    x, dy = batch()
    found = step(model, x, dy, frozen=(0,) if "x" in frozen else ())
    assert len(gemms) == products
    for name, grad in zip(("x", *(n for n, _ in model.named_parameters())), found[1:], strict=True):
        assert (grad is None) == (name in frozen), name


def test_a_fused_mlp_keeps_codes_and_what_the_activation_had():
    model, m = mlp("fp8-current", dtype=torch.bfloat16), 256
    x = spiky(m, H, dtype=torch.bfloat16).requires_grad_()
    assert "mlp" in fired(model, [x.detach()])
    kept = []
    for each in (model, unfused(model)):
        with Saved(each) as saved:
            y = each(x)
        y.sum().backward()
        kept.append(saved.nbytes)
    weights = H * 2 * FFN + FFN * H
    assert kept[0] <= 2 * m * H + m * H + 2 * m * 2 * FFN + weights + 8 * m + 256  # x, its codes, what SwiGLU had
    assert kept[0] < kept[1]


# -- gradients that go elsewhere ---------------------------------------------------------------------------------------


FUSED_LINEARS = {
    name: case
    for name, case in CASES.items()
    if not name.startswith(("zero", "linear, scale 0")) and any(isinstance(op, octavo.Linear) for op in case[1]("bf16"))
}
elsewhere = pytest.mark.parametrize("name", FUSED_LINEARS)


def linears(model):
    return [op for op in model if isinstance(op, octavo.Linear)]


def give_buffers(model, value, flag=True):
    for op in linears(model):
        op.fuse_wgrad_accumulation = True
        op.weight.main_grad = torch.full_like(op.weight, value, dtype=torch.float32)
        if flag:
            op.weight.grad_added_to_main_grad = False


@elsewhere
@pytest.mark.parametrize("recipe", ["bf16", "fp8-current"])
@pytest.mark.parametrize("overwrite", [False, True], ids=["add", "overwrite"])
def test_main_grad_is_added_to_or_written_over(name, recipe, overwrite):
    model = build(name, recipe)
    twin = unfused(model)
    give_buffers(model, float("nan") if overwrite else 0.5)
    for op in linears(model):
        op.weight.overwrite_main_grad = overwrite
    inputs, dys = data(twin)
    found, want = step(model, inputs, dys), step(twin, inputs, dys)
    names = [None] * (len(inputs) + len(dys)) + [n for n, _ in model.named_parameters()]
    weights = {n for n, p in model.named_parameters() if hasattr(p, "main_grad")}
    for n, a, b in zip(names, found, want, strict=True):
        if n in weights:
            p = model.get_parameter(n)
            assert_same(p.main_grad, b if overwrite else 0.5 + b, n)
            assert p.grad_added_to_main_grad is True
            assert not a.any()  # a dummy, so that hooks fire
    keep = [i for i, n in enumerate(names) if n not in weights]
    assert_fused(name, [found[i] for i in keep], [want[i] for i in keep])


@elsewhere
def test_without_the_flag_no_gradient_comes(name):
    model = build(name, "fp8-current")
    give_buffers(model, 0.0, flag=False)
    inputs, dys = data(model)
    step(model, inputs, dys)
    for op in linears(model):
        assert op.weight.grad is None
        assert op.weight.main_grad.any() or "scale 0" in name


@elsewhere
def test_hooks_fire_for_the_dummy(name):
    model, seen = build(name, "fp8-current"), []
    give_buffers(model, 0.0)
    for op in linears(model):
        op.weight.register_post_accumulate_grad_hook(seen.append)
    inputs, dys = data(model)
    step(model, inputs, dys)
    assert len(seen) == len(linears(model))


@elsewhere
@pytest.mark.parametrize("recipe", ["bf16", "fp8-current", "nvfp4"])
@pytest.mark.parametrize("main_grad", [False, True], ids=["grad", "main_grad"])
def test_deferred_weight_gradients(name, recipe, main_grad):
    model = build(name, recipe)
    twin = unfused(model)
    for op in linears(model):
        op.delay_wgrad_compute = True
    if main_grad:
        give_buffers(model, 0.0, flag=False)
    inputs, dys = data(twin)
    found, want = step(model, inputs, dys), step(twin, inputs, dys)
    for op in linears(model):
        assert op.weight.grad is None
        assert not main_grad or not op.weight.main_grad.any()
        op.backward_dw()
    for n, b in zip([n for n, _ in twin.named_parameters()], want[len(inputs) + len(dys) :], strict=True):
        p = model.get_parameter(n)
        assert_same(p.main_grad if main_grad and hasattr(p, "main_grad") else p.grad, b, n)
    assert_fused(name, found[: len(inputs) + len(dys)], want[: len(inputs) + len(dys)])


@elsewhere
@pytest.mark.parametrize("which", ["weights", "input", "all but the last parameter"])
def test_fused_runs_give_no_gradient_to_frozen_parts(name, which):
    model = build(name, "fp8-current")
    if which == "weights":
        for op in linears(model):
            op.weight.requires_grad_(False)
    elif which != "input":
        for p in list(model.parameters())[:-1]:
            p.requires_grad_(False)
    twin = unfused(model)
    inputs, dys = data(twin)
    if which != "weights":
        dys = [dy if i == 0 else None for i, dy in enumerate(dys)]
    frozen = () if which == "weights" else tuple(range(len(inputs)))
    found = step(model, inputs, dys, frozen=frozen)
    assert_fused(name, found, step(twin, inputs, dys, frozen=frozen))
    for p in model.parameters():
        assert (p.grad is not None) == p.requires_grad
