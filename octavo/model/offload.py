"""`octavo.offload`: tensors that forward saves wait for backward in the host's memory, copied while kernels run."""

import weakref
from bisect import bisect_left
from collections.abc import Iterable
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from octavo._torch.cuda import is_capturing
from octavo.errors import UnsupportedConfig, check_whole
from octavo.memory import is_dense
from octavo.model.layer_lookup import alive, check_model


class HostMemory:
    """Buffers on the host, pinned where the device is a GPU. A buffer that nothing needs any more serves again."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, bool], list[Tensor]] = {}
        self.nbytes = 0  # of all buffers

    def take(self, nbytes: int, pinned: bool) -> Tensor:
        """Return a buffer of that many bytes."""
        found = self._free.get((nbytes, pinned))
        if found:
            return found.pop()
        self.nbytes += nbytes
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)

    def give_back(self, buffer: Tensor, pinned: bool) -> None:
        """Let a buffer serve again. Copies to and from it run in one stream, so that a later one waits for it."""
        self._free.setdefault((buffer.numel(), pinned), []).append(buffer)


class Copies(NamedTuple):
    """The streams of a GPU's copies: there and back at once, as the bus allows."""

    to_host: Any
    to_device: Any


class Saved:
    """One saved tensor on the host."""

    def __init__(self, tensor: Tensor, memory: HostMemory, copies: Copies | None) -> None:
        self.shape, self.strides, self.dtype, self.device = tensor.shape, tensor.stride(), tensor.dtype, tensor.device
        self.copies = copies
        nbytes, pinned = tensor.numel() * tensor.element_size(), copies is not None
        self.buffer = memory.take(nbytes, pinned)
        weakref.finalize(self, memory.give_back, self.buffer, pinned)
        if copies is not None:
            stream = copies.to_host
            stream.wait_stream(torch.cuda.current_stream(self.device))
            stream.wait_stream(copies.to_device)  # which may still read what this buffer held
            with torch.cuda.stream(stream):
                self._view(self.buffer).copy_(tensor, non_blocking=True)
                self._copied = stream.record_event()
            tensor.record_stream(stream)  # its memory waits for the copy
        else:
            self._view(self.buffer).copy_(tensor)
        self._fetched: Tensor | None = None  # on its way back
        self._event: Any = None
        self._last: Any = None  # a weak reference to what was handed out last

    def fetch(self) -> None:
        """Begin to copy the tensor back, unless it is there."""
        if self._fetched is not None or self._alive() is not None:
            return
        if self.copies is None:
            self._fetched = self._empty()
            self._fetched.copy_(self._view(self.buffer))
            return
        stream = self.copies.to_device
        stream.wait_event(self._copied)
        with torch.cuda.stream(stream):
            self._fetched = self._empty()
            self._fetched.copy_(self._view(self.buffer), non_blocking=True)
            self._event = stream.record_event()

    def tensor(self) -> Tensor:
        """Return the tensor on its device."""
        found = self._alive()
        if found is None:
            self.fetch()
            found, self._fetched = self._fetched, None
            assert found is not None
            if self.copies is not None:
                current = torch.cuda.current_stream(self.device)
                current.wait_event(self._event)
                found.record_stream(current)
            self._last = weakref.ref(found)
        return found

    def _alive(self) -> Tensor | None:
        return None if self._last is None else self._last()

    def _empty(self) -> Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)

    def _view(self, buffer: Tensor) -> Tensor:
        return buffer.view(self.dtype).as_strided(self.shape, self.strides)


class Stayed(NamedTuple):
    """A saved tensor that stays on the device."""

    tensor: Tensor
    version: int  # torch compares none under hooks: a tensor written to afterwards would give wrong gradients
    moved_before: int  # how many tensors were moved before this one was saved
    stayed_before: int  # bytes that had stayed


class Offload:
    """The block of `octavo.offload`: enter it for each forward. Its buffers on the host serve every step.

    Args:
        model: the model, whose parameters and state stay on the device.
        share: of the bytes that could be moved, the share that is.
        least: tensors of fewer bytes stay.
        prefetch: how many tensors are on their way back ahead of backward, at least.

    Attributes:
        saved_bytes: bytes of all tensors that were saved in the last block and could be moved.
        moved_bytes: those of them that were moved.

    Example:
        >>> model = nn.Sequential(octavo.Linear(64, 64, recipe="fp8-block"), nn.GELU())
        >>> offload = octavo.offload(model, least=1)
        >>> with offload:
        ...     y = model(torch.randn(16, 64))
        >>> y.sum().backward()
        >>> offload.moved_bytes == offload.saved_bytes > 0
        True
    """

    def __init__(self, model: nn.Module, share: float, least: int, prefetch: int) -> None:
        self._model = weakref.ref(model)
        self._share, self._least, self._prefetch = share, least, prefetch
        self._memory, self._copies = HostMemory(), dict[torch.device, Copies]()
        self._hooks: list[Any] = []  # of the blocks that are entered
        self._total: int | None = None  # the bytes that the last whole block saved
        self.saved_bytes = self.moved_bytes = 0

    def __enter__(self) -> Self:
        model = alive(self._model, "offload")
        if is_capturing():
            raise UnsupportedConfig(
                "octavo.offload cannot be captured in a CUDA graph: a replay asks no hooks. Capture without it."
            )
        self.saved_bytes = self.moved_bytes = 0
        block = _Block(self, *storages(model))
        hooks = torch.autograd.graph.saved_tensors_hooks(block.pack, block.unpack)
        hooks.__enter__()  # type: ignore[no-untyped-call]
        self._hooks.append(hooks)
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.pop().__exit__(*error)
        if error[0] is None:
            self._total = self.saved_bytes

    def _copies_of(self, device: torch.device) -> Copies | None:
        if device.type != "cuda":
            return None
        if device not in self._copies:
            self._copies[device] = Copies(torch.cuda.Stream(device), torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
        return self._copies[device]


class _Block:
    """One forward: what it saved, in order, so that backward finds the tensors before on their way back.

    What is moved first is saved first: its copy has the rest of forward, and the way back has most of backward. From
    the second block on, the share is taken of what the last block saved. A tensor that is saved last would be copied
    there and back with nothing to wait for it.
    """

    knows_buffers = True  # that a graph's backward writes to: those of the model are in `state`

    def __init__(self, offload: Offload, parameters: set[int], state: set[int]) -> None:
        self.offload, self.parameters, self.state = offload, parameters, state
        self.moved: list[weakref.ref[Saved]] = []
        self.moved_bytes = [0]  # of the tensors moved before each one
        self.stayed_before: list[int] = []  # bytes that had stayed when each one was saved
        self.places: dict[int, int] = {}  # of each Saved in the order
        self.known: dict[Any, tuple[StorageWeakRef, weakref.ref[Saved]]] = {}
        self.stayed = 0  # bytes
        self.is_full = False
        self.begun = self.ahead = 0  # where backward is, and the first tensor that is on its way back

    def pack(self, tensor: Tensor) -> Any:
        """Move a tensor that is large enough, once though it is saved twice; return the model's state as it is."""
        offload, nbytes = self.offload, tensor.numel() * tensor.element_size()
        if (
            type(tensor) not in (Tensor, nn.Parameter)
            or tensor.device.type == "meta"
            or tensor.layout is not torch.strided
        ):
            return tensor
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self.state:
            return tensor
        own = storage.data_ptr() in self.parameters
        if own or nbytes < max(offload._least, 1) or not is_dense(tensor):
            return self._stays(tensor, 0)
        key = (
            storage.data_ptr(),
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
            tensor._version,
        )
        known = self.known.get(key)
        if known is not None and not known[0].expired() and (saved := known[1]()) is not None:  # type: ignore[no-untyped-call]
            return saved
        offload.saved_bytes += nbytes
        if not self._fits(nbytes):
            return self._stays(tensor, nbytes)
        offload.moved_bytes += nbytes
        saved = Saved(tensor, offload._memory, offload._copies_of(tensor.device))
        self.places[id(saved)] = len(self.moved)
        self.moved.append(weakref.ref(saved))
        self.moved_bytes.append(self.moved_bytes[-1] + nbytes)
        self.stayed_before.append(self.stayed)
        self.known[key] = StorageWeakRef(storage), weakref.ref(saved)  # type: ignore[no-untyped-call]
        return saved

    def unpack(self, packed: Any) -> Tensor:
        """Return a tensor on its device, and begin to copy those that backward needs after it."""
        if isinstance(packed, Saved):
            place = self.places[id(packed)]
            self._fetch_before(place, self.stayed_before[place], packed)
            return packed.tensor()
        if not isinstance(packed, Stayed):
            return packed
        if packed.tensor._version != packed.version:
            raise UnsupportedConfig(
                f"A tensor of shape {list(packed.tensor.shape)} that forward saved under octavo.offload was written to "
                "in place before backward, so that its gradients would be wrong. Write to a copy, or after backward."
            )
        self._fetch_before(packed.moved_before, packed.stayed_before)
        return packed.tensor

    def _fits(self, nbytes: int) -> bool:
        """Return whether a tensor is moved. The first that is too many is the last that is asked, where the bytes of a
        whole block are known."""
        offload = self.offload
        limit = offload._share * max(offload._total or 0, offload.saved_bytes)
        fits = not self.is_full and offload.moved_bytes + nbytes <= limit
        self.is_full = not fits and offload._total is not None
        return fits

    def _stays(self, tensor: Tensor, nbytes: int) -> Stayed:
        stayed = Stayed(tensor, tensor._version, len(self.moved), self.stayed)
        self.stayed += nbytes
        return stayed

    def _fetch_before(self, place: int, stayed_before: int, first: Saved | None = None) -> None:
        """Begin to copy what was moved before this place back: as many bytes as backward has freed of those that had
        stayed, so that the peak does not grow, or `prefetch` tensors."""
        if first is not None:
            first.fetch()
        if place > self.begun:  # another backward
            self.ahead = place
        self.begun = place
        freed = self.stayed - stayed_before
        earliest = bisect_left(self.moved_bytes, self.moved_bytes[place] - freed)
        earliest = max(min(earliest, place - self.offload._prefetch), 0)
        for ref in reversed(self.moved[earliest : min(place, self.ahead)]):
            if (earlier := ref()) is not None:
                earlier.fetch()
        self.ahead = min(self.ahead, earliest)


def offload(model: nn.Module, *, share: float = 1.0, least: int = 2**20, prefetch: int = 2) -> Offload:
    """Keep what forward saves for backward in the host's memory: less memory on the GPU for copies beside its kernels.

    In the block, each tensor that autograd saves is copied to pinned memory on a stream of its own. Backward finds
    the next ones on their way back. Layers of Octavo save codes, one byte for each value, an eighth to a half of what
    others copy. Results have the same bits, in eager mode and in graphs. Parameters, their cached codes and the state
    of recipes stay on the device. On a CPU the tensors are copied too, which saves nothing, and serves tests.

    Args:
        model: the model that runs in the block. No reference to it is kept.
        share: of the bytes that can be moved, the share that is, 0 to 1. Lower it where backward waits for copies.
        least: tensors of fewer bytes stay on the device.
        prefetch: how many tensors are on their way back ahead of backward, at least. More are where backward has freed
            memory for them.

    Returns:
        The block, for every step: `block = octavo.offload(model)`, then `with block: loss = model(x)`.

    Raises:
        UnsupportedConfig: `model` is no module, an argument is out of range, or the block is captured in a CUDA graph.

    Example:
        >>> model = nn.Sequential(*[octavo.Linear(64, 64, recipe="fp8-block") for _ in range(3)])
        >>> block = octavo.offload(model, share=0.5, least=1)
        >>> for _ in range(2):
        ...     with block:
        ...         loss = model(torch.randn(16, 64)).square().mean()
        ...     loss.backward()
        >>> 0 < block.moved_bytes <= block.saved_bytes / 2
        True
    """
    check_model(model, "offload", error=UnsupportedConfig)
    if not isinstance(share, int | float) or not 0 <= share <= 1:
        raise UnsupportedConfig(f"octavo.offload(share=) is a number from 0 to 1, got {share!r}.")
    check_whole(least, what="octavo.offload(least=)", least=0)
    check_whole(prefetch, what="octavo.offload(prefetch=)", least=0)
    return Offload(model, share, least, prefetch)


def storages(model: nn.Module) -> tuple[set[int], set[int]]:
    """Return where the model's parameters are, and its other tensors: gradients, buffers, and the state of recipes."""
    parameters, state = set[int](), set[int]()
    for module in model.modules():
        hidden = module.__dict__.get("_hidden")
        own = [t for t in module._parameters.values() if t is not None]
        buffers = [module._buffers, {} if hidden is None else hidden._buffers]
        parameters.update(_storages_of(own))
        state.update(_storages_of(t for table in buffers for t in table.values() if t is not None))
        buffers_of_gradients = [getattr(t, "main_grad", None) for t in own]
        state.update(_storages_of(t for t in buffers_of_gradients if isinstance(t, Tensor)))
    return parameters - {0}, state - {0}


def _storages_of(tensors: Iterable[Tensor]) -> Iterable[int]:
    for tensor in tensors:
        if hasattr(tensor, "__tensor_flatten__"):  # codes, and parts of a sharded one
            yield from (_storage(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
        else:
            yield _storage(tensor)


def _storage(tensor: Tensor) -> int:
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    return tensor.untyped_storage().data_ptr() if plain else 0
