"""Mixtures whose experts are on several ranks, their twins in one process, and dispatchers that say what is right."""

import torch

import octavo
from octavo import moe
from octavo.moe.payload import WHOLE, payload_of
from tests.support.linear_oracle import spiky

D, N, E, K, T = 256, 128, 8, 2, 48
RECIPES = ("bf16", "fp8-current", "fp8-delayed", "fp8-rowwise", "fp8-block", "mxfp8", "nvfp4")
CODED = ("fp8-rowwise", "fp8-block", "mxfp8", "fp8-current")  # the last agrees on one scale for all rows


def mixture(recipe, **settings):
    """A mixture in bfloat16: with equal seeds, ranks have their parts of the parameters of one process."""
    torch.manual_seed(3)
    return octavo.MoE(D, N, E, K, recipe=recipe, dtype=torch.bfloat16, **settings)


def data(rank, tokens=T):
    """x and dy of a rank, with outlier rows and channels."""
    return tuple(spiky(tokens, D, seed=10 * rank + i, size=20.0, dtype=torch.bfloat16) for i in (1, 2))


def everyones(ranks, tokens=T):
    tokens = [tokens] * ranks if isinstance(tokens, int) else tokens
    return tuple(torch.cat(parts) for parts in zip(*[data(r, n) for r, n in enumerate(tokens)], strict=True))


def step(model, x, dy, steps=1, call=None):
    """y, dx and the gradients of the parameters in the last of several steps."""
    for _ in range(steps):
        model.zero_grad()
        x = x.detach().clone().requires_grad_()
        y = (model if call is None else call)(x)
        y.backward(dy)
        octavo.step(model)
    return [y.detach(), x.grad, *(p.grad for p in (model.experts.fc1.weight, model.experts.fc2.weight))]


class _Put(torch.autograd.Function):
    """Rows as they are; their gradient arrives as codes of its rows."""

    @staticmethod
    def forward(ctx, rows, spec, sizes, dy_codes, scale):
        ctx.given = spec, sizes, dy_codes, scale
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx, dy):
        spec, sizes, dy_codes, scale = ctx.given
        codes = grouped(dy, spec, sizes, inverse_scale=scale("dy", dy, spec))
        return dy_codes.put(codes), None, None, None, None


def grouped(x, spec, sizes, source=None, inverse_scale=None):
    """Codes of rows in groups; where one scale belongs to a tensor, that of all rows, or a given one."""
    carrier = spec.quantize_groups(x, sizes, source=source)
    if spec.block != WHOLE:
        return carrier
    q = spec.quantize(x.detach(), inverse_scale=inverse_scale)
    scale = q.scale.view(1).expand(len(sizes))
    return octavo.GroupedTensor.of(spec, q.codes, scale, sizes, source=source, dtype=x.dtype, anchor=carrier.anchor)


class RowCodes:
    """One process whose experts get codes of rows alone, of x and of dy: columns are made of them."""

    def __init__(self):
        self.owner = None

    def scale(self, name, x, spec):
        """The inverse scale of an operand; None measures it."""

    def dispatch(self, x, index, weights, num_experts):
        payload = payload_of(self.owner().experts)
        permutation = moe.sort(index, num_experts)
        rows = grouped(x, payload.x, permutation.sizes, permutation.sources, self.scale("x", x, payload.x))
        dy_codes = octavo.quant.GradientCodes()
        state = permutation, weights, payload.dy, dy_codes
        return moe.Dispatched(rows, permutation.sizes, state, dy_codes=dy_codes)

    def combine(self, rows, dispatched):
        permutation, weights, spec, dy_codes = dispatched.state
        rows = _Put.apply(rows, spec, permutation.sizes, dy_codes, self.scale)
        return moe.unpermute(rows, permutation, weights)


def in_one_process(recipe, ranks, codes, tokens=T, steps=1, **settings):
    dispatcher = RowCodes() if codes else moe.LocalDispatch()
    model = mixture(recipe, dispatcher=dispatcher, **settings)
    dispatcher.owner = lambda: model
    return step(model, *everyones(ranks, tokens), steps)


def joined(found):
    """What ranks found, as one process has it."""
    return [torch.cat(parts) for parts in zip(*found, strict=True)]
