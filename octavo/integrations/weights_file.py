"""Whether a trainer that loads weights by name has loaded all of a checkpoint in transformers' layout."""

from pathlib import Path

import torch
from torch import Tensor, nn

from octavo._torch.modules import plain_name
from octavo.checkpoints.published.shards import INDEX, SINGLE, read_entries
from octavo.checkpoints.tensor_file import Entry, read_entry

_COMPARED = 16  # numbers at the beginning of a tensor


def left_out(folder: Path, model: nn.Module) -> list[str]:
    """Return the parameters that the checkpoint in a folder does not name, and whose values begin none of the tensors
    that it has besides; none if there is no such checkpoint."""
    paths: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        paths.setdefault(id(p), []).append(plain_name(name))
    files = read_entries(folder) if any((folder / name).is_file() for name in (SINGLE, INDEX)) else {}
    parameters = {id(p): p.detach() for p in model.parameters()}
    missing = {key for key, names in paths.items() if files and not files.keys() & set(names)}
    if not missing:
        return []
    known = {name for names in paths.values() for name in names}
    others = [_beginnings(entry) for name, entry in files.items() if name not in known]
    return [names[0] for key, names in paths.items() if key in missing and not _is_there(parameters[key], others)]


def _beginnings(entry: Entry) -> tuple[Tensor, ...]:
    """Return the first numbers of a tensor by rows, and of its transpose."""
    tensor = read_entry(entry)
    both = (tensor, tensor.transpose(-2, -1)) if tensor.dim() > 1 else (tensor,)
    return tuple(one.reshape(-1)[:_COMPARED] for one in both)


def _is_there(parameter: Tensor, others: list[tuple[Tensor, ...]]) -> bool:
    mine = parameter.reshape(-1)[:_COMPARED].cpu()
    return any(
        len(one) == len(mine) and torch.equal(one.to(mine.dtype), mine) for beginnings in others for one in beginnings
    )
