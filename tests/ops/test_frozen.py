"""Frozen weights, frozen inputs, bias-only training: right gradients, and no kernel whose result nobody reads."""

import pytest
import torch

from octavo.kernels.gemm import reference as gemm_reference
from octavo.quant.block import reference as block
from octavo.quant.mx import reference as mx
from octavo.quant.nvfp4 import reference as nvfp4
from octavo.quant.rowwise import reference as rowwise
from octavo.quant.tensorwise import reference as tensorwise
from octavo.recipes import SHIPPED
from tests.support.linear_oracle import Result, assert_result, expected, make, seed_of, spiky
from tests.support.recipe_traits import QUANTIZED

M, N, K = 21, 40, 48
NAMES = {(M, K): "x", (N, K): "w", (M, N): "dy"}
CASES = [
    (x, w, b) for x in (True, False) for w in (True, False) for b in (True, False) if x or w or b
]  # which of x, weight, bias want a gradient
cases = pytest.mark.parametrize(("x_grad", "w_grad", "b_grad"), CASES, ids=str)


class Launches:
    """Every cast, as (tensor, orientation), and the number of GEMMs."""

    def __init__(self, monkeypatch):
        self.casts, self.gemms = [], 0
        for twin in (block, mx, nvfp4, rowwise, tensorwise):
            monkeypatch.setattr(twin, "cast", self._counting(twin.cast))
        gemm = gemm_reference.gemm

        def counted(*args, **kwargs):
            self.gemms += 1
            return gemm(*args, **kwargs)

        monkeypatch.setattr(gemm_reference, "gemm", counted)

    def _counting(self, cast):
        def counted(x, row, column, given):
            name = NAMES[tuple(x.shape)]
            self.casts += [(name, side) for side, q in (("row", row), ("column", column)) if q is not None]
            return cast(x, row, column, given)

        return counted


def prepare(recipe, x_grad, w_grad, b_grad):
    layer = make(recipe, K, N)
    layer.weight.requires_grad_(w_grad)
    layer.bias.requires_grad_(b_grad)
    return layer, spiky(M, K).requires_grad_(x_grad), spiky(M, N, seed=2)


@pytest.mark.parametrize("recipe", SHIPPED)
@cases
def test_gradients_go_where_they_are_asked_for_and_nowhere_else(recipe, x_grad, w_grad, b_grad):
    layer, x, dy = prepare(recipe, x_grad, w_grad, b_grad)
    seed = seed_of(layer)
    y = layer(x)
    y.backward(dy)
    want = expected(recipe, x, layer.weight, layer.bias, dy, seed=seed)
    want = Result(want.y, want.dx if x_grad else None, want.dw if w_grad else None, want.db if b_grad else None)
    assert_result(Result(y.detach(), x.grad, layer.weight.grad, layer.bias.grad), want)


# what backward reads, besides what forward made; square and tensorwise columns may come from the rows
NEEDED = {"x": {("w", "column"), ("w", "row"), ("dy", "row")}, "w": {("x", "column"), ("x", "row"), ("dy", "column")}}


@pytest.mark.parametrize("recipe", QUANTIZED)
@cases
def test_no_cast_and_no_gemm_is_wasted(recipe, x_grad, w_grad, b_grad, monkeypatch):
    layer, x, dy = prepare(recipe, x_grad, w_grad, b_grad)
    launches = Launches(monkeypatch)
    y = layer(x)
    assert launches.gemms == 1
    allowed = {("x", "row"), ("w", "row")} | (NEEDED["x"] if x_grad else set()) | (NEEDED["w"] if w_grad else set())
    y.backward(dy)
    assert launches.gemms == 1 + x_grad + w_grad
    made = set(launches.casts)
    assert made <= allowed
    assert {("x", "row"), ("w", "row")} <= made
    assert len(launches.casts) == len(made), "a tensor was cast twice the same way"
    if w_grad and not x_grad:
        assert ("w", "column") not in made
    if x_grad and not w_grad:
        assert ("x", "column") not in made and ("dy", "column") not in made


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_inference_makes_rows_only(recipe, monkeypatch):
    layer, x, _ = prepare(recipe, True, True, True)
    launches = Launches(monkeypatch)
    with torch.no_grad():
        layer(x)
    assert sorted(launches.casts) == [("w", "row"), ("x", "row")]
    assert launches.gemms == 1


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_a_high_precision_backward_casts_nothing(recipe, monkeypatch):
    layer, x, dy = prepare(f"{recipe}(backward='high_precision')", True, True, True)
    launches = Launches(monkeypatch)
    layer(x).backward(dy)
    assert sorted(launches.casts) == [("w", "row"), ("x", "row")]


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_a_cached_weight_is_not_cast_again(recipe, monkeypatch):
    layer, x, dy = prepare(recipe, True, True, True)
    layer(x, is_first_microbatch=True).backward(dy)
    launches = Launches(monkeypatch)
    layer(x, is_first_microbatch=False).backward(dy)
    assert all(name != "w" for name, _ in launches.casts)


def test_the_counter_counts(monkeypatch):
    layer, x, dy = prepare("fp8-rowwise", True, True, True)
    launches = Launches(monkeypatch)
    layer(x).backward(dy)
    assert set(launches.casts) == {(name, side) for name in ("x", "w", "dy") for side in ("row", "column")}
    assert launches.gemms == 3


@pytest.mark.parametrize("recipe", SHIPPED)
def test_an_output_that_nothing_requires_has_no_graph(recipe):
    layer, x, _ = prepare(recipe, False, False, False)
    y = layer(x)
    assert y.grad_fn is None and not y.requires_grad
