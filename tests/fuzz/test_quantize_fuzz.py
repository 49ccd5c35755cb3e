"""Every quantizer on random cases: codes and scales are the oracle's, byte for byte, on every device."""

import ast
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

import octavo
from tests.fuzz import formats, oracle, schemes
from tests.fuzz.draw import KINDS, LAYOUTS, RECIPES, SIZES, choose, data, laid_out, replay, spoil
from tests.fuzz.formats import E2M1, E4M3, E5M2, decode_e8m0
from tests.fuzz.oracle import Recipe
from tests.fuzz.schemes import Quantized, quantize
from tests.support.pairs import some

FAST, CHUNKS, CHUNK = 150, 20, 500
OPERANDS = (  # (operand, orientation, GEMM, side): where a recipe's resolved form keeps the quantizer
    ("x", "row", "fprop", "left"),
    ("w", "row", "fprop", "right"),
    ("dy", "row", "dgrad", "left"),
    ("w", "column", "dgrad", "right"),
    ("dy", "column", "wgrad", "left"),
    ("x", "column", "wgrad", "right"),
)
WHOLE = tuple(name for name in RECIPES if name != "bf16" and "='bf16'" not in name and "backward" not in name)


@dataclass(frozen=True)
class Case:
    """All that was drawn, but for the values."""

    seed: int
    recipe: str
    operand: int
    rows: int
    columns: int
    dtype: str
    kind: str
    layout: str
    multiplier: float
    rounding_seed: tuple[int, int]
    spoiled: bool


def draw(seed: int, nonfinite: bool) -> Case:
    rng = np.random.default_rng((seed, 2))
    return Case(
        seed=seed,
        recipe=choose(rng, WHOLE),
        operand=int(rng.integers(len(OPERANDS))),
        rows=choose(rng, (0, *SIZES, *SIZES)),
        columns=choose(rng, (0, *SIZES, *SIZES)),
        dtype=choose(rng, ("bfloat16", "float16", "float32")),
        kind=choose(rng, KINDS),
        layout=choose(rng, LAYOUTS),
        multiplier=float(np.float32(np.exp2(rng.uniform(-100, 100)))),
        rounding_seed=(int(rng.integers(2**62)), int(rng.integers(2**32))),
        spoiled=nonfinite,
    )


def run(case: Case, device: str) -> None:
    rng = np.random.default_rng((case.seed, 3))
    operand, orientation, gemm, side = OPERANDS[case.operand]
    values = data(rng, (case.rows, case.columns), case.kind, case.dtype)
    x, values = laid_out(spoil(rng, values) if case.spoiled else values, case.layout, case.dtype, device)
    recipe = Recipe.parse(case.recipe)
    scheme = recipe.scheme(operand, orientation)
    spec = getattr(getattr(octavo.recipe(case.recipe).linear(), gemm), side)
    settings = {}
    if scheme.given:
        settings["inverse_scale"] = torch.tensor([case.multiplier], device=device)
    if scheme.stochastic:
        settings["seed"] = torch.tensor(case.rounding_seed, device=device)
    found = spec.quantize(x, -1 if orientation == "row" else 0, **settings)
    want = quantize(
        scheme,
        values if orientation == "row" else values.T,
        case.dtype,
        multiplier=case.multiplier,
        seed=case.rounding_seed,
        stream=int(orientation == "column"),
    )
    compare(found, want)


def compare(found: octavo.QTensor, want: Quantized) -> None:
    """Bytes, but where the scale is NaN: whatever the codes are there, they decode to NaN."""
    codes = found.codes.view(torch.uint8).cpu().numpy()
    if want.scheme.kind == "nvfp4":  # two to a byte, the low nibble first
        codes = np.stack((codes & 15, codes >> 4), -1).reshape(codes.shape[0], 2 * codes.shape[1])
        assert_bytes("global scale", found.global_scale.cpu().numpy(), np.array([want.over_all]))
    lost = np.isnan(want.scale) | (want.over_all is not None and np.isnan(want.over_all))
    grid = found.scale.contiguous().cpu().numpy()
    if want.over_all is None or not np.isnan(want.over_all):
        assert_bytes("scale", grid, want.grid)
    assert codes.shape == want.codes.shape, f"codes have shape {codes.shape}, not {want.codes.shape}"
    assert_bytes("codes", np.where(lost, 0, codes), np.where(lost, 0, want.codes))


def assert_bytes(what: str, found: np.ndarray, want: np.ndarray) -> None:
    assert found.shape == want.shape, f"{what} has shape {found.shape}, not {want.shape}"
    same = (found == want) | (np.isnan(found) & np.isnan(want))
    if not same.all():
        at = tuple(int(i) for i in np.argwhere(~same)[0])
        raise AssertionError(
            f"{what}: {int((~same).sum())} of {same.size} differ, the first at {at}: {found[at]} instead of {want[at]}"
        )


def check(seed: int, device: str = "cpu", nonfinite: bool = False) -> None:
    """Draw one case and run it; a failure names it, and how to run it again."""
    case = draw(seed, nonfinite)
    replay("quantize", case, device, lambda: run(case, device))


# -- tests -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", [formats, schemes, oracle], ids=lambda module: module.__name__)
def test_the_oracle_imports_nothing_of_octavo(module):
    names = []
    for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    assert names and not [n for n in names if n.split(".")[0] in ("octavo", "torch")]
    assert all(n.startswith("tests.fuzz.") for n in names if n.startswith("tests"))


@pytest.mark.parametrize("name", ["E4M3", "E5M2", "E2M1", "E8M0"])
def test_the_oracles_formats_are_those_of_ml_dtypes(name):
    """Every code's value, and every float16 that is finite, encoded."""
    other = {
        "E4M3": ml_dtypes.float8_e4m3fn,
        "E5M2": ml_dtypes.float8_e5m2,
        "E2M1": ml_dtypes.float4_e2m1fn,
        "E8M0": ml_dtypes.float8_e8m0fnu,
    }[name]
    codes = np.arange(16 if name == "E2M1" else 256, dtype=np.uint8)
    values = codes.view(other).astype(np.float64)
    if name == "E8M0":
        np.testing.assert_array_equal(decode_e8m0(codes), values)
        return
    fmt = {"E4M3": E4M3, "E5M2": E5M2, "E2M1": E2M1}[name]
    np.testing.assert_array_equal(fmt.values, values)
    x = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)
    x = x[np.abs(x) <= fmt.max]
    np.testing.assert_array_equal(fmt.encode(x), x.astype(other).view(np.uint8))


def test_a_sample_of_drawn_casts_agrees_with_the_oracle():
    for seed in range(FAST):
        check(seed)


def test_a_sample_that_is_not_finite():
    for seed in range(FAST):
        check(seed, nonfinite=True)


@pytest.mark.slow
@pytest.mark.parametrize("nonfinite", [False, True], ids=["finite", "nonfinite"])
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_drawn_casts_agree_with_the_oracle(chunk, nonfinite):
    for seed in range(FAST + chunk * CHUNK, FAST + (chunk + 1) * CHUNK):
        check(seed, nonfinite=nonfinite)


@pytest.mark.gpu
@pytest.mark.parametrize("nonfinite", [False, True], ids=["finite", "nonfinite"])
@some("chunk", range(20), range(4))
def test_on_a_gpu(chunk, nonfinite):
    for seed in range(15 * chunk, 15 * (chunk + 1)):
        check(seed, "cuda", nonfinite)
