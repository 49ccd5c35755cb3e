"""Elementwise operations as modules: plain, gated and probability-scaled activations, ConstantScale, Bias, Dropout.

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
from octavo.errors import UnsupportedConfig, UnsupportedDevice, UnsupportedDtype, UnsupportedShape
from octavo.kernels.activation import ACTIVATIONS
from octavo.ops.activation_layer import Config
from octavo.ops.inputs import arrived, check_input
from octavo.ops.operation import Edge, FusibleOperation, has_shape, last_dim
from octavo.quant import QTensor
from octavo.runtime.call import Stage
from octavo.runtime.call_cache import Lookup
from octavo.runtime.contract import DTYPE_NAMES
from octavo.values import Value


def values_of(x: Any) -> Any:
    """Returns x as a plain tensor: dequantizes codes, within autograd's graph, and waits for a collective's result."""
    if type(x) is Tensor:
        return x
    return x.dequantize() if isinstance(x, QTensor) else arrived(x)


def numbers(x: Tensor | Edge) -> tuple[int, ...]:
    """Returns x's shape for a message, as numbers even where the compiler uses symbols."""
    return tuple([len(range(n)) for n in x.shape])


def _grads(x: bool, scales: Tensor | None, bias: Tensor | None) -> str:
    if not torch.is_grad_enabled():
        return ""
    return (
        ("x" if x else "")
        + ("s" if scales is not None and scales.requires_grad else "")
        + ("b" if bias is not None and bias.requires_grad else "")
    )


def _key(settings: str, scales: Tensor | None, bias: Tensor | None, grads: str) -> str:
    return (
        f"activation({settings}scales_dtype='{'' if scales is None else DTYPE_NAMES[scales.dtype]}',"
        f"bias_dtype='{'' if bias is None else DTYPE_NAMES[bias.dtype]}',grads='{grads}')"
    )


def _stage(
    settings: str, x: Tensor | Edge, width: int | None = None, *, scales: Any = None, bias: Any = None, seed: Any = None
) -> Stage:
    """Returns the Stage of one call of the layer. `settings` are fields of its config, each followed by a comma."""
    grads = _grads(x.requires_grad, scales, bias)
    return Stage("activation", _key(settings, scales, bias, grads), (scales, bias, seed), (), grads != "", width)


class Activation(FusibleOperation, nn.Module):
    """Base class of the activations. In the pattern of a fusion rule it stands for every activation but ConstantScale.

    An activation computes in float32, on a CPU in float64, and rounds once. y has x's dtype, also under
    `torch.autocast`. NAME is its entry in `octavo.kernels.activation.ACTIVATIONS`.

    Args:
        glu_interleave_size: None, the default, if a and b are the halves of x's last dim. A number k if they alternate,
            k columns each, as in weights that were stored so.
        **settings: finite numbers of the curve, by the names of `octavo.kernels.activation.Function`.

    Raises:
        UnsupportedConfig: glu_interleave_size is below 1, or a setting is not finite.

    Example:
        >>> isinstance(octavo.ops.SwiGLU(), octavo.ops.Activation)
        True
        >>> octavo.ops.SwiGLU()(torch.randn(4, 64)).shape
        torch.Size([4, 32])
    """

    NAME: ClassVar[str]
    op_is_elementwise = True

    def __init__(self, *, glu_interleave_size: int | None = None, **settings: float) -> None:
        super().__init__()
        if glu_interleave_size is not None and (type(glu_interleave_size) is not int or glu_interleave_size < 1):
            raise UnsupportedConfig(
                f"glu_interleave_size is how many columns of a, then of b, follow each other: at least 1, got "
                f"{glu_interleave_size!r}. Leave it out for two halves."
            )
        self._check_finite(settings)
        self.glu_interleave_size = glu_interleave_size
        self._given = ", ".join(f"{name}={value}" for name, value in settings.items())
        # a string, built once: the compiler may turn a float attribute into a symbol
        self._settings = f"name='{self.NAME}',interleave={glu_interleave_size or 0}," + "".join(
            f"{name}={float(value)!r}," for name, value in settings.items()
        )

    def _check_finite(self, settings: dict[str, float]) -> None:
        for name, value in settings.items():
            if not math.isfinite(value):
                raise UnsupportedConfig(f"{name} of {type(self).__name__} must be a finite number, got {value!r}.")

    def forward(self, input: Tensor | QTensor) -> Tensor:
        """Returns the activated values.

        Args:
            input: x, in float32, bfloat16 or float16, with any leading dims and strides. A QTensor is dequantized.

        Returns:
            y in x's dtype. Gated activations halve the last dim.

        Raises:
            UnsupportedDtype: x has another dtype.
            UnsupportedShape: the last dim of a gated activation's x cannot be divided into a and b.

        Example:
            >>> octavo.ops.ReLU()(torch.tensor([-1.0, 2.0]))
            tensor([0., 2.])
        """
        y: Tensor = self.op_run(values_of(input))
        return y

    @classmethod
    def op_matches(cls, config: Value) -> bool:
        """Whether a stage with this config belongs to this class. Activation itself matches every activation."""
        if not isinstance(config, Config) or config.drop or config.bias_dtype:
            return False
        scaled = issubclass(cls, _Scaled)
        if cls is Activation:
            return config.name != "linear"
        return config.name == cls.NAME and scaled == bool(config.scales_dtype)

    def op_stage(self, x: Tensor | Edge, extras: tuple[Any, ...], kwargs: dict[str, Any], as_nodes: bool) -> Stage:
        self._check(x)
        scales = extras[0] if extras else None
        if scales is not None:
            _check_scales(type(self).__name__, x, scales)
        width = last_dim(x) // 2 if ACTIVATIONS[self.NAME].gated else None
        return _stage(self._settings, x, width, scales=scales)

    def _call_lookup(self, needs_dx: bool, extras: tuple[Any, ...]) -> Lookup | None:
        if not all([type(t) is Tensor for t in extras]):
            return None
        needs = torch.is_grad_enabled() and (needs_dx or any([t.requires_grad for t in extras]))
        return Lookup((type(self).__name__, self._settings, torch.is_grad_enabled()), list(extras), (), needs)

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
                    f"rank an equal part of {_counted(blocks)} of output features, so that the halves are on different "
                    "ranks. Split each half by itself: Linear or GroupedLinear(parallel_mode='column', "
                    "column_blocks=2), LayerNormMLP(set_parallel_mode=True). A plan of parallelize_module takes a "
                    "Linear for each half."
                )
            return blocks // 2
        if blocks > 1:
            raise UnsupportedConfig(
                f"{type(self).__name__}(glu_interleave_size={self.glu_interleave_size}) pairs columns that are near "
                f"each other, and the layer before it splits each of {_counted(blocks)} of output features by itself. "
                "Leave column_blocks out."
            )
        return blocks

    def extra_repr(self) -> str:
        interleave = f"glu_interleave_size={self.glu_interleave_size}" if self.glu_interleave_size else ""
        return ", ".join(filter(None, (self._given, interleave)))


def _counted(blocks: int) -> str:
    return "one block" if blocks == 1 else f"{blocks} blocks"


class _Plain(Activation):
    """Base class of the activations without settings."""

    def __init__(self) -> None:
        super().__init__()


class GELU(_Plain):
    """GELU by tanh: y = x/2 · (1 + tanh(√(2/π) (x + 0.044715 x³))).

    x is [..., K] in float32, bfloat16 or float16; y has its shape and dtype.

    Example:
        >>> x = torch.tensor([-1.0, 0.0, 2.0])
        >>> torch.allclose(octavo.ops.GELU()(x), nn.functional.gelu(x, approximate="tanh"))
        True
    """

    NAME = "gelu"


class QGELU(_Plain):
    """Quick GELU: y = x · σ(1.702 x).

    x is [..., K] in float32, bfloat16 or float16; y has its shape and dtype.

    Example:
        >>> octavo.ops.QGELU()(torch.tensor([-1.0, 0.0, 2.0]))
        tensor([-0.1542,  0.0000,  1.9357])
    """

    NAME = "qgelu"


class ReLU(_Plain):
    """ReLU: y = max(x, 0).

    x is [..., K] in float32, bfloat16 or float16; y has its shape and dtype.

    Example:
        >>> octavo.ops.ReLU()(torch.tensor([-1.0, 0.0, 2.0]))
        tensor([0., 0., 2.])
    """

    NAME = "relu"


class SReLU(_Plain):
    """Squared ReLU: y = max(x, 0)².

    x is [..., K] in float32, bfloat16 or float16; y has its shape and dtype.

    Example:
        >>> octavo.ops.SReLU()(torch.tensor([-1.0, 0.0, 2.0]))
        tensor([0., 0., 4.])
    """

    NAME = "srelu"


class SiLU(_Plain):
    """SiLU, also called swish: y = x · σ(x).

    x is [..., K] in float32, bfloat16 or float16; y has its shape and dtype.

    Example:
        >>> x = torch.tensor([-1.0, 0.0, 2.0])
        >>> torch.allclose(octavo.ops.SiLU()(x), nn.functional.silu(x))
        True
    """

    NAME = "silu"


class GLU(_Plain):
    """Gated linear unit: y = σ(a) · b.

    x is [..., 2H]: a is the first half of the last dim, b the second. y is [..., H] in x's dtype. `torch.nn.GLU`
    activates the second half instead.

    Example:
        >>> octavo.ops.GLU()(torch.tensor([[0.0, 0.0, 10.0, 100.0]]))
        tensor([[ 5., 50.]])
    """

    NAME = "glu"


class GEGLU(_Plain):
    """Gated GELU: y = gelu(a) · b, with the GELU of `octavo.ops.GELU`.

    x is [..., 2H]: a is the first half of the last dim, b the second. y is [..., H] in x's dtype.

    Example:
        >>> octavo.ops.GEGLU()(torch.tensor([[1.0, 2.0, 10.0, 100.0]]))
        tensor([[  8.4119, 195.4598]])
    """

    NAME = "geglu"


class QGEGLU(_Plain):
    """Gated quick GELU: y = a · σ(1.702 a) · b.

    x is [..., 2H]: a is the first half of the last dim, b the second. y is [..., H] in x's dtype.

    Example:
        >>> octavo.ops.QGEGLU()(torch.tensor([[1.0, 2.0, 10.0, 100.0]]))
        tensor([[  8.4580, 193.5659]])
    """

    NAME = "qgeglu"


class ReGLU(_Plain):
    """Gated ReLU: y = max(a, 0) · b.

    x is [..., 2H]: a is the first half of the last dim, b the second. y is [..., H] in x's dtype.

    Example:
        >>> octavo.ops.ReGLU()(torch.tensor([[1.0, 2.0, 10.0, 100.0]]))
        tensor([[ 10., 200.]])
    """

    NAME = "reglu"


class SReGLU(_Plain):
    """Gated squared ReLU: y = max(a, 0)² · b.

    x is [..., 2H]: a is the first half of the last dim, b the second. y is [..., H] in x's dtype.

    Example:
        >>> octavo.ops.SReGLU()(torch.tensor([[1.0, 2.0, 10.0, 100.0]]))
        tensor([[ 10., 400.]])
    """

    NAME = "sreglu"


class SwiGLU(Activation):
    """Gated SiLU: y = a · σ(a) · b.

    x is [..., 2H]: a is the first half of the last dim, b the second. y is [..., H] in x's dtype.

    Args:
        glu_interleave_size: None, the default, if a and b are the halves of x's last dim. A number k if they alternate,
            k columns each, as in weights that were stored so.

    Raises:
        UnsupportedConfig: glu_interleave_size is below 1.

    Example:
        >>> octavo.ops.SwiGLU()(torch.tensor([[1.0, 2.0, 10.0, 100.0]]))
        tensor([[  7.3106, 176.1594]])
        >>> octavo.ops.SwiGLU(glu_interleave_size=1)(torch.tensor([[1.0, 10.0, 2.0, 100.0]]))
        tensor([[  7.3106, 176.1594]])
    """

    NAME = "swiglu"

    def __init__(self, *, glu_interleave_size: int | None = None) -> None:
        super().__init__(glu_interleave_size=glu_interleave_size)


class ClampedSwiGLU(Activation):
    """Gated SiLU with clamped inputs: y = a · σ(alpha · a) · (b + glu_linear_offset), a ≤ limit and |b| ≤ limit.

    x is [..., 2H]: a is the first half of the last dim, b the second. y is [..., H] in x's dtype.
    Where the clamp holds, the gradient is zero.

    Args:
        limit: upper bound of a, and of |b|; 7.0 by default.
        alpha: slope of the sigmoid, 1.702 by default.
        glu_linear_offset: the number added to b, 1.0 by default.
        glu_interleave_size: None, the default, if a and b are the halves of x's last dim. A number k if they alternate,
            k columns each, as in weights that were stored so.

    Raises:
        UnsupportedConfig: limit is not above 0, a setting is not finite, or glu_interleave_size is below 1.

    Example:
        >>> octavo.ops.ClampedSwiGLU()(torch.tensor([[100.0, 3.0]]))
        tensor([[27.9998]])
    """

    NAME = "clamped-swiglu"

    def __init__(
        self,
        *,
        limit: float = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
        glu_interleave_size: int | None = None,
    ) -> None:
        if not limit > 0:
            raise UnsupportedConfig(
                f"limit bounds a from above and b in magnitude, so it must be above 0, got {limit!r}. SwiGLU clamps "
                "nothing."
            )
        given = {"limit": limit, "alpha": alpha, "glu_linear_offset": glu_linear_offset}
        self._check_finite(given)
        super().__init__(glu_interleave_size=glu_interleave_size, limit=limit, alpha=alpha, offset=glu_linear_offset)
        self._given = ", ".join(f"{name}={value}" for name, value in given.items())


class SiTUGLU(Activation):
    """Gated SiLU with soft bounds: y = beta1 · tanh(a / beta1) · σ(a) · beta2 · tanh(b / beta2).

    It is SwiGLU with a and b bent to stay within ±beta1 and ±beta2. x is [..., 2H]: a is the first half of the last
    dim, b the second. y is [..., H] in x's dtype.

    Args:
        beta1: bound of a in magnitude, 4.0 by default, from 1e-30 to 1e30.
        beta2: bound of b in magnitude, 25.0 by default, from 1e-30 to 1e30.
        glu_interleave_size: None, the default, if a and b are the halves of x's last dim. A number k if they alternate,
            k columns each, as in weights that were stored so.

    Raises:
        UnsupportedConfig: a bound is outside its range, or glu_interleave_size is below 1.

    Example:
        >>> octavo.ops.SiTUGLU()(torch.tensor([[100.0, 1000.0]]))
        tensor([[100.]])
    """

    NAME = "situglu"

    def __init__(self, *, beta1: float = 4.0, beta2: float = 25.0, glu_interleave_size: int | None = None) -> None:
        for name, value in (("beta1", beta1), ("beta2", beta2)):
            if not 1e-30 <= value <= 1e30:  # float32 holds the value and its inverse
                raise UnsupportedConfig(
                    f"{name} bounds a half of x in magnitude, so it must be a finite number above 0 (from 1e-30 to "
                    f"1e30), got {value!r}. SwiGLU bounds nothing."
                )
        super().__init__(glu_interleave_size=glu_interleave_size, alpha=beta1, beta=beta2)
        self._given = f"beta1={beta1}, beta2={beta2}"


class _Scaled(Activation):
    """Multiplies each row of an activation's output by a scale, such as the probability that a router gave a token."""

    num_extra_inputs = 1

    def __init__(
        self,
        glu_interleave_size: int | None = None,
        *,
        activation_recompute_in_mlp: bool = False,
        **settings: float,
    ) -> None:
        if activation_recompute_in_mlp:
            raise UnsupportedConfig(
                f"{type(self).__name__} keeps x and the scales, and never y: activation_recompute_in_mlp=True has "
                "nothing to leave out. To keep less of what is around it, use torch.utils.checkpoint."
            )
        given: dict[str, Any] = {**settings}
        if glu_interleave_size is not None:
            given["glu_interleave_size"] = glu_interleave_size
        super().__init__(**given)  # the constructor of the activation

    def forward(self, input: Tensor | QTensor, scales: Tensor) -> Tensor:  # type: ignore[override]
        """Returns the activated values times a scale for each row.

        Args:
            input: x [..., K], in float32, bfloat16 or float16. A QTensor is dequantized.
            scales: [...], one for each row of x, in float32, bfloat16 or float16. They get a gradient if they want one.

        Returns:
            y in x's dtype. Gated activations halve the last dim.

        Raises:
            UnsupportedShape: the scales are not one for each row, or x cannot be divided into a and b.
            UnsupportedDtype: x or scales have another dtype.
            UnsupportedDevice: x and scales are on two devices.

        Example:
            >>> octavo.ops.ScaledSReLU()(torch.tensor([[2.0, -1.0]]), torch.tensor([0.5]))
            tensor([[2., 0.]])
        """
        y: Tensor = self.op_run(values_of(input), scales)
        return y


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


class ScaledSwiGLU(_Scaled, SwiGLU):
    """SwiGLU with a scale for each row: y = swiglu(x) · scales[..., None]. Call it with (x, scales).

    Use it for experts: the scales are the probabilities that the router gave the tokens.

    Args:
        glu_interleave_size: None, the default, if a and b are the halves of x's last dim. A number k if they alternate,
            k columns each, as in weights that were stored so.
        activation_recompute_in_mlp: False, the only value: the operation keeps x and never y, so there is nothing to
            recompute. It is accepted so that code for other libraries runs.

    Raises:
        UnsupportedConfig: glu_interleave_size is below 1, activation_recompute_in_mlp is True, or another setting has a
            value without a meaning.

    Example:
        >>> octavo.ops.ScaledSwiGLU()(torch.randn(4, 64), torch.rand(4)).shape
        torch.Size([4, 32])
    """

    def __init__(self, glu_interleave_size: int | None = None, *, activation_recompute_in_mlp: bool = False) -> None:
        super().__init__(glu_interleave_size, activation_recompute_in_mlp=activation_recompute_in_mlp)


class ScaledClampedSwiGLU(_Scaled, ClampedSwiGLU):
    """ClampedSwiGLU with a scale for each row: y = clamped_swiglu(x) · scales[..., None]. Call it with (x, scales).

    Args:
        glu_interleave_size: None, the default, if a and b are the halves of x's last dim. A number k if they alternate,
            k columns each, as in weights that were stored so.
        activation_recompute_in_mlp: False, the only value: the operation keeps x and never y, so there is nothing to
            recompute. It is accepted so that code for other libraries runs.
        limit: upper bound of a, and of |b|; 7.0 by default.
        alpha: slope of the sigmoid, 1.702 by default.
        glu_linear_offset: the number added to b, 1.0 by default.

    Raises:
        UnsupportedConfig: glu_interleave_size is below 1, activation_recompute_in_mlp is True, or another setting has a
            value without a meaning.

    Example:
        >>> octavo.ops.ScaledClampedSwiGLU(limit=5.0)(torch.randn(4, 64), torch.rand(4)).shape
        torch.Size([4, 32])
    """

    def __init__(
        self,
        glu_interleave_size: int | None = None,
        *,
        activation_recompute_in_mlp: bool = False,
        limit: float = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
    ) -> None:
        super().__init__(
            glu_interleave_size,
            activation_recompute_in_mlp=activation_recompute_in_mlp,
            limit=limit,
            alpha=alpha,
            glu_linear_offset=glu_linear_offset,
        )


class ScaledSiTUGLU(_Scaled, SiTUGLU):
    """SiTUGLU with a scale for each row: y = situglu(x) · scales[..., None]. Call it with (x, scales).

    Args:
        glu_interleave_size: None, the default, if a and b are the halves of x's last dim. A number k if they alternate,
            k columns each, as in weights that were stored so.
        activation_recompute_in_mlp: False, the only value: the operation keeps x and never y, so there is nothing to
            recompute. It is accepted so that code for other libraries runs.
        beta1: bound of a in magnitude, 4.0 by default, from 1e-30 to 1e30.
        beta2: bound of b in magnitude, 25.0 by default, from 1e-30 to 1e30.

    Raises:
        UnsupportedConfig: glu_interleave_size is below 1, activation_recompute_in_mlp is True, or another setting has a
            value without a meaning.

    Example:
        >>> octavo.ops.ScaledSiTUGLU()(torch.randn(4, 64), torch.rand(4)).shape
        torch.Size([4, 32])
    """

    def __init__(
        self,
        glu_interleave_size: int | None = None,
        *,
        activation_recompute_in_mlp: bool = False,
        beta1: float = 4.0,
        beta2: float = 25.0,
    ) -> None:
        super().__init__(
            glu_interleave_size, activation_recompute_in_mlp=activation_recompute_in_mlp, beta1=beta1, beta2=beta2
        )


class ScaledSReLU(_Scaled, SReLU):
    """Squared ReLU with a scale for each row: y = max(x, 0)² · scales[..., None]. Call it with (x, scales).

    Args:
        glu_interleave_size: None, the only value, since it has no gate.
        activation_recompute_in_mlp: False, the only value: the operation keeps x and never y, so there is nothing to
            recompute. It is accepted so that code for other libraries runs.

    Raises:
        UnsupportedConfig: activation_recompute_in_mlp is True.
        TypeError: glu_interleave_size is a number.

    Example:
        >>> octavo.ops.ScaledSReLU()(torch.tensor([[2.0, -1.0]]), torch.tensor([0.5]))
        tensor([[2., 0.]])
    """

    def __init__(self, glu_interleave_size: None = None, *, activation_recompute_in_mlp: bool = False) -> None:
        super().__init__(glu_interleave_size, activation_recompute_in_mlp=activation_recompute_in_mlp)


class ConstantScale(Activation):
    """Multiplies x by a number: y = scale · x. Rules fuse it with a Linear before it.

    Args:
        scale: a finite number.

    Raises:
        UnsupportedConfig: scale is not finite.

    Example:
        >>> octavo.ops.ConstantScale(0.5)(torch.tensor([2.0, 4.0]))
        tensor([1., 2.])
    """

    NAME = "linear"

    def __init__(self, scale: float) -> None:
        super().__init__(alpha=scale)
        self.scale = scale


class Bias(FusibleOperation, nn.Module):
    """Adds a parameter along the last dim: y = x + bias. A rule lets the GEMM of a Linear before it add the bias.

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
        """Sets the bias to zero.

        Example:
            >>> bias = octavo.ops.Bias(2)
            >>> bias.reset_parameters()
            >>> bias.bias.tolist()
            [0.0, 0.0]
        """
        nn.init.zeros_(self.bias)

    def forward(self, input: Tensor | QTensor) -> Tensor:
        """Returns x plus the bias.

        Args:
            input: x [..., size], in float32, bfloat16 or float16. A QTensor is dequantized.

        Returns:
            y of x's shape and dtype.

        Raises:
            UnsupportedShape: the last dim of x is not `size`.
            UnsupportedDtype: x has another dtype.
            UnsupportedDevice: x and the bias are on two devices.
        """
        y: Tensor = self.op_run(values_of(input))
        return y

    @classmethod
    def op_matches(cls, config: Value) -> bool:
        return isinstance(config, Config) and config.name == "linear" and config.bias_dtype != ""

    def op_stage(self, x: Tensor | Edge, extras: tuple[Any, ...], kwargs: dict[str, Any], as_nodes: bool) -> Stage:
        if has_shape(x):
            self._check(x)
        return _stage("", x, bias=self.bias)

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


class Dropout(FusibleOperation, nn.Module):
    """In training, zeroes each element of x with probability p and divides the others by 1 - p; in eval, returns x.

    An element's index and a seed determine whether it is kept, so backward keeps only the seed and draws the mask
    again. Activation checkpointing restores torch's generator before it recomputes forward, so both forwards zero the
    same elements.

    Args:
        p: the probability, from 0 to 1.

    Raises:
        UnsupportedConfig: p is outside of that range.

    Example:
        >>> dropout, x, seed = octavo.ops.Dropout(0.5), torch.ones(4, 8), torch.tensor([1234, 0])
        >>> torch.equal(dropout(x, seed=seed), dropout(x, seed=seed)), dropout.eval()(x) is x
        (True, True)
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        if not 0 <= p <= 1:
            raise UnsupportedConfig(f"p is a probability, from 0 to 1, got {p!r}.")
        self.p = p
        self._settings = f"drop={float(p)!r},"
        self._keeps_all = p == 0

    op_keywords = ("seed",)
    op_is_elementwise = True

    def forward(self, input: Tensor | QTensor, seed: Tensor | None = None) -> Tensor | QTensor:
        """Returns x with elements dropped, or x itself in eval mode and for p = 0.

        Args:
            input: x, in float32, bfloat16 or float16. In training a QTensor is dequantized.
            seed: int64 [seed, step] on x's device; None draws one from torch's generator. Pass it to get the same mask
                again, and advance the step at every call. In a Sequential, pass it through op_kwargs.

        Returns:
            y of x's shape and dtype.

        Raises:
            UnsupportedDtype: x has another dtype, or seed is no tensor.
            UnsupportedConfig: seed has another dtype, shape or device.
        """
        if not self.training or self._keeps_all:
            return input
        y: Tensor = self.op_run(values_of(input), seed=seed)
        return y

    @classmethod
    def op_matches(cls, config: Value) -> bool:
        return isinstance(config, Config) and config.drop != 0.0

    def why_not_fusible(self, x: Any) -> str:
        return "" if self.op_makes_node() else "it leaves x as it is"

    def op_makes_node(self) -> bool:
        return self.training and not self._keeps_all

    def op_stage(self, x: Tensor | Edge, extras: tuple[Any, ...], kwargs: dict[str, Any], as_nodes: bool) -> Stage:
        check_input("Dropout", x)
        return _stage(self._settings, x, seed=self._seed(x, kwargs.get("seed")))

    def _seed(self, x: Tensor | Edge, seed: Tensor | None) -> Tensor:
        if seed is None:
            return torch.randint(0, 2**62, (2,), device=x.device, dtype=torch.int64)
        if not isinstance(seed, Tensor):
            raise UnsupportedDtype(
                f"The seed of Dropout is an int64 tensor [seed, step] where x is ({x.device}), got {seed!r}."
            )
        if seed.dtype != torch.int64 or tuple(seed.shape) != (2,) or seed.device != x.device:
            raise UnsupportedConfig(
                f"The seed of Dropout is an int64 tensor [seed, step] where x is ({x.device}), got {seed.dtype} "
                f"{numbers(seed)} on {seed.device}."
            )
        return seed

    def extra_repr(self) -> str:
        return f"p={self.p}"
