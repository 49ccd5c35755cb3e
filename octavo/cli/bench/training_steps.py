"""The training step that every suite times: how it is made, compiled and warmed up, and what it takes.

On a CPU the measurements only show that a step runs: a few readings by the clock, no memory, graphs without generated
code."""

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from octavo._torch.compilation import fresh_cache
from octavo.cli.timing import REPEATS, WARMUP, eager_ms
from octavo.model.attach import attach
from octavo.model.layer_lookup import layers
from octavo.model.refresh import refresh_weights
from octavo.model.step import step as end_step
from octavo.optim.adamw import AdamW
from octavo.weights.quantized_weight import QuantizedWeight

CPU_REPEATS = 3
LEARNING_RATE = 1e-4
CUDA = torch.device("cuda")

Step = Callable[[], object]


def batch(tokens: int, inputs: int, outputs: int, device: torch.device | str = CUDA) -> tuple[Tensor, Tensor]:
    """Return x and dy of a layer, in bfloat16."""
    x = torch.randn(tokens, inputs, device=device, dtype=torch.bfloat16, requires_grad=True)
    return x, torch.randn(tokens, outputs, device=device, dtype=torch.bfloat16) * 1e-2


def training_step(
    module: nn.Module, x: Tensor, dy: Tensor, call: Callable[[Tensor], Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> Callable[[], None]:  # fmt: skip
    """Return a function that sets gradients to None and runs one forward and backward, and then the optimizer's step.
    `call` runs in place of the module, such as its compiled form."""
    parameters, forward = list(module.parameters()), module if call is None else call

    def step() -> None:
        x.grad = None
        for p in parameters:
            p.grad = None
        forward(x).backward(dy)
        if optimizer is not None:
            optimizer.step()

    return step


def calibrated_step(
    module: nn.Module, x: Tensor, dy: Tensor, optimizer: torch.optim.Optimizer | None = None
) -> Callable[[], None]:
    """Return `training_step` after delayed scales follow the data, as in training: codes near zero multiply faster."""
    step = training_step(module, x, dy, optimizer=optimizer)
    for _ in range(2):
        step()
        if optimizer is None:
            end_step(module)
            refresh_weights(module)  # no optimizer owns the weights, so the end of a step invalidates cached codes
    return step


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    """Return octavo.optim.AdamW if a weight of the module is codes, else torch's, fused on a GPU: in bfloat16 both, so
    that one moves the bytes of the other. It ends Octavo's steps, too."""
    parameters = list(module.parameters())
    optimizer: torch.optim.Optimizer
    if any([isinstance(p, QuantizedWeight) for p in parameters]):
        optimizer = AdamW(parameters, lr=LEARNING_RATE, master="bfloat16", states="bfloat16")
    else:
        optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)
    if any(True for _ in layers(module)):
        attach(module, optimizer)
    return optimizer


# -- compiled ----------------------------------------------------------------------------------------------------------


def compiled(module: nn.Module, device: torch.device, mode: str = "default") -> Callable[..., Any]:
    """Return the module compiled as a single graph."""
    settings: dict[str, Any] = {"mode": mode} if device.type == "cuda" else {"backend": backend(device)}
    return torch.compile(module, fullgraph=True, **settings)


def backend(device: torch.device) -> str:
    """Return the name of the compiler behind torch.compile."""
    return "inductor" if device.type == "cuda" else "aot_eager"


def no_caches(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which the compiler reads no results of earlier runs."""
    return fresh_cache() if device.type == "cuda" else nullcontext()


# -- measurements ------------------------------------------------------------------------------------------------------


def step_ms(
    step: Step, device: torch.device, *, warmup: int = WARMUP, repeats: int = REPEATS
) -> tuple[float, list[float]]:
    """Return the median milliseconds from step to step, and every reading."""
    if device.type == "cuda":
        return eager_ms(step, warmup=warmup, repeats=repeats)
    readings = [step_seconds(step, device) * 1e3 for _ in range(CPU_REPEATS)]
    return statistics.median(readings), readings


def step_seconds(step: Step, device: torch.device) -> float:
    """Return the wall-clock seconds of one step."""
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def peak_mib(step: Step, device: torch.device = CUDA) -> float | None:
    """Return the most MiB that a warm step allocates beyond what was allocated before; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def allocated() -> int:
    """Return the bytes of GPU memory that tensors have now; 0 without a GPU."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def held_mib(before: int, module: nn.Module, *others: Tensor) -> float:
    """Return the MiB that were allocated since `before` and stay between steps: parameters, their codes, the states of
    an optimizer. It drops all gradients, and leaves out the `others`."""
    for t in (*module.parameters(), *others):
        t.grad = None
    torch.cuda.synchronize()
    return (torch.cuda.memory_allocated() - before - sum([t.nbytes for t in others])) / 2**20


def kept_mib(module: nn.Module, x: Tensor) -> float:
    """Return the MiB that forward allocates and keeps for backward, its output included."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    y = module(x)
    torch.cuda.synchronize()
    kept = torch.cuda.memory_allocated() - before
    del y
    return kept / 2**20


def kernels_ms(step: Step, device: torch.device = CUDA, steps: int = 5) -> list[dict[str, Any]]:
    """Return the milliseconds of each GPU kernel in one step, the longest first; nothing on a CPU."""
    if device.type != "cuda":
        return []
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
