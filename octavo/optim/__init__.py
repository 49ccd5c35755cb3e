"""Optimizers that write a weight's codes themselves, so that no copy of the weight in high precision is a parameter.

    adamw       AdamW: master values and moments of the optimizer's own, codes as the weight
    sharded     the part of a DTensor that a rank updates

    gradient -> master values, moments (`octavo.kernels.adamw`, one pass) -> codes of the weight

Such a weight is one of `octavo.quantize_weights(model, trainable=True)`. An optimizer of this room updates plain
parameters, too.

This room may import rooms up to `weights`.
"""

from octavo.optim.adamw import AdamW

__all__ = ["AdamW"]
