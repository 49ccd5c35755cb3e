"""Every way to have a Linear between codes: compute, x, weight, y, dy and dx quantized or not, each by itself. What
comes out is what the pieces give when they are called one by one, bit for bit, and close to float64."""

import copy
import itertools

import pytest
import torch

import octavo
from octavo import ops
from octavo.errors import UnsupportedConfig
from octavo.quant import QTensor
from tests.support.linear_oracle import assert_same, spiky
from tests.support.recipe_traits import has_four_bits, is_stochastic
from tests.support.sequentials import H, M, fill, quantized

NAMES = ("compute", "input", "weight", "output", "grad_output", "grad_input")
GRID = [dict(zip(NAMES, flags, strict=True)) for flags in itertools.product((False, True), repeat=len(NAMES))]
POSSIBLE = [case for case in GRID if case["compute"] or not case["weight"]]
# each rounding adds its own relative error, and an outlier in a block of another recipe's costs the rest of it more


def named(case):
    return "+".join(name for name in NAMES if case[name]) or "nothing"


def build(recipe, case):
    """Quantize, Linear, Quantize."""
    linear = octavo.Linear(H, H, recipe=recipe if case["compute"] else "bf16", dtype=torch.bfloat16)
    fill(torch.nn.Sequential(linear))
    if case["weight"]:
        octavo.quantize_weights(linear)
    return (
        ops.Quantize(case["input"], case["grad_input"], recipe=recipe),
        linear,
        ops.Quantize(case["output"], case["grad_output"], recipe=recipe),
    )


def values(y):
    return y.dequantize() if isinstance(y, QTensor) else y


def stepped(call, linear, x, dy):
    torch.manual_seed(3)  # of rounding that is drawn
    leaf = x.clone().requires_grad_()
    y = call(leaf)
    got = values(y)
    got.backward(dy)
    return y, [got.detach(), leaf.grad, linear.weight.grad, linear.bias.grad]


def by_hand(pieces, x):
    before, linear, after = pieces
    q = before(x)
    if isinstance(q, QTensor) and q.spec != linear.recipe.linear().fprop.left:
        q = q.dequantize()  # codes that this Linear does not take
    return after(linear(q))


def relative(a, b):
    return float((a.double() - b).square().mean().sqrt() / b.square().mean().sqrt())


def check(recipe, case, compiled=False):
    x, dy = (spiky(M, H, seed=s, dtype=torch.bfloat16) for s in (0, 1))
    pieces = build(recipe, case)
    alone = copy.deepcopy(pieces)
    model = octavo.Sequential(*pieces)
    if compiled:
        torch.compiler.reset()

        def call(t):
            return values(model(t))

        call = torch.compile(call, backend="aot_eager", fullgraph=True)
    else:
        call = model
    y, found = stepped(call, pieces[1], x, dy)
    if not compiled:
        assert isinstance(y, QTensor) == case["output"]
    _, want = stepped(lambda t: by_hand(alone, t), alone[1], x, dy)
    # of two draws from torch's generator a compiler may make the second first
    exchanged = compiled and is_stochastic(recipe) and case["grad_output"] and case["grad_input"]
    for name, got, other in zip(("y", "dx", "dw", "db"), found, want, strict=True):
        if name == "y" or not exchanged:
            assert_same(got, other)
    weight, b = held_values(alone[1]).double(), alone[1].bias.detach().double()
    exact = [x.double() @ weight.T + b, dy.double() @ weight, dy.double().T @ x.double(), dy.double().sum(0)]
    bound = 1e-2 if not any(case.values()) else 0.6 if has_four_bits(recipe) else 0.2
    for got, truth in zip(found, exact, strict=True):
        assert relative(got, truth) < bound, named(case)


def held_values(linear):
    """The weight, or what it stands for where codes are all there is."""
    return linear._codes.values(linear) if linear._codes.has_quantized_weight else linear.weight.detach()


# nothing, everything, each alone and each with compute
PART = [case for case in POSSIBLE if sum(case.values()) in (0, 1, 6) or (case["compute"] and sum(case.values()) == 2)]


@pytest.mark.parametrize("case", PART, ids=named)
@quantized
def test_a_part_of_the_grid(recipe, case):
    check(recipe, case)


@pytest.mark.parametrize("case", PART[::3], ids=named)
@pytest.mark.parametrize("recipe", ["fp8-current", "mxfp8"])
def test_a_part_of_the_grid_compiled(recipe, case):
    check(recipe, case, compiled=True)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("case", POSSIBLE, ids=named)
@quantized
def test_the_whole_grid(recipe, case, compiled):
    check(recipe, case, compiled)


@pytest.mark.parametrize("case", [case for case in GRID if case not in POSSIBLE][:2], ids=named)
def test_a_weight_in_codes_that_no_gemm_takes_is_refused(case):
    with pytest.raises(UnsupportedConfig, match="no layer whose own recipe quantizes"):
        build("fp8-current", case)
