"""Torch's optimizers, as the caches of weights see them: hooks that fire before every step of every one of them.

A fused kernel writes to a weight without advancing the version that torch keeps of it, so that neither autograd nor a
cache notices. Here a step advances it before the optimizer writes: hooks of the caller's own then find the version that
the weight will keep, and may refresh codes. A step with a closure advances it when it is over, since the optimizer may
differentiate what the closure computed.
"""

import gc
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from octavo._torch.cuda import is_capturing
from octavo._torch.tensors import is_sharded
from octavo.errors import UnsupportedConfig, warn_caller
from octavo.runtime.weight_nodes import graph_steps, step_listeners
from octavo.text import plural
from octavo.weights.master_values import keep_master
from octavo.weights.quantized_weight import QuantizedWeight
from octavo.weights.weight_state import state_of

_ELSEWHERE = frozenset(("main_grad", "get_main_grad", "decoupled_grad"))  # attributes that a gradient may be in instead


class _Heard:
    """The optimizer steps that were observed in this process."""

    def __init__(self) -> None:
        self.eager_steps = 0  # of torch's optimizers, outside of graphs
        self.layers: weakref.WeakSet[Any] = weakref.WeakSet()  # that may have a cache, which is told of steps
        self.optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.pending: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # in a step with a closure
        self.captures = False  # whether a step was captured in a CUDA graph, whose replays nothing tells of,
        self.captured: set[tuple[int, Any]] = set()  # and the memory that it writes to

    @property
    def steps(self) -> int:
        """Steps that torch's optimizers have taken."""
        return self.eager_steps + graph_steps[0]


heard = _Heard()


def owner_of(weight: Tensor, search: bool) -> Optimizer | None:
    """Return the torch optimizer that updates a weight, and whose steps are observed; None if there is none. With
    `search`, one that has not stepped yet is found, too: a slow search, for a weight that is about to be refused."""
    for optimizer in list(heard.optimizers):
        if _has(optimizer, weight):
            return optimizer
    for thing in gc.get_objects() if search else ():
        if issubclass(type(thing), Optimizer) and "param_groups" in thing.__dict__ and _has(thing, weight):
            heard.optimizers.add(thing)
            return thing
    return None


def _has(optimizer: Optimizer, weight: Tensor) -> bool:
    return any(p is weight for group in optimizer.param_groups for p in group["params"])


def listen(layer: Any) -> None:
    """Tell a layer's cache of the steps of all optimizers, made before or after this call."""
    heard.layers.add(layer)
    _hook_optimizers()


@cache
def _hook_optimizers() -> None:
    step_listeners.append(_tell)
    register_optimizer_step_pre_hook(_before)
    register_optimizer_step_post_hook(lambda optimizer, args, kwargs: finish(optimizer))


def _before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if callable(closure):  # gradients are still to come
        _admit_quantized(optimizer, [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad])
        heard.pending.add(optimizer)
        return
    heard.pending.discard(optimizer)  # of a step that raised
    _written(optimizer)


def finish(optimizer: Optimizer) -> None:
    """Advance the versions that a step with a closure has written to, once."""
    if optimizer in heard.pending:
        heard.pending.discard(optimizer)
        _written(optimizer)


def _admit_quantized(optimizer: Optimizer, parameters: list[Tensor]) -> None:
    """Refuse weights that are codes and not to be trained. For others, keep float32 values where the optimizer has
    none of its own: codes alone would lose most updates."""
    for p in parameters:
        if type(p) is not QuantizedWeight:
            continue
        if not p.kind.trainable:
            raise UnsupportedConfig(
                f"A weight of {tuple(p.shape)} is frozen as codes (octavo.quantize_weights), and an optimizer would "
                "update it. Leave it out of the optimizer, or call octavo.quantize_weights(model, trainable=True)."
            )
        if not getattr(optimizer, "writes_codes", False):
            # a kernel of torch's takes values, gradients and states in one dtype: the values are float32
            if p.dtype != torch.float32 and any(group.get("fused") for group in optimizer.param_groups):
                raise UnsupportedConfig(
                    f"{type(optimizer).__name__}(fused=True) takes values and gradients of one dtype, and a weight "
                    f"that is codes is updated in float32 by gradients in {p.dtype}. Leave fused out, or use "
                    "octavo.optim.AdamW, which is one kernel."
                )
            keep_master(p)


def _written(optimizer: Optimizer) -> None:
    """Advance the versions of the parameters that the optimizer writes to: those that have a gradient."""
    found = [
        p for group in optimizer.param_groups for p in group["params"]
        if p.grad is not None or not _ELSEWHERE.isdisjoint(p.__dict__)
    ]  # fmt: skip
    _admit_quantized(optimizer, found)
    if torch.compiler.is_compiling():  # no step captured by hand: the compiler records its graph of its own accord, and
        # the loop may still quantize at each step. It is asked before is_capturing
        # a compiled fused step advances no version either; the operator has no rule for DTensors
        torch.ops.octavo.advance([p.to_local() if is_sharded(p) else p for p in found])  # type: ignore[attr-defined]
        return
    heard.eager_steps += 1
    if optimizer not in heard.optimizers:
        heard.optimizers.add(optimizer)
        _warn_of_shards(optimizer)
    if not getattr(optimizer, "writes_codes", False):  # such an optimizer advances versions itself, by its writes
        torch.autograd.graph.increment_version([p for p in found if type(p) is not QuantizedWeight])
    capturing = is_capturing()
    if capturing:
        heard.captures = True
        heard.captured = {place for place in heard.captured if not place[1].expired()}  # memory that is still there
        # a weight that is codes has no cache beside it
        heard.captured |= {state_of(p).place for p in found if type(p) is not QuantizedWeight}
    _tell(found, capturing)


def _warn_of_shards(optimizer: Optimizer) -> None:
    """Warn, at an optimizer's first step, if it was made before `fully_shard` replaced parameters: it has those of
    before, which get no gradient, and no optimizer has the shards, which do."""
    idle = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad and p.grad is None]
    shapes = {tuple(p.shape) for p in idle if not is_sharded(p)}
    if not shapes:
        return
    for layer in list(heard.layers):
        own = vars(layer).get("_parameters", {}).values()
        shards = [p for p in own if is_sharded(p) and p.grad is not None and tuple(p.shape) in shapes]
        if shards and all([owner_of(p, search=False) is None for p in shards]):
            warn_caller(
                f"This {type(optimizer).__name__} has {plural(len(idle), 'parameter')} without a gradient, and "
                f"{layer.op_describe()} has shards of the same shape with one, which no optimizer that has stepped "
                "has: fully_shard replaces parameters, and an optimizer that was made before trains the old ones. Make "
                "it after fully_shard, from model.parameters().",
            )
            return


def _tell(written: Sequence[Tensor], capturing: bool = False) -> None:
    """Tell the caches of all layers that an optimizer writes to these parameters."""
    ids = {id(p) for p in written}
    for layer in list(heard.layers):
        codes = vars(layer).get("_codes")
        if codes is None:  # octavo.revert made it plain, or its constructor raised
            heard.layers.discard(layer)
            continue
        with suppress(UnsupportedConfig):  # of experts whose weights another module has no more
            codes.note_step(layer, ids, capturing)
