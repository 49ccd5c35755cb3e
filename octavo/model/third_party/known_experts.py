"""The experts of other packages that `octavo.convert` takes: `KNOWN`, a row of data for each class.

A row says what the module is called with, where its weights and biases lie and in which layout, and what its activation
is. Classes that transformers dispatches by its registry describe themselves by flags: a new one needs no row. The code
that runs a row is in `third_party_layers.py`, what is checked before in `third_party_experts.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TOKENS, ROWS, EQUAL_ROWS = "tokens", "rows", "equal rows"  # what experts are called with: see Known.takes
MATRIX, ATTENTION = "x", "query, key, value"  # what modules without experts are called with
Refused = tuple[tuple[str, bool, str], ...]  # an attribute, the value that is refused, why and what to do


@dataclass(frozen=True)
class Weight:
    """Where the weights of all experts lie: in one parameter, stacked [experts, ., .] or below each other."""

    name: str
    bias: str = ""
    transposed: bool = False  # [in, out], where Octavo multiplies by [out, in]
    part: int | None = None  # of three equal parts below each other
    bias_part: int | None = None  # the same of the bias

    def seen(self, parameter: Tensor, experts: int) -> Tensor:
        """Return the weight [experts, out, in] that Octavo multiplies by, or [out, in] of no experts: the parameter
        itself, a view or a copy."""
        whole = parameter if self.part is None else parameter.chunk(3)[self.part]
        if experts and whole.dim() == 2:
            whole = whole.view(experts, -1, whole.shape[-1])
        return whole.transpose(-2, -1).contiguous() if self.transposed else whole

    def shape(self, parameter: Tensor, experts: int) -> tuple[int, ...]:
        """Return the shape of `seen`."""
        shape = list(parameter.shape)
        if self.part is not None:
            shape[0] //= 3
        if len(shape) == 2 and experts and shape[0] % experts == 0:
            shape = [experts, shape[0] // experts, shape[1]]
        if self.transposed:
            shape[-2:] = shape[:-3:-1]
        return tuple(shape)

    def is_whole(self, parameter: Tensor, experts: int) -> bool:
        """Return whether `seen` is the parameter itself."""
        return self.part is None and not self.transposed and parameter.dim() == (3 if experts else 2)


@dataclass(frozen=True)
class Known:
    """A kind of experts of another package.

    Args:
        takes: what the module is called with: "tokens", and the experts and weights of each; "rows" that are sorted by
            expert, and their numbers; "equal rows", as many for each expert; or, of modules without experts, "x", or
            "query, key, value".
        weights: one weight; that of the first and of the second layer; or those of gate, other half and second layer.
        activation: the path of an attribute that activates, a method `_apply_gate` aside; or a function of the module
            and what it activates.
        gated: whether the first layer makes a gate and another half.
        alternates: whether the rows of gate and other half alternate in the weight.
        parts: the methods that a conversion replaces, and that must be those of the class.
        refused: values of attributes that Octavo does not take.
    """

    takes: str
    weights: tuple[Weight, ...]
    activation: str | Callable[[Any, Tensor], Tensor] = "act_fn"
    gated: bool = True
    alternates: bool = False
    parts: tuple[str, ...] = ("forward",)
    refused: Refused = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the weights, in order of use: the last one makes y."""
        return tuple(dict.fromkeys(weight.name for weight in self.weights))

    @property
    def has_experts(self) -> bool:
        """Whether the weights are those of several experts."""
        return self.takes not in (MATRIX, ATTENTION)

    @property
    def is_joined(self) -> bool:
        """Whether a first layer makes both halves at once."""
        return len(self.weights) == 2


def _silu(module: Any, gate: Tensor) -> Tensor:
    return F.silu(gate)


def _clamped(module: Any, h: Tensor) -> Tensor:
    """Return the activation of GPT-OSS in torchtitan."""
    gate, up = h[..., ::2].clamp(max=module.swiglu_limit), h[..., 1::2]
    return gate * torch.sigmoid(1.702 * gate) * (up.clamp(-module.swiglu_limit, module.swiglu_limit) + 1)


_STACKED = (Weight("gate_up_proj"), Weight("down_proj"))
_TRANSPOSED = (Weight("gate_up_proj", transposed=True), Weight("down_proj", transposed=True))
_TITAN = ("forward", "_grouped_mm")

# by package and class; transformers' decorated classes aside
KNOWN: dict[tuple[str, str], Known] = {
    ("torchtitan.models.common.moe", "GroupedExperts"): Known(
        ROWS, (Weight("w1_EFD"), Weight("w3_EFD"), Weight("w2_EDF")), _silu, parts=_TITAN
    ),
    ("torchtitan.models.gpt_oss.moe", "GptOssGroupedExperts"): Known(
        ROWS,
        (Weight("mlp1_weight_EGD", "mlp1_bias_EG"), Weight("mlp2_weight_EDF", "mlp2_bias_ED")),
        _clamped, alternates=True, parts=_TITAN,
    ),
    ("torch.nn.modules.activation", "MultiheadAttention"): Known(
        ATTENTION,
        (
            *(Weight("in_proj_weight", "in_proj_bias", part=i, bias_part=i) for i in range(3)),
            Weight("out_proj.weight", "out_proj.bias"),
        ),
        refused=(("add_zero_attn", True, "it has add_zero_attn=True. Use nn.Linear layers around "
                  "F.scaled_dot_product_attention"),),
    ),
    ("transformers.pytorch_utils", "Conv1D"): Known(MATRIX, (Weight("weight", "bias", transposed=True),)),
    ("transformers.models.dbrx.modeling_dbrx", "DbrxExperts"): Known(
        TOKENS, (Weight("mlp.w1"), Weight("mlp.v1"), Weight("mlp.w2", transposed=True)), "mlp.activation_fn"
    ),
    ("transformers.models.jetmoe.modeling_jetmoe", "JetMoeParallelExperts"): Known(ROWS, (Weight("weight"),)),
    ("transformers.models.llama4.modeling_llama4", "Llama4TextExperts"): Known(EQUAL_ROWS, _TRANSPOSED),
    ("transformers.models.longcat_flash.modeling_longcat_flash", "LongcatFlashExperts"): Known(TOKENS, _STACKED),
    ("transformers.models.step3p7.modeling_step3p7", "Step3p7Experts"): Known(TOKENS, _STACKED),
}  # fmt: skip

# set by transformers' decorator of classes that its registry of experts dispatches
_FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
_REFUSED: Refused = (
    ("has_post_expert_norm", True, "it normalizes the output of each expert, before the weighted sum"),
    ("_is_expert_parallel", True, "its experts are distributed over several processes. Convert before they are"),
)


def known(module: nn.Module) -> Known | None:
    """Return the kind of a module that holds experts, converted or not; None for another module."""
    found = next((KNOWN[key] for key in _names(type(module)) if key in KNOWN), None)
    if found is not None and found.takes == ATTENTION:
        found = _with_own_sizes(module, found)
    found = _dispatched(module) if found is None else found
    return found if found is not None and all(_has(module, name) for name in found.names) else None


def _with_own_sizes(module: Any, found: Known) -> Known:
    """Return the kind of an attention whose keys and values may have sizes, and so weights, of their own; without
    biases that it does not have."""
    weights = found.weights
    if module.in_proj_weight is None:
        names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
        # their biases still lie below each other
        own = (Weight(name, "in_proj_bias", bias_part=i) for i, name in enumerate(names))
        weights = (*own, weights[-1])
    if module.in_proj_bias is None:
        weights = tuple(replace(weight, bias="") for weight in weights)
    return replace(found, weights=weights)


def home(module: nn.Module) -> Any:
    """Return the class by which a module was found in KNOWN; None for one that transformers dispatches."""
    kinds = (kind for kind in type(module).__mro__ if (kind.__module__, kind.__qualname__) in KNOWN)
    return next((kind for kind in kinds if not hasattr(kind, "_third_party")), None)


def own_class(module: nn.Module) -> Any:
    """Return the class that a module has when it is not converted."""
    return getattr(type(module), "_third_party", type(module))


def _dispatched(module: Any) -> Known | None:
    """Return the kind that transformers' flags describe."""
    flags = module.__dict__
    if any(flag not in flags for flag in _FLAGS) or not hasattr(flags.get("config"), "_experts_implementation"):
        return None
    first, biased = "gate_up_proj" if module.has_gate else "up_proj", module.has_bias
    return Known(
        TOKENS,
        tuple(
            Weight(name, f"{name}_bias" if biased else "", module.is_transposed) for name in (first, "down_proj")
        ),
        gated=module.has_gate, alternates=not module.is_concatenated, refused=_REFUSED,
    )  # fmt: skip


def is_dispatched(module: nn.Module) -> bool:
    """Return whether transformers' registry of experts chooses the forward of this module's own class."""
    return home(module) is None and hasattr(own_class(module).forward, "__wrapped__")


def _names(kind: type) -> list[tuple[str, str]]:
    return [(parent.__module__, parent.__qualname__) for parent in kind.__mro__]


def _has(module: nn.Module, path: str) -> bool:
    above, _, name = path.rpartition(".")
    try:
        return hasattr(module.get_submodule(above), name)
    except AttributeError:
        return False
