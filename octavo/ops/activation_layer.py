"""The elementwise layer: an activation, and a bias before it, row scales and dropout after it, where a call has them.

    y = keep(f(x + bias) · scales)          y = keep(f(a) · (h(b) + offset) · scales)      (octavo.kernels.activation)

Backward keeps x, by reference, if the function's slope depends on it; the scales and the bias that it needs; and
dropout's seed.
"""

import math
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo._torch.operators import unsafe_view
from octavo.errors import check_choice
from octavo.kernels import activation
from octavo.kernels.activation import ACTIVATIONS, Function
from octavo.quant.proto import TensorProto
from octavo.runtime.contract import DTYPES, ForwardResult, Layer, Tensors, wanted_protos
from octavo.values import Value, register


@register("activation")
class Config(Value):
    name: str = "linear"  # an entry of ACTIVATIONS
    alpha: float | None = None  # None for this, limit, beta or offset: the entry's value
    limit: float | None = None
    beta: float | None = None
    offset: float | None = None
    interleave: int = 0
    drop: float = 0.0
    scales_dtype: str = ""  # empty: no scales
    bias_dtype: str = ""  # empty: no bias
    wants_dx: bool = False
    wants_ds: bool = False  # of the scales
    wants_db: bool = False

    def validate(self) -> None:
        check_choice(self.name, tuple(ACTIVATIONS), what="activation")

    @cached_property
    def function(self) -> Function:
        settings = {"alpha": self.alpha, "limit": self.limit, "beta": self.beta, "offset": self.offset}
        changed = {name: float(v) for name, v in settings.items() if v is not None}
        return ACTIVATIONS[self.name]._replace(interleave=self.interleave, drop=self.drop, **changed)  # type: ignore[arg-type]

    @cached_property
    def has_gradients(self) -> bool:
        return self.wants_dx or self.wants_ds or self.wants_db

    @cached_property
    def keeps_x(self) -> bool:
        """Whether backward keeps x: for the slope, or for the value that a scale was multiplied by."""
        return self.has_gradients and (self.function.remembers or self.wants_ds)


class Inputs(NamedTuple):
    x: Tensor  # [..., K], or gated [..., 2H]
    scales: Tensor | None = None  # [...]
    bias: Tensor | None = None  # [K]
    seed: Tensor | None = None  # [2] int64: seed and step of dropout


class Saved(NamedTuple):
    x: Tensor | None
    scales: Tensor | None
    bias: Tensor | None
    seed: Tensor | None


def matrix(x: Tensor) -> Tensor:
    """Reshape [..., K] to [M, K], and a single number to [1, 1]."""
    return x if x.dim() == 2 else x.reshape(shape_of_matrix(tuple(x.shape)))


def shape_of_matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    return (math.prod(shape[:-1]), shape[-1]) if shape else (1, 1)


def vector(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.reshape(-1).contiguous()


class ActivationLayer(Layer):
    """Apply an elementwise function, with bias, row scales and dropout."""

    def title_of(self, config: Config) -> str:
        if config.name != "linear":
            return self.title
        return "dropout" if config.drop else "bias" if config.bias_dtype else "scale"

    def forward(self, config: Config, inputs: Inputs) -> ForwardResult:
        x = inputs.x
        y = activation.forward(
            config.function, matrix(x), vector(inputs.scales), vector(inputs.bias), vector(inputs.seed)
        )
        if x.dim() != 2:
            y = unsafe_view(y, shape_of_y(config, tuple(x.shape)))  # fresh, and no view of anything
        return ForwardResult((y,), (), self.intermediates(config, x))

    def intermediates(self, config: Config, x: Tensor) -> Tensors:
        """Return the tensors that forward makes for backward: none, since backward keeps x itself."""
        return ()

    def restored(self, config: Config, saved: Any, dtype: torch.dtype) -> Saved:
        """Return the saved tensors, with the values of x, which have this dtype."""
        return Saved._make(saved)

    def abstract(self, config: Config, inputs: Inputs) -> ForwardResult:
        x: Any = inputs.x
        return ForwardResult((TensorProto(shape_of_y(config, tuple(x.shape)), x.dtype, x.device),), (), ())

    def wants(self, config: Config) -> tuple[bool, ...]:
        return config.wants_dx, config.wants_ds, config.wants_db, False

    def save(self, config: Config, inputs: Inputs, made: ForwardResult) -> Tensors:
        return Saved(
            inputs.x if config.keeps_x else None,
            inputs.scales if config.wants_dx or config.wants_db else None,
            inputs.bias if config.keeps_x else None,
            inputs.seed if config.has_gradients else None,
        )

    def abstract_gradients(self, config: Config, saved: Any, dy: Any) -> tuple[TensorProto | None, ...]:
        shape = shape_of_dx(config, tuple(dy.shape))
        own = (shape, dy.dtype), (shape[:-1], config.scales_dtype), (shape[-1:], config.bias_dtype)
        return wanted_protos(dy, self.wants(config), *own)

    def backward(self, config: Config, saved: Any, buffers: Any, grads: Tensors, writes: Any = None) -> Tensors:
        dy = grads[0]
        if dy is None:
            return (None,) * len(Inputs._fields)
        x, scales, bias, seed = self.restored(config, saved, dy.dtype)
        wanted = self.wants(config)
        of_kernel = activation.backward(
            config.function,
            matrix(dy),
            None if x is None else matrix(x),
            vector(scales),
            vector(bias),
            vector(seed),
            activation.Wanted(
                wanted[0],
                DTYPES[config.scales_dtype] if wanted[1] else None,
                DTYPES[config.bias_dtype] if wanted[2] else None,
            ),
        )
        shape = shape_of_dx(config, tuple(dy.shape))
        shapes = shape, shape[:-1], shape[-1:]
        return (*[None if t is None else t.view(own) for t, own in zip(of_kernel, shapes, strict=True)], None)


layer = ActivationLayer(Config, Inputs, saved=Saved)


def shape_of_y(config: Config, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of y, from x's."""
    return (*shape[:-1], shape[-1] // 2) if config.function.gated else shape


def shape_of_dx(config: Config, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of dx, from dy's."""
    return (*shape[:-1], 2 * shape[-1]) if config.function.gated else shape
