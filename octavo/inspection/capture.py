"""`Capture`: a backend that records the operators of each graph, and what the compiler logs, in one compilation."""

import logging
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule, Node

from octavo import values
from octavo._torch import compilation
from octavo._torch.operators import operator_name
from octavo.fusion.plan import steps_of, unsupported_reasons_of
from octavo.inspection.report import Break, Fused, Graph, Recompile
from octavo.ops import grouped_linear_layer, linear_layer
from octavo.recipes import Recipe
from octavo.runtime import chain

OURS = "octavo::"
HERE, TORCH, PYTHON = Path(__file__).parents[1], Path(torch.__file__).parent, Path(sysconfig.get_paths()["stdlib"])


class Capture:
    """A backend for torch.compile. `options` are Inductor's; None stops at the graphs and generates no code."""

    def __init__(self, options: dict[str, Any] | None) -> None:
        self.options = options
        self.graphs = 0
        self.captured: list[Graph] = []
        self.runs: list[Fused] = []
        self.recipes: dict[int, Recipe] = {}  # the recipe of each tensor that an Octavo node takes, by the tensor's id
        self._records = compilation.Records()
        self._skipped: list[str] = []

    # -- while it compiles -----------------------------------------------------------------------------------------

    def __call__(self, graph: GraphModule, inputs: Sequence[Any]) -> Any:
        self.graphs += 1
        self.runs += _runs(graph)
        places = _recipes(graph)
        compiled = self._traced(graph, inputs) if self.options is None else self._generated(graph, inputs, self.options)

        def run(*tensors: Any) -> Any:
            # recorded at run time: two equal layers may share a graph that was compiled for one of them
            self.recipes.update({id(tensors[place]): recipe for place, recipe in places.items()})
            return compiled(*tensors)

        return run

    def _traced(self, graph: GraphModule, inputs: Sequence[Any]) -> Any:
        def see(part: GraphModule, direction: str) -> None:
            self.captured.append(_operators(part, direction))

        return compilation.traced(graph, inputs, see)

    def _generated(self, graph: GraphModule, inputs: Sequence[Any], options: dict[str, Any]) -> Any:
        def see(part: GraphModule, direction: str, compile_: Callable[[], Any]) -> Any:
            self.captured.append(_operators(part, direction))
            said, before = len(self._skipped), compilation.cudagraph_skips()
            code = compile_()
            if compilation.cudagraph_skips() > before and len(self._skipped) == said:  # no warning off the GPU
                self._skipped.append(str(getattr(code, "disabled_cudagraphs_reason", None) or ""))
            return code

        return compilation.generated(graph, inputs, options, see)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Reset the compiler before and after the block, record what it does, and restore its counters."""
        with compilation.recorded(_Listener(self._skipped)) as self._records:
            yield

    # -- afterwards ------------------------------------------------------------------------------------------------

    def breaks(self) -> tuple[Break, ...]:
        """Return each break once, those that leave a whole function uncompiled first."""
        functions = self._functions()
        breaks = [
            Break(_sentence(c.fail_reason), _place_of_failure(c, functions), functions[_frame(c)][0])
            for c in self._records.compilations
            if c.fail_type and not c.fail_type.startswith("Skip")  # skipping a function without tensors costs nothing
        ]
        breaks += [Break(_sentence(b.reason), _place(b.user_stack)) for b in self._records.breaks]
        if not self.graphs and not breaks:
            breaks = [Break("no graph was made: torch.compile is turned off, or nothing computes on tensors", "here")]
        return tuple(dict.fromkeys(breaks))

    def unsupported_reasons(self) -> tuple[str, ...]:
        """Return the reasons that Octavo's layers gave where a graph ended."""
        ended = [(c.fail_reason, c.fail_user_frame_filename) for c in self._records.compilations if c.fail_reason]
        ended += [(b.reason, b.user_stack[-1].filename) for b in self._records.breaks if b.user_stack]
        sentences = [_quoted(reason) for reason, file in ended if file and HERE in Path(file).parents]
        return tuple(dict.fromkeys(filter(None, sentences)))

    def recompiles(self) -> tuple[Recompile, ...]:
        functions = self._functions()
        return tuple(
            Recompile(_guard(c.recompile_reason), " in ".join(reversed(functions[_frame(c)])))
            for c in self._records.compilations
            if c.recompile_reason and not c.fail_type
        )

    def skips(self) -> tuple[str, ...]:
        """Return one reason for each counted skip, where the compiler gave one."""
        reasons = [text or "no reason was given" for text in self._skipped[: self._records.skips]]
        return tuple(reasons + ["no reason was given"] * (self._records.skips - len(reasons)))

    def _functions(self) -> dict[str, tuple[str, str]]:
        """Return (name, file:line) of every compiled function, by number: a failed one is recorded by number only."""
        compiled = self._records.compilations
        names = {_frame(c): (c.co_name, _file(c.co_filename, c.co_firstlineno)) for c in compiled if c.co_name}
        return {_frame(c): names.get(_frame(c), ("a function", "unknown")) for c in compiled}


class _Listener(logging.Handler):
    def __init__(self, heard: list[str]) -> None:
        super().__init__(logging.WARNING)
        self.heard = heard

    def emit(self, record: logging.LogRecord) -> None:
        self.heard.append(record.getMessage())


# -- graphs ------------------------------------------------------------------------------------------------------------


def _operators(graph: GraphModule, direction: str) -> Graph:
    names = Counter(name for node in graph.graph.nodes if (name := _name(node)))
    ours = {name: n for name, n in names.items() if name.startswith(OURS)}
    return Graph(direction, tuple(sorted(ours.items())), tuple(sorted((names - Counter(ours)).items())))


def _name(node: Node) -> str:
    """Return the name of a node's operator; empty if the node calls none."""
    if node.op != "call_function":
        return ""
    return operator_name(node.target, node.args[0] if node.args else None, OURS[:-2])


def _recipes(graph: GraphModule) -> dict[int, Recipe]:
    """Return, for each input of the graph that an Octavo node takes, by its index, the recipe of that node."""
    places = {node: i for i, node in enumerate(n for n in graph.graph.nodes if n.op == "placeholder")}
    recipes: dict[int, Recipe] = {}
    for node in graph.graph.nodes:
        if _name(node) in (f"{OURS}run", f"{OURS}attach"):
            _, _, presence, _, key = str(node.args[1]).split("|", 4)
            config: Any = values.parse(key)
            for recipe, inputs in _recipes_of(config, node, presence.split(",")):
                # a weight in parts reaches the node through torch.stack
                recipes |= {places[n]: recipe for g in inputs for n in (g, *g.all_input_nodes) if n in places}
    for body, inputs in _bodies(graph):
        recipes |= {places[inputs[i]]: recipe for i, recipe in _recipes(body).items() if inputs[i] in places}
    return recipes


def _bodies(graph: GraphModule) -> Iterator[tuple[GraphModule, list[Any]]]:
    """Yield the graphs inside nodes, such as a checkpoint's, each with its arguments."""
    for node in graph.graph.nodes:
        first: Any = node.args[0] if node.op == "call_function" and node.args else None
        body = getattr(graph, first.target, None) if getattr(first, "op", "") == "get_attr" else None
        if isinstance(body, GraphModule):
            yield body, list(node.args[1:])


def _recipes_of(config: Any, node: Any, presence: list[str]) -> Iterator[tuple[Recipe, list[Any]]]:
    """Yield the recipes of a node, each with the input nodes that it applies to."""
    if hasattr(config, "recipe"):
        yield config.recipe, list(node.all_input_nodes)
    elif isinstance(config, chain.Config):
        sizes = [int(mark.removeprefix("t")) for mark in presence]
        owner = [None, *[stage for stage, n in zip(config.stages, config.fields, strict=True) for _ in range(n)]]
        for i, stage in enumerate(owner):
            if isinstance(stage, linear_layer.Config | grouped_linear_layer.Config):
                start = sum(sizes[:i])
                yield stage.recipe, list(node.args[0][::-1][start : start + sizes[i]])  # a run's tensors, reversed


def _runs(graph: GraphModule) -> Iterator[Fused]:
    """Yield the runs of operations in a graph."""
    for node in graph.graph.nodes:
        if _name(node) == f"{OURS}run":
            key = str(node.args[1]).split("|", 4)[-1]
            if key.startswith("chain("):
                config = chain.layer.config(key)
                ops, forward, backward = steps_of(config)
                yield Fused(
                    ops, forward, backward, tuple(f"{r.rule}: {r.sentence}" for r in unsupported_reasons_of(key))
                )
    for body, _ in _bodies(graph):
        yield from _runs(body)


# -- the compiler's messages -------------------------------------------------------------------------------------------


def _sentence(reason: str) -> str:
    """Return the message of a deliberate break, or else the first line of a reason and its explanation."""
    first = reason.split("*** While handling")[0]
    explained = re.search(r"^\s*Explanation: (.+)$", first, re.MULTILINE)
    head = first.strip().splitlines()[0] if first.strip() else "no reason was given"
    return _quoted(reason) or (f"{head}. {explained[1]}" if explained else head)


def _quoted(reason: str) -> str:
    """Return the message of `torch._dynamo.graph_break(msg)` or of an Octavo error; empty if neither ended it."""
    said = re.search(r"User-inserted graph break\. Message: (?!None$)(.+)$", reason, re.MULTILINE)
    raised = re.search(r"raised exception Unsupported\w*\(.*?(['\"])(.+)\1", reason)
    return said[1] if said else raised[2] if raised else ""


def _guard(reason: str) -> str:
    """Return only the condition, without the graph's number before it and the source after it."""
    line = reason.strip().splitlines()[0]
    return re.sub(r"^\d+/\d+: ", "", line).split("  # ")[0]


def _frame(compilation: Any) -> str:
    """Return the number of the function that was compiled: "3" for "3/1"."""
    return str(compilation.compile_id).split("/")[0]


def _place(stack: Sequence[Any]) -> str:
    """Return the innermost line of the user's code, or else the innermost line."""
    if not stack:
        return "unknown"
    users = [entry for entry in stack if not _is_library(entry.filename)]
    entry = (users or stack)[-1]
    return f"{_file(entry.filename, entry.lineno)} in {entry.name}"


def _place_of_failure(compilation: Any, functions: dict[str, tuple[str, str]]) -> str:
    file, line = compilation.fail_user_frame_filename, compilation.fail_user_frame_lineno
    return functions[_frame(compilation)][1] if not file or _is_library(file) else _file(file, line)


def _is_library(file: str) -> bool:
    """Return whether a file is Octavo's, torch's or Python's, not the user's."""
    above = Path(file).parents
    return HERE in above or TORCH in above or (PYTHON in above and "site-packages" not in Path(file).parts)


def _file(file: str, line: int | None) -> str:
    """Return file:line, relative to the current folder if the file is inside it."""
    path, here = Path(file), Path(os.getcwd())
    return f"{path.relative_to(here) if here in path.parents else path}:{line}"
