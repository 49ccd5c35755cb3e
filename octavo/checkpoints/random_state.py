"""The state of random number generators: torch's on the CPU and on each GPU, Python's and numpy's."""

import importlib
import random
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from octavo.checkpoints.tensor_file import damaged
from octavo.values import excerpt


def export() -> dict[str, Any]:
    """Return copies of all states. That of a GPU is there if the program uses it, that of numpy if it is imported."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    if "numpy" in sys.modules:
        kind, keys, *rest = importlib.import_module("numpy.random").get_state()
        state["numpy"] = (kind, keys.tolist(), *rest)
    return state


def restorer(path: Path, state: Any) -> Callable[[], None]:
    """Return a function that sets the generators. States of GPUs, and of numpy, that are not here are left out. Raise
    InvalidCheckpoint for a state that a generator refuses; it asks new generators for that."""
    if not isinstance(state, dict) or not {"torch", "python"} <= set(state) <= {"torch", "python", "cuda", "numpy"}:
        raise damaged(path, "it has no state of random numbers")
    numpy: Any = None
    if "numpy" in state:
        with suppress(ImportError):
            numpy = importlib.import_module("numpy.random")
    try:
        gpus = range(min(len(state.get("cuda", ())), torch.cuda.device_count()))
        torch.Generator("cpu").set_state(state["torch"])
        random.Random().setstate(state["python"])
        for i in gpus:
            torch.Generator(device=f"cuda:{i}").set_state(state["cuda"][i])
        if numpy is not None:
            numpy.RandomState().set_state(state["numpy"])
    except Exception as error:  # of whichever kind the generator raises
        raise damaged(path, f"a generator of random numbers refuses its state ({excerpt(str(error))})") from None

    def restore() -> None:
        torch.set_rng_state(state["torch"])
        random.setstate(state["python"])
        for i in gpus:
            torch.cuda.set_rng_state(state["cuda"][i], i)
        if numpy is not None:
            numpy.set_state(state["numpy"])

    return restore
