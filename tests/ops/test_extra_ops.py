"""ops.AddExtraInput and ops.MakeExtraOutput by themselves: sums, gradients, writes in place, nodes."""

import pytest
import torch

import octavo
from octavo import ops
from octavo.errors import UnsupportedConfig
from tests.support.linear_oracle import assert_same, codes_of, spiky
from tests.support.recipe_traits import QUANTIZED
from tests.support.sequentials import Graphs, whole
from tests.support.steps import assert_equal, compiled, step

pytestmark = pytest.mark.usefixtures("fresh_compiler")
M, K, N = 32, 48, 40
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


# -- AddExtraInput -----------------------------------------------------------------------------------------------------


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


# -- additions in place to codes ---------------------------------------------------------------------------------------


quantized = pytest.mark.parametrize("recipe", QUANTIZED)


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


# -- MakeExtraOutput, and both compiled --------------------------------------------------------------------------------


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


def test_new_operations_alone_have_at_most_one_node():
    for op, most in ((ops.AddExtraInput(), 1), (ops.MakeExtraOutput(), 0), (ops.AllReduce(), 0)):
        torch._dynamo.reset()
        graphs = Graphs()
        given = [spiky(M, K, seed=i).requires_grad_() for i in range(2 if isinstance(op, ops.AddExtraInput) else 1)]
        compiled(op, graphs)(*given)
        assert graphs.runs()[0] <= most
