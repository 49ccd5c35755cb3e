"""Octavo: low-precision training for PyTorch, in pure Python and Triton."""

from octavo.version import __version__  # isort: skip  (checks the version of torch first)

from octavo import backend, errors, formats, fused, ops, quant, recipes
from octavo.fused.blocks import LayerNormLinear, LayerNormMLP
from octavo.fuser.sequential import Sequential
from octavo.lower import buffer, sac_save_ops
from octavo.modules import (
    GroupedLinear,
    Linear,
    attach,
    autocast,
    convert,
    explain,
    load_state_dict,
    microbatch,
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
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "QTensor",
    "Sequential",
    "__version__",
    "attach",
    "autocast",
    "backend",
    "buffer",
    "convert",
    "errors",
    "explain",
    "formats",
    "fused",
    "load_state_dict",
    "microbatch",
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
