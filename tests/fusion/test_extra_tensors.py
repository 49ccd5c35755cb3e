"""Extra inputs and outputs of a run: forks, channels of integers, additions in place, how many there must be."""

import copy

import pytest
import torch
from torch._dynamo.utils import counters

import octavo
from octavo import ops
from tests.support.custom_operations import Emit, Powered, Take
from tests.support.linear_oracle import assert_same
from tests.support.sequentials import H, M, batch, fill, linear, rows
from tests.support.steps import assert_equal, compiled, step


@pytest.mark.parametrize("recipe", ["bf16", "fp8-current"])
@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_and_an_addition_into_the_residuals_memory(recipe, bias):
    layer = fill(octavo.Linear(H, H, bias=bias, recipe=recipe))
    model, (x, extra) = octavo.Sequential(layer, ops.AddExtraInput(in_place=True)), batch()
    want, room = layer(x).detach() + extra, extra.clone()
    y = model(x.requires_grad_(), room)
    assert y.data_ptr() == room.data_ptr()
    assert_same(y.detach(), want)
    y.backward(torch.ones(M, H))
    assert x.grad is not None and layer.weight.grad is not None


def test_an_addition_in_place_to_a_channel_is_refused():
    with pytest.raises(octavo.errors.UnsupportedConfig, match="writes to its extra input"):
        octavo.Sequential(ops.MakeExtraOutput(channel="r"), linear(), ops.AddExtraInput(in_place=True, source="r"))


@pytest.mark.parametrize("first", [[], [linear()]], ids=["at the start", "later"])
def test_two_forks_in_a_row(first):
    model = octavo.Sequential(*first, ops.MakeExtraOutput(), ops.MakeExtraOutput(), ops.GELU())
    x, dys = rows(), [rows() for _ in range(3)]
    for a, b in zip(step(model, x, dys), step(model, x, dys, call=compiled(model)), strict=True):
        torch.testing.assert_close(a, b)


class Largest(ops.BasicOperation):
    """x again, and where its largest column is."""

    num_extra_outputs = 1

    @staticmethod
    def fuser_forward_compute(config, inputs):
        return inputs.x * 1, (inputs.x.argmax(-1),), ()

    @staticmethod
    def fuser_forward_save_ctx(config, inputs, outputs, fresh):
        return ()

    @staticmethod
    def fuser_backward(config, saved, grads, wants):
        return (grads[0] * 1,)


class Roll(ops.BasicOperation):
    """x, its columns turned by an integer for each row."""

    num_extra_inputs = 1

    @staticmethod
    def _at(x, turn, sign):
        return (torch.arange(x.shape[-1], device=x.device) + sign * turn[..., None]) % x.shape[-1]

    @staticmethod
    def fuser_forward_compute(config, inputs):
        return inputs.x.gather(-1, Roll._at(inputs.x, inputs.extra0, 1)), (), ()

    @staticmethod
    def fuser_forward_save_ctx(config, inputs, outputs, fresh):
        return (inputs.extra0,)

    @staticmethod
    def fuser_backward(config, saved, grads, wants):
        assert not wants.extra0
        return grads[0].gather(-1, Roll._at(grads[0], saved[0], -1)), None


@pytest.mark.parametrize("wrap", [lambda m: m, compiled], ids=["eager", "compiled"])
def test_a_channel_of_integers_wants_no_gradient(wrap):
    model = octavo.Sequential(
        Largest().set_extra_output_channel(0, "at", output_to_caller=False), Roll().set_extra_input_channel(0, "at")
    )
    x = rows().requires_grad_()
    y = wrap(model)(x)
    assert (y[:, 0] == x.max(-1).values).all()
    y[:, 0].sum().backward()
    assert torch.equal(x.grad, torch.nn.functional.one_hot(x.argmax(-1), H).float())


def test_a_fuser_counts_its_extra_inputs():
    fuser = ops.OperationFuser([ops.AddExtraInput(), ops.GELU()])
    with pytest.raises(octavo.errors.UnsupportedConfig, match="1 extra input"):
        fuser(rows())


def test_custom_operations_with_channels_in_one_graph_of_any_batch_size():
    model = fill(
        octavo.Sequential(
            Emit().set_extra_output_channel(0, "a"),
            Powered(H),
            Take().set_extra_input_channel(0, "a"),
            octavo.Linear(H, H, recipe="fp8-current"),
        )
    )
    twin, call = copy.deepcopy(model), compiled(model, dynamic=True)
    for m in (4, 9, 33):
        x, dy = batch(m)
        assert_equal(step(model, x, (dy, dy), call=call), step(twin, x, (dy, dy)), f"{m} tokens")
    assert counters["stats"]["unique_graphs"] == 1
