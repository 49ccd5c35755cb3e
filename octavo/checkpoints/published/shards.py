"""The tensors of a published folder: one safetensors file, or several with an index. Headers are read first, whole
tensors one at a time; a written folder is complete or not there."""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.checkpoints.folder import new_folder
from octavo.checkpoints.published.layout_choice import CONFIG, ENTRY, read_json
from octavo.checkpoints.tensor_file import DTYPES, Entry, damaged, read_entry, read_header, write_made, write_text
from octavo.errors import InvalidCheckpoint, UnsupportedConfig
from octavo.values import excerpt

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 5_000_000_000  # of a written file, unless one tensor is larger
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors")  # a file that stays in its folder


def folder_of(path: object, function: str) -> Path:
    """Return an existing folder as a Path. Raise for anything else."""
    folder = path_of(path, function)
    if not folder.is_dir():
        what = f"{folder} is a file" if folder.exists() else f"There is no folder {folder}"
        raise InvalidCheckpoint(f"{what}. Pass the folder that has {CONFIG} and the safetensors files.")
    return folder


def path_of(path: object, function: str) -> Path:
    if not isinstance(path, (str, os.PathLike)):
        raise UnsupportedConfig(f"octavo.{function} takes the path of a folder, got {type(path).__name__}. Pass one.")
    return Path(path)


def read_entries(folder: Path) -> dict[str, Entry]:
    """Return where each tensor of a folder lies, in the order of files and places. Raise unless all files are whole."""
    listed = _listed(folder)
    found: dict[str, Entry] = {}
    for file in sorted(set(listed.values())) if listed else [SINGLE]:
        for name, entry in sorted(read_header(folder / file).items(), key=lambda item: item[1].start):
            if name in found:
                raise damaged(folder / file, f"{excerpt(repr(name))} is also in {found[name].path.name}")
            if listed and listed.get(name) != file:
                where = f"says that it is in {excerpt(repr(listed[name]))}" if name in listed else "does not list it"
                raise damaged(folder / file, f"it has {excerpt(repr(name))}, and {INDEX} {where}")
            found[name] = entry
    if missing := [name for name in listed if name not in found]:
        raise damaged(folder / listed[missing[0]], f"it lacks {excerpt(repr(missing[0]))}, which {INDEX} has there")
    return found


def _listed(folder: Path) -> dict[str, str]:
    """Return the file of each tensor by a folder's index; empty if it has no index."""
    if not (folder / INDEX).exists():
        if not (folder / SINGLE).exists():
            raise InvalidCheckpoint(f"{folder} has no {SINGLE} and no {INDEX}. Pass the folder that has one of them.")
        return {}
    index = read_json(folder / INDEX)
    listed = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(listed, dict) or not listed:
        raise damaged(folder / INDEX, "it has no weight_map")
    for name, file in listed.items():
        if not isinstance(file, str) or not NAME.fullmatch(file):
            raise damaged(folder / INDEX, f"{excerpt(repr(name))} is in {excerpt(repr(file))}, which is no file here")
    return listed


# -- writing -----------------------------------------------------------------------------------------------------------


class Planned(NamedTuple):
    """A tensor of a folder that is to be written: its dtype by the file's name, its shape, and what makes it."""

    dtype: str
    shape: tuple[int, ...]
    make: Callable[[], Tensor]

    @classmethod
    def copy_of(cls, entry: Entry) -> "Planned":
        return cls(entry.dtype, entry.shape, partial(read_entry, entry))

    @property
    def nbytes(self) -> int:
        return self.meta.nbytes

    @property
    def meta(self) -> Tensor:
        return torch.empty(self.shape, dtype=DTYPES[self.dtype], device="meta")


def write_folder(
    folder: Path, planned: dict[str, Planned], config: dict[str, Any], others: Iterable[Path] = (),
    shard_bytes: int = SHARD_BYTES, written: Callable[[int], None] = lambda number: None,
) -> None:  # fmt: skip
    """Write tensors, config.json and copies of other files to a new folder, one tensor in memory at a time. `written`
    is told the number of tensors after each."""
    if folder.exists():
        raise UnsupportedConfig(f"{folder} exists already, and is not overwritten. Name another folder, or remove it.")
    shards, counted = list(_split(planned, shard_bytes)), count(1)
    names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    names = names if len(shards) > 1 else [SINGLE]

    def make(name: str) -> Tensor:
        one = planned[name]
        made = one.make()
        assert made.shape == one.shape and made.dtype == DTYPES[one.dtype], (name, made.shape, made.dtype, one)
        written(next(counted))
        return made

    with new_folder(folder) as unfinished:
        for file, shard in zip(names, shards, strict=True):
            write_made(unfinished / file, {name: planned[name].meta for name in shard}, make, {"format": "pt"})
        if len(shards) > 1:
            places = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
            total = {"total_size": sum(one.nbytes for one in planned.values())}
            write_text(unfinished / INDEX, _json({"metadata": total, "weight_map": places}))
        for other in others:
            shutil.copyfile(other, unfinished / other.name)
        write_text(unfinished / CONFIG, _json(config))


def _split(planned: dict[str, Planned], most: int) -> Iterator[list[str]]:
    """Yield the names of each file."""
    shard: list[str] = []
    size = 0
    for name, one in planned.items():
        if shard and size + one.nbytes > most:
            yield shard
            shard, size = [], 0
        shard.append(name)
        size += one.nbytes
    yield shard


def _json(content: Any) -> str:
    return json.dumps(content, indent=2, sort_keys=True) + "\n"


def other_files(folder: Path) -> list[Path]:
    """Return the files of a folder beside tensors and config.json: tokenizers, generation settings, code."""
    skipped = {CONFIG, INDEX, "hf_quant_config.json"}
    return [
        path
        for path in sorted(folder.iterdir())
        if path.is_file() and path.name not in skipped and not path.name.startswith(".")
        and path.suffix not in (".safetensors", ".bin", ".pt", ".pth")
    ]  # fmt: skip


def config_with(config: dict[str, Any], entry: dict[str, Any] | None) -> dict[str, Any]:
    """Return the content of config.json with this `quantization_config`; None leaves it out."""
    kept = {key: value for key, value in config.items() if key not in (ENTRY, "compression_config")}
    return kept if entry is None else {**kept, ENTRY: entry}
