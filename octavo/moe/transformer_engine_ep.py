"""Experts over ranks by Transformer Engine's NCCL kernels: `TransformerEngineEP`, a dispatcher around its `EpBuffer`.

Its kernels put a token into the rows of its experts on their ranks, so nothing is sorted here. They add the experts'
rows of a token without weights, which this dispatcher therefore multiplies where the experts are. Signatures are those
of `transformer_engine/pytorch/ep.py` in NVIDIA/TransformerEngine, at d0067d0: `EpBuffer`, `ep_dispatch`, `ep_combine`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.errors import UnsupportedConfig, UnsupportedDtype, UnsupportedShape
from octavo.moe.chunk_sort import sort_chunks
from octavo.moe.dispatch import Dispatch, Dispatched
from octavo.moe.payload import NO_CODES, Payload
from octavo.moe.permutation import Permutation, unpermute

FUNCTIONS = ("ep_dispatch", "ep_combine")
FIELDS = ("top_k", "alignment", "hidden_dim", "max_tokens_per_rank", "num_local_experts", "tokens_per_expert")


class _Arrived(NamedTuple):
    """The rows of a call on the rank of their experts."""

    buffer: Any
    weights: Tensor  # of each row
    rows: Permutation  # those that are in use, where they are
    tokens: int  # that this rank sent


class TransformerEngineEP(Dispatch):
    """A dispatcher around the `EpBuffer`s of Transformer Engine, whose `ep_bootstrap` you have called.

    It was never run with Transformer Engine, only with a stand-in of the same signatures. Rows are bfloat16 and travel
    as values. y is a sum of rows that were rounded after they were weighted. With a `recv_capacity_per_rank` the host
    reads nothing, and a CUDA graph may hold it; without one Transformer Engine waits for the number of rows.

    Args:
        ep: the module `transformer_engine.pytorch.ep`, or another object with its `ep_dispatch` and `ep_combine`.
        *buffers: an `EpBuffer` for each call that is in flight: each has a state that backward reads. Calls take them
            in turn. They have alignment=0 and no recipes: Octavo's experts take any number of rows, and quantize them.

    Raises:
        UnsupportedConfig: `ep` lacks a function, there is no buffer, or one has an alignment or a recipe.

    Example:
        >>> def build(ep):  # from transformer_engine.pytorch import ep, after ep.ep_bootstrap(...)
        ...     buffer = ep.EpBuffer(8, 4096, 4096, 16, recv_capacity_per_rank=65536)
        ...     dispatcher = octavo.moe.TransformerEngineEP(ep, buffer)
        ...     return octavo.MoE(4096, 1536, 128, 8, recipe="fp8-block", dispatcher=dispatcher, num_local_experts=16)
    """

    takes_payload = True

    def __init__(self, ep: object, *buffers: object) -> None:
        missing = [name for name in FUNCTIONS if not hasattr(ep, name)]
        if missing or not buffers:
            raise UnsupportedConfig(
                "TransformerEngineEP takes the module transformer_engine.pytorch.ep and an EpBuffer for each call in "
                f"flight, got {'no buffer' if not missing else f'an object without {missing[0]}'}. Pass both."
            )
        for buffer in buffers:
            _check_buffer(buffer)
        self.ep: Any = ep
        self.buffers: tuple[Any, ...] = buffers
        self._calls = 0

    def __repr__(self) -> str:
        return f"TransformerEngineEP(buffers={len(self.buffers)})"

    def dispatch(  # type: ignore[override]
        self, x: Tensor, index: Tensor, weights: Tensor, num_experts: int, *, payload: Payload = NO_CODES,
        meanwhile: Callable[[], None] | None = None,
    ) -> Dispatched:  # fmt: skip
        """Send tokens to the ranks of their experts.

        Args:
            x: the tokens [T, hidden], in bfloat16.
            index: the experts of each token [T, K]. An assignment without an expert goes to the first one, with the
                weight zero.
            weights: the weight of each assignment [T, K].
            num_experts: the number of experts of all ranks.
            payload: the quantizers of the experts, which are not used.
            meanwhile: a function that is called before the rows are needed.

        Returns:
            The rows of this rank's experts.

        Raises:
            UnsupportedDtype: x is not bfloat16.
            UnsupportedShape: the buffer was made for other tokens.
        """
        buffer = self.buffers[self._calls % len(self.buffers)]
        _check_tokens(buffer, x, index)
        self._calls += 1
        there = (index >= 0) & (index < num_experts)
        found = self.ep.ep_dispatch(
            buffer, x, torch.where(there, index, 0).long(), torch.where(there, weights.float(), 0.0)
        )
        rows, row_weights, sizes = found
        if meanwhile is not None:
            meanwhile()
        capacity = rows.shape[0]
        ends = sizes.long().cumsum(0).clamp_max(capacity)  # and a copy: the next call overwrites them
        sizes = torch.diff(ends, prepend=ends.new_zeros(1))
        dropped = None
        if not getattr(buffer, "eager", False):  # the number of rows before any was dropped
            dropped = (buffer.total_recv_tokens.long().sum() - capacity).clamp_min(0)
        state = _Arrived(buffer, row_weights, sort_chunks(sizes[None], capacity), x.shape[0])
        return Dispatched(rows, sizes, state, dropped)

    def combine(self, rows: Tensor, dispatched: Dispatched) -> Tensor:
        """Multiply the experts' rows by their weights, and sum those of each token where the token is.

        Args:
            rows: the experts' outputs.
            dispatched: the result of `dispatch`.

        Returns:
            y [T, hidden].
        """
        state: Any = dispatched.state
        weighted = unpermute(rows, state.rows, state.weights[:, None])
        y: Tensor = self.ep.ep_combine(state.buffer, weighted, num_local_tokens=state.tokens)
        return y


def _check_buffer(buffer: Any) -> None:
    missing = [name for name in FIELDS if not hasattr(buffer, name)]
    if missing:
        raise UnsupportedConfig(
            f"TransformerEngineEP takes EpBuffers, got {type(buffer).__name__} without {', '.join(missing)}."
        )
    recipes = [
        name for name in ("dispatch_fwd_quant_recipe", "combine_bwd_quant_recipe") if getattr(buffer, name, None)
    ]
    if buffer.alignment > 1 or recipes:
        got = f"alignment={buffer.alignment}" if buffer.alignment > 1 else f"{recipes[0]}={getattr(buffer, recipes[0])}"
        raise UnsupportedConfig(
            "Octavo's experts take any number of rows and quantize them, so an EpBuffer has alignment=0 and no recipe, "
            f"got {got}. Leave it out."
        )


def _check_tokens(buffer: Any, x: Tensor, index: Tensor) -> None:
    if x.dtype != torch.bfloat16:
        raise UnsupportedDtype(
            f"TransformerEngineEP sends bfloat16, got {x.dtype}. Cast x, or use octavo.moe.ExpertParallel."
        )
    made = buffer.max_tokens_per_rank, buffer.hidden_dim, buffer.top_k
    if x.shape[0] > made[0] or (x.shape[1], index.shape[1]) != made[1:]:
        raise UnsupportedShape(
            f"This EpBuffer was made for {made[0]} tokens of {made[1]} values with top_k={made[2]}, got "
            f"{x.shape[0]} of {x.shape[1]} with {index.shape[1]}. Make one for the most tokens of a call."
        )
