"""torch's pipeline stages, and the pass in which they learn shapes."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch


def mark_shape_inference(block: Callable[[], AbstractContextManager[Any]]) -> None:
    """Run torch's inference of shapes in a block: a stage of torch 2.13 and newer runs its module once, forward and
    backward, on memory without values. Older stages do so without gradients, and have no such methods."""
    if not torch.distributed.is_available():
        return
    from torch.distributed.pipelining import PipelineStage

    for name in ("_forward_metadata_inference", "_backward_metadata_inference"):
        infer = getattr(PipelineStage, name, None)
        if infer is not None:
            setattr(PipelineStage, name, _inside(block, infer))


def _inside(block: Callable[[], AbstractContextManager[Any]], infer: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(infer)
    def inferred(*arguments: Any, **keywords: Any) -> Any:
        with block():
            return infer(*arguments, **keywords)

    return inferred
