"""x + extra, of one shape, added in the wider of their dtypes and rounded to x's. Both gradients are dy itself."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.layers.contract import DTYPES, Counts, Made, reader
from octavo.layers.plain import fills as fills
from octavo.layers.plain import flat_places as flat_places
from octavo.layers.plain import flops as flops
from octavo.layers.plain import gradient_flops as gradient_flops
from octavo.layers.plain import graph_buffers as graph_buffers
from octavo.layers.plain import replays as replays
from octavo.layers.plain import returned_elsewhere as returned_elsewhere
from octavo.quant.proto import TensorProto
from octavo.values import Value, register


@register("add")
class Config(Value):
    dtype: str = "float32"  # of x and y
    extra_dtype: str = "float32"
    grads: str = ""  # which gradients are wanted: letters of "xe"


config = reader(Config)


class Inputs(NamedTuple):
    x: Tensor
    extra: Tensor


def counts(config: Config) -> Counts:
    return Counts(0, 0, 0, 0)


def same(config: Config) -> bool:
    """Whether the extra's gradient is dy without a cast."""
    return config.dtype == config.extra_dtype


def passed(config: Config) -> dict[int, int]:
    wanted = (0 if "x" in config.grads else None, 1 if "e" in config.grads and same(config) else None)
    return {i: -1 for i in wanted if i is not None}


def forward(config: Config, inputs: Inputs) -> Made:
    x = inputs.x
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)  # contiguous, however x and extra lie in memory
    return Made((torch.add(x, inputs.extra, out=y),), (), ())


def protos(config: Config, inputs: Inputs) -> Made:
    x: Any = inputs.x
    return Made((TensorProto(tuple(x.shape), x.dtype, x.device),), (), ())


def wants(config: Config) -> tuple[bool, ...]:
    return "x" in config.grads, "e" in config.grads


def save(config: Config, inputs: Inputs, made: Made) -> tuple[Tensor | None, ...]:
    return ()


def gradient_protos(config: Config, saved: tuple[Tensor | None, ...], dy: Any) -> tuple[TensorProto | None, ...]:
    x, extra = wants(config)
    shape = tuple(dy.shape)
    return (
        TensorProto(shape, dy.dtype, dy.device) if x else None,
        TensorProto(shape, DTYPES[config.extra_dtype], dy.device) if extra else None,
    )


def backward(
    config: Config, saved: tuple[Tensor | None, ...], buffers: Any, grads: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...]:
    dy = grads[0]
    if dy is None:
        return None, None
    x, extra = wants(config)
    return (dy if x else None), (dy.to(DTYPES[config.extra_dtype]) if extra else None)
