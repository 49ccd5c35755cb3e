"""Fixtures of every test of the harness."""

import sys

import pytest
import torch

from tests.support.dispatched_experts import PACKAGE, package


@pytest.fixture(autouse=True)
def _registry_of_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The experts of transformers look up their implementation in a registry, of which this is a stand-in."""
    monkeypatch.setitem(sys.modules, PACKAGE, package())


@pytest.fixture(autouse=True)
def _defaults_are_restored():
    """A default that a test leaves behind would change every test after it."""
    yield
    assert torch.get_default_device() == torch.device("cpu")
    assert torch.get_default_dtype() == torch.float32
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
