"""The environments of the harness. Each is a state of torch, or something that is done to a layer, and must leave no
trace in what the layer computes. Adding one is a line of `ENVIRONMENTS`."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

from octavo.recipes import SHIPPED
from tests.strange import events, states
from tests.strange.layers import Layer
from tests.strange.run import Run
from tests.strange.states import DEFAULTS, GPU_DEFAULTS, WITHOUT_GRADIENTS, Enter
from tests.support.recipe_traits import is_stochastic

Event = Callable[[Run], object]
During = Callable[[Run], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Environment:
    """A state of torch, by when a run is in it. `harness.record_of` has the order of events."""

    name: str
    around: Enter = nullcontext  # from before the layer is built until after its last step
    first: Event = lambda run: None  # before the first step
    during: During = lambda run: nullcontext()  # for one step, after one outside
    between: Event = lambda run: None  # between two steps; it may replace `run.module`
    may_differ: tuple[str, ...] = ()  # patterns of the names, in a record, of values that the environment changes
    leaves_out: tuple[str, ...] = ()  # patterns of layers that it is not for: "Linear" or "Linear-fp8-delayed"
    needs_gpu: bool = False
    compiles: bool = False  # it takes a second for a layer
    place: int = 0  # in a sequence: environments with a lower place come before

    def __str__(self) -> str:
        return self.name

    def takes(self, layer: Layer, recipe: str) -> bool:
        names = (layer.name, f"{layer}-{recipe}")
        return not any(fnmatchcase(name, pattern) for name in names for pattern in self.leaves_out)


def whole_run(name: str, enter: Enter, **others: Any) -> Environment:
    return Environment(f"{name}, whole run", around=enter, **others)


def one_step(name: str, enter: Enter, **others: Any) -> Environment:
    return Environment(f"{name}, one step", during=lambda run: enter(), **others)


def one_call(name: str, enter: Enter, **others: Any) -> Environment:
    """The layer is called once more between two steps, and what it returns is dropped."""

    def between(run: Run) -> None:
        with enter():
            run.extra_call()

    return Environment(f"{name}, one call", between=between, **others)


def between_steps(
    name: str, event: Event, may_differ: tuple[str, ...] = (), *leaves_out: str, **others: Any
) -> Environment:
    return Environment(name, between=event, may_differ=may_differ, leaves_out=leaves_out, **others)


def around_a_step(
    name: str, enter: During, may_differ: tuple[str, ...] = (), *leaves_out: str, **others: Any
) -> Environment:
    return Environment(name, during=enter, may_differ=may_differ, leaves_out=leaves_out, **others)


# a mixture counts the tokens of every call in two buffers, and the first microbatch of several writes a cached weight
WRITTEN = ("version of *load", "version of *dropped", "version of *weight_row_*", "version of *weight_column_*")
REPEATED = (*WRITTEN, "version of *scaling_*")  # a training pass that is repeated folds the same amaxes once more
VERSIONS = ("version of *",)
FIRST = -1  # torch swaps no parameter to which one of its fakes, or of its graphs, still has a weak reference
LAST = 1  # the layer is another one afterwards

ROUTING = "routing functions"  # they update a bias at every call, and are no layer, which has modes
TITAN = "converted experts of torchtitan"  # a stand-in, which cannot be imported
CODES = "Linear, weight as codes"
LOSSY = (f"{CODES}-fp8-rowwise(pow2=False)", f"{CODES}-mxfp8(rounding='even')")  # values in bf16 have other codes
MAIN_GRAD = "Linear, main_grad"  # a copy of a parameter lacks attributes, in torch too
LOCAL = (MAIN_GRAD, "Linear, deferred wgrad")  # options that need the whole weight, at one address
# a hook on one of their parts ends a fusion, and the value that the hook sees is rounded
FUSED = ("LayerNorm[LM]*", "residual block", "run with dropout", "MoE*", "Experts*", "*experts of transformers")
PER_PART = ("converted experts of *", "Linear, weight cached", *LOCAL)  # refuse a parametrization, or a shard
DROPOUT = ("run with dropout", "Dropout")  # all threads draw from one generator
GRAPHLESS = ("quantizers", "GroupedLinear, sizes in a list", "GroupedLinear, caller's buffers")  # no graph takes these
# backward counts what it drew for stochastic rounding
DRAWN = tuple(f"*-{name}" for name in SHIPPED if is_stochastic(name))

# faults that are known, each to be taken out with its cause
WEAK = "Linear, weight cached"  # the cache has weak references to weights, and torch swaps no such tensor
# a call on shapes alone advances the version of the running amaxes, whose values stay
FAKED = ("Linear, main_grad-fp8-delayed", "Linear, deferred wgrad-fp8-delayed")

ENVIRONMENTS: tuple[Environment, ...] = (
    *[place(name, enter) for name, enter in DEFAULTS.items() for place in (whole_run, one_step)],
    *[place(name, enter, needs_gpu=True) for name, enter in GPU_DEFAULTS.items() for place in (whole_run, one_step)],
    *[one_call(name, enter, may_differ=WRITTEN) for name, enter in WITHOUT_GRADIENTS.items()],
    # calls between two steps
    between_steps("a call on shapes alone", events.on_shapes_alone, WRITTEN, ROUTING, *FAKED),
    between_steps("torch.export", events.exported, WRITTEN),
    between_steps("pipeline shape inference", events.shapes_inferred, (), ROUTING, "quantizers"),
    between_steps("functional_call", events.called_with_copies, WRITTEN),
    between_steps("torch.func", events.transformed, WRITTEN),
    between_steps("evaluation", events.evaluated, WRITTEN, ROUTING),
    between_steps("requires_grad off and on", events.frozen, WRITTEN),
    between_steps("a call in a thread", events.called_by_a_thread, WRITTEN),
    between_steps("compiled for one call", events.compiled_call, WRITTEN, *GRAPHLESS, compiles=True),
    # a step that fails, and is repeated
    between_steps("failure in forward", events.fails_in_forward, REPEATED, ROUTING),
    between_steps("failure of backward", events.fails_in_backward, REPEATED, ROUTING),
    between_steps("failure after backward", events.fails_after_backward, REPEATED, ROUTING, *DRAWN),
    # copies, averages and conversions
    between_steps("deepcopy", events.deep_copied, VERSIONS, MAIN_GRAD),
    between_steps("pickle", events.pickled, VERSIONS, TITAN),
    between_steps("AveragedModel", events.averaged),
    between_steps("AveragedModel, made at first", events.update_average, first=events.begin_average),
    between_steps("swap_tensors", events.swapped, VERSIONS, WEAK, place=FIRST),
    between_steps("swap_tensors on conversion", events.cast_and_swapped, VERSIONS, ROUTING, MAIN_GRAD, place=FIRST),
    between_steps("swap_tensors on loading", events.loaded_and_swapped, VERSIONS, MAIN_GRAD, WEAK, *LOSSY, place=FIRST),
    between_steps("cast and cast back", events.cast_and_cast_back, WRITTEN, ROUTING),
    between_steps("load_state_dict", events.loaded, VERSIONS, *LOSSY),
    between_steps("meta and load_state_dict", events.emptied_and_loaded, VERSIONS, MAIN_GRAD, *LOSSY),
    between_steps("meta and assign", events.emptied_and_assigned, VERSIONS, MAIN_GRAD, *LOSSY),
    between_steps("parameters in one vector", events.flattened, WRITTEN, CODES),
    between_steps("zero_grad to zeros", events.zeroed, (), MAIN_GRAD),
    # around a step. torch takes the gradient of torchtitan's own silu apart to count it
    one_step("FLOP counter", states.counted, may_differ=VERSIONS, leaves_out=(TITAN,)),
    one_step("profiler", states.profiled),
    one_step("anomaly mode", lambda: torch.autograd.set_detect_anomaly(True)),
    one_step("warnings are errors", states.strict_warnings),
    one_step("torch function mode", states.WatchedFunctions),
    one_step("dispatch mode", states.WatchedOperators, may_differ=VERSIONS),
    one_step("save_on_cpu", torch.autograd.graph.save_on_cpu),
    one_step("copies of saved tensors", states.copied_when_saved),
    around_a_step("forward in a thread", events.forward_in_a_thread),
    around_a_step("a thread that calls a copy", events.beside_a_thread, (), *DROPOUT),
    around_a_step("hooks", events.hooked),
    around_a_step("hooks on every part", events.hooked_in_parts, (), *FUSED),
    around_a_step("parametrization", events.parametrized, VERSIONS, *PER_PART),
    around_a_step("checkpoint", events.checkpointed, REPEATED, ROUTING),
    around_a_step("compiled for one step", events.compiled, REPEATED, ROUTING, *GRAPHLESS, compiles=True),
    # one rank
    whole_run("world of one rank", states.one_rank),
    # a layer that writes main_grad is refused there: DDP averages .grad
    around_a_step("DDP", events.replicated, VERSIONS, "*main_grad*", around=states.one_rank),
    between_steps("FSDP2", events.sharded, VERSIONS, CODES, *LOCAL, around=states.one_rank, place=LAST),
)
