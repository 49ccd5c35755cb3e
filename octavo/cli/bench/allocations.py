"""The large allocations of one step: how many bytes, from when to when, where, and which were there at the peak."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from octavo._torch.cuda import memory_events, recorded_memory
from octavo.text import table

LARGE = 64 * 2**20  # bytes of an allocation that is listed
OWN = ("octavo/", "<octavo replay>")  # files whose lines are named, the innermost of them


class Allocation(NamedTuple):
    mib: float
    made: int  # the number of the event that made it: an allocation, or a release of one
    freed: int | None  # and of the event that freed it; None if the step's end has it still
    at_peak: bool
    where: str


def of_step(step: Callable[[], object]) -> list[dict[str, Any]]:
    """Run one step on the current GPU, and list its large allocations in their order."""
    torch.cuda.synchronize()
    with recorded_memory():
        step()
        torch.cuda.synchronize()
        events = memory_events()
    return [one._asdict() for one in of_events(events)]


def of_events(events: Sequence[dict[str, Any]]) -> list[Allocation]:
    """Return the large allocations among the allocator's events, and which of them are there when the bytes that all
    events add up to are most."""
    total, most, peak = 0, 0, 0
    alive: dict[int, tuple[int, int, str]] = {}
    spans: list[tuple[int, int, int | None, str]] = []
    for number, event in enumerate(events):
        if event["action"] == "alloc":
            total += event["size"]
            alive[event["addr"]] = event["size"], number, _where(event)
            most, peak = (total, number) if total > most else (most, peak)
        elif event["action"] == "free_requested":
            total -= event["size"]
            if event["addr"] in alive:  # else it was there before the step
                size, made, where = alive.pop(event["addr"])
                spans.append((size, made, number, where))
    spans += [(size, made, None, where) for size, made, where in alive.values()]
    return [
        Allocation(size / 2**20, made, freed, made <= peak and (freed is None or freed > peak), where)
        for size, made, freed, where in sorted(spans, key=lambda span: span[1])
        if size >= LARGE
    ]


def _where(event: dict[str, Any]) -> str:
    """Name the innermost line of Octavo's, or of anything, that allocated."""
    frames = [f for f in event.get("frames", ()) if f["filename"].endswith(".py") or f["filename"] in OWN]
    own = [f for f in frames if any(name in f["filename"] for name in OWN)] or frames
    if not own:
        return "unknown"
    file = own[0]["filename"].rpartition("octavo/")[2]
    return f"{file}:{own[0]['line']} {own[0]['name']}"


def render(rows: Sequence[dict[str, Any]], title: str) -> str:
    """Return a table of the allocations of a case."""
    cells = [
        [
            f"{row['mib']:.0f}", str(row["made"]), "-" if row["freed"] is None else str(row["freed"]),
            "yes" if row["at_peak"] else "", row["where"],
        ]
        for row in rows
    ]  # fmt: skip
    return table((f"MiB, {title}", "from event", "to event", "at peak", "made at"), cells)
