"""Weights and graphs for which dw cannot go to `main_grad`, or wait for `backward_dw`."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from octavo._torch.tensors import is_sharded
from octavo._torch.tracing import is_inside_ddp, is_inside_operator, recomputes
from octavo.errors import UnsupportedConfig
from octavo.weights.main_grad import has_buffer


def unsupported_in_graph(layer: Any) -> str:
    """Return the reason why the graph being traced cannot write dw to `main_grad`, or defer it; empty if it can."""
    fused, delays = layer.fuse_wgrad_accumulation, layer.delay_wgrad_compute
    # most layers: asked at every call that is traced
    if not (fused or delays) or not torch.is_grad_enabled():
        return ""
    own = layer._weight_parts()
    if not any([weight.requires_grad for weight in own]):
        return ""
    if why := layer._why_parametrized("delay_wgrad_compute=True" if delays else "fuse_wgrad_accumulation=True"):
        return f"{layer.op_describe()} does not compile: {why}."
    if fused and (why := layer._now("_wgrad.ddp_refusal")):
        return f"{layer.op_describe()}: {why}."
    if delays and (is_inside_operator() or recomputes()):
        why = (
            "delay_wgrad_compute=True inside torch.utils.checkpoint, or with a memory budget below 1, would leave the "
            "operands of dw with a forward that is run again. Leave one of the two out"
        )
    elif delays and is_inside_ddp():
        why = (
            "delay_wgrad_compute=True inside DistributedDataParallel, which would take a graph's backward for the end "
            "of this weight's, and never reduce its gradient. Leave it out"
        )
    elif fused and not delays and not has_buffer(own):
        why = (
            "fuse_wgrad_accumulation=True needs weight.main_grad, or weight.get_main_grad(), before forward. "
            "Set it first"
        )
    elif (delays or not any([hasattr(w, "grad_added_to_main_grad") for w in own])) and layer._now("_has_weight_hooks"):
        why = (
            "its weight has hooks, and gets its gradient elsewhere (delay_wgrad_compute, fuse_wgrad_accumulation), so "
            "that every backward of a graph would call them with None. Remove the hooks, or set "
            "weight.grad_added_to_main_grad, with which they get zeros"
        )
    way_out = "or build the layer with strict=False, to run outside."
    return why and f"{layer.op_describe()} does not compile: {why}, {way_out}"


def refuse_shards(weights: Sequence[Tensor], what: str) -> None:
    """Refuse sharded weights: outside of forward and backward, FSDP leaves a part of the weight in each process."""
    if any([is_sharded(weight) for weight in weights]):
        raise UnsupportedConfig(
            f"{what} needs the whole weight, and this process holds a shard of it (a DTensor). Leave it out where "
            "parameters are sharded."
        )
