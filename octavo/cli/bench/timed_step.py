"""The training step of a module that every suite times, and the memory it takes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from octavo.model.refresh import refresh_weights
from octavo.model.step import step as end_step


def training_step(
    module: nn.Module, x: Tensor, dy: Tensor, call: Callable[[Tensor], Tensor] | None = None
) -> Callable[[], None]:
    """Returns a function that sets gradients to None and runs one forward and backward. `call` runs in place of the
    module, such as its compiled form."""
    parameters, forward = list(module.parameters()), module if call is None else call

    def step() -> None:
        x.grad = None
        for p in parameters:
            p.grad = None
        forward(x).backward(dy)

    return step


def settled_step(module: nn.Module, x: Tensor, dy: Tensor) -> Callable[[], None]:
    """Returns `training_step` after delayed scales follow the data, as in training: codes near zero multiply faster."""
    step = training_step(module, x, dy)
    for _ in range(2):
        step()
        end_step(module)
        refresh_weights(module)  # no optimizer owns the weights, so the end of a step invalidates cached codes
    return step


def kept_mib(module: nn.Module, x: Tensor) -> float:
    """Returns the MiB that forward allocates and keeps for backward, its output included."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    y = module(x)
    torch.cuda.synchronize()
    kept = torch.cuda.memory_allocated() - before
    del y
    return kept / 2**20


def kernels_ms(step: Callable[[], object], steps: int = 5) -> list[dict[str, Any]]:
    """Returns the milliseconds of each GPU kernel in one step, the longest first."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    found = [
        {"kernel": e.key, "calls": e.count / steps, "ms": e.self_device_time_total / steps / 1e3}
        for e in profile.key_averages()
    ]
    return sorted((e for e in found if e["ms"] > 0), key=lambda e: -e["ms"])


def peak_mib(step: Callable[[], object]) -> float:
    """Returns the most MiB that one step allocates on the GPU beyond what was allocated before. Warm it up first."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20
