"""The text that ships with the package, as bytes to train on.

text/alice.txt is "Alice's Adventures in Wonderland" by Lewis Carroll, London 1865, in the public domain: the whole book
in plain ASCII, 148 KB. The last tenth is held out.
"""

from collections.abc import Iterator
from importlib import resources

import torch
from torch import Tensor

from octavo.errors import UnsupportedShape

HELD_OUT = 0.1


def load() -> tuple[Tensor, Tensor]:
    """Returns the book's bytes, uint8: the part to train on, and the end that is held out."""
    raw = resources.files("octavo.cli").joinpath("text", "alice.txt").read_bytes()
    book = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    cut = int(len(book) * (1 - HELD_OUT))
    return book[:cut], book[cut:]


def batches(text: Tensor, *, steps: int, batch: int, context: int, seed: int) -> Iterator[Tensor]:
    """Yields for each step int64 [batch, context + 1] from random positions: inputs, and targets one byte later."""
    check_context(text, context)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(len(text) - context, (batch, 1), generator=generator)
        yield text[starts + torch.arange(context + 1)].long()


def windows(text: Tensor, *, context: int) -> Tensor:
    """Returns a whole text as int64 [windows, context + 1], each byte a target once, without a last, shorter piece."""
    check_context(text, context)
    return text.unfold(0, context + 1, context).long()


def check_context(text: Tensor, context: int) -> None:
    if context >= len(text):
        raise UnsupportedShape(f"A context must be shorter than its text of {len(text)} bytes, got {context}.")
