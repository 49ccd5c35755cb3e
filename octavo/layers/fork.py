"""x, and x once more for somebody else, inside a chain (`octavo.layers.chain`): dx is the sum of both gradients.

A node returns no alias of its inputs. A fork that is a chain's first stage therefore gives away one element that looks
like x and carries its gradient, which the caller joins to x (`octavo.quant.qtensor.Join`).
"""

from typing import Any, NamedTuple

from torch import Tensor

from octavo.layers.contract import Counts, Made, reader
from octavo.layers.plain import fills as fills
from octavo.layers.plain import flat_places as flat_places
from octavo.layers.plain import flops as flops
from octavo.layers.plain import gradient_flops as gradient_flops
from octavo.layers.plain import replays as replays
from octavo.quant.proto import TensorProto
from octavo.values import Value, register


@register("fork")
class Config(Value):
    leads: bool = False  # x is the chain's own
    grads: str = ""  # "x" if its gradient is wanted


config = reader(Config)


class Inputs(NamedTuple):
    x: Tensor


def counts(config: Config) -> Counts:
    return Counts(0, 0, 0, 0)


def forward(config: Config, inputs: Inputs) -> Made:
    x = inputs.x
    return Made((x, x.new_zeros(1).expand(x.shape) if config.leads else x), (), ())


def protos(config: Config, inputs: Inputs) -> Made:
    x: Any = inputs.x
    token = TensorProto(tuple(x.shape), x.dtype, x.device, (0,) * len(x.shape))
    return Made((x, token if config.leads else x), (), ())


def wants(config: Config) -> tuple[bool, ...]:
    return ("x" in config.grads,)


def save(config: Config, inputs: Inputs, made: Made) -> tuple[Tensor | None, ...]:
    return ()


def gradient_protos(config: Config, saved: tuple[Tensor | None, ...], *grads: Any) -> tuple[TensorProto | None, ...]:
    like = next((g for g in grads if g is not None), None)
    return (
        TensorProto(tuple(like.shape), like.dtype, like.device) if like is not None and "x" in config.grads else None,
    )


def backward(
    config: Config, saved: tuple[Tensor | None, ...], buffers: Any, grads: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...]:
    dy, extra = grads
    return (dy if extra is None else extra if dy is None else dy + extra,)
