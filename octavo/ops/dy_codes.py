"""The cast of dy before it is gathered: of a row layer under sequence parallelism, where each rank has a part of dy's
rows."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from octavo.communication import collectives
from octavo.communication.all_reduced_amaxes import WHOLE, number_of, scales_whole
from octavo.communication.scattered_sum import Cast
from octavo.ops.matmul import own_amax
from octavo.ops.operands import DENSE
from octavo.quant.qtensor import QTensor
from octavo.quant.quantizer import CastArgs
from octavo.runtime.contract import LAYERS
from octavo.runtime.stage import Stage


def cast_of_dy(stage: Stage, group: str, where: str, row_codes_only: bool) -> Cast | None:
    """Return the cast of this rank's rows of dy, in a call's backward; None if that takes values. Codes of dy serve
    both of its GEMMs if one scale covers the tensor: their transpose is then dw's operand. With `row_codes_only` the
    values of row codes serve both in other recipes too."""
    layer: Any = LAYERS[stage.name]
    config = layer.config(stage.key)
    pair = config.dy_pair
    spec = pair[0] or pair[1]
    takes_codes = [one == spec for one, wanted in zip(pair, (config.wants_dx, config.wants_dw), strict=True) if wanted]
    if config.wants_db:
        return None
    first = pair[0]
    if row_codes_only and first is not None and first.block[0] == 1 and first.shipped and not first.is_stochastic:
        return partial(_cast, first, (), None, group, where)
    if spec is None or spec.block != WHOLE or spec.is_stochastic or not spec.shipped or not all(takes_codes):
        return None
    if config.measures_dy or config.dy_buffers:
        return None
    inputs, buffers = layer.Inputs._make((None, *stage.inputs)), layer.Buffers._make(stage.buffers)
    part = inputs.scaling[config.dy_scaling] if config.recipe.stateful else ()
    return partial(_cast, spec, part, buffers.amax, group, where)


def _cast(spec: Any, part: Any, running_amax: Tensor | None, group: str, where: str, dy: Tensor) -> QTensor:
    if part:
        arguments = CastArgs(inverse_scale=part[0], running_amax=running_amax)
    elif scales_whole(spec):
        bits = own_amax(dy, spec).abs().view(torch.int32)
        amax = number_of(collectives.largest(bits, group, where))
        arguments = CastArgs(amax=(amax, None))
    else:
        arguments = CastArgs()
    q = DENSE.quantize(dy, spec, None, arguments)[0]
    assert q is not None
    return QTensor(q.codes, q.scale, q.spec, tuple(dy.shape), dy.dtype, q.global_scale)
