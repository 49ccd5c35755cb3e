"""The running amax of a layer's x, where x is cast outside of the layer's node: in a graph, for all siblings at once.

y is the scale of the codes, which the layer takes: so a compiler keeps this node as long as the layer's own."""

from typing import NamedTuple

from torch import Tensor

from octavo.quant.proto import TensorProto
from octavo.runtime.contract import ForwardResult, Layer
from octavo.scaling.delayed_scaling import raise_amax
from octavo.values import Value, register


@register("raise-amax")
class Config(Value):
    pass


class Inputs(NamedTuple):
    scale: Tensor
    amax: Tensor  # [1], that the sibling observed
    running_amax: Tensor  # [1], of this layer's x


class RaiseAmaxLayer(Layer):
    """Raise a running amax, and pass a scale on."""

    def forward(self, config: Config, inputs: Inputs) -> ForwardResult:
        raise_amax(inputs.running_amax, inputs.amax)
        return ForwardResult((inputs.scale.clone(),), (), ())

    def abstract(self, config: Config, inputs: Inputs) -> ForwardResult:
        scale = inputs.scale
        return ForwardResult((TensorProto(tuple(scale.shape), scale.dtype, scale.device),), (), ())

    def keeps_state(self, config: Config) -> bool:
        return True


layer = RaiseAmaxLayer(Config, Inputs)
