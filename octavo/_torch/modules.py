"""Names that wrappers give to the module they hold, the hooks of optimizers, and the stages of pipelines."""

import functools
import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

from torch import nn
from torch.nn.modules import module
from torch.optim import Optimizer

from octavo._torch.imports import when_imported
from octavo._torch.tracing import while_tracing

_stages: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()  # modules of the pipelines' stages that inferred shapes
Block = Callable[[], AbstractContextManager[Any]]

Convolution = nn.modules.conv._ConvNd  # the base of every convolution, which conversion reports by this one name

# the hooks of all modules, forward and backward: tables that torch fills and empties in place. Where they matter,
# `any(GLOBAL_HOOKS) and see_operations()` calls no Python function as long as there are none
GLOBAL_HOOKS = (
    module._global_forward_hooks,
    module._global_forward_pre_hooks,
    module._global_backward_hooks,
    module._global_backward_pre_hooks,
)

# attributes that hold a module in torch.compile, activation checkpointing and Lightning Fabric; state dicts omit them
WRAPPERS = frozenset(("_orig_mod", "_checkpoint_wrapped_module", "_forward_module"))


@while_tracing
def see_operations() -> bool:
    """Return whether one of the hooks of all modules is to see every operation. Trackers of torch's own, as in a FLOP
    counter, note which module is running, and change nothing: what they watch runs as it does without them."""
    hooks = [hook for table in GLOBAL_HOOKS for hook in table.values()]
    return any(str(getattr(hook, "__module__", "")).split(".")[0] != "torch" for hook in hooks)


def plain_name(path: str) -> str:
    """Return a path without the names that wrappers add to it."""
    return ".".join(part for part in path.split(".") if part not in WRAPPERS)


def uncompiled(model: Any) -> Any:
    """Return the module inside of torch.compile(module); any other object itself. A wrapper may hand out the attributes
    of a compiled module inside of it, and has parameters of its own: only torch's class is looked into."""
    frames = sys.modules.get("torch._dynamo.eval_frame")  # seconds to import, and done by whoever compiles
    return model._orig_mod if frames is not None and isinstance(model, frames.OptimizedModule) else model


def runs_hooks(optimizer: Any) -> bool:
    """Return whether torch's constructor has run for this very object, and wrapped the `step` that it has. Wrappers may
    have an optimizer's class, or its attributes, with a `step` of their own."""
    if not isinstance(optimizer, Optimizer) or "_optimizer_step_post_hooks" not in vars(optimizer):
        return False
    return bool(getattr(type(optimizer).step, "hooked", False))


def mark_shape_inference(block: Block) -> None:
    """Run torch's inference of shapes in a block: a stage of torch 2.13 and newer runs its module once, forward and
    backward, on memory without values. Older stages do so without gradients, and have no such methods."""

    def mark(stages: ModuleType) -> None:
        for name in ("_forward_metadata_inference", "_backward_metadata_inference"):
            infer = getattr(stages.PipelineStage, name, None)
            if infer is not None:
                setattr(stages.PipelineStage, name, _inside(block, infer))

    when_imported("torch.distributed.pipelining.stage", mark)


def note_full_sharding(note: Callable[[nn.Module], None]) -> Callable[[nn.Module], None]:
    """Decorate a function that is to be called with each module of which FSDP2 shards a parameter."""

    def change(parameters: ModuleType) -> None:
        make = parameters.FSDPParam.__init__

        @functools.wraps(make)
        def made(own: Any, param: Any, module_info: Any, *arguments: Any, **keywords: Any) -> None:
            make(own, param, module_info, *arguments, **keywords)
            for sharded in (module_info.module, *module_info.shared_modules):
                note(sharded)

        parameters.FSDPParam.__init__ = made

    when_imported("torch.distributed.fsdp._fully_shard._fsdp_param", change)
    return note


def is_stage(module: nn.Module) -> bool:
    """Return whether a stage of torch 2.13 or newer has inferred the shapes of this module."""
    return module in _stages


def _inside(block: Block, infer: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(infer)
    def inferred(*arguments: Any, **keywords: Any) -> Any:
        with block():
            _stages.add(uncompiled(arguments[0].submod))
            return infer(*arguments, **keywords)

    return inferred


def unsaved_buffers(module: nn.Module) -> set[str]:
    """Return the names of a module's own buffers that its state dict leaves out."""
    return module._non_persistent_buffers_set
