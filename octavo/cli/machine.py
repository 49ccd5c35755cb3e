"""What machine this is: versions and devices, as every report states them."""

import importlib.metadata
import platform
from typing import Any

import torch

from octavo.version import __version__


def installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe(device: torch.device) -> dict[str, Any]:
    """Versions, and the device that was asked for."""
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


def default_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
