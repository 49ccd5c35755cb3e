"""Warnings at the end of a step: of tokens that mixtures of experts dropped, of weight gradients that it missed, and of
ranks that keep scales of their own.

Neither makes the host wait for a GPU. A forward counts dropped assignments on the device. The end of a step starts a
copy of the count to the host, and the end of a later step, when the copy has arrived, reads it.
"""

import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo._torch.cuda import is_capturing
from octavo._torch.fakes import FakeTensor
from octavo._torch.modules import is_stage
from octavo.communication.groups import DEFAULT, size_of
from octavo.errors import warn_caller
from octavo.moe.mixture import MoE
from octavo.ops.quantized import Quantized
from octavo.recipes.ambient import process
from octavo.text import SHOWN, some


def warn_of_step(model: nn.Module, layers: Iterable[tuple[str, Quantized]], group: Any) -> None:
    """Warn of dropped tokens of the model's mixtures, of gradients that wait in these layers, and of a missing group. A
    graph can do none of it: it cannot read the device back, and a captured backward_dw() may follow."""
    if not torch.compiler.is_compiling() and not is_capturing():
        _warn_of_overflow(model)
        _warn_of_pending(layers)
        if group is None and (ranks := size_of(DEFAULT)) > 1 and not is_stage(model):
            _warn_of_ranks(layers, ranks)


_said_of_ranks: list[int] = []  # the number of ranks, once it was warned of


def _warn_of_ranks(layers: Iterable[tuple[str, Quantized]], ranks: int) -> None:
    """Warn once of layers that some of the ranks scale by amaxes of their own."""
    if _said_of_ranks:
        return
    apart = [
        path or layer.op_describe() for path, layer in layers
        if layer._scaling.recipe is not None and layer.amax_group is None and layer._sharded is None
        and (layer.parallel is None or size_of(layer.parallel.group) < ranks)
    ]  # fmt: skip
    if apart:
        _said_of_ranks.append(ranks)
        warn_caller(
            f"octavo.step got no group, and this process is one of {ranks} ranks: each scales {some(apart, SHOWN)} by "
            "the amaxes of its own rows. Pass the group of the ranks that have the same layers: octavo.step(model, "
            "group) or octavo.attach(model, optimizer, group). If no other rank has them: "
            "octavo.distributed.set_amax_group(model, 'alone')."
        )


def _warn_of_pending(layers: Iterable[tuple[str, Quantized]]) -> None:
    """Warn of gradients that wait for `backward_dw()` at the end of a step, once for a layer until none wait there.
    The layers come with their paths."""
    late = []
    for path, layer in layers:
        queue = layer._wgrad.queue
        number = queue.waiting()
        if number and not queue.said:
            late.append(f"{number} of {path or layer.op_describe()}")
        queue.said = number > 0
    if late:
        warn_caller(
            f"This step was made without weight gradients that wait for backward_dw(): {some(late, SHOWN)}. Call it "
            "for each of these layers, once for each backward, before optimizer.step(); they pile up otherwise. "
            "discard_dw() drops them."
        )


def warn_of_uncalled(layers: Iterable[tuple[str, Quantized]]) -> None:
    """Warn of layers whose weights have gradients, and that no forward has called: the model multiplies by their
    weights itself. The layers come with their paths. Graphs do not tell which layers they serve."""
    if process.has_traced:
        return
    found = [
        path or layer.op_describe()
        for path, layer in layers
        if layer._unplaced and any(p.grad is not None for p in layer._trained_by())
    ]
    if found:
        theirs = "their weights have" if len(found) > 1 else "its weight has"
        warn_caller(
            f"No forward has called {some(found, SHOWN)}, and {theirs} gradients: the model reads the weights itself, "
            "and multiplies in their own precision. Leave such layers out of octavo.convert, with exclude=; their "
            "recipe has no effect."
        )


class _Copy(NamedTuple):
    """A count on its way to the host."""

    dropped: Tensor
    arrived: Any  # an event of the stream that copies; None for a count that is there


_copies: "weakref.WeakKeyDictionary[MoE, _Copy]" = weakref.WeakKeyDictionary()


def _warn_of_overflow(model: nn.Module) -> None:
    """Warn, for each mixture of the model, of assignments that were dropped since the last warning and are known
    here."""
    for path, module in model.named_modules():
        if not isinstance(module, MoE) or module.dropped is None:
            continue
        if module.dropped.is_meta or isinstance(module.dropped, FakeTensor):
            continue
        if module not in _copies:
            _copies[module] = _started(module.dropped[1])
        copy = _copies[module]
        if copy.arrived is None or copy.arrived.query():
            del _copies[module]
            if number := int(copy.dropped):
                where = f"The MoE at {path!r}" if path else "This MoE"
                warn_caller(
                    f"{where} dropped up to {number} assignments of tokens in one forward: its dispatcher, "
                    f"{module.dispatcher!r}, had no rows for them. Give it more rows, or balance the load."
                )


def _started(dropped: Tensor) -> _Copy:
    """Start to copy the count, and to count anew."""
    if dropped.device.type != "cuda":
        copy = _Copy(dropped.clone(), None)
    else:
        count = torch.empty((), dtype=dropped.dtype, device="cpu", pin_memory=True)
        count.copy_(dropped, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record(torch.cuda.current_stream(dropped.device))  # type: ignore[no-untyped-call]
        copy = _Copy(count, arrived)
    dropped.zero_()
    return copy
