"""The current device and stream by number. torch.cuda's functions check that CUDA is initialised and make objects, at
every call. Builds of torch without CUDA have none of these names, and no caller gets to them there."""

from typing import Any

import torch

current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
set_device: Any = getattr(torch._C, "_cuda_setDevice", None)  # gives a new thread the device's context too
current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # the address that a launch takes
