"""A rule of a user's own, and a model that it matches."""

import torch

import octavo
from octavo import ops
from tests.support.custom_operations import Doubled, Powered


def fused_power(factor=1):
    """Doubled and Powered in one; `factor` shows which one ran."""

    class Both(ops.FusedOperation):
        @staticmethod
        def fuser_forward_compute(configs, inputs):
            x = 2 * inputs[0].x
            power = x ** configs[1].exponent
            return factor * power * inputs[1].gain, ((), ()), ((), (x, power))

        @staticmethod
        def fuser_forward_save_ctx(configs, inputs, outputs, fresh):
            x, power = fresh[1]
            return (), (x, inputs[1].gain, None, power)

    return Both


def pair(**settings):
    return octavo.Sequential(Doubled(), Powered(4), **settings)


def rule(name="both", factor=1, conditions=(), pattern=(Doubled, Powered)):
    return ops.Rule(name, pattern, fused_power(factor), conditions)


X = torch.full((2, 4), 3.0)  # 36 when it is doubled and squared
