"""Writes to weights that are codes with stochastic rounding, for an optimizer that keeps no other values of them."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from octavo.errors import UnsupportedConfig
from octavo.formats import E4M3
from octavo.kernels.stochastic_codes import stochastic_codes
from octavo.quant.quantizer import Quantizer
from octavo.weights.code_memory import codes_of, group_slices, room_for


def check_stochastic(weight: Any) -> None:
    """Refuse codes that are not rounded stochastically."""
    spec = weight.kind.pair[0]
    if spec.fmt is not E4M3:
        raise UnsupportedConfig(
            f"master='none' rounds codes of E4M3, and this weight has {spec.fmt.name} in {weight.kind.recipe}. Use "
            "master='bfloat16'."
        )
    # two roundings of one value would be two weights
    if weight.kind.columns:
        raise UnsupportedConfig(
            "master='none' writes row codes alone, and this weight has columns too. Leave keep_columns out."
        )


def write_stochastically(weight: Any, values: Tensor, amaxes: Tensor | None, seed: Tensor) -> None:
    """Write float32 values of the whole weight, or of the group: scales as a cast makes them, and codes that are
    rounded up or down with the probability of the distance."""
    # scales first, by a cast that rounds to nearest; its codes are overwritten
    weight.write(values, amaxes)
    spec = weight.kind.pair[0]
    for part, codes, scale, first in _matrices(weight, values, spec):
        m, k = part.shape
        factors = scale if spec.scale_format is None else spec.scale_format.decode(scale)
        block = spec.block[0] or -(-m // scale.shape[0]), spec.block[1] or k
        stochastic_codes(part, factors.contiguous(), block, codes[:m], seed, first)


def _matrices(weight: Any, values: Tensor, spec: Quantizer) -> Iterator[tuple[Tensor, Tensor, Tensor, int]]:
    """Yield matrices of values with their codes and scales, and the number of their first row. Groups without padding
    are one matrix."""
    if weight.group is not None or values.dim() == 2:
        codes, scale, *_ = weight.own_codes()
        yield values, codes, scale, 0
        return
    codes, scale = codes_of(weight, "row")[:2]
    groups, n, k = values.shape
    # without padding the groups are one matrix: one launch
    if codes.shape[0] == groups * n:
        yield values.view(-1, k), codes, scale, 0
        return
    alone = room_for(weight.kind, weight.dtype, torch.device("meta"), groups=1)[0]
    for g in range(groups):
        own, factors, *_ = group_slices(codes_of(weight, "row"), alone, g)
        yield values[g], own, factors, g * n
