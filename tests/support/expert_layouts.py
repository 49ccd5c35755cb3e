"""Stand-ins for experts whose weights lie in other layouts than [experts, out, in]."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.support.dispatched_experts import Config, dispatched, registry_now


def parameter(*shape):
    return nn.Parameter(torch.randn(shape) * shape[-1] ** -0.5)


@dispatched(registry_now, has_bias=True, is_transposed=True, is_concatenated=False)
class Interleaved(nn.Module):
    """GPT-OSS: biases, [in, out], gate and up alternate, clamps."""

    alpha, limit = 1.702, 7.0

    def __init__(self, experts=4, hidden=64, ffn=96):
        super().__init__()
        self.num_experts = experts
        self.gate_up_proj, self.gate_up_proj_bias = parameter(experts, hidden, 2 * ffn), parameter(experts, 2 * ffn)
        self.down_proj, self.down_proj_bias = parameter(experts, ffn, hidden), parameter(experts, hidden)

    def _apply_gate(self, h):
        gate, up = h[..., ::2].clamp(max=self.limit), h[..., 1::2].clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(gate * self.alpha)

    def forward(self, x, router_indices, routing_weights):
        y = torch.zeros_like(x)
        for e in range(self.num_experts):
            token, slot = torch.where(router_indices == e)
            h = self._apply_gate(x[token] @ self.gate_up_proj[e] + self.gate_up_proj_bias[e])
            h = h @ self.down_proj[e] + self.down_proj_bias[e]
            y = y.index_add(0, token, h * routing_weights[token, slot, None])
        return y


@dispatched(registry_now)
class ExactGelu(nn.Module):
    """Mixtral with hidden_act="gelu": an activation that Octavo has not."""

    act_fn = staticmethod(F.gelu)

    def __init__(self, experts=4, hidden=64, ffn=96):
        super().__init__()
        self.num_experts = experts
        self.gate_up_proj, self.down_proj = parameter(experts, 2 * ffn, hidden), parameter(experts, hidden, ffn)

    def forward(self, x, index, weights):
        y = torch.zeros_like(x)
        for e in range(self.num_experts):
            token, slot = torch.where(index == e)
            gate, up = (x[token] @ self.gate_up_proj[e].mT).chunk(2, dim=-1)
            h = (self.act_fn(gate) * up) @ self.down_proj[e].mT
            y = y.index_add(0, token, h * weights[token, slot, None])
        return y


class GLU(nn.Module):
    """DBRX's weights: those of all experts below each other."""

    def __init__(self, experts, hidden, ffn):
        super().__init__()
        self.w1, self.v1, self.w2 = (parameter(experts * ffn, hidden) for _ in range(3))
        self.activation_fn = nn.SiLU()


class DbrxExperts(nn.Module):
    __module__ = "transformers.models.dbrx.modeling_dbrx"

    def __init__(self, experts=4, hidden=64, ffn=96):
        super().__init__()
        self.mlp, self.num_experts, self.ffn = GLU(experts, hidden, ffn), experts, ffn

    def forward(self, x, index, weights):
        y, width = torch.zeros_like(x), x.shape[-1]
        w1, v1, w2 = (w.view(self.num_experts, self.ffn, width) for w in (self.mlp.w1, self.mlp.v1, self.mlp.w2))
        for e in range(self.num_experts):
            token, slot = torch.where(index == e)
            h = (self.mlp.activation_fn(x[token] @ w1[e].mT) * (x[token] @ v1[e].mT)) @ w2[e]
            y = y.index_add(0, token, h * weights[token, slot, None])
        return y


class Llama4TextExperts(nn.Module):
    __module__ = "transformers.models.llama4.modeling_llama4"

    def __init__(self, experts=4, hidden=64, ffn=96):
        super().__init__()
        self.gate_up_proj, self.down_proj = parameter(experts, hidden, 2 * ffn), parameter(experts, ffn, hidden)
        self.act_fn = nn.SiLU()

    def forward(self, x):
        rows = x.view(self.gate_up_proj.shape[0], -1, x.shape[-1])
        gate, up = torch.bmm(rows, self.gate_up_proj).chunk(2, dim=-1)
        return torch.bmm(up * self.act_fn(gate), self.down_proj).view(x.shape)


class JetMoeParallelExperts(nn.Module):
    __module__ = "transformers.models.jetmoe.modeling_jetmoe"

    def __init__(self, experts=4, hidden=64, out=96):
        super().__init__()
        self.weight = parameter(experts, out, hidden)

    def forward(self, inputs, expert_size):
        parts = inputs.split(expert_size)
        return torch.cat([part @ self.weight[e].mT for e, part in enumerate(parts)])


def tokens(seed=0, count=48, hidden=64, experts=4):
    """The arguments of experts that are called with tokens."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, hidden, generator=generator).requires_grad_()
    weights, index = torch.rand(count, experts, generator=generator).topk(2)
    return x, index, weights


def rows(seed=0, *rest):
    """The arguments of experts that are called with rows."""
    return (torch.randn(48, 64, generator=torch.Generator().manual_seed(seed)).requires_grad_(), *rest)


LAYOUTS = {  # a maker and the arguments of a call
    "interleaved": (lambda: Interleaved(Config()), tokens),
    "exact gelu": (lambda: ExactGelu(Config()), tokens),
    "flat": (DbrxExperts, tokens),
    "equal rows": (Llama4TextExperts, rows),
    "one weight": (JetMoeParallelExperts, lambda: rows(0, [20, 0, 16, 12])),
}
