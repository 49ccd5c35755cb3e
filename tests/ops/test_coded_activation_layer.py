"""The contract of the elementwise layer that keeps codes of x, without a module around it."""

import pytest
import torch

from octavo.kernels.activation import ACTIVATIONS
from octavo.ops import activation_layer, coded_activation_layer
from octavo.ops.activation_layer import Inputs, shape_of_y
from octavo.ops.coded_activation_layer import Config, layer
from octavo.quant import Block1D
from octavo.runtime.replay.recorder import Recorder
from tests.support.contract_checks import check_backward, check_forward, wants
from tests.support.linear_oracle import assert_same, spiky
from tests.support.steps import relative_error

LEAD, WIDTH = (3, 5), 160


def case(name, grads, dtype=torch.float32):
    """A config, and inputs that fit it, with scales and a bias."""
    config = Config(name, scales_dtype="float32", bias_dtype="float32", **wants(grads))
    return config, Inputs(spiky(*LEAD, WIDTH, dtype=dtype), torch.rand(LEAD) + 0.5, torch.randn(WIDTH))


@pytest.mark.parametrize("grads", ["", "dx", "ds", "db", "dx ds db"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_coded_activation_layer_keeps_the_contract(name, grads):
    config, inputs = case(name, grads)
    made = check_forward(layer, config, inputs)
    dy = torch.randn(shape_of_y(config, (*LEAD, WIDTH)))
    check_backward(layer, config, inputs, made, (dy,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gradients_are_those_of_the_plain_layer_at_the_decoded_x(dtype):
    config, inputs = case("swiglu", "dx ds", dtype)
    dy = torch.randn(shape_of_y(config, (*LEAD, WIDTH))).to(dtype)
    plain = activation_layer.Config("swiglu", scales_dtype="float32", bias_dtype="float32", **wants("dx ds"))
    made = layer.forward(config, inputs)
    assert_same(made.outputs[0], activation_layer.layer.forward(plain, inputs).outputs[0])
    found = layer.backward(config, layer.save(config, inputs, made), (), (dy,))
    decoded = inputs._replace(x=Block1D().quantize(inputs.x).dequantize())
    want = activation_layer.layer.backward(plain, activation_layer.layer.save(plain, decoded, made), (), (dy,))
    exact = activation_layer.layer.backward(plain, activation_layer.layer.save(plain, inputs, made), (), (dy,))
    for a, b, c in zip(found[:2], want[:2], exact[:2], strict=True):
        assert_same(a, b)
        assert 0 < relative_error(a, c) < 0.05


def test_a_coded_activation_keeps_a_byte_for_each_element_and_a_scale_for_128():
    config, inputs = case("gelu", "dx")
    saved = layer.save(config, inputs, layer.forward(config, inputs))
    assert (saved.x_codes.dtype, tuple(saved.x_codes.shape)) == (torch.float8_e4m3fn, (15, WIDTH))
    assert (saved.x_scale.dtype, tuple(saved.x_scale.shape)) == (torch.float32, (15, 2))


def test_rows_do_not_depend_on_each_other():
    """Rows after the last group may hold anything."""
    config, inputs = Config("gelu", **wants("dx")), Inputs(spiky(8, WIDTH))
    want = layer.forward(config, inputs).intermediates
    for value in (float("nan"), float("inf"), 1e38, 0.0):
        inputs.x[5:] = value
        found = layer.forward(config, inputs).intermediates
        for a, b in zip(found, want, strict=True):
            assert_same(a[:5].float(), b[:5].float())


def test_a_nan_in_x_stays_visible():
    config, x = Config("gelu", **wants("dx")), torch.randn(4, WIDTH)
    x[1, 7] = float("nan")
    saved = layer.save(config, Inputs(x), layer.forward(config, Inputs(x)))
    kept = layer.restored(config, saved, torch.float32).x
    assert kept[1, 7].isnan() and kept[[0, 2, 3]].isfinite().all()


def test_the_largest_numbers_stay_finite():
    config, x = Config("relu", **wants("dx")), torch.full((2, WIDTH), 65504.0).half()
    saved = layer.save(config, Inputs(x), layer.forward(config, Inputs(x)))
    assert layer.restored(config, saved, torch.float16).x.isfinite().all()


def test_codes_as_a_graph_returns_them():
    """Bytes, and a flat scale."""
    config, inputs = case("gelu", "dx")
    saved = layer.save(config, inputs, layer.forward(config, inputs))
    scale = saved.x_scale
    flat = saved._replace(x_codes=saved.x_codes.view(torch.uint8), x_scale=scale.as_strided((scale.numel(),), (1,)))
    assert layer.flat_places(config) == (coded_activation_layer.Intermediates._fields.index("x_scale"),)
    assert_same(layer.restored(config, flat, torch.float32).x, layer.restored(config, saved, torch.float32).x)


def test_decoding_is_recorded_for_replay():
    """It reads no value, and its lines give the same bits on other codes."""
    config = Config("gelu", **wants("dx"))

    def saved(seed):
        inputs = Inputs(spiky(8, WIDTH, seed=seed, dtype=torch.bfloat16))
        return layer.save(config, inputs, layer.forward(config, inputs))

    first, second = saved(0), saved(1)
    recorder = Recorder(first[:2])
    with recorder.watching():
        x = layer.restored(config, first, torch.bfloat16).x
    replay = recorder.function(None, [x])
    assert_same(replay(list(second[:2]))[1][0], layer.restored(config, second, torch.bfloat16).x)
