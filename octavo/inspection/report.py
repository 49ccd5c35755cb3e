"""The report of `octavo.explain`, as values: they convert to plain data and print as text."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from octavo.text import SHOWN, columns, path_names, plural

WIDTH = 200  # characters of a line that quotes the compiler


@dataclass(frozen=True)
class Break:
    """A place where a graph ends before the call does."""

    reason: str
    where: str  # file:line, and the name of the function where that is known
    uncompiled: str = ""  # the function that then runs without a graph; empty: another graph continues

    def __str__(self) -> str:
        lost = f", and all of {self.uncompiled} runs uncompiled" if self.uncompiled else ""
        return f"{self.where}{lost}: {self.reason}"


@dataclass(frozen=True)
class Recompile:
    """A call that no earlier graph could serve."""

    guard: str  # the condition that failed
    where: str  # the recompiled function: file:line, and its name

    def __str__(self) -> str:
        return f"{self.where}: {self.guard}"


@dataclass(frozen=True)
class Graph:
    """The operators of one captured graph, and how often it calls each."""

    direction: str  # forward, backward; inference if no tensor requires a gradient
    nodes: tuple[tuple[str, int], ...]  # Octavo's operators
    others: tuple[tuple[str, int], ...]

    def count(self, name: str) -> int:
        return dict(self.nodes + self.others).get(name, 0)

    def as_dict(self) -> dict[str, Any]:
        return {"direction": self.direction, "nodes": dict(self.nodes), "others": dict(self.others)}


@dataclass(frozen=True)
class Layer:
    """One layer of Octavo's."""

    path: str
    recipe: str  # its own recipe's key, or "from octavo.autocast" and the key of the ambient one
    routes: tuple[tuple[str, str], ...]  # for each GEMM: native, emulated, reference
    why: str = ""  # why a GEMM is emulated
    uncompiled: str = ""  # why it is not in a graph; empty if it is

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "routes": dict(self.routes)}


@dataclass(frozen=True)
class Fused:
    """Operations of a Sequential that run as one node in forward and one in backward."""

    stages: tuple[str, ...]
    forward: tuple[str, ...]  # steps
    backward: tuple[str, ...]
    refused: tuple[str, ...]  # fusion rules whose pattern matched, and why they did not apply

    def __str__(self) -> str:
        return f"{', '.join(self.stages)}: forward {' | '.join(self.forward)}; backward {' | '.join(self.backward)}"


@dataclass(frozen=True)
class CompileReport:
    """The findings of `octavo.explain` in one compilation of a model. Prints as tables."""

    compiler: str  # the compiler that took the graphs
    cudagraphs: bool  # whether CUDA graphs were requested; if not, there are no skips
    breaks: tuple[Break, ...]
    recompiles: tuple[Recompile, ...]
    skips: tuple[str, ...]  # for each graph that does not run as a CUDA graph, why
    graphs: int
    captured: tuple[Graph, ...]  # forward and backward, in the order in which they were made
    layers: tuple[Layer, ...]
    runs: tuple[Fused, ...] = ()

    def count(self, name: str, direction: str = "") -> int:
        """Returns how many nodes have this name, in all graphs or in those of one direction."""
        return sum(graph.count(name) for graph in self.captured if direction in ("", graph.direction))

    def as_dict(self) -> dict[str, Any]:
        return {
            "compiler": self.compiler,
            "cudagraphs": self.cudagraphs,
            "graphs": self.graphs,
            "breaks": [dict(vars(b)) for b in self.breaks],
            "recompiles": [dict(vars(r)) for r in self.recompiles],
            "skips": list(self.skips),
            "captured": [graph.as_dict() for graph in self.captured],
            "layers": [layer.as_dict() for layer in self.layers],
            "runs": [dict(vars(run)) for run in self.runs],
        }

    def __str__(self) -> str:
        skipped = plural(len(self.skips), "cudagraph skip") if self.cudagraphs else "no CUDA graphs asked for"
        counts = [plural(self.graphs, "graph"), plural(len(self.breaks), "break")]
        counts += [plural(len(self.recompiles), "recompile"), skipped]
        parts = [f"{self.compiler}: {', '.join(counts)}"]
        for name, found in (("break", self.breaks), ("recompile", self.recompiles), ("skip", self.skips)):
            parts += _entries(name, [str(entry) for entry in found])
        for run in dict.fromkeys(self.runs):
            parts += [f"  run  {run}", *[f"    refused  {text}" for text in run.refused]]
        return "\n".join([*parts, "", *_graph_lines(self.captured), "", *_layer_lines(self.layers)])


def _entries(name: str, found: Sequence[str]) -> list[str]:
    """Returns one line for each different entry, with its number if it occurs more than once."""
    once = list(dict.fromkeys(found))
    lines = [text + (f" ({found.count(text)} times)" if found.count(text) > 1 else "") for text in once[:SHOWN]]
    lines = [f"  {name}  {text if len(text) <= WIDTH else text[: WIDTH - 3] + '...'}" for text in lines]
    return lines + ([f"  and {plural(len(once) - SHOWN, name)} more"] if len(once) > SHOWN else [])


def _graph_lines(captured: tuple[Graph, ...]) -> list[str]:
    """Returns a table with one row for each different graph."""
    equal: dict[Graph, int] = {}
    for graph in captured:
        equal[graph] = equal.get(graph, 0) + 1
    rows = [(g.direction, str(n), _counts(g.nodes), _counts(g.others)) for g, n in equal.items()]
    lines = columns([("graph", "count", "our nodes", "others"), *rows[:SHOWN]])
    return lines + ([f"and {len(rows) - SHOWN} other kinds"] if len(rows) > SHOWN else [])


def _counts(nodes: tuple[tuple[str, int], ...]) -> str:
    shown = ", ".join(f"{name} {count}" for name, count in nodes[:SHOWN]) or "none"
    return shown if len(nodes) <= SHOWN else f"{shown}, and {len(nodes) - SHOWN} more kinds"


def _layer_lines(layers: tuple[Layer, ...]) -> list[str]:
    """Returns a table with one row for layers that differ only in their paths, then notes on these layers."""
    if not layers:
        return ["There is no layer of Octavo's in this model."]
    equal: dict[tuple[Any, ...], list[str]] = {}
    for layer in layers:
        equal.setdefault((layer.recipe, layer.routes, layer.why, layer.uncompiled), []).append(layer.path)
    rows = [("layers", "count", "recipe", *(gemm for gemm, _ in layers[0].routes))]
    notes = []
    for (recipe, routes, why, uncompiled), paths in equal.items():
        name = path_names(paths)
        rows.append((name, str(len(paths)), recipe, *(route for _, route in routes)))
        notes += [f"{name}: {text}" for text in (why, uncompiled and f"not compiled: {uncompiled}") if text]
    return [*columns(rows), *notes]
