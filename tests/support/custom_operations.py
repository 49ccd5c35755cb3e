"""Operations and fused ones as a reader of the docs would write them: with parameters, keywords, extra inputs and
outputs, the old way; and classes made of functions that are given."""

import torch
from torch import nn

import octavo
from octavo import ops, values
from tests.support.linear_oracle import spiky
from tests.support.sequentials import H


@values.register("tests-power")
class Power(values.Value):
    exponent: int = 2


class Powered(ops.BasicOperation):
    """gain · x ** exponent, and times `factor` if a call has one."""

    params = ("gain",)
    kwargs = ("factor",)

    def __init__(self, size, exponent=2):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(size))
        self.exponent = exponent

    def op_config(self):
        return Power(self.exponent)

    @staticmethod
    def op_forward_compute(config, inputs):
        power = inputs.x**config.exponent
        y = power * inputs.gain
        return (y if inputs.factor is None else y * inputs.factor), (power,)

    @staticmethod
    def op_forward_save_ctx(config, inputs, y, fresh):
        return inputs.x, inputs.gain, inputs.factor, fresh[0]

    @staticmethod
    def op_backward(config, saved, dy, wants):
        x, gain, factor, power = saved
        scaled = dy if factor is None else dy * factor
        dx = scaled * gain * config.exponent * x ** (config.exponent - 1) if wants.x else None
        dgain = (scaled * power).flatten(0, -2).sum(0) if wants.gain else None
        dfactor = (dy * power * gain).sum().reshape(factor.shape) if wants.factor else None
        return dx, dgain, dfactor

    def formula(self, x, gain, factor=1.0):
        return factor * gain * x**self.exponent


class Doubled(ops.BasicOperation):
    """2x, no parameters, nothing saved."""

    @staticmethod
    def op_forward_compute(config, inputs):
        return 2 * inputs.x, ()

    @staticmethod
    def op_forward_save_ctx(config, inputs, y, fresh):
        return ()

    @staticmethod
    def op_backward(config, saved, dy, wants):
        return (2 * dy,)


class Emit(ops.BasicOperation):
    """y = 2x, and 3x beside it: made here, not a view of x."""

    num_extra_outputs = 1

    @staticmethod
    def fuser_forward_compute(config, inputs):
        return 2 * inputs.x, (3 * inputs.x,), ()

    @staticmethod
    def fuser_forward_save_ctx(config, inputs, outputs, fresh):
        return ()

    @staticmethod
    def fuser_backward(config, saved, grads, wants):
        dy, dextra = grads
        total = None
        for factor, grad in ((2, dy), (3, dextra)):
            if grad is not None:
                total = factor * grad if total is None else total + factor * grad
        return (total,)


class Take(ops.BasicOperation):
    """x + 5 · extra."""

    num_extra_inputs = 1

    @staticmethod
    def fuser_forward_compute(config, inputs):
        return inputs.x + 5 * inputs.extra0, (), ()

    @staticmethod
    def fuser_forward_save_ctx(config, inputs, outputs, fresh):
        return ()

    @staticmethod
    def fuser_backward(config, saved, grads, wants):
        (dy,) = grads
        return dy if wants.x else None, 5 * dy if wants.extra0 else None


class Twice(ops.BasicOperation):
    """y = x, beside it x + 1 and x + 2."""

    num_extra_outputs = 2

    @staticmethod
    def fuser_forward_compute(config, inputs):
        return 1 * inputs.x, (inputs.x + 1, inputs.x + 2), ()

    @staticmethod
    def fuser_forward_save_ctx(config, inputs, outputs, fresh):
        return ()

    @staticmethod
    def fuser_backward(config, saved, grads, wants):
        total = None
        for grad in grads:
            if grad is not None:
                total = 1 * grad if total is None else total + grad
        return (total,)


class Legacy(ops.BasicOperation):
    """gain · x², the old way."""

    params = ("gain",)

    def __init__(self, size):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(size))

    def op_forward(self, ctx, x):
        ctx.save_for_backward(x)
        ctx.gain = self.gain.detach()
        return x * x * self.gain

    def op_backward(self, ctx, dy):
        (x,) = ctx.saved_tensors
        return 2 * x * ctx.gain * dy, ((dy * x * x).flatten(0, -2).sum(0),)


class LinearGelu(ops.FusedOperation):
    """The backward of a Linear and a GELU in one."""

    @staticmethod
    def fuser_backward(configs, saved, grads, wants):
        h, x, w = saved[1][0], saved[0][0], saved[0][3]
        dh = torch.ops.aten.gelu_backward(grads[0], h, approximate="tanh")
        own = [dh @ w, dh.T @ x, dh.sum(0)]
        return (*own, *[None] * (len(wants[0]) - 3)), (None,) * len(wants[1])


# -- made of functions that are given ----------------------------------------------------------------------------------


def define(body, base=ops.BasicOperation, name="Made"):
    """A class of operations with these functions."""
    return type(name, (base,), dict(body))


def fused(name, compute=None, save=None, backward=None, pattern=(Doubled, Doubled)):
    """A joint rule whose functions are right but for those that are given."""
    body = {
        "fuser_forward_compute": compute or (lambda configs, inputs: (4 * inputs[0].x, ((), ()), ((), ()))),
        "fuser_forward_save_ctx": save or (lambda configs, inputs, outputs, fresh: ((), ())),
        "fuser_backward": backward or (lambda configs, saved, grads, wants: ((4 * grads[0],), (None,))),
    }
    made = define({k: staticmethod(v) for k, v in body.items()}, ops.FusedOperation, name)
    return ops.Joint(ops.Rule("quadruple", pattern, made))


def quadruple(rule):
    """4x, by a rule that `fused` gave."""
    return octavo.Sequential(Doubled(), Doubled(), rules=(rule,))


def stepped(model, call=None):
    """One step, whatever comes of it."""
    (model if call is None else call)(spiky(4, H).requires_grad_()).sum().backward()


def computes(make):
    """A compute for `fused` that makes y of x."""
    return {"compute": lambda configs, inputs: (make(inputs[0].x), ((), ()), ((), ()))}
