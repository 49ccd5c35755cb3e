"""Check a layer's state from a checkpoint, before any of it is written."""

from collections.abc import Mapping

import torch
from torch import Tensor

from octavo._torch.fakes import FakeTensor
from octavo.errors import UnsupportedConfig, UnsupportedDevice, UnsupportedShape
from octavo.scaling.delayed_scaling import DIRECTIONS, OPERANDS
from octavo.scaling.delayed_state import KEPT, check_kept

ROUNDING = "rounding.seed"


def check_state(state: Mapping[str, object], slots: int, path: str = "") -> None:
    """Refuse a state that no layer with `slots` slots for each operand has exported; the message names the `path`."""
    where = f"{path}." if path else ""
    for direction in DIRECTIONS:
        prefix = f"scaling.{direction}."
        kept = {name: state[prefix + name] for name in KEPT if prefix + name in state}
        check_kept(kept, OPERANDS[direction] * slots, where + prefix)
    if ROUNDING in state:
        seed, name = state[ROUNDING], where + ROUNDING
        if not isinstance(seed, Tensor) or seed.shape != (2,) or seed.dtype != torch.int64:
            raise UnsupportedShape(f"{name} is an int64 tensor [seed, step], got {seed!r}.")
        if seed.is_meta:
            raise UnsupportedDevice(f"{name} is on the meta device, and has no values. Load it from a file.")
        if not isinstance(seed, FakeTensor) and seed[1] < 0:
            raise UnsupportedConfig(f"{name} is [seed, step] with a step from 0 up, got {seed.tolist()}.")
