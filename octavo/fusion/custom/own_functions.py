"""What an operation of Octavo computes and saves by itself, for a user's fused operation with a forward alone: the
operation's own backward then takes what it saves, in a layout that nobody has to know."""

from collections.abc import Sequence
from typing import Any

from octavo._torch.fakes import FakeTensor
from octavo.runtime.contract import LAYERS, ForwardResult
from octavo.runtime.dry_run import abstract
from octavo.values import Value


def own_forward(config: Value, inputs: tuple[Any, ...]) -> ForwardResult:
    """Compute what an operation of Octavo computes by itself, inside a fused operation's `fuser_forward_compute`.

    Args:
        config: the operation's entry of `configs`.
        inputs: its entry of `inputs`; with `_replace(x=…)` for an operation after the first.

    Returns:
        A named tuple: `outputs` has y, and `intermediates` what the operation makes for its backward. Hand that over
        as the operation's intermediates, for `own_saved`.

    Raises:
        TypeError: the operation is none of Octavo's.

    Example:
        >>> from octavo import ops
        >>> class LinearScale(ops.FusedOperation):
        ...     @staticmethod
        ...     def fuser_forward_compute(configs, inputs):
        ...         made = ops.own_forward(configs[0], inputs[0])
        ...         y = made.outputs[0] * configs[1].function.alpha
        ...         return y, ((), ()), (made.intermediates, ())
        ...     @staticmethod
        ...     def fuser_forward_save_ctx(configs, inputs, outputs, intermediates):
        ...         return ops.own_saved(configs[0], inputs[0], intermediates[0]), ops.own_saved(configs[1], inputs[1])
        >>> rule = ops.Rule("my-linear-scale", (octavo.Linear, ops.ConstantScale), LinearScale)
        >>> model = octavo.Sequential(
        ...     octavo.Linear(8, 4, recipe="fp8-block"), ops.ConstantScale(2.0), rules=(ops.Forward(rule),)
        ... )
        >>> model(torch.ones(2, 8)).sum().backward()
        >>> model[0].weight.grad.shape
        torch.Size([4, 8])
    """
    layer: Any = _layer(config, "own_forward")
    if any(isinstance(t, FakeTensor) for t in inputs):  # for shapes alone, of which some may be symbols
        said = layer.abstract(config, layer.Inputs._make(abstract(tuple(inputs))))
        return ForwardResult(*(tuple(None if p is None else p.empty() for p in group) for group in said))
    return layer.forward(config, inputs)


def own_saved(config: Value, inputs: tuple[Any, ...], intermediates: Sequence[Any] = ()) -> tuple[Any, ...]:
    """Select what an operation of Octavo saves for its own backward, inside `fuser_forward_save_ctx` of a fused
    operation with a forward alone.

    Args:
        config: the operation's entry of `configs`.
        inputs: its entry of `inputs`.
        intermediates: what `own_forward` returned as intermediates; nothing for an operation that makes none.

    Returns:
        The saved tensors, in the operation's own layout.

    Raises:
        TypeError: the operation is none of Octavo's, or makes intermediates that are not given.

    Example:
        See `octavo.ops.own_forward`.
    """
    layer = _layer(config, "own_saved")
    count = layer.intermediates_size(config)
    if len(intermediates) != count:
        raise TypeError(
            f"{layer.title} hands {count} intermediates to its backward, got {len(intermediates)}. Return "
            "octavo.ops.own_forward(config, inputs).intermediates as this operation's intermediates."
        )
    outputs = (None,) * layer.outputs(config)
    made = ForwardResult(outputs, (None,) * layer.auxiliary(config), layer.Intermediates._make(intermediates))
    return tuple(layer.save(config, inputs, made))


def _layer(config: Any, function: str) -> Any:
    layer = LAYERS.get(getattr(config, "registered_name", ""))
    if layer is None:
        raise TypeError(
            f"{function} takes the config of one of Octavo's operations, got {config!r}. Of an operation of yours call "
            "the functions of its class."
        )
    return layer
