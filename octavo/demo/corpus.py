"""The text to train on, as bytes: the one that ships with the package, or a file.

text/alice.txt is "Alice's Adventures in Wonderland" by Lewis Carroll, London 1865, in the public domain: the whole book
in plain ASCII, 148 KB. The last tenth of a text is held out, at most MOST_HELD_OUT bytes.
"""

import hashlib
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.errors import UnsupportedConfig, UnsupportedShape

HELD_OUT, MOST_HELD_OUT = 0.1, 2**18
LOOKED_AT = 2**20  # bytes at the start of a file that decide whether it is text
CONTROL = bytes(set(range(32)) - set(b"\t\n\v\f\r\x1b"))  # control characters that no text has


def load(path: str | None = None) -> tuple[Tensor, Tensor]:
    """Return a text's bytes, uint8: the part to train on, and the end that is held out. None is the book."""
    text = torch.frombuffer(bytearray(_bytes(path)), dtype=torch.uint8)
    cut = max(int(len(text) * (1 - HELD_OUT)), len(text) - MOST_HELD_OUT)
    return text[:cut], text[cut:]


def check(path: str | None, context: int) -> None:
    """Raise if a file is no text, or too short for windows of this many bytes."""
    text, held_out = load(path)
    if len(held_out) <= context:
        least = round((context + 1) / HELD_OUT) + 1
        what = "The text that ships with Octavo" if path is None else f"--data {path}"
        raise UnsupportedShape(
            f"{what} has {len(text) + len(held_out)} bytes, and a context of {context} needs {least}: its last tenth "
            "is held out. Take a longer text, or a shorter context by --size."
        )


def digest(path: str | None) -> str:
    """Return a short name of a text's bytes."""
    return hashlib.sha256(_bytes(path)).hexdigest()[:16]


def _bytes(path: str | None) -> bytes:
    if path is None:
        return resources.files("octavo.demo").joinpath("text", "alice.txt").read_bytes()
    try:
        raw = Path(path).read_bytes()
    except IsADirectoryError:
        raise UnsupportedConfig(f"--data reads one file of text, got the folder {path}. Name a file in it.") from None
    except OSError as error:
        raise UnsupportedConfig(
            f"--data cannot read {path}: {error.strerror}. Name a file of text, or leave --data out for the book that "
            "ships with Octavo."
        ) from None
    if not raw:
        raise UnsupportedConfig(f"--data {path} is empty. Name a file of text.")
    strange = len(raw[:LOOKED_AT]) - len(raw[:LOOKED_AT].translate(None, CONTROL))
    if strange:
        raise UnsupportedConfig(
            f"--data {path} is no text: {strange} of its first {min(len(raw), LOOKED_AT)} bytes are control codes. "
            "Name a file of plain text, in UTF-8 or another encoding of single bytes; unpack or convert this one first."
        )
    return raw


def batches(text: Tensor, *, steps: int, batch: int, context: int, seed: int) -> Iterator[Tensor]:
    """Yield for each step int64 [batch, context + 1] from random positions: inputs, and targets one byte later."""
    check_context(text, context)
    generator = torch.Generator("cpu").manual_seed(seed)
    indices: Any = {"device": "cpu", "dtype": torch.int64}
    within = torch.arange(context + 1, **indices)
    for _ in range(steps):
        starts = torch.randint(len(text) - context, (batch, 1), generator=generator, **indices)
        yield text[starts + within].long()


def windows(text: Tensor, *, context: int) -> Tensor:
    """Return a whole text as int64 [windows, context + 1], each byte a target once, without a last, shorter piece."""
    check_context(text, context)
    return text.unfold(0, context + 1, context).long()


def check_context(text: Tensor, context: int) -> None:
    if context >= len(text):
        raise UnsupportedShape(f"A context must be shorter than its text of {len(text)} bytes, got {context}.")
