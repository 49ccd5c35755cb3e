"""One call, and few kernels, for lists of tensors: torch's optimizers are built on these functions."""

import torch

foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
