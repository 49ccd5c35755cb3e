"""The fusible operations: norms, activations, dropout, residuals, attention, collectives, and the layers Linear and
GroupedLinear.

Each one is a module that works alone. In an `octavo.Sequential`, operations that follow each other run together, and
rules fuse them.

    BasicOperation                                      base class for an operation of your own
    FusedOperation, Rule, Condition                     a fused operation of your own, and where it applies
    Forward, Backward, Joint, register_*_fusion         put a rule into force: for one Sequential, or for all
    OUTPUT_BUFFER_KEY, GRAD_INPUT_BUFFER_KEY            keywords in op_kwargs for buffers of the caller

A file `*_layer` has pure functions (`octavo.runtime.contract`), the file beside it the module.

What every operation has:

    operation               what an operation answers to a run
    inputs                  checks of x and of weights
    settings                attributes from which others follow

Layers of GEMMs:

    linear                  octavo.Linear
    linear_layer            its functions: forward, abstract, save, backward
    linear_config           its config: which GEMMs run, and what backward keeps
    matmul                  the casts and GEMMs, once for dense rows and rows in groups
    operands                Dense rows, and the tensors that cross from forward to backward
    grouped_linear          octavo.GroupedLinear
    grouped_linear_layer    its functions, and Ragged rows
    grouped_inputs          sizes of groups, codes of x, scales of the bias
    grouped_memory          y, dx and codes of dy in memory of the caller
    grouped_parameters      one parameter for all groups, or one for each
    split_layer             a layer with a part of a weight: collectives before and after its node
    shard_cast_layer        the cast of a rank's own rows, before they are gathered
    dy_cast_layer           the cast of a rank's own rows of dy, before they are gathered
    dy_codes                whether rows of dy are cast, and how
    dtensor_calls           a Linear whose weight a plan of torch has split
    raise_amax_layer        the running amax of x, where its cast is not the layer's own node
    amaxes_layer            the amaxes that ranks reduce before they cast

The recipe of a layer, and its state:

    quantized               Quantized: a module with a weight that a recipe quantizes
    recipe_state            RecipeState: the recipe, and what it keeps from call to call
    recipe_of_layers        the recipe of a block
    schedule                recipes that change at a step
    hidden_buffers          buffers that `buffers()` does not list
    rounding_seed           the seed of stochastic rounding; `matmul.finish` advances the step beside it
    published_codes         weights of checkpoints that are codes of another package

Other operations:

    norm                    LayerNorm, RMSNorm, L2Normalization
    norm_layer              their functions
    activation              activations, Bias, ConstantScale
    scaled_activation       activations with a scale for each row
    dropout                 Dropout
    activation_layer        the functions of these
    coded_activation_layer  the same where backward keeps x as codes
    attention               attention with rotary positions
    rotary_layer            rotary positions
    collective              AllGather, AllReduce, ReduceScatter
    quantize                Quantize
    rounding_layer          its functions
    views                   Identity, Reshape, AddExtraInput, MakeExtraOutput
    add_layer               x + extra
    fork_layer              x, and x as a side output
    permute                 Permute and Unpermute
    permute_layer           tokens to the rows of their experts
    unpermute_layer         and back

    module: weight, recipe, state -> Stage -> octavo.runtime.call -> layer: casts, kernels -> y

This room may import rooms up to `communication`.
"""

from importlib import import_module
from typing import Any

from octavo.ops.activation import (
    GEGLU,
    GELU,
    GLU,
    QGEGLU,
    QGELU,
    Activation,
    Bias,
    ClampedSwiGLU,
    ConstantScale,
    ReGLU,
    ReLU,
    SiLU,
    SiTUGLU,
    SReGLU,
    SReLU,
    SwiGLU,
)
from octavo.ops.attention import RotaryAttention
from octavo.ops.collective import AllGather, AllReduce, ReduceScatter, SumGradient
from octavo.ops.dropout import Dropout
from octavo.ops.grouped_linear import GroupedLinear
from octavo.ops.linear import Linear
from octavo.ops.norm import L2Normalization, LayerNorm, RMSNorm
from octavo.ops.operation import FusibleOperation
from octavo.ops.quantize import Quantize
from octavo.ops.scaled_activation import ScaledClampedSwiGLU, ScaledSiTUGLU, ScaledSReLU, ScaledSwiGLU
from octavo.ops.views import AddExtraInput, Identity, MakeExtraOutput, Reshape
from octavo.runtime.contract import import_layers

import_layers(__name__, __path__)

# Names that users look for here and that are defined in octavo.fusion, which is built on these operations. They are
# resolved when they are asked for: the one place where a room names a later one (tests/test_import_order.py).
_FROM_FUSION = {
    "BasicOperation": "custom.basic_operation",
    "OperationContext": "custom.legacy",
    "Backward": "rule",
    "Condition": "rule",
    "Forward": "rule",
    "FusedOperation": "rule",
    "Joint": "rule",
    "Rule": "rule",
    "register_backward_fusion": "rule",
    "register_forward_backward_fusion": "rule",
    "register_forward_fusion": "rule",
    "own_forward": "custom.own_functions",
    "own_saved": "custom.own_functions",
    "OperationFuser": "runs",
    "GRAD_INPUT_BUFFER_KEY": "sequential",
    "OUTPUT_BUFFER_KEY": "sequential",
    "Sequential": "sequential",
    "SplitCall": "split_call",
}

# what Transformer Engine calls operations that have another name here
_ELSEWHERE = {"BasicLinear": "Linear(..., bias=False)", "ScaledClampedQGeGLU": "ScaledClampedSwiGLU(...)"}

__all__ = [
    "GEGLU",
    "GELU",
    "GLU",
    "QGEGLU",
    "QGELU",
    "Activation",
    "AddExtraInput",
    "AllGather",
    "AllReduce",
    "Bias",
    "ClampedSwiGLU",
    "ConstantScale",
    "Dropout",
    "FusibleOperation",
    "GroupedLinear",
    "Identity",
    "L2Normalization",
    "LayerNorm",
    "Linear",
    "MakeExtraOutput",
    "Quantize",
    "RMSNorm",
    "ReGLU",
    "ReLU",
    "ReduceScatter",
    "Reshape",
    "RotaryAttention",
    "SReGLU",
    "SReLU",
    "ScaledClampedSwiGLU",
    "ScaledSReLU",
    "ScaledSiTUGLU",
    "ScaledSwiGLU",
    "SiLU",
    "SiTUGLU",
    "SumGradient",
    "SwiGLU",
]
__all__ += _FROM_FUSION


def __getattr__(name: str) -> Any:
    if name not in _FROM_FUSION:
        way = f". Write octavo.ops.{_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{way}")
    value = globals()[name] = getattr(import_module(f"octavo.fusion.{_FROM_FUSION[name]}"), name)
    return value


def __dir__() -> list[str]:
    return __all__
