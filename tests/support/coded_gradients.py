"""An operation behind a grouped layer that hands it the codes of dy."""

import torch


class Combine(torch.autograd.Function):
    """Passes y on, and in backward sends these codes in place of its gradient."""

    @staticmethod
    def forward(ctx, y, slot, codes):
        ctx.slot, ctx.codes = slot, codes
        return y.clone()

    @staticmethod
    def backward(ctx, dy):
        return ctx.slot.put(ctx.codes), None, None
