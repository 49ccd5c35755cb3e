"""The experts of a mixture between the two calls of a dispatcher: values, or codes."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from octavo.fusion.sequential import Sequential
from octavo.moe.dispatch import Dispatch, Dispatched
from octavo.moe.payload import payload_of
from octavo.quant.grouped import GroupedTensor


class Codes:
    """Codes of the rows, as no tree of tensors: FSDP2 would cast what it finds in one."""

    def __init__(self, rows: GroupedTensor) -> None:
        self.rows = rows


class DispatchedExperts(Sequential):
    """`fc1`, `activation` and `fc2` of experts that rows are dispatched to. With codes of x or of dy the layers run one
    by one: a run of operations takes values."""

    def forward(  # type: ignore[override]
        self, input: Tensor, *extra_inputs: Any, op_kwargs: Any = None, codes: Codes | None = None
    ) -> Any:
        """Run the experts.

        Args:
            input: the rows, or the anchor of codes.
            *extra_inputs: their sizes, twice.
            op_kwargs: as in `Sequential`.
            codes: the codes of the rows, or None.

        Returns:
            The rows of the outputs.
        """
        kwargs = op_kwargs or {}
        if codes is None and "dy_codes" not in kwargs.get(2, {}):
            return super().forward(input, *extra_inputs, op_kwargs=op_kwargs)
        fc1, activation, fc2 = self
        rows: Any = input, extra_inputs[0]
        if codes is not None:  # they know their sizes
            rows = (replace(codes.rows, anchor=input if input.requires_grad else None),)
        return fc2(activation(fc1(*rows, **kwargs.get(0, {}))), extra_inputs[1], **kwargs.get(2, {}))


def run_experts(experts: DispatchedExperts, sent: Dispatched, flag: dict[str, Any]) -> Tensor:
    """Run experts on the rows that were dispatched."""
    wanted = sent.dgrad_out is not None and sent.rows.requires_grad and torch.is_grad_enabled()
    first = {**flag, **({"dgrad_out": sent.dgrad_out} if wanted else {})}
    last = {**flag, **({} if sent.out is None else {"out": sent.out})}
    last |= {} if sent.dy_codes is None else {"dy_codes": sent.dy_codes}
    kwargs: Any = {0: first, 2: last} if first or last else None
    rows, codes = sent.rows, {}
    if isinstance(rows, GroupedTensor):
        anchor, codes = rows.anchor, {"codes": Codes(rows)}
        rows = torch.zeros(1, dtype=rows.dtype, device=rows.device).expand(rows.shape) if anchor is None else anchor
    y: Tensor = experts(rows, sent.sizes, sent.sizes, op_kwargs=kwargs, **codes)
    return y


def dispatched(
    dispatcher: Dispatch, experts: Any, x: Tensor, index: Tensor, weights: Tensor, num_experts: int
) -> Tensor:
    """Run the experts of a dispatcher's ranks on tokens; others than DispatchedExperts take values."""
    takes = isinstance(experts, DispatchedExperts)
    asks = takes and getattr(dispatcher, "takes_payload", False)
    given: Any = {"payload": payload_of(experts)} if asks else {}
    sent = dispatcher.dispatch(x, index, weights, num_experts, **given)
    rows = run_experts(experts, sent, {}) if takes else experts(sent.rows, sent.sizes)
    return dispatcher.combine(rows, sent)
