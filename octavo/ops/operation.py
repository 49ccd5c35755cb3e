"""The interface of an operation that can take part in a run: for a call, it returns its stage of the chain."""

from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple, NoReturn, Self

import torch
from torch import Tensor, nn

from octavo.errors import UnsupportedConfig
from octavo.runtime.call import Stage, call, takes_nodes
from octavo.runtime.call_cache import Lookup
from octavo.text import plural
from octavo.values import Value
from octavo.weights.quantized_parameters import refuse_codes
from octavo.weights.quantized_weight import QuantizedWeight


class Edge(NamedTuple):
    """A value between two operations, without data."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    like: Any = None  # if the shape is unknown, and so (): (shape, dtype, device) of the dry run's tensor
    leads: bool = False  # whether it is the x of the whole run
    made_by: str = ""  # the layer that makes it as its only output, so that nothing else holds its memory

    def after(self, stage: Stage) -> "Edge":
        """Return the y of a stage whose x is this Edge."""
        if stage.width is None:
            return self._replace(requires_grad=stage.needs, leads=False, made_by=stage.name)
        width = stage.width
        shape = (*self.shape[:-1], width) if self.shape else ()
        like = None if self.like is None else ((*self.like[0][:-1], width), *self.like[1:])
        return Edge(shape, self.dtype, self.device, stage.needs, like, made_by=stage.name)

    @classmethod
    def of(cls, x: Tensor) -> "Edge":
        if type(x) is QuantizedWeight:  # isinstance asks the metaclass of tensors and takes ten times as long
            refuse_codes("A Sequential")
        return cls(tuple(x.shape), x.dtype, x.device, x.requires_grad and torch.is_grad_enabled(), leads=True)


def last_dim(x: Any) -> int:
    """Return the size of x's last dim; 0 if it is unknown or x has no dims."""
    shape = x.shape or (x.like[0] if type(x) is Edge and x.like is not None else ())
    return shape[-1] if shape else 0


def has_shape(x: Any) -> bool:
    """Return whether x's shape is known. The shape of a user's operation's output inside a run is not."""
    return len(x.shape) > 0 or type(x) is not Edge or x.like is None


class Channel(NamedTuple):
    name: str
    output_to_caller: bool = True


CHANGED = "octavo.debug changes its tensors"  # why a layer whose tensors are changed joins no run
WATCHED = "octavo.inspect watches its tensors"  # why a layer that is inspected joins no run
HOOKS_OF_ALL = "hooks of all modules are registered"  # why no operation joins one: torch's register_module_forward_hook


def check_columns(ops: Iterable[Any], blocks: int) -> None:
    """Raise if an operation takes features that a layer before it has split over ranks for others."""
    for op in ops:
        blocks = op.op_column_blocks(blocks)
        if not blocks:
            return


def has_hooks(module: nn.Module) -> bool:
    """Return whether a module has forward or backward hooks. An operation with hooks is called by itself, like any
    module."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


class NoTorchScript:
    """Mixin for modules that refuses TorchScript. Only TorchScript calls these methods, so other calls cost nothing."""

    def _slow_forward(self, *arguments: Any, **settings: Any) -> NoReturn:
        """Refuse torch.jit.trace: during a trace, nn.Module calls this instead of forward."""
        self._refuse_script("torch.jit.trace, which torch.onnx.export(dynamo=False) is too, would keep as constants")

    def __prepare_scriptable__(self) -> NoReturn:
        """Refuse torch.jit.script, which calls this on every module of a model."""
        self._refuse_script("torch.jit.script cannot compile")

    def _refuse_script(self, what: str) -> NoReturn:
        raise UnsupportedConfig(
            f"{what} what {type(self).__name__} decides at each call: recipe, scales, kernels. Use "
            "torch.export.export(model, args) or torch.compile; for TorchScript and ONNX call octavo.revert(model) "
            "first, which brings torch's own layers back."
        )


class FusibleOperation(NoTorchScript):
    """Base class of all operations: modules that a Sequential runs together with their neighbours.

    Every class of `octavo.ops`, `octavo.Linear` included, derives from it. It works alone like any module. Derive an
    operation of your own from `BasicOperation`, which defines the op_* methods for you: they are the contract between
    an operation and the planner of runs.

    `num_extra_inputs` and `num_extra_outputs` say how many tensors an operation takes besides x and returns besides y.
    The caller passes and receives them in order, or a channel connects them within a Sequential.

    Example:
        >>> isinstance(octavo.Linear(8, 8), octavo.ops.FusibleOperation)
        True
        >>> octavo.ops.AddExtraInput.num_extra_inputs, octavo.ops.MakeExtraOutput.num_extra_outputs
        (1, 1)
    """

    num_extra_inputs: int = 0
    num_extra_outputs: int = 0
    op_inner_outputs: ClassVar[int] = 0  # side outputs of its stage that only `op_inside` sees: a run ends with it
    op_keywords: ClassVar[tuple[str, ...]] = ()  # keywords of a call, passed through op_kwargs
    op_memory: ClassVar[tuple[str, str] | None] = None  # keywords for the caller's memory: dx's, y's
    op_needs_shape: ClassVar[bool] = False  # whether its stage needs x's shape: it follows no user's operation in a run
    op_has_groups: ClassVar[bool] = False  # whether it reads sizes of groups, which meta and fake tensors do not have
    op_layer_config: ClassVar[type | None] = None  # of its stages, if those of no other class have it
    op_is_legacy: ClassVar[bool] = False
    # class attributes, not getattr with a default: a compiler guards on all attributes of a module that misses one
    op_forks: ClassVar[bool] = False
    op_writes_extra: bool = False  # whether it writes to an extra input in place
    op_is_elementwise: ClassVar[bool] = False  # whether each feature of y follows from the same feature of x
    op_hooked: bool = False  # a copy for `explain`, whose original has hooks
    op_runs_its_forward: ClassVar[bool] = False  # whether its `forward` is from outside octavo and torch
    delay_wgrad_compute: bool = False
    parallel: Any = None  # how a weight is split over ranks; what follows asks op_starts_run and op_ends_run if it is

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        owner = next((parent for parent in cls.__mro__ if "forward" in parent.__dict__), cls)
        cls.op_runs_its_forward = not owner.__module__.startswith(("octavo.", "torch."))

    def why_not_fusible(self, x: Any) -> str:
        """Return why this operation joins no run in a call with x; empty if it joins one."""
        return ""

    def op_starts_run(self) -> bool:
        """Return whether a run that this operation joins begins with it: `op_begin` comes before."""
        return False

    def op_ends_run(self) -> bool:
        """Return whether a run that this operation joins ends with it: `op_finish` comes after."""
        return False

    def op_begin(self, x: Any) -> Any:
        """Return x of a run that begins with this operation: a collective whose gradient is summed."""
        return x

    def op_finish(self, y: Any) -> Any:
        """Return y of a run that ends with this operation, summed over ranks."""
        return y

    def op_column_blocks(self, blocks: int) -> int:
        """Return how many blocks of y's features each rank has a part of, if it has a part of `blocks` blocks of x's: 0
        if a rank has all features, or if that is unknown. Raise if the operation takes them for other features."""
        return blocks if self.op_is_elementwise else 0

    def op_inside(self, y: Any, *sides: Any) -> Any:
        """Return this operation's y, from the outputs of its stage: the part that is plain torch."""
        raise NotImplementedError

    def op_makes_node(self) -> bool:
        """Return whether a call of this operation by itself is a graph node rather than plain torch."""
        return not self.op_is_legacy

    def op_stage(self, x: Any, extra_inputs: tuple[Any, ...], kwargs: dict[str, Any], as_nodes: bool) -> Stage:
        """Return this operation's stage for a call with x, which is a tensor, or an Edge inside a run."""
        raise NotImplementedError

    def _call_lookup(self, needs_dx: bool, extra_inputs: tuple[Any, ...]) -> Lookup | None:
        """Return a call without keywords as the call cache finds it, without a check: its settings are all that
        `op_stage` and `why_not_fusible` read, but for the layout of tensors and x's own shape. `needs_dx` says whether
        x takes a gradient. None if the cache is not to be asked, as where the call joins no run."""
        return None

    def _note_hit(self, lookup: Lookup) -> None:
        """Count a call that is a hit of the call cache, as `op_stage` counts another."""

    def op_refuses_memory(self, kwargs: dict[str, Any]) -> str:
        """Return why the graph being traced cannot write to the memory that these keywords give; empty if it can."""
        return ""

    def op_settings(self) -> Any:
        """Return the object that the conditions of a legacy rule see of this operation."""
        return self

    def op_holds_objects(self) -> bool:
        """Return whether backward needs Python objects, which a custom operator cannot take."""
        return False

    def op_run(self, x: Any, *extra_inputs: Any, **kwargs: Any) -> Any:
        """Run this operation alone and return y."""
        as_nodes = takes_nodes([self])
        return call(self.op_stage(x, extra_inputs, kwargs, as_nodes), x, as_nodes)[0]

    def op_call(self, x: Any, extra_inputs: tuple[Tensor, ...], kwargs: dict[str, Any]) -> Any:
        """Call this operation by itself, as a module."""
        return self(x, *extra_inputs, **kwargs)  # type: ignore[operator]

    @classmethod
    def op_matches(cls, config: Value) -> bool:
        """Return whether a stage with this config belongs to this class."""
        return cls.op_layer_config is not None and isinstance(config, cls.op_layer_config)

    # -- channels --------------------------------------------------------------------------------------------------

    def set_extra_input_channel(self, index: int, name: str | None) -> Self:
        """Read an extra input from a channel of the Sequential, not from the caller.

        Args:
            index: which of the operation's extra inputs, from 0.
            name: the channel, which an operation before this one fills. None takes the extra input from the caller
                again.

        Returns:
            This operation.

        Raises:
            RuntimeError: the operation is in a Sequential already.
            IndexError: the operation has no such extra input.
            ValueError: the name is empty.
        """
        self._check_channel(index, name, self.num_extra_inputs, "input")
        self._set_channel("_input_channels", index, name)
        return self

    def set_extra_output_channel(self, index: int, name: str | None, output_to_caller: bool = True) -> Self:
        """Send an extra output to a channel of the Sequential, from which later operations take it.

        Args:
            index: which of the operation's extra outputs, from 0.
            name: the channel. Only one operation of a Sequential may fill it; any number may read it. None gives the
                extra output to the caller alone again.
            output_to_caller: whether the caller of the Sequential gets the extra output too.

        Returns:
            This operation.

        Raises:
            RuntimeError: the operation is in a Sequential already.
            IndexError: the operation has no such extra output.
            ValueError: the name is empty.
            TypeError: output_to_caller is no bool.
            UnsupportedConfig: there is no channel, and output_to_caller is False: nobody would get the output.
        """
        self._check_channel(index, name, self.num_extra_outputs, "output")
        if not isinstance(output_to_caller, bool):
            raise TypeError(f"output_to_caller is True or False, got {output_to_caller!r}.")
        if name is None and not output_to_caller:
            raise UnsupportedConfig(
                f"Extra output {index} of {type(self).__name__} has no channel, and the caller is not to get it "
                "either. Name a channel, or leave output_to_caller True."
            )
        self._set_channel("_output_channels", index, name, output_to_caller)
        return self

    def _set_channel(self, which: str, index: int, name: str | None, output_to_caller: bool = True) -> None:
        if name is None:
            self._channels(which).pop(index, None)
        else:
            self._channels(which)[index] = Channel(name, output_to_caller)

    def _check_channel(self, index: int, name: str | None, count: int, what: str) -> None:
        if self.__dict__.get("_channels_locked"):
            raise RuntimeError(
                f"{type(self).__name__} is in a Sequential, which has resolved its channels. Name them before."
            )
        if not 0 <= index < count:
            raise IndexError(f"{type(self).__name__} has {plural(count, f'extra {what}')}, got index {index}.")
        if name is not None and (not isinstance(name, str) or not name):
            raise ValueError(f"A channel's name is a string that is not empty, or None for no channel, got {name!r}.")

    def _channels(self, which: str) -> dict[int, Channel]:
        return self.__dict__.setdefault(which, {})
