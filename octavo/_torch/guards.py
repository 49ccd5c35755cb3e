"""torch.compile's own check of tensors: whether others have the layout of given ones, in one call of C++.

It compares type, dispatch keys (which tell the device's type, views that negate, batches), dtype, device, whether a
gradient is wanted, sizes and strides, and no address. A wrong call of it ends the process, so it is made only with the
versions of torch in TRIED.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._C._dynamo import guards

TRIED = ("2.11.", "2.13.")


def are_tried() -> bool:
    """Whether this version of torch has the check, and in the form that is called here."""
    return torch.__version__.startswith(TRIED) and hasattr(guards, "TensorGuards")


def same_layouts(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """Return a function that says whether as many tensors have the layouts of these. It keeps none of these."""
    sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
    # the stubs say a list of sizes, torch.compile and the check itself take one for each tensor
    known = guards.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)  # type: ignore[arg-type]
    check: Callable[..., bool] = known.check
    return check
