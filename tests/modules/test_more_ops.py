"""Quantize, AddExtraInput, MakeExtraOutput and the collectives by themselves, operations without tokens inside a
Sequential, and grouped layers given codes or mismatched parameters (B1, B4, B11, B19-B22)."""

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import octavo
from octavo import ops
from octavo.errors import Unsupported, UnsupportedConfig
from octavo.quant import QTensor
from octavo.quant.grouped import quantize_groups
from octavo.quant.groups import split
from octavo.recipes import SHIPPED
from tests.fuser.models import Graphs, assert_equal, compiled, fill, step, whole
from tests.modules.oracle import QUANTIZED, assert_same, make, spiky

M, K, N = 32, 48, 40
every = pytest.mark.parametrize("recipe", SHIPPED)
quantized = pytest.mark.parametrize("recipe", QUANTIZED)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    counters.clear()


def spec_of(recipe):
    return octavo.recipe(recipe).linear().fprop.left


def codes_of(recipe, x):
    """What the recipe's fprop makes of x; delayed scaling begins with a multiplier of 1."""
    given = {"encode": torch.ones(1)} if octavo.recipe(recipe).stateful else {}
    return spec_of(recipe).quantize(x, **given)


# -- B4: Quantize ------------------------------------------------------------------------------------------------------


@quantized
@DTYPES
def test_quantize_gives_the_codes_of_fprop(recipe, dtype):
    x = spiky(M, K, dtype=dtype)
    q = ops.Quantize(recipe=recipe)(x)
    assert isinstance(q, QTensor)
    assert q.spec == spec_of(recipe) and q.shape == (M, K) and q.dtype == dtype
    if recipe != "fp8-delayed":  # whose scale is its own to choose
        for a, b in zip(q.tensors(), codes_of(recipe, x).tensors(), strict=True):
            assert a.stride() == b.stride()
            assert_same(a.float(), b.float())


@quantized
def test_the_gradient_goes_straight_through(recipe):
    x, dy = spiky(M, K).requires_grad_(), spiky(M, K, seed=1)
    y = ops.Quantize(recipe=recipe)(x).dequantize()
    assert y.requires_grad
    y.backward(dy)
    assert_same(x.grad, dy)


@quantized
def test_backward_quantizes_the_gradient(recipe):
    x, dy = spiky(M, K).requires_grad_(), spiky(M, K, seed=1)
    y = ops.Quantize(forward=False, backward=True, recipe=recipe)(x)
    assert isinstance(y, torch.Tensor)
    assert torch.equal(y, x)
    y.backward(dy)
    assert x.grad.dtype == dy.dtype
    assert not torch.equal(x.grad, dy)
    error = (x.grad - dy).square().mean().sqrt() / dy.square().mean().sqrt()
    assert error < (0.3 if recipe == "nvfp4" else 0.12)


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-rowwise", "fp8-block", "mxfp8"])
@pytest.mark.parametrize("forward", [True, False])
def test_the_quantized_gradient_is_what_the_codes_of_dgrad_stand_for(recipe, forward):
    x, dy = spiky(M, K).requires_grad_(), spiky(M, K, seed=1)
    y = ops.Quantize(forward=forward, backward=True, recipe=recipe)(x)
    (y.dequantize() if forward else y).backward(dy)
    assert_same(x.grad, octavo.recipe(recipe).linear().dgrad.left.quantize(dy).dequantize())


@pytest.mark.parametrize("flags", [(True, False), (False, True), (True, True), (False, False)], ids=str)
def test_without_a_recipe_it_is_the_identity(flags):
    x, dy = spiky(M, K).requires_grad_(), spiky(M, K, seed=1)
    for op in (ops.Quantize(*flags), ops.Quantize(*flags, recipe="bf16")):
        x.grad = None
        y = op(x)
        assert torch.equal(y, x)
        y.backward(dy)
        assert_same(x.grad, dy)


@pytest.mark.parametrize("recipe", ["fp8-current", "mxfp8"])
def test_it_follows_an_ambient_recipe(recipe):
    op, x = ops.Quantize(), spiky(M, K)
    with octavo.autocast(recipe):
        q = op(x)
    assert isinstance(q, QTensor) and q.spec == spec_of(recipe)
    assert isinstance(op(x), torch.Tensor)


def test_what_is_quantized_already_stays_as_it_is():
    q = codes_of("fp8-current", spiky(M, K))
    found = ops.Quantize(recipe="fp8-current")(q)
    assert found is q or all(torch.equal(a, b) for a, b in zip(found.tensors(), q.tensors(), strict=True))
    other = ops.Quantize(recipe="mxfp8")(q)
    assert isinstance(other, QTensor)


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-rowwise", "fp8-block", "mxfp8"])
def test_a_linear_takes_what_quantize_gives(recipe):
    layer, (x, dy) = make(recipe), (spiky(M, K), spiky(M, N, seed=1))
    twin = copy.deepcopy(layer)
    model = octavo.Sequential(ops.Quantize(recipe=recipe), layer)
    assert_same(model(x).detach(), twin(x).detach())
    plain = nn.Sequential(ops.Quantize(recipe=recipe), twin)
    assert_equal(step(model, x, dy), step(plain, x, dy))


@pytest.mark.parametrize("recipe", ["fp8-current", "nvfp4"])
def test_quantize_compiled(recipe):
    op, x, dy = ops.Quantize(recipe=recipe), spiky(M, K), spiky(M, K, seed=1)
    assert_equal(step(op, x, dy, call=compiled(lambda t: op(t).dequantize())), [op(x).dequantize(), dy])


# -- B1: Identity passes codes on --------------------------------------------------------------------------------------


@quantized
def test_identity_passes_codes_on(recipe):
    model, x = octavo.Sequential(ops.Quantize(recipe=recipe), ops.Identity()), spiky(M, K)
    q = model(x)
    assert isinstance(q, QTensor)
    assert not torch.equal(q.dequantize(), x)  # or nothing was quantized
    dy = spiky(M, K, seed=1)
    assert_equal(step(model, x, dy, call=lambda t: model(t).dequantize()), [q.dequantize().detach(), dy])


# -- B11: AddExtraInput, MakeExtraOutput -------------------------------------------------------------------------------


@DTYPES
def test_add_extra_input(dtype):
    op = ops.AddExtraInput()
    x, extra, dy = (spiky(3, M, K, dtype=dtype, seed=i) for i in range(3))
    kept = extra.clone()
    assert_equal(step(op, (x, extra), dy), [x + extra, dy, dy])
    assert_same(extra, kept)


def eye(dtype):
    layer = octavo.Linear(K, K, bias=False, dtype=dtype, recipe="bf16")
    with torch.no_grad():
        layer.weight.copy_(torch.eye(K))
    return layer


ADDED = {
    "alone": lambda dtype: ops.AddExtraInput(),
    "in a run": lambda dtype: octavo.Sequential(ops.ConstantScale(1.0), ops.AddExtraInput()),
    "linear-bias-add": lambda dtype: octavo.Sequential(eye(dtype), ops.AddExtraInput()),
    "linear-bias-add, a bias": lambda dtype: octavo.Sequential(
        eye(dtype), ops.Bias(K, dtype=dtype), ops.AddExtraInput()
    ),
    "linear-scale-add": lambda dtype: octavo.Sequential(eye(dtype), ops.ConstantScale(1.0), ops.AddExtraInput()),
}


@pytest.mark.parametrize("name", ADDED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_float32_extra_input_is_rounded_once_with_x(name, dtype):
    half = torch.finfo(dtype).eps / 2
    x = torch.ones(M, K, dtype=dtype)
    extra = torch.full(
        (M, K), half * (1 + 2**-12)
    )  # a little more than half a last place: up, but by itself it is half
    model = ADDED[name](dtype)
    want = torch.full((M, K), 1 + 2 * half, dtype=dtype)
    for call in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        leaves = x.clone().requires_grad_(), extra.clone().requires_grad_()
        y = call(*leaves)
        assert torch.equal(y, want)
        y.backward(want)
        assert [t.grad.dtype for t in leaves] == [dtype, torch.float32]
        assert torch.equal(leaves[1].grad, want.float())


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_sum_is_contiguous_however_the_two_lie_in_memory(backend):
    op, x, extra = ops.AddExtraInput(), spiky(K, M).T.requires_grad_(), spiky(K, M, seed=1).T
    for call in (op, torch.compile(op, backend=backend, fullgraph=True)):
        y = call(x, extra)
        assert torch.equal(y, x + extra) and y.is_contiguous()
        y.sum().backward()


def test_add_extra_input_writes_to_the_extra_tensor_if_told_to():
    op, x, extra = ops.AddExtraInput(in_place=True), spiky(M, K).requires_grad_(), spiky(M, K, seed=1)
    want, dy = x.detach() + extra, spiky(M, K, seed=2)
    y = op(x, extra)
    assert y.data_ptr() == extra.data_ptr()
    assert_same(y.detach(), want)
    y.backward(dy)
    assert_same(x.grad, dy)


def test_a_leaf_that_wants_a_gradient_is_not_written_to():
    leaf = spiky(M, K).requires_grad_()
    with pytest.raises(RuntimeError, match="leaf"):
        ops.AddExtraInput(in_place=True)(spiky(M, K, seed=1), leaf)


def test_something_that_was_computed_is_written_to_and_keeps_its_gradient():
    x, leaf, dy = spiky(M, K).requires_grad_(), spiky(M, K, seed=1).requires_grad_(), spiky(M, K, seed=2)
    y = ops.AddExtraInput(in_place=True)(x, 2 * leaf)
    y.backward(dy)
    assert_same(x.grad, dy)
    assert_same(leaf.grad, 2 * dy)


def test_only_what_wants_a_gradient_gets_one():
    op, x, extra, dy = ops.AddExtraInput(), spiky(M, K), spiky(M, K, seed=1), spiky(M, K, seed=2)
    assert_equal(step(op, (x, extra), dy, frozen=(0,)), [x + extra, None, dy])
    assert_equal(step(op, (x, extra), dy, frozen=(1,)), [x + extra, dy, None])


@pytest.mark.parametrize("wrong", [(M, K + 1), (M + 1, K), (K,)], ids=str)
def test_an_extra_input_of_another_shape_is_refused(wrong):
    with pytest.raises(ValueError, match=rf"{K}"):
        ops.AddExtraInput()(spiky(M, K), spiky(*wrong))


@quantized
def test_an_addition_in_place_to_codes_is_refused(recipe):
    """The sum would be in a tensor of values, and the codes what they were."""
    q, x = codes_of(recipe, spiky(M, K, seed=1)), spiky(M, K)
    before = [t.clone() for t in q.tensors()]
    for op in (ops.AddExtraInput(in_place=True), octavo.Sequential(ops.AddExtraInput(in_place=True))):
        with pytest.raises(UnsupportedConfig, match="codes"):
            op(x, q)
        with torch.no_grad(), pytest.raises(UnsupportedConfig, match="codes"):
            op(x, q)
    for a, b in zip(q.tensors(), before, strict=True):
        assert_same(a.float(), b.float())
    assert_same(ops.AddExtraInput()(x, q), x + q.dequantize())
    assert_same(ops.AddExtraInput(in_place=True)(q, x.clone()), x + q.dequantize())


def test_an_addition_in_place_to_codes_is_refused_in_a_graph():
    q, x = codes_of("fp8-block", spiky(M, K, seed=1)), spiky(M, K)
    with pytest.raises(Exception, match="codes"):
        torch.compile(ops.AddExtraInput(in_place=True), backend="aot_eager", fullgraph=True)(x, q)


def test_an_addition_in_place_to_a_weight_held_as_codes_quantizes():
    layer, delta = octavo.Linear(K, M, recipe="fp8-block"), spiky(M, K)
    octavo.quantize_weights(layer)
    want = octavo.recipe("fp8-block").linear().fprop.right.quantize(layer.weight.detach() + delta).dequantize()
    with torch.no_grad(), pytest.raises(UnsupportedConfig, match="dequantize"):
        ops.AddExtraInput(in_place=True)(delta, layer.weight)  # an activation is what it adds to
    with torch.no_grad():
        layer.weight.add_(delta)
    assert_same(layer.weight.detach() * 1, want)


@pytest.mark.parametrize("in_place", [False, True])
@DTYPES
def test_make_extra_output(in_place, dtype):
    op, x = ops.MakeExtraOutput(in_place=in_place), whole(M, K, dtype=dtype)
    dy, dextra = whole(M, K, seed=1, dtype=dtype), whole(M, K, seed=2, dtype=dtype)
    assert_equal(step(op, x, (dy, dextra.clone())), [x, x, dy + dextra])
    assert_equal(step(op, x, (dy, None)), [x, x, dy])
    assert_equal(step(op, x, (None, dextra)), [x, x, dextra])


@pytest.mark.parametrize(("op", "inputs"), [(ops.AddExtraInput(), 2), (ops.MakeExtraOutput(), 1)], ids=["add", "make"])
def test_extra_ones_compiled(op, inputs):
    given = [spiky(M, K, seed=i) for i in range(inputs)]
    dys = [spiky(M, K, seed=5 + i) for i in range(3 - inputs)]
    assert_equal(step(op, given, dys, call=compiled(op)), step(op, given, dys))
    with torch.no_grad():
        found, want = compiled(op)(*given), op(*given)
    assert_equal(found if inputs == 1 else [found], want if inputs == 1 else [want])


# -- collectives, alone ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["AllReduce", "AllGather", "ReduceScatter"])
@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
def test_with_nobody_else_a_collective_is_the_identity(name, is_compiled):
    op, x, dy = getattr(ops, name)(), spiky(M, K), spiky(M, K, seed=1)
    kept = x.clone()
    assert_equal(step(op, x, dy, call=compiled(op) if is_compiled else None), [x, dy])
    assert_same(x, kept)


def test_a_collective_between_operations():
    layers = [make("fp8-current", K, K), ops.AllReduce(), make("fp8-current", K, K, seed=5)]
    model, (x, dy) = octavo.Sequential(*layers), (spiky(M, K), spiky(M, K, seed=1))
    twin = octavo.Sequential(*copy.deepcopy([layers[0], layers[2]]))
    assert_equal(step(model, x, dy), step(twin, x, dy))


# -- B21: no tokens ----------------------------------------------------------------------------------------------------


OPS = {
    **{
        name: getattr(ops, name)
        for name in (
            "GELU", "QGELU", "ReLU", "SReLU", "SiLU", "GLU", "GEGLU", "QGEGLU", "ReGLU", "SReGLU", "SwiGLU",
            "ClampedSwiGLU", "L2Normalization", "Identity", "MakeExtraOutput", "AddExtraInput", "ScaledSwiGLU",
            "ScaledSReLU", "ScaledClampedSwiGLU", "SiTUGLU", "ScaledSiTUGLU", "AllReduce", "AllGather", "ReduceScatter",
        )
    },
    "LayerNorm": lambda: ops.LayerNorm(K),
    "RMSNorm": lambda: ops.RMSNorm(K),
    "Bias": lambda: ops.Bias(K),
    "ConstantScale": lambda: ops.ConstantScale(3.0),
    "Dropout": lambda: ops.Dropout(0.5),
    "Reshape": lambda: ops.Reshape((-1, 2 * K)),
    "Linear": lambda: octavo.Linear(K, N, recipe="fp8-current"),
    "GroupedLinear": lambda: octavo.GroupedLinear(3, K, N, recipe="fp8-current"),
}  # fmt: skip


def extras(name, rows):
    match name:
        case "AddExtraInput":
            return [torch.zeros(rows, K)]
        case "GroupedLinear":
            return [torch.tensor([0, rows, 0])]
    return [torch.zeros(rows)] if name.startswith("Scaled") else []


@pytest.mark.parametrize("name", OPS)
def test_no_tokens(name):
    model = octavo.Sequential(OPS[name]())
    with torch.no_grad():
        outputs = model(torch.zeros(0, K), *extras(name, 0))
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    found = step(model, (torch.zeros(0, K), *extras(name, 0)), [torch.zeros_like(y) for y in outputs])
    some = model(torch.zeros(2, K), *extras(name, 2))
    some = some if isinstance(some, tuple) else (some,)
    assert [y.shape[1:] for y in outputs] == [y.shape[1:] for y in some]
    assert all(y.shape[0] == 0 for y in outputs)
    assert found[len(outputs)].shape == (0, K)
    for p in model.parameters():
        assert p.grad is not None and not p.grad.any()


@quantized
def test_no_tokens_through_quantize(recipe):
    x = torch.zeros(0, K).requires_grad_()
    y = ops.Quantize(recipe=recipe, backward=True)(x).dequantize()
    assert y.shape == (0, K)
    y.backward(torch.zeros(0, K))
    assert x.grad.shape == (0, K)


# -- B19, B20: grouped layers ------------------------------------------------------------------------------------------


SPLITS = torch.tensor([20, 0, 12])


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-block", "mxfp8"])
@pytest.mark.parametrize("inside", [False, True], ids=["alone", "in a Sequential"])
def test_codes_of_groups_stand_for_their_values(recipe, inside):
    layer, x = fill(octavo.GroupedLinear(3, K, N, recipe=recipe)), spiky(M, K)
    row, _ = quantize_groups(x, spec_of(recipe), None, split(SPLITS, M))
    call = octavo.Sequential(layer) if inside else layer
    assert_same(call(row, SPLITS).detach(), layer(row.dequantize(), SPLITS).detach())


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-block", "mxfp8"])
def test_a_gradient_in_codes_stands_for_its_values(recipe):
    """A Quantize behind a grouped layer hands it the values of codes; so does one who quantizes dy first."""
    layer, x, dy = fill(octavo.GroupedLinear(3, K, N, recipe=recipe)), spiky(M, K), spiky(M, N, seed=1)
    quantize = ops.Quantize(recipe=recipe, forward=False, backward=True)
    z = torch.zeros(M, N).requires_grad_()
    quantize(z).backward(dy)
    assert not torch.equal(z.grad, dy)
    want = step(copy.deepcopy(layer), (x, SPLITS), z.grad)
    assert_equal(step(octavo.Sequential(layer, quantize), (x, SPLITS), dy), want)


def test_codes_of_the_wrong_shape_are_refused():
    layer = octavo.GroupedLinear(3, K, N, recipe="fp8-current")
    row, _ = quantize_groups(spiky(M, K + 16), spec_of("fp8-current"), None, split(SPLITS, M))
    with pytest.raises(ValueError, match=str(K)):
        octavo.Sequential(layer)(row, SPLITS)


def test_groups_on_two_devices_are_refused():
    layer = octavo.GroupedLinear(3, K, N, single_grouped_weight=False, single_grouped_bias=False)
    layer.weight1 = nn.Parameter(layer.weight1.detach().to("meta"))
    with pytest.raises((Unsupported, RuntimeError)):
        octavo.Sequential(layer)(spiky(M, K), SPLITS)


def test_groups_of_two_dtypes_are_refused_or_each_has_a_gradient_of_its_own():
    layer = fill(octavo.GroupedLinear(3, K, N, single_grouped_weight=False, single_grouped_bias=False))
    layer.weight2 = nn.Parameter(layer.weight2.detach().bfloat16())
    twin = copy.deepcopy(layer)
    twin.weight2 = nn.Parameter(layer.weight2.detach().float())
    x, dy = spiky(M, K), spiky(M, N, seed=1)
    try:
        found = step(octavo.Sequential(layer), (x, SPLITS), dy)
    except (Unsupported, RuntimeError):
        return
    want = step(twin, (x, SPLITS), dy)
    assert layer.weight2.grad.dtype == torch.bfloat16
    for a, b in zip(found, want, strict=True):
        assert_same(a, b if a is None else b.to(a.dtype))


def test_groups_of_which_one_is_frozen_give_the_others_their_gradients():
    layer = fill(octavo.GroupedLinear(3, K, N, single_grouped_weight=False, recipe="fp8-current"))
    layer.weight1.requires_grad_(False)
    model, twin = octavo.Sequential(layer), copy.deepcopy(layer)
    x, dy = spiky(M, K), spiky(M, N, seed=1)
    found = step(model, (x, SPLITS), dy)
    assert_equal(found, step(twin, (x, SPLITS), dy))
    assert layer.weight1.grad is None and layer.weight0.grad is not None


# -- B22: determinism --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["bf16", "fp8-current"])
def test_deterministic_mode_is_no_error_and_repeats(recipe):
    layers = [ops.LayerNorm(K), octavo.Linear(K, N, recipe=recipe), ops.GELU(), ops.Bias(N)]
    model, x, dy = fill(octavo.Sequential(*layers)), spiky(M, K), spiky(M, N, seed=1)
    want = step(model, x, dy)
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(3):
            assert_equal(step(model, x, dy), want)
    finally:
        torch.use_deterministic_algorithms(False)


def test_new_operations_alone_have_at_most_one_node():
    for op, most in ((ops.AddExtraInput(), 1), (ops.MakeExtraOutput(), 0), (ops.AllReduce(), 0)):
        torch._dynamo.reset()
        graphs = Graphs()
        given = [spiky(M, K, seed=i).requires_grad_() for i in range(2 if isinstance(op, ops.AddExtraInput) else 1)]
        compiled(op, graphs)(*given)
        assert graphs.runs()[0] <= most
