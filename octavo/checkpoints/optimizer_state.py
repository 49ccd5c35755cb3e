"""The state of an optimizer in a checkpoint: its state dict, its class, and the parameters that it is of."""

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from octavo._torch.modules import plain_name
from octavo.checkpoints.tensor_file import damaged
from octavo.errors import UnsupportedConfig, UnsupportedDtype
from octavo.model.attach import nested
from octavo.text import some
from octavo.values import excerpt

OTHER_SHAPES = ("Adafactor", "LBFGS")  # optimizers of torch whose state has other shapes than its parameters


def inner(optimizer: Any) -> Any:
    """Return the torch optimizer inside of wrappers, such as accelerate's and Lightning's."""
    for found in nested(optimizer):
        if isinstance(found, Optimizer) and "state" in vars(found):  # a wrapper may have the class alone
            return found
    raise UnsupportedDtype(
        "A checkpoint takes a torch.optim.Optimizer, or a wrapper with one at .optimizer, got "
        f"{type(optimizer).__name__}. Save the state of other optimizers as extra={{...}}."
    )


def export(optimizer: Any, model: nn.Module) -> dict[str, Any]:
    """Return an optimizer's state and what it belongs to."""
    optimizer = inner(optimizer)
    state = optimizer.state_dict()
    if not {"state", "param_groups"} <= set(state):
        raise UnsupportedDtype(
            f"A checkpoint takes optimizers whose state dict has state and param_groups, and that of this "
            f"{type(optimizer).__name__} has {some([str(key) for key in state], 3)}. Save it as extra={{...}}."
        )
    return {"class": type(optimizer).__name__, "parameters": _parameters(optimizer, model), "state": state}


def _parameters(optimizer: Any, model: nn.Module) -> list[list[list[Any]]]:
    """Return [name, shape] of each parameter of each group; the name is "" for one that is not the model's."""
    names = {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}
    return [[[names.get(id(p), ""), list(p.shape)] for p in group["params"]] for group in optimizer.param_groups]


def loader(path: Path, saved: dict[str, Any], optimizer: Any, model: nn.Module) -> Callable[[], None]:
    """Return a function that loads a saved state. Raise if the state is not one of this optimizer's."""
    optimizer = inner(optimizer)
    if set(saved) != {"class", "parameters", "state"}:
        raise damaged(path, f"an optimizer has class, parameters and state, and here are {excerpt(repr(list(saved)))}")
    if saved["class"] != type(optimizer).__name__:
        raise UnsupportedConfig(
            f"The checkpoint has the state of {excerpt(str(saved['class']))}, and the optimizer is "
            f"{type(optimizer).__name__}. Build the optimizer that the run was saved with, or load without one."
        )
    _check_parameters(saved["parameters"], _parameters(optimizer, model))
    _check_state(path, saved["state"], optimizer)
    return lambda: optimizer.load_state_dict(saved["state"])


def _check_parameters(saved: Any, own: list[list[list[Any]]]) -> None:
    """Raise unless both have the same parameters in the same order: torch maps states to parameters by position."""
    if saved == own:
        return
    groups = saved if isinstance(saved, list) and all(isinstance(group, list) for group in saved) else []
    for was, now in zip(chain(*groups), chain(*own), strict=False):
        if was != now:
            raise UnsupportedConfig(
                f"The optimizer of the checkpoint has {_text(was)} where this one has {_text(now)}. Build it from the "
                "same parameters in the same order."
            )
    raise UnsupportedConfig(
        f"The optimizer of the checkpoint has groups of {[len(group) for group in groups]} parameters, and this one of "
        f"{[len(group) for group in own]}. Build it from the same parameter groups."
    )


def _text(parameter: Any) -> str:
    return excerpt(" ".join(map(repr, parameter)) if isinstance(parameter, list) else repr(parameter))


def _check_state(path: Path, state: Any, optimizer: Any) -> None:
    """Raise for a state dict that is not of this optimizer's form."""
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    match state:
        case {"state": dict(values), "param_groups": list(groups)} if len(groups) == len(sizes):
            pass
        case _:
            raise damaged(path, "its state is no state dict of an optimizer with these parameter groups")
    indices: dict[Any, Tensor] = {}
    for group, own in zip(groups, optimizer.param_groups, strict=True):
        numbers = group.get("params") if isinstance(group, dict) else None
        if not isinstance(numbers, list) or len(numbers) != len(own["params"]):
            raise damaged(path, f"a parameter group is {excerpt(repr(group))}")
        if not all(type(number) is int for number in numbers):
            raise damaged(path, f"a parameter group has the numbers {excerpt(repr(numbers))}")
        indices |= dict(zip(numbers, own["params"], strict=True))
    if len(indices) != sum(sizes):
        raise damaged(path, "two parameters of its groups have one number")
    for number, value in values.items():
        if number not in indices or not isinstance(value, dict):
            raise damaged(path, f"it has a state of parameter {excerpt(repr(number))}, and there are {len(indices)}")
        _check_tensors(path, value, indices[number], optimizer)


def _check_tensors(path: Path, value: dict[str, Any], parameter: Tensor, optimizer: Any) -> None:
    """Raise if an optimizer of torch's own would have other tensors for a parameter."""
    cls = type(optimizer)
    if not cls.__module__.startswith("torch.optim.") or cls.__name__ in OTHER_SHAPES:
        return
    for name, tensor in value.items():
        if not isinstance(tensor, Tensor) or tensor.dim() == 0:
            continue
        if tensor.shape != parameter.shape or tensor.dtype != parameter.dtype:
            raise damaged(
                path,
                f"{excerpt(repr(name))} of a parameter {parameter.dtype} {tuple(parameter.shape)} is {tensor.dtype} "
                f"{tuple(tensor.shape)}",
            )
