"""Weight gradients of a pipeline's stage that its schedule runs apart from backward."""

from collections.abc import Callable
from functools import partial

from torch import nn

from octavo.errors import UnsupportedConfig
from octavo.ops.quantized import Quantized
from octavo.weights.wgrad_queue import Waiting


def dw_builder(module: nn.Module) -> Callable[[], Callable[[], None]]:
    """Make the `dw_builder` of a `torch.distributed.pipelining.PipelineStage` from `backward_dw()` of its layers.

    The layers leave their weight gradients out of backward (`delay_wgrad_compute=True`). After each backward the stage
    calls what this function returns, which takes the operands that this very backward left, and gets a function that
    computes the gradients from them: at once, or when the schedule says so. Gradients of all other parameters are part
    of backward.

    Without a `dw_builder` a schedule that splits backward needs nothing of this, with torch 2.13 or newer: layers then
    compute the gradients that each of the two passes takes.

    Args:
        module: the module of the stage.

    Returns:
        The function for `PipelineStage(..., dw_builder=...)`.

    Raises:
        UnsupportedConfig: no layer of the module has `delay_wgrad_compute=True`.

    Example:
        >>> from octavo.distributed import dw_builder
        >>> stage = nn.Sequential(octavo.Linear(16, 8, recipe="fp8-block", delay_wgrad_compute=True))
        >>> build = dw_builder(stage)       # PipelineStage(stage, ..., dw_builder=build) calls it
        >>> stage(torch.ones(4, 16)).sum().backward()
        >>> compute = build()
        >>> compute()
        >>> stage[0].weight.grad.shape
        torch.Size([8, 16])
    """
    own = [layer for layer in module.modules() if isinstance(layer, Quantized)]
    if not any([layer.delay_wgrad_compute for layer in own]):
        raise UnsupportedConfig(
            f"dw_builder computes the weight gradients that layers leave out of backward, and none of the {len(own)} "
            "Octavo layers of this module does. Set delay_wgrad_compute=True on them before the first forward, or pass "
            "no dw_builder: a schedule that splits backward then splits these layers' backward too."
        )

    def build() -> Callable[[], None]:
        claimed = [(layer, layer._wgrad.claim(layer)) for layer in own if layer.delay_wgrad_compute]
        return partial(_compute, claimed)

    return build


def _compute(claimed: list[tuple[Quantized, list[Waiting]]]) -> None:
    """Compute the gradients of one backward. If one fails, it waits for `backward_dw()` of its layer, and a second call
    computes the rest."""
    for layer, entries in claimed:
        while entries:
            layer._wgrad.deliver_claimed(layer, entries.pop(0))
