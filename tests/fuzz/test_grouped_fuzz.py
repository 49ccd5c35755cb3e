"""octavo.GroupedLinear on random cases, against the oracle of one linear layer for each group.

Rows after the last group are NaN in x and dy. Sizes may be zero, negative or too large for x."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

import octavo
from tests.fuzz.draw import (
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
from tests.fuzz.formats import last_place
from tests.fuzz.oracle import Memory, Operands, Product, Recipe, Results, accumulated, group_rows, linear, step_experts
from tests.support.pairs import some

FAST, CHUNKS, CHUNK = 20, 20, 150  # cases of the sample; of the long run
GEMMS = {"y": "fprop", "dx": "dgrad", "dW": "wgrad"}


@dataclass(frozen=True)
class Case:
    """All that was drawn, but for the values."""

    seed: int
    recipe: str
    sizes: tuple[int, ...]
    rows: int
    k: int
    n: int
    dtype: str
    weight_dtype: str
    bias: bool
    scale_bias: bool
    kinds: tuple[str, str, str]  # of x, w, dy
    x_layout: str
    dy_layout: str
    frozen: tuple[str, ...]
    frozen_group: int | None  # with a parameter for each group
    single_weight: bool
    single_bias: bool
    sizes_as: str
    out: bool
    dgrad_out: bool
    tail: str
    wgrad: str
    main_dtype: str
    delayed: bool
    cached: bool
    steps: int
    spoiled: str = ""  # which operand holds values that are not finite


def draw(seed: int, nonfinite: bool) -> Case:
    rng = np.random.default_rng((seed, 4))
    groups = choose(rng, (1, 2, 3, 4, 7))
    sizes = [choose(rng, (0, 0, 1, 5, 17, 32, 100, 128, 129)) for _ in range(groups)]
    rows = sum(sizes) + choose(rng, (0, 0, 3, 40))
    if rng.random() < 0.15:
        sizes[int(rng.integers(groups))] = 0  # its rows become a part of the tail
    dtype = choose(rng, ("bfloat16", "float16", "float32"))
    bias, single = bool(rng.random() < 0.6), bool(rng.random() < 0.5)
    frozen = choose(rng, ((), (), (), (), ("x",), ("w",), ("b",)))
    main = rng.random() < 0.3 and "w" not in frozen
    return Case(
        seed=seed,
        recipe=choose(rng, RECIPES),
        sizes=tuple(sizes),
        rows=rows,
        k=choose(rng, SIZES),
        n=choose(rng, SIZES),
        dtype=dtype,
        weight_dtype="float32" if rng.random() < 0.2 else dtype,
        bias=bias,
        scale_bias=bias and bool(rng.random() < 0.4),
        kinds=tuple(choose(rng, KINDS) for _ in range(3)),
        x_layout=choose(rng, LAYOUTS[:-1]),
        dy_layout=choose(rng, LAYOUTS[:-1]),
        frozen=frozen,
        frozen_group=int(rng.integers(groups)) if groups > 1 and not single and rng.random() < 0.3 else None,
        single_weight=single,
        single_bias=bool(rng.random() < 0.5),
        sizes_as=choose(rng, ("int32", "int64", "list")),
        out=bool(rng.random() < 0.3),
        dgrad_out="x" not in frozen and bool(rng.random() < 0.3),
        tail=choose(rng, ("zero", "untouched")),
        wgrad=choose(rng, ("main_grad", "overwrite")) if main else "grad",
        main_dtype=choose(rng, ("float32", "bfloat16")),
        delayed=bool(rng.random() < 0.15),
        cached=bool(rng.random() < 0.2),
        steps=choose(rng, (1, 1, 2, 3)),
        spoiled=choose(rng, ("x", "w", "dy")) if nonfinite else "",
    )


class Run:
    """A case's layer beside the oracle's memory of each group."""

    def __init__(self, case: Case, device: str) -> None:
        self.case, self.device = case, device
        self.rng = np.random.default_rng((case.seed, 5))
        self.recipe = Recipe.parse(case.recipe)
        self.turn(0)
        delayed = self.recipe.name == "fp8-delayed"
        self.memories = [Memory(self.recipe) for _ in case.sizes] if delayed else []
        self.layer = octavo.GroupedLinear(
            len(case.sizes),
            case.k,
            case.n,
            bias=case.bias,
            recipe=case.recipe,
            device=device,
            dtype=TORCH[case.weight_dtype],
            single_grouped_weight=case.single_weight,
            single_grouped_bias=case.single_bias,
            scale_bias=case.scale_bias,
            fuse_wgrad_accumulation=case.wgrad != "grad",
            delay_wgrad_compute=case.delayed,
            tail=case.tail,
        )
        self.weights, self.biases = self.parameters("weight"), self.parameters("bias") if case.bias else []
        shape = (case.n, case.k)
        for parameter in self.weights:
            self.fill(parameter, data(self.rng, tuple(parameter.shape), case.kinds[1], case.weight_dtype))
            parameter.requires_grad_("w" not in case.frozen)
        for parameter in self.biases:
            self.fill(parameter, data(self.rng, tuple(parameter.shape), "normal", case.weight_dtype))
            parameter.requires_grad_("b" not in case.frozen)
        if case.frozen_group is not None:
            self.weights[case.frozen_group].requires_grad_(False)
        for parameter in self.weights if case.wgrad != "grad" else ():
            parameter.overwrite_main_grad = case.wgrad == "overwrite"
            if parameter.requires_grad:
                parameter.main_grad = torch.empty(parameter.shape, device=device, dtype=TORCH[case.main_dtype])
                self.fill(parameter.main_grad, data(self.rng, tuple(parameter.shape), "normal", case.main_dtype))
        assert all(tuple(w.shape)[-2:] == shape for w in self.weights)

    def turn(self, step: int) -> None:
        """The sizes of a step: those of the case, each one expert further."""
        at = step % len(self.case.sizes)
        self.sizes = list(self.case.sizes[-at:] + self.case.sizes[:-at]) if at else list(self.case.sizes)
        self.groups = group_rows(self.sizes, self.case.rows)
        self.live = self.groups[-1].stop

    def parameters(self, name: str) -> list:
        whole = getattr(self.layer, name, None)
        return [getattr(self.layer, f"{name}{g}") for g in range(len(self.case.sizes))] if whole is None else [whole]

    def fill(self, parameter, values) -> None:
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(values))

    def __call__(self) -> None:
        case = self.case
        if case.spoiled == "w":
            chosen = self.weights[int(self.rng.integers(len(self.weights)))]
            self.fill(chosen, spoil(self.rng, by_group([chosen], single=True)))
        for step in range(case.steps):
            self.turn(step)
            for flag in (True, False) if case.cached else (None,):
                self.microbatch(flag)
            step_experts(self.memories)
            octavo.step(self.layer)
            with torch.no_grad():  # a power of two: every dtype holds it
                for weight in self.weights:
                    weight.mul_(0.5)

    def rows(self, width: int, kind: str, layout: str, spoiled: bool) -> tuple[torch.Tensor, np.ndarray]:
        """A tensor with a tail of NaN, and its values."""
        case = self.case
        values = data(self.rng, (case.rows, width), kind, case.dtype)
        if spoiled and self.live:
            values[: self.live] = spoil(self.rng, values[: self.live])
        values[self.live :] = np.nan
        return laid_out(values, layout, case.dtype, self.device)

    def sizes_given(self):
        if self.case.sizes_as == "list":
            return self.sizes
        return torch.tensor(self.sizes, dtype=getattr(torch, self.case.sizes_as), device=self.device)

    def operands(self, x, dy, scales) -> list[Operands]:
        case = self.case
        weights = by_group(self.weights, case.single_weight)
        biases = by_group(self.biases, case.single_bias) if case.bias else None
        found = octavo.state_dict(self.layer).get("rounding.seed")
        given = []
        for g, rows in enumerate(self.groups):
            one = Operands(
                x[rows],
                weights[g],
                None if biases is None else biases[g],
                dy[rows],
                case.dtype,
                case.weight_dtype,
                seed=(0, 0) if found is None else tuple(found.tolist()),
                scales=None if scales is None else scales[rows],
                grad_dtype="" if case.wgrad == "grad" else case.main_dtype,
            )
            if self.memories:
                memory = self.memories[g]
                one.multipliers = memory.multipliers(one.x, one.w, one.dy)
                for name, tensor in (("x", one.x), ("w", one.w), ("dy", one.dy)):
                    memory.assignments[name].observe(tensor)  # no rows are no amax; the weight is there all the same
            given.append(one)
        return given

    def microbatch(self, flag: bool | None) -> None:
        case, layer = self.case, self.layer
        x, x_values = self.rows(case.k, case.kinds[0], case.x_layout, case.spoiled == "x")
        dy, dy_values = self.rows(case.n, case.kinds[2], case.dy_layout, case.spoiled == "dy")
        scales = scale_values = None
        if case.scale_bias:
            scale_values = data(self.rng, (case.rows,), "normal", "float32")
            scales = torch.from_numpy(scale_values).to(self.device).requires_grad_()
        given = self.operands(x_values, dy_values, scale_values)
        want = [linear(self.recipe, one) for one in given]
        before = [self.main_grad(w) for w in self.weights]
        x.requires_grad_("x" not in case.frozen)
        buffers = {}
        for name, wanted, width in (("out", case.out, case.n), ("dgrad_out", case.dgrad_out, case.k)):
            if wanted:
                buffers[name] = torch.full((case.rows, width), 7.0, device=self.device, dtype=x.dtype)
        settings = buffers | ({} if scales is None else {"scales": scales})
        y = layer(x, self.sizes_given(), is_first_microbatch=flag, **settings)
        self.by_rows("y", y.detach(), [r.y for r in want], given, written="out" in buffers)
        if "out" in buffers:
            assert y.data_ptr() == buffers["out"].data_ptr() or y.numel() == 0
        if not y.requires_grad:
            return
        y.backward(dy)
        if "x" not in case.frozen:
            self.by_rows("dx", x.grad, [r.dx for r in want], given, written="dgrad_out" in buffers)
            if "dgrad_out" in buffers:
                assert torch.equal(x.grad.nan_to_num(), buffers["dgrad_out"].nan_to_num())
        self.bias_gradients(want, given)
        if scales is not None:
            found = scales.grad.cpu().numpy()
            for rows, one in zip(self.groups, want, strict=True):
                self.close("dscales", torch.from_numpy(found[rows]), one.dscales, "float32", None)
        if "w" not in case.frozen:
            self.weight_gradients(want, given, before)

    def main_grad(self, weight) -> np.ndarray | None:
        """Its values by group, or None where there is none."""
        found = getattr(weight, "main_grad", None)
        return None if found is None else by_group([found], self.case.single_weight)

    def by_rows(self, what: str, found, want: list[Product], given: list[Operands], *, written: bool) -> None:
        """Group by group, and the tail: zeros, the caller's own in a buffer, or anything if it is to be left alone."""
        for g, (rows, one) in enumerate(zip(self.groups, want, strict=True)):
            self.close(f"{what} of group {g}", found[rows], one, self.case.dtype, given[g])
        tail = found[self.live :]
        if written or self.case.tail == "zero":
            assert (tail == (7 if written else 0)).all(), f"the tail of {what} holds {tail.unique()[:5]}"

    def bias_gradients(self, want: list[Results], given: list[Operands]) -> None:
        if not self.biases or "b" in self.case.frozen:
            return
        grads = self.biases[0].grad if self.case.single_bias else torch.stack([b.grad for b in self.biases])
        for g, one in enumerate(want):
            self.close(f"db of group {g}", grads[g], one.db, self.case.weight_dtype, None)
        for bias in self.biases:
            bias.grad = None

    def weight_gradients(self, want: list[Results], given: list[Operands], before: list) -> None:
        case = self.case
        if case.delayed:
            assert all(w.grad is None for w in self.weights)
            self.layer.backward_dw()
        for i, weight in enumerate(self.weights):
            if not weight.requires_grad:
                assert weight.grad is None
                continue
            if case.wgrad == "grad":
                found, dtype = weight.grad, case.weight_dtype
            else:
                assert weight.grad is None
                found, dtype = weight.main_grad, case.main_dtype
            parts = found.unbind() if case.single_weight else [found]
            for j, part in enumerate(parts):
                g = j if case.single_weight else i
                dw = want[g].dw
                if case.wgrad == "main_grad":
                    dw = accumulated(before[i][j], dw, case.main_dtype)
                self.close(f"dW of group {g}", part, dw, dtype, given[g])
            weight.grad = None

    def close(self, what: str, found, want: Product, dtype: str, given: Operands | None) -> None:
        gemm = GEMMS[what.split()[0]] if given is not None else None
        bound, lost = None if self.device == "cpu" else 1e-5, 0.0
        if gemm and given is not None and bound is not None:
            a, b = {"fprop": (given.x, given.w), "dgrad": (given.dy, given.w), "wgrad": (given.dy, given.x)}[gemm]
            length = {"fprop": self.case.k, "dgrad": self.case.n, "wgrad": len(given.x)}[gemm]
            bound, lost = coefficient(self.recipe, gemm, length), lost_in_emulation(length, a, b)
            if gemm == "wgrad" and self.case.wgrad == "main_grad":  # dW is rounded before it is added
                lost = lost + last_place(want.magnitude, dtype)
        exact = gemm is not None and self.recipe.exact and self.recipe.mode(gemm) == "quantized"
        exact = exact and not (self.case.scale_bias and gemm == "fprop")
        assert_close(found, want, dtype, what, exact=exact, bound=bound, lost=lost)


def by_group(parameters: list, single: bool) -> np.ndarray:
    """A single parameter's values [G, ...], or those of one for each group, stacked."""
    values = [p.detach().float().cpu().numpy() for p in parameters]
    return values[0].copy() if single else np.stack(values)


def check(seed: int, device: str = "cpu", nonfinite: bool = False) -> None:
    """Draw one case and run it; a failure names it, and how to run it again."""
    case = draw(seed, nonfinite)
    replay("grouped", case, device, lambda: Run(case, device)())


# -- tests -------------------------------------------------------------------------------------------------------------


def test_a_sample_of_drawn_groups_agrees_with_the_oracle():
    for seed in range(FAST):
        check(seed)


def test_a_sample_that_is_not_finite():
    for seed in range(FAST // 2):
        check(seed, nonfinite=True)


@pytest.mark.slow
@pytest.mark.parametrize("nonfinite", [False, True], ids=["finite", "nonfinite"])
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_drawn_groups_agree_with_the_oracle(chunk, nonfinite):
    for seed in range(FAST + chunk * CHUNK, FAST + (chunk + 1) * CHUNK):
        check(seed, nonfinite=nonfinite)


@pytest.mark.gpu
@pytest.mark.parametrize("nonfinite", [False, True], ids=["finite", "nonfinite"])
@some("chunk", range(10), range(3))
def test_on_a_gpu(chunk, nonfinite):
    for seed in range(4 * chunk, 4 * (chunk + 1)):
        check(seed, "cuda", nonfinite)
