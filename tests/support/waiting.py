"""A guard against calls that wait for the device."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever waits for the device raises. Shown first with a number that is read: else nothing would be noticed.
    While a CUDA graph is captured a wait is an error of CUDA's own, and ends the capture."""
    shown = not torch.cuda.is_current_stream_capturing()
    if shown:
        number = torch.ones(1, device="cuda")
        torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        if shown:
            with pytest.raises(RuntimeError, match="synchronizing"):
                number.item()
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
