"""The report of `octavo.explain`, as values: they convert to plain data and print as text."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from octavo.inspection.model_memory import ModelMemory
from octavo.text import SHOWN, columns, path_names, plural, printable

WIDTH = 200  # characters of a line that quotes the compiler


@dataclass(frozen=True)
class Break:
    """A place where a graph ends before the call does.

    Args:
        reason: the compiler's reason.
        where: file:line, and the name of the function where that is known.
        uncompiled: the function that then runs without a graph; empty if another graph continues.
    """

    reason: str
    where: str
    uncompiled: str = ""

    def __str__(self) -> str:
        lost = f", and all of {self.uncompiled} runs uncompiled" if self.uncompiled else ""
        return f"{self.where}{lost}: {self.reason}"


@dataclass(frozen=True)
class Recompile:
    """A call that no earlier graph could serve.

    Args:
        guard: the condition that failed.
        where: the function that was compiled again: file:line, and its name.
    """

    guard: str
    where: str

    def __str__(self) -> str:
        return f"{self.where}: {self.guard}"


@dataclass(frozen=True)
class Graph:
    """The operators of one captured graph, and how often it calls each.

    Args:
        direction: "forward", "backward", or "inference" if no tensor requires a gradient.
        nodes: Octavo's operators, each with its number of calls.
        others: all other operators, each with its number of calls.
    """

    direction: str
    nodes: tuple[tuple[str, int], ...]
    others: tuple[tuple[str, int], ...]

    def count(self, name: str) -> int:
        """Count the calls of an operator.

        Args:
            name: the operator, such as "octavo::run".

        Returns:
            The number of calls; 0 if there are none.
        """
        return dict(self.nodes + self.others).get(name, 0)

    def as_dict(self) -> dict[str, Any]:
        """Return the graph as plain data, for JSON.

        Returns:
            The fields by name.
        """
        return {"direction": self.direction, "nodes": dict(self.nodes), "others": dict(self.others)}


@dataclass(frozen=True)
class Layer:
    """One Octavo layer of the model.

    Args:
        path: its name in the model.
        recipe: the canonical string of its recipe; "from octavo.autocast: ..." if it follows that.
        routes: for fprop, dgrad and wgrad each, how it runs: "native", "emulated" or "reference".
        why: why a matrix product is emulated; empty if none is.
        uncompiled: why the layer is in no graph; empty if it is in one.
        parallel: what the layer sends, if its weight is split over ranks; empty if it is not.
        codes: how dx is made of a weight that is codes; empty for other weights.
    """

    path: str
    recipe: str
    routes: tuple[tuple[str, str], ...]
    why: str = ""
    uncompiled: str = ""
    parallel: str = ""
    codes: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the layer as plain data, for JSON.

        Returns:
            The fields by name.
        """
        return {**vars(self), "routes": dict(self.routes)}


@dataclass(frozen=True)
class Fused:
    """Operations of a Sequential that run as one node in forward and one in backward.

    Args:
        stages: the operations.
        forward: the steps of forward, in order; a fused step stands for several operations.
        backward: the steps of backward, in order.
        refused: fusion rules whose pattern is present, and why they do not apply.
    """

    stages: tuple[str, ...]
    forward: tuple[str, ...]
    backward: tuple[str, ...]
    refused: tuple[str, ...]

    def __str__(self) -> str:
        return f"{', '.join(self.stages)}: forward {' | '.join(self.forward)}; backward {' | '.join(self.backward)}"


@dataclass(frozen=True)
class CompileReport:
    """The report of `octavo.explain`. It prints as tables.

    Args:
        compiler: the compiler that took the graphs, and the device.
        cudagraphs: whether CUDA graphs were requested. If not, there are no skips.
        breaks: places where a graph ends before the call does.
        recompiles: calls that no earlier graph could serve.
        skips: for each graph that does not run as a CUDA graph, why.
        graphs: the number of graphs that the compiler took.
        captured: the graphs of forward and backward, in the order in which they were made.
        layers: the Octavo layers of the model.
        runs: groups of operations of a Sequential that run together.
        off: the fast paths of this process that are off, and the GEMMs that are emulated because they failed a probe,
            each with its reason.
        memory: the memory of a step by module, if explain was asked for it.
    """

    compiler: str
    cudagraphs: bool
    breaks: tuple[Break, ...]
    recompiles: tuple[Recompile, ...]
    skips: tuple[str, ...]
    graphs: int
    captured: tuple[Graph, ...]
    layers: tuple[Layer, ...]
    runs: tuple[Fused, ...] = ()
    off: tuple[str, ...] = ()
    memory: ModelMemory | None = None

    def count(self, name: str, direction: str = "") -> int:
        """Count the calls of an operator in the captured graphs.

        Args:
            name: the operator: "octavo::run" is a layer's forward, "octavo::run_bwd" its backward.
            direction: count only in graphs of this direction, "forward", "backward" or "inference"; "" counts in all.

        Returns:
            The number of calls.
        """
        return sum(graph.count(name) for graph in self.captured if direction in ("", graph.direction))

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain data, for JSON.

        Returns:
            The fields by name.
        """
        found = {name: value for name, value in vars(self).items() if not isinstance(value, tuple)}
        found["memory"] = None if self.memory is None else self.memory.as_dict()
        lists = {name: value for name, value in vars(self).items() if isinstance(value, tuple)}
        return found | {name: [_plain(entry) for entry in entries] for name, entries in lists.items()}

    def __str__(self) -> str:
        skipped = plural(len(self.skips), "cudagraph skip") if self.cudagraphs else "no CUDA graphs asked for"
        counts = [plural(self.graphs, "graph"), plural(len(self.breaks), "break")]
        counts += [plural(len(self.recompiles), "recompile"), skipped]
        parts = [f"{self.compiler}: {', '.join(counts)}"]
        for name, found in (("break", self.breaks), ("recompile", self.recompiles), ("skip", self.skips)):
            parts += _entries(name, [str(entry) for entry in found])
        for run in dict.fromkeys(self.runs):
            parts += [f"  run  {run}", *[f"    refused  {text}" for text in run.refused]]
        lines = [*parts, "", *_graph_lines(self.captured), "", *_layer_lines(self.layers)]
        lines += [] if self.memory is None else ["", *str(self.memory).splitlines()]
        return printable("\n".join([*lines, *(["", *self.off] if self.off else [])]))


def _plain(entry: Any) -> Any:
    if isinstance(entry, str):
        return entry
    return entry.as_dict() if hasattr(entry, "as_dict") else dict(vars(entry))


def _entries(name: str, found: Sequence[str]) -> list[str]:
    """Return one line for each different entry, with its number if it occurs more than once."""
    once = list(dict.fromkeys(found))
    lines = [text + (f" ({found.count(text)} times)" if found.count(text) > 1 else "") for text in once[:SHOWN]]
    lines = [f"  {name}  {text if len(text) <= WIDTH else text[: WIDTH - 3] + '...'}" for text in lines]
    return lines + ([f"  and {plural(len(once) - SHOWN, name)} more"] if len(once) > SHOWN else [])


def _graph_lines(captured: tuple[Graph, ...]) -> list[str]:
    """Return a table with one row for each different graph."""
    rows = [(g.direction, str(n), _counts(g.nodes), _counts(g.others)) for g, n in Counter(captured).items()]
    lines = columns([("graph", "count", "our nodes", "others"), *rows[:SHOWN]])
    return lines + ([f"and {len(rows) - SHOWN} other kinds"] if len(rows) > SHOWN else [])


def _counts(nodes: tuple[tuple[str, int], ...]) -> str:
    shown = ", ".join(f"{name} {count}" for name, count in nodes[:SHOWN]) or "none"
    return shown if len(nodes) <= SHOWN else f"{shown}, and {len(nodes) - SHOWN} more kinds"


def _layer_lines(layers: tuple[Layer, ...]) -> list[str]:
    """Return a table with one row for layers that differ only in their paths, then notes on these layers."""
    if not layers:
        return ["There is no layer of Octavo's in this model."]
    equal: dict[tuple[Any, ...], list[str]] = {}
    for layer in layers:
        kind = layer.recipe, layer.routes, layer.why, layer.uncompiled, layer.parallel, layer.codes
        equal.setdefault(kind, []).append(layer.path)
    rows = [("layers", "count", "recipe", *(gemm for gemm, _ in layers[0].routes))]
    notes = []
    for (recipe, routes, why, uncompiled, parallel, codes), paths in equal.items():
        name = path_names(paths)
        rows.append((name, str(len(paths)), recipe, *(route for _, route in routes)))
        texts = why, uncompiled and f"not compiled: {uncompiled}", parallel, codes
        notes += [f"{name}: {text}" for text in texts if text]
    return [*columns(rows), *notes]
