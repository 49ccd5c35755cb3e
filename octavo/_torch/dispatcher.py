"""Modes and transforms that stand between a call and the kernels."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._functorch import pyfunctorch
from torch.utils import _device, _python_dispatch

TorchDispatchMode = _python_dispatch.TorchDispatchMode  # the base of modes that see operators: replay records by one
DeviceContext = _device.DeviceContext  # the mode of torch.set_default_device, which changes nothing that replay records
dispatch_depth = torch._C._len_torch_dispatch_stack  # how many modes see the operators of this thread
function_depth = torch._C._len_torch_function_stack  # how many modes see its functions
function_mode = torch._C._get_function_stack_at  # the one at a depth

# whether torch.autocast is on for any device: a question without the name of one, which torch makes at each read
is_any_autocast_enabled = torch._C._is_any_autocast_enabled

# __torch_function__ and __torch_dispatch__ of subclasses that override nothing
no_torch_function = torch._C._disabled_torch_function_impl
no_torch_dispatch = torch._C._disabled_torch_dispatch_impl

_functorch: Any = torch._C._functorch
has_transforms = torch._C._are_functorch_transforms_active  # whether a call runs under torch.func: most are refused
transforms = _functorch.get_interpreter_stack  # all that are active, for the refusal's names; None without any
innermost_transform = _functorch.peek_interpreter_stack  # None without any: under one, tensors have no address
is_batched = _functorch.is_legacy_batchedtensor  # whether a gradient is several: is_grads_batched=True


@contextmanager
def plainly() -> Iterator[None]:
    """Return a block in which operators run as they are, on real tensors that record no gradient: without the dispatch
    modes of the caller, its transforms of torch.func, its inference mode and its torch.autocast."""
    with ExitStack() as stack:
        stack.enter_context(pyfunctorch.temporarily_clear_interpreter_stack())  # type: ignore[no-untyped-call]
        stack.enter_context(_python_dispatch._disable_current_modes())  # type: ignore[no-untyped-call]
        stack.enter_context(torch._C.DisableTorchFunction())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.autocast("cpu", enabled=False))
        if torch.is_autocast_enabled("cuda"):  # to ask whether there is a GPU would initialize its driver
            stack.enter_context(torch.autocast("cuda", enabled=False))
        yield
