"""Parts of mixtures of experts; `octavo.MoE` is the whole.

    Router          a linear layer that computes logits in float32
    route           the experts of each token and their weights, from logits
    counts          the number of assignments of each expert
    update_bias     a step of the bias that balances the load
    aux_loss        a loss for a balanced load
    z_loss          a loss for small logits
    pack_mask       a mask as bits; unpack_mask is the way back
    sort            which row each token's assignments get, from an index or a mask
    sort_by_rank    the same, with a fixed number of rows for each rank of experts
    sort_chunks     the same for rows that arrived in chunks, such as those of each expert from each rank
    permute         tokens copied to these rows, the rows of an expert one after the other
    unpermute       the rows of each token, summed, with probabilities or without
    permute_probs   the probability of each row
    Experts         the experts of a mixture as one module, from routed tokens to their weighted sum
    ExpertParallel  a dispatcher for experts of which each rank has a part
    DeepEP          the same by DeepEP's kernels
    Dispatch        what a dispatcher of `octavo.MoE` has; LocalDispatch is one within a process

Between `permute` and `unpermute` run `octavo.GroupedLinear` or `octavo.grouped_linear` with `Permutation.sizes`. No
function reads a value on the host.
"""

from octavo.moe.chunk_sort import sort_chunks
from octavo.moe.deep_ep import DeepEP
from octavo.moe.dispatch import Dispatch, Dispatched, LocalDispatch
from octavo.moe.expert_parallel import ExpertParallel
from octavo.moe.experts import Experts
from octavo.moe.losses import aux_loss, z_loss
from octavo.moe.mask_bits import pack_mask, unpack_mask
from octavo.moe.permutation import Permutation, permute, permute_probs, sort, unpermute
from octavo.moe.rank_sort import sort_by_rank
from octavo.moe.router import Router
from octavo.moe.routing import counts, route, update_bias
from octavo.runtime.contract import import_layers

import_layers(__name__, __path__)

__all__ = [
    "DeepEP",
    "Dispatch",
    "Dispatched",
    "ExpertParallel",
    "Experts",
    "LocalDispatch",
    "Permutation",
    "Router",
    "aux_loss",
    "counts",
    "pack_mask",
    "permute",
    "permute_probs",
    "route",
    "sort",
    "sort_by_rank",
    "sort_chunks",
    "unpack_mask",
    "unpermute",
    "update_bias",
    "z_loss",
]


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)
