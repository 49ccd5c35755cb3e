"""octavo.grouped_linear gives the bits of octavo.GroupedLinear, eager and compiled, and refuses recipes with state."""

import pytest
import torch

import octavo
from octavo.errors import UnsupportedConfig, UnsupportedDevice, UnsupportedDtype, UnsupportedShape
from tests.support.linear_oracle import assert_same
from tests.support.recipe_traits import WITHOUT_BUFFERS

GROUPS, IN, OUT, ROWS = 3, 48, 32, 70
stateless = pytest.mark.parametrize("recipe", [*WITHOUT_BUFFERS, "nvfp4(stochastic=False)"])
SIZES = torch.tensor([20, 0, 41])


def tensors(bias=True, dtype=torch.float32):
    x = torch.randn(ROWS, IN, dtype=dtype)
    x[61:] = torch.nan  # the tail
    weight = torch.randn(GROUPS, OUT, IN, dtype=dtype).requires_grad_()
    return x.requires_grad_(), weight, torch.randn(GROUPS, OUT, dtype=dtype).requires_grad_() if bias else None


def gradients(y, *inputs):
    torch.manual_seed(3)
    return [y, *torch.autograd.grad(y, [t for t in inputs if t is not None], torch.randn_like(y))]


@stateless
@pytest.mark.parametrize("bias", [False, True])
def test_the_bits_of_the_layer(recipe, bias):
    x, weight, added = tensors(bias)
    layer = octavo.GroupedLinear(GROUPS, IN, OUT, bias, recipe=recipe)
    with torch.no_grad():
        layer.weight.copy_(weight)
        if added is not None:
            layer.bias.copy_(added)
    found = gradients(octavo.grouped_linear(x, weight, SIZES, added, recipe=recipe), x, weight, added)
    for a, b in zip(found, gradients(layer(x, SIZES), x, layer.weight, layer.bias), strict=True):
        assert_same(a, b)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("recipe", ["bf16", "fp8-block"])
def test_compiled(recipe):
    x, weight, bias = tensors()

    def call(x, sizes):
        return octavo.grouped_linear(x, weight, sizes, bias, recipe=recipe)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    want = gradients(call(x, SIZES), x, weight, bias)
    for a, b in zip(gradients(compiled(x, SIZES), x, weight, bias), want, strict=True):
        assert_same(a, b)


def test_a_weight_for_each_group_and_leading_dims():
    x, weight, _ = tensors(bias=False)
    parts = [part.detach().clone().requires_grad_() for part in weight]
    y = octavo.grouped_linear(x.view(7, 10, IN), parts, [20, 0, 41], recipe="fp8-rowwise")
    whole = octavo.grouped_linear(x, weight, SIZES, recipe="fp8-rowwise")
    assert y.shape == (7, 10, OUT) and torch.equal(y.view(ROWS, OUT), whole)
    dy = torch.randn_like(y)
    (dw,) = torch.autograd.grad(whole, weight, dy.view(ROWS, OUT))
    assert torch.equal(torch.stack(torch.autograd.grad(y, parts, dy)), dw)
    listed = octavo.grouped_linear(x, torch.nn.ParameterList(parts), SIZES, recipe="fp8-rowwise")
    assert torch.equal(listed, whole)


def test_grouped_linear_follows_autocast():
    x, weight, _ = tensors(bias=False)
    with octavo.autocast("fp8-current"):
        y = octavo.grouped_linear(x, weight, SIZES)
        own = octavo.grouped_linear(x, weight, SIZES, recipe="bf16")
    assert torch.equal(y, octavo.grouped_linear(x, weight, SIZES, recipe="fp8-current"))
    assert torch.equal(own, octavo.grouped_linear(x, weight, SIZES)) and not torch.equal(own, y)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert octavo.grouped_linear(x, weight, SIZES).dtype == torch.bfloat16


def test_nvfp4_without_gradients():
    x, weight, _ = tensors(bias=False)
    with torch.no_grad():
        y = octavo.grouped_linear(x, weight, SIZES, recipe="nvfp4")
    assert torch.equal(y, octavo.grouped_linear(x, weight, SIZES, recipe="nvfp4(stochastic=False)"))


X, W = torch.ones(4, 8), torch.ones(2, 3, 8, requires_grad=True)
TWO = torch.tensor([1, 3])
REFUSED = {
    "delayed": (UnsupportedConfig, "keeps nothing", (X, W, TWO), {"recipe": "fp8-delayed"}),
    "stochastic": (UnsupportedConfig, "stochastic=False", (X, W, TWO), {"recipe": "nvfp4"}),
    "a tail": (UnsupportedConfig, "tail", (X, W, TWO), {"tail": "nan"}),
    "sizes": (UnsupportedShape, "sizes must have one size for each of the 2 groups", (X, W, TWO[:1]), {}),
    "features": (UnsupportedShape, r"\[\.\.\., 8\]", (X[:, :4], W, TWO), {}),
    "one weight": (UnsupportedShape, r"\[groups, N, K\]", (X, W[0], TWO), {}),
    "weights of two shapes": (UnsupportedShape, r"\(3, 8\) and \(4, 8\)", (X, [W[0], torch.ones(4, 8)], TWO), {}),
    "no weights": (UnsupportedShape, "got none", (X, [], TWO), {}),
    "a number as weight": (UnsupportedDtype, "got int", (X, 3, TWO), {}),
    "bias": (UnsupportedShape, r"\(2, 3\), got \(3,\)", (X, W, TWO, torch.ones(3)), {}),
    "float64": (UnsupportedDtype, "float64", (X, W.double(), TWO), {}),
    "device": (UnsupportedDevice, "meta", (X.to("meta"), W, TWO), {}),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_refused(case):
    error, words, arguments, options = case
    with pytest.raises(error, match=words):
        octavo.grouped_linear(*arguments, **options)


@pytest.mark.gpu
@stateless
def test_on_a_gpu(recipe):
    x, weight, bias = (t.detach().cuda().bfloat16().requires_grad_() for t in tensors())
    layer = octavo.GroupedLinear(GROUPS, IN, OUT, recipe=recipe, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(bias)
    sizes = SIZES.cuda()
    found = gradients(octavo.grouped_linear(x, weight, sizes, bias, recipe=recipe), x, weight, bias)
    for a, b in zip(found, gradients(layer(x, sizes), x, layer.weight, layer.bias), strict=True):
        assert_same(a, b)
