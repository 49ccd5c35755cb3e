"""Activations as modules: plain, gated and scaled by row; ConstantScale and Bias, which the same layer computes.

Each calls `octavo.ops.activation_layer` once. y has x's dtype, independent of `torch.autocast`. It is computed in
float32, on a CPU in float64, and rounded once.

Gated activations take [..., 2H] and return [..., H]: they activate the first half and multiply it by the second
(`nn.GLU` activates the second half).
"""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from octavo.communication.tensor_parallel import COLUMN_BLOCKS
from octavo.errors import UnsupportedConfig, UnsupportedDevice, UnsupportedShape, check_choice
from octavo.kernels.activation import ACTIVATIONS
from octavo.ops.activation_layer import Config
from octavo.ops.inputs import check_input, numbers, values_of, wanted_gradients
from octavo.ops.operation import Edge, FusibleOperation, has_shape, last_dim
from octavo.ops.settings import Settings
from octavo.quant import QTensor
from octavo.runtime.call import Stage
from octavo.runtime.call_cache import Lookup
from octavo.runtime.contract import DTYPE_NAMES
from octavo.text import plural
from octavo.values import Value


def stage_of(
    settings: str, x: Tensor | Edge, width: int | None = None, *, scales: Any = None, bias: Any = None,
    seed: Any = None, layer: str = "activation",
) -> Stage:  # fmt: skip
    """Return the Stage of one call of the layer. `settings` are fields of its config, each followed by a comma."""
    dx, ds, db = wanted_gradients(x.requires_grad, scales, bias)
    key = (
        f"{layer}({settings}scales_dtype='{'' if scales is None else DTYPE_NAMES[scales.dtype]}',"
        f"bias_dtype='{'' if bias is None else DTYPE_NAMES[bias.dtype]}',"
        f"wants_dx={dx},wants_ds={ds},wants_db={db})"
    )
    return Stage(layer, key, (scales, bias, seed), (), dx or ds or db, width)


class Activation(FusibleOperation, Settings, nn.Module):
    """Base class of the activations. In the pattern of a fusion rule it stands for every activation but ConstantScale.

    x is [..., K] in float32, bfloat16 or float16; y has its shape. A gated activation takes [..., 2H], a and b, the
    halves of the last dim, and returns [..., H]. An activation computes in float32, on a CPU in float64, and rounds
    once. y has x's dtype, also under `torch.autocast`. NAME is its entry in `octavo.kernels.activation.ACTIVATIONS`.

    Args:
        glu_interleave_size: None, the default, if a and b are the halves of x's last dim. A number k if they alternate,
            k columns each, as in weights that were stored so.
        cache_quantized_input: keep codes of x for backward in place of x, E4M3 with a scale for every 128 elements of a
            row: half of bfloat16's memory, and gradients with the error of FP8. y does not change. Such an activation
            does not fuse with its neighbours.
        **settings: finite numbers of the curve, by the names of `octavo.kernels.activation.Function` or of FIELDS.

    Raises:
        UnsupportedConfig: glu_interleave_size is below 1, or a setting is not finite.

    Example:
        >>> isinstance(octavo.ops.SwiGLU(), octavo.ops.Activation)
        True
        >>> octavo.ops.SwiGLU()(torch.randn(4, 64)).shape
        torch.Size([4, 32])
    """

    NAME: ClassVar[str]
    FIELDS: ClassVar[dict[str, str]] = {}  # settings that `Function` has under another name
    op_is_elementwise = True

    def __init__(
        self, *, glu_interleave_size: int | None = None, cache_quantized_input: bool = False, **settings: float
    ) -> None:
        super().__init__()
        self._curve = tuple(settings)  # the names of its numbers
        self._setting_names = ("glu_interleave_size", "cache_quantized_input", *settings)
        self.glu_interleave_size = glu_interleave_size
        self.cache_quantized_input = cache_quantized_input
        for name, value in settings.items():
            setattr(self, name, value)
        self._derive_from_settings()

    def _checked_setting(self, name: str, value: Any) -> Any:
        if name == "glu_interleave_size":
            if value is not None and (type(value) is not int or value < 1):
                raise UnsupportedConfig(
                    f"glu_interleave_size is how many columns of a, then of b, follow each other: at least 1, got "
                    f"{value!r}. Leave it out, or set it to None, for two halves."
                )
            if value is not None and not ACTIVATIONS[self.NAME].gated:
                raise UnsupportedConfig(
                    f"glu_interleave_size={value!r} says how the two halves of a gated activation's x alternate, and "
                    f"{type(self).__name__} has no halves. Leave it None."
                )
        elif name == "cache_quantized_input":
            check_choice(value, (True, False), what=f"cache_quantized_input of {type(self).__name__}")
        elif not math.isfinite(value):
            raise UnsupportedConfig(f"{name} of {type(self).__name__} must be a finite number, got {value!r}.")
        return value

    def _derive_from_settings(self) -> None:
        super()._derive_from_settings()
        self._layer = "coded-activation" if self.cache_quantized_input else "activation"
        self._settings = f"name='{self.NAME}',interleave={self.glu_interleave_size or 0}," + "".join(
            f"{self.FIELDS.get(name, name)}={float(getattr(self, name))!r}," for name in self._curve
        )

    def forward(self, input: Tensor | QTensor) -> Tensor:
        """Return the activated values.

        Args:
            input: x, in float32, bfloat16 or float16, with any leading dims and strides. A QTensor is dequantized.

        Returns:
            y in x's dtype. Gated activations halve the last dim.

        Raises:
            UnsupportedDtype: x has another dtype.
            UnsupportedShape: the last dim of a gated activation's x cannot be divided into a and b.
        """
        return self.op_run(values_of(input))

    @classmethod
    def op_matches(cls, config: Value) -> bool:
        """Return whether a stage with this config belongs to this class. Activation itself matches every activation."""
        if not isinstance(config, Config) or config.drop or config.bias_dtype or config.registered_name != "activation":
            return False  # rules know what an activation saves that keeps no codes
        if cls is Activation:
            return config.name != "linear"
        return config.name == cls.NAME and bool(cls.num_extra_inputs) == bool(config.scales_dtype)

    def op_stage(self, x: Any, extra_inputs: tuple[Any, ...], kwargs: dict[str, Any], as_nodes: bool) -> Stage:
        self._check(x)
        scales = extra_inputs[0] if extra_inputs else None
        if scales is not None:
            _check_scales(type(self).__name__, x, scales)
        width = last_dim(x) // 2 if ACTIVATIONS[self.NAME].gated else None
        return stage_of(self._settings, x, width, scales=scales, layer=self._layer)

    def _call_lookup(self, needs_dx: bool, extra_inputs: tuple[Any, ...]) -> Lookup | None:
        if not all([type(t) is Tensor for t in extra_inputs]):
            return None
        needs = torch.is_grad_enabled() and (needs_dx or any([t.requires_grad for t in extra_inputs]))
        return Lookup(
            (type(self).__name__, self._layer, self._settings, torch.is_grad_enabled()), list(extra_inputs), (), needs
        )

    def _check(self, x: Tensor | Edge) -> None:
        title = type(self).__name__
        check_input(title, x)
        if not ACTIVATIONS[self.NAME].gated or not has_shape(x):
            return
        if type(x) is Tensor and not torch.compiler.is_compiling():
            self.op_column_blocks(getattr(x, COLUMN_BLOCKS, 0))
        step = 2 * (self.glu_interleave_size or 1)
        if not x.shape or x.shape[-1] % step:
            way = f"glu_interleave_size={self.glu_interleave_size}" if self.glu_interleave_size else "two halves"
            raise UnsupportedShape(
                f"{title} takes the last dim of x as {way}, so it must be a multiple of {step}, got {numbers(x)}. "
                "Check out_features of the layer before it."
            )

    def op_column_blocks(self, blocks: int) -> int:
        if not blocks or not ACTIVATIONS[self.NAME].gated:
            return blocks
        if self.glu_interleave_size is None:
            if blocks % 2:
                raise UnsupportedConfig(
                    f"{type(self).__name__} pairs the two halves of x's last dim, and the layer before it gives each "
                    f"rank an equal part of {plural(blocks, 'block')} of output features, so that the halves are on "
                    "different ranks. Split each half by itself: Linear or GroupedLinear(parallel_mode='column', "
                    "column_blocks=2), LayerNormMLP(set_parallel_mode=True). A plan of parallelize_module takes a "
                    "Linear for each half."
                )
            return blocks // 2
        if blocks > 1:
            raise UnsupportedConfig(
                f"{type(self).__name__}(glu_interleave_size={self.glu_interleave_size}) pairs columns that are near "
                f"each other, and the layer before it splits each of {plural(blocks, 'block')} of output features by "
                "itself. Leave column_blocks out."
            )
        return blocks

    def extra_repr(self) -> str:
        interleave = f"glu_interleave_size={self.glu_interleave_size}" if self.glu_interleave_size else ""
        cached = "cache_quantized_input=True" if self.cache_quantized_input else ""
        return ", ".join(filter(None, (*[f"{name}={getattr(self, name)}" for name in self._curve], interleave, cached)))


def _check_scales(title: str, x: Tensor | Edge, scales: Tensor) -> None:
    if not x.shape and has_shape(x):
        raise UnsupportedShape(f"{title} takes x [..., K] with rows to scale, got ().")
    if x.shape and tuple(scales.shape) != tuple(x.shape[:-1]):
        raise UnsupportedShape(
            f"{title} takes a scale for each row of x, [...] for x [..., K], got "
            f"{numbers(scales)} for {numbers(x)}. Reshape scales."
        )
    check_input(title, scales, "scales")
    if scales.device != x.device:
        raise UnsupportedDevice(f"x is on {x.device} and scales on {scales.device}. Move them together.")


class _Plain(Activation):
    """Base class of the activations without settings.

    Args:
        cache_quantized_input: as in `Activation`.

    Example:
        >>> octavo.ops.ReLU()(torch.tensor([-1.0, 0.0, 2.0]))
        tensor([0., 0., 2.])
        >>> octavo.ops.ReGLU()(torch.tensor([[1.0, 2.0, 10.0, 100.0]]))
        tensor([[ 10., 200.]])
    """

    def __init__(self, *, cache_quantized_input: bool = False) -> None:
        super().__init__(cache_quantized_input=cache_quantized_input)


class GELU(_Plain):
    """GELU by tanh: y = x/2 · (1 + tanh(√(2/π) (x + 0.044715 x³)))."""

    NAME = "gelu"


class QGELU(_Plain):
    """Quick GELU: y = x · σ(1.702 x)."""

    NAME = "qgelu"


class ReLU(_Plain):
    """ReLU: y = max(x, 0)."""

    NAME = "relu"


class SReLU(_Plain):
    """Squared ReLU: y = max(x, 0)²."""

    NAME = "srelu"


class SiLU(_Plain):
    """SiLU, also called swish: y = x · σ(x)."""

    NAME = "silu"


class GLU(_Plain):
    """Gated linear unit: y = σ(a) · b. `torch.nn.GLU` activates the second half instead."""

    NAME = "glu"


class GEGLU(_Plain):
    """Gated GELU: y = gelu(a) · b, with the GELU of `octavo.ops.GELU`."""

    NAME = "geglu"


class QGEGLU(_Plain):
    """Gated quick GELU: y = a · σ(1.702 a) · b."""

    NAME = "qgeglu"


class ReGLU(_Plain):
    """Gated ReLU: y = max(a, 0) · b."""

    NAME = "reglu"


class SReGLU(_Plain):
    """Gated squared ReLU: y = max(a, 0)² · b."""

    NAME = "sreglu"


class SwiGLU(Activation):
    """Gated SiLU: y = a · σ(a) · b.

    Args:
        glu_interleave_size: as in `Activation`.
        cache_quantized_input: as in `Activation`.

    Example:
        >>> octavo.ops.SwiGLU()(torch.tensor([[1.0, 2.0, 10.0, 100.0]]))
        tensor([[  7.3106, 176.1594]])
        >>> octavo.ops.SwiGLU(glu_interleave_size=1)(torch.tensor([[1.0, 10.0, 2.0, 100.0]]))
        tensor([[  7.3106, 176.1594]])
    """

    NAME = "swiglu"

    def __init__(self, *, glu_interleave_size: int | None = None, cache_quantized_input: bool = False) -> None:
        super().__init__(glu_interleave_size=glu_interleave_size, cache_quantized_input=cache_quantized_input)


class ClampedSwiGLU(Activation):
    """Gated SiLU with clamped inputs: y = a · σ(alpha · a) · (b + glu_linear_offset), a ≤ limit and |b| ≤ limit.

    Where the clamp holds, the gradient is zero.

    Args:
        limit: upper bound of a, and of |b|; 7.0 by default.
        alpha: slope of the sigmoid, 1.702 by default.
        glu_linear_offset: the number added to b, 1.0 by default.
        glu_interleave_size: as in `Activation`.
        cache_quantized_input: as in `Activation`.

    Raises:
        UnsupportedConfig: limit is not above 0, a setting is not finite, or glu_interleave_size is below 1.

    Example:
        >>> octavo.ops.ClampedSwiGLU()(torch.tensor([[100.0, 3.0]]))
        tensor([[27.9998]])
    """

    NAME = "clamped-swiglu"
    FIELDS: ClassVar[dict[str, str]] = {"glu_linear_offset": "offset"}

    def __init__(
        self,
        *,
        limit: float = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
        glu_interleave_size: int | None = None,
        cache_quantized_input: bool = False,
    ) -> None:
        super().__init__(
            glu_interleave_size=glu_interleave_size, cache_quantized_input=cache_quantized_input,
            limit=limit, alpha=alpha, glu_linear_offset=glu_linear_offset,
        )  # fmt: skip

    def _checked_setting(self, name: str, value: Any) -> Any:
        if name == "limit" and not value > 0:
            raise UnsupportedConfig(
                f"limit bounds a from above and b in magnitude, so it must be above 0, got {value!r}. SwiGLU clamps "
                "nothing."
            )
        return super()._checked_setting(name, value)


class SiTUGLU(Activation):
    """Gated SiLU with soft bounds: y = beta1 · tanh(a / beta1) · σ(a) · beta2 · tanh(b / beta2).

    It is SwiGLU with a and b bent to stay within ±beta1 and ±beta2.

    Args:
        beta1: bound of a in magnitude, 4.0 by default, from 1e-30 to 1e30.
        beta2: bound of b in magnitude, 25.0 by default, from 1e-30 to 1e30.
        glu_interleave_size: as in `Activation`.
        cache_quantized_input: as in `Activation`.

    Raises:
        UnsupportedConfig: a bound is outside its range, or glu_interleave_size is below 1.

    Example:
        >>> octavo.ops.SiTUGLU()(torch.tensor([[100.0, 1000.0]]))
        tensor([[100.]])
    """

    NAME = "situglu"
    FIELDS: ClassVar[dict[str, str]] = {"beta1": "alpha", "beta2": "beta"}

    def __init__(
        self, *, beta1: float = 4.0, beta2: float = 25.0, glu_interleave_size: int | None = None,
        cache_quantized_input: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(
            glu_interleave_size=glu_interleave_size, cache_quantized_input=cache_quantized_input,
            beta1=beta1, beta2=beta2,
        )  # fmt: skip

    def _checked_setting(self, name: str, value: Any) -> Any:
        if name in self.FIELDS and not 1e-30 <= value <= 1e30:  # float32 holds the value and its inverse
            raise UnsupportedConfig(
                f"{name} bounds a half of x in magnitude, so it must be a finite number above 0 (from 1e-30 to 1e30), "
                f"got {value!r}. SwiGLU bounds nothing."
            )
        return super()._checked_setting(name, value)


class ConstantScale(Activation):
    """Multiply x by a number: y = scale · x. Rules fuse it with a Linear before it.

    Args:
        scale: a finite number.

    Raises:
        UnsupportedConfig: scale is not finite.

    Example:
        >>> octavo.ops.ConstantScale(0.5)(torch.tensor([2.0, 4.0]))
        tensor([1., 2.])
    """

    NAME = "linear"
    FIELDS: ClassVar[dict[str, str]] = {"scale": "alpha"}

    def __init__(self, scale: float) -> None:
        super().__init__(scale=scale)


class Bias(FusibleOperation, nn.Module):
    """Add a parameter along the last dim: y = x + bias. A rule lets the GEMM of a Linear before it add the bias.

    Args:
        size: the last dim of x.
        device: the device of the parameter `bias`; None for torch's default.
        dtype: the dtype of the parameter; None for torch's default. y has x's dtype in any case.

    Example:
        >>> bias = octavo.ops.Bias(3)
        >>> bias(torch.ones(2, 3)).shape, bias.bias.shape
        (torch.Size([2, 3]), torch.Size([3]))
    """

    op_is_elementwise = True

    def __init__(
        self, size: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the bias to zero."""
        nn.init.zeros_(self.bias)

    def forward(self, input: Tensor | QTensor) -> Tensor:
        """Return x plus the bias.

        Args:
            input: x [..., size], in float32, bfloat16 or float16. A QTensor is dequantized.

        Returns:
            y of x's shape and dtype.

        Raises:
            UnsupportedShape: the last dim of x is not `size`.
            UnsupportedDtype: x has another dtype.
            UnsupportedDevice: x and the bias are on two devices.
        """
        return self.op_run(values_of(input))

    @classmethod
    def op_matches(cls, config: Value) -> bool:
        return isinstance(config, Config) and config.name == "linear" and config.bias_dtype != ""

    def op_stage(self, x: Any, extra_inputs: tuple[Any, ...], kwargs: dict[str, Any], as_nodes: bool) -> Stage:
        if has_shape(x):
            self._check(x)
        return stage_of("", x, bias=self.bias)

    def _check(self, x: Tensor | Edge) -> None:
        bias = self.bias
        check_input("Bias", x)
        check_input("Bias", bias, "its bias")
        if not x.shape or x.shape[-1] != bias.shape[0]:
            raise UnsupportedShape(
                f"This Bias takes inputs [..., {bias.shape[0]}], got {numbers(x)}. Check the layer before it, or size."
            )
        if bias.device != x.device:
            raise UnsupportedDevice(f"x is on {x.device} and the bias on {bias.device}. Move them together.")

    def extra_repr(self) -> str:
        return f"{self.bias.shape[0]}"
