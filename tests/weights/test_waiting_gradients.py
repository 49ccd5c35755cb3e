"""A weight gradient that waits for backward_dw() while its layer changes: it arrives, or backward_dw() says why not."""

import pickle
import warnings

import pytest
import torch
from torch import nn

import octavo
from octavo.errors import UnsupportedConfig, UnsupportedShape
from tests.support.linear_oracle import assert_same, make, spiky

N, K = 40, 48
SIZES = torch.tensor([9, 0, 12])
x, dy = spiky(21, K, seed=10), spiky(21, N, seed=20)
pytestmark = pytest.mark.usefixtures("fresh_compiler")


def grouped(recipe, single, **settings):
    torch.manual_seed(0)
    return octavo.GroupedLinear(3, K, N, recipe=recipe, single_grouped_weight=single, **settings)


KINDS = {
    "linear": lambda recipe, **settings: make(recipe, K, N, **settings),
    "one weight": lambda recipe, **settings: grouped(recipe, True, **settings),
    "a weight for each group": lambda recipe, **settings: grouped(recipe, False, **settings),
}
kinds = pytest.mark.parametrize("kind", KINDS)
ways = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
recipes = pytest.mark.parametrize("recipe", ["bf16", "fp8-current", "mxfp8"])


def arguments(kind):
    return (x,) if kind == "linear" else (x, SIZES)


def waiting(kind="linear", recipe="fp8-current", compiled=False, **settings):
    """A layer with one weight gradient that waits, and that gradient."""
    plain, layer = KINDS[kind](recipe), KINDS[kind](recipe, delay_wgrad_compute=True, **settings)
    plain(*arguments(kind)).backward(dy)
    call = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    call(*arguments(kind)).backward(dy)
    return layer, [weight.grad for weight in plain._weight_parts()]


def assert_delivered(layer, want):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer.backward_dw()
    for weight, grad in zip(layer._weight_parts(), want, strict=True):
        assert_same(weight.grad, grad)
    assert len(layer._wgrad.queue) == 0


# -- the setting is switched off -------------------------------------------------------------------------------------


@kinds
@ways
def test_a_gradient_that_waits_when_the_setting_is_switched_off_is_computed(kind, compiled):
    layer, want = waiting(kind, compiled=compiled)
    layer.delay_wgrad_compute = False
    assert_delivered(layer, want)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer.backward_dw()  # without the setting it does nothing, as before


def test_a_setting_switched_off_between_forward_and_backward_keeps_what_forward_decided():
    layer, twin = make("fp8-current", K, N, delay_wgrad_compute=True), make("fp8-current", K, N)
    y = layer(x)
    layer.delay_wgrad_compute = False
    y.backward(dy)
    twin(x).backward(dy)
    assert layer.weight.grad is None
    assert_delivered(layer, [twin.weight.grad])


def test_a_conversion_that_switches_delayed_wgrad_off_loses_nothing():
    layer, want = waiting()
    octavo.convert(nn.Sequential(layer), "fp8-current", delay_wgrad_compute=False, overwrite=True)
    assert not layer.delay_wgrad_compute
    assert_delivered(layer, want)


def test_a_step_names_what_waits_in_a_layer_whose_setting_is_off():
    layer, _ = waiting()
    layer.delay_wgrad_compute = False
    with pytest.warns(UserWarning, match=r"wait for backward_dw\(\): 1 of Linear\(48, 40\)"):
        octavo.step(layer)


# -- the weight is replaced ------------------------------------------------------------------------------------------


def replace(how, layer, shape=None, dtype=torch.float32):
    """Replaces every weight by another, of another shape or dtype if one is given."""
    for name in layer._names_of_weights():
        old = getattr(layer, name)
        new = nn.Parameter(spiky(*(shape or old.shape), seed=3, dtype=dtype).view(shape or old.shape))
        if how == "setattr":
            setattr(layer, name, new)
        elif how == "swap_tensors":
            torch.utils.swap_tensors(old, new)
        elif how == "data":
            old.data = new.data
        else:
            layer.load_state_dict({name: new.detach()}, strict=False, assign=True)


@kinds
@ways
@pytest.mark.parametrize("how", ["setattr", "swap_tensors", "data", "assign"])
def test_a_new_weight_of_the_same_shape_gets_the_gradient(kind, compiled, how):
    layer, want = waiting(kind, compiled=compiled)
    replace(how, layer)
    assert_delivered(layer, want)


@ways
def test_a_new_weight_of_another_dtype_gets_the_gradient_in_its_own(compiled):
    layer, (want,) = waiting(compiled=compiled)
    replace("setattr", layer, dtype=torch.bfloat16)
    assert_delivered(layer, [want.bfloat16()])


WRONG = {"fewer rows": (N // 2, K), "turned": (K, N), "flat": (N * K,)}


@kinds
@ways
@pytest.mark.parametrize(
    ("recipe", "shape"), list(zip(["bf16", "fp8-current", "mxfp8"], WRONG.values(), strict=True)), ids=WRONG
)
def test_a_new_weight_of_another_shape_is_refused_and_the_gradient_waits_on(kind, compiled, recipe, shape):
    layer, want = waiting(kind, recipe, compiled)
    old = layer._weight_parts()
    for name in layer._names_of_weights():
        setattr(layer, name, nn.Parameter(torch.zeros(*shape)))
    text = rf"left a gradient of shape \({', '.join(map(str, old[0].shape))}\).*is \({', '.join(map(str, shape))}"
    with pytest.raises(UnsupportedShape, match=text):
        layer.backward_dw()
    for name, weight in zip(layer._names_of_weights(), old, strict=True):
        setattr(layer, name, weight)
    assert_delivered(layer, want)


@pytest.mark.parametrize("how", ["swap_tensors", "data"])
def test_other_ways_to_another_shape_are_refused(how):
    layer, _ = waiting()
    replace(how, layer, (N // 2, K))
    with pytest.raises(UnsupportedShape, match=r"discard_dw\(\)"):
        layer.backward_dw()
    assert layer.discard_dw() == 1


def test_one_group_of_another_shape_is_refused():
    layer, _ = waiting("a weight for each group")
    layer.weight1 = nn.Parameter(torch.zeros(N // 2, K))
    with pytest.raises(UnsupportedShape, match=rf"weight1 is \({N // 2}, {K}\) on cpu"):
        layer.backward_dw()


@ways
def test_main_grad_of_a_new_weight_is_written_only_if_the_shape_is_the_same(compiled):
    layer = make("fp8-current", K, N, delay_wgrad_compute=True, fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.zeros(N, K)
    call = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    call(x).backward(dy)
    layer.weight = nn.Parameter(torch.zeros(K, N))
    layer.weight.main_grad = torch.zeros(K, N)
    with pytest.raises(UnsupportedShape, match="left a gradient of shape"):
        layer.backward_dw()
    assert not layer.weight.main_grad.any()
    layer.weight = nn.Parameter(torch.zeros(N, K))
    layer.weight.main_grad = torch.zeros(N, K)
    layer.backward_dw()
    assert layer.weight.main_grad.any()


@kinds
@ways
def test_a_layer_that_moved_to_another_device_is_refused(kind, compiled):
    layer, _ = waiting(kind, compiled=compiled)
    layer.to("meta")
    with pytest.raises(UnsupportedShape, match=r"on cpu, and .* on meta now"):
        layer.backward_dw()


def test_a_gradient_that_a_hook_left_is_held_to_the_weight_too():
    layer, _ = waiting()
    handle = layer.weight.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        layer.backward_dw()
    handle.remove()
    layer.weight = nn.Parameter(torch.zeros(K, N))
    with pytest.raises(UnsupportedShape, match="left a gradient of shape"):
        layer.backward_dw()


# -- the weight is frozen, parametrized, gone, copied ----------------------------------------------------------------


@kinds
def test_a_frozen_weight_keeps_the_gradient_waiting_and_a_warning_says_so(kind):
    layer, want = waiting(kind)
    layer.requires_grad_(False)
    with pytest.warns(UserWarning, match=r"1 weight gradient of .*requires_grad=False.*discard_dw\(\)"):
        layer.backward_dw()
    layer.requires_grad_()
    assert_delivered(layer, want)


def test_a_weight_that_is_gone_is_refused():
    layer, _ = waiting()
    layer.weight = None
    with pytest.raises(UnsupportedShape, match="weight is None"):
        layer.backward_dw()


def test_a_parametrization_registered_meanwhile_is_refused():
    layer, want = waiting()
    nn.utils.parametrize.register_parametrization(layer, "weight", nn.Identity())
    with pytest.raises(UnsupportedConfig, match="by a parametrization"):
        layer.backward_dw()
    nn.utils.parametrize.remove_parametrizations(layer, "weight")
    assert_delivered(layer, want)


@recipes
@ways
def test_a_pickled_layer_has_no_backward_to_finish(recipe, compiled):
    layer, want = waiting(recipe=recipe, compiled=compiled)
    with pytest.warns(UserWarning, match="no backward to finish"):
        pickle.loads(pickle.dumps(layer)).backward_dw()
    assert_delivered(layer, want)
