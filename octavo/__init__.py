"""Octavo: low-precision training for PyTorch, in pure Python and Triton.

    Layers      Linear, GroupedLinear, LayerNormLinear, LayerNormMLP, Sequential; more operations are in `octavo.ops`
    Experts     MoE, grouped_linear; the parts of a mixture are in `octavo.moe`
    Models      convert, from_config, revert, attach, step, refresh_weights; `octavo.optim`
    Codes       quantize_weights, weight_from_codes: weights without values
    Checkpoints save_checkpoint, load_checkpoint; state_dict, load_state_dict; load_te_checkpoint
    Published   load_fp8, save_fp8, fp8_state_dict: codes as servers read them
    Reports     explain (graphs), inspect (what a recipe does to each tensor), compare (two recipes)
    Memory      offload: what forward saves waits on the host
    Debugging   `with debug(model, changes):` one tensor, one GEMM
    Blocks      `with autocast(recipe):`, `with microbatch(first=...):`, `with dry_run():`, `with quantized_init(...):`
    Recipes     recipe("fp8-current"), and Policy for one per layer; their classes are in `octavo.recipes`
    Tensors     QTensor, GroupedTensor, buffer; quantizers are in `octavo.quant`, number formats in `octavo.formats`
    Trainers    `octavo.integrations`, which is imported by itself: transformers, accelerate, Lightning
    Many GPUs   parallel_mode= of layers; `octavo.distributed`, imported by itself: styles for parallelize_module
    The rest    sac_save_ops, `octavo.backend`, `octavo.errors`

`help(octavo.convert)` and so on describe each of them.
"""

from octavo.version import __version__  # isort: skip  (checks the version of torch first)

from octavo import backend, errors, formats, moe, ops, optim, quant, recipes
from octavo._torch.fast_paths import warn_if_untried
from octavo._torch.tracing import buffer
from octavo.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from octavo.checkpoints.published.loading import load_fp8
from octavo.checkpoints.published.saving import fp8_state_dict, save_fp8
from octavo.checkpoints.te_checkpoint import load_te_checkpoint
from octavo.fusion.blocks import LayerNormLinear, LayerNormMLP
from octavo.fusion.sequential import Sequential
from octavo.inspection.compare import compare
from octavo.inspection.debug import debug
from octavo.inspection.explain import explain
from octavo.inspection.inspect import inspect
from octavo.model.attach import attach
from octavo.model.config_file import from_config
from octavo.model.convert import convert, revert
from octavo.model.offload import offload
from octavo.model.policy import Policy
from octavo.model.refresh import quantize_weights, refresh_weights
from octavo.model.state_dicts import load_state_dict, state_dict
from octavo.model.step import step
from octavo.moe.functional import grouped_linear
from octavo.moe.mixture import MoE
from octavo.ops.grouped_linear import GroupedLinear
from octavo.ops.linear import Linear
from octavo.quant import GroupedTensor, QTensor
from octavo.recipes import recipe
from octavo.recipes.ambient import autocast, dry_run, microbatch, quantized_init
from octavo.runtime.graph_nodes import sac_save_ops
from octavo.weights.quantized_parameters import weight_from_codes

__all__ = [
    "GroupedLinear",
    "GroupedTensor",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MoE",
    "Policy",
    "QTensor",
    "Sequential",
    "__version__",
    "attach",
    "autocast",
    "backend",
    "buffer",
    "compare",
    "convert",
    "debug",
    "dry_run",
    "errors",
    "explain",
    "formats",
    "fp8_state_dict",
    "from_config",
    "grouped_linear",
    "inspect",
    "load_checkpoint",
    "load_fp8",
    "load_state_dict",
    "load_te_checkpoint",
    "microbatch",
    "moe",
    "offload",
    "ops",
    "optim",
    "quant",
    "quantize_weights",
    "quantized_init",
    "recipe",
    "recipes",
    "refresh_weights",
    "revert",
    "sac_save_ops",
    "save_checkpoint",
    "save_fp8",
    "state_dict",
    "step",
    "weight_from_codes",
]


warn_if_untried()


def __dir__() -> list[str]:
    """Return the public names, without the packages that Octavo consists of."""
    return sorted(__all__)
