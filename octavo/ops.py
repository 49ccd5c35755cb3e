"""The fusible operations: norms, activations, dropout, residuals, attention, collectives, and the layers Linear and
GroupedLinear.

Each one is a module that works alone. In an `octavo.Sequential`, operations that follow each other run together, and
rules fuse them.

    BasicOperation                                      base class for an operation of your own
    FusedOperation, Rule, Condition                     a fused operation of your own, and where it applies
    Forward, Backward, Joint, register_*_fusion         put a rule into force: for one Sequential, or for all
    OUTPUT_BUFFER_KEY, GRAD_INPUT_BUFFER_KEY            keywords in op_kwargs for buffers of the caller
"""

from octavo.fuser.basic import BasicOperation
from octavo.fuser.legacy import OperationContext
from octavo.fuser.operation import FusibleOperation
from octavo.fuser.pattern import (
    Backward,
    Condition,
    Forward,
    FusedOperation,
    Joint,
    Rule,
    register_backward_fusion,
    register_forward_backward_fusion,
    register_forward_fusion,
)
from octavo.fuser.runs import OperationFuser
from octavo.fuser.sequential import GRAD_INPUT_BUFFER_KEY, OUTPUT_BUFFER_KEY, Sequential
from octavo.modules.activation import (
    GEGLU,
    GELU,
    GLU,
    QGEGLU,
    QGELU,
    Activation,
    Bias,
    ClampedSwiGLU,
    ConstantScale,
    Dropout,
    ReGLU,
    ReLU,
    ScaledClampedSwiGLU,
    ScaledSiTUGLU,
    ScaledSReLU,
    ScaledSwiGLU,
    SiLU,
    SiTUGLU,
    SReGLU,
    SReLU,
    SwiGLU,
)
from octavo.modules.attention import RotaryAttention
from octavo.modules.collective import AllGather, AllReduce, ReduceScatter, SumGradient
from octavo.modules.grouped_linear import GroupedLinear
from octavo.modules.linear import Linear
from octavo.modules.norm import L2Normalization, LayerNorm, RMSNorm
from octavo.modules.quantize import Quantize
from octavo.modules.views import AddExtraInput, Identity, MakeExtraOutput, Reshape

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
    "SumGradient",
    "SwiGLU",
    "register_backward_fusion",
    "register_forward_backward_fusion",
    "register_forward_fusion",
]


def __dir__() -> list[str]:
    return __all__
