"""Whether a trainer that loads weights by name has loaded all of a checkpoint in transformers' layout."""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from octavo._torch.modules import plain_name

_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_COMPARED = 16  # numbers at the beginning of a tensor


def left_out(folder: Path, model: nn.Module) -> list[str]:
    """Return the parameters that the checkpoint in a folder does not name, and whose values begin none of the tensors
    that it has besides; none if there is no such checkpoint."""
    paths: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        paths.setdefault(id(p), []).append(plain_name(name))
    files = _files(folder)
    parameters = {id(p): p.detach() for p in model.parameters()}
    missing = {key for key, names in paths.items() if files and not files.keys() & set(names)}
    if not missing:
        return []
    known = {name for names in paths.values() for name in names}
    others = [_beginnings(file, name) for name, file in files.items() if name not in known]
    return [names[0] for key, names in paths.items() if key in missing and not _is_there(parameters[key], others)]


def _files(folder: Path) -> dict[str, Path]:
    """Return the names of a checkpoint's tensors, each with its file."""
    if (folder / _INDEX).is_file():
        shards: dict[str, str] = json.loads((folder / _INDEX).read_text())["weight_map"]
        return {name: folder / shard for name, shard in shards.items()}
    if not (folder / _FILE).is_file():
        return {}
    with safe_open(folder / _FILE, framework="pt", device="cpu") as content:
        return dict.fromkeys(content.keys(), folder / _FILE)


def _beginnings(file: Path, name: str) -> tuple[Tensor, ...]:
    """Return the first numbers of a tensor by rows, and of its transpose."""
    with safe_open(file, framework="pt", device="cpu") as content:
        tensor = content.get_tensor(name)
    both = (tensor, tensor.transpose(-2, -1)) if tensor.dim() > 1 else (tensor,)
    return tuple(one.reshape(-1)[:_COMPARED] for one in both)


def _is_there(parameter: Tensor, others: list[tuple[Tensor, ...]]) -> bool:
    mine = parameter.reshape(-1)[:_COMPARED].cpu()
    return any(
        len(one) == len(mine) and torch.equal(one.to(mine.dtype), mine) for beginnings in others for one in beginnings
    )
