"""Buffers that a graph's backward writes to, under hooks on saved tensors.

A graph saves all that its backward reads or writes alike. A hook that moves saved tensors away, such as that of
`torch.autograd.graph.save_on_cpu`, would hand backward a copy of a buffer, and what is written there would be lost. The
forward node therefore replaces the hooks by a pair that leaves its buffers where they are, and calls the program's for
all other tensors. They are those of the same block: leaving it takes them away.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from octavo._torch.autograd import replace_saved_tensors_hooks, saved_tensors_hooks
from octavo._torch.cuda import is_capturing
from octavo.errors import UnsupportedConfig


class InPlace(NamedTuple):
    """A buffer that stays where it is."""

    tensor: Tensor


class Hooks:
    """The hooks of a block, but for buffers."""

    def __init__(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
        self._pack, self._unpack = pack, unpack
        self.buffers: dict[tuple[int, int], Tensor] = {}  # kept, so that no other tensor gets their memory

    def pack(self, tensor: Tensor) -> Any:
        """Return a buffer as it is; pass any other tensor to the program's hook."""
        return InPlace(tensor) if _place(tensor) in self.buffers else self._pack(tensor)

    def unpack(self, packed: Any) -> Tensor:
        """Return what `pack` took."""
        return packed.tensor if type(packed) is InPlace else self._unpack(packed)


def leave_in_place(buffers: Sequence[Tensor]) -> None:
    """Have the hooks of the block around this call leave these buffers where they are."""
    pack, unpack = saved_tensors_hooks(True)
    hooks = getattr(pack, "__self__", None)
    if getattr(hooks, "knows_buffers", False):  # those of octavo.offload, which serve replays too
        return
    if is_capturing():
        raise UnsupportedConfig(
            "saved_tensors_hooks (save_on_cpu) cannot be used around a CUDA graph with state that backward writes: "
            "fp8-delayed's amax, nvfp4's counter, main_grad, dgrad_out. A replay would write to copies. Leave the "
            'hooks out, compile without mode="reduce-overhead", or use octavo.offload.'
        )
    if not isinstance(hooks, Hooks):
        hooks = Hooks(pack, unpack)
        replace_saved_tensors_hooks(hooks.pack, hooks.unpack)
    hooks.buffers.update({_place(t): t for t in buffers})


def _place(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.numel()
