"""nn.Module's own tables, and the names that wrappers give to the module they hold."""

import sys
from typing import Any

from torch import nn
from torch.nn.modules import module

from octavo._torch.tracing import while_tracing

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
    """Whether one of the hooks of all modules is to see every operation. Trackers of torch's own, as in a FLOP counter,
    note which module is running, and change nothing: what they watch runs as it does without them."""
    hooks = [hook for table in GLOBAL_HOOKS for hook in table.values()]
    return any(str(getattr(hook, "__module__", "")).split(".")[0] != "torch" for hook in hooks)


def plain_name(path: str) -> str:
    """Returns a path without the names that wrappers add to it."""
    return ".".join(part for part in path.split(".") if part not in WRAPPERS)


def uncompiled(model: Any) -> Any:
    """The module inside of torch.compile(module); any other object itself. A wrapper may hand out the attributes of a
    compiled module inside of it, and has parameters of its own: only torch's class is looked into."""
    frames = sys.modules.get("torch._dynamo.eval_frame")  # seconds to import, and done by whoever compiles
    return model._orig_mod if frames is not None and isinstance(model, frames.OptimizedModule) else model
