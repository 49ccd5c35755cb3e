"""Folders of checkpoints: a folder of a run holds one folder for each step, written under another name and renamed.

run/
  step-000100/          complete: it has its name only since everything in it is on the disk
    checkpoint.json     the step, the recipe of each layer, the size and SHA-256 of each file, and its own SHA-256
    model.safetensors, ...
  .partial-3f2a9c01/    of a save that is under way and holds a lock on it, or of a killed one: the next save removes it
"""

import hashlib
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

from octavo.checkpoints.tensor_file import Digest, damaged, read_json, write_text
from octavo.errors import InvalidCheckpoint, UnsupportedConfig, warn_caller
from octavo.text import plural
from octavo.values import excerpt
from octavo.version import __version__

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

MANIFEST, FORMAT, VERSION = "checkpoint.json", "octavo-checkpoint", 2
ENTRIES = {"format": str, "version": int, "step": int, "octavo": str, "torch": str, "recipes": dict, "files": dict}
SHA256 = "sha256"  # the entry that has the digest of the others; checkpoints of before have none
LARGEST_MANIFEST = 16_000_000  # bytes: a line for each layer
NAME = re.compile(r"step-([0-9]{6,18})")
PARTIAL = re.compile(r"\.partial-[0-9a-f]{8}")
FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")  # a name that stays in its folder, and that any system can open
PASS = "Pass the folder that octavo.save_checkpoint was given, or a checkpoint in it."


class Manifest(NamedTuple):
    """The content of checkpoint.json."""

    step: int
    recipes: dict[str, str]  # of the layers that have one, by their paths
    files: dict[str, Digest]


def is_step(step: object) -> bool:
    return type(step) is int and 0 <= step < 10**18


def name_of(step: int) -> str:
    return f"step-{step:06d}"


# -- writing -----------------------------------------------------------------------------------------------------------


@contextmanager
def new_checkpoint(run: Path, step: int, recipes: dict[str, str]) -> Iterator[tuple[Path, dict[str, Digest]]]:
    """Yield a folder to write files to, and a dict for their digests. At the end of the block the folder becomes the
    run's checkpoint of that step, at once. If the block raises, it is removed, and the run is as before."""
    target = run / name_of(step)
    if target.exists():
        raise UnsupportedConfig(
            f"{target} exists already, and a checkpoint is not replaced. Save into another folder, or remove it first."
        )
    if run.exists() and not run.is_dir():
        raise UnsupportedConfig(f"A checkpoint is saved into a folder, and {run} is a file. Name another folder.")
    with new_folder(target) as partial:
        files: dict[str, Digest] = {}
        yield partial, files
        _write_manifest(partial / MANIFEST, Manifest(step, recipes, files))
    _remove_dead(run)


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield a folder to write files to. At the end of the block it becomes `target`, at once. If the block raises, it
    is removed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial, lock = _new_partial(target.parent)
    try:
        yield partial
        _sync(partial)
        os.rename(partial, target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        _unlock(lock)
    _sync(target.parent)


def _new_partial(run: Path) -> tuple[Path, int | None]:
    """Make a folder for a save, and return it with its lock. A save that ends just then may take it for a dead one
    before it is locked: then there is a next one."""
    while True:
        partial = run / f".partial-{secrets.token_hex(4)}"
        partial.mkdir()
        with suppress(FileNotFoundError, BlockingIOError):
            lock = _lock(partial)
            if partial.exists():
                return partial, lock
            _unlock(lock)


def _lock(folder: Path) -> int | None:
    """Lock a folder until `_unlock`, or until the process ends, and return the lock; None where the system has no
    such locks. Raise BlockingIOError if it is locked already, and FileNotFoundError if it is gone."""
    if fcntl is None:
        return None
    lock = None
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return lock
    except OSError as error:
        _unlock(lock)
        if isinstance(error, (BlockingIOError, FileNotFoundError)):
            raise
        return None


def _unlock(lock: int | None) -> None:
    if lock is not None:
        os.close(lock)


def _remove_dead(run: Path) -> None:
    """Remove the folders of saves whose process has ended: nothing locks them. A folder that cannot be locked
    stays."""
    for name in os.listdir(run):
        with suppress(OSError):
            if PARTIAL.fullmatch(name) and (lock := _lock(run / name)) is not None:
                shutil.rmtree(run / name, ignore_errors=True)
                _unlock(lock)


def _write_manifest(path: Path, manifest: Manifest) -> None:
    files = {name: digest._asdict() for name, digest in manifest.files.items()}
    content = {
        "format": FORMAT, "version": VERSION, "step": manifest.step, "octavo": __version__, "torch": torch.__version__,
        "recipes": manifest.recipes, "files": files,
    }  # fmt: skip
    text = json.dumps({**content, SHA256: _sha256(content)}, indent=1) + "\n"
    if len(text) > LARGEST_MANIFEST:
        raise UnsupportedConfig(
            f"{MANIFEST} has at most {LARGEST_MANIFEST} bytes, and this one would have {len(text)}. Shorten the names "
            "of the layers that have recipes."
        )
    write_text(path, text)


def _sha256(content: dict[str, Any]) -> str:
    """Return the digest of a manifest's entries, whatever their order and the spaces between them."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _sync(folder: Path) -> None:
    """Wait until the disk has the names in a folder. Some systems cannot open one for that."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


# -- reading -----------------------------------------------------------------------------------------------------------


def find(path: Path) -> Path:
    """Return a checkpoint: `path` itself, or the newest complete one in it. Raise InvalidCheckpoint if there is
    none."""
    try:
        return _complete_folder(path)
    except OSError as error:
        raise InvalidCheckpoint(f"{excerpt(str(path))} could not be read: {error.strerror}. {PASS}") from None


def _complete_folder(path: Path) -> Path:
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
    """Return the checkpoint of the highest step in a run's folder that has all its files; None if there is none."""
    return newest_and_skipped(run)[0]


def newest_and_skipped(run: Path) -> tuple[Path | None, list[str]]:
    """Return that checkpoint, and for each one of a higher step the sentence that refuses it."""
    steps = [(int(match[1]), path) for path in run.iterdir() if (match := NAME.fullmatch(path.name))]
    skipped: list[str] = []
    for _, path in sorted(steps, reverse=True):
        try:
            read_manifest(path)
            return path, skipped
        except InvalidCheckpoint as error:
            skipped.append(str(error))
    return None, skipped


def read_manifest(path: Path) -> Manifest:
    """Return the content of a checkpoint's manifest. Raise InvalidCheckpoint unless all files have their sizes, and a
    folder that is named by a step has that step."""
    file = path / MANIFEST
    try:
        manifest = _manifest(file, read_json(file, LARGEST_MANIFEST))
        for name, digest in manifest.files.items():
            size = (path / name).stat().st_size
            if size != digest.bytes:
                raise damaged(path / name, f"the file was written with {digest.bytes} bytes, and has {size}")
    except OSError as error:
        raise InvalidCheckpoint(
            f"The checkpoint {path} is not complete: {Path(str(error.filename)).name}: {error.strerror}. Load another."
        ) from None
    if (named := NAME.fullmatch(path.name)) and int(named[1]) != manifest.step:
        raise InvalidCheckpoint(
            f"{path} has step {manifest.step} in its {MANIFEST}. Rename the folder, or load another checkpoint."
        )
    return manifest


def _manifest(file: Path, content: Any) -> Manifest:
    if not isinstance(content, dict) or content.get("format") != FORMAT or type(content.get("version")) is not int:
        raise damaged(file, f"it is {excerpt(repr(content))}")
    if content["version"] != VERSION:
        raise InvalidCheckpoint(
            f"{file} has version {content['version']} of the format, and this Octavo ({__version__}) reads {VERSION}. "
            "Load it with the version of Octavo that wrote it."
        )
    digests = [content.pop(SHA256)] if SHA256 in content else []  # checkpoints of before have none
    is_whole = {name: type(value) for name, value in content.items()} == ENTRIES
    if (
        not is_whole
        or not is_step(content["step"])
        or any(type(recipe) is not str for recipe in content["recipes"].values())
    ):
        raise damaged(file, f"it is {excerpt(repr(content))}")
    if digests and digests != [_sha256(content)]:
        raise damaged(file, f"its SHA-256 is {_sha256(content)}, and it was written with {excerpt(repr(digests[0]))}")
    files = {name: _digest(file, name, digest) for name, digest in content["files"].items()}
    return Manifest(content["step"], content["recipes"], files)


def _digest(file: Path, name: str, digest: Any) -> Digest:
    match digest:
        case {"bytes": int(size), "sha256": str(sha256), **rest} if (
            type(size) is int and not rest and FILE.fullmatch(name)
        ):
            return Digest(size, sha256)
    raise damaged(file, f"it lists the file {excerpt(repr(name))} as {excerpt(repr(digest))}")
