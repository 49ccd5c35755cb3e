"""Linear is an nn.Linear: same constructor, parameters and initial values; any leading dims and strides; odd forms."""

import inspect

import pytest
import torch
from torch import nn

import octavo
from octavo import ops
from octavo.errors import Unsupported, UnsupportedConfig, UnsupportedDevice, UnsupportedDtype, UnsupportedShape
from octavo.recipes import SHIPPED
from tests.support.linear_oracle import (
    Memory,
    Result,
    assert_result,
    assert_same,
    check,
    expected,
    make,
    randn,
    run,
    seed_of,
    spiky,
)

every = pytest.mark.parametrize("recipe", SHIPPED)


# -- construction --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [None, *SHIPPED])
@pytest.mark.parametrize("bias", [True, False])
def test_parameters_are_those_of_nn_linear(recipe, bias):
    torch.manual_seed(7)
    want = nn.Linear(48, 40, bias=bias, dtype=torch.bfloat16)
    torch.manual_seed(7)
    layer = octavo.Linear(48, 40, bias=bias, dtype=torch.bfloat16, recipe=recipe)
    assert isinstance(layer, nn.Linear)
    assert [name for name, _ in layer.named_parameters()] == [name for name, _ in want.named_parameters()]
    for found, p in zip(layer.parameters(), want.parameters(), strict=True):
        assert type(found) is nn.Parameter
        assert found.requires_grad
        assert_same(found.detach(), p.detach())
    assert (layer.in_features, layer.out_features) == (48, 40)


def test_the_constructor_takes_what_nn_linear_takes_in_its_order():
    ours, theirs = (list(inspect.signature(c.__init__).parameters.values()) for c in (octavo.Linear, nn.Linear))
    assert [p.name for p in ours[: len(theirs)]] == [p.name for p in theirs]
    more = {p.name: p for p in ours[len(theirs) :]}
    assert all(p.kind is p.KEYWORD_ONLY for p in more.values())
    assert list(more) == [
        "recipe", "return_bias", "fuse_wgrad_accumulation", "delay_wgrad_compute", "keep_weight_codes",
        "save_original_input",
        "strict", "parallel_mode", "sequence_parallel", "tp_group", "gather_again",
        "column_blocks", "row_codes_only",
    ]  # fmt: skip


# -- shapes and strides --------------------------------------------------------------------------------------------


@every
@pytest.mark.parametrize("lead", [(), (1,), (2, 3), (2, 1, 5), (3, 2, 2, 2)], ids=str)
def test_any_leading_dims(recipe, lead):
    x, dy = spiky(*lead, 80), spiky(*lead, 44, seed=2)
    check(make(recipe, 80, 44), recipe, x, dy)


@every
@pytest.mark.parametrize("lead", [(0,), (2, 0), (0, 3, 1)], ids=str)
def test_no_tokens_give_zero_gradients(recipe, lead):
    layer = make(recipe)
    found = run(layer, torch.zeros(*lead, 48), torch.zeros(*lead, 40))
    want = Result(torch.zeros(*lead, 40), torch.zeros(*lead, 48), torch.zeros(40, 48), torch.zeros(40))
    assert_result(found, want)
    octavo.step(layer)
    inverse_scale = None
    if recipe == "fp8-delayed":  # nothing was seen of x and dy: their scales stay
        memory = Memory(recipe)
        memory.observe(w=layer.weight)
        memory.step()
        inverse_scale = memory.inverse_scale
    check(layer, recipe, spiky(8, 48), spiky(8, 40, seed=2), inverse_scale=inverse_scale)


LAYOUTS = {
    "transposed": lambda x: x.T.contiguous().T,
    "every second row": lambda x: torch.stack((x, -x), 1).flatten(0, 1)[::2],
    "every second column": lambda x: torch.stack((x, -x), 2).flatten(1)[:, ::2],
    "part of a wider row": lambda x: torch.cat((x, x), 1)[:, : x.shape[1]],
    "an offset": lambda x: torch.cat((x[:1], x))[1:],
}


@every
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_strides_of_x_and_dy_do_not_matter(recipe, layout):
    x, dy = spiky(21, 48, dtype=torch.bfloat16), spiky(21, 40, dtype=torch.bfloat16, seed=2)
    strided_x, strided_dy = layout(x), layout(dy)
    assert torch.equal(strided_x, x) and torch.equal(strided_dy, dy)
    check(make(recipe, dtype=torch.bfloat16), recipe, strided_x, strided_dy)


@every
def test_a_permuted_batch_of_sequences(recipe):
    x = spiky(5, 3, 48).transpose(0, 1)
    check(make(recipe), recipe, x, spiky(5, 3, 40, seed=2).transpose(0, 1))


@every
def test_an_expanded_input(recipe):
    layer, row, dy = make(recipe), spiky(1, 48), spiky(21, 40, seed=2)
    seed = seed_of(layer)
    leaf = row.clone().requires_grad_()
    layer(leaf.expand(21, 48)).backward(dy)
    want = expected(recipe, row.expand(21, 48), layer.weight, layer.bias, dy, seed=seed)
    assert_same(layer.weight.grad, want.dw)
    assert torch.allclose(leaf.grad, want.dx.sum(0, keepdim=True), atol=1e-4)


@every
@pytest.mark.parametrize("lead", [(21,), (3, 7)], ids=str)
def test_an_expanded_gradient(recipe, lead):
    """out.sum().backward() hands over one element with strides of zero."""
    layer, x = make(recipe), spiky(*lead, 48)
    seed = seed_of(layer)
    leaf = x.clone().requires_grad_()
    y = layer(leaf)
    y.sum().backward()
    want = expected(recipe, x, layer.weight, layer.bias, torch.ones(*lead, 40), seed=seed)
    assert_result(Result(y.detach(), leaf.grad, layer.weight.grad, layer.bias.grad), want)


def test_a_transposed_weight():
    """Weights whose own strides are not row-major, as some checkpoints leave them."""
    layer = make("fp8-rowwise")
    layer.weight = nn.Parameter(layer.weight.detach().T.contiguous().T)
    check(layer, "fp8-rowwise", spiky(21, 48), spiky(21, 40, seed=2))


@every
@pytest.mark.parametrize(("k", "n"), [(1, 1), (1, 40), (48, 1), (7, 13), (129, 257)], ids=str)
def test_numbers_of_features_may_be_odd(recipe, k, n):
    check(make(recipe, k, n), recipe, spiky(5, k), spiky(5, n, seed=2))


@every
@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_a_layer_without_features_gives_its_bias(recipe):
    layer = octavo.Linear(0, 40, recipe=recipe)
    with torch.no_grad():
        layer.bias.copy_(randn(40))
    found = run(layer, torch.zeros(3, 0), torch.ones(3, 40))
    want = Result(layer.bias.detach().expand(3, 40), torch.zeros(3, 0), torch.zeros(40, 0), torch.full((40,), 3.0))
    assert_result(found, want)
    found = run(octavo.Linear(48, 0, recipe=recipe), randn(3, 48), torch.zeros(3, 0))
    assert_result(found, Result(torch.zeros(3, 0), torch.zeros(3, 48), torch.zeros(0, 48), torch.zeros(0)))


# -- refusals ------------------------------------------------------------------------------------------------------


@every
def test_an_input_of_another_width_is_refused_with_both_numbers(recipe):
    with pytest.raises(UnsupportedShape, match=r"(?s)(?=.*\b48\b)(?=.*\b47\b)"):
        make(recipe)(randn(3, 47))


@every
@pytest.mark.parametrize("x", [torch.zeros(3, 48, dtype=torch.int64), torch.zeros(3, 48, dtype=torch.float64)], ids=str)
def test_an_input_of_another_dtype_is_refused(recipe, x):
    with pytest.raises(Unsupported, match=str(x.dtype)):
        make(recipe)(x)


@every
def test_an_input_on_another_device_is_refused(recipe):
    with pytest.raises((Unsupported, RuntimeError)):
        make(recipe)(torch.zeros(3, 48, device="meta"))


def test_tensors_on_two_devices_and_wide_weights_are_said():
    with pytest.raises(UnsupportedDevice, match="x is on meta and the weight on cpu"):
        make("fp8-current")(torch.zeros(3, 48, device="meta"))
    with pytest.raises(UnsupportedDtype, match=r"torch\.float64"):
        make("bf16").double()(torch.zeros(3, 48))
    with pytest.raises(UnsupportedConfig, match=r"torch\.float64"):
        octavo.convert(nn.Linear(4, 4, dtype=torch.float64), "fp8-current")


# -- return_bias ---------------------------------------------------------------------------------------------------


@every
def test_return_bias_leaves_the_addition_to_the_caller(recipe):
    layer = make(recipe, return_bias=True)
    x, dy, seed = spiky(21, 48), spiky(21, 40, seed=2), seed_of(layer)
    leaf = x.clone().requires_grad_()
    y, bias = layer(leaf)
    assert bias is layer.bias
    y.backward(dy)
    want = expected(recipe, x, layer.weight, None, dy, seed=seed)
    assert_result(Result(y.detach(), leaf.grad, layer.weight.grad, layer.bias.grad), want)


def test_return_bias_lets_the_bias_train_where_it_is_added():
    layer = make("fp8-current", return_bias=True)
    y, bias = layer(spiky(21, 48))
    (y + bias).sum().backward()
    assert torch.equal(layer.bias.grad, torch.full((40,), 21.0))


def test_return_bias_without_a_bias():
    y, bias = make("fp8-current", return_bias=True, bias=False)(spiky(21, 48))
    assert bias is None and y.shape == (21, 40)


# -- the input by its name ---------------------------------------------------------------------------------------------

H = 16
TWINS = {  # an operation -> the module of torch whose place it takes
    "Linear": (lambda: octavo.Linear(H, H), nn.Linear),
    "LayerNorm": (lambda: ops.LayerNorm(H), nn.LayerNorm),
    "RMSNorm": (lambda: ops.RMSNorm(H), nn.RMSNorm),
    "GELU": (ops.GELU, nn.GELU),
    "ReLU": (ops.ReLU, nn.ReLU),
    "SiLU": (ops.SiLU, nn.SiLU),
    "GLU": (ops.GLU, nn.GLU),
    "Dropout": (lambda: ops.Dropout(0.0), nn.Dropout),
    "Identity": (ops.Identity, nn.Identity),
    "Sequential": (lambda: octavo.Sequential(ops.GELU(), octavo.Linear(H, H)), nn.Sequential),
    "LayerNormMLP": (lambda: octavo.LayerNormMLP(H, H), nn.Sequential),
}


@pytest.mark.parametrize("name", TWINS)
@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_a_module_takes_its_input_by_the_name_that_torchs_has(name, mode):
    build, twin = TWINS[name]
    module, x = build(), spiky(6, H)
    first = list(inspect.signature(twin.forward).parameters)[1]
    call = torch.compile(module, backend="aot_eager", fullgraph=True) if mode == "compiled" else module
    assert torch.equal(call(**{first: x}), module(x))


def test_other_operations_and_experts_take_their_input_by_the_same_name():
    x, extra = spiky(6, H), spiky(6, H, seed=1)
    experts = octavo.GroupedLinear(2, H, H)
    assert torch.equal(experts(input=x, m_splits=[2, 4]), experts(x, [2, 4]))
    for op in (ops.QGELU(), ops.SwiGLU(), ops.L2Normalization(), ops.ConstantScale(2.0), ops.Bias(H), ops.Reshape(-1)):
        assert torch.equal(op(input=x), op(x))
    assert torch.equal(ops.AddExtraInput()(input=x, extra=extra), x + extra)
    assert torch.equal(ops.ScaledSReLU()(input=x, scales=x[:, 0]), ops.ScaledSReLU()(x, x[:, 0]))


def test_a_converted_model_that_calls_by_name():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(H, H)

        def forward(self, x):
            return self.layer(input=x)

    model, x = Model(), spiky(6, H)
    octavo.convert(model, "fp8-current")
    assert torch.equal(model(x), model.layer(x))


# -- tensors that are not dense ----------------------------------------------------------------------------------------


def jagged():
    return torch.nested.nested_tensor([spiky(2, H), spiky(5, H, seed=1)], layout=torch.jagged)


REFUSING = {
    "Linear": lambda: octavo.Linear(H, H, recipe="fp8-current"),
    "a run": lambda: octavo.Sequential(ops.GELU(), octavo.Linear(H, H)),
    "Quantize": lambda: ops.Quantize(recipe="fp8-current"),
    **{name: TWINS[name][0] for name in ("LayerNorm", "RMSNorm", "GELU", "LayerNormMLP")},
}


@pytest.mark.parametrize("name", REFUSING)
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
def test_a_nested_tensor_is_refused_with_the_way_out(name, layout):
    module = REFUSING[name]()
    x = torch.nested.nested_tensor([spiky(2, H), spiky(5, H, seed=1)], layout=layout)
    with pytest.raises(Unsupported, match=r"takes plain tensors, got a nested one.*layer\(x\.values\(\)\)"):
        module(x)


def test_a_nested_tensor_is_refused_as_an_extra_input_by_experts_and_in_a_graph():
    x = jagged()
    for call in (lambda: octavo.GroupedLinear(2, H, H)(x, [2, 5]), lambda: ops.AddExtraInput()(spiky(7, H), x)):
        with pytest.raises(Unsupported, match="got a nested one"):
            call()
    layer = octavo.Linear(H, H)
    with pytest.raises(Exception, match="got a nested one"):
        torch.compile(layer, backend="aot_eager", fullgraph=True)(x)


def test_the_way_out_for_a_jagged_tensor_is_one():
    layer, x = octavo.Linear(H, H, recipe="fp8-current"), jagged()
    y = torch.nested.nested_tensor_from_jagged(layer(x.values()), x.offsets())
    assert y.layout == torch.jagged and torch.equal(y.values(), layer(torch.cat(list(x.unbind()))))


def test_a_sparse_tensor_is_refused_with_the_way_out():
    with pytest.raises(Unsupported, match=r"takes dense tensors, got one of layout torch\.sparse_coo.*to_dense"):
        octavo.Linear(H, H)(spiky(6, H).to_sparse())


def test_a_fork_and_an_identity_take_nested_tensors_as_they_are():
    x = jagged().requires_grad_()
    y, extra = ops.MakeExtraOutput()(ops.Identity()(x))
    (y.values().sum() + 2 * extra.values().sum()).backward()
    assert (x.grad.values() == 3).all()
