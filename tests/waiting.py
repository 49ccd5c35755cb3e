"""A guard against calls that wait for the device."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever waits for the device raises. Shown first with a number that is read: else nothing would be noticed."""
    number = torch.ones(1, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing"):
            number.item()
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
