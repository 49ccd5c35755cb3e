"""What every module asks of its input before it reads it."""

from typing import Any

import torch
from torch import Tensor
from torch.fx import Proxy

from octavo.errors import UnsupportedDtype
from octavo.formats import FLOATS
from octavo.fuser.operation import Edge, check_layout, refuse_symbol
from octavo.lower.held import HeldWeight, refuse_codes
from octavo.lower.tensors import refuse_strange
from octavo.lower.tensors import strange as strange


def check_input(title: str, x: Any) -> None:
    """`x` is a tensor, or something else with a shape and a dtype that stands for one."""
    if type(x) is not Tensor and isinstance(x, Proxy):  # some tracers' have a dtype
        refuse_symbol(title)
    dtype = getattr(x, "dtype", None)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedDtype(f"{title} takes a tensor, got {type(x).__name__}. Make one: torch.as_tensor(...).")
    if type(x) is HeldWeight:  # isinstance asks the metaclass of tensors, ten times as long
        refuse_codes(title)
    if dtype not in FLOATS:
        raise UnsupportedDtype(f"{title} takes float32, bfloat16 or float16, got {dtype}. Cast x first.")
    # a run has asked before, and of most tensors there is nothing more to ask
    if type(x) is not Edge and (type(x) is not Tensor or x.is_nested or x.layout is not torch.strided):
        check_layout(title, x)


def check_weight(title: str, weight: Tensor) -> None:
    """Refuse a weight, or a bias, that is no plain tensor."""
    if why := strange(weight):
        refuse_strange(title, why)
