"""GEMMs of torch without a public function, or with a slower one."""

from collections.abc import Callable
from typing import Any

import torch

scaled_mm = torch._scaled_mm  # FP8 codes with scales: the kernels of F.scaled_mm in two thirds of its host time
grouped_mm = torch._grouped_mm  # bfloat16 in groups whose sizes stay on the device

# operators and their functions, a shorter way to the same kernels: replay calls these
FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten._scaled_mm.default: torch._scaled_mm,
    torch.ops.aten._scaled_mm_v2.default: torch._scaled_mm_v2,
}
