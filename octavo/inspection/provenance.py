"""How a report about a model was made: the model, its recipes, the device, versions, and the command."""

from typing import NamedTuple

import torch
from torch import nn

from octavo.inspection.webpage import Markup, code, facts
from octavo.text import one_line
from octavo.version import __version__, installed


class Subject(NamedTuple):
    """A model and the device that it is on, in words.

    Args:
        model: its class and its number of parameters.
        device: the name of the GPU, or "a CPU".
    """

    model: str
    device: str

    def __str__(self) -> str:
        return f"{self.model}, on {self.device}"


def subject(model: nn.Module) -> Subject:
    """Return a model's class with its number of parameters, and its device."""
    parameters = list(model.parameters())
    device = parameters[0].device if parameters else torch.device("cpu")
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"a {device.type.upper()}"
    return Subject(
        f"{one_line(type(model).__name__)} with {_number(sum(p.numel() for p in parameters))} parameters", where
    )


def versions() -> str:
    """Return the versions of what this process computes with."""
    found = {"octavo": __version__, "torch": torch.__version__, "triton": installed("triton")}
    return ", ".join(f"{name} {version}" for name, version in found.items() if version)


def provenance(
    *, model: str = "", recipes: str = "", measured: str = "", device: str, made_with: str = "", command: str = ""
) -> Markup:
    """Return the facts under a headline, in the same order on every page."""
    rows = [("Model", model), ("Recipe", recipes), ("Measured", measured), ("Device", device)]
    rows += [("Versions", made_with or versions()), ("Command", code(command) if command else "")]
    return facts(rows)


def _number(count: int) -> str:
    for unit, name in ((10**9, "billion"), (10**6, "million")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count:,}"
