"""torch's pipeline stages, and the pass in which they learn shapes."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

from octavo._torch.imports import when_imported

Block = Callable[[], AbstractContextManager[Any]]


def mark_shape_inference(block: Block) -> None:
    """Run torch's inference of shapes in a block: a stage of torch 2.13 and newer runs its module once, forward and
    backward, on memory without values. Older stages do so without gradients, and have no such methods."""

    def mark(stages: ModuleType) -> None:
        for name in ("_forward_metadata_inference", "_backward_metadata_inference"):
            infer = getattr(stages.PipelineStage, name, None)
            if infer is not None:
                setattr(stages.PipelineStage, name, _inside(block, infer))

    when_imported("torch.distributed.pipelining.stage", mark)


def _inside(block: Block, infer: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(infer)
    def inferred(*arguments: Any, **keywords: Any) -> Any:
        with block():
            return infer(*arguments, **keywords)

    return inferred
