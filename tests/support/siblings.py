"""Models with column layers that read the same x, split over ranks: ours, and torch's own in bf16."""

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import parallel as tp
from torch.distributed.tensor.parallel import parallelize_module

import octavo
from octavo.distributed import ColwiseParallel, RowwiseParallel
from tests.support.linear_shards import cut, mesh_of

HIDDEN, FFN, TOKENS, HEADS = 256, 512, 512, 4
RECIPES = ("bf16", "fp8-current", "fp8-delayed", "fp8-rowwise", "fp8-block", "mxfp8", "nvfp4(stochastic=False)")


class SwiGLU(nn.Module):
    """The MLP of Llama."""

    COLUMNS, ROW = ("gate", "up"), "down"

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = (
            nn.Linear(*sizes, bias=False) for sizes in ((HIDDEN, FFN), (HIDDEN, FFN), (FFN, HIDDEN))
        )

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Projections(nn.Module):
    """q, k and v, and no more of attention."""

    COLUMNS, ROW = ("q", "k", "v"), None

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(HIDDEN, n, bias=False) for n in (HIDDEN, HIDDEN // 2, HIDDEN // 2))

    def forward(self, x):
        return torch.cat([self.q(x), self.k(x), self.v(x)], -1)


class Attention(nn.Module):
    """q, k, v and o, around torch's attention; x [tokens, batch, features]."""

    COLUMNS, ROW = ("q", "k", "v"), "o"

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))

    def forward(self, x):
        heads = [one(x).unflatten(-1, (-1, HIDDEN // HEADS)).permute(1, 2, 0, 3) for one in (self.q, self.k, self.v)]
        y = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.o(y.permute(2, 0, 1, 3).flatten(-2))


def made(kind):
    torch.manual_seed(7)
    return kind().bfloat16()


def split(kind, group, recipe, sequence=True, **more):
    model = made(kind)
    octavo.convert(model, recipe)
    outside = Shard(0) if sequence else Replicate()
    plan = {name: ColwiseParallel(input_layouts=outside, **more) for name in kind.COLUMNS}
    plan |= {kind.ROW: RowwiseParallel(output_layouts=outside, **more)} if kind.ROW else {}
    return parallelize_module(model, mesh_of(group), plan)


def stock(kind, group):
    """The same model in torch's own styles: one gather of x for all column layers."""
    inside = {name: tp.ColwiseParallel() for name in kind.COLUMNS}
    inside |= {kind.ROW: tp.RowwiseParallel(output_layouts=Shard(0))} if kind.ROW else {}
    plan = {"": tp.PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate()), **inside}
    model = nn.Sequential(made(kind))
    return parallelize_module(model, mesh_of(group), {f"0.{name}".rstrip("."): one for name, one in plan.items()})


def data(kind, group):
    g = torch.Generator().manual_seed(3)
    shape = (TOKENS // 4, 4, HIDDEN) if kind is Attention else (TOKENS, HIDDEN)
    x = torch.randn(shape, generator=g).bfloat16()
    return x if group is None else cut(x, group, 0).contiguous()


def trained(model, x, steps=1):
    """y, dx and the gradients of the weights of the last step."""
    for _ in range(steps):
        model.zero_grad()
        leaf = x.clone().requires_grad_()
        y = model(leaf * 1)
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(4)).to(y.dtype)
        y.backward(dy)
        octavo.step(model)
    return y.detach(), leaf.grad, [p.grad.to_local() for p in model.parameters()]
