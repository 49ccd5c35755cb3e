"""One training step of a module, as every suite times it, and the memory it takes."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from octavo.model.step import step as end_step
from octavo.model.weights import refresh_weights


def training_step(
    module: nn.Module, x: Tensor, dy: Tensor, call: Callable[[Tensor], Tensor] | None = None
) -> Callable[[], None]:
    """One forward and backward, from gradients that are None to gradients that are there. `call` stands for the module
    where something else runs it: a compiled one."""
    parameters, forward = list(module.parameters()), module if call is None else call

    def step() -> None:
        x.grad = None
        for p in parameters:
            p.grad = None
        forward(x).backward(dy)

    return step


def settled_step(module: nn.Module, x: Tensor, dy: Tensor) -> Callable[[], None]:
    """The same, once delayed scales follow the data, as in training: codes near zero multiply faster."""
    step = training_step(module, x, dy)
    for _ in range(2):
        step()
        end_step(module)
        refresh_weights(module)  # no optimizer owns the weights, so a cache is not trusted past the end of a step
    return step


def peak_mib(step: Callable[[], None]) -> float:
    """The most that one step allocates on the GPU, beyond what was there before it. Run it once before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20
