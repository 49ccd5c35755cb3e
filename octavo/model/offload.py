"""`octavo.offload`: tensors that forward saves wait for backward in the host's memory, copied while kernels run."""

import weakref
from collections.abc import Iterable
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from octavo._torch.cuda import is_capturing
from octavo.errors import UnsupportedConfig, check_whole
from octavo.memory import is_dense
from octavo.model.layer_lookup import check_model


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


class Saved:
    """One saved tensor on the host."""

    def __init__(self, tensor: Tensor, memory: HostMemory, stream: Any) -> None:
        self.shape, self.strides, self.dtype, self.device = tensor.shape, tensor.stride(), tensor.dtype, tensor.device
        self.stream = stream
        nbytes, pinned = tensor.numel() * tensor.element_size(), stream is not None
        self.buffer = memory.take(nbytes, pinned)
        weakref.finalize(self, memory.give_back, self.buffer, pinned)
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(stream):
                self._view(self.buffer).copy_(tensor, non_blocking=True)
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
        if self.stream is None:
            self._fetched = self._empty()
            self._fetched.copy_(self._view(self.buffer))
            return
        with torch.cuda.stream(self.stream):
            self._fetched = self._empty()
            self._fetched.copy_(self._view(self.buffer), non_blocking=True)
            self._event = self.stream.record_event()

    def tensor(self) -> Tensor:
        """Return the tensor on its device."""
        found = self._alive()
        if found is None:
            self.fetch()
            found, self._fetched = self._fetched, None
            assert found is not None
            if self.stream is not None:
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


class Offload:
    """The block of `octavo.offload`: enter it for each forward. Its buffers on the host serve every step.

    Args:
        model: the model, whose parameters and state stay on the device.
        share: of the bytes that could be moved, the share that is.
        least: tensors of fewer bytes stay.
        prefetch: how many tensors are on their way back ahead of backward.

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
        self._memory, self._streams = HostMemory(), dict[torch.device, Any]()
        self._hooks: list[Any] = []  # of the blocks that are entered
        self.saved_bytes = self.moved_bytes = 0

    def __enter__(self) -> Self:
        model = self._model()
        if model is None:
            raise UnsupportedConfig(
                "octavo.offload keeps no model alive, and the one of this block was deleted. Keep it in a variable."
            )
        if is_capturing():
            raise UnsupportedConfig(
                "octavo.offload cannot be captured in a CUDA graph: a replay asks no hooks. Capture without it."
            )
        self.saved_bytes = self.moved_bytes = 0
        block = _Block(self, {storage for tensor in _tensors_of(model) if (storage := _storage(tensor))})
        hooks = torch.autograd.graph.saved_tensors_hooks(block.pack, block.unpack)
        hooks.__enter__()  # type: ignore[no-untyped-call]
        self._hooks.append(hooks)
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.pop().__exit__(*error)

    def _stream(self, device: torch.device) -> Any:
        if device.type != "cuda":
            return None
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]


class _Block:
    """One forward: what it saved, in order, so that backward finds the tensors before on their way back."""

    knows_buffers = True  # that a graph's backward writes to: those of the model are in `own`

    def __init__(self, offload: Offload, own: set[int]) -> None:
        self.offload, self.own = offload, own
        self.order: list[weakref.ref[Saved]] = []
        self.places: dict[int, int] = {}  # of each Saved in the order
        self.known: dict[Any, tuple[StorageWeakRef, weakref.ref[Saved]]] = {}

    def pack(self, tensor: Tensor) -> Any:
        """Move a tensor that is large enough, once though it is saved twice; return any other as it is."""
        offload, nbytes = self.offload, tensor.numel() * tensor.element_size()
        if type(tensor) is not Tensor or nbytes < max(offload._least, 1) or not is_dense(tensor):
            return tensor
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self.own or tensor.device.type == "meta":
            return tensor
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
        if offload.moved_bytes + nbytes > offload._share * offload.saved_bytes:
            return tensor
        offload.moved_bytes += nbytes
        saved = Saved(tensor, offload._memory, offload._stream(tensor.device))
        self.places[id(saved)] = len(self.order)
        self.order.append(weakref.ref(saved))
        self.known[key] = StorageWeakRef(storage), weakref.ref(saved)  # type: ignore[no-untyped-call]
        return saved

    def unpack(self, packed: Any) -> Tensor:
        """Return a tensor on its device, and begin to copy those that backward needs after it."""
        if not isinstance(packed, Saved):
            return packed
        found, place = packed.tensor(), self.places[id(packed)]
        for ref in self.order[max(place - self.offload._prefetch, 0) : place]:
            if (earlier := ref()) is not None:
                earlier.fetch()
        return found


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
        prefetch: how many tensors are on their way back ahead of backward.

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


def _tensors_of(model: nn.Module) -> Iterable[Tensor]:
    """Yield the model's own tensors: parameters, their gradients, buffers, and the state of recipes."""
    for module in model.modules():
        hidden = module.__dict__.get("_hidden")
        tables = [module._parameters, module._buffers, {} if hidden is None else hidden._buffers]
        own = [t for table in tables for t in table.values() if t is not None]
        for tensor in [*own, *[t.main_grad for t in own if isinstance(getattr(t, "main_grad", None), Tensor)]]:
            if hasattr(tensor, "__tensor_flatten__"):  # codes, and parts of a sharded one
                yield from [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
            else:
                yield tensor


def _storage(tensor: Tensor) -> int:
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    return tensor.untyped_storage().data_ptr() if plain else 0
