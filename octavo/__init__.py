"""Octavo: low-precision training for PyTorch, in pure Python and Triton."""

from octavo.version import __version__  # isort: skip  (checks the version of torch first)

from octavo import backend, errors, formats, ops, quant, recipes
from octavo.lower import buffer, sac_save_ops
from octavo.modules import (
    GroupedLinear,
    Linear,
    attach,
    autocast,
    convert,
    explain,
    load_state_dict,
    quantize_weights,
    refresh_weights,
    revert,
    state_dict,
    step,
)
from octavo.quant import QTensor
from octavo.recipes import recipe

__all__ = [
    "GroupedLinear",
    "Linear",
    "QTensor",
    "__version__",
    "attach",
    "autocast",
    "backend",
    "buffer",
    "convert",
    "errors",
    "explain",
    "formats",
    "load_state_dict",
    "ops",
    "quant",
    "quantize_weights",
    "recipe",
    "recipes",
    "refresh_weights",
    "revert",
    "sac_save_ops",
    "state_dict",
    "step",
]
