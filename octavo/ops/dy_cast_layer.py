"""The cast of a rank's rows of dy, before their codes are gathered. Codes are auxiliary outputs, y is an empty tensor,
and there is no gradient."""

from typing import Any, NamedTuple

from torch import Tensor

from octavo._torch.autograd import preserve_version_counter
from octavo.communication.all_reduced_amaxes import WHOLE, number_of
from octavo.ops.operands import DENSE
from octavo.quant.proto import TensorProto
from octavo.quant.quantizer import CastArgs, Quantizer
from octavo.quant.tensorwise import Tensorwise
from octavo.runtime.contract import ForwardResult, Layer
from octavo.values import Value, register


@register("dy-cast")
class Config(Value):
    spec: Quantizer = Tensorwise()


class Inputs(NamedTuple):
    dy: Tensor
    inverse_scale: Tensor | None = None  # delayed
    running_amax: Tensor | None = None  # delayed, in training; raised
    all_reduced: Tensor | None = None  # the amax of dy, one element, as bits


class DyCastLayer(Layer):
    """Cast the rows of dy of one rank."""

    def auxiliary(self, config: Config) -> int:
        return 3 if config.spec.two_level else 2

    def forward(self, config: Config, inputs: Inputs) -> ForwardResult:
        dy, spec, running_amax = inputs.dy, config.spec, inputs.running_amax
        arguments = CastArgs(inverse_scale=inputs.inverse_scale, running_amax=running_amax)
        if inputs.all_reduced is not None:
            amax = number_of(inputs.all_reduced)
            amax = amax.view(1) if spec.two_level else amax.view(1, 1)
            arguments = CastArgs(amax=(amax, amax if spec.block == WHOLE else None))
        # a graph in flight may have saved the running amax
        with preserve_version_counter(() if running_amax is None else (running_amax,)):
            q = DENSE.quantize(dy, spec, None, arguments)[0]
        assert q is not None
        return ForwardResult((dy.new_empty(0),), tuple(q.tensors()), ())

    def abstract(self, config: Config, inputs: Inputs) -> ForwardResult:
        dy: Any = inputs.dy
        q = config.spec.proto(dy)
        parts = tuple([p for p in (q.codes, q.scale, q.global_scale) if p is not None])
        return ForwardResult((TensorProto((0,), dy.dtype, dy.device),), parts, ())

    def keeps_state(self, config: Config) -> bool:
        return True


layer = DyCastLayer(Config, Inputs)
