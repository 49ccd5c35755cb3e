"""The cast of dy before it is gathered: of a row layer under sequence parallelism, where each rank has a part of dy's
rows."""

from typing import Any

from octavo._torch.tracing import while_tracing
from octavo.communication.all_reduced_amaxes import WHOLE
from octavo.communication.scattered_sum import DyCast
from octavo.runtime.contract import LAYERS
from octavo.runtime.stage import Stage


def cast_of_dy(stage: Stage, row_codes_only: bool) -> DyCast | None:
    """Return the cast of this rank's rows of dy, in a call's backward; None if that takes values. Codes of dy serve
    both of its GEMMs if one scale covers the tensor: their transpose is then dw's operand. With `row_codes_only` the
    values of row codes serve both in other recipes too."""
    spec, scaling, amax = _settings(stage.name, stage.key, row_codes_only)
    if not spec:
        return None
    inverse_scale = None if scaling is None else stage.inputs[scaling[0]][scaling[1]]
    return DyCast(spec, inverse_scale, None if scaling is None else stage.buffers[amax])


@while_tracing
def _settings(name: str, key: str, row_codes_only: bool) -> tuple[str, tuple[int, int] | None, int]:
    """Return the quantizer of dy's rows, empty if values are gathered; where its inverse scale is among a stage's
    inputs, if it is delayed; and where the running amax is among its buffers."""
    layer: Any = LAYERS[name]
    config = layer.config(key)
    pair, places = config.dy_pair, (layer.Inputs._fields.index("scaling") - 1, layer.Buffers._fields.index("amax"))
    first, spec = pair[0], pair[0] or pair[1]
    takes_codes = [one == spec for one, wanted in zip(pair, (config.wants_dx, config.wants_dw), strict=True) if wanted]
    if config.wants_db:
        return "", None, 0
    if row_codes_only and first is not None and first.block[0] == 1 and first.shipped and not first.is_stochastic:
        return first.key, None, 0
    if spec is None or spec.block != WHOLE or spec.is_stochastic or not spec.shipped or not all(takes_codes):
        return "", None, 0
    if config.measures_dy or config.dy_buffers:
        return "", None, 0
    return spec.key, (places[0], config.dy_scaling.start) if config.recipe.stateful else None, places[1]
