"""`octavo.load_fp8`: train from a published checkpoint of codes."""

import copy
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo._torch.modules import unsaved_buffers
from octavo.checkpoints.published.layouts import Layout
from octavo.checkpoints.published.loading_plan import Fill, Plan, layer_of, plan
from octavo.checkpoints.published.published_names import Piece
from octavo.checkpoints.published.shards import folder_of
from octavo.checkpoints.published.tensor_parts import expected, in_memory
from octavo.checkpoints.tensor_file import Entry, read_entry
from octavo.errors import InvalidCheckpoint, UnsupportedConfig, UnsupportedDevice, check_choice
from octavo.model.convert import convert
from octavo.model.layer_lookup import check_model
from octavo.ops.quantized import Quantized
from octavo.quant.proto import TensorProto
from octavo.text import plural
from octavo.weights.loaded_codes import empty_codes, fill_rows, note_rows
from octavo.weights.quantized_weight import QuantizedWeight


@dataclass(frozen=True)
class LoadReport:
    """The report of `octavo.load_fp8`. Print it.

    Args:
        layout: the layouts of the folder.
        codes: the recipe of each weight that is codes, by the weight's name in the model.
        dequantized: the weights whose codes became values.
        values: the tensors that are values in the folder.
        skipped: the tensors of the folder that the model did not get, and why.
    """

    layout: str
    codes: dict[str, str] = field(default_factory=dict)
    dequantized: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    skipped: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        by_recipe = Counter(self.codes.values())
        lines = [f"{self.layout}: " + ", ".join(f"{plural(n, 'weight')} as codes of {k}" for k, n in by_recipe.items())]
        lines[0] += f"{', ' if by_recipe else ''}{plural(len(self.values), 'tensor')} of values."
        if self.dequantized:
            lines.append(f"Dequantized: {', '.join(self.dequantized)}.")
        why: dict[str, list[str]] = {}
        for name, reason in self.skipped.items():
            why.setdefault(reason, []).append(name)
        lines += [
            f"Skipped {plural(len(names), 'tensor')}, such as {names[0]}: {reason}." for reason, names in why.items()
        ]
        return "\n".join(lines)


def load_fp8(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    device: torch.device | str | None = None,
    layout: str | None = None,
    trainable: bool = True,
    dequantize: str | Iterable[str] = (),
    ignore: str | Iterable[str] = (),
) -> LoadReport:
    """Load a published checkpoint of codes, such as FP8, into a model whose weights stay codes.

    Each linear layer whose weight is codes in the folder becomes an Octavo layer in the recipe of these codes, with a
    weight that is the codes and scales of the file, to the bit. Everything else gets its values. Tensors go to the
    device one at a time. All is checked before anything is loaded: if the call raises, the model is unchanged, unless
    the files change meanwhile.

    Args:
        model: the model, on the meta device or with memory. It is changed in place.
        folder: the folder with config.json and the safetensors files.
        device: where parameters go that are on the meta device.
        layout: the layout of the codes, one of `octavo.checkpoints.published.layouts.LAYOUTS`; None takes it from
            config.json.
        trainable: let optimizers update the weights, as in `octavo.quantize_weights`. Gradients are computed for
            weights that require them either way.
        dequantize: names or globs of weights that become values of the model's dtype instead.
        ignore: names or globs of tensors of the folder that the model does not have.

    Returns:
        What was loaded: print it.

    Raises:
        InvalidCheckpoint: a file is damaged, or the folder does not fit the model or its own config.json.
        UnsupportedConfig: the folder's layout is unknown, or a layer cannot hold codes.
        UnsupportedDevice: the model is on the meta device, and no device is given.

    Example:
        >>> import tempfile
        >>> made = nn.Sequential(octavo.Linear(256, 128, recipe="fp8-block(scale='fp32')"))
        >>> path = tempfile.mkdtemp() + "/published"
        >>> octavo.save_fp8(made, path, layout="fp8-block")
        >>> with torch.device("meta"):
        ...     model = nn.Sequential(nn.Linear(256, 128))
        >>> print(octavo.load_fp8(model, path, device="cpu"))
        fp8-block: 1 weight as codes of fp8-block(scale='fp32'), 1 tensor of values.
        >>> type(model[0].weight).__name__
        'QuantizedWeight'
    """
    check_model(model, "load_fp8", folder)
    check_choice(trainable, (True, False), what="trainable")
    made = plan(model, folder_of(folder, "load_fp8"), layout, _names(dequantize), _names(ignore))
    target = None if device is None else torch.device(device)
    _check_device(made, target)
    buffers = _missing_buffers(model, target)
    _convert(model, made)
    source = Source(made.entries, torch.empty(_largest(made), dtype=torch.uint8, device="cpu"))
    with torch.inference_mode(False), torch.no_grad():  # inference tensors could not train
        for fill in made.fills:
            (_load_codes if fill.as_codes else _load_values)(fill, source, target, trainable)
        for module, key, tensor in buffers:
            module._buffers[key] = tensor
    return _report(made)


def _names(given: str | Iterable[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


def _report(made: Plan) -> LoadReport:
    codes = {fill.model_tensor.name: layer_of(fill.model_tensor).recipe.key for fill in made.fills if fill.as_codes}
    decoded = tuple(fill.model_tensor.name for fill in made.fills if fill.layout is not None and not fill.as_codes)
    values = tuple(fill.model_tensor.name for fill in made.fills if fill.layout is None)
    return LoadReport(made.choice.names, codes, decoded, values, made.skipped)


def _check_device(made: Plan, device: torch.device | None) -> None:
    on_meta = next((fill.model_tensor for fill in made.fills if fill.model_tensor.tensor.is_meta), None)
    if on_meta is not None and (device is None or device.type == "meta"):
        raise UnsupportedDevice(
            f"{on_meta.name} is on the meta device, and load_fp8 got device={device}. Pass the device that it goes to."
        )


def _missing_buffers(model: nn.Module, device: torch.device | None) -> list[tuple[nn.Module, str, Tensor]]:
    """Return buffers for those that are on the meta device and in no file, such as the frequencies of rotary
    embeddings, as transformers' own initialisation makes them. Raise if it does not."""
    found: list[tuple[nn.Module, str, Tensor]] = []
    for path, module in model.named_modules():
        keys = [k for k in unsaved_buffers(module) if getattr(module._buffers.get(k), "is_meta", False)]
        if not keys:
            continue
        trial = copy.copy(module)
        trial._buffers = dict(module._buffers)
        for key in keys:
            empty = torch.empty_like(module._buffers[key], device=device)  # type: ignore[arg-type]
            trial._buffers[key] = empty.fill_(float("nan")) if empty.is_floating_point() else empty
        initialise: Any = getattr(model, "_init_weights", None)
        if initialise is not None and not any(True for _ in module.parameters()):
            initialise(trial)
        made = [(key, trial._buffers[key]) for key in keys]
        bad = [key for key, t in made if t is None or not t.is_floating_point() or bool(t.isnan().any())]
        if bad:
            raise UnsupportedDevice(
                f"The buffer {path}.{bad[0]} is on the meta device, and no checkpoint has it. Build the model with "
                "buffers in memory: accelerate.init_empty_weights(include_buffers=False)."
            )
        found += [(module, key, tensor.to(device)) for key, tensor in made if tensor is not None]
    return found


def _convert(model: nn.Module, made: Plan) -> None:
    """Give each layer that will hold codes the recipe of these codes."""
    wanted: dict[int, str] = {}
    for fill in made.fills:
        layer = layer_of(fill.model_tensor)
        if fill.as_codes and (layer is None or layer.recipe is None):
            assert fill.layout is not None
            before = wanted.setdefault(id(fill.model_tensor.owner), fill.layout.recipe)
            if before != fill.layout.recipe:
                raise InvalidCheckpoint(
                    f"{fill.model_tensor.name} is codes of {fill.layout.recipe}, and other weights of that layer are "
                    f"codes of {before}. Pass dequantize= with one of the names."
                )
    if wanted:
        convert(model, "bf16", lambda path, module: wanted.get(id(module), False))
    for fill in made.fills:
        if fill.as_codes and layer_of(fill.model_tensor) is None:
            raise UnsupportedConfig(
                f"{fill.model_tensor.name} is codes in the file, and octavo.convert makes no layer of its "
                f"{type(fill.model_tensor.owner).__name__}. Pass dequantize= with its name."
            )
        if fill.as_codes and isinstance(fill.model_tensor.owner, Quantized):
            fill.model_tensor.owner._check_may_be_codes()


class Source(NamedTuple):
    """The tensors of a folder, and memory for any one of them."""

    entries: dict[str, Entry]
    buffer: Tensor | None = None


def _largest(made: Plan) -> int:
    """Return the bytes of the largest tensor that is loaded."""
    suffixes = [(fill, fill.layout.codes if fill.layout is not None else "") for fill in made.fills]
    found = [made.entries[piece.name + suffix] for fill, suffix in suffixes for piece in fill.pieces]
    return max((entry.end - entry.start for entry in found), default=0)


# -- loading -----------------------------------------------------------------------------------------------------------


def _load_codes(fill: Fill, source: Source, device: torch.device | None, trainable: bool) -> None:
    layout, tensor = fill.layout, fill.model_tensor.tensor
    layer = layer_of(fill.model_tensor)
    assert layout is not None
    whole = layer._whole_weight()
    if not isinstance(whole, QuantizedWeight):
        place = device if tensor.is_meta and device is not None else tensor.device
        shape = tuple(whole.shape)
        layer._set_weights(empty_codes(layer.NAME, layer.recipe, shape, tensor.dtype, place, trainable))
        layer._unplaced = True
        whole = layer._whole_weight()
    names = layer._names_of_weights()
    alone = names.index(fill.model_tensor.key) if len(names) > 1 else None
    for piece in fill.pieces:
        parts = _read(source, piece, layout, fill.shape_of(piece))
        experts = [(piece.expert if alone is None else alone, parts)]
        if piece.expert is None and len(fill.shape) == 3:
            experts = [(i, [part[i] for part in parts]) for i in range(fill.shape[0])]
        for expert, rows in experts:
            fill_rows(whole, rows, expert, piece.start)
    note_rows(whole)


def _read(source: Source, piece: Piece, layout: Layout, shape: Sequence[int]) -> list[Tensor]:
    codes, *rest = [source.entries[piece.name + each.suffix] for each in expected(layout, shape)]
    return in_memory(layout, [read_entry(codes, source.buffer), *map(read_entry, rest)], shape)


def _load_values(fill: Fill, source: Source, device: torch.device | None, trainable: bool) -> None:
    model_tensor, tensor = fill.model_tensor, fill.model_tensor.tensor
    place = device if tensor.is_meta and device is not None else tensor.device
    direct = not tensor.is_meta and type(tensor) in (Tensor, nn.Parameter)
    target = tensor.data if direct else torch.empty(tensor.shape, dtype=tensor.dtype, device=place)
    for piece in fill.pieces:
        part = piece.of(target)
        part.copy_(values_of(fill, piece, source, part.dtype, place))
    if tensor.is_meta:
        is_parameter = isinstance(tensor, nn.Parameter)
        new = nn.Parameter(target, tensor.requires_grad) if is_parameter else target
        new.__dict__.update(tensor.__dict__)
        for module, key in ((model_tensor.owner, model_tensor.key), *model_tensor.others):
            table: dict[str, Any] = module._parameters if is_parameter else module._buffers
            table[key] = new
    elif not direct:
        tensor.copy_(target)
    else:
        torch.autograd.graph.increment_version(tensor)


def values_of(fill: Fill, piece: Piece, source: Source, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the values of a piece, as the parameter has them."""
    if fill.layout is None:
        return read_entry(source.entries[piece.name], source.buffer).to(device)
    shape = fill.shape_of(piece)
    parts = [part.to(device) for part in _read(source, piece, fill.layout, shape)]
    values = decoded(fill.layout, parts, shape, dtype)
    return values.transpose(-1, -2) if fill.transposed else values


def decoded(layout: Layout, parts: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the values [..., N, K] that codes stand for."""
    if len(shape) == 3:
        return torch.stack([decoded(layout, [p[i] for p in parts], shape[1:], dtype) for i in range(shape[0])])
    made = layout.quantizer.proto(TensorProto(tuple(shape), dtype, parts[0].device)).empty()
    for mine, given in zip(made.tensors(), parts, strict=True):
        mine.view(given.dtype).copy_(given)
    return made.dequantize(dtype)
