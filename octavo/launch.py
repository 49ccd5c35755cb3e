"""Launching a Triton kernel without Triton's own Python in the way.

`kernel[grid](...)` binds, specializes and formats a cache key in Python at every call: tens of microseconds, as long as
a small kernel runs. A `Launch` is all of a call but its tensors, made once and kept by whoever calls it (`lru_cache`
over settings and sizes). What is left to ask at each call is which tensors there are, their dtypes, and whether they
are aligned to 16 bytes, since a kernel is compiled for those; from the second time on the compiled kernel is called
directly, pointers as integers.

The direct call is private to Triton, so it is used with the versions it was tried on; others take the public way. A
`Launch` holds compiled kernels and never a tensor.
"""

import threading
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs

TRIED = ("3.6.",)  # versions whose CompiledKernel.run takes the arguments below
_DIRECT = triton.__version__.startswith(TRIED)

Pointers = tuple[Tensor | None, ...]


class _Direct:
    """A compiled kernel's own launch function, and what it takes between the stream and the kernel's arguments."""

    def __init__(self, compiled: Any) -> None:
        run = compiled.run
        assert run.global_scratch_size == run.profile_scratch_size == 0  # none of our kernels asks for any
        self.launch = run.launch
        hooks, scratch = (None, None, None), (None, None)
        self.head = (
            compiled.function, run.launch_cooperative_grid, run.launch_pdl, *scratch, compiled.packed_metadata, *hooks
        )  # fmt: skip


class Launch:
    """`kernel` over `grid` programs with these sizes and constants. Its parameters are pointers, then sizes, then
    constants, in that order."""

    def __init__(
        self,
        kernel: Any,
        grid: int,
        sizes: tuple[int, ...],
        *,
        num_warps: int,
        num_stages: int = 3,
        **constants: Any,
    ) -> None:
        self.kernel, self.grid, self.sizes = kernel, grid, sizes
        self.options = {**constants, "num_warps": num_warps, "num_stages": num_stages}
        self._tail = (*sizes, *constants.values())
        self._compiled: dict[tuple[Any, ...], _Direct] = {}

    def __call__(self, *pointers: Tensor | None) -> None:
        """Run it on the device of the first pointer, which is never None."""
        first = pointers[0]
        assert first is not None
        index = first.device.index
        if index != torch._C._cuda_getDevice():
            with torch.cuda.device(index):
                return self(*pointers)
        addresses = [0 if t is None else t.data_ptr() for t in pointers]
        ends = 0
        for address in addresses:
            ends |= address
        key: tuple[Any, ...] = (index, *[None if t is None else t.dtype for t in pointers])
        if ends & 15:
            key = (*key, *[address & 15 == 0 for address in addresses])
        direct = self._compiled.get(key)
        if direct is None or knobs.runtime.launch_enter_hook.calls:  # a profiler wants to be told
            compiled = self.kernel[(self.grid,)](*pointers, *self.sizes, **self.options)
            if _DIRECT:
                self._compiled[key] = _Direct(compiled)
            return
        direct.launch(self.grid, 1, 1, torch._C._cuda_getCurrentRawStream(index), *direct.head, *addresses, *self._tail)


class Tiles:
    """A matrix that a kernel copies by tiles: what Triton's TensorDescriptor says, without its checks at every call.
    Rows begin at multiples of 16 bytes."""

    __slots__ = ("base", "block_shape", "layout", "padding", "shape", "strides")

    def __init__(self, base: Tensor, block_shape: list[int], layout: Any) -> None:
        self.base, self.block_shape, self.layout, self.padding = base, block_shape, layout, "zero"
        self.shape, self.strides = base.shape, base.stride()

    def checked(self) -> Any:
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        return TensorDescriptor(self.base, list(self.shape), list(self.strides), self.block_shape, self.layout)


class TiledLaunch(Launch):
    """A launch some of whose leading arguments are `Tiles`."""

    def __call__(self, *arguments: Tensor | Tiles | None) -> None:  # type: ignore[override]
        bases = [t.base if isinstance(t, Tiles) else t for t in arguments]
        first = bases[0]
        assert first is not None
        index = first.device.index
        if index != torch._C._cuda_getDevice():
            with torch.cuda.device(index):
                return self(*arguments)
        _enter_context(index)
        key = (index, *[None if t is None else (t.dtype, t.data_ptr() & 15 == 0) for t in bases])
        direct = self._compiled.get(key)
        if direct is None or knobs.runtime.launch_enter_hook.calls:
            whole = [t.checked() if isinstance(t, Tiles) else t for t in arguments]
            compiled = self.kernel[(self.grid,)](*whole, *self.sizes, **self.options)
            if _DIRECT:
                self._compiled[key] = _Direct(compiled)
            return
        given = [0 if t is None else t if isinstance(t, Tiles) else t.data_ptr() for t in arguments]
        direct.launch(self.grid, 1, 1, torch._C._cuda_getCurrentRawStream(index), *direct.head, *given, *self._tail)


_threads = threading.local()


def _enter_context(index: int) -> None:
    """A tensor map is made by the driver, which unlike the runtime does not give a new thread, such as autograd's, its
    context: whoever comes first must."""
    if getattr(_threads, "context", None) != index:
        torch._C._cuda_setDevice(index)
        _threads.context = index
