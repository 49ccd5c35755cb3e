"""A stand-in for transformer_engine.pytorch.ep over gloo: the signatures of that file at d0067d0, in a few lines of
torch. Rows of an expert are in the order of ranks and tokens; those after the last expert are NaN."""

import torch
import torch.distributed as dist


class EpBuffer:
    def __init__(
        self, top_k, max_tokens_per_rank, hidden_dim, num_local_experts, recv_capacity_per_rank=None, alignment=0,
        payload_dtype=torch.bfloat16, device=None, dispatch_fwd_quant_recipe=None, combine_bwd_quant_recipe=None,
        group=None,  # of the stand-in alone: upstream takes it in ep_bootstrap
    ):  # fmt: skip
        self.top_k, self.hidden_dim, self.num_local_experts = top_k, hidden_dim, num_local_experts
        self.max_tokens_per_rank, self.recv_capacity_per_rank = max_tokens_per_rank, recv_capacity_per_rank
        self.alignment, self.eager = alignment, recv_capacity_per_rank is None
        self.dispatch_fwd_quant_recipe = dispatch_fwd_quant_recipe
        self.combine_bwd_quant_recipe = combine_bwd_quant_recipe
        self.tokens_per_expert = torch.empty(num_local_experts, dtype=torch.int64)
        self.total_recv_tokens = torch.empty(1, dtype=torch.int64)
        self.group, self.slots = group, None

    def everyones(self, *tensors):
        found = [None] * self.group.size()
        dist.all_gather_object(found, [t.detach() for t in tensors], group=self.group)
        return found


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tokens, weights, index, buffer):
        everyones = buffer.everyones(tokens, weights, index)
        local = buffer.num_local_experts
        # (expert, rank, token, k) of each row on each rank
        buffer.slots = [sorted(
            (int(e), rank, t, k)
            for rank, (_, _, i) in enumerate(everyones) for t, row in enumerate(i.tolist()) for k, e in enumerate(row)
            if e // local == owner
        ) for owner in range(buffer.group.size())]  # fmt: skip
        own = buffer.slots[buffer.group.rank()]
        buffer.total_recv_tokens.fill_(len(own))
        buffer.tokens_per_expert.copy_(torch.bincount(
            torch.tensor([e % local for e, *_ in own], dtype=torch.int64), minlength=local
        ))  # fmt: skip
        capacity = len(own) if buffer.eager else buffer.recv_capacity_per_rank
        buffer.slots = [slots if buffer.eager else slots[:capacity] for slots in buffer.slots]
        rows, row_weights = torch.full((capacity, buffer.hidden_dim), torch.nan), torch.full((capacity,), torch.nan)
        for i, (_, rank, t, k) in enumerate(own[:capacity]):
            rows[i], row_weights[i] = everyones[rank][0][t], everyones[rank][1][t, k]
        ctx.given = buffer, buffer.slots, tokens.shape, weights.shape
        return rows.bfloat16(), row_weights

    @staticmethod
    def backward(ctx, drows, dweights):
        buffer, slots, shape, weights_shape = ctx.given
        everyones, mine = buffer.everyones(drows, dweights), buffer.group.rank()
        dx, dw = torch.zeros(shape), torch.zeros(weights_shape)
        for owner, (rows, row_weights) in enumerate(everyones):
            for i, (_, rank, t, k) in enumerate(slots[owner]):
                if rank == mine:
                    dx[t] += rows[i].float()
                    dw[t, k] = row_weights[i]
        return dx.bfloat16(), dw, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, buffer, tokens):
        ctx.given = buffer, buffer.slots, rows.shape
        y, mine = torch.zeros(tokens, buffer.hidden_dim), buffer.group.rank()
        for owner, (expert_out,) in enumerate(buffer.everyones(rows)):
            for i, (_, rank, t, _) in enumerate(buffer.slots[owner]):
                if rank == mine:
                    y[t] += expert_out[i].float()
        return y.bfloat16()

    @staticmethod
    def backward(ctx, dy):
        buffer, slots, shape = ctx.given
        everyones, grad = buffer.everyones(dy), torch.full(shape, torch.nan)
        for i, (_, rank, t, _) in enumerate(slots[buffer.group.rank()]):
            grad[i] = everyones[rank][0][t].float()
        return grad.bfloat16(), None, None


def ep_dispatch(buffer, tokens, topk_idx, topk_weights, *, recv_tokens=None, recv_topk_weights=None):
    """(recv_tokens, recv_topk_weights, tokens_per_expert), the last a tensor of the buffer's."""
    assert tokens.dtype == torch.bfloat16 and topk_weights.dtype == torch.float32
    assert (
        topk_idx.dtype in (torch.int32, torch.int64)
        and (topk_idx >= 0).all()
        and len(tokens) <= buffer.max_tokens_per_rank
    )
    assert recv_tokens is None and recv_topk_weights is None
    return *_Dispatch.apply(tokens, topk_weights, topk_idx, buffer), buffer.tokens_per_expert


def ep_combine(buffer, expert_out, *, num_local_tokens=None, grad_out=None):
    """[num_local_tokens, hidden_dim]: sums without weights."""
    assert expert_out.dtype == torch.bfloat16 and grad_out is None
    return _Combine.apply(
        expert_out, buffer, buffer.max_tokens_per_rank if num_local_tokens is None else num_local_tokens
    )
