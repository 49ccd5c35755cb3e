"""The fusible operations: norms, activations, dropout, residuals, attention, collectives, and the layers Linear and
GroupedLinear.

Each one is a module that works alone. In an `octavo.Sequential`, operations that follow each other run together, and
rules fuse them.

    BasicOperation                                      base class for an operation of your own
    FusedOperation, Rule, Condition                     a fused operation of your own, and where it applies
    Forward, Backward, Joint, register_*_fusion         put a rule into force: for one Sequential, or for all
    OUTPUT_BUFFER_KEY, GRAD_INPUT_BUFFER_KEY            keywords in op_kwargs for buffers of the caller
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
    "GRAD_INPUT_BUFFER_KEY",
    "OUTPUT_BUFFER_KEY",
    "QGEGLU",
    "QGELU",
    "Activation",
    "AddExtraInput",
    "AllGather",
    "AllReduce",
    "Backward",
    "BasicOperation",
    "Bias",
    "ClampedSwiGLU",
    "Condition",
    "ConstantScale",
    "Dropout",
    "Forward",
    "FusedOperation",
    "FusibleOperation",
    "GroupedLinear",
    "Identity",
    "Joint",
    "L2Normalization",
    "LayerNorm",
    "Linear",
    "MakeExtraOutput",
    "OperationContext",
    "OperationFuser",
    "Quantize",
    "RMSNorm",
    "ReGLU",
    "ReLU",
    "ReduceScatter",
    "Reshape",
    "RotaryAttention",
    "Rule",
    "SReGLU",
    "SReLU",
    "ScaledClampedSwiGLU",
    "ScaledSReLU",
    "ScaledSiTUGLU",
    "ScaledSwiGLU",
    "Sequential",
    "SiLU",
    "SiTUGLU",
    "SplitCall",
    "SumGradient",
    "SwiGLU",
    "own_forward",
    "own_saved",
    "register_backward_fusion",
    "register_forward_backward_fusion",
    "register_forward_fusion",
]


def __getattr__(name: str) -> Any:
    if name not in _FROM_FUSION:
        way = f". Write octavo.ops.{_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{way}")
    value = globals()[name] = getattr(import_module(f"octavo.fusion.{_FROM_FUSION[name]}"), name)
    return value


def __dir__() -> list[str]:
    return __all__
