"""octavo.convert of TorchScript, which runs by code that was compiled for its layers."""

import pytest
import torch
from torch import nn

import octavo
from octavo.errors import UnsupportedConfig


@pytest.mark.parametrize(
    "make", [torch.jit.script, lambda m: torch.jit.trace(m, torch.ones(2, 8))], ids=["script", "trace"]
)
def test_scripted_modules_are_refused(make):
    inner = make(nn.Sequential(nn.Linear(8, 8)))
    model = nn.Sequential(nn.Linear(8, 8), inner)
    for given, name in ((inner, "the model"), (model, "'1'")):
        with pytest.raises(
            UnsupportedConfig, match=rf"{name} is TorchScript .*Convert the module that it was made from"
        ):
            octavo.convert(given, "fp8-block")
    assert type(model[0]) is nn.Linear
