"""The result of a version: a file that names no machine, written whole or not at all."""

import json
import os
import re
import socket
from pathlib import Path
from typing import Any

LONGEST = 240  # characters of a message
ADDRESS = re.compile(r"\w+://\S+")
FOLDERS = re.compile(r"(?<![\w.])(?:/[\w.@+~-]+)+/(?=[\w.@+~-])")


def path_of(version: str, folder: Path) -> Path:
    return folder / f"torch-{version}.json"


def read(version: str, folder: Path) -> dict[str, Any] | None:
    """Returns the result of a version, None if it has none."""
    path = path_of(version, folder)
    return json.loads(path.read_text()) if path.exists() else None


def read_all(folder: Path) -> list[dict[str, Any]]:
    """Returns every result, the oldest torch first."""
    found = [json.loads(path.read_text()) for path in folder.glob("torch-*.json")]
    return sorted(found, key=lambda result: numbers(result["version"]))


def write(result: dict[str, Any], folder: Path) -> Path:
    path = path_of(result["version"], folder)
    replace(path, json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    return path


def replace(path: Path, text: str) -> None:
    """Writes a file whole: whoever is interrupted here leaves the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(f".{path.name}.half")
    half.write_text(text)
    os.replace(half, path)


def is_done(result: dict[str, Any] | None, commit: str) -> bool:
    """Whether the whole suite ran to its end at this commit. An installation that failed is tried again."""
    return result is not None and result["complete"] and result["commit"] == commit


def numbers(version: str) -> tuple[int, ...]:
    """`(2, 11, 0)` of 2.11.0+cu130."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0]))


def message(text: str) -> str:
    """Returns the first line of an error, short, without this machine's folders and name, and without addresses."""
    line = next((line for line in text.splitlines() if line.strip()), "").strip()
    line = FOLDERS.sub(".../", ADDRESS.sub("<address>", line)).replace(socket.gethostname(), "<host>")
    return line if len(line) <= LONGEST else f"{line[:LONGEST]} ..."
