"""The config of a chain of layers, and what follows from it: steps, sizes, and the places of each stage's tensors."""

from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from octavo.runtime.contract import LAYERS
from octavo.values import Value, register


class ChainStep(NamedTuple):
    """A step of stages first … last - 1."""

    name: str  # of a fused operation; empty for a single stage
    first: int
    last: int


def _spans(sizes: Sequence[int], start: int = 0) -> list[slice]:
    spans = []
    for size in sizes:
        spans.append(slice(start, start + size))
        start += size
    return spans


def _answers(question: str) -> Any:
    """Return a property: for each stage, what its layer answers."""
    return cached_property(lambda self: tuple(getattr(layer, question)(stage) for layer, stage in self.pairs))


def _places(sizes: str, start: int = 0) -> Any:
    """Return a property: for each stage, the places of as many tensors as this property says."""
    return cached_property(lambda self: _spans(getattr(self, sizes), start))


@register("chain")
class Config(Value):
    stages: tuple[Value, ...] = ()  # the stages' configs
    forward: tuple[tuple[str, int, int], ...] = ()  # fused steps; stages between them are steps of their own
    backward: tuple[tuple[str, int, int], ...] = ()
    routes: tuple[tuple[int, int, int, int], ...] = ()  # (stage, its input, producer, which of its side outputs)
    hidden: tuple[tuple[int, int], ...] = ()  # (stage, which of its side outputs): not among the chain's outputs
    begin: int = 0  # the number of the first stage's operation, for messages

    @cached_property
    def layers(self) -> tuple[Any, ...]:
        return tuple(LAYERS[stage.registered_name] for stage in self.stages)

    @cached_property
    def pairs(self) -> tuple[tuple[Any, Any], ...]:
        """Each stage's layer and config."""
        return tuple(zip(self.layers, self.stages, strict=True))

    @cached_property
    def steps(self) -> tuple[ChainStep, ...]:
        return _steps(self.forward, len(self.stages))

    @cached_property
    def back_steps(self) -> tuple[ChainStep, ...]:
        """The steps that have a backward, in the order in which backward runs them."""
        return tuple(
            step for step in reversed(_steps(self.backward, len(self.stages)))
            if any(self.active[step.first : step.last])
        )  # fmt: skip

    # for each stage, the layer's answer
    active = _answers("has_backward")  # true also for a stage whose only gradient goes to a buffer, and returns none
    wanted = _answers("wants")
    auxiliary_sizes = _answers("auxiliary")
    intermediates_sizes = _answers("intermediates_size")
    saved_sizes = _answers("saved_size")
    buffers_sizes = _answers("buffers_size")

    # the places of each stage's tensors among the chain's: of its inputs without x, of side outputs that are outputs …
    input_spans = _places("fields", 1)
    chain_output_spans = _places("chain_output_counts", 1)
    auxiliary_spans = _places("auxiliary_sizes")
    intermediates_spans = cached_property(lambda self: _spans(self.intermediates_sizes, self.kept_count))
    saved_spans = _places("saved_sizes")
    buffer_spans = _places("buffers_sizes")

    @cached_property
    def fields(self) -> tuple[int, ...]:
        """The number of inputs of each stage besides x."""
        return tuple(len(wants) - 1 for wants in self.wanted)

    @cached_property
    def forks(self) -> tuple[bool, ...]:
        """Whether each stage is a fork, which returns x itself."""
        return tuple(layer.forks for layer in self.layers)

    @cached_property
    def side_counts(self) -> tuple[int, ...]:
        """The number of side outputs of each stage."""
        return tuple(layer.outputs(stage) - 1 for layer, stage in self.pairs)

    @cached_property
    def chain_outputs(self) -> tuple[tuple[int, ...], ...]:
        """For each stage, which of its side outputs are outputs of the chain."""
        return tuple(tuple(k for k in range(n) if (i, k) not in self.hidden) for i, n in enumerate(self.side_counts))

    @cached_property
    def chain_output_counts(self) -> tuple[int, ...]:
        """For each stage, how many of its side outputs are outputs of the chain."""
        return tuple(len(places) for places in self.chain_outputs)

    @cached_property
    def kept_count(self) -> int:
        """The number of values between stages that one of them may keep: they come before the intermediates."""
        return len(self.stages) - 1 + len(self.loose)

    @cached_property
    def out_place(self) -> int | None:
        """The place of the last stage's memory for y."""
        place = self.layers[-1].out_place(self.stages[-1])
        return None if place is None else self.input_spans[-1].start + place - 1

    @cached_property
    def gradients_in_buffers(self) -> dict[int, int]:
        """The buffer of the first stage's dx, if it has one: the stages' buffers follow each other."""
        return self.layers[0].gradients_in_buffers(self.stages[0])

    @cached_property
    def named_inputs(self) -> tuple[Callable[..., Any], ...]:
        """For each stage, a function that makes its Inputs from x and the other fields."""
        return tuple(layer.Inputs._make for layer in self.layers)

    @cached_property
    def inside(self) -> frozenset[tuple[int, int]]:
        """(stage, input) of each input that is a side output of another stage."""
        return frozenset((consumer, field) for consumer, field, _, _ in self.routes)

    @cached_property
    def sums(self) -> tuple[tuple[int, int, int, int], ...]:
        """Routes in the order in which their gradients are added: the last consumer's first, as autograd adds those of
        operations that are called one by one."""
        return tuple(sorted(self.routes, reverse=True))

    @cached_property
    def decided_by_layout(self) -> dict[str, bool]:
        """For each side, whether the layout decides the launches of all stages."""
        return {
            side: all(layer.decided_by_layout(stage, side) for layer, stage in self.pairs)
            for side in ("forward", "backward")
        }

    @cached_property
    def loose(self) -> tuple[tuple[int, int], ...]:
        """Hidden side outputs, without those of forks, which are x."""
        return tuple((i, k) for i, k in self.hidden if not self.forks[i])


@lru_cache(maxsize=4096)
def _steps(fused: tuple[tuple[str, int, int], ...], count: int) -> tuple[ChainStep, ...]:
    steps: list[ChainStep] = []
    for name, first, last in fused:
        steps += [ChainStep("", i, i + 1) for i in range(steps[-1].last if steps else 0, first)]
        steps.append(ChainStep(name, first, last))
    return (*steps, *[ChainStep("", i, i + 1) for i in range(steps[-1].last if steps else 0, count)])
