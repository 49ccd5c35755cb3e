"""Optimizers that write a weight's codes themselves, so that no copy of the weight in high precision is a parameter.

    adamw       AdamW: master values and moments of the optimizer's own, codes as the weight
    sharded     the part of a DTensor that a rank updates

An optimizer of this room updates its master values in one pass (`octavo.kernels.adamw`) and casts them into the codes
of a weight (`octavo.quantize_weights(model, trainable=True)`). It updates plain parameters, too.
"""

from octavo.optim.adamw import AdamW

__all__ = ["AdamW"]
