"""Named fields as a flat list of tensors, and back: the way a node of a graph and a recorded call take them."""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any


def pack(fields: Iterable[Any], tensors: list[Any]) -> str:
    """Append the tensors of these fields to a list. Return which there are: a mark for each field, "0" for None, "1"
    for a tensor, "t2" for a tuple of two."""
    marks: list[str] = []
    for field in fields:
        if field is None:
            marks.append("0")
        elif isinstance(field, tuple):
            if field:
                marks.append("t" + str(len(field)))
                tensors.extend(field)
            else:
                marks.append("t0")  # most of a call's
        else:
            marks.append("1")
            tensors.append(field)
    return ",".join(marks)


class Packing:
    """The places of each field's tensors in the list."""

    def __init__(self, marks: str) -> None:
        self.marks = marks
        self.starts: list[int] = []
        self.count = 0  # tensors of all fields
        self.singles: list[int] = []  # fields that are one tensor, the last first,
        self.single_places: list[int] = []  # and the places of these tensors
        self.places: list[int | slice | None] = []
        for mark in marks.split(",") if marks else ():
            self.starts.append(self.count)
            size = int(mark.removeprefix("t"))
            end = self.count + size
            self.places.append(slice(self.count, end) if mark[0] == "t" else self.count if size else None)
            if mark == "1":
                self.singles.insert(0, len(self.starts) - 1)
                self.single_places.insert(0, self.count)
            self.count = end

    def unpack(self, tensors: Sequence[Any]) -> list[Any]:
        """Return the fields, from the head of the list."""
        row = tuple(tensors)
        return [None if place is None else row[place] for place in self.places]


@lru_cache(maxsize=4096)
def packing(marks: str) -> Packing:
    return Packing(marks)
