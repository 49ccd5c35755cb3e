"""One watched compilation: a backend that keeps the names of a graph's operators, and what the compiler wrote down.

Where torch keeps what is read here (the same in 2.11 and 2.13):

    breaks         `graph_break_reasons`, and compilations that failed: their function then runs without a graph
    recompiles     compilations that have a `recompile_reason`, the guard that failed on the newest graph
    skips          counters["inductor"]["cudagraph_skips"]; their reasons are only logged

The disk cache of whole graphs is off meanwhile: what comes from there is never seen. Compilers are imported where they
are used, which takes seconds.
"""

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
from octavo.fuser.plan import refusals_of, steps_of
from octavo.inspection.report import Break, Fused, Graph, Recompile
from octavo.layers import chain, linear
from octavo.recipes import Recipe

OURS = "octavo::"
HERE, TORCH, PYTHON = Path(__file__).parents[1], Path(torch.__file__).parent, Path(sysconfig.get_paths()["stdlib"])
COMPILATIONS = 1_000_000  # to be remembered; torch keeps the last 64


class Capture:
    """A backend for torch.compile. `options` are the Inductor's; None stops at the graphs and generates no code."""

    def __init__(self, options: dict[str, Any] | None) -> None:
        self.options = options
        self.graphs = 0
        self.captured: list[Graph] = []
        self.runs: list[Fused] = []
        self.recipes: dict[int, Recipe] = {}  # of each tensor that one of our nodes was given, by its id
        self._compilations: list[Any] = []
        self._breaks: list[Any] = []
        self._skipped: list[str] = []
        self._skips = 0

    # -- while it compiles -----------------------------------------------------------------------------------------

    def __call__(self, graph: GraphModule, inputs: Sequence[Any]) -> Any:
        self.graphs += 1
        self.runs += _runs(graph)
        places = _recipes(graph)
        made = self._traced(graph, inputs) if self.options is None else self._generated(graph, inputs, self.options)

        def run(*tensors: Any) -> Any:
            # noted when it runs: two layers alike may share a graph that was made for one of them
            self.recipes.update({id(tensors[place]): recipe for place, recipe in places.items()})
            return made(*tensors)

        return run

    def _traced(self, graph: GraphModule, inputs: Sequence[Any]) -> Any:
        from torch._dynamo.backends.common import aot_autograd
        from torch._functorch._aot_autograd.utils import make_boxed_func
        from torch._functorch.partitioners import min_cut_rematerialization_partition

        def keep(direction: str) -> Callable[[GraphModule, Any], Any]:
            def compile_(part: GraphModule, _: Any) -> Any:
                self.captured.append(_operators(part, direction))
                return make_boxed_func(part.forward)

            return compile_

        backend = aot_autograd(
            fw_compiler=keep("forward"),
            bw_compiler=keep("backward"),
            inference_compiler=keep("inference"),
            partition_fn=min_cut_rematerialization_partition,
            keep_inference_input_mutations=True,
        )
        return backend(graph, inputs)

    def _generated(self, graph: GraphModule, inputs: Sequence[Any], options: dict[str, Any]) -> Any:
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner

        def compile_(part: GraphModule, example: Any, **settings: Any) -> Any:
            backward, inference = settings.get("is_backward", False), settings.get("is_inference", False)
            direction = "backward" if backward else "inference" if inference else "forward"
            self.captured.append(_operators(part, direction))
            said, before = len(self._skipped), _skip_count()
            code = compile_fx_inner(part, example, **settings)
            if _skip_count() > before and len(self._skipped) == said:  # it is silent about what is not on a GPU
                self._skipped.append(str(getattr(code, "disabled_cudagraphs_reason", None) or ""))
            return code

        return compile_fx(graph, list(inputs), inner_compile=compile_, config_patches=options)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """The compiler as in a fresh process, before and after, and its counters as they were."""
        from torch._dynamo import utils
        from torch._functorch import config
        from torch._inductor.cudagraph_utils import cudagraphs_log

        counters = utils.counters
        listener, kept = _Listener(self._skipped), {name: Counter(found) for name, found in counters.items()}
        torch._dynamo.reset()
        counters.clear()
        limit = utils._compilation_metrics.maxlen
        utils.set_compilation_metrics_limit(COMPILATIONS)
        earlier = len(utils.get_compilation_metrics())
        cudagraphs_log.addHandler(listener)
        try:
            with config.patch(enable_autograd_cache=False, enable_remote_autograd_cache=False):
                yield
            self._compilations = utils.get_compilation_metrics()[earlier:]
            self._breaks, self._skips = list(utils.graph_break_reasons), _skip_count()
        finally:
            cudagraphs_log.removeHandler(listener)
            utils.set_compilation_metrics_limit(limit or utils.DEFAULT_COMPILATION_METRICS_LIMIT)
            torch._dynamo.reset()
            counters.clear()
            counters.update(kept)

    # -- afterwards ------------------------------------------------------------------------------------------------

    def breaks(self) -> tuple[Break, ...]:
        """Each place once, those that cost a whole function first."""
        functions = self._functions()
        found = [
            Break(_sentence(c.fail_reason), _place_of_failure(c, functions), functions[_frame(c)][0])
            for c in self._compilations
            if c.fail_type and not c.fail_type.startswith("Skip")  # a function without tensors loses nothing
        ]
        found += [Break(_sentence(b.reason), _place(b.user_stack)) for b in self._breaks]
        if not self.graphs and not found:
            found = [Break("no graph was made: torch.compile is turned off, or nothing computes on tensors", "here")]
        return tuple(dict.fromkeys(found))

    def refusals(self) -> tuple[str, ...]:
        """What our own layers said where a graph ended."""
        ended = [(c.fail_reason, c.fail_user_frame_filename) for c in self._compilations if c.fail_reason]
        ended += [(b.reason, b.user_stack[-1].filename) for b in self._breaks if b.user_stack]
        found = [_quoted(reason) for reason, file in ended if file and HERE in Path(file).parents]
        return tuple(dict.fromkeys(filter(None, found)))

    def recompiles(self) -> tuple[Recompile, ...]:
        functions = self._functions()
        return tuple(
            Recompile(_guard(c.recompile_reason), " in ".join(reversed(functions[_frame(c)])))
            for c in self._compilations
            if c.recompile_reason and not c.fail_type
        )

    def skips(self) -> tuple[str, ...]:
        """As many as were counted, with the reasons that were given."""
        given = [text or "no reason was given" for text in self._skipped[: self._skips]]
        return tuple(given + ["no reason was given"] * (self._skips - len(given)))

    def _functions(self) -> dict[str, tuple[str, str]]:
        """(name, file:line) of every function that was compiled: one that is given up on is recorded by number."""
        found = {
            _frame(c): (c.co_name, _file(c.co_filename, c.co_firstlineno)) for c in self._compilations if c.co_name
        }
        return {_frame(c): found.get(_frame(c), ("a function", "unknown")) for c in self._compilations}


class _Listener(logging.Handler):
    def __init__(self, heard: list[str]) -> None:
        super().__init__(logging.WARNING)
        self.heard = heard

    def emit(self, record: logging.LogRecord) -> None:
        self.heard.append(record.getMessage())


def _skip_count() -> int:
    from torch._dynamo.utils import counters

    return counters["inductor"]["cudagraph_skips"]


# -- graphs ------------------------------------------------------------------------------------------------------------


def _operators(graph: GraphModule, direction: str) -> Graph:
    names = Counter(name for node in graph.graph.nodes if (name := _name(node)))
    ours = {name: n for name, n in names.items() if name.startswith(OURS)}
    return Graph(direction, tuple(sorted(ours.items())), tuple(sorted((names - Counter(ours)).items())))


def _name(node: Node) -> str:
    """An operator's name; empty for what is none."""
    target: Any = node.target
    if node.op != "call_function":
        return ""
    if isinstance(target, torch._ops.HigherOrderOperator) and str(target).startswith("auto_functionalized"):
        target = node.args[0]  # an operator that writes to its inputs, wrapped by the compiler
    if isinstance(target, torch._ops.OpOverload) and target.namespace == OURS[:-2]:
        return str(target._schema.name)
    if isinstance(target, torch._ops.OpOverloadPacket):
        return str(target._qualified_op_name)
    return str(target) if isinstance(target, (torch._ops.OpOverload, torch._ops.HigherOrderOperator)) else ""


def _recipes(graph: GraphModule) -> dict[int, Recipe]:
    """For each input of the graph that one of our nodes takes, by its place, the recipe of that node."""
    places = {node: i for i, node in enumerate(n for n in graph.graph.nodes if n.op == "placeholder")}
    found: dict[int, Recipe] = {}
    for node in graph.graph.nodes:
        if _name(node) in (f"{OURS}run", f"{OURS}attach"):
            _, _, presence, _, key = str(node.args[1]).split("|", 4)
            config: Any = values.parse(key)
            for recipe, given in _recipes_of(config, node, presence.split(",")):
                # a weight in parts reaches the node through a stack of them
                found |= {places[n]: recipe for g in given for n in (g, *g.all_input_nodes) if n in places}
    for body, given in _bodies(graph):
        found |= {places[given[i]]: recipe for i, recipe in _recipes(body).items() if given[i] in places}
    return found


def _bodies(graph: GraphModule) -> Iterator[tuple[GraphModule, list[Any]]]:
    """Graphs inside of nodes, such as a checkpoint's, each with what it is given."""
    for node in graph.graph.nodes:
        first: Any = node.args[0] if node.op == "call_function" and node.args else None
        body = getattr(graph, first.target, None) if getattr(first, "op", "") == "get_attr" else None
        if isinstance(body, GraphModule):
            yield body, list(node.args[1:])


def _recipes_of(config: Any, node: Any, presence: list[str]) -> Iterator[tuple[Recipe, list[Any]]]:
    """Recipes of a node, each with the nodes that it was given for."""
    if hasattr(config, "recipe"):
        yield config.recipe, list(node.all_input_nodes)
    elif isinstance(config, chain.Config):
        sizes = [int(mark.removeprefix("t")) for mark in presence]
        owner = [None, *[stage for stage, n in zip(config.stages, config.fields, strict=True) for _ in range(n)]]
        for i, stage in enumerate(owner):
            if isinstance(stage, linear.Config):
                start = sum(sizes[:i])
                yield stage.recipe, list(node.args[0][::-1][start : start + sizes[i]])  # a run's tensors, backwards


def _runs(graph: GraphModule) -> Iterator[Fused]:
    """The runs of operations in a graph."""
    for node in graph.graph.nodes:
        if _name(node) == f"{OURS}run":
            key = str(node.args[1]).split("|", 4)[-1]
            if key.startswith("chain("):
                config = chain.layer.config(key)
                ops, forward, backward = steps_of(config)
                yield Fused(ops, forward, backward, tuple(f"{r.rule}: {r.sentence}" for r in refusals_of(key)))
    for body, _ in _bodies(graph):
        yield from _runs(body)


# -- the compiler's own words ------------------------------------------------------------------------------------------


def _sentence(reason: str) -> str:
    """What was said on purpose, or else the head of a reason and its explanation."""
    first = reason.split("*** While handling")[0]
    explained = re.search(r"^\s*Explanation: (.+)$", first, re.MULTILINE)
    head = first.strip().splitlines()[0] if first.strip() else "no reason was given"
    return _quoted(reason) or (f"{head}. {explained[1]}" if explained else head)


def _quoted(reason: str) -> str:
    """The message of `torch._dynamo.graph_break(msg)`, or of an error of ours; empty where neither ended the graph."""
    said = re.search(r"User-inserted graph break\. Message: (?!None$)(.+)$", reason, re.MULTILINE)
    raised = re.search(r"raised exception Unsupported\w*\(.*?(['\"])(.+)\1", reason)
    return said[1] if said else raised[2] if raised else ""


def _guard(reason: str) -> str:
    """The condition alone: the graph's number before it and the source behind it are left out."""
    line = reason.strip().splitlines()[0]
    return re.sub(r"^\d+/\d+: ", "", line).split("  # ")[0]


def _frame(compilation: Any) -> str:
    """Which function a compilation was of: "3" of "3/1"."""
    return str(compilation.compile_id).split("/")[0]


def _place(stack: Sequence[Any]) -> str:
    """The innermost line of the user's own, or else the innermost."""
    if not stack:
        return "unknown"
    own = [entry for entry in stack if not _is_library(entry.filename)]
    entry = (own or stack)[-1]
    return f"{_file(entry.filename, entry.lineno)} in {entry.name}"


def _place_of_failure(compilation: Any, functions: dict[str, tuple[str, str]]) -> str:
    file, line = compilation.fail_user_frame_filename, compilation.fail_user_frame_lineno
    return functions[_frame(compilation)][1] if not file or _is_library(file) else _file(file, line)


def _is_library(file: str) -> bool:
    """Whether a line is ours, torch's or Python's: not where a user would look."""
    above = Path(file).parents
    return HERE in above or TORCH in above or (PYTHON in above and "site-packages" not in Path(file).parts)


def _file(file: str, line: int | None) -> str:
    """Relative to the current folder where it lies in it."""
    path, here = Path(file), Path(os.getcwd())
    return f"{path.relative_to(here) if here in path.parents else path}:{line}"
