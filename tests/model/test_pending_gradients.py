"""octavo.step warns of weight gradients that wait for backward_dw(), by layer."""

import warnings

import pytest
import torch
from torch import nn

import octavo


def made(*names, recipe="fp8-current"):
    layers = {name: octavo.Linear(8, 8, recipe=recipe, delay_wgrad_compute=True) for name in names}
    return nn.ModuleDict(layers)


def backward(model, times=1):
    for _ in range(times):
        for layer in model.values():
            layer(torch.ones(2, 8)).sum().backward()


def said(call, *arguments):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call(*arguments)
    assert all(warning.filename == __file__ for warning in found)
    return [str(warning.message) for warning in found]


TEXT = (
    "This step was made without weight gradients that wait for backward_dw(): {}. Call it for each of these layers, "
    "once for each backward, before optimizer.step(); they pile up otherwise. discard_dw() drops them."
)


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-delayed", "bf16"])
def test_a_step_names_the_layers_and_counts_what_waits(recipe):
    model = made("up", "down", recipe=recipe)
    backward(model, 3)
    model["down"].backward_dw()
    assert said(octavo.step, model) == [TEXT.format("3 of up, 2 of down")]


def test_a_layer_alone_is_named_by_its_sizes():
    layer = octavo.Linear(8, 4, recipe="fp8-current", delay_wgrad_compute=True)
    layer(torch.ones(2, 8)).sum().backward()
    assert said(octavo.step, layer) == [TEXT.format("1 of Linear(8, 4)")]


def test_an_attached_optimizer_warns_of_pending_gradients_once():
    model = made("up")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    octavo.attach(model, optimizer)

    def train(steps):
        for _ in range(steps):
            backward(model)
            optimizer.step()

    assert said(train, 5) == [TEXT.format("1 of up")]
    assert model["up"].discard_dw() == 5
    optimizer.step()
    assert said(train, 5) == [TEXT.format("1 of up")]  # anew, since nothing waited in between


def test_layers_of_another_optimizer_are_left_to_its_step():
    model = made("up", "down")
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model.values()]
    for optimizer in optimizers:
        octavo.attach(model, optimizer)
    backward(model)
    model["up"].backward_dw()
    assert said(optimizers[0].step) == []
    assert said(optimizers[1].step) == [TEXT.format("1 of down")]


def test_gradients_that_were_taken_or_dropped_are_not_said():
    model = made("up", "down")
    backward(model)
    model["up"].backward_dw()
    model["down"].discard_dw()
    assert said(octavo.step, model) == []


def test_what_a_compiled_backward_left_is_counted():
    layer = octavo.Linear(8, 8, recipe="fp8-current", delay_wgrad_compute=True)
    torch.compile(layer, backend="aot_eager", fullgraph=True)(torch.ones(2, 8)).sum().backward()
    assert said(octavo.step, layer) == [TEXT.format("1 of Linear(8, 8)")]


def test_what_waits_for_a_captured_backward_dw_is_not_said(monkeypatch):
    model = made("up")
    monkeypatch.setattr("octavo.weights.wgrad_queue.is_capturing", lambda: True)
    backward(model)
    monkeypatch.undo()
    assert said(octavo.step, model) == []
