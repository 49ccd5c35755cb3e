"""Messages that are no errors go to the logger "octavo", and once to the terminal of a program without logging."""

import logging
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

import octavo

SCRIPT = "import octavo, torch; octavo.convert(torch.nn.Sequential(torch.nn.GELU()), 'mxfp8')"


def convert_nothing():
    octavo.convert(nn.Sequential(nn.GELU()), "mxfp8")


def convert_with_an_unused_rule():
    octavo.convert(nn.Sequential(nn.Linear(16, 16)), octavo.Policy([("*", "mxfp8"), ("*.up", "nvfp4")]))


def finish_no_backward():
    octavo.Linear(16, 16, recipe="mxfp8", delay_wgrad_compute=True).backward_dw()


def forget_the_step():
    layer = octavo.Linear(16, 16, recipe="fp8-delayed")
    for _ in range(2):
        layer(torch.randn(4, 16)).sum().backward()
        with torch.no_grad():
            layer.weight.add_(1)
    layer(torch.randn(4, 16))


@pytest.mark.parametrize(
    "what",
    [convert_nothing, convert_with_an_unused_rule, finish_no_backward, forget_the_step],
    ids=lambda f: f.__name__,
)
def test_a_warning_is_in_the_log_too(what, caplog):
    with caplog.at_level(logging.WARNING, "octavo"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        what()
    ours = [str(warning.message) for warning in caught if issubclass(warning.category, UserWarning)]
    assert ours and [record.getMessage() for record in caplog.records if record.name == "octavo"] == ours
    assert {warning.filename for warning in caught} == {__file__}  # at the line of the caller


def test_a_warning_as_an_error_is_not_logged(caplog):
    with warnings.catch_warnings(action="error"), pytest.raises(UserWarning):
        convert_nothing()
    assert not caplog.records


@pytest.mark.parametrize(("setup", "times"), [("", 1), ("import logging; logging.basicConfig(); ", 2)], ids=["", "log"])
def test_a_warning_reaches_the_terminal_once_unless_logging_is_set_up(setup, times):
    done = subprocess.run([sys.executable, "-c", setup + SCRIPT], capture_output=True, text=True, check=True)
    assert done.stderr.count("found nothing to convert in this Sequential") == times and done.stdout == ""
