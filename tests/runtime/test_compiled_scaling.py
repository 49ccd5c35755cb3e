"""Delayed scaling of compiled layers: a warning where its scales are never stepped, none where they are."""

import warnings

import pytest
import torch

import octavo
from tests.support.linear_oracle import make, spiky
from tests.support.steps import compiled

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def test_scales_that_nobody_steps_are_said_for_compiled_layers_too():
    layer = make("fp8-delayed")
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-4)
    call = compiled(layer)

    def train(steps):
        for i in range(steps):
            call(spiky(24, 48, seed=i)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    with pytest.warns(UserWarning, match=r"octavo\.step"):
        train(3)


def test_scales_that_are_stepped_are_not():
    for attached in (False, True):
        layer = make("fp8-delayed")
        optimizer = torch.optim.SGD(layer.parameters(), lr=1e-4)
        if attached:
            octavo.attach(layer, optimizer)
        call = compiled(layer)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for i in range(4):
                call(spiky(24, 48, seed=i)).square().sum().backward()
                optimizer.step()
                if not attached:
                    octavo.step(layer)
        assert octavo.state_dict(layer)["scaling.forward.history"].count_nonzero(1).tolist() == [4, 4]
