"""Layers to try: experts with known weights, the same ones as Linears, batches for them, and one step of each. A Linear
takes the place of experts where a test asks the same of both (`LAYERS`).

Comparisons are bit by bit, and tails hold NaN unless a test says otherwise."""

from itertools import pairwise, product

import pytest
import torch
from torch import nn

import octavo
from octavo.ops import grouped_linear_layer
from octavo.recipes import SHIPPED
from tests.support.linear_oracle import assert_same, randn, spiky
from tests.support.recipe_traits import QUANTIZED, STATELESS
from tests.support.state_tensors import named_state

G, K, N = 3, 48, 40
SPLITS, SPARE = (30, 0, 17), 6
USED = sum(SPLITS)
ROWS = USED + SPARE
NAN = float("nan")
SAMPLE = ("bf16", "fp8-current", "fp8-delayed", "nvfp4")
TURNED = ("fp8-current",)  # one scale for a group: its codes turned around are those of its columns
LAYOUTS = {"single": {}, "per group": {"single_grouped_weight": False, "single_grouped_bias": False}}
LAYERS = {"linear": {"groups": None}, **LAYOUTS}
MIXED = {
    f"{'one' if w else 'each'} weight, {'one' if b else 'each'} bias": {
        "single_grouped_weight": w,
        "single_grouped_bias": b,
    }
    for w in (True, False)
    for b in (True, False)
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SLOW = ("fp8-rowwise", "mxfp8")  # recipes that others of their kind stand for


def grid(recipes, **axes):
    """Recipes by everything else. All but a sample of the cases are marked slow: the sample has one recipe of each kind
    where everything else is the first there is; of these recipes two for a second choice, or one in turn for each of
    many. A Linear, which takes little time, runs in all recipes."""
    axes = {name: of if isinstance(of, dict) else {str(value): value for value in of} for name, of in axes.items()}
    fast, cases = [recipe for recipe in recipes if recipe not in SLOW], []
    choices = list(product(*(of.items() for of in axes.values())))
    of_linear = [choice for choice in choices if ("linear", LAYERS["linear"]) in choice]
    cases += [
        pytest.param(r, *(v for _, v in c), id="-".join([*(k for k, _ in c), r])) for c in of_linear for r in recipes
    ]
    choices = [choice for choice in choices if choice not in of_linear]
    for i, choice in enumerate(choices):
        quick = fast if i == 0 else [fast[i % len(fast)], fast[(i + 2) % len(fast)]][: 2 if len(choices) == 2 else 1]
        for recipe in recipes:
            marks = () if recipe in quick else pytest.mark.slow
            name = "-".join([*(key for key, _ in choice), recipe])
            cases.append(pytest.param(recipe, *(value for _, value in choice), id=name, marks=marks))
    return pytest.mark.parametrize(("recipe", *axes), cases)


every, quantized, stateless, sample = (grid(recipes) for recipes in (SHIPPED, QUANTIZED, STATELESS, SAMPLE))
layers = pytest.mark.parametrize("layout", LAYERS.values(), ids=LAYERS)
layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
mixed = pytest.mark.parametrize("layout", MIXED.values(), ids=MIXED)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture
def casts(monkeypatch):
    """The shapes of all that grouped layers quantize."""
    shapes, real = [], grouped_linear_layer.quantize_groups

    def counted(x, *rest):
        shapes.append(tuple(x.shape))
        return real(x, *rest)

    monkeypatch.setattr(grouped_linear_layer, "quantize_groups", counted)
    return shapes


# -- parameters by group -----------------------------------------------------------------------------------------------


def named(layer, kind):
    """A kind of parameter by name: one, or one for each group."""
    return {name: p for name, p in layer.named_parameters() if name.startswith(kind)}


def own(layer, kind="weight"):
    """Each group's share of it: views of the one parameter, or each one's own."""
    found = named(layer, kind)
    if isinstance(layer, octavo.Linear):
        return [p.detach() for p in found.values()]
    return list(found[kind].detach()) if kind in found else [p.detach() for p in found.values()]


def stacked(layer, kind="weight", of=lambda p: p.grad):
    """Something of all groups' parameters as one tensor; None where any has none."""
    found = named(layer, kind)
    if kind in found:
        return of(found[kind])
    parts = [of(p) for p in found.values()]
    return torch.stack(parts) if parts and all(part is not None for part in parts) else None


def same_seed(model):
    for name, buffer in named_state(model):
        if name.endswith("rounding_seed"):
            buffer.copy_(torch.tensor([7, 0]))


# -- experts, and the same ones as layers of their own -----------------------------------------------------------------


def experts(recipe, groups=G, k=K, n=N, *, seed=1, dtype=torch.float32, **settings):
    """The same weights in every layout, each group's of another magnitude. Without `groups`, a Linear."""
    if groups is None:
        layer = octavo.Linear(k, n, recipe=recipe, dtype=dtype, **settings)
    else:
        layer = octavo.GroupedLinear(groups, k, n, recipe=recipe, dtype=dtype, **settings)
    for g, weight in enumerate(own(layer)):
        weight.copy_(spiky(n, k, seed=seed + g, size=8.0) * 0.1 * (1 + g % 5))
    for g, bias in enumerate(own(layer, "bias")):
        bias.copy_(randn(n, seed=seed + 30 + g))
    same_seed(layer)
    return layer


class Alone(nn.Module):
    """The same experts as octavo.Linears, run one after the other on their rows."""

    def __init__(self, layer, recipe, **settings):
        super().__init__()
        weights, biases = own(layer), own(layer, "bias")
        n, k = weights[0].shape
        self.linears = nn.ModuleList()
        for g, weight in enumerate(weights):
            linear = octavo.Linear(k, n, bool(biases), dtype=weight.dtype, recipe=recipe, **settings)
            with torch.no_grad():
                linear.weight.copy_(weight)
                if biases:
                    linear.bias.copy_(biases[g])
            self.linears.append(linear)
        same_seed(self)

    def step(self, x, dy, splits=SPLITS, **flags):
        """As `step` gives it, tails zero."""
        found = {"y": torch.zeros_like(dy), "dx": torch.zeros_like(x)}
        self.zero_grad()
        for linear, rows in zip(self.linears, slices(splits), strict=True):
            leaf = x[rows].clone().requires_grad_()
            y = linear(leaf, **flags)
            y.backward(dy[rows])
            found["y"][rows], found["dx"][rows] = y.detach(), leaf.grad
        for name, kind in (("dw", "weight"), ("db", "bias")):
            parts = [getattr(linear, kind) for linear in self.linears]
            kept = all(p is not None and p.grad is not None for p in parts)
            found[name] = torch.stack([p.grad for p in parts]) if kept else None
        return found


# -- batches and steps -------------------------------------------------------------------------------------------------


def slices(splits):
    ends = torch.tensor([0, *splits]).cumsum(0).tolist()
    return [slice(a, b) for a, b in pairwise(ends)]


def batch(splits=SPLITS, spare=SPARE, *, seed=1, k=K, n=N, dtype=torch.float32, poison=NAN):
    """x and dy: each group louder or softer than its neighbours, and a poisoned tail."""
    rows = sum(splits) + spare
    x, dy = spiky(rows, k, seed=seed), spiky(rows, n, seed=seed + 50)
    for g, part in enumerate(slices(splits)):
        x[part] *= 2.0 ** (g % 3)
        dy[part] *= 2.0 ** (-g % 4)
    x[sum(splits) :] = dy[sum(splits) :] = poison
    return x.to(dtype), dy.to(dtype)


def sizes(splits=SPLITS):
    return splits if isinstance(splits, torch.Tensor) else torch.tensor(splits)


def shape(layer):
    """That of all weights, [G, N, K], or [N, K] of a Linear."""
    return (N, K) if isinstance(layer, octavo.Linear) else (G, N, K)


def forward(layer, x, splits=SPLITS, *, call=None, **given):
    """y. A Linear takes the rows of all groups, and no tail."""
    call = layer if call is None else call
    return call(x[: sum(splits)], **given) if isinstance(layer, octavo.Linear) else call(x, sizes(splits), **given)


def backward(y, dy):
    y.backward(dy[: len(y)])


def step(layer, x, dy, splits=SPLITS, *, call=None, **given):
    """y and every gradient of a step that starts without any."""
    layer.zero_grad()
    leaf = x.clone().requires_grad_()
    if "scales" in given:
        given["scales"] = given["scales"].clone().requires_grad_()
    y = forward(layer, leaf, splits, call=call, **given)
    backward(y, dy)
    found = {"y": y.detach().clone(), "dx": leaf.grad, "dw": stacked(layer), "db": stacked(layer, "bias")}
    return found | ({"ds": given["scales"].grad} if "scales" in given else {})


# -- comparisons -------------------------------------------------------------------------------------------------------


def assert_steps(found, want, what=""):
    for name, value in want.items():
        assert_same(found[name], value, f"{what} {name}")


# -- what else is done to a layer --------------------------------------------------------------------------------------


def change(model, by=0.05):
    with torch.no_grad():
        for p in model.parameters():
            p.add_(by)


def close(found, want, magnitude, unit):
    assert ((found.detach().double() - want).abs() <= unit * want.abs() + 1e-6 * magnitude).all()


GIVEN = [("out",), ("dgrad_out",), ("out", "dgrad_out")]


def cached_codes(layer):
    """Bytes of the cached codes and scales."""
    state = ("seed", "scaling")
    found = {name: b for name, b in named_state(layer) if b.numel() and not any(word in name for word in state)}
    return {name: b.detach().clone().reshape(-1).view(torch.uint8) for name, b in found.items()}


def addresses(layer):
    return {name: b.data_ptr() for name, b in named_state(layer) if b.numel()}


def give(layer, buffer):
    """A buffer of all weights, or its parts, as main_grad."""
    found = named(layer, "weight")
    if "weight" in found:
        found["weight"].main_grad = buffer
    else:
        for p, part in zip(found.values(), buffer, strict=True):
            p.main_grad = part
    return buffer


def fused(recipe, layout=None, **settings):
    return experts(recipe, fuse_wgrad_accumulation=True, **(layout or {}), **settings)


def delayed(recipe, layout=None, **settings):
    return experts(recipe, delay_wgrad_compute=True, **(layout or {}), **settings)
