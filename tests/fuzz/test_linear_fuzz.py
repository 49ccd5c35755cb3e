"""octavo.Linear on random cases, against the oracle: y, dx, dW, db over a few steps, and every documented option."""

import math
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import octavo
from tests.fuzz.draw import (
    DEQUANTIZED,
    KINDS,
    LAYOUTS,
    RECIPES,
    SIZES,
    TORCH,
    assert_close,
    choose,
    coefficient,
    data,
    laid_out,
    lost_in_emulation,
    replay,
    spoil,
)
from tests.fuzz.formats import last_place, rounded
from tests.fuzz.oracle import Memory, Operands, Product, Recipe, Results, accumulated, linear
from tests.support.pairs import some

pytestmark = pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
FAST, CHUNKS, CHUNK = 60, 20, 200  # cases of the sample; of the long run


@dataclass(frozen=True)
class Case:
    """All that was drawn, but for the values."""

    seed: int
    recipe: str
    rows: int
    lead: int | None  # a dim before the rows; 0 for an x of one dim
    k: int
    n: int
    dtype: str
    weight_dtype: str
    bias: bool
    kinds: tuple[str, str, str]  # of x, w, dy
    x_layout: str
    dy_layout: str
    frozen: tuple[str, ...]
    wgrad: str
    main_dtype: str
    delayed: bool
    cached: bool
    keep_weight_codes: bool
    return_bias: bool
    ambient: bool  # the recipe by octavo.autocast, not by the layer
    autocast: bool  # x in float32 under torch.autocast
    steps: int
    spoiled: str = ""  # which operand holds values that are not finite


def draw(seed: int, nonfinite: bool) -> Case:
    rng = np.random.default_rng(seed)
    recipe = choose(rng, RECIPES + DEQUANTIZED)
    dtype = choose(rng, ("bfloat16", "float16", "float32"))
    mixed = dtype != "float32" and rng.random() < 0.3
    main = rng.random() < 0.25
    spoiled = choose(rng, ("x", "w", "dy")) if nonfinite else ""
    bias = bool(rng.random() < 0.6)
    frozen = choose(rng, ((), (), (), (), ("x",), ("w",), ("x", "b"), ("w", "b"), ("b",), ("x", "w")))
    if len(frozen) == 2 and not bias:
        frozen = frozen[:1] if "b" in frozen else ()
    cached = bool(rng.random() < 0.2)
    return Case(
        seed=seed,
        recipe=recipe,
        rows=choose(rng, (0, *SIZES, 200)),
        lead=choose(rng, (None,) * 7 + (0, 2, 3)),
        k=choose(rng, (*SIZES, *SIZES, 0)),
        n=choose(rng, (*SIZES, *SIZES, 0)),
        dtype=dtype,
        weight_dtype="float32" if mixed else dtype,
        bias=bias,
        kinds=tuple(choose(rng, KINDS) for _ in range(3)),
        x_layout=choose(rng, LAYOUTS),
        dy_layout=choose(rng, LAYOUTS),
        frozen=frozen,
        wgrad=choose(rng, ("main_grad", "overwrite", "grad_added")) if main else "grad",
        main_dtype=choose(rng, ("float32", "bfloat16")),
        delayed=bool(rng.random() < 0.15),
        cached=cached,
        keep_weight_codes=bool(rng.random() < 0.8),
        return_bias=bool(rng.random() < 0.1),
        ambient=bool(rng.random() < 0.15),
        autocast=bool(mixed and rng.random() < 0.5),
        steps=choose(rng, (1, 1, 2, 3)),
        spoiled=spoiled,
    )


class Run:
    """A case's layer beside the oracle's memory."""

    def __init__(self, case: Case, device: str) -> None:
        self.case, self.device = case, device
        self.rng = np.random.default_rng((case.seed, 1))
        self.recipe = Recipe.parse(case.recipe)
        self.memory = Memory(self.recipe) if self.recipe.name == "fp8-delayed" else None
        self.layer = octavo.Linear(
            case.k,
            case.n,
            bias=case.bias,
            device=device,
            dtype=TORCH[case.weight_dtype],
            recipe=None if case.ambient else case.recipe,
            fuse_wgrad_accumulation=case.wgrad != "grad",
            delay_wgrad_compute=case.delayed,
            keep_weight_codes=case.keep_weight_codes,
            return_bias=case.return_bias,
        )
        self.fill(self.layer.weight, data(self.rng, (case.n, case.k), case.kinds[1], case.weight_dtype))
        if case.bias:
            self.fill(self.layer.bias, data(self.rng, (case.n,), "normal", case.weight_dtype))
            self.layer.bias.requires_grad_("b" not in case.frozen)
        self.layer.weight.requires_grad_("w" not in case.frozen)
        if case.wgrad != "grad" and "w" not in case.frozen:
            weight = self.layer.weight
            main = data(self.rng, (case.n, case.k), "normal", case.main_dtype)
            weight.main_grad = torch.empty(case.n, case.k, device=device, dtype=TORCH[case.main_dtype])
            self.fill(weight.main_grad, main)
            weight.overwrite_main_grad = case.wgrad == "overwrite"
            if case.wgrad == "grad_added":
                weight.grad_added_to_main_grad = False

    def fill(self, parameter, values) -> None:
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(values))

    def __call__(self) -> None:
        for step in range(self.case.steps):
            if self.case.spoiled == "w" and step == 0:
                self.fill(self.layer.weight, spoil(self.rng, values_of(self.layer.weight)))
            for flag in (True, False) if self.case.cached else (None,):
                self.microbatch(flag)
            if self.memory is not None:
                self.memory.step()
                octavo.step(self.layer)
            with torch.no_grad():  # a power of two: every dtype holds it
                self.layer.weight.mul_(0.5)

    def operands(self) -> tuple[torch.Tensor, torch.Tensor, Operands]:
        """x and dy as tensors, and what the oracle takes."""
        case, rng = self.case, self.rng
        lead = () if case.lead == 0 else (case.rows,) if case.lead is None else (case.lead, case.rows)
        x_dtype = "float32" if case.autocast else case.dtype
        x = data(rng, (*lead, case.k), case.kinds[0], case.dtype, held=x_dtype)
        dy = data(rng, (*lead, case.n), case.kinds[2], case.dtype)
        x = spoil(rng, x) if case.spoiled == "x" else x
        dy = spoil(rng, dy) if case.spoiled == "dy" else dy
        x_tensor, x = laid_out(x, case.x_layout, x_dtype, self.device)
        dy_tensor, dy = laid_out(dy, case.dy_layout, case.dtype, self.device)
        bias = None if self.layer.bias is None or case.return_bias else values_of(self.layer.bias)
        given = Operands(
            rounded(x.reshape(math.prod(lead), case.k), case.dtype),
            values_of(self.layer.weight),
            bias,
            dy.reshape(math.prod(lead), case.n),
            case.dtype,
            case.weight_dtype,
        )
        if self.memory is not None:
            given.multipliers = self.memory.multipliers(given.x, given.w, given.dy)
            for name, tensor in (("x", given.x), ("w", given.w), ("dy", given.dy)):
                self.memory.assignments[name].observe(tensor)
        return x_tensor, dy_tensor, given

    def microbatch(self, flag: bool | None) -> None:
        case, layer = self.case, self.layer
        x, dy, given = self.operands()
        x.requires_grad_("x" not in case.frozen)
        with ExitStack() as stack:
            if case.autocast:
                stack.enter_context(torch.autocast(self.device, TORCH[case.dtype]))
            if case.ambient:
                stack.enter_context(octavo.autocast(case.recipe))
                with torch.no_grad():  # what the recipe remembers is made at a first call
                    layer(torch.zeros(1, case.k, device=self.device, dtype=x.dtype))
            given.seed = self.seed()
            y = layer(x, is_first_microbatch=flag)
        y, returned = y if case.return_bias else (y, None)
        assert returned is (layer.bias if case.return_bias else None)
        main = values_of(layer.weight.main_grad) if case.wgrad != "grad" and "w" not in case.frozen else None
        given.grad_dtype = "" if main is None else case.main_dtype
        want = linear(self.recipe, given)
        self.compare("y", y.detach().reshape(given.dy.shape), want.y, case.dtype, given)
        if not y.requires_grad:
            return
        y.backward(dy)
        if "x" not in case.frozen:
            assert x.grad.dtype == x.dtype
            self.compare("dx", x.grad.reshape(given.x.shape).to(TORCH[case.dtype]), want.dx, case.dtype, given)
        if layer.bias is not None and not case.return_bias and "b" not in case.frozen:
            self.compare("db", layer.bias.grad, want.db, case.weight_dtype, given)
            layer.bias.grad = None
        if "w" not in case.frozen:
            self.weight_gradient(want, given, main)

    def seed(self) -> tuple[int, int]:
        found = octavo.state_dict(self.layer).get("rounding.seed")
        return (0, 0) if found is None else tuple(found.tolist())

    def weight_gradient(self, want: Results, given: Operands, main: np.ndarray | None) -> None:
        case, weight = self.case, self.layer.weight
        if case.delayed:
            assert weight.grad is None
            assert main is None or np.array_equal(values_of(weight.main_grad), main, equal_nan=True)
            self.layer.backward_dw()
        if main is None:
            self.compare("dW", weight.grad, want.dw, case.weight_dtype, given)
        else:
            dw = want.dw if case.wgrad == "overwrite" else accumulated(main, want.dw, case.main_dtype)
            self.compare("main_grad", weight.main_grad, dw, case.main_dtype, given)
            if case.wgrad == "grad_added":
                assert weight.grad_added_to_main_grad and (weight.grad == 0).all()
            else:
                assert weight.grad is None
        weight.grad = None

    def compare(self, what: str, found, want: Product, dtype: str, given: Operands) -> None:
        gemm = {"y": "fprop", "dx": "dgrad", "db": None}.get(what, "wgrad")
        length = {"y": given.x.shape[1], "dx": given.dy.shape[1]}.get(what, len(given.x))
        on_gpu = self.device != "cpu"
        bound = (coefficient(self.recipe, gemm, length) if gemm else 1e-5) if on_gpu else None
        lost = 0.0
        if on_gpu and gemm:
            pair = {"fprop": (given.x, given.w), "dgrad": (given.dy, given.w), "wgrad": (given.dy, given.x)}[gemm]
            lost = lost_in_emulation(length, *pair)
            if what == "main_grad":  # dW is rounded before it is added
                lost = lost + last_place(want.magnitude, dtype)
        exact = gemm is not None and self.recipe.exact and self.recipe.mode(gemm) == "quantized"
        assert_close(found, want, dtype, what, exact=exact, bound=bound, lost=lost)


def values_of(tensor) -> np.ndarray:
    return tensor.detach().float().cpu().numpy().copy()


def check(seed: int, device: str = "cpu", nonfinite: bool = False) -> None:
    """Draw one case and run it; a failure names it, and how to run it again."""
    case = draw(seed, nonfinite)
    replay("linear", case, device, lambda: Run(case, device)())


# -- tests -------------------------------------------------------------------------------------------------------------


def test_a_sample_of_drawn_layers_agrees_with_the_oracle():
    for seed in range(FAST):
        check(seed)


def test_a_sample_that_is_not_finite():
    for seed in range(FAST // 2):
        check(seed, nonfinite=True)


@pytest.mark.slow
@pytest.mark.parametrize("nonfinite", [False, True], ids=["finite", "nonfinite"])
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_drawn_layers_agree_with_the_oracle(chunk, nonfinite):
    for seed in range(FAST + chunk * CHUNK, FAST + (chunk + 1) * CHUNK):
        check(seed, nonfinite=nonfinite)


@pytest.mark.gpu
@pytest.mark.parametrize("nonfinite", [False, True], ids=["finite", "nonfinite"])
@some("chunk", range(12), range(4))
def test_on_a_gpu(chunk, nonfinite):
    """Few cases to a test: nearly every one compiles kernels."""
    for seed in range(5 * chunk, 5 * (chunk + 1)):
        check(seed, "cuda", nonfinite)
