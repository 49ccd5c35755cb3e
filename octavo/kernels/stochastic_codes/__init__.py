"""Round a matrix to E4M3 codes stochastically: up or down with the probability of the distance, by scales that exist.

The mean of the codes' values is the value, so that updates smaller than the distance of two codes add up over steps.
"""

from torch import Tensor

from octavo import backend


def stochastic_codes(
    values: Tensor, scale: Tensor, block: tuple[int, int], codes: Tensor, seed: Tensor, first: int = 0
) -> None:
    """Overwrite codes [M, W] of values [M, K] in float32, both with adjacent columns. A block of (rows, columns) has
    one float32 of the contiguous `scale`. What is not finite keeps its code. `seed` is int64 [2], seed and step;
    `first` numbers the first row, for random bits of its own."""
    if values.numel():
        backend.implementation(__name__, values).stochastic_codes(values, scale, block, codes, seed, first)
