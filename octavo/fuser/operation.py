"""What can take part in a run: an operation that says, for a call, which stage of a chain it is."""

from typing import Any, ClassVar, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from octavo.errors import UnsupportedConfig
from octavo.lower.call import Stage, call, takes_nodes
from octavo.values import Value
from octavo.weights.held import HeldWeight, refuse_codes


class Edge(NamedTuple):
    """A value between two operations, without its data."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    like: Any = None  # (shape, dtype, device) of something like it, where the shape is not known: it is ()
    leads: bool = False  # it is the x of the whole run

    def after(self, stage: Stage) -> "Edge":
        """y of a stage whose x is this."""
        if stage.width is None:
            return self._replace(requires_grad=stage.needs, leads=False)
        width = stage.width
        shape = (*self.shape[:-1], width) if self.shape else ()
        like = None if self.like is None else ((*self.like[0][:-1], width), *self.like[1:])
        return Edge(shape, self.dtype, self.device, stage.needs, like)

    @classmethod
    def of(cls, x: Tensor) -> "Edge":
        if type(x) is HeldWeight:  # isinstance asks the metaclass of tensors, ten times as long
            refuse_codes("A Sequential")
        return cls(tuple(x.shape), x.dtype, x.device, x.requires_grad and torch.is_grad_enabled(), leads=True)


def last_dim(x: Any) -> int:
    """The size of x's last dim, as far as it is known."""
    shape = x.shape or (x.like[0] if type(x) is Edge and x.like is not None else ())
    return shape[-1] if shape else 0


def has_shape(x: Any) -> bool:
    """Whether x's shape is known: not that of a value which an operation of a user's makes inside a run."""
    return bool(x.shape) or type(x) is not Edge or x.like is None


class Channel(NamedTuple):
    name: str
    output_to_caller: bool = True


def has_hooks(module: nn.Module) -> bool:
    """Whether somebody wants to see what goes into a module or comes out: then it is called as a module is."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


class NoTorchScript:
    """Refuses TorchScript. A mixin for modules; both methods are where torch asks a module, so that no call pays."""

    def _slow_forward(self, *arguments: Any, **settings: Any) -> NoReturn:
        """nn.Module's way to forward while torch.jit.trace watches."""
        self._refuse_script("torch.jit.trace, which torch.onnx.export(dynamo=False) is too, would keep as constants")

    def __prepare_scriptable__(self) -> NoReturn:
        """torch.jit.script asks every module of a model for this."""
        self._refuse_script("torch.jit.script cannot compile")

    def _refuse_script(self, what: str) -> NoReturn:
        raise UnsupportedConfig(
            f"{what} what {type(self).__name__} decides at each call: recipe, scales, kernels. Use "
            "torch.export.export(model, args) or torch.compile; for TorchScript and ONNX call octavo.revert(model) "
            "first, which brings torch's own layers back."
        )


class FusibleOperation(NoTorchScript):
    """What a Sequential may put into a run. A mixin for modules."""

    num_extra_inputs: int = 0
    num_extra_outputs: int = 0
    op_keywords: ClassVar[tuple[str, ...]] = ()  # of a call, through op_kwargs
    op_is_legacy: ClassVar[bool] = False
    # class attributes, and not looked for: a compiler that misses one on a module takes note of all that is there
    op_forks: ClassVar[bool] = False
    op_writes_extra: bool = False  # an extra input is written to
    op_hooked: bool = False  # a copy, for an explanation, of one that has hooks
    op_runs_its_forward: ClassVar[bool] = False  # somebody else wrote its `forward`
    delay_wgrad_compute: bool = False

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        owner = next((parent for parent in cls.__mro__ if "forward" in parent.__dict__), cls)
        cls.op_runs_its_forward = not owner.__module__.startswith(("octavo.", "torch."))

    def why_not_fusible(self, x: Any) -> str:
        """Why this operation does not join others in a call with x; empty if it does."""
        return ""

    def op_makes_node(self) -> bool:
        """Whether a call by itself is a node of a graph, and not plain torch."""
        return not self.op_is_legacy

    def op_stage(self, x: Any, extras: tuple[Any, ...], kwargs: dict[str, Any], as_nodes: bool) -> Stage:
        """This operation's part in a call with x, a tensor, or an Edge inside a run."""
        raise NotImplementedError

    def op_settings(self) -> Any:
        """What the conditions of a rule see of this operation, if the rule's forward is in one piece."""
        return self

    def op_holds_objects(self) -> bool:
        """Whether backward needs Python objects, which an operator cannot take."""
        return False

    def op_run(self, x: Any, *extras: Any, **kwargs: Any) -> Any:
        """y of a run of this operation alone."""
        as_nodes = takes_nodes([self])
        return call(self.op_stage(x, extras, kwargs, as_nodes), x, as_nodes)[0]

    def op_call(self, x: Any, extras: tuple[Tensor, ...], kwargs: dict[str, Any]) -> Any:
        """By itself."""
        return self(x, *extras, **kwargs)  # type: ignore[operator]

    @classmethod
    def op_matches(cls, config: Value) -> bool:
        """Whether a stage with this config is one of this class's."""
        return False

    # -- channels --------------------------------------------------------------------------------------------------

    def set_extra_input_channel(self, index: int, name: str) -> "FusibleOperation":
        """Take extra input `index` from the channel of that name, within the same Sequential."""
        self._check_channel(index, name, self.num_extra_inputs, "inputs")
        self._channels("_input_channels")[index] = Channel(name)
        return self

    def set_extra_output_channel(self, index: int, name: str, output_to_caller: bool = True) -> "FusibleOperation":
        """Give extra output `index` to the channel of that name, and to the caller too unless told otherwise."""
        self._check_channel(index, name, self.num_extra_outputs, "outputs")
        if not isinstance(output_to_caller, bool):
            raise TypeError(f"output_to_caller is True or False, got {output_to_caller!r}.")
        self._channels("_output_channels")[index] = Channel(name, output_to_caller)
        return self

    def _check_channel(self, index: int, name: str, count: int, what: str) -> None:
        if self.__dict__.get("_channels_locked"):
            raise RuntimeError(
                f"{type(self).__name__} is in a Sequential, which has resolved its channels. Name them before."
            )
        if not 0 <= index < count:
            raise IndexError(f"{type(self).__name__} has {count} extra {what}, got index {index}.")
        if not isinstance(name, str) or not name:
            raise ValueError(f"A channel's name is a string that is not empty, got {name!r}.")

    def _channels(self, which: str) -> dict[int, Channel]:
        found: dict[int, Channel] = self.__dict__.setdefault(which, {})
        return found
