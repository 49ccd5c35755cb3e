"""How a report about a model was made: the model, its device, versions, and the command."""

import torch
from torch import nn

from octavo.text import one_line
from octavo.version import __version__


def subject(model: nn.Module) -> str:
    """Return a model's class, its number of parameters and its device."""
    parameters = list(model.parameters())
    device = parameters[0].device if parameters else torch.device("cpu")
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"a {device.type.upper()}"
    return f"{one_line(type(model).__name__)} with {_number(sum(p.numel() for p in parameters))} parameters, on {where}"


def provenance(subject: str, measured: str, command: str) -> str:
    """Return the sentences under a headline."""
    said = f"{subject}; {measured}. octavo {__version__}, torch {torch.__version__}"
    return said + (f": {command}" if command else ".")


def _number(count: int) -> str:
    for unit, name in ((10**9, "billion"), (10**6, "million")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count:,}"
