"""What of a published folder goes where in a model: everything that can be wrong is found here, from headers, scales
and the model, before a weight is loaded or a layer converted."""

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo._torch.modules import plain_name, unsaved_buffers
from octavo._torch.tensors import is_sharded
from octavo.checkpoints.published.layout_choice import CONFIG, Choice, choose
from octavo.checkpoints.published.layouts import FLOATS, LAYOUTS, Layout
from octavo.checkpoints.published.published_names import Piece, pieces_in
from octavo.checkpoints.published.shards import read_entries
from octavo.checkpoints.published.tensor_parts import Expected, check_scales, expected, unsupported_columns
from octavo.checkpoints.tensor_file import Entry, read_entry
from octavo.errors import InvalidCheckpoint, UnsupportedConfig
from octavo.model.layer_lookup import joined
from octavo.model.third_party import third_party_experts
from octavo.ops.quantized import Quantized
from octavo.text import plural
from octavo.values import excerpt

SHARDED = "Load before fully_shard and tensor parallelism"
CODES = ("F8_E4M3", "F8_E5M2", "F8_E8M0", "U8", "I8")
KV_SCALE = re.compile(
    r"(.*\.)?((kv|k|v|q|prob)_scale|[kvq]_zero_point|(k|v|kv)_(proj|cache)\.(k_|v_|output_)scale)", re.DOTALL
)


class ModelTensor(NamedTuple):
    """A parameter or buffer of a model, and all places that have it."""

    name: str
    owner: nn.Module
    key: str
    tensor: Tensor
    others: tuple[tuple[nn.Module, str], ...] = ()  # where it is tied to
    other_names: tuple[str, ...] = ()


class Fill(NamedTuple):
    """The place of a parameter's content in a folder."""

    model_tensor: ModelTensor
    pieces: list[Piece]
    layout: Layout | None  # None: values
    as_codes: bool
    transposed: bool = False  # the file has [..., N, K] where the model has [..., K, N]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the parameter as the file has it."""
        shape = tuple(self.model_tensor.tensor.shape)
        return (*shape[:-2], shape[-1], shape[-2]) if self.transposed else shape

    def shape_of(self, piece: Piece) -> tuple[int, ...]:
        return self.shape if piece.expert is None else (piece.rows, self.shape[-1])


class Plan(NamedTuple):
    """A checked plan."""

    entries: dict[str, Entry]
    choice: Choice
    fills: list[Fill]
    skipped: dict[str, str]  # tensors of the folder that the model does not get, and why


def plan(model: nn.Module, folder: Path, layout: str | None, dequantize: Sequence[str], ignore: Sequence[str]) -> Plan:
    """Match a model with a folder. Raise for anything that is missing, unknown, or does not fit."""
    made = _Planner(folder, layout, tuple(dequantize))
    found = made.fills(model)
    skipped = made.rest(model, ignore)
    if made.missing:
        raise InvalidCheckpoint(
            f"{folder} lacks {plural(len(made.missing), 'tensor')} of the model, such as "
            f"{', '.join(made.missing[:3])}. Load the checkpoint of this model; its names are those of "
            "model.state_dict()."
        )
    _check_ties(found)
    _check_all_scales(made.entries, found)
    return Plan(made.entries, made.choice, found, skipped)


def matched(model: nn.Module, folder: Path) -> Plan:
    """Match a model with the folder that it came from, whether its weights are codes or values."""
    made = _Planner(folder, None, ("*",))
    fills = made.fills(model)
    if made.missing:
        raise InvalidCheckpoint(
            f"{folder} lacks {made.missing[0]} of the model, so the model did not come from there. Pass layout=."
        )
    return Plan(made.entries, made.choice, fills, {})


def model_tensors(model: nn.Module) -> list[ModelTensor]:
    """Return the parameters and persistent buffers of a model, each once, with all places that have it."""
    places: dict[int, list[tuple[str, nn.Module, str, Tensor]]] = {}
    for path, module in model.named_modules():
        kept = {k: b for k, b in module._buffers.items() if k not in unsaved_buffers(module)}
        for key, tensor in (*module._parameters.items(), *kept.items()):
            if tensor is not None:
                name = plain_name(joined(path, key))
                places.setdefault(id(tensor), []).append((name, module, key, tensor))
    return [
        ModelTensor(*first, tuple((module, key) for _, module, key, _ in rest), tuple(name for name, *_ in rest))
        for first, *rest in places.values()
    ]


class _Planner:
    """Collect what was found, and what is missing."""

    def __init__(self, folder: Path, layout: str | None, dequantize: tuple[str, ...]) -> None:
        self.folder, self.dequantize = folder, dequantize
        self.entries, self.choice = read_entries(folder), choose(folder, layout)
        self.used: set[str] = set()
        self.missing: list[str] = []
        self.skipped: dict[str, str] = {}
        self.names = tuple(dict.fromkeys(("", *[row.codes for row, _ in self.choice.groups])))

    def fills(self, model: nn.Module) -> list[Fill]:
        return [fill for model_tensor in model_tensors(model) if (fill := self.fill(model_tensor)) is not None]

    def fill(self, model_tensor: ModelTensor) -> Fill | None:
        names = [model_tensor.name, *model_tensor.other_names]
        shape = tuple(model_tensor.tensor.shape)
        stacked = shape if third_party_experts.is_weight(model_tensor.owner, model_tensor.key) else shape[-2:]
        pieces = next((p for name in names if (p := pieces_in(name, stacked, self.names, self.entries))), [])
        if not pieces:
            self.missing.append(model_tensor.name)
            return None
        if is_sharded(model_tensor.tensor):
            raise self._unfit(
                model_tensor.name, "the model's tensor is a DTensor, of which this rank has a part", SHARDED
            )
        found = {self._layout_of(piece, model_tensor) for piece in pieces}
        if len(found) > 1:
            kinds = ", ".join(sorted("values" if row is None else row.name for row in found))
            raise self._unfit(model_tensor.name, f"its parts are mixed: {kinds}", "Rewrite it in one layout")
        layout = found.pop()
        turned = layout is not None and layout.unpacks and bool(getattr(model_tensor.owner, "is_transposed", False))
        as_codes = layout is not None and not turned and not self._is_to_dequantize(model_tensor)
        fill = Fill(model_tensor, pieces, layout, as_codes, turned)
        for piece in pieces:
            self._check(fill, piece)
        if fill.as_codes:
            self._check_holder(fill)
        self._skip_ties(model_tensor, pieces)
        return fill

    def _skip_ties(self, model_tensor: ModelTensor, pieces: list[Piece]) -> None:
        """Skip a tensor that a file has twice and the model once, if the two are equal."""
        for name in (model_tensor.name, *model_tensor.other_names):
            entry, first = self.entries.get(name), self.entries.get(pieces[0].name)
            if entry is None or first is None or name == pieces[0].name or entry.shape != first.shape:
                continue
            if not torch.equal(read_entry(entry), read_entry(first)):
                raise self._unfit(name, f"the model ties it to {pieces[0].name}, and they differ", "Untie them first")
            self.used.add(name)
            self.skipped[name] = "the model has it in one with another"

    def _is_to_dequantize(self, model_tensor: ModelTensor) -> bool:
        module = model_tensor.name.removesuffix(".weight")
        return any(fnmatchcase(model_tensor.name, p) or fnmatchcase(module, p) for p in self.dequantize)

    def _layout_of(self, piece: Piece, model_tensor: ModelTensor) -> Layout | None:
        """Return the layout of a weight's codes; None for values."""
        named = self.choice.of(piece.module)
        entry = self.entries.get(piece.name)
        scales = [row.scale for row in LAYOUTS.values() if piece.name + row.scale in self.entries]
        if entry is not None and entry.dtype not in CODES:
            if scales:
                raise self._unfit(piece.name, f"it is {entry.dtype}, and has {piece.name}{scales[0]}", "It is no codes")
            return None
        if entry is not None and not model_tensor.tensor.is_floating_point():
            return None
        if named is None:
            where = f"its codes are {entry.dtype}" if entry is not None else "it has codes"
            raise self._unfit(piece.name, f"{where}, and {CONFIG} leaves it out", f"Correct {CONFIG}, or name layout=")
        return named

    def _check(self, fill: Fill, piece: Piece) -> None:
        """Raise unless the folder has a piece in the dtype and shape that the model and the layout need."""
        layout, shape = fill.layout, fill.shape_of(piece)
        if layout is None:
            is_float = fill.model_tensor.tensor.is_floating_point()
            dtypes = (*FLOATS, "F64") if is_float else (self.entries[piece.name].dtype,)
            self._check_one(piece, "values", Expected("", dtypes, (shape,)))
            return
        if why := unsupported_columns(layout, shape[-1]):
            raise self._unfit(piece.name, why, "Pass dequantize= with its name", layout)
        for each in expected(layout, shape):
            self._check_one(piece, layout.name, each)
        scale = f"{piece.module}.{layout.activation_scale}"
        if scale in self.entries:
            self.used.add(scale)
            self.skipped[scale] = "a static scale of activations: Octavo scales x by its own amax"
        rows = layout.quantizer.block[0]
        if fill.as_codes and piece.expert is not None and piece.start % (rows or fill.shape[-2]):
            raise self._unfit(
                piece.name, f"row {piece.start} of its expert begins in a block of {rows or 'all'} rows",
                "Pass dequantize= with the parameter's name", layout,
            )  # fmt: skip

    def _check_one(self, piece: Piece, layout: str, each: Expected) -> None:
        name = piece.name + each.suffix
        entry = self.entries.get(name)
        if entry is None:
            raise InvalidCheckpoint(
                f"{self.folder} has codes of {excerpt(piece.name)} without {excerpt(name)}, which "
                f"{layout} has. Without it they are no values. Get the files again, or name another layout=."
            )
        if entry.dtype not in each.dtypes or entry.shape not in each.shapes:
            raise InvalidCheckpoint(
                f"{excerpt(name)} of {self.folder} is {entry.dtype} {list(entry.shape)}, and {layout} of this model "
                f"has {' or '.join(each.dtypes)} {' or '.join(str(list(shape)) for shape in each.shapes)} there. Load "
                "the checkpoint of this model, or name another layout=."
            )
        self.used.add(name)

    def _check_holder(self, fill: Fill) -> None:
        """Raise unless a layer can hold the codes."""
        model_tensor, layout = fill.model_tensor, fill.layout
        assert layout is not None
        owner, why = model_tensor.owner, ""
        is_weight = isinstance(owner, nn.Linear) and model_tensor.key == "weight"
        is_weight = is_weight or (isinstance(owner, Quantized) and model_tensor.key in owner._names_of_weights())
        if not is_weight and not third_party_experts.is_weight(owner, model_tensor.key):
            why = f"it is the parameter {model_tensor.key} of a {type(owner).__name__}, which holds no codes"
        layer = layer_of(model_tensor)
        recipe = None if layer is None else layer.recipe
        if recipe is not None and recipe.linear().fprop.right != layout.quantizer:
            why = (
                f"its layer has the recipe {recipe}, whose weights are {recipe.linear().fprop.right}. Build the "
                f"layer without a recipe, or with {layout.recipe}"
            )
        if why:
            raise self._unfit(model_tensor.name, why, "Pass dequantize= with its name to load values", layout)

    def rest(self, model: nn.Module, ignore: Sequence[str]) -> dict[str, str]:
        """Return the tensors that nothing of the model takes, with the reason. Raise if there is none."""
        own = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
        unknown = []
        for name in self.entries:
            if name in self.used:
                continue
            if KV_SCALE.fullmatch(name):
                self.skipped[name] = "a scale of the key-value cache: servers use it, and training has no such cache"
            elif any(re.search(pattern, name) for pattern in own):
                self.skipped[name] = "the model's class ignores it"
            elif any(fnmatchcase(name, pattern) for pattern in ignore):
                self.skipped[name] = "the caller ignores it"
            else:
                unknown.append(name)
        if unknown:
            raise InvalidCheckpoint(
                f"{self.folder} has {plural(len(unknown), 'tensor')} that the model lacks, such as "
                f"{', '.join(map(excerpt, unknown[:3]))}"
                f"{f'; and the model has {self.missing[0]}, which the folder lacks' if self.missing else ''}. Load the "
                "checkpoint of this model, or pass ignore= with their names."
            )
        return self.skipped

    def _unfit(self, name: str, why: str, way_out: str, layout: Layout | None = None) -> InvalidCheckpoint:
        what = f" in the layout {layout.name}" if layout is not None else f" ({self.choice.names})"
        return InvalidCheckpoint(f"{excerpt(name)} of {self.folder}{what} cannot be loaded: {why}. {way_out}.")


def layer_of(model_tensor: ModelTensor) -> Any:
    """Return the Octavo layer that a parameter is of; None if there is none."""
    owner = model_tensor.owner
    return owner if isinstance(owner, Quantized) else third_party_experts.layer_of(owner, model_tensor.key)


def _check_ties(fills: list[Fill]) -> None:
    for fill in fills:
        if fill.as_codes and fill.model_tensor.others:
            raise UnsupportedConfig(
                f"{fill.model_tensor.name} is codes in the file, and the model has that parameter in "
                f"{1 + len(fill.model_tensor.others)} places. Untie them, or pass dequantize= with its name."
            )


def _check_all_scales(entries: dict[str, Entry], fills: list[Fill]) -> None:
    """Read all scales, which are small, and raise for nonsense."""
    for fill in fills:
        layout = fill.layout
        if layout is None:
            continue
        seconds: dict[int | None, tuple[str, Tensor]] = {}
        for piece in fill.pieces:
            check_scales(layout, piece.name + layout.scale, read_entry(entries[piece.name + layout.scale]))
            if not layout.level2:
                continue
            name = piece.name + layout.level2
            value = read_entry(entries[name])
            if not bool(value.isfinite().all()) or not bool((value > 0).all()):
                raise InvalidCheckpoint(f"{name} has a scale that is not finite and positive. Get the file again.")
            first, other = seconds.setdefault(piece.expert, (name, value))
            if fill.as_codes and not torch.equal(other.reshape(-1), value.reshape(-1)):
                raise InvalidCheckpoint(
                    f"{first} is {other.tolist()} and {name} is {value.tolist()}: one weight of the model has both. "
                    f"Pass dequantize={fill.model_tensor.name!r}, or publish them with one scale."
                )
