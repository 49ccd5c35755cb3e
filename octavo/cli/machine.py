"""The machine that a report describes: versions and devices."""

import platform
from argparse import ArgumentParser
from typing import Any

import torch

from octavo.errors import UnsupportedHardware
from octavo.version import __version__, installed


def describe(device: torch.device) -> dict[str, Any]:
    """Return the versions of the software, and facts about the device."""
    facts: dict[str, Any] = {
        "octavo": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": installed("triton"),
        "cuda": torch.version.cuda,
        "device": str(device),
        "gpu": None,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "gpu": properties.name,
            "capability": f"SM{properties.major}{properties.minor}",
            "memory_gib": round(properties.total_memory / 2**30, 1),
        }
    return facts


def add_device(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--device", default=None, help="cpu, or cuda:0 and so on; default: the GPU if there is one, else the CPU"
    )


def parse_device(name: str | None) -> torch.device:
    """Return the device of that name; None is the GPU if there is one, else the CPU."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        known = device.type in ("cpu", "cuda")
    except RuntimeError:
        known = False
    if not known:
        raise UnsupportedHardware(f"There is no device called {name!r}. Use cpu or cuda[:index].")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UnsupportedHardware(f"torch sees no GPU here, so there is no {name}. Use --device cpu.")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if device.type == "cuda" and device.index >= torch.cuda.device_count():
        last = torch.cuda.device_count() - 1
        raise UnsupportedHardware(f"There is no GPU {device.index} here, the last is cuda:{last}. Use one up to that.")
    return device
