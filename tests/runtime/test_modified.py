"""A write to what backward needs, between forward and backward: a sentence, or gradients as if it had not been."""

import copy
import weakref

import pytest
import torch
from torch import nn

import octavo
from octavo.errors import ModifiedInPlace, Unsupported
from tests.support.module_kinds import RECIPES, ROWS, K, build

pytestmark = pytest.mark.usefixtures("forgetful_compiler")


# who needs a parameter itself in backward, whatever the recipe: all of bf16's do
NEEDS_PARAMETERS = ("mlp",)
TITLES = {
    "linear": "Linear(64, 64) needs a parameter or an input, FloatTensor (64, 64), in backward as it was in forward",
    "grouped": "GroupedLinear(2, 64, 64) needs a parameter or an input, FloatTensor (2, 64, 64), in backward",
    "groups": "GroupedLinear(2, 64, 64) needs a weight of its own, torch.float32 (64, 64), in backward",
    "mlp": "A run of LayerNorm, Linear, GELU, Linear needs a parameter or an input",
    "sequential": "A run of Linear, GELU, Linear needs a parameter or an input, FloatTensor (64, 64), in backward",
}
WAY_OUT = "Call backward() before optimizer.step() or any other write to it, or run forward again after the write."


def steps(module, extra_inputs, x, between):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    y = module(x, *extra_inputs)
    if between:
        optimizer.step()
    optimizer.zero_grad()
    y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape))
    return [x.grad, *[p.grad for p in module.parameters()]]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", TITLES)
def test_a_step_between_forward_and_backward(kind, recipe):
    module, extra_inputs = build(kind, recipe)
    twin, x = copy.deepcopy(module), torch.randn(ROWS, K)
    if recipe == "bf16" or kind in NEEDS_PARAMETERS:
        with pytest.raises(ModifiedInPlace) as error:
            steps(module, extra_inputs, x.requires_grad_(), True)
        text = str(error.value)
        assert text.startswith("one of the variables needed for gradient computation has been modified by an inplace")
        assert TITLES[kind] in text and text.replace("octavo.step(), ", "").endswith(WAY_OUT)
        assert isinstance(error.value, RuntimeError) and isinstance(error.value, Unsupported)
    else:  # codes of the weight were kept
        found = steps(module, extra_inputs, x.clone().requires_grad_(), True)
        want = steps(twin, extra_inputs, x.clone().requires_grad_(), False)
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_step_before_backward_in_any_dtype(dtype):
    """torch names a bfloat16 tensor in another way than the rest."""
    module = octavo.Linear(16, 8, dtype=dtype)
    y = module(torch.ones(4, 16, dtype=dtype, requires_grad=True))
    with torch.no_grad():
        module.weight.zero_()
    with pytest.raises(ModifiedInPlace, match=r"Linear\(16, 8\) needs a parameter or an input, \w+ \(8, 16\)"):
        y.sum().backward()


def test_a_weight_that_is_quantized_again_in_backward_must_be_as_it_was():
    module, _ = build("again", "fp8-block")
    with pytest.raises(
        ModifiedInPlace, match=r"Linear\(64, 64\) needs a parameter or an input, FloatTensor \(64, 64\)"
    ):
        steps(module, (), torch.randn(ROWS, K, requires_grad=True), True)


def test_the_path_of_a_converted_layer_is_named():
    model = nn.Sequential(nn.Linear(K, K), nn.ReLU(), nn.Linear(K, K))
    octavo.convert(model, "bf16")
    with pytest.raises(ModifiedInPlace, match=r"Linear\(64, 64\) at '\d' needs a parameter"):
        steps(model, (), torch.randn(ROWS, K), True)


def test_an_input_that_was_written_to_is_told_from_a_weight():
    layer, x = octavo.Linear(K, K, recipe="bf16"), torch.randn(ROWS, K, requires_grad=True)
    h = x * 1
    y = layer(h)
    h.detach().mul_(2)
    message = (
        r"Linear\(64, 64\) needs a value that it was given, FloatTensor \(32, 64\).* version was 0 then, and is 1 now\."
    )
    with pytest.raises(ModifiedInPlace, match=message):
        y.sum().backward()


def test_cached_codes_that_were_refreshed_are_named():
    layer, x = octavo.Linear(K, K, recipe="fp8-current"), torch.randn(ROWS, K, requires_grad=True)
    y = layer(x, is_first_microbatch=True)
    octavo.refresh_weights(layer)
    with pytest.raises(ModifiedInPlace, match="needs codes of its weight, ByteTensor"):
        y.sum().backward()


DELAYED = {
    "linear": "Linear(64, 64) needs a scale of fp8-delayed, FloatTensor (1), in backward as it was in forward. ",
    "grouped": "GroupedLinear(2, 64, 64) needs a parameter or an input, or a scale of fp8-delayed, FloatTensor (2)",
    "sequential": "A run of Linear, GELU, Linear needs a scale of fp8-delayed, FloatTensor (1), in backward",
}


@pytest.mark.parametrize("kind", DELAYED)
@pytest.mark.parametrize("before", [0, 1], ids=["cold", "warm"])
def test_a_scale_that_octavo_step_has_changed_is_named(kind, before):
    (module, extra_inputs), x = build(kind, "fp8-delayed"), torch.randn(ROWS, K, requires_grad=True)
    for _ in range(before):
        module(x, *extra_inputs).sum().backward()
        octavo.step(module)
    y = module(x, *extra_inputs)
    octavo.step(module)
    with pytest.raises(ModifiedInPlace) as error:
        y.sum().backward()
    assert DELAYED[kind] in str(error.value)
    assert str(error.value).endswith(WAY_OUT.replace("before ", "before octavo.step(), "))


def test_a_graph_that_is_gone_is_still_torchs_to_tell():
    layer, x = octavo.Linear(K, K, recipe="bf16"), torch.randn(ROWS, K, requires_grad=True)
    y = layer(x).sum()
    y.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time") as error:
        y.backward()
    assert not isinstance(error.value, Unsupported)


def test_a_changed_tensor_is_the_same_error_where_a_mode_watches_operators():
    from torch.utils.flop_counter import FlopCounterMode

    module, _ = build("linear", "bf16")
    with FlopCounterMode(display=False), pytest.raises(ModifiedInPlace, match="A linear layer needs a parameter"):
        steps(module, (), torch.randn(ROWS, K, requires_grad=True), True)


@pytest.mark.parametrize("recipe", ["bf16", "fp8-block"])
@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_a_graph_refuses_or_has_the_right_gradients(kind, recipe):
    """Its saved tensors are torch's, and so is the error."""
    module, _ = build(kind, recipe)
    twin, x = copy.deepcopy(module), torch.randn(ROWS, K)
    module.compile(backend="aot_eager", fullgraph=True)
    if recipe == "bf16" or kind == "mlp":
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            steps(module, (), x.requires_grad_(), True)
    else:
        found = steps(module, (), x.clone().requires_grad_(), True)
        want = steps(twin, (), x.clone().requires_grad_(), False)
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


@pytest.mark.parametrize("name", ["LayerNorm", "GELU", "SwiGLU"])
def test_an_operation_alone_names_a_changed_input_too(name):
    op = octavo.ops.LayerNorm(K) if name == "LayerNorm" else getattr(octavo.ops, name)()
    x = torch.randn(ROWS, K, requires_grad=True)
    y = op(x)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(ModifiedInPlace, match=r"(A norm|An activation) layer needs a parameter or an input"):
        y.sum().backward()


def test_an_operation_lives_no_longer_than_its_owner_wants():
    op, x = octavo.ops.LayerNorm(K), torch.randn(ROWS, K, requires_grad=True)
    alive, y = weakref.ref(op), op(x)
    del op
    assert alive() is None and y.grad_fn is not None
