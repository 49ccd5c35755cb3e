"""Folders of checkpoints: a folder of a run holds one folder for each step, written under another name and renamed.

run/
  step-000100/          complete: it has its name only since everything in it is on the disk
    checkpoint.json     the step, the recipe of each layer, and the size and SHA-256 of each file
    model.safetensors, ...
  .partial-3f2a9c01/    a process that was killed left it; nothing reads it
"""

import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from octavo.checkpoints.tensor_file import Digest, damaged, parse_json
from octavo.errors import InvalidCheckpoint, UnsupportedConfig, warn_caller
from octavo.text import plural
from octavo.values import shown
from octavo.version import __version__

MANIFEST, FORMAT, VERSION = "checkpoint.json", "octavo-checkpoint", 2
LARGEST_MANIFEST = 16_000_000  # bytes: a line for each layer
NAME = re.compile(r"step-([0-9]{6,18})")
FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")  # a name that stays in its folder, and that any system can open
PASS = "Pass the folder that octavo.save_checkpoint was given, or a checkpoint in it."


class Manifest(NamedTuple):
    """The content of checkpoint.json."""

    step: int
    recipes: dict[str, str]  # of the layers that have one, by their paths
    files: dict[str, Digest]


def name_of(step: int) -> str:
    return f"step-{step:06d}"


# -- writing -----------------------------------------------------------------------------------------------------------


@contextmanager
def new_checkpoint(run: Path, step: int, recipes: dict[str, str]) -> Iterator[tuple[Path, dict[str, Digest]]]:
    """Yields a folder to write files to, and a dict for their digests. At the end of the block the folder becomes the
    run's checkpoint of that step, at once. If the block raises, it is removed, and the run is as before."""
    target = run / name_of(step)
    if target.exists():
        raise UnsupportedConfig(
            f"{target} exists already, and a checkpoint is not replaced. Save into another folder, or remove it first."
        )
    if run.exists() and not run.is_dir():
        raise UnsupportedConfig(f"A checkpoint is saved into a folder, and {run} is a file. Name another folder.")
    run.mkdir(parents=True, exist_ok=True)
    partial = run / f".partial-{secrets.token_hex(4)}"
    partial.mkdir()
    try:
        files: dict[str, Digest] = {}
        yield partial, files
        _write_manifest(partial / MANIFEST, Manifest(step, recipes, files))
        _sync(partial)
        os.rename(partial, target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    _sync(run)


def _write_manifest(path: Path, manifest: Manifest) -> None:
    files = {name: digest._asdict() for name, digest in manifest.files.items()}
    content = {
        "format": FORMAT, "version": VERSION, "step": manifest.step, "octavo": __version__, "torch": torch.__version__,
        "recipes": manifest.recipes, "files": files,
    }  # fmt: skip
    with open(path, "x") as file:
        file.write(json.dumps(content, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Waits until the disk has the names in a folder. Some systems cannot open one for that."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


# -- reading -----------------------------------------------------------------------------------------------------------


def find(path: Path) -> Path:
    """Returns a checkpoint: `path` itself, or the newest complete one in it. Raises InvalidCheckpoint if there is
    none."""
    if not path.is_dir():
        what = f"{path} is a file, and a checkpoint is a folder." if path.exists() else f"There is no folder {path}."
        raise InvalidCheckpoint(f"{what} {PASS}")
    if NAME.fullmatch(path.name) or (path / MANIFEST).exists():
        return path
    found, skipped = newest_and_skipped(path)
    if found is None and not skipped:
        raise InvalidCheckpoint(f"{path} has no complete checkpoint, such as {name_of(100)}. {PASS}")
    if found is None:
        raise InvalidCheckpoint(f"{path} has no complete checkpoint. Of its newest: {skipped[0]}")
    if skipped:
        warn_caller(
            f"{path} has {plural(len(skipped), 'newer checkpoint')} that cannot be loaded, and {found.name} is taken. "
            f"Of the newest: {skipped[0]}"
        )
    return found


def newest(run: Path) -> Path | None:
    """Returns the checkpoint of the highest step in a run's folder that has all its files; None if there is none."""
    return newest_and_skipped(run)[0]


def newest_and_skipped(run: Path) -> tuple[Path | None, list[str]]:
    """Returns that checkpoint, and for each one of a higher step the sentence that refuses it."""
    steps = [(int(match[1]), path) for path in run.iterdir() if (match := NAME.fullmatch(path.name))]
    skipped: list[str] = []
    for step, path in sorted(steps, reverse=True):
        try:
            manifest = read_manifest(path)
            if manifest.step == step:
                return path, skipped
            skipped.append(f"{path} has step {manifest.step} in its {MANIFEST}. Rename the folder.")
        except InvalidCheckpoint as error:
            skipped.append(str(error))
    return None, skipped


def read_manifest(path: Path) -> Manifest:
    """Returns the content of a checkpoint's manifest. Raises InvalidCheckpoint unless all files have their sizes."""
    file = path / MANIFEST
    try:
        if file.stat().st_size > LARGEST_MANIFEST:
            raise damaged(file, f"it has {file.stat().st_size} bytes, and at most {LARGEST_MANIFEST} are read")
        manifest = _manifest(file, parse_json(file, file.read_bytes()))
        for name, digest in manifest.files.items():
            size = (path / name).stat().st_size
            if size != digest.bytes:
                raise damaged(path / name, f"the file was written with {digest.bytes} bytes, and has {size}")
    except OSError as error:
        raise InvalidCheckpoint(
            f"The checkpoint {path} is not complete: {Path(str(error.filename)).name}: {error.strerror}. Load another."
        ) from None
    return manifest


def _manifest(file: Path, content: Any) -> Manifest:
    match content:
        case {"format": str(kind), "version": int(version)} if kind == FORMAT and version != VERSION:
            raise InvalidCheckpoint(
                f"{file} has version {version} of the format, and this Octavo ({__version__}) reads {VERSION}. "
                "Load it with the version of Octavo that wrote it."
            )
        case {
            "format": str(kind),
            "version": int(),
            "step": int(step),
            "recipes": dict(recipes),
            "files": dict(files),
        } if kind == FORMAT and step >= 0 and all(isinstance(recipe, str) for recipe in recipes.values()):
            return Manifest(step, recipes, {name: _digest(file, name, digest) for name, digest in files.items()})
    raise damaged(file, f"it is {shown(repr(content))}")


def _digest(file: Path, name: str, digest: Any) -> Digest:
    match digest:
        case {"bytes": int(size), "sha256": str(sha256)} if FILE.fullmatch(name):
            return Digest(size, sha256)
    raise damaged(file, f"it lists the file {shown(repr(name))} as {shown(repr(digest))}")
