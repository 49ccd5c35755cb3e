"""Experts over ranks by DeepEP's kernels: `DeepEP`, a dispatcher around a `deep_ep.Buffer`.

DeepEP sends a token once to each rank that has one of its experts, so the rank of the experts sorts it to them,
multiplies their outputs by the weights, and sums them; DeepEP adds the sums of the ranks. Its signatures are those of
`deep_ep/buffer.py` in deepseek-ai/DeepEP, at 04b06f7: `get_dispatch_layout`, `dispatch` and `combine`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo._torch.autograd import mapped
from octavo.errors import UnsupportedConfig, UnsupportedDtype
from octavo.moe.dispatch import Dispatch, Dispatched
from octavo.moe.payload import NO_CODES, Payload
from octavo.moe.permutation import Permutation, permute, sort, unpermute
from octavo.quant.grouped import GroupedTensor

BLOCK = 128  # elements of a row that share one of DeepEP's float32 scales


class _Arrived(NamedTuple):
    """The tokens of a call on the ranks of their experts."""

    permutation: Permutation
    weights: Tensor
    handle: Any


class DeepEP(Dispatch):
    """A dispatcher around a `deep_ep.Buffer`, whose ranks have equally many experts each.

    It was never run with DeepEP, only with a stand-in of the same signatures. x is bfloat16; with `payload="codes"` and
    fp8-block it travels as codes with their scales, dy as values. y and dx are sums of bfloat16 numbers, one for each
    rank. The host waits for the number of tokens, so no graph can hold it.

    Args:
        buffer: the `deep_ep.Buffer` of the ranks.
        payload: "values", the default, or "codes".

    Raises:
        UnsupportedConfig: `payload` is unknown, or the buffer has no `dispatch` and `combine`.

    Example:
        >>> def build(buffer):  # deep_ep.Buffer(group, num_nvl_bytes)
        ...     dispatcher = octavo.moe.DeepEP(buffer, payload="codes")
        ...     return octavo.MoE(4096, 1536, 128, 8, recipe="fp8-block", dispatcher=dispatcher, num_local_experts=16)
    """

    takes_payload = True

    def __init__(self, buffer: object, *, payload: str = "values") -> None:
        missing = [name for name in ("get_dispatch_layout", "dispatch", "combine") if not hasattr(buffer, name)]
        if missing or payload not in ("values", "codes"):
            raise UnsupportedConfig(
                f"DeepEP takes a deep_ep.Buffer and payload='values' or 'codes', got {type(buffer).__name__} "
                f"{'without ' + ', '.join(missing) + ' ' if missing else ''}and {payload!r}."
            )
        self.buffer: Any = buffer
        self.payload = payload

    def __repr__(self) -> str:
        return f"DeepEP(payload={self.payload!r})"

    def dispatch(  # type: ignore[override]
        self, x: Tensor, index: Tensor, weights: Tensor, num_experts: int, *, payload: Payload = NO_CODES,
        meanwhile: Callable[[], None] | None = None,
    ) -> Dispatched:  # fmt: skip
        """Send tokens to the ranks of their experts.

        Args:
            x: the tokens [T, hidden], in bfloat16.
            index: the experts of each token [T, K].
            weights: the weight of each assignment [T, K].
            num_experts: the number of experts of all ranks.
            payload: the quantizers of the experts, which `octavo.MoE` passes.
            meanwhile: a function that is called before the rows are needed.

        Returns:
            The rows of this rank's experts.

        Raises:
            UnsupportedDtype: x is not bfloat16.
            UnsupportedConfig: a compiler traces, or the recipe has no codes that DeepEP sends.
        """
        if torch.compiler.is_compiling():
            raise UnsupportedConfig("DeepEP waits on the host for the number of tokens, which a graph cannot.")
        if x.dtype != torch.bfloat16:
            raise UnsupportedDtype(f"DeepEP sends bfloat16, got {x.dtype}. Cast x, or use octavo.moe.ExpertParallel.")
        local = num_experts // self.buffer.group_size
        spec = None if self.payload == "values" else payload.x
        if self.payload == "codes" and (spec is None or spec.block != (1, BLOCK) or spec.scale_format is not None):
            raise UnsupportedConfig(
                f"DeepEP(payload='codes') sends a float32 scale for each {BLOCK} elements of a row, as fp8-block has; "
                f"{payload.why or f'x is quantized by {spec}'}. Use payload='values'."
            )
        found: Any = _Sent.apply(x, weights, index, num_experts, self.buffer, spec)  # type: ignore[no-untyped-call]
        tokens, arrived_weights, local_index, handle, codes, scale = found
        if meanwhile is not None:
            meanwhile()
        permutation = sort(local_index, local)
        state = _Arrived(permutation, arrived_weights, handle)
        if spec is None:
            return Dispatched(permute(tokens, permutation, tail="untouched")[0], permutation.sizes, state)
        anchor = None
        if tokens.requires_grad:
            shape = permutation.assignments.shape[0], tokens.shape[1]
            anchor = mapped(
                tokens, lambda t: t.new_zeros(1).expand(shape), lambda dy: unpermute(dy.contiguous(), permutation)
            )
        rows = GroupedTensor.of(
            spec, codes, scale, permutation.sizes, source=permutation.sources, dtype=x.dtype, anchor=anchor
        )
        return Dispatched(rows, permutation.sizes, state)

    def combine(self, rows: Tensor, dispatched: Dispatched) -> Tensor:
        """Sum the experts' rows of each token with the weights, and send the sums back.

        Args:
            rows: the experts' outputs.
            dispatched: the result of `dispatch`.

        Returns:
            y [T, hidden].
        """
        state: Any = dispatched.state
        sums = unpermute(rows, state.permutation, state.weights, tail="untouched")
        buffer, handle = self.buffer, state.handle
        return mapped(  # dy goes where the tokens went
            sums, lambda t: buffer.combine(t, handle)[0], lambda dy: buffer.dispatch(dy.contiguous(), handle=handle)[0]
        )


class _Sent(torch.autograd.Function):
    """Tokens and weights on the ranks of their experts. Backward adds the gradients of the ranks."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, index: Tensor, experts: int, buffer: Any, spec: Any
    ) -> tuple[Any, ...]:
        ctx.set_materialize_grads(False)
        to_rank, to_rdma_rank, to_expert, is_in_rank, _ = buffer.get_dispatch_layout(index, experts)
        sent: Any = x
        if spec is not None:
            q = spec.quantize(x)
            sent = q.codes, q.scale.contiguous()
        arrived, local_index, arrived_weights, _, handle, _ = buffer.dispatch(
            sent, num_tokens_per_rank=to_rank, num_tokens_per_rdma_rank=to_rdma_rank, is_token_in_rank=is_in_rank,
            num_tokens_per_expert=to_expert, topk_idx=index, topk_weights=weights.float(),
        )  # fmt: skip
        ctx.given = buffer, handle, weights.dtype
        codes, scale = (None, None) if spec is None else arrived
        tokens = arrived if codes is None else x.new_zeros(1).expand(codes.shape[0], x.shape[1])
        ctx.mark_non_differentiable(local_index)
        return tokens, arrived_weights, local_index, handle, codes, scale

    @staticmethod
    def backward(ctx: Any, dtokens: Tensor | None, dweights: Tensor | None, *_: Any) -> Any:  # type: ignore[override]
        buffer, handle, dtype = ctx.given
        if dtokens is None or dweights is None:
            raise UnsupportedConfig("DeepEP sends the gradients of x and of the weights together, and one is missing.")
        dx, summed, _ = buffer.combine(dtokens.contiguous(), handle, topk_weights=dweights.float())
        return dx, summed.to(dtype), None, None, None, None
