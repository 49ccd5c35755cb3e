"""Parts of mixtures of experts; `octavo.MoE` is the whole.

    mixture                 octavo.MoE: router, experts, shared experts, losses, load
    router                  Router: a linear layer that computes logits in float32
    router_logits_layer     its functions
    routing                 route, counts, update_bias: the experts of each token, and the bias that balances them
    losses                  aux_loss and z_loss
    permutation             sort, permute, unpermute, permute_probs: tokens to the rows of their experts, and back
    token_sort_layer        the sort's functions
    permuted_codes          rows of a QTensor moved as one value
    mask_bits               pack_mask and unpack_mask: a mask as bits
    permute_probs_layer     those of the probability of each row
    rank_sort               sort_by_rank: a fixed number of rows for each rank of experts
    chunk_sort              sort_chunks: rows that arrived in chunks
    experts                 Experts: from routed tokens to their weighted sum
    functional              octavo.grouped_linear
    dispatch                Dispatch: what a dispatcher has; LocalDispatch is one within a process
    expert_parallel         ExpertParallel: experts over ranks; who sends what
    expert_exchange         how rows get there, and back
    symmetric_exchange      the same by memory that ranks share
    payload                 rows on the way: values, or codes with scales
    agreed_scale            one scale for the rows of all experts, agreed by their ranks
    dispatched_experts      the experts between the two calls of a dispatcher
    expert_style            ExpertwiseParallel: experts of converted models, by parallelize_module
    deep_ep                 DeepEP: the same by DeepEP's kernels
    transformer_engine_ep   TransformerEngineEP: by Transformer Engine's

    x -> router -> route -> sort -> permute -> fc1 -> activation -> fc2 -> unpermute -> y
                              dispatch -> the same on the ranks of the experts -> combine

Between `permute` and `unpermute` run `octavo.GroupedLinear` or `octavo.grouped_linear` with `Permutation.sizes`. No
function reads a value on the host.

This room may import rooms up to `distributed`.
"""

from typing import TYPE_CHECKING, Any

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
from octavo.moe.transformer_engine_ep import TransformerEngineEP
from octavo.runtime.contract import import_layers

if TYPE_CHECKING:
    from octavo.moe.expert_style import ExpertwiseParallel as ExpertwiseParallel

import_layers(__name__, __path__)

__all__ = [
    "DeepEP",
    "Dispatch",
    "Dispatched",
    "ExpertParallel",
    "Experts",
    "ExpertwiseParallel",
    "LocalDispatch",
    "Permutation",
    "Router",
    "TransformerEngineEP",
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


def __getattr__(name: str) -> Any:
    """Resolve `ExpertwiseParallel`: torch's base class of styles takes long to import."""
    if name != "ExpertwiseParallel":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from octavo.moe.expert_style import ExpertwiseParallel

    globals()[name] = ExpertwiseParallel
    return ExpertwiseParallel


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)
