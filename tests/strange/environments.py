"""The environments of the harness. Each is a state of torch, or something that is done to a layer, and must leave no
trace in what the layer computes. Adding one is a line of `ENVIRONMENTS`."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch

Enter = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Environment:
    """A state of torch, by when a run is in it. `harness.record_of` has the order of events."""

    name: str
    around: Enter = nullcontext  # from before the layer is built until after its last step
    during: Enter = nullcontext  # for one step, after one outside
    between: Callable[[Any], None] = lambda run: None  # between two steps; it may replace `run.module`
    may_differ: tuple[str, ...] = ()  # patterns of the names, in a record, of values that the environment changes
    needs_gpu: bool = False

    def __str__(self) -> str:
        return self.name


# -- states of torch ---------------------------------------------------------------------------------------------------


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


# -- environments ------------------------------------------------------------------------------------------------------


def whole_run(name: str, enter: Enter, **others: Any) -> Environment:
    return Environment(f"{name}, whole run", around=enter, **others)


def one_step(name: str, enter: Enter, **others: Any) -> Environment:
    return Environment(f"{name}, one step", during=enter, **others)


def one_call(name: str, enter: Enter, **others: Any) -> Environment:
    """The layer is called once more between two steps, and what it returns is dropped."""

    def between(run: Any) -> None:
        with enter():
            run.extra_call()

    return Environment(f"{name}, one call", between=between, **others)


# a mixture counts the tokens of every call in two buffers, and the first microbatch of several writes a cached weight
WRITTEN = ("version of *load", "version of *dropped", "version of *weight_row_*", "version of *weight_column_*")
ENVIRONMENTS: tuple[Environment, ...] = (
    *[place(name, enter) for name, enter in DEFAULTS.items() for place in (whole_run, one_step)],
    *[place(name, enter, needs_gpu=True) for name, enter in GPU_DEFAULTS.items() for place in (whole_run, one_step)],
    *[one_call(name, enter, may_differ=WRITTEN) for name, enter in WITHOUT_GRADIENTS.items()],
)
