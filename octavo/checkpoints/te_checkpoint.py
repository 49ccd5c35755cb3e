"""`load_te_checkpoint`: weights and delayed scales of a model that was written for Transformer Engine.

Parameters go by their names there: `layer_norm_weight`, `fc1_weight`, `weight0`, `basic_ops.0.weight`. Scales are in
`_extra_state`, a pickle in a tensor of bytes, which `octavo.checkpoints.inert_pickle` reads.
"""

import io
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo.checkpoints import tensor_file
from octavo.checkpoints.inert_pickle import UnpicklingError, read
from octavo.errors import UnsupportedConfig, UnsupportedDtype
from octavo.fusion.blocks import LayerNormLinear, LayerNormMLP
from octavo.model.layer_lookup import check_model, joined
from octavo.model.state_dicts import checked_loads, write_state
from octavo.ops.grouped_linear import GroupedLinear
from octavo.ops.linear import Linear
from octavo.ops.quantized import Quantized
from octavo.text import some

STATE = "_extra_state"
_OPERATION = "forward"  # the key that the state of an operation of te.ops has, and that of a module has not
_NORM = {"layer_norm_weight": "norm.weight", "layer_norm_bias": "norm.bias"}
# names of parameters there and here, by the class of the module
NAMES: dict[type[nn.Module], dict[str, str]] = {
    LayerNormLinear: {**_NORM, "weight": "linear.weight", "bias": "linear.bias"},
    LayerNormMLP: {**_NORM, **{f"fc{i}_{name}": f"fc{i}.{name}" for i in (1, 2) for name in ("weight", "bias")}},
    Linear: {"basic_ops.0.weight": "weight", "basic_ops.1.bias": "bias"},
}
_SPLIT = re.compile(r"(?P<path>.*\.)?(?P<part>\w+)_weight")


class LoadedTE(NamedTuple):
    """The report of `octavo.load_te_checkpoint`.

    Attributes:
        parameters: how many tensors of the checkpoint were loaded.
        scales: the paths of layers whose delayed scales were loaded. A layer that follows `octavo.autocast` keeps them
            until its first call in fp8-delayed.
        measured_anew: the paths of layers in fp8-delayed without scales in the checkpoint. Their first step measures
            them.
        ignored: names of states that no layer in fp8-delayed takes; of a state that some layers of a block take, the
            paths of the others follow: "mlp._extra_state: mlp.fc1".
    """

    parameters: int
    scales: tuple[str, ...]
    measured_anew: tuple[str, ...]
    ignored: tuple[str, ...]


def load_te_checkpoint(model: nn.Module, checkpoint: Mapping[str, Any] | str | Path, strict: bool = True) -> LoadedTE:
    """Load the weights and the delayed scales that a model of Transformer Engine has saved.

    The model has the same paths, with Octavo's layers in place of Transformer Engine's. Names of parameters are mapped:
    `layer_norm_weight` to `norm.weight`, `fc1_weight` to `fc1.weight`, `weight0`, `weight1`, … to the weights of a
    GroupedLinear in either layout. Layers in fp8-delayed take their scales and windows of amaxes from `_extra_state`.
    Those are pickles, and are read without executing anything that they name.

    Args:
        model: a model with Octavo's layers.
        checkpoint: a state dict, or the path of a file: safetensors, or of torch.save, which is read with
            weights_only=True.
        strict: raise unless the checkpoint has exactly the parameters that the model needs. With False others are
            ignored, and missing ones stay as they are.

    Returns:
        What was loaded, and which layers measure their scales anew.

    Raises:
        UnsupportedConfig: the checkpoint holds other objects than tensors, or parameters that are parts of one; all
            its names have a prefix that the model's have not; or an `_extra_state` cannot be read or fits no layer.
        UnsupportedDtype: `model` is no module, or `checkpoint` is no mapping or path.
        RuntimeError: with `strict`, the names differ; or a shape does, as `load_state_dict` says.

    Example:
        >>> model = nn.Sequential(octavo.LayerNormLinear(16, 8, normalization="RMSNorm", recipe="fp8-delayed"))
        >>> saved = {"layer_norm_weight": torch.ones(16), "weight": torch.ones(8, 16), "bias": torch.zeros(8)}
        >>> octavo.load_te_checkpoint(model, {f"0.{name}": t for name, t in saved.items()})
        LoadedTE(parameters=3, scales=(), measured_anew=('0.linear',), ignored=())
    """
    check_model(model, "load_te_checkpoint", checkpoint)
    saved = _tensors_of(checkpoint)
    names = _names(model)
    _check_prefix({*model.state_dict(), *names}, list(saved))
    parameters = {names.get(name, name): t for name, t in saved.items() if not name.endswith(STATE)}
    _check_parts(model, parameters)
    states, taken, ignored = _scales(model, {n: t for n, t in saved.items() if n.endswith(STATE)})
    loads = checked_loads(model, states, strict=False)
    unknown = model.load_state_dict(parameters, strict=strict).unexpected_keys
    write_state(loads)
    anew = tuple(path for path, layer in _delayed(model) if layer._recipe is not None and path not in taken)
    return LoadedTE(len(parameters) - len(unknown), tuple(taken), anew, ignored)


def _tensors_of(checkpoint: Any) -> dict[str, Any]:
    """Return the tensors of a checkpoint by name, and states as they are."""
    if isinstance(checkpoint, str | Path):
        path = Path(checkpoint)
        if path.suffix == ".safetensors":
            return dict(tensor_file.read(path).tensors)
        try:
            with torch.serialization.safe_globals([io.BytesIO]):  # a state, as versions before 2 wrote it
                checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        except UnpicklingError as error:
            raise UnsupportedConfig(
                f"{path} holds objects other than tensors, such as weights that are codes (quantized_model_init) or a "
                "recipe, and nothing of it is executed here. Save it once more where Transformer Engine is installed: "
                "torch.save({name: t.dequantize() if hasattr(t, 'dequantize') else t for name, t in "
                "model.state_dict().items()}, path)."
            ) from error
    if not isinstance(checkpoint, Mapping):
        raise UnsupportedDtype(
            f"octavo.load_te_checkpoint takes a state dict or the path of a file, got {type(checkpoint).__name__}."
        )
    nested = [name for name, value in checkpoint.items() if isinstance(value, Mapping)]
    if nested:
        raise UnsupportedConfig(
            f"The checkpoint has dicts inside ({some(nested, 3)}). Pass the model's state dict: checkpoint['model']."
        )
    return dict(checkpoint)


def _names(model: nn.Module) -> dict[str, str]:
    """Return the names of parameters in Transformer Engine, with those of the model."""
    return {
        joined(path, theirs): joined(path, ours)
        for path, module in model.named_modules()
        for kind, own in NAMES.items()
        if isinstance(module, kind)
        for theirs, ours in own.items()
    }


def _check_prefix(known: set[str], names: list[str]) -> None:
    """Refuse a checkpoint whose names all have a prefix, such as "module.", before `known` ones."""
    if not names or not known.isdisjoint(names):
        return
    for prefix in (names[0][: dot.end()] for dot in re.finditer(r"\.", names[0])):
        if all(n.startswith(prefix) for n in names) and not known.isdisjoint(n.removeprefix(prefix) for n in names):
            raise UnsupportedConfig(
                f"The checkpoint has {prefix!r} before each name of the model. Pass {{name.removeprefix({prefix!r}): "
                "t for name, t in state.items()}."
            )


def _check_parts(model: nn.Module, parameters: Mapping[str, Any]) -> None:
    """Refuse weights in parts (parameters_split), whose order names do not tell."""
    missing = {name for name, _ in model.named_parameters()} - parameters.keys()
    for path in sorted(name.removesuffix("weight") for name in missing if name.endswith("weight")):
        outer = path.removesuffix("linear.")
        parts = [n for n in parameters if (m := _SPLIT.fullmatch(n)) and (m["path"] or "") in (path, outer)]
        if parts:
            raise UnsupportedConfig(
                f"The checkpoint has {some(parts, 3)} in the place of {path}weight: parts of one weight "
                f"(parameters_split). Join them in the order of the split: state[{outer + 'weight'!r}] = "
                "torch.cat([state.pop(name) for name in names]), and the biases likewise."
            )


# -- scales ------------------------------------------------------------------------------------------------------------


class _Slots(NamedTuple):
    """The places of a layer's scales in a module's state: of x and w among forward's, of dy among backward's."""

    path: str  # of the layer
    layer: Quantized
    x: list[int]
    w: list[int]
    dy: list[int]


def _slots(path: str, module: nn.Module, is_operation: bool) -> list[_Slots]:
    """Return the layers of a module that its state has scales of. A GEMM of a module has three in forward, of x, w and
    y, and two in backward, of dy and dx; one of an operation those of x and w, and of dy."""
    forward, backward = (2, 1) if is_operation else (3, 2)
    found, at = [], 0
    layers: list[tuple[str, Any]] = [(path, module)]
    if isinstance(module, LayerNormLinear | LayerNormMLP):
        layers = [(joined(path, name), child) for name, child in module.named_children()]
    for own, layer in layers:
        if not isinstance(layer, Linear | GroupedLinear):
            continue
        gemms = range(at, at + layer.scales_per_operand)
        x, w, dy = [forward * i for i in gemms], [forward * i + 1 for i in gemms], [backward * i for i in gemms]
        found.append(_Slots(own, layer, x, w, dy))
        at += layer.scales_per_operand
    return found


def _delayed(model: nn.Module) -> Iterator[tuple[str, Quantized]]:
    """Yield the layers that take scales: those in fp8-delayed, and those that may follow an autocast to it."""
    for path, module in model.named_modules():
        if isinstance(module, Quantized) and (module._recipe is None or module._recipe.stateful):
            yield path, module


def _scales(model: nn.Module, states: Mapping[str, Any]) -> tuple[dict[str, Tensor], list[str], tuple[str, ...]]:
    """Return the state of delayed scaling, the paths of the layers that it is of, and the names of other states."""
    modules, delayed = dict(model.named_modules()), {path for path, _ in _delayed(model)}
    found: dict[str, Tensor] = {}
    taken: list[str] = []
    ignored: list[str] = []
    for name, content in states.items():
        state = _read_state(name, content)
        if state is None:
            continue
        path = name.removesuffix(STATE).removesuffix(".")
        is_operation = _OPERATION in state
        if is_operation and path not in modules:
            path = path.removesuffix("basic_ops.0").removesuffix(".")
        module = modules.get(path)
        every = [] if module is None else _slots(path, module, is_operation)
        slots = [own for own in every if own.path in delayed]
        for own in slots:
            for direction, places in (("forward", own.x + own.w), ("backward", own.dy)):
                kept = _window(name, state, direction, places, own.layer._recipe)
                found |= {joined(own.path, f"scaling.{direction}.{key}"): t for key, t in kept.items()}
                if own.path not in taken and kept["head"].any():
                    taken.append(own.path)
        left = [own.path for own in every if own.path not in delayed]
        if left and slots:
            ignored.append(f"{name}: {', '.join(left)}")
        elif not slots:
            ignored.append(name)
    return found, taken, tuple(ignored)


def _read_state(name: str, content: Any) -> Any:
    """Return a module's state of delayed scaling; None if it has none."""
    if isinstance(content, io.BytesIO):
        content = io.BytesIO.getvalue(content)  # a file may have set an attribute of that name
    elif isinstance(content, Tensor):
        content = content.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    if content is None or content == b"":
        return None
    try:
        state = read(content) if isinstance(content, bytes) else content
    except ValueError as error:
        raise UnsupportedConfig(
            f"{name} is no state of Transformer Engine: {error}. Drop it, and the first step measures the scales."
        ) from error
    if isinstance(state, Mapping) and isinstance(state.get(_OPERATION), Mapping):
        backward = state.get("backward")
        state = {**state, **state[_OPERATION], **(backward if isinstance(backward, Mapping) else {})}
    return state if isinstance(state, Mapping) and isinstance(state.get("scale_fwd"), Tensor) else None


def _window(name: str, state: Mapping[str, Any], direction: str, places: list[int], recipe: Any) -> dict[str, Tensor]:
    """Return a direction's part of a layer's state. Row 0 of upstream's history is that of the running step; the last
    row is the newest of those before."""
    suffix = "fwd" if direction == "forward" else "bwd"
    scale, history = state.get(f"scale_{suffix}"), state.get(f"amax_history_{suffix}")
    known = isinstance(scale, Tensor) and isinstance(history, Tensor) and history.dim() == 2 and len(history) > 0
    if not known or history.shape[1] != scale.numel() or max(places) >= scale.numel():  # type: ignore[union-attr]
        raise UnsupportedConfig(
            f"{name} has no scales for {max(places) + 1} tensors of {direction}. Drop it, and the first step measures "
            "the scales."
        )
    assert isinstance(scale, Tensor) and isinstance(history, Tensor)
    count, device = len(places), torch.device("cpu")
    length = max(1, len(history) - 1) if recipe is None else recipe.history
    window = torch.zeros(count, length, dtype=torch.float32, device=device)
    head = torch.zeros(count, dtype=torch.int64, device=device)
    for row, place in enumerate(places):
        amaxes = history[1:, place].float()
        amaxes = amaxes[(amaxes > 0) & amaxes.isfinite()][-length:]  # a step without the tensor left a zero
        window[row, : len(amaxes)] = amaxes
        head[row] = len(amaxes)
    running = history[0].float()[places].cpu()
    return {
        "history": window,
        "head": head,
        "encode": scale.float()[places].cpu().where(head > 0, 1.0),  # one that no step has seen is measured
        "current": running.where(running.isfinite(), 0.0),
        "nonfinite": torch.zeros(count, dtype=torch.int64, device=device),
    }
