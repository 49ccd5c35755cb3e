"""Exports of modules that torch may not be able to export. torch 2.11 then leaves a hook on all modules behind, and
compiles none of them any more."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn


@contextmanager
def kept_hooks() -> Iterator[None]:
    """A block that leaves the hooks on all modules as they were."""
    hooks = nn.modules.module._global_buffer_registration_hooks
    before = dict(hooks)
    try:
        yield
    finally:
        hooks.clear()
        hooks.update(before)


def attempt_export(module: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Exports a module; whether a graph can be made of it is another question."""
    with kept_hooks(), suppress(Exception):
        torch.export.export(module, inputs)
