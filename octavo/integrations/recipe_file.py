"""The state of recipes as one safetensors file, beside what another package saves."""

import hashlib
import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from octavo._torch.modules import plain_name
from octavo.checkpoints import tensor_file
from octavo.checkpoints.checkpoint import unwrapped
from octavo.errors import UnsupportedHardware
from octavo.model.state_dicts import load_state_dict, state_dict

FINGERPRINT = "sha256"  # the text in the file's metadata


def name_of(process: int, processes: int) -> str:
    """Return the name of a process's file: processes observe other tensors, and have states of their own."""
    return "octavo.safetensors" if processes == 1 else f"octavo-{process}.safetensors"


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the state of a model's recipes, by names without those of wrappers."""
    return {plain_name(name): tensor for name, tensor in state_dict(unwrapped(model)).items()}


def fingerprint(state: Mapping[str, Tensor]) -> str:
    """Return a hash of names, dtypes, shapes and values."""
    digest = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor_file.bytes_of(tensor))
    return digest.hexdigest()


def save(path: Path, model: nn.Module) -> None:
    """Write the file. It replaces an older one at once: a reader sees either the one or the other."""
    state = state_of(model)
    partial = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        tensor_file.write(partial, state, {FINGERPRINT: fingerprint(state)})
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def fingerprint_in(path: Path) -> str:
    """Return the fingerprint of the state in a file; empty if there is no file."""
    return tensor_file.read(path).metadata.get(FINGERPRINT, "") if path.is_file() else ""


def load(path: Path, model: nn.Module) -> None:
    """Load the file. It raises, and changes nothing, if the file is damaged or of other recipes."""
    file = tensor_file.read(path)
    if file.metadata.get(FINGERPRINT) != fingerprint(file.tensors):
        raise tensor_file.damaged(path, "its tensors do not have the SHA-256 that they were written with")
    load_state_dict(unwrapped(model), file.tensors)


def missing(package: str, what: str) -> UnsupportedHardware:
    """Return the error for a class or function whose package is not installed."""
    return UnsupportedHardware(f"{what} needs the package {package}, which is not installed: pip install {package}.")
