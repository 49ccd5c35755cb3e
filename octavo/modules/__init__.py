"""Modules: parameters, state as buffers, and one layer call."""

from octavo.modules.ambient import autocast, microbatch
from octavo.modules.attached import attach
from octavo.modules.convert import convert, revert
from octavo.modules.explain import explain
from octavo.modules.grouped_linear import GroupedLinear
from octavo.modules.linear import Linear
from octavo.modules.model import load_state_dict, quantize_weights, refresh_weights, state_dict, step

__all__ = [
    "GroupedLinear",
    "Linear",
    "attach",
    "autocast",
    "convert",
    "explain",
    "load_state_dict",
    "microbatch",
    "quantize_weights",
    "refresh_weights",
    "revert",
    "state_dict",
    "step",
]
