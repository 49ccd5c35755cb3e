"""A stand-in for deep_ep.Buffer over gloo: the signatures of deep_ep/buffer.py at 04b06f7, in a few lines of torch."""

import torch
import torch.distributed as dist


class Buffer:
    def __init__(self, group):
        self.group, self.group_size = group, group.size()

    def get_dispatch_layout(
        self, topk_idx, num_experts, previous_event=None, async_finish=False, allocate_on_comm_stream=False
    ):
        """(num_tokens_per_rank, num_tokens_per_rdma_rank, num_tokens_per_expert, is_token_in_rank, event)."""
        local = num_experts // self.group_size
        rank = torch.where(topk_idx >= 0, topk_idx // local, -1)
        is_in_rank = (rank[:, :, None] == torch.arange(self.group_size)).any(1)
        per_expert = (topk_idx[:, :, None] == torch.arange(num_experts)).sum((0, 1)).int()
        return is_in_rank.sum(0).int(), None, per_expert, is_in_rank, None

    def _exchange(self, x, ins, outs):
        out = x.new_empty(sum(outs), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), outs, ins, group=self.group)
        return out

    def dispatch(
        self, x, handle=None, num_tokens_per_rank=None, num_tokens_per_rdma_rank=None, is_token_in_rank=None,
        num_tokens_per_expert=None, topk_idx=None, topk_weights=None, expert_alignment=1, num_worst_tokens=0,
        config=None, previous_event=None, async_finish=False, allocate_on_comm_stream=False,
    ):  # fmt: skip
        """(recv_x, recv_topk_idx, recv_topk_weights, num_recv_tokens_per_expert_list, handle, event)."""
        if handle is not None:
            assert topk_idx is None and topk_weights is None
            sources, ins, outs, _ = handle
            return self._moved(x, sources, ins, outs), None, None, None, None, None
        sources = [is_token_in_rank[:, rank].nonzero()[:, 0] for rank in range(self.group_size)]
        sources, ins = torch.cat(sources), [len(s) for s in sources]
        assert ins == num_tokens_per_rank.tolist() and topk_weights.dtype == torch.float32
        outs = self._exchange(torch.tensor(ins)[:, None], [1] * self.group_size, [1] * self.group_size)[:, 0].tolist()
        local = len(num_tokens_per_expert) // self.group_size
        first = self.group.rank() * local
        index, weights = (self._exchange(t[sources], ins, outs) for t in (topk_idx, topk_weights))
        mine = (index >= first) & (index < first + local)
        index, weights = torch.where(mine, index - first, -1), torch.where(mine, weights, 0)
        counts = [int((index == expert).sum()) for expert in range(local)]
        handle = sources, ins, outs, len(is_token_in_rank)
        return self._moved(x, sources, ins, outs), index, weights, counts, handle, None

    def _moved(self, x, sources, ins, outs):
        if isinstance(x, tuple):
            codes, scales = x
            assert codes.dtype == torch.float8_e4m3fn and scales.dtype == torch.float32 and scales.is_contiguous()
            moved = self._exchange(codes.view(torch.uint8)[sources], ins, outs).view(codes.dtype)
            return moved, self._exchange(scales[sources], ins, outs)
        assert x.dtype == torch.bfloat16
        return self._exchange(x[sources], ins, outs)

    def combine(
        self, x, handle, topk_weights=None, bias=None, config=None, previous_event=None, async_finish=False,
        allocate_on_comm_stream=False,
    ):  # fmt: skip
        """(recv_x, recv_topk_weights, event): sums over ranks, without weights."""
        sources, ins, outs, tokens = handle
        found = []
        for t in (x, topk_weights):
            if t is not None:
                sums = torch.zeros(tokens, t.shape[1]).index_add(0, sources, self._exchange(t, outs, ins).float())
                t = sums.to(t.dtype)
            found.append(t)
        return *found, None
