"""Codes into and out of compiled graphs: QTensors as inputs and outputs, with and without gradients."""

import copy

import pytest
import torch
from torch import nn

import octavo
from tests.support.compiled_twins import K, M, N, assert_step, batch, graphs, quantizing, stepped
from tests.support.linear_oracle import assert_same, graphs_of, make, spec_of, spiky
from tests.support.recipe_traits import QUANTIZED
from tests.support.same_tensors import assert_same as assert_same_codes
from tests.support.steps import assert_state, compiled

pytestmark = pytest.mark.usefixtures("fresh_compiler")


class Coded(nn.Module):
    """A layer of every recipe that has codes, each with an input of its own."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([make(recipe, seed=i) for i, recipe in enumerate(QUANTIZED)])

    def forward(self, inputs, **flags):
        return [layer(x, **flags) for layer, x in zip(self.layers, inputs, strict=True)]


def coded():
    model = Coded()
    return model, copy.deepcopy(model)


@pytest.mark.parametrize("lead", [(M,), (2, 5)], ids=str)
def test_codes_leave_a_graph_without_gradients(lead):
    model, twin = coded()
    call = compiled(model)
    for i in range(2):
        inputs = [spiky(*lead, K, seed=10 * i + j) for j in range(len(QUANTIZED))]
        with torch.no_grad():
            outputs = zip(QUANTIZED, call(inputs, fp8_output=True), twin(inputs, fp8_output=True), strict=True)
        for recipe, found, want in outputs:
            assert type(found) is type(want) is octavo.QTensor
            assert found.spec == want.spec == spec_of(recipe)
            assert (tuple(found.shape), found.dtype) == (tuple(want.shape), want.dtype) == ((*lead, N), torch.float32)
            assert_same_codes(found, want)
            assert_same(found.dequantize(), want.dequantize())
            assert found.anchor is None or not found.anchor.requires_grad
    assert graphs() == 1


def test_compiled_layers_take_codes_with_and_without_gradients():
    model, twin = coded()
    call = compiled(model)
    for i in range(2):
        inputs = [spec_of(recipe).quantize(spiky(M, K, seed=10 * i + j)) for j, recipe in enumerate(QUANTIZED)]
        outputs = []
        for m, run in ((model, call), (twin, twin)):
            m.zero_grad()
            outputs.append(run(inputs))
            torch.autograd.backward(outputs[-1], [batch(10 * i + j)[1] for j in range(len(QUANTIZED))])
        for found, want in zip(*outputs, strict=True):
            assert_same(found.detach(), want.detach())
        for (name, found), want in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert_same(found.grad, want.grad, name)
        with torch.no_grad():
            for found, want in zip(call(inputs), twin(inputs), strict=True):
                assert_same(found, want)
    assert_state(model, twin)


@pytest.mark.parametrize("recipe", ["fp8-delayed", "nvfp4"])
def test_codes_pass_from_one_compiled_graph_to_another_with_gradients(recipe):
    model = nn.ModuleList([make(recipe), make(recipe, N, 24, seed=3)])
    twin = copy.deepcopy(model)
    first, second = compiled(quantizing(model[0])), compiled(model[1])
    for i in range(2):
        assert_step((model, twin), (lambda x: second(first(x)), lambda x: twin[1](twin[0](x, fp8_output=True))),
                    batch(i, n=24))  # fmt: skip
        stepped(model, twin)
    assert graphs() == graphs_of(recipe, 2)
    assert_state(model, twin)
