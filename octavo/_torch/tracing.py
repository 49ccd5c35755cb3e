"""Questions to the compiler that traces, and to the modes around a call."""

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from octavo._torch.autograd import saved_tensors_hooks
from octavo._torch.dispatcher import dispatch_depth
from octavo._torch.fakes import FunctionalTensor
from octavo._torch.imports import when_imported
from octavo.errors import UnsupportedConfig
from octavo.memory import span

Call = TypeVar("Call", bound=Callable[..., Any])


def while_tracing(call: Call) -> Call:
    """Make a function run as plain Python when a compiler traces a call of it, and never in the graph, where its result
    is a constant."""
    # once there is a compiler: to import it takes a second
    when_imported("torch._dynamo", lambda dynamo: dynamo.assume_constant_result(call))
    return call


def in_graph(call: Call) -> Call:
    """Make a compiler put a call of this function into its graph as it is, with tensors and constants as arguments and
    a tuple of tensors as the result. The compiler runs it on tensors without data, and AOTAutograd runs it again, as
    plain Python, to trace what it does."""
    when_imported("torch._dynamo", lambda dynamo: dynamo.allow_in_graph(call))
    return call


def functional_mode() -> Any:
    """Return the mode under which AOTAutograd traces a graph, one for each trace; None outside of it."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL)


def traced_value(tensor: Any) -> Any:
    """Return what a tensor that AOTAutograd traces stands for now: a write to it, or to a view, gives it another value.
    None for any other tensor."""
    return tensor.from_functional() if isinstance(tensor, FunctionalTensor) else None


def proxy_tracer() -> Any:
    """Return a weak reference to the tracer that records operators now: the branch of a conditional has its own. None
    if there is none."""
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    return None if mode is None else weakref.ref(mode.tracer)


class Untraced:
    """A function that ends the graph which reaches a call of it, for a reason, and then runs without a compiler.

    Attributes:
        call: the function. A compiler that traces reads it here: it is marked when there is one, as
            torch.compiler.disable would at once, which imports the compiler.
    """

    def __init__(self, call: Callable[..., Any], reason: str) -> None:
        self.call = call
        when_imported("torch._dynamo", lambda dynamo: setattr(self, "call", dynamo.disable(call, reason=reason)))


def is_watched() -> bool:
    """Return whether a dispatch mode (fake tensors, selective checkpointing, a FLOP counter) sees the operators of this
    thread."""
    return dispatch_depth() > 0


def moves_saved_tensors() -> bool:
    """Return whether hooks keep saved tensors somewhere else, and hand out copies of them. A checkpoint's hook does
    not: it runs forward again."""
    hooks = saved_tensors_hooks(True)
    return bool(hooks) and hooks[0].__module__ != "torch.utils.checkpoint"


def _graph() -> Any:
    """Return the graph being traced; None where torch.export traces, which has none yet."""
    from torch._dynamo.symbolic_convert import InstructionTranslator  # a second to import, and only a tracer gets here

    try:
        return InstructionTranslator.current_tx().output
    except AttributeError:
        return None


@while_tracing
def is_inside_operator() -> bool:
    """Return whether the code being traced is the body of a higher-order operator, such as a checkpoint: what it leaves
    behind in Python would be lost."""
    graph = _graph()
    return graph is not None and graph.current_tracer.parent is not None


@while_tracing
def is_captured() -> bool:
    """Return whether the graph being traced will be replayed as a CUDA graph."""
    graph = _graph()
    if graph is None:
        return False
    compiler = graph.compiler_fn
    while hasattr(compiler, "_torchdynamo_orig_backend") or hasattr(compiler, "_torchdynamo_orig_callable"):
        compiler = getattr(compiler, "_torchdynamo_orig_backend", None) or compiler._torchdynamo_orig_callable
    own = getattr(compiler, "config", None) or {}
    return bool(own.get("triton.cudagraphs", torch._inductor.config.triton.cudagraphs))


@while_tracing
def is_static(tensor: Tensor) -> bool:
    """Return whether a CUDA graph may write to a tensor's own memory: its address was marked as static."""
    return hasattr(tensor, "_dynamo_static_input_type")


def buffer(*shape: int, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> Tensor:
    """Allocate an uninitialised tensor that a CUDA graph may write to, for `out=` and `dgrad_out=` of a layer.

    torch.compile with CUDA graphs (`mode="reduce-overhead"`) writes to the addresses that it captured. This function
    marks the memory as static, so that a layer accepts it there. Keep the tensor alive as long as the graph.

    Args:
        *shape: the sizes.
        dtype: the dtype; None is torch's default.
        device: the device; None is torch's default.

    Returns:
        The tensor. Its values are not initialised.

    Raises:
        UnsupportedConfig: a function that is compiled with `fullgraph=True` calls it.

    Example:
        >>> octavo.buffer(6, 8, dtype=torch.bfloat16).shape
        torch.Size([6, 8])
    """
    if torch.compiler.is_compiling():
        raise UnsupportedConfig(
            f"octavo.buffer allocates memory that a graph keeps, and a compiled function calls it for {shape}. "
            "Call it before, and pass the buffer to the function."
        )
    made = torch.empty(*shape, dtype=dtype, device=device)
    # guarded: a graph that was traced for this one is not replayed for another
    torch._dynamo.mark_static_address(made, guard=True)  # type: ignore[no-untyped-call]
    return made


@while_tracing
def claim(tensor: Tensor) -> bool:
    """Take a caller's buffer for one write of the graph being traced; False where another write has some of it.
    Inductor moves reads of the first result behind the second write."""
    graph = _graph()
    if graph is None:
        return True
    first, end = span(tensor)
    taken: list[tuple[int, int]] = graph.__dict__.setdefault("_octavo_claims", [])
    if any(other < end and first < other_end for other, other_end in taken):
        return False
    taken.append((first, end))
    return True


@while_tracing
def is_first_in_graph(thing: Any) -> bool:
    """Return whether the graph being traced asks for the first time about this Python object."""
    graph = _graph()
    if graph is None:
        return True
    seen: list[Any] = graph.__dict__.setdefault("_octavo_seen", [])
    if any(thing is one for one in seen):
        return False
    seen.append(thing)
    return True


@while_tracing
def pairs_ended() -> int:
    """Return how many pairs of column and row layers have ended in the graph being traced."""
    graph = _graph()
    return 0 if graph is None else graph.__dict__.get("_octavo_pairs_ended", 0)


@while_tracing
def end_pair() -> bool:
    """Count the end of a pair of column and row layers in the graph being traced."""
    graph = _graph()
    if graph is not None:
        graph.__dict__["_octavo_pairs_ended"] = graph.__dict__.get("_octavo_pairs_ended", 0) + 1
    return True


@while_tracing
def recomputes() -> bool:
    """Return whether a compiler was told to run parts of forward again to save memory."""
    return bool(torch._functorch.config.activation_memory_budget < 1)


def is_averaged_by_ddp(weights: Any) -> bool:
    """Return whether this call is in a forward of DistributedDataParallel that will average the gradients of these
    weights."""
    ddp: Any = DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-untyped-call]
    if ddp is None or not ddp.require_backward_grad_sync:
        return False
    return not ddp.parameters_to_ignore or any(own is weight for own in ddp._module_parameters for weight in weights)


@while_tracing
def is_inside_ddp() -> bool:
    return DistributedDataParallel._get_active_ddp_module() is not None  # type: ignore[no-untyped-call]
