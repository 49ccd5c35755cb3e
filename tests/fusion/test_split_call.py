"""`octavo.ops.SplitCall`: forward, save and backward of one call as functions, with the bits of autograd's."""

import copy

import pytest
import torch
from torch import nn

import octavo
from octavo import ops
from octavo.errors import UnsupportedConfig, UnsupportedDtype, UnsupportedShape
from octavo.recipes import SHIPPED
from tests.support.custom_operations import Doubled, Emit, Powered

pytestmark = pytest.mark.usefixtures("fresh_compiler")

SIZES = torch.tensor([5, 0, 9], dtype=torch.int32)


def linear(recipe, **settings):
    return octavo.Linear(32, 48, recipe=recipe, **settings), ()


def grouped(recipe, **settings):
    return octavo.GroupedLinear(3, 32, 48, recipe=recipe, **settings), (SIZES,)


LAYERS = {"linear": linear, "grouped": grouped}


def by_autograd(layer, x, extra, dys):
    """Outputs and gradients of x and of all parameters, by the layer's own autograd."""
    x = x.clone().requires_grad_()
    made = layer(x, *extra)
    made = made if isinstance(made, tuple) else (made,)
    torch.autograd.backward(made, dys)
    return [*[t.detach() for t in made], x.grad, *[p.grad for p in layer.parameters()]]


def by_hand(layer, x, extra, dys, **keywords):
    call = ops.SplitCall(layer, x, *extra, **keywords)
    made = call.forward(call.inputs)
    gradients = call.backward(call.save(call.inputs, made), *dys)
    return [*made.outputs, gradients.x, *[getattr(gradients, name) for name, _ in layer.named_parameters()]]


def compiled(function):
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def same(found, expected):
    assert len(found) == len(expected)
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(a, b), i


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("recipe", SHIPPED)
def test_a_split_call_gives_the_bits_of_autograd(kind, recipe):
    torch.manual_seed(0)
    layer, extra = LAYERS[kind](recipe)
    own = copy.deepcopy(layer)
    for step in range(2):  # the second step of fp8-delayed has scales
        x, dy = torch.randn(16, 32), torch.randn(16, 48)
        expected = by_autograd(layer, x, extra, (dy,))
        same(by_hand(own, x, extra, (dy,)), expected)
        layer.zero_grad()
        if step == 0:
            octavo.step(layer), octavo.step(own)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("recipe", SHIPPED)
def test_a_split_call_gives_the_same_bits_in_a_graph(kind, recipe):
    torch.manual_seed(0)
    layer, extra = LAYERS[kind](recipe)
    for _ in range(2):
        own = copy.deepcopy(layer)
        x, dy = torch.randn(16, 32), torch.randn(16, 48)
        expected = by_hand(layer, x, extra, (dy,))
        torch._dynamo.reset()
        same(compiled(by_hand)(own, x, extra, (dy,)), expected)
        octavo.step(layer)


OPERATIONS = {
    "gelu": (ops.GELU, ()),
    "swiglu": (ops.SwiGLU, ()),
    "bias": (lambda: ops.Bias(32), ()),
    "scale": (lambda: ops.ConstantScale(2.0), ()),
    "layer-norm": (lambda: ops.LayerNorm(32), ()),
    "rms-norm": (lambda: ops.RMSNorm(32), ()),
    "l2-norm": (ops.L2Normalization, ()),
    "add": (ops.AddExtraInput, (torch.ones(16, 32),)),
    "scaled-swiglu": (ops.ScaledSwiGLU, (torch.rand(16),)),
    "custom": (Doubled, ()),
    "custom with a parameter": (lambda: Powered(32), ()),
    "custom with an extra output": (Emit, ()),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_give_the_bits_of_autograd(name):
    make, extra = OPERATIONS[name]
    op, x = make(), torch.randn(16, 32)
    with torch.no_grad():
        made = op(x, *extra)
    dys = [torch.randn_like(t) for t in (made if isinstance(made, tuple) else (made,))]
    expected = by_autograd(op, x, extra, dys)
    same(by_hand(op, x, extra, dys), expected)
    same(compiled(by_hand)(op, x, extra, dys), expected)


def test_inputs_and_gradients_have_the_same_names():
    call = ops.SplitCall(octavo.Linear(32, 48, recipe="fp8-block"), torch.randn(16, 32))
    assert call.inputs._fields == call.wants._fields
    assert (call.wants.x, call.wants.weight, call.wants.bias) == (True, True, True)
    saved = call.save(call.inputs, call.forward(call.inputs))
    assert saved.x_codes.dtype == torch.float8_e4m3fn  # what crosses to backward is codes
    gradients = call.backward(saved, torch.randn(16, 48))
    assert gradients._fields == call.inputs._fields and len(gradients) == len(call.inputs)


def test_frozen_parameters_and_an_x_without_a_gradient_get_none():
    layer, x, dy = octavo.Linear(32, 48, recipe="fp8-block"), torch.randn(16, 32), torch.randn(16, 48)
    layer.weight.requires_grad_(False)
    call = ops.SplitCall(layer, x, dx=False)
    gradients = call.backward(call.save(call.inputs, call.forward(call.inputs)), dy)
    assert gradients.x is None and gradients.weight is None and gradients.bias is not None


def test_needs_no_autograd_and_makes_no_graph():
    layer, x, dy = octavo.Linear(32, 48, recipe="fp8-current"), torch.randn(16, 32), torch.randn(16, 48)
    expected = by_hand(layer, x, (), (dy,))
    with torch.inference_mode():
        same(by_hand(layer, x, (), (dy,)), expected)
    x.requires_grad_()
    call = ops.SplitCall(layer, x)
    made = call.forward(call.inputs)
    assert made.outputs[0].grad_fn is None and not made.outputs[0].requires_grad


def test_other_rows_pass_through_the_same_call():
    layer, dy = octavo.Linear(32, 48, recipe="fp8-block"), torch.randn(7, 48)
    x, other = torch.randn(16, 32), torch.randn(7, 32)
    call = ops.SplitCall(layer, x)
    inputs = call.inputs._replace(x=other)
    gradients = call.backward(call.save(inputs, call.forward(inputs)), dy)
    assert torch.equal(gradients.weight, by_autograd(layer, other, (), (dy,))[2])


def test_two_calls_in_flight_keep_what_is_theirs():
    layer = octavo.Linear(32, 48, recipe="fp8-delayed")
    own, xs, dys = copy.deepcopy(layer), torch.randn(2, 16, 32), torch.randn(2, 16, 48)
    ys = [layer(x) for x in xs]
    for y, dy in zip(ys, dys, strict=True):
        y.backward(dy)
    calls = [ops.SplitCall(own, x) for x in xs]
    saved = [call.save(call.inputs, call.forward(call.inputs)) for call in calls]
    found = [call.backward(kept, dy) for call, kept, dy in zip(calls, saved, dys, strict=True)]
    assert torch.equal(found[0].weight + found[1].weight, layer.weight.grad)
    octavo.step(layer), octavo.step(own)
    x = torch.randn(4, 32)
    assert torch.equal(layer(x), own(x))  # all amaxes were observed alike


@pytest.mark.parametrize("kind", LAYERS)
def test_main_grad_is_added_to(kind):
    layer, extra = LAYERS[kind]("fp8-block", fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.full_like(layer.weight, 0.5)
    x, dy = torch.randn(16, 32), torch.randn(16, 48)
    plain, _ = LAYERS[kind]("fp8-block")
    plain.load_state_dict(layer.state_dict())
    expected = by_hand(plain, x, extra, (dy,))[2]
    version = layer.weight.main_grad._version
    call = ops.SplitCall(layer, x, *extra)
    gradients = call.backward(call.save(call.inputs, call.forward(call.inputs)), dy)
    assert gradients.weight is None
    torch.testing.assert_close(layer.weight.main_grad, 0.5 + expected)
    assert layer.weight.main_grad._version == version


def test_a_deferred_weight_gradient_waits_for_backward_dw():
    layer = octavo.Linear(32, 48, recipe="fp8-block", delay_wgrad_compute=True)
    plain = octavo.Linear(32, 48, recipe="fp8-block")
    plain.load_state_dict(layer.state_dict())
    x, dy = torch.randn(16, 32), torch.randn(16, 48)
    call = ops.SplitCall(layer, x)
    assert call.backward(call.save(call.inputs, call.forward(call.inputs)), dy).weight is None
    layer.backward_dw()
    assert torch.equal(layer.weight.grad, by_hand(plain, x, (), (dy,))[2])
    with pytest.raises(Exception, match="defers no weight"):
        compiled(by_hand)(layer, x, (), (dy,))


def test_memory_of_the_caller():
    layer, _ = grouped("fp8-block")
    x, dy = torch.randn(16, 32), torch.randn(16, 48)
    expected = by_hand(layer, x, (SIZES,), (dy,))
    out, dgrad_out = torch.full((16, 48), 7.0), torch.full((16, 32), 7.0)
    found = by_hand(layer, x, (SIZES,), (dy,), out=out, dgrad_out=dgrad_out)
    assert found[0].data_ptr() == out.data_ptr() and found[1].data_ptr() == dgrad_out.data_ptr()
    for a, b in zip((out, dgrad_out, found[2]), (expected[0], expected[1], expected[2]), strict=True):
        assert torch.equal(a[:14], b[:14])
    assert (out[14:] == 7).all() and (dgrad_out[14:] == 7).all()  # the tail is left alone


def test_a_cached_weight_is_used():
    layer, x, dy = octavo.Linear(32, 48, recipe="fp8-block"), torch.randn(16, 32), torch.randn(16, 48)
    first = by_hand(layer, x, (), (dy,), is_first_microbatch=True)
    same(by_hand(layer, x, (), (dy,), is_first_microbatch=False), first)
    call = ops.SplitCall(layer, x, is_first_microbatch=False)
    assert len(call.inputs.w_row) > 0


def test_a_graph_takes_any_number_of_rows():
    layer = octavo.Linear(32, 48, recipe="fp8-block")
    step = torch.compile(by_hand, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (16, 24, 40):
        x, dy = torch.randn(rows, 32), torch.randn(rows, 48)
        same(step(layer, x, (), (dy,)), by_hand(layer, x, (), (dy,)))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


class Legacy(ops.BasicOperation):
    def op_forward(self, ctx, x):
        return 2 * x

    def op_backward(self, ctx, dy):
        return 2 * dy, ()


def test_tensors_without_data_pass_through():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        layer = octavo.Linear(32, 48, recipe="fp8-block")
        assert by_hand(layer, torch.empty(4, 32), (), (torch.empty(4, 48),))[1].shape == (4, 32)
    layer = octavo.Linear(32, 48, recipe="fp8-block", device="meta")
    assert by_hand(layer, torch.empty(4, 32, device="meta"), (), (torch.empty(4, 48, device="meta"),))[1].is_meta


def test_what_has_no_functions_is_refused_in_a_sentence():
    x = torch.randn(4, 32)
    for op in (nn.Linear(32, 8), octavo.Sequential(ops.GELU()), octavo.LayerNormMLP(32, 64), ops.Identity(), Legacy()):
        with pytest.raises(UnsupportedConfig, match="has no functions of its own"):
            ops.SplitCall(op, x)
    layer = octavo.Linear(32, 8, recipe="fp8-block")
    with pytest.raises(TypeError, match="takes these keywords in a SplitCall"):
        ops.SplitCall(layer, x, wrong=1)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(UnsupportedConfig, match=r"torch\.autocast is on"):
        ops.SplitCall(layer, x)
    with pytest.raises(UnsupportedConfig, match="takes rows, and x has 3 dims"):
        ops.SplitCall(grouped("bf16")[0], torch.randn(2, 7, 32), SIZES)
    call = ops.SplitCall(layer, x)
    with pytest.raises(TypeError, match="takes the named inputs of this call, got Tensor"):
        call.forward(x)
    saved = call.save(call.inputs, call.forward(call.inputs))
    for grads in ((), (None,), (torch.ones(4, 8), torch.ones(4, 8))):
        with pytest.raises(TypeError, match="1 output, and backward takes a tensor"):
            call.backward(saved, *grads)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("recipe", SHIPPED)
def test_refuses_a_gradient_that_is_not_like_its_output(kind, recipe):
    """nvfp4 pads with zeros, and would multiply what does not belong together."""
    layer, extra = LAYERS[kind](recipe)
    x = torch.randn(16, 32)
    call = ops.SplitCall(layer, x, *extra)
    saved = call.save(call.inputs, call.forward(call.inputs))
    for dy in torch.ones(15, 48), torch.ones(16, 47), torch.ones(16, 48, dtype=torch.bfloat16):
        with pytest.raises(UnsupportedShape, match="Pass a gradient like each output"):
            call.backward(saved, dy)
    call.backward(saved, torch.ones(16, 48))


def test_refuses_an_x_that_the_call_was_not_made_for():
    call = ops.SplitCall(linear("fp8-block")[0], torch.randn(16, 32))
    for x in torch.ones(16, 32, dtype=torch.bfloat16), torch.ones(16, 32, dtype=torch.int32), None:
        with pytest.raises(UnsupportedDtype, match="Make another SplitCall"):
            call.forward(call.inputs._replace(x=x))
    with pytest.raises(UnsupportedShape, match=r"x \[..., 32\], got \(16, 31\)"):
        call.forward(call.inputs._replace(x=torch.ones(16, 31)))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("recipe", SHIPPED)
def test_a_gpu_gives_the_bits_of_autograd(kind, recipe):
    """Autograd's way is replayed from its third call on; this one runs as it is written."""
    torch.manual_seed(0)
    layer, extra = LAYERS[kind](recipe)
    layer, extra = layer.cuda(), tuple(t.cuda() for t in extra)
    own = copy.deepcopy(layer)
    for _ in range(4):
        x, dy = torch.randn(16, 32, device="cuda"), torch.randn(16, 48, device="cuda")
        expected = by_autograd(layer, x, extra, (dy,))
        same(by_hand(own, x, extra, (dy,)), expected)
        layer.zero_grad()
        octavo.step(layer), octavo.step(own)


@pytest.mark.gpu
def test_a_captured_step_by_hand_follows_its_inputs():
    layer = octavo.Linear(64, 96, recipe="fp8-block", device="cuda", dtype=torch.bfloat16)
    x, dy = (torch.randn(128, n, device="cuda", dtype=torch.bfloat16) for n in (64, 96))
    for _ in range(2):
        by_hand(layer, x, (), (dy,))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = by_hand(layer, x, (), (dy,))
    x.normal_(), dy.normal_()
    graph.replay()
    same(found, by_hand(layer, x, (), (dy,)))
