"""Linear on a CPU, bit for bit: y, dx, dw and db against the float64 composition of the codes, linear_oracle.py."""

import pytest
import torch
from torch import nn

import octavo
from octavo.errors import UnsupportedConfig
from octavo.recipes import SHIPPED
from tests.support.linear_oracle import (
    OTHERS,
    OVERRIDES,
    assert_result,
    check,
    differs,
    expected,
    make,
    randn,
    run,
    seed_of,
    spiky,
)
from tests.support.recipe_traits import QUANTIZED

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1, 1), (1, 17, 48), (33, 40, 80), (40, 129, 133), (130, 31, 300)]  # tokens, out, in

every = pytest.mark.parametrize("recipe", SHIPPED)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def operands(m, k, n, dtype):
    return spiky(m, k, dtype=dtype), spiky(m, n, dtype=dtype, seed=2)


@every
@dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_recipe_is_the_float64_composition(recipe, dtype, shape):
    m, n, k = shape
    check(make(recipe, k, n, dtype=dtype), recipe, *operands(m, k, n, dtype))


@pytest.mark.parametrize("recipe", OTHERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_setting_of_a_recipe_too(recipe, dtype):
    check(make(recipe, 133, 70, dtype=dtype), recipe, *operands(40, 133, 70, dtype))


@pytest.mark.parametrize("override", OVERRIDES)
@pytest.mark.parametrize("recipe", QUANTIZED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_override_keeps_its_gemms_in_high_precision(recipe, override, dtype):
    recipe, plain = f"{recipe}({override})", recipe
    x, dy = operands(37, 80, 44, dtype)
    layer = make(recipe, 80, 44, dtype=dtype)
    seed = seed_of(layer)
    found = check(layer, recipe, x, dy)
    # and the override does say something: the composition without it is another one
    without = expected(plain, x, layer.weight, layer.bias, dy, seed=torch.tensor([1, 1]) if seed is None else seed)
    assert any(differs(getattr(found, f), getattr(without, f)) for f in ("y", "dx", "dw"))


@pytest.mark.parametrize(
    "overrides", ["fprop='bf16',wgrad='bf16'", "dgrad='bf16',backward='dequantized'", "wgrad='bf16',dgrad='bf16'"]
)
@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-block", "nvfp4"])
def test_overrides_of_several_gemms_combine(recipe, overrides):
    recipe = f"{recipe}({overrides})"
    check(make(recipe, 80, 44, dtype=torch.bfloat16), recipe, *operands(37, 80, 44, torch.bfloat16))


@every
@dtypes
def test_without_a_bias(recipe, dtype):
    layer = make(recipe, bias=False, dtype=dtype)
    assert check(layer, recipe, *operands(21, 48, 40, dtype)).db is None


@every
def test_the_bias_is_added_in_float32_before_the_one_rounding(recipe):
    """A bias that rounds away the last bits of y: adding it to an already rounded y differs somewhere."""
    x, dy = operands(64, 48, 40, torch.bfloat16)
    layer = make(recipe, dtype=torch.bfloat16)
    found = check(layer, recipe, x, dy)
    bare = expected(recipe, x, layer.weight, None, dy, seed=torch.tensor([1, 1]))
    assert differs(found.y, bare.y + layer.bias.detach())


@every
@pytest.mark.parametrize(
    ("x_dtype", "w_dtype", "b_dtype"),
    [
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.float32),
        (torch.float16, torch.bfloat16, torch.float32),
    ],
    ids=str,
)
def test_the_dtype_of_x_decides_and_gradients_have_their_own_tensors_dtype(recipe, x_dtype, w_dtype, b_dtype):
    layer = make(recipe, dtype=w_dtype)
    layer.bias = nn.Parameter(layer.bias.detach().to(b_dtype))
    found = check(layer, recipe, *operands(21, 48, 40, x_dtype))
    assert [t.dtype for t in (found.y, found.dx, found.dw, found.db)] == [x_dtype, x_dtype, w_dtype, b_dtype]


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_float32_weights_are_quantized_from_float32(recipe):
    x, dy = operands(64, 80, 44, torch.bfloat16)
    layer = make(recipe, 80, 44)
    found = run(layer, x, dy)
    rounded = expected(recipe, x, layer.weight.detach().bfloat16(), layer.bias, dy, seed=torch.tensor([1, 1]))
    assert differs(found.y, rounded.y)


@every
@pytest.mark.parametrize("amp", [torch.bfloat16, torch.float16], ids=str)
def test_under_torch_autocast_activations_take_its_dtype(recipe, amp):
    layer = make(recipe)
    x, dy = spiky(21, 48), spiky(21, 40, dtype=amp, seed=2)
    seed = seed_of(layer)
    leaf = x.clone().requires_grad_()
    with torch.autocast("cpu", dtype=amp):
        y = layer(leaf)
    assert y.dtype == amp
    y.backward(dy)
    want = expected(recipe, x.to(amp), layer.weight, layer.bias, dy, seed=seed)
    assert leaf.grad.dtype == torch.float32
    assert torch.equal(leaf.grad.to(amp), want.dx)  # rounded there or not
    assert torch.equal(y, want.y)
    assert torch.equal(layer.weight.grad, want.dw)
    assert torch.equal(layer.bias.grad, want.db)


def test_a_disabled_torch_autocast_changes_nothing():
    layer, x = make("fp8-current"), spiky(21, 48)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
        assert layer(x).dtype == torch.float32


@every
def test_grad_modes_do_not_change_y(recipe):
    x = spiky(33, 48, dtype=torch.bfloat16)
    want = make(recipe, dtype=torch.bfloat16)(x).detach()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            y = make(recipe, dtype=torch.bfloat16)(x)
        assert torch.equal(y, want)
        assert y.grad_fn is None and not y.requires_grad
    assert torch.equal(make(recipe, dtype=torch.bfloat16).eval()(x), want)


@every
def test_train_eval_train(recipe):
    """Evaluation between two steps leaves no mark on the second."""
    (x0, dy0), (x1, dy1) = operands(21, 48, 40, torch.float32), (spiky(21, 48, seed=5), spiky(21, 40, seed=6))
    straight, broken = make(recipe), make(recipe)
    with torch.no_grad():  # one seed of stochastic rounding for both
        octavo.load_state_dict(broken, octavo.state_dict(straight))
    for layer in (straight, broken):
        layer.first = run(layer, x0, dy0)
        if layer is broken:
            layer.eval()
            with torch.no_grad():
                layer(100 * x1)
            layer.train()
        octavo.step(layer)
    assert_result(broken.first, straight.first)
    assert_result(run(broken, x1, dy1), run(straight, x1, dy1))


@pytest.mark.parametrize("recipe", ["fp8-rowwise", "nvfp4", "mxfp8"])
def test_a_tokens_output_does_not_depend_on_the_other_tokens(recipe):
    """Every row of fprop on its own, where scales belong to rows; NVFP4's global scale is the tensor's."""
    x = randn(33, 48, dtype=torch.bfloat16)
    layer = make(recipe, dtype=torch.bfloat16)
    alone = torch.cat([layer(row[None]) for row in x])
    assert torch.equal(alone, layer(x)) == (recipe != "nvfp4")


def test_without_a_recipe_nothing_is_quantized():
    x, dy = operands(21, 48, 40, torch.float32)
    check(make(None), "bf16", x, dy)


@pytest.mark.parametrize("spec", ["fp8-block(scale='fp32')", octavo.recipes.Block(scale="fp32")], ids=repr)
def test_a_recipe_is_given_by_string_or_by_value(spec):
    check(make(spec), "fp8-block(scale='fp32')", *operands(21, 48, 40, torch.float32))


@pytest.mark.parametrize("bad", ["fp9", 3, pytest.param(object(), id="object"), "tensorwise"], ids=str)
def test_what_is_no_recipe_is_refused_at_construction(bad):
    with pytest.raises(UnsupportedConfig, match="recipe"):
        octavo.Linear(8, 8, recipe=bad)
