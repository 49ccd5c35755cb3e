"""Parts that the linear and the grouped linear layer share: operands that backward keeps, and extras for a weight
gradient that `backward_dw()` computes.

Backward keeps an operand as a plain tensor or as the tensors of its codes. Both take three fields, so that the number
of tensors that cross a node is fixed.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.communication.all_reduced_amaxes import all_reduced_amaxes
from octavo.ops.linear_config import LinearSettings
from octavo.quant.proto import TensorProto
from octavo.quant.qtensor import Parts, QProto, QTensor
from octavo.quant.quantizer import CastArgs, QuantizerPair
from octavo.runtime.contract import WeightCast, WeightLayer
from octavo.runtime.deferred_wgrad import unfilled_dy_buffers
from octavo.runtime.gradient_targets import Target, Writes, advance
from octavo.scaling.cast_arguments import Measure, W, X, cast_args


class Kept(NamedTuple):
    """A QTensor's tensors, or a plain tensor in the place of its codes."""

    codes: Any = None
    scale: Any = None
    global_scale: Any = None

    @classmethod
    def of(cls, q: QTensor | QProto | None) -> "Kept":
        return NOT_KEPT if q is None else cls(q.codes, q.scale, q.global_scale)


NOT_KEPT = Kept()


class SavedOperands:
    """The tensors that a linear layer saved, by operand."""

    __slots__ = ()
    x_codes: Any
    x_scale: Any
    x_global_scale: Any
    w_codes: Any
    w_scale: Any
    w_global_scale: Any
    dy_inverse_scale: Any
    dy_amax_count: Any
    dy_buffer: Any
    dy_buffer_1: Any
    dy_buffer_2: Any
    dy_buffer_3: Any

    @property
    def x(self) -> Parts:
        """The tensors of x."""
        return tuple([t for t in (self.x_codes, self.x_scale, self.x_global_scale) if t is not None])

    @property
    def w(self) -> Parts:
        """The tensors of w."""
        return tuple([t for t in (self.w_codes, self.w_scale, self.w_global_scale) if t is not None])

    @property
    def dy_scaling(self) -> Parts:
        """Delayed: dy's part of `scaling`."""
        return tuple([t for t in (self.dy_inverse_scale, self.dy_amax_count) if t is not None])

    @property
    def dy_buffers(self) -> Parts:
        """The buffers that a deferred dw reads dy from."""
        buffers = self.dy_buffer, self.dy_buffer_1, self.dy_buffer_2, self.dy_buffer_3
        return tuple([t for t in buffers if t is not None])


class Backward(NamedTuple):
    """One call of backward: its settings, the tensors that forward saved, and the buffers that it writes to."""

    config: Any
    kept: Any
    buffers: Any
    writes: Writes | None

    def write(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Write to a buffer, now or when the chain around this layer is done."""
        if self.writes is None:
            function(*arguments)
        else:
            self.writes.put_off(function, *arguments)

    def seed(self) -> Tensor | None:
        """The random counter from which a cast of dy draws; None if none does."""
        seed: Tensor | None = self.buffers.seed if self.config.is_stochastic else None
        return seed if seed is None or self.writes is None else self.writes.drawn(seed)

    def advance(self) -> None:
        """Advance the random counter, after all else: a backward that fails before draws the same numbers when it is
        repeated. (The cast of dy raised its amax; a second cast raises it no further.)"""
        if self.config.is_stochastic and self.buffers.seed is not None:
            self.write(advance, self.buffers.seed)


class MatmulLayer(WeightLayer):
    """A layer of GEMMs with a weight."""

    scales = ("x_scale", "w_scale")

    def graph_buffers(
        self, config: Any, main_grad: Parts, amax: Tensor | None, seed: Tensor | None, mark: Tensor | None, *rest: Any
    ) -> Any:
        """Buffers from the tensors that a graph passes along. `mark` only tells one call with a deferred dw from
        another."""
        return self.Buffers(Target(main_grad, config.main_grad) if main_grad else None, amax, seed, None, *rest)

    def keeps_state(self, config: Any) -> bool:
        states = config.main_grad, config.observe, config.deferred_wgrad, config.is_stochastic
        return any(states) or config.weight == "held"

    def fills(self, config: Any) -> bool:
        return bool(config.dy_buffers)

    def auxiliary(self, config: Any) -> int:
        copies = config.dy_buffers > 0 and config.kept_x == "plain"
        return int(config.dy_buffer_auxiliary.stop + copies)


def deferred_auxiliary(config: LinearSettings, x: Any, dy_buffers: tuple[TensorProto, ...]) -> Parts:
    """The extras that a deferred dw reads: buffers for dy, and a copy of a plain x, since the caller may write to x."""
    buffers = unfilled_dy_buffers(dy_buffers)
    return (*buffers, x.clone(memory_format=torch.contiguous_format)) if config.kept_x == "plain" else buffers


def abstract_deferred_auxiliary(
    config: LinearSettings, x: TensorProto, dy_buffers: tuple[TensorProto, ...]
) -> tuple[TensorProto, ...]:
    copy = (TensorProto(tuple(x.shape), x.dtype, x.device),) if config.kept_x == "plain" else ()
    return (*dy_buffers, *copy)


def saved_operands(config: LinearSettings, inputs: Any, intermediates: Any) -> tuple[Any, Any, Any, Any, Any, Any]:
    """The six fields of x and w that backward needs, from the inputs or from what forward made."""
    x = Kept(intermediates.x_codes, intermediates.x_scale, intermediates.x_global_scale)
    w = Kept(intermediates.w_codes, intermediates.w_scale, intermediates.w_global_scale)
    if config.dy_buffers:
        x = NOT_KEPT  # the deferred dw has it
    elif config.kept_x == "plain":
        x = Kept(inputs.x)
    elif config.kept_x and not config.made_x:
        x = Kept(*inputs.x_codes)
    if config.kept_w in ("plain", "again"):
        w = Kept(inputs.weight)
    elif config.kept_w and not config.made_w:
        w = Kept(*(inputs.w_column if config.kept_w == "column" else inputs.w_row))
    return *x, *w


def saved_scaling(config: LinearSettings, scaling: Parts, all_reduced: Parts) -> tuple[Any, Any, Any, Any, Any]:
    """Five fields: dy's part of `scaling`, and if backward makes x's and w's columns, their inverse scales, and w's
    amax if ranks have agreed on it."""
    inverse_scale, count = (*scaling[config.dy_scaling], None, None)[:2]
    makes_x = scaling and config.x_columns == "backward" and "w" in config.grads
    makes_w = scaling and config.kept_w == "again"
    amaxes = all_reduced_amaxes("w", config.all_reduced, all_reduced) if config.kept_w == "again" else ()
    return (
        inverse_scale, count, scaling[X] if makes_x else None, scaling[W] if makes_w else None,
        amaxes[1] if amaxes else None,
    )  # fmt: skip


def weight_cast_args(config: LinearSettings, cast: WeightCast, pair: QuantizerPair, measure: Measure) -> CastArgs:
    """The arguments of a cast of a weight into cached codes. The weight's amaxes follow x's in one tensor, in equal
    number."""
    running_amax = cast.amaxes[0].chunk(2)[1] if cast.amaxes else None
    return cast_args(config.recipe, pair, cast.scaling, measure, running_amax)._replace(skip=cast.skip)
