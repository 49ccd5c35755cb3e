"""A forward that backward runs again: with the tensors of its first run, or not at all."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from octavo.errors import UnsupportedConfig
from octavo.ops.quantized import Quantized
from octavo.runtime.modified import PARAMETER, refuse_modified
from octavo.scaling.delayed_scaling import BACKWARD, FORWARD

SCALES = (FORWARD["inverse_scale"], BACKWARD["inverse_scale"])  # hidden buffers, which octavo.step writes


class _Read(NamedTuple):
    """A tensor that a forward has read."""

    module: Any
    table: dict[str, Any]  # of the module, where it has the tensor
    name: str
    tensor: Any
    version: int | None  # None: a buffer, which forward itself may write to


class FirstRun:
    """The tensors and the settings that a forward of a block has read, for the forward that backward runs again.

    torch.func.functional_call lends a module parameters for one forward, and a program may replace a parameter or
    write to it between forward and backward. The second run reads the tensors of the first, and raises if one of them
    has changed since: its gradients would be those of neither.

    Args:
        block: the block, after its forward.
        inputs: the tensors that forward was given.
    """

    def __init__(self, block: nn.Module, inputs: Sequence[Any]) -> None:
        modules = _modules(block)
        given = {str(i): t for i, t in enumerate(inputs)}
        self.read = [_Read(block, given, name, t, _version(t)) for name, t in given.items() if isinstance(t, Tensor)]
        for module in modules:
            self.read += _tensors(module)
        self.block, self.settings = block, _settings(modules)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Give the modules the tensors of the first run; raise if a tensor or a setting has changed."""
        for one in self.read:
            if one.version is not None and one.tensor._version != one.version:
                is_scale, kind = one.name in SCALES, type(one.module).__name__
                title = one.module.op_describe() if hasattr(one.module, "op_describe") else kind
                what = "a scale of fp8-delayed" if is_scale else PARAMETER
                writes = "octavo.step(), optimizer.step()" if is_scale else "optimizer.step()"
                shape, now = tuple(one.tensor.shape), one.tensor._version
                refuse_modified(title, f"{what}, {shape}", one.version or 0, now, writes)
        for then, now in zip(self.settings, _settings(_modules(self.block)), strict=False):
            if then != now:
                raise UnsupportedConfig(
                    f"{type(self.block).__name__}(activation_recompute=True) runs forward again in backward, and a "
                    f"setting was changed in between: {_described(then)} has become {_described(now)}. Set it before "
                    "forward or after backward."
                )
        others = [(one, one.table.get(one.name)) for one in self.read if one.table.get(one.name) is not one.tensor]
        for one, _ in others:
            one.table[one.name] = one.tensor
        try:
            yield
        finally:
            for one, tensor in others:
                one.table[one.name] = tensor


def _modules(block: nn.Module) -> list[nn.Module]:
    found = [block]
    for module in found:  # the list grows meanwhile: nn.Module.modules() makes a generator for each module
        found += [child for child in module._modules.values() if child is not None]
    return found


def _tensors(module: Any) -> list[_Read]:
    """Return the parameters and buffers of a module itself, and its scales of delayed scaling."""
    found = [
        _Read(module, module._parameters, name, p, _version(p))
        for name, p in module._parameters.items()
        if p is not None
    ]
    found += [_Read(module, module._buffers, name, b, None) for name, b in module._buffers.items() if b is not None]
    if isinstance(module, Quantized):
        hidden: dict[str, Any] = module._hidden._buffers
        found += [_Read(module, hidden, name, hidden[name], hidden[name]._version) for name in SCALES if name in hidden]
    return found


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _settings(modules: Sequence[nn.Module]) -> list[tuple[Any, ...]]:
    """Return what forward depends on besides tensors. The caller keeps the ambient recipe of a layer without one."""
    own = [vars(module) for module in modules]
    return [(type(m), v.get("_settings"), v.get("_recipe"), v["training"]) for m, v in zip(modules, own, strict=True)]


def _described(settings: tuple[Any, ...]) -> str:
    kind, own, recipe, training = settings
    said = [str(value) for value in (own, recipe) if value is not None]
    return f"{kind.__name__}({', '.join([*said, 'training' if training else 'eval'])})"
