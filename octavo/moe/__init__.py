"""Parts of mixtures of experts: rows sorted by expert, and back.

    sort            which row each token's slots get, from an index or a mask
    permute         tokens copied to these rows, the rows of an expert one after the other
    unpermute       the rows of each token, summed, with probabilities or without
    permute_probs   the probability of each row
    Experts         all of it: the experts of a mixture as one module

Between `permute` and `unpermute` run `octavo.GroupedLinear` or `octavo.grouped_linear` with `Permutation.sizes`. No
function reads a value on the host.
"""

from octavo.moe.experts import Experts
from octavo.moe.permutation import Permutation, permute, permute_probs, sort, unpermute

__all__ = ["Experts", "Permutation", "permute", "permute_probs", "sort", "unpermute"]


def __dir__() -> list[str]:
    """Returns the public names."""
    return sorted(__all__)
