"""Launch Triton kernels without the overhead of Triton's own Python.

`kernel[grid](...)` binds, specializes and formats a cache key in Python at every call: tens of microseconds, as long as
a small kernel runs. A `Launch` holds everything of a call except its tensors; the caller creates it once and caches it
(`lru_cache` over settings and sizes). Each call then checks only which tensors are None, their dtypes, and whether they
are aligned to 16 bytes, since a kernel is compiled for those. From the second time on it calls the compiled kernel
directly, with pointers as integers.

    rules       what a Launch can launch, refused in a sentence when it is made
    check       two kernels that prove the direct call on this machine
    __init__    Launch itself

    kernel, grid, sizes -> Launch -+- first call of a signature: Triton's public call, which compiles
                                   +- later calls: the compiled kernel, directly

The direct call is private to Triton, so two kernels are launched both ways first (`check`); where the results differ,
every launch takes the public call. A `Launch` holds compiled kernels and never a tensor.

This room may import rooms up to `backend`.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo._torch.cuda import current_device, current_stream, is_capturing, set_device
from octavo._torch.dispatcher import plainly
from octavo._torch.fast_paths import FastPath, Undecided
from octavo.launch import rules

# Triton 3.10 stops fusing products and sums by default: every launch asks for it, so that bits do not depend on it
OPTIONS = {"enable_fp_fusion": True}
Pointers = tuple[Tensor | None, ...]
_threads = threading.local()


def is_watched() -> bool:
    """Return whether a profiler has hooked Triton's launches, which then go through Triton's public call."""
    knobs = sys.modules.get("triton.knobs")  # Triton may not be installed or imported
    return knobs is not None and bool(knobs.runtime.launch_enter_hook.calls)


@contextmanager
def listening(listener: Callable[["Launch", tuple[Any, ...]], None] | None) -> Iterator[None]:
    """Call `listener` after every launch of this thread."""
    before = getattr(_threads, "listener", None)
    _threads.listener = listener
    try:
        yield
    finally:
        _threads.listener = before


@contextmanager
def apart() -> Iterator[None]:
    """Return a block whose operators and launches are no part of the call around it: no mode sees them, and nothing
    that records this call."""
    with plainly(), listening(None):
        yield


class Variant(NamedTuple):
    """One compilation of a kernel, so that it can be compiled without a GPU."""

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    warps: int
    stages: int = 3
    is_matmul: bool = False


class Direct:
    """A compiled kernel's launch function, and its arguments between the stream and the kernel's own arguments. Those
    follow one by one in Triton 3.6, and as one tuple since 3.7."""

    def __init__(self, compiled: Any) -> None:
        run = compiled.run
        self.launch = run.launch
        self.compiled = compiled  # since 3.8 a kernel is unloaded when this object dies
        self.packs = hasattr(run, "kernel_signature")
        self.head: tuple[Any, ...]
        start = (compiled.function, run.launch_cooperative_grid, run.launch_pdl)
        scratch, metadata = (None, None), (compiled.packed_metadata, None, None, None)  # and no hooks
        if self.packs:
            self.head = (*start, *metadata, *scratch, run.arg_annotations, run.kernel_signature)
        else:
            self.head = (*start, *scratch, *metadata)

    @staticmethod
    def takes(compiled: Any) -> bool:
        """Return whether nothing but the kernel's own arguments decides a launch: no Octavo kernel uses scratch memory,
        but one that Triton instruments does."""
        run = compiled.run
        return not (run.global_scratch_size or run.profile_scratch_size or getattr(run, "gsan_enabled", False))

    def __call__(self, grid: int, stream: int, arguments: list[Any]) -> None:
        if self.packs:
            self.launch(grid, 1, 1, stream, *self.head, arguments)
        else:
            self.launch(grid, 1, 1, stream, *self.head, *arguments)


class Launch:
    """A launch of `kernel` over `grid` programs with these sizes and constants. The kernel's parameters are pointers,
    then sizes, then constants, in that order. A size may be None, as a pointer may: the kernel is compiled without.
    What it cannot launch it refuses when it is made (`rules.py`)."""

    def __init__(
        self,
        kernel: Any,
        grid: int,
        sizes: tuple[int | None, ...],
        *,
        num_warps: int,
        num_stages: int = 3,
        **constants: Any,
    ) -> None:
        rules.check_launch(kernel, grid, sizes, tuple(constants))
        self.kernel, self.grid, self.sizes = kernel, grid, sizes
        self.options = {**constants, "num_warps": num_warps, "num_stages": num_stages, **OPTIONS}
        self.tail = (*sizes, *constants.values())
        self._compiled: dict[tuple[Any, ...], Direct] = {}

    def __call__(self, *arguments: Any) -> None:
        """Run the kernel on the device of the first argument, which is never None."""
        index = device_index(arguments[0])
        if index != current_device():
            with torch.cuda.device(index):
                return self(*arguments)
        key, given = self._bound(arguments)
        direct = self._compiled.get(key)
        if direct is None or is_watched():
            self._compile(key, self._public(arguments))
        else:
            direct(self.grid, current_stream(index), [*given, *self.tail])
        if getattr(_threads, "listener", None) is not None:
            _threads.listener(self, arguments)

    def direct(self, *arguments: Any) -> Direct | None:
        """Return the direct launch that a call with such arguments has compiled, or None."""
        return self._compiled.get(self._bound(arguments)[0])

    def _bound(self, pointers: Pointers) -> tuple[tuple[Any, ...], list[Any]]:
        """Return the key that the kernel is compiled for, and the arguments of the direct call."""
        addresses = [0 if t is None else t.data_ptr() for t in pointers]
        key: tuple[Any, ...] = (device_index(pointers[0]), *[None if t is None else t.dtype for t in pointers])
        ends = 0
        for address in addresses:
            ends |= address
        return (*key, *[address & 15 == 0 for address in addresses]) if ends & 15 else key, addresses

    def _public(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments as Triton's public call takes them."""
        return arguments

    def _compile(self, key: tuple[Any, ...], arguments: tuple[Any, ...]) -> None:
        """Run the kernel through Triton's public call, which compiles it the first time."""
        compiled = self.kernel[(self.grid,)](*arguments, *self.sizes, **self.options)
        if DIRECT_LAUNCHES.is_on() and Direct.takes(compiled):
            self._compiled[key] = Direct(compiled)

    def both_ways(self, *arguments: Any) -> Iterator[None]:
        """Run the kernel by Triton's public call, then directly."""
        index = device_index(arguments[0])
        _, given = self._bound(arguments)
        compiled = self.kernel[(self.grid,)](*self._public(arguments), *self.sizes, **self.options)
        if not Direct.takes(compiled):  # Triton instruments kernels now
            raise Undecided
        yield
        Direct(compiled)(self.grid, current_stream(index), [*given, *self.tail])
        yield


class Tiles:
    """A matrix that a kernel copies by tiles: Triton's TensorDescriptor without its checks at every call.
    Rows begin at multiples of 16 bytes."""

    __slots__ = ("base", "block_shape", "layout", "padding", "round_f32_to_tf32", "shape", "strides")

    def __init__(self, base: Tensor, block_shape: list[int], layout: Any) -> None:
        self.base, self.block_shape, self.layout = base, block_shape, layout
        self.padding, self.round_f32_to_tf32 = "zero", False
        self.shape, self.strides = base.shape, base.stride()

    def checked(self) -> Any:
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        return TensorDescriptor(self.base, list(self.shape), list(self.strides), self.block_shape, self.layout)


class TiledLaunch(Launch):
    """A launch whose arguments may be `Tiles`."""

    def _bound(self, arguments: tuple[Tensor | Tiles | None, ...]) -> tuple[tuple[Any, ...], list[Any]]:
        enter_context(device_index(arguments[0]))
        key, addresses = super()._bound(tuple([_base(t) for t in arguments]))
        return key, [t if isinstance(t, Tiles) else address for t, address in zip(arguments, addresses, strict=True)]

    def _public(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple([t.checked() if isinstance(t, Tiles) else t for t in arguments])


def device_index(argument: Tensor | Tiles | None) -> int:
    return _base(argument).get_device()


def _base(argument: Tensor | Tiles | None) -> Any:
    return argument.base if isinstance(argument, Tiles) else argument


def enter_context(index: int) -> None:
    """Set the device once per thread. The driver creates tensor maps and, unlike the runtime, does not give a new
    thread, such as autograd's, a context."""
    if getattr(_threads, "context", None) != index:
        set_device(index)
        _threads.context = index


def _check() -> str:
    """Launch two kernels both ways: one with every kind of argument, and on Hopper one with a matrix by tiles."""
    from octavo.launch import check

    if is_capturing():
        raise Undecided
    with apart():
        for what, launch, arguments, out, want in check.cases(torch.device("cuda", current_device())):
            for way, _ in zip(("by Triton", "directly"), launch.both_ways(*arguments), strict=True):
                if not torch.equal(out, want):
                    return f"a kernel with {what} that is launched {way} gives a wrong result"
                out.zero_()
    return ""


def _triton_version() -> str:
    import triton

    return str(triton.__version__)


DIRECT_LAUNCHES = FastPath(
    "launches of kernels without Triton's Python",
    "Kernels are launched by Triton, with the same results and more host time.",
    _check,
    _triton_version,
)
