"""What every module asks of its input before it reads it."""

from typing import Any

import torch

from octavo.errors import UnsupportedDtype
from octavo.formats import FLOATS
from octavo.fuser.operation import Edge, check_layout
from octavo.lower.held import HeldWeight, refuse_codes


def check_input(title: str, x: Any) -> None:
    """`x` is a tensor, or something else with a shape and a dtype that stands for one."""
    dtype = getattr(x, "dtype", None)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedDtype(f"{title} takes a tensor, got {type(x).__name__}. Make one: torch.as_tensor(...).")
    if type(x) is HeldWeight:  # isinstance asks the metaclass of tensors, ten times as long
        refuse_codes(title)
    if dtype not in FLOATS:
        raise UnsupportedDtype(f"{title} takes float32, bfloat16 or float16, got {dtype}. Cast x first.")
    if type(x) is not Edge:  # a run has asked before
        check_layout(title, x)
