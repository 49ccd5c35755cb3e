"""The version of this package, the oldest torch it runs on, and the versions it was tried with, checked before anything
else is imported."""

from importlib import metadata

import torch

__version__ = "0.1.0"
OLDEST_TORCH = (2, 11)
# the versions of docs/compatibility.md; on others every fast path still checks itself
TRIED = {"torch": ((2, 11), (2, 15)), "triton": ((3, 6), (3, 9))}


def parse(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


if parse(torch.__version__) < OLDEST_TORCH:
    raise ImportError(
        f"Octavo {__version__} needs torch {'.'.join(map(str, OLDEST_TORCH))} or newer, found {torch.__version__}. "
        "Upgrade torch."
    )


def installed(package: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def untried() -> list[str]:
    """Return the installed torch and Triton that are newer, or older, than the versions that Octavo was tried with."""
    found = []
    for name, (oldest, newest) in TRIED.items():
        version = torch.__version__ if name == "torch" else installed(name)
        if version is not None and not oldest <= parse(version) <= newest:
            first, last = (".".join(map(str, end)) for end in (oldest, newest))
            found.append(f"{name} {version} (tried: {first} to {last})")
    return found
