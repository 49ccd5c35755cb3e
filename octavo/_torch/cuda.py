"""The current device and stream by number, whether the stream is captured, and assertions that the device makes.

torch.cuda's own functions check that CUDA is initialised and make objects, at every call. Builds of torch without CUDA
have none of the private names, and no caller gets to them there.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
set_device: Any = getattr(torch._C, "_cuda_setDevice", None)  # gives a new thread the device's context too
current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # the address that a launch takes
# (condition, message): ends the process where a bool on the device is False, without a host that waits for it
assert_async: Any = torch._assert_async


def is_capturing() -> bool:
    """Return whether a CUDA graph is being captured: its work cannot wait for an answer of the device."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


@contextmanager
def recorded_memory() -> Iterator[None]:
    """Return a block whose allocations torch records, with the lines that made them. No public function does."""
    torch.cuda.memory._record_memory_history("all", context="alloc", stacks="python")
    try:
        yield
    finally:
        torch.cuda.memory._record_memory_history(None)


def memory_events() -> list[dict[str, Any]]:
    """Return what the allocator of the current device did in `recorded_memory`, in order."""
    return torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
