"""A warning of weight gradients that `delay_wgrad_compute=True` left out of backward, and that a step has missed."""

from collections.abc import Iterable

import torch

from octavo._torch.cuda import is_capturing
from octavo.errors import warn_caller
from octavo.ops.quantized import Quantized
from octavo.text import SHOWN, some


def warn_of_pending(layers: Iterable[tuple[str, Quantized]]) -> None:
    """Warns of gradients that wait for `backward_dw()` at the end of a step, once for a layer until none wait there.
    The layers come with their paths."""
    if torch.compiler.is_compiling() or is_capturing():  # a captured backward_dw() may follow
        return
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
