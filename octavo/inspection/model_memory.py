"""The memory of a model's training step, by module: what stays between steps, and what forward saves for backward.

Parameters, states and gradients are counted, not measured. What forward saves is seen by hooks of saved tensors in one
eager call: each tensor belongs to the module whose forward was running, found by the frames of Python, so that hooks of
modules do not keep operations from running together.
"""

import gc
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from octavo.model.offload import storages
from octavo.text import columns, path_names
from octavo.weights.master_values import values_bytes
from octavo.weights.quantized_weight import QuantizedWeight

KINDS = ("weights", "cached_codes", "values", "states", "gradients", "saved")
_UNIT = 2**20


@dataclass(frozen=True)
class ModuleMemory:
    """The memory of one module, without that of modules in it, in bytes.

    Args:
        path: its name in the model.
        weights: parameters and buffers; of a weight that is codes, its codes and scales.
        cached_codes: codes that are cached beside a weight, and other state of a recipe.
        values: float32 values that Octavo keeps beside codes for an optimizer that knows nothing of codes.
        states: what the optimizer keeps for its parameters, master copies included.
        gradients: the gradients of its parameters, where they are given: `.grad` or `main_grad`.
        saved: what its forward saves for backward and nothing else holds.
    """

    path: str
    weights: int = 0
    cached_codes: int = 0
    values: int = 0
    states: int = 0
    gradients: int = 0
    saved: int = 0

    @property
    def total(self) -> int:
        """The sum of all of it."""
        return sum(getattr(self, kind) for kind in KINDS)


@dataclass(frozen=True)
class ModelMemory:
    """The memory of a model's step. It prints as a table in MiB.

    Args:
        modules: the modules that have some, in the order of the model.
        predicted_peak: bytes beyond weights and states at the end of forward, with the gradients: saved tensors and
            gradients. What operations allocate and free while they run comes on top.
        measured_peak: the same as the GPU's allocator measured it in an eager step, at its highest; None on a CPU. The
            workspaces that libraries such as cuBLAS keep from their first call on are not counted.
    """

    modules: tuple[ModuleMemory, ...]
    predicted_peak: int
    measured_peak: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain data, for JSON.

        Returns:
            The fields by name.
        """
        return {**vars(self), "modules": [vars(module) for module in self.modules]}

    def __str__(self) -> str:
        equal: dict[tuple[int, ...], list[str]] = {}
        for module in self.modules:
            equal.setdefault(tuple(getattr(module, kind) for kind in KINDS), []).append(module.path)
        rows = [("memory, MiB", "count", *[kind.replace("_", " ") for kind in KINDS])]
        rows += [
            (path_names(paths), str(len(paths)), *[_mib(size * len(paths)) for size in sizes])
            for sizes, paths in equal.items()
        ]
        rows.append(("in all", str(len(self.modules)), *[_mib(self.sum_of(kind)) for kind in KINDS]))
        measured = "" if self.measured_peak is None else f", measured {_mib(self.measured_peak)}"
        peak = f"Peak beyond weights and states, MiB: predicted {_mib(self.predicted_peak)}{measured}."
        return "\n".join([*columns(rows), peak])

    def sum_of(self, kind: str) -> int:
        """Add up one kind of memory over all modules.

        Args:
            kind: a field of `ModuleMemory`, such as "weights".

        Returns:
            The number of bytes.
        """
        return sum(getattr(module, kind) for module in self.modules)


def measure(model: nn.Module, copied: nn.Module, step: Callable[[], None], optimizer: Any) -> ModelMemory:
    """Return the memory of a model, and of what `step` saves, which calls a copy of it forward and backward."""
    saved, peak = _saved(copied, step)
    modules = tuple(_memory(path, module, optimizer, saved) for path, module in model.named_modules())
    gradients = sum(module.gradients for module in modules)
    counted = tuple(module for module in modules if module.total)
    return ModelMemory(counted, sum(saved.values()) + gradients, peak)


def _memory(path: str, module: nn.Module, optimizer: Any, saved: dict[str, int]) -> ModuleMemory:
    own = list(module.parameters(recurse=False))
    states = [] if optimizer is None else [optimizer.state[p] for p in own if p in optimizer.state]
    hidden = module._modules.get("_hidden") or module.__dict__.get("_hidden")
    return ModuleMemory(
        path,
        weights=sum(map(_bytes, (*own, *module.buffers(recurse=False)))),
        cached_codes=0 if hidden is None else sum(map(_bytes, hidden.buffers())),
        values=sum(values_bytes(p) for p in own if isinstance(p, QuantizedWeight)),
        states=sum(_bytes(t) for state in states for t in state.values() if isinstance(t, Tensor)),
        gradients=sum(p.numel() * p.element_size() for p in own if p.requires_grad),
        saved=saved.get(path, 0),
    )


def _bytes(t: Tensor) -> int:
    """Return the bytes of a tensor; a weight that is codes has those of its codes and scales."""
    return t.untyped_storage().nbytes() if isinstance(t, QuantizedWeight) else t.numel() * t.element_size()


def _mib(size: int) -> str:
    return f"{size / _UNIT:,.1f}"


def _saved(model: nn.Module, step: Callable[[], None]) -> tuple[dict[str, int], int | None]:
    """Return the bytes that a forward saves, by the path of the module, and the peak that the allocator measured."""
    paths = {id(module): path for path, module in model.named_modules()}
    parameters, state = storages(model)
    held = parameters | state
    found: dict[str, int] = {}

    def pack(t: Tensor) -> Tensor:
        for part in _tensors(t):
            if (place := _storage(part)) not in held:
                held.add(place)
                path = _running(paths)
                found[path] = found.get(path, 0) + part.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        step()
    return found, _peak(model, step)


def _peak(model: nn.Module, step: Callable[[], None]) -> int | None:
    """Return the bytes that the allocator gives out in a step at its highest; None on a CPU. An eager step must have
    run before: cuBLAS keeps its workspaces from its first call on, and they would count as a part of this one. No hooks
    see the step, for their tensors would live longer. Gradients are a part of the peak: those of the step before go."""
    device = next((p.device for p in model.parameters() if p.is_cuda), None)
    if device is None:
        return None
    model.zero_grad(set_to_none=True)
    gc.collect()  # tensors in cycles that the compiler left would be freed during the step, and lower its peak
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    return torch.cuda.max_memory_allocated(device) - before


def _running(paths: dict[int, str]) -> str:
    """Return the path of the innermost module whose code is running."""
    frame = inspect.currentframe()
    while frame is not None:
        path = paths.get(id(frame.f_locals.get("self")))
        if path is not None:
            return path
        frame = frame.f_back
    return ""


def _tensors(t: Tensor) -> list[Tensor]:
    return list(t.tensors().values()) if isinstance(t, QuantizedWeight) else [t]


def _storage(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()
