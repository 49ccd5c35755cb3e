"""Kinds of tensors that torch has besides plain ones."""

from typing import Any


def is_sharded(tensor: Any) -> bool:
    """Whether it is a DTensor: FSDP2's, which are whole by the time of a call, or tensor parallelism's."""
    return is_dtensor(type(tensor))


def is_dtensor(kind: type) -> bool:
    return kind.__name__ == "DTensor" and kind.__module__.startswith("torch.distributed")
