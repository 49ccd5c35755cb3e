"""nn.Module's own tables."""

from collections.abc import Iterable

from torch import nn


def drop_buffers(module: nn.Module, names: Iterable[str]) -> None:
    for name in names:
        module._buffers.pop(name, None)
        module._non_persistent_buffers_set.discard(name)
