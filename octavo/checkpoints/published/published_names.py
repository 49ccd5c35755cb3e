"""The names that a parameter of a model has in a published file.

Most parameters have their own name there. Experts that a model stacks are published one by one, gate and up apart:

    layers.0.mlp.experts.gate_up_proj [E, 2 I, H]      layers.0.mlp.experts.3.gate_proj.weight [I, H], ...up_proj.weight
    layers.0.mlp.experts.down_proj [E, H, I]           layers.0.mlp.experts.3.down_proj.weight [H, I]
"""

from collections.abc import Container, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

STACKED = {  # the name of a stacked weight -> the names of its parts for one expert, for each way to publish them
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "up_proj": (("up_proj",), ("w1",)),
    "down_proj": (("down_proj",), ("w2",)),
}


class Piece(NamedTuple):
    """The part of a parameter that one weight of a file is: all of it, or rows of one expert."""

    name: str  # of the weight in the file, before what a layout adds
    expert: int | None = None
    start: int = 0  # rows of the expert
    rows: int = 0

    @property
    def module(self) -> str:
        """The path of its module, as configs name it."""
        return self.name.removesuffix(".weight")

    def of(self, parameter: Tensor) -> Tensor:
        """Return this part of the parameter, as a view."""
        return parameter if self.expert is None else parameter[self.expert, self.start : self.start + self.rows]


def pieces_in(name: str, shape: Sequence[int], suffixes: Sequence[str], there: Container[str]) -> list[Piece]:
    """Return the pieces of a parameter that a file has; none if the file lacks it. `suffixes` are what layouts add to
    the names of codes."""
    for pieces in ways(name, shape):
        if any(pieces[0].name + suffix in there for suffix in suffixes):
            return pieces
    return []


def ways(name: str, shape: Sequence[int]) -> Iterator[list[Piece]]:
    """Yield the lists of pieces that a parameter of this name and shape may be published as."""
    yield [Piece(name)]
    home, _, own = name.rpartition(".")
    if len(shape) != 3 or own not in STACKED:
        return
    for parts in STACKED[own]:
        rows = shape[1] // len(parts)
        yield [
            Piece(f"{home}.{expert}.{part}.weight", expert, i * rows, rows)
            for expert in range(shape[0])
            for i, part in enumerate(parts)
        ]
