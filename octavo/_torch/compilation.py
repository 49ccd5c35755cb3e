"""A compilation by the parts that torch.compile is made of, and its records.

Compilers take seconds to import: every function imports them when it is called. Where torch keeps its records:

    breaks         `graph_break_reasons`, and compilations that failed: their function then runs without a graph
    recompiles     compilations that have a `recompile_reason`, the guard that failed on the newest graph
    skips          counters["inductor"]["cudagraph_skips"]; their reasons are only logged
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule

COMPILATIONS = 1_000_000  # to be remembered; torch keeps the last 64


class Records:
    """The compiler's records of a run."""

    compilations: Sequence[Any] = ()
    breaks: Sequence[Any] = ()
    skips = 0


def reset() -> None:
    """Forget all compiled graphs."""
    torch._dynamo.reset()


def any_number_of_graphs() -> AbstractContextManager[Any]:
    """Return a context in which a function may be compiled for any number of models: torch stops at the eighth."""
    from torch._dynamo import config

    return config.patch(recompile_limit=COMPILATIONS)


def fresh_cache() -> AbstractContextManager[Any]:
    """Return a context with an empty disk cache."""
    from torch._inductor.utils import fresh_cache

    return fresh_cache()


def cudagraph_skips() -> int:
    """Return how many graphs of this process were not captured as CUDA graphs."""
    from torch._dynamo.utils import counters

    return counters["inductor"]["cudagraph_skips"]


def modes() -> tuple[str, ...]:
    """Return the modes of torch.compile."""
    from torch._inductor import list_mode_options

    return tuple(list_mode_options())


def mode_options(mode: str, dynamic: bool | None) -> dict[str, Any]:
    """Return the Inductor's options that a mode of torch.compile stands for."""
    from torch._inductor import list_mode_options

    return dict(list_mode_options(mode, dynamic))


def traced(graph: GraphModule, inputs: Sequence[Any], see: Callable[[GraphModule, str], None]) -> Any:
    """Return a graph's function without generated code. `see` gets each graph that is derived from it, with "forward",
    "backward" or "inference"."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def compiler(direction: str) -> Callable[[GraphModule, Any], Any]:
        def compile_(part: GraphModule, _: Any) -> Any:
            see(part, direction)
            return make_boxed_func(part.forward)

        return compile_

    backend = aot_autograd(
        fw_compiler=compiler("forward"),
        bw_compiler=compiler("backward"),
        inference_compiler=compiler("inference"),
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )
    return backend(graph, inputs)


def generated(
    graph: GraphModule,
    inputs: Sequence[Any],
    options: dict[str, Any],
    see: Callable[[GraphModule, str, Callable[[], Any]], Any],
) -> Any:
    """Return a graph's function as Inductor generates it. `see` gets each graph that is derived from it, its direction,
    and the call that compiles it, whose result it returns."""
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def compile_(part: GraphModule, example: Any, **settings: Any) -> Any:
        backward, inference = settings.get("is_backward", False), settings.get("is_inference", False)
        direction = "backward" if backward else "inference" if inference else "forward"
        return see(part, direction, partial(compile_fx_inner, part, example, **settings))

    return compile_fx(graph, list(inputs), inner_compile=compile_, config_patches=options)


@contextmanager
def recorded(skips: logging.Handler) -> Iterator[Records]:
    """Record what the compiler does. It is reset before and after the block, and its counters are restored. The records
    are complete after the block; `skips` hears why graphs are not captured. The disk cache of whole graphs is off
    meanwhile: a graph from there is never seen."""
    from torch._dynamo import utils
    from torch._functorch import config
    from torch._inductor.cudagraph_utils import cudagraphs_log

    counters, records = utils.counters, Records()
    kept = {name: Counter(counted) for name, counted in counters.items()}
    reset()
    counters.clear()
    limit = utils._compilation_metrics.maxlen
    utils.set_compilation_metrics_limit(COMPILATIONS)
    earlier = len(utils.get_compilation_metrics())
    cudagraphs_log.addHandler(skips)
    try:
        with config.patch(enable_autograd_cache=False, enable_remote_autograd_cache=False):
            yield records
        records.compilations = utils.get_compilation_metrics()[earlier:]
        records.breaks, records.skips = list(utils.graph_break_reasons), cudagraph_skips()
    finally:
        cudagraphs_log.removeHandler(skips)
        utils.set_compilation_metrics_limit(limit or utils.DEFAULT_COMPILATION_METRICS_LIMIT)
        reset()
        counters.clear()
        counters.update(kept)
