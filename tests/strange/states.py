"""States of torch that a program sets for a block of code. None of them may change what a layer computes."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

Enter = Callable[[], AbstractContextManager[Any]]


@contextmanager
def default_device(name: str) -> Iterator[None]:
    if name == "cuda":
        torch.cuda.init()  # torch.utils.checkpoint of CPU tensors refuses to be the first to do so
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def deterministic() -> Iterator[None]:
    """Operators without a deterministic form raise, and memory without values is filled with NaN."""
    before, fill = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it torch multiplies no matrices on a GPU
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = True
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before)
            torch.utils.deterministic.fill_uninitialized_memory = fill


@contextmanager
def device_block() -> Iterator[None]:
    torch.cuda.init()
    with torch.device("cuda"):
        yield


@contextmanager
def one_rank() -> Iterator[None]:
    """A world of this process alone. A block inside of another joins its world."""
    if dist.is_initialized():
        yield
        return
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def swapped_on_conversion() -> Iterator[None]:
    """`module.to` swaps a parameter for its converted copy, where it otherwise replaces the parameter's data."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


@contextmanager
def strict_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


class WatchedFunctions(TorchFunctionMode):
    """Sees every function of torch that Python calls."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class WatchedOperators(TorchDispatchMode):
    """Sees every operator that runs."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def counted() -> FlopCounterMode:
    return FlopCounterMode(display=False)


def profiled() -> torch.profiler.profile:
    return torch.profiler.profile(record_shapes=True)


def copied_when_saved() -> torch.autograd.graph.saved_tensors_hooks:
    """Backward gets copies of all saved tensors, as from an offloader. On a CPU save_on_cpu copies nothing."""
    return torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone)


# a layer trains in these, and does so in the same bits
DEFAULTS: dict[str, Enter] = {
    "default device meta": lambda: default_device("meta"),
    "with device meta": lambda: torch.device("meta"),
    "default dtype float64": lambda: default_dtype(torch.float64),
    "default dtype float16": lambda: default_dtype(torch.float16),
    "default dtype bfloat16": lambda: default_dtype(torch.bfloat16),
    "deterministic algorithms": deterministic,
}
GPU_DEFAULTS: dict[str, Enter] = {
    "default device cuda": lambda: default_device("cuda"),
    "with device cuda": device_block,
}
# in these no layer trains: it is called
WITHOUT_GRADIENTS: dict[str, Enter] = {"no_grad": torch.no_grad, "inference mode": torch.inference_mode}
