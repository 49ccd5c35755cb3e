"""Buffers that a layer makes as it goes, and that `nn.Module` does not list.

The memory of delayed scaling, a weight's cached codes and the counter of stochastic rounding come and go with recipes
and calls. Averages of a model's weights, and DistributedDataParallel, take the buffers of two models in pairs, so the
list of a model's buffers must not grow. The layer keeps these in a module that is not among its submodules: torch does
not list, save, average or send them, and the layer itself moves and copies them. The compiler takes them for buffers of
a module: their sizes are constants, and a CUDA graph reads and writes them where they are.
"""

from collections.abc import Callable, Iterable

from torch import Tensor, nn

from octavo._torch.fakes import FakeTensor


class HiddenBuffers(nn.Module):
    """The tensors by name, in `_buffers`."""

    def put(self, name: str, tensor: Tensor) -> None:
        self._buffers[name] = tensor

    def drop(self, names: Iterable[str]) -> None:
        for name in names:
            self._buffers.pop(name, None)

    def copy(self) -> "HiddenBuffers":
        """Return the same tensors in another module."""
        other = HiddenBuffers()
        other._buffers.update(self._buffers)
        return other

    def follow(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Move the tensors to where `fn`, a function for `nn.Module._apply`, moves them. They keep dtypes and values:
        half precision changes a scale, and `to_empty` would leave memory without values."""
        for name, before in self._buffers.items():
            assert before is not None
            after = fn(before)
            arrives = before.is_meta and not after.is_meta
            differs = isinstance(before, FakeTensor) != isinstance(after, FakeTensor)
            self._buffers[name] = after if arrives or differs else before.to(after.device)
