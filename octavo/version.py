"""The version of this package, and the oldest torch it runs on, checked before anything else is imported."""

import torch

__version__ = "0.1.0"
OLDEST_TORCH = (2, 11)


def parse(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


if parse(torch.__version__) < OLDEST_TORCH:
    raise ImportError(
        f"Octavo {__version__} needs torch {'.'.join(map(str, OLDEST_TORCH))} or newer, found {torch.__version__}. "
        "Upgrade torch."
    )
