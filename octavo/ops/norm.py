"""Norms as modules: LayerNorm and RMSNorm, with the parameter names and state dicts of torch's, and L2Normalization.

y has x's dtype, independent of the parameters' dtype and of `torch.autocast`. A norm computes in float32, on a CPU in
float64, and rounds once.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from octavo.communication import collectives
from octavo.communication.groups import Group, name_of, size_of
from octavo.communication.rank_checks import check_parameters
from octavo.errors import (
    UnsupportedConfig,
    UnsupportedDevice,
    UnsupportedDtype,
    UnsupportedShape,
    check_choice,
    check_not_negative,
)
from octavo.foreign_keywords import refused
from octavo.formats import FLOATS
from octavo.ops.inputs import check_input, check_weight, numbers, values_of, wanted_gradients
from octavo.ops.norm_layer import Config
from octavo.ops.operation import Edge, FusibleOperation, has_shape
from octavo.ops.settings import Settings
from octavo.quant import QTensor
from octavo.runtime.call import Stage
from octavo.runtime.call_cache import Lookup
from octavo.runtime.contract import DTYPE_NAMES
from octavo.values import Value


class _Norm(FusibleOperation, Settings, nn.Module):
    """Base class of the norms. A row is the trailing dims `normalized_shape` of x."""

    KIND: ClassVar[str]
    weight: nn.Parameter | None
    bias: nn.Parameter | None
    normalized_shape: tuple[int, ...] = ()
    shared_by: str | None = None  # the group of ranks that have the same parameters, where they are known
    sums_gradients = False  # over these ranks
    _ranks_checked = False  # whether the ranks were found to have them
    _setting_names = ("eps", "zero_centered_gamma", "normalized_shape")

    def __init__(self, eps: float, zero_centered_gamma: bool = False) -> None:
        super().__init__()
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        self._derive_from_settings()

    def _checked_setting(self, name: str, value: Any) -> Any:
        if name == "eps":
            check_not_negative(float(value), what="eps")
            return float(value)
        if name == "zero_centered_gamma":
            check_choice(value, (True, False), what="zero_centered_gamma")
            return bool(value)
        shape = (value,) if isinstance(value, int) else tuple(value)
        if not shape or any(n < 1 for n in shape):
            raise UnsupportedConfig(
                f"normalized_shape is one size or several, each at least 1, got {value!r}. Give the "
                "trailing sizes of x."
            )
        return shape

    def _derive_from_settings(self) -> None:
        super()._derive_from_settings()
        self._settings = (
            f"norm(kind='{self.KIND}',eps={self.eps!r},zero_centered={self.zero_centered_gamma},"
            f"dims={len(self.normalized_shape) or 1},"
        )

    def forward(self, input: Tensor | QTensor) -> Tensor:
        """Return the normalized values.

        Args:
            input: x [..., *normalized_shape], in float32, bfloat16 or float16. A QTensor is dequantized.

        Returns:
            y of x's shape and dtype, computed in float32 (float64 on a CPU) and rounded once.

        Raises:
            UnsupportedShape: the trailing dims of x are not `normalized_shape`.
            UnsupportedDtype: x or a parameter has another dtype.
            UnsupportedDevice: x and the parameters are on two devices.
        """
        return self.op_run(values_of(input))

    @classmethod
    def op_matches(cls, config: Value) -> bool:
        return isinstance(config, Config) and config.kind == cls.KIND

    def op_stage(self, x: Any, extra_inputs: tuple[Any, ...], kwargs: dict[str, Any], as_nodes: bool) -> Stage:
        check_input(type(self).__name__, x, owner=self)
        weight, bias = self.weight, self.bias
        if has_shape(x):
            self._check_fits(x, weight, bias)
        group = self.shared_by
        if group is not None and size_of(group) > 1:
            check_parameters(self, group, x, (weight, bias))
            if self.sums_gradients:
                name = type(self).__name__
                weight, bias = [p if p is None else collectives.copy(p, group, name) for p in (weight, bias)]  # type: ignore[assignment]
        dx, dw, db = wanted_gradients(x.requires_grad, weight, bias)
        key = (
            f"{self._settings}weight_dtype='{'' if weight is None else DTYPE_NAMES[weight.dtype]}',"
            f"bias_dtype='{'' if bias is None else DTYPE_NAMES[bias.dtype]}',"
            f"wants_dx={dx},wants_dw={dw},wants_db={db})"
        )
        return Stage("norm", key, (weight, bias), (), dx or dw or db)

    def _call_lookup(self, needs_dx: bool, extra_inputs: tuple[Any, ...]) -> Lookup | None:
        if self.shared_by is not None:
            return None
        own: list[Tensor] = [p for p in (self.weight, self.bias) if p is not None]
        needs = torch.is_grad_enabled() and (needs_dx or any([p.requires_grad for p in own]))
        settings = (self._settings, self.weight is None, self.bias is None, torch.is_grad_enabled())
        return Lookup(settings, own, (), needs)

    def sum_gradients_over(self, group: Group) -> Self:
        """Sum the gradients of the parameters over ranks that each have a part of the rows, as under sequence
        parallelism. The parameters must be the same on all of them.

        Args:
            group: a ProcessGroup, its name, a DeviceMesh of one dim or (mesh, dim); None is the default group.

        Returns:
            This norm.

        Raises:
            UnsupportedConfig: torch knows no such group.
        """
        self.shared_by, self.sums_gradients = name_of(group), True
        return self

    def op_describe(self) -> str:
        """Return the class and the sizes of this norm, as errors name it."""
        return f"{type(self).__name__}({', '.join(map(str, self.normalized_shape))})"

    def _check_fits(self, x: Tensor | Edge, *parameters: Tensor | None) -> None:
        shape = self.normalized_shape
        if len(x.shape) < max(1, len(shape)) or (shape and tuple(x.shape[-len(shape) :]) != shape):
            raise UnsupportedShape(
                f"This {type(self).__name__} normalises inputs [..., {', '.join(map(str, shape))}], got {numbers(x)}. "
                "Check the layer before it, or normalized_shape."
            )
        for p in parameters:
            if p is not None and type(p) is not nn.Parameter:
                check_weight(type(self).__name__, p, "a parameter")
            if p is not None and p.device != x.device:
                raise UnsupportedDevice(f"x is on {x.device} and the parameters on {p.device}. Move them together.")
            if p is not None and p.dtype not in FLOATS:
                raise UnsupportedDtype(
                    f"{type(self).__name__} takes its parameters in float32, bfloat16 or float16, got {p.dtype}. Cast "
                    "the module: norm.float()."
                )

    def extra_repr(self) -> str:
        centered = ", zero_centered_gamma=True" if self.zero_centered_gamma else ""
        shape = f"{self.normalized_shape}, " if self.normalized_shape else ""
        return f"{shape}eps={self.eps}{centered}"


class _Affine(_Norm):
    """A norm with a weight, and perhaps a bias, of shape `normalized_shape`."""

    @refused
    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        *,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        bias: bool = True,
    ) -> None:
        super().__init__(eps, zero_centered_gamma)
        self.normalized_shape = normalized_shape  # type: ignore[assignment]
        shape = self.normalized_shape
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(shape, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to one (zero with zero_centered_gamma), and a bias to zero."""
        assert self.weight is not None
        nn.init.constant_(self.weight, 0.0 if self.zero_centered_gamma else 1.0)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class LayerNorm(_Affine):
    """Layer normalization over the trailing dims: y = (x - mean) / √(variance + eps) · γ + β.

    Its parameters have the names and shapes of `torch.nn.LayerNorm`'s, so stock checkpoints load. A Linear after it in
    a Sequential can take its output as codes.

    Args:
        normalized_shape: the trailing sizes of x that form a row; one number for the last dim.
        eps: the number added to the variance, 1e-5 by default.
        device: the device of the parameters; None for torch's default.
        dtype: the dtype of the parameters; None for torch's default. y has x's dtype in any case.
        zero_centered_gamma: False by default. True makes the weight γ - 1, so that weight decay pulls γ to 1. Subtract
            1 from the weight of a stock checkpoint before you load it.
        bias: True by default. False leaves out β.

    Raises:
        UnsupportedConfig: a size is below 1, or eps is negative.

    Example:
        >>> norm = octavo.ops.LayerNorm(64)
        >>> norm(torch.randn(4, 64, dtype=torch.bfloat16)).dtype
        torch.bfloat16
        >>> missing = norm.load_state_dict(nn.LayerNorm(64).state_dict())
    """

    KIND = "layer"


class RMSNorm(_Affine):
    """Root-mean-square normalization over the trailing dims: y = x / √(mean of x² + eps) · γ.

    Its parameter has the name and shape of `torch.nn.RMSNorm`'s, so stock checkpoints load. Its eps is a number, where
    torch's default depends on x's dtype.

    Args:
        normalized_shape: the trailing sizes of x that form a row; one number for the last dim.
        eps: the number added to the mean square, 1e-5 by default.
        device: the device of the weight; None for torch's default.
        dtype: the dtype of the weight; None for torch's default. y has x's dtype in any case.
        zero_centered_gamma: False by default. True makes the weight γ - 1, so that weight decay pulls γ to 1. Subtract
            1 from the weight of a stock checkpoint before you load it.

    Raises:
        UnsupportedConfig: a size is below 1, or eps is negative.

    Example:
        >>> octavo.ops.RMSNorm(2, eps=0.0)(torch.tensor([[3.0, 4.0]])).detach()
        tensor([[0.8485, 1.1314]])
    """

    KIND = "rms"

    @refused
    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        *,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
    ) -> None:
        super().__init__(
            normalized_shape, eps=eps, device=device, dtype=dtype, zero_centered_gamma=zero_centered_gamma, bias=False
        )

    def forward(self, x: Tensor | QTensor) -> Tensor:  # nn.RMSNorm names this argument x
        return super().forward(x)


class L2Normalization(_Norm):
    """Divide each row by its length: y = x / √(sum of x² + eps), over the last dim. It has no parameters.

    Args:
        eps: the number added to the sum of squares, 1e-6 by default.

    Raises:
        UnsupportedConfig: eps is negative.

    Example:
        >>> octavo.ops.L2Normalization()(torch.tensor([[3.0, 4.0]]))
        tensor([[0.6000, 0.8000]])
    """

    KIND = "l2"

    @refused
    def __init__(self, *, eps: float = 1e-6) -> None:
        super().__init__(eps)
