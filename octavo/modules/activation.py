"""Elementwise operations as modules: plain, gated and probability-scaled activations, ConstantScale, Bias, Dropout.

Each calls `octavo.layers.activation` once. y has x's dtype, independent of `torch.autocast`; all arithmetic is float32.
Gated activations take [..., 2H] and return [..., H]: they activate the first half and multiply it by the second
(`nn.GLU` activates the second half).
"""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from octavo.errors import UnsupportedConfig, UnsupportedDevice, UnsupportedDtype, UnsupportedShape
from octavo.fuser.inputs import arrived, check_input
from octavo.fuser.operation import Edge, FusibleOperation, has_shape, last_dim
from octavo.kernels.activation import ACTIVATIONS
from octavo.layers.activation import Config
from octavo.layers.contract import DTYPE_NAMES
from octavo.lower.call import Stage
from octavo.quant import QTensor
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
    """Base class of the activations. NAME is its entry in `octavo.kernels.activation.ACTIVATIONS`."""

    NAME: ClassVar[str]

    def __init__(self, *, glu_interleave_size: int | None = None, **settings: float) -> None:
        super().__init__()
        if glu_interleave_size is not None and (type(glu_interleave_size) is not int or glu_interleave_size < 1):
            raise UnsupportedConfig(
                f"glu_interleave_size is how many columns of a, then of b, follow each other: at least 1, got "
                f"{glu_interleave_size!r}. Leave it out for two halves."
            )
        for name, value in settings.items():
            if not math.isfinite(value):
                raise UnsupportedConfig(f"{type(self).__name__}({name}={value!r}) must be a finite number.")
        self.glu_interleave_size = glu_interleave_size
        self._given = ", ".join(f"{name}={value}" for name, value in settings.items())
        # a string, built once: the compiler may turn a float attribute into a symbol
        self._settings = f"name='{self.NAME}',interleave={glu_interleave_size or 0}," + "".join(
            f"{name}={float(value)!r}," for name, value in settings.items()
        )

    def forward(self, input: Tensor) -> Tensor:
        y: Tensor = self.op_run(values_of(input))
        return y

    @classmethod
    def op_matches(cls, config: Value) -> bool:
        """Whether the config is one of this class's; Activation itself matches every activation."""
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

    def _check(self, x: Tensor | Edge) -> None:
        title = type(self).__name__
        check_input(title, x)
        if not ACTIVATIONS[self.NAME].gated or not has_shape(x):
            return
        step = 2 * (self.glu_interleave_size or 1)
        if not x.shape or x.shape[-1] % step:
            way = f"glu_interleave_size={self.glu_interleave_size}" if self.glu_interleave_size else "two halves"
            raise UnsupportedShape(
                f"{title} takes the last dim of x as {way}, so it must be a multiple of {step}, got {numbers(x)}. "
                "Check out_features of the layer before it."
            )

    def extra_repr(self) -> str:
        interleave = f"glu_interleave_size={self.glu_interleave_size}" if self.glu_interleave_size else ""
        return ", ".join(filter(None, (self._given, interleave)))


class _Plain(Activation):
    """Base class of the activations without settings."""

    def __init__(self) -> None:
        super().__init__()


class GELU(_Plain):
    """x/2 · (1 + tanh(√(2/π) (x + 0.044715 x³)))"""

    NAME = "gelu"


class QGELU(_Plain):
    """x · σ(1.702 x)"""

    NAME = "qgelu"


class ReLU(_Plain):
    """max(x, 0)"""

    NAME = "relu"


class SReLU(_Plain):
    """max(x, 0)²"""

    NAME = "srelu"


class SiLU(_Plain):
    """x · σ(x)"""

    NAME = "silu"


class GLU(_Plain):
    """σ(a) · b"""

    NAME = "glu"


class GEGLU(_Plain):
    """gelu(a) · b"""

    NAME = "geglu"


class QGEGLU(_Plain):
    """a · σ(1.702 a) · b"""

    NAME = "qgeglu"


class ReGLU(_Plain):
    """max(a, 0) · b"""

    NAME = "reglu"


class SReGLU(_Plain):
    """max(a, 0)² · b"""

    NAME = "sreglu"


class SwiGLU(Activation):
    """a · σ(a) · b. With `glu_interleave_size` = k, a and b take turns in x, k columns each."""

    NAME = "swiglu"

    def __init__(self, *, glu_interleave_size: int | None = None) -> None:
        super().__init__(glu_interleave_size=glu_interleave_size)


class ClampedSwiGLU(Activation):
    """a · σ(alpha · a) · (b + glu_linear_offset), with a at most `limit`, and b at most that in magnitude."""

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
        super().__init__(glu_interleave_size=glu_interleave_size, limit=limit, alpha=alpha, offset=glu_linear_offset)


class SiTUGLU(Activation):
    """beta1 · tanh(a / beta1) · σ(a) · beta2 · tanh(b / beta2): SwiGLU, with a and b bent to stay within ±beta1 and
    ±beta2."""

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
        **settings: Any,
    ) -> None:
        if activation_recompute_in_mlp:
            raise UnsupportedConfig(
                f"{type(self).__name__} keeps x and the scales, and never y: activation_recompute_in_mlp=True has "
                "nothing to leave out. To keep less of what is around it, use torch.utils.checkpoint."
            )
        interleave = {} if glu_interleave_size is None else {"glu_interleave_size": glu_interleave_size}
        super().__init__(**interleave, **settings)  # the constructor of the activation

    def forward(self, input: Tensor, scales: Tensor) -> Tensor:  # type: ignore[override]
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
    check_input("scales", scales)
    if scales.device != x.device:
        raise UnsupportedDevice(f"x is on {x.device} and scales on {scales.device}. Move them together.")


class ScaledSwiGLU(_Scaled, SwiGLU):
    """swiglu(x) · scales[..., None]"""


class ScaledClampedSwiGLU(_Scaled, ClampedSwiGLU):
    """clamped_swiglu(x) · scales[..., None]"""


class ScaledSiTUGLU(_Scaled, SiTUGLU):
    """situglu(x) · scales[..., None]"""


class ScaledSReLU(_Scaled, SReLU):
    """max(x, 0)² · scales[..., None]"""


class ConstantScale(Activation):
    """scale · x"""

    NAME = "linear"

    def __init__(self, scale: float) -> None:
        super().__init__(alpha=scale)
        self.scale = scale


class Bias(FusibleOperation, nn.Module):
    """Adds a bias along the last dim."""

    def __init__(
        self, size: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
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
        check_input("bias", bias)
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

    An element's index and `seed`, int64 [seed, step], determine whether it is kept; backward keeps only the seed.
    Without a seed the module draws one from torch's generator. Activation checkpointing restores the generator before
    it recomputes forward, so both forwards zero the same elements.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        if not 0 <= p <= 1:
            raise UnsupportedConfig(f"p is a probability, from 0 to 1, got {p!r}.")
        self.p = p
        self._settings = f"drop={float(p)!r},"
        self._keeps_all = p == 0

    op_keywords = ("seed",)

    def forward(self, input: Tensor, seed: Tensor | None = None) -> Tensor:
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
            return torch.randint(0, 2**62, (2,), device=x.device)
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
