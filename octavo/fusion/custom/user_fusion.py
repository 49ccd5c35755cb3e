"""A user's fused operation (`octavo.fusion.rule.FusedOperation`) as a layer that takes the place of several stages.

    forward alone     it saves what the stages themselves would have saved, and each stage runs its own backward
    backward alone    each stage runs its own forward, and it computes gradients from what the stages saved
    both              it saves what it likes

It is checked as a user's operation is (`octavo.fusion.custom.user_op`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from octavo.fusion.custom.saved_values import packed, told
from octavo.fusion.custom.user_op import Functions, OpConfig, Probed, UserConfig, UserLayer
from octavo.runtime import chain
from octavo.runtime.contract import Tensors
from octavo.runtime.dry_run import abstract, without_data
from octavo.values import Value


@dataclass(frozen=True, repr=False, eq=False)
class FusionConfig(UserConfig):
    """The config of a user's fused operation. Each has a config class of its own, as operations have."""

    side: str = "both"  # or "forward", "backward"
    stages: tuple[Value, ...] = ()
    routes: tuple[tuple[int, int, int, int], ...] = ()  # as in a chain's config: channels between these stages
    hidden: tuple[tuple[int, int], ...] = ()

    @cached_property
    def unfused(self) -> chain.Config:
        return chain.Config(self.stages, routes=self.routes, hidden=self.hidden)

    @cached_property
    def operations(self) -> tuple[tuple[Any, Any], ...]:
        return tuple(zip(self.unfused.layers, self.stages, strict=True))

    @cached_property
    def shown(self) -> tuple[tuple[int, ...], ...]:
        return self.unfused.shown

    @cached_property
    def computes(self) -> bool:
        """Whether the user's functions run forward."""
        return self.side != "backward"


class Inputs(chain.Fields):
    @property
    def x(self) -> Any:
        return self[0]

    def _replace(self, x: Any) -> "Inputs":
        return Inputs((x, *self[1:]))


def _by_chain(name: str, *sides: str) -> Any:
    """Make a member that the chain of the stages serves if the operation's side is one of these; otherwise UserLayer
    does."""

    def answer(self: Any, config: FusionConfig, *arguments: Any) -> Any:
        if config.side in sides:
            return getattr(chain.layer, name)(config.unfused, *arguments)
        return getattr(UserLayer, name)(self, config, *arguments)

    return answer


class UserFusion(UserLayer):
    """A user's fused operation."""

    forward, abstract, save, intermediates_size, saved_size, extras, flat_places = (
        _by_chain(name, "backward")
        for name in ("forward", "abstract", "save", "intermediates_size", "saved_size", "auxiliary", "flat_places")
    )
    backward, abstract_gradients, gradient_aliases = (
        _by_chain(name, "forward") for name in ("backward", "abstract_gradients", "gradient_aliases")
    )
    wants, has_backward, buffers_size, graph_buffers = (
        _by_chain(name, "forward", "backward", "both")
        for name in ("wants", "has_backward", "buffers_size", "graph_buffers")
    )

    def __init__(self, name: str, title: str, functions: Functions) -> None:
        where = Functions(*(f"{title}.fuser_{name}" for name in ("forward_compute", "forward_save_ctx", "backward")))
        super().__init__(name, FusionConfig, Inputs, title, functions, where)
        self.Buffers = chain.Fields

    def outputs(self, config: FusionConfig) -> int:
        return 1 + sum(config.unfused.shown_counts)

    def split(self, config: FusionConfig, inputs: Sequence[Any]) -> Sequence[Any]:
        own = chain.stage_inputs(config.unfused, inputs)
        own[0] = own[0]._replace(x=inputs[0])
        return tuple(own)

    def widened(self, config: FusionConfig, grads: Tensors) -> Tensors:
        rest = iter(grads[1:])
        made = enumerate(config.unfused.side_counts)
        return (grads[0], *[next(rest) if k in config.shown[i] else None for i, n in made for k in range(n)])

    def unpacked(self, config: FusionConfig, saved: Sequence[Any]) -> list[tuple[Any, ...]]:
        if config.computes:
            return super().unpacked(config, saved)
        parts = zip(config.operations, config.unfused.saved_spans, strict=True)
        return [
            layer.unpacked(stage, saved[span])[0] if isinstance(stage, OpConfig) else tuple(saved[span])
            for (layer, stage), span in parts
        ]

    def given(self, config: FusionConfig, kept: Sequence[Any]) -> dict[int, Any]:
        if config.computes:
            return super().given(config, kept)
        found: dict[int, Any] = {}
        for i, (layer, stage) in enumerate(config.operations):
            own = layer.given(stage, kept[i : i + 1]) if isinstance(stage, OpConfig) else {}
            before = config.unfused.input_spans[i].start - 1
            found |= {before + at: t for at, t in own.items() if at > 0 or i == 0}
        return found

    # -- planning ------------------------------------------------------------------------------------------------------

    def probe(self, config: FusionConfig, inputs: Sequence[Any]) -> Probed:
        if not config.computes:
            return Probed(config, (), [])
        with without_data():
            found = super().probe(config, inputs)
            like = abstract(tuple(inputs))
            saves_theirs = config.side == "forward" and any(self.wants(config))
            try:
                made = chain.layer.abstract(config.unfused, like)
            except (RuntimeError, ValueError):  # sizes that were made up for a graph do not fit these operations
                if saves_theirs:
                    raise
                return found
            self._check_outputs_alike(found.outputs, made.outputs)
            if saves_theirs:
                self._check_saved_alike(config, chain.layer.save(config.unfused, like, made), found.chosen)
        return found

    def _check_outputs_alike(self, outputs: Sequence[Any], theirs: Sequence[Any]) -> None:
        """Refuse outputs that are unlike those of the operations: the next stage and the caller rely on them."""
        for i, (t, want) in enumerate(zip(outputs, theirs, strict=True)):
            if _unlike(t, want):
                raise TypeError(
                    f"{self.where.compute} returned {told(t)} as {f'extra output {i - 1}' if i else 'y'}, and the "
                    f"operations by themselves make {told(want)}. Return one like theirs."
                )

    def _check_saved_alike(self, config: FusionConfig, want: Sequence[Any], chosen: Sequence[Sequence[Any]]) -> None:
        """Refuse saved values that are unlike the operations' own: after a forward fusion, their own backward takes
        them."""
        for i, (stage, span, part) in enumerate(zip(config.stages, config.unfused.saved_spans, chosen, strict=True)):
            missing: list[Any] = [] if isinstance(stage, OpConfig) else [None]
            ours = [t for value in part for t in (missing if value is None else packed(value))]
            theirs = want[span]
            if len(ours) != len(theirs) or any(_unlike(a, b) for a, b in zip(ours, theirs, strict=True)):
                raise TypeError(
                    f"{self.title} is a forward fusion and saves {_listed(ours)} for operation {i}, whose own backward "
                    f"takes {_listed(theirs)}. Save the same, or define fuser_backward too and register it for both."
                )


def _unlike(a: Any, b: Any) -> bool:
    if a is None or b is None:
        return a is not b
    return (tuple(a.shape), a.dtype) != (tuple(b.shape), b.dtype)


def _listed(values: Sequence[Any]) -> str:
    return "[" + ", ".join("nothing" if t is None else f"{t.dtype} {tuple(t.shape)}" for t in values) + "]"
