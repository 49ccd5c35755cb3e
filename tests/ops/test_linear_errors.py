"""How far a quantized linear is from the unquantized one: within a tolerance for each recipe on signed data with
outliers, and on data of a wide range, which is what tells one recipe from another."""

import pytest
import torch

import octavo
from octavo.recipes import SHIPPED
from tests.support.linear_oracle import assert_result, make, randn, run, spiky
from tests.support.recipe_traits import QUANTIZED, gemm_error, has_four_bits
from tests.support.steps import relative_error

M, N, K = 256, 192, 320


def exact(x, w, dy):
    x, w, dy = x.double(), w.double(), dy.double()
    return {"y": x @ w.T, "dx": dy @ w, "dw": dy.T @ x}


def warmed(layer, x, dy):
    """Delayed scales that have seen this data once; other recipes have nothing to warm."""
    run(layer, x, dy)
    octavo.step(layer)
    return layer


@pytest.mark.parametrize("recipe", QUANTIZED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_within_the_tolerance_table_on_signed_data_with_outliers(recipe, dtype):
    x, dy = spiky(M, K, dtype=dtype, size=8.0), spiky(M, N, dtype=dtype, size=8.0, seed=2)
    layer = octavo.Linear(K, N, bias=False, dtype=dtype, recipe=recipe)
    with torch.no_grad():
        layer.weight.copy_(0.1 * randn(N, K, seed=1))
    assert (x < 0).any() and (dy < 0).any()
    found = run(warmed(layer, x, dy), x, dy)
    want = exact(x, layer.weight.detach(), dy)
    for name, gemm in {"y": "fprop", "dx": "dgrad", "dw": "wgrad"}.items():
        error, tolerance = relative_error(getattr(found, name), want[name]), gemm_error(recipe, gemm)
        assert 0.25 * tolerance < error <= tolerance, name  # the lower bound shows that codes were multiplied


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bf16_differs_by_rounding_only(dtype):
    x, dy, layer = (
        spiky(M, K, dtype=dtype),
        spiky(M, N, dtype=dtype, seed=2),
        make("bf16", K, N, dtype=dtype, bias=False),
    )
    found, want = run(layer, x, dy), exact(x, layer.weight.detach(), dy)
    for name in ("y", "dx", "dw"):
        assert relative_error(getattr(found, name), want[name]) < (1e-6 if dtype == torch.float32 else 3e-3)


@pytest.mark.parametrize("override", ["backward='high_precision'", "backward='dequantized'"])
@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-block", "mxfp8"])
def test_backward_overrides_are_nearer_than_the_plain_recipe(recipe, override):
    x, dy = spiky(M, K), spiky(M, N, seed=2)
    plain, other = make(recipe, K, N, bias=False), make(f"{recipe}({override})", K, N, bias=False)
    want = exact(x, plain.weight.detach(), dy)
    a, b = run(plain, x, dy), run(other, x, dy)
    for name in ("dx", "dw"):
        assert relative_error(getattr(b, name), want[name]) < 0.75 * relative_error(getattr(a, name), want[name])


def test_a_dequantized_backward_is_the_gradient_of_the_quantized_forward():
    """dx · dx_in equals dy · dy_out for the linear map that the weight's codes stand for, to rounding."""
    recipe = "fp8-rowwise(backward='dequantized')"
    layer, x, dy = make(recipe, K, N, bias=False), spiky(8, K), spiky(8, N, seed=2)
    q = octavo.recipe(recipe).linear().fprop.right.quantize(layer.weight.detach())
    found = run(layer, x, dy)
    assert relative_error(found.dx, dy.double() @ q.dequantize(torch.float32).double()) < 1e-6


# -- wide range ----------------------------------------------------------------------------------------------------


def rows_times(power, m=128, k=1024):
    span = torch.rand(m, 1, generator=torch.Generator().manual_seed(5))
    return randn(m, k) * torch.exp2(2 * power * span - power)


def one_outlier(m=128, k=1024):
    x = randn(m, k)
    x[3, 5] = 2.0**20
    return x


WIDE = {"rows12": rows_times(12), "rows20": rows_times(20), "outlier": one_outlier()}
# per-row error of y: median, and whether a row is lost altogether. First x quantized alone; w's own error comes on
# top: sqrt(.027² + .0266²) = .038, sqrt(.035² + .0266²) = .044, sqrt(.099² + .11²) = .148
IMMUNE, LOST = (0.038, False), (1.0, True)
EXPECTED = {
    ("rows12", "tensor"): (0.044, True),
    ("rows12", "nvfp4"): (0.150, True),
    ("rows20", "tensor"): LOST,
    ("rows20", "nvfp4"): LOST,
    ("outlier", "tensor"): (0.96, True),
    ("outlier", "nvfp4"): (0.78, True),
}


def scaling_of_x(recipe):
    quantizer = octavo.recipe(recipe).linear().fprop.left
    return "nvfp4" if quantizer.two_level else "tensor" if quantizer.block == (None, None) else "rows or blocks"


def wide_layer(recipe, x, n=64):
    layer = octavo.Linear(x.shape[1], n, bias=False, recipe=recipe)
    with torch.no_grad():
        layer.weight.copy_(0.02 * randn(n, x.shape[1], seed=1))
    return layer


@pytest.mark.parametrize("recipe", QUANTIZED)
@pytest.mark.parametrize("data", WIDE)
def test_wide_range_data_costs_what_it_should(recipe, data):
    x = WIDE[data]
    layer = warmed(wide_layer(recipe, x), x, randn(128, 64, seed=2))
    with torch.no_grad():
        y = layer(x).double()
    want = x.double() @ layer.weight.detach().double().T
    error = (y - want).norm(dim=1) / want.norm(dim=1)
    median, loses_a_row = EXPECTED.get((data, scaling_of_x(recipe)), IMMUNE)
    assert error.median().item() == pytest.approx(median, rel=0.1)
    assert (error.max() > 0.9).item() == loses_a_row
    if not loses_a_row:
        assert error.max() < 0.06


@pytest.mark.parametrize(("recipe", "median"), [("fp8-current", 0.060), ("fp8-rowwise", 0.038), ("mxfp8", 0.038)])
def test_wide_range_gradients_cost_what_they_should(recipe, median):
    """E5M2 has the range that E4M3 lacks: rows of dy over 24 binades survive one scale."""
    x, dy = randn(128, 64), rows_times(12)
    layer = octavo.Linear(64, 1024, bias=False, recipe=recipe)
    with torch.no_grad():
        layer.weight.copy_(0.02 * randn(1024, 64, seed=1))
    found, want = run(layer, x, dy).dx.double(), dy.double() @ layer.weight.detach().double()
    error = (found - want).norm(dim=1) / want.norm(dim=1)
    assert error.median().item() == pytest.approx(median, rel=0.1)
    assert error.max() < 0.1


# -- special values ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", SHIPPED)
def test_zeros_give_zeros(recipe):
    layer = make(recipe, bias=False)
    found = run(layer, torch.zeros(21, 48), torch.zeros(21, 40))
    for name in ("y", "dx", "dw"):
        assert not getattr(found, name).any(), name


@pytest.mark.parametrize("recipe", [r for r in SHIPPED if not has_four_bits(r)])
def test_a_nan_in_x_reaches_its_row_and_stays_out_of_dx(recipe):
    layer, x, dy = make(recipe), spiky(21, 48), spiky(21, 40, seed=2)
    x[5, 7] = float("nan")
    found = run(layer, x, dy)
    assert found.y[5].isnan().all()
    assert found.dw[:, 7].isnan().all()
    assert not found.dx.isnan().any()


def test_delayed_scales_that_saw_the_data_are_the_current_ones():
    """Same formula, same bits."""
    x, dy = spiky(64, 48, dtype=torch.bfloat16), spiky(64, 40, dtype=torch.bfloat16, seed=2)
    recipes = ("fp8-delayed(cold_start='one')", "fp8-current")
    delayed, current = (make(recipe, dtype=torch.bfloat16) for recipe in recipes)
    first = run(delayed, x, dy)
    octavo.step(delayed)
    want = run(current, x, dy)
    assert not torch.equal(first.y, want.y)  # a multiplier of 1 before
    assert_result(run(delayed, x, dy), want)
