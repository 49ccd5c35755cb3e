"""`octavo.save_fp8` and `octavo.fp8_state_dict`: publish the codes that a model multiplies."""

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from octavo._torch.modules import plain_name
from octavo.checkpoints.published import shards
from octavo.checkpoints.published.layout_choice import config_of, entry_for
from octavo.checkpoints.published.layouts import FLOATS, LAYOUTS, Layout, warn_of_static_scales
from octavo.checkpoints.published.loading import Source, values_of
from octavo.checkpoints.published.loading_plan import Fill, ModelTensor, layer_of, matched, model_tensors
from octavo.checkpoints.published.published_names import Piece, ways
from octavo.checkpoints.published.shards import Planned
from octavo.checkpoints.published.tensor_parts import (
    expected,
    in_file,
    in_memory_part,
    refined,
    unsupported_columns,
    unsupported_refinement,
)
from octavo.checkpoints.tensor_file import NAMES, Entry, check_plain, read_entry
from octavo.errors import UnsupportedConfig, check_choice, warn_caller
from octavo.model.layer_lookup import check_model, joined, refuse_parts
from octavo.model.third_party import third_party_experts
from octavo.model.third_party.third_party_experts import is_weight
from octavo.quant.proto import TensorProto
from octavo.quant.quantizer import Quantizer
from octavo.text import plural
from octavo.weights.loaded_codes import rows_of
from octavo.weights.quantized_weight import QuantizedWeight

WAY_OUT = "save it with octavo.save_checkpoint, or rewrite a saved folder by `octavo convert-checkpoint`"


def save_fp8(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    layout: str | None = None,
    like: str | os.PathLike[str] | None = None,
    shard_bytes: int = shards.SHARD_BYTES,
) -> None:
    """Save a model as a published checkpoint of codes, which servers load.

    The codes and scales are those that the model's own forward multiplies: of weights that are codes, the codes; of
    other weights of layers with a recipe, what the recipe makes of them. Layers without a recipe are saved as values,
    and listed in config.json as not converted. The folder appears when it is complete.

    Args:
        model: the model. Its `config`, if it has one as transformers' models do, becomes config.json.
        folder: the folder to make.
        layout: the layout of the codes, one of `octavo.checkpoints.published.layouts.LAYOUTS`.
        like: the folder that the model was loaded from, in place of `layout`: the new one has its names, dtypes,
            config.json and other files. Tensors that training did not change are equal to the byte, and tensors that
            the model does not have, such as scales of a key-value cache, are copied.
        shard_bytes: the largest size of a file.

    Raises:
        UnsupportedConfig: the folder exists; neither or both of layout and like are given; the codes of a layer do not
            fit the layout.

    Example:
        >>> import os, tempfile
        >>> model = nn.Sequential(octavo.Linear(256, 128, recipe="fp8-block"))
        >>> path = tempfile.mkdtemp() + "/published"
        >>> octavo.save_fp8(model, path, layout="fp8-block")
        >>> sorted(os.listdir(path))
        ['config.json', 'model.safetensors']
    """
    target = shards.path_of(folder, "save_fp8")
    planned, config, source = _plan(model, layout, like, "save_fp8")
    shards.write_folder(target, planned, config, () if source is None else shards.other_files(source), shard_bytes)


def fp8_state_dict(
    model: nn.Module, *, layout: str | None = None, like: str | os.PathLike[str] | None = None
) -> dict[str, Tensor]:
    """Return the tensors that `octavo.save_fp8` would save, on the model's device.

    They are for `load_weights` of vLLM and SGLang: `list(octavo.fp8_state_dict(model, layout="fp8-block").items())`.
    Codes are views of the model's own memory where it has them, so take them over before the next step.

    Args:
        model: the model.
        layout: as in `octavo.save_fp8`.
        like: as in `octavo.save_fp8`.

    Returns:
        Codes, scales and values, by the names that published files have.

    Raises:
        UnsupportedConfig: as in `octavo.save_fp8`.

    Example:
        >>> model = nn.Sequential(octavo.Linear(256, 128, bias=False, recipe="fp8-block"))
        >>> {name: tuple(t.shape) for name, t in octavo.fp8_state_dict(model, layout="fp8-block").items()}
        {'0.weight': (128, 256), '0.weight_scale_inv': (1, 2)}
    """
    return {name: one.make() for name, one in _plan(model, layout, like, "fp8_state_dict")[0].items()}


def _plan(
    model: nn.Module, layout: str | None, like: Any, function: str
) -> tuple[dict[str, Planned], dict[str, Any], Path | None]:
    check_model(model, function)
    refuse_parts(model, function, "Gather the weights first.")
    if (layout is None) == (like is None):
        raise UnsupportedConfig(
            f"octavo.{function} takes layout=, one of {', '.join(LAYOUTS)}, or like=, the folder that the model came "
            f"from; got layout={layout!r} and like={like!r}. Pass one of them."
        )
    if layout is not None:
        check_choice(layout, tuple(LAYOUTS), what="layout")
        return *_by_layout(model, LAYOUTS[layout]), None
    source = shards.folder_of(like, function)
    return _like(model, source), config_of(source), source


def _by_layout(model: nn.Module, layout: Layout) -> tuple[dict[str, Planned], dict[str, Any]]:
    planned: dict[str, Planned] = {}
    left_out: list[str] = []
    for model_tensor in model_tensors(model):
        shape = tuple(model_tensor.tensor.shape)
        options = list(ways(model_tensor.name, shape))
        pieces = options[min(1, len(options) - 1)] if is_weight(model_tensor.owner, model_tensor.key) else options[0]
        is_coded = _quantizer(model_tensor) is not None
        is_matrix = model_tensor.tensor.dim() >= 2 and model_tensor.key != "bias"
        if not is_coded and is_matrix and not isinstance(model_tensor.owner, nn.Embedding):
            left_out += [piece.module for piece in pieces]
        fill = Fill(model_tensor, pieces, layout if is_coded else None, is_coded)
        for piece in pieces:
            planned.update(_coded(fill, piece) if is_coded else {piece.name: _values(model_tensor, piece)})
    warn_of_static_scales(layout)
    _warn_of_values(model, planned)
    own: Any = getattr(model, "config", None)
    config = own.to_dict() if hasattr(own, "to_dict") else {}
    return planned, shards.config_with(config, entry_for(layout, left_out))


def _warn_of_values(model: nn.Module, planned: dict[str, Planned]) -> None:
    """Warn of weights that are multiplied as codes, and saved as values: the model has them in another layout."""
    names = [
        plain_name(joined(path, layer._place_in_owner.name))
        for path, module in model.named_modules()
        for layer in third_party_experts.layers_of(module)
        if layer.recipe is not None and layer.recipe.linear().fprop.right is not None
    ]
    values = sorted({name for name in names if name in planned and planned[name].dtype in FLOATS})
    if values:
        warn_caller(
            f"{plural(len(values), 'quantized weight')} will be values in these files, such as {values[0]}: the model "
            "has them transposed, or several in one, which no layout of codes has. Its own forward quantizes them, and "
            "a server that loads these files does not."
        )


def _quantizer(model_tensor: ModelTensor) -> Quantizer | None:
    """Return the quantizer of a parameter's codes; None if it is no weight that is quantized."""
    layer = layer_of(model_tensor)
    if layer is None or layer.recipe is None:
        return None
    quantizes = model_tensor.key in layer._names_of_weights() or is_weight(model_tensor.owner, model_tensor.key)
    return layer.recipe.linear().fprop.right if quantizes else None


def _values(model_tensor: ModelTensor, piece: Piece) -> Planned:
    check_plain(model_tensor.name, model_tensor.tensor)
    part = piece.of(model_tensor.tensor.detach())
    return Planned(NAMES[part.dtype], tuple(part.shape), lambda: part)


def _coded(fill: Fill, piece: Piece) -> Iterator[tuple[str, Planned]]:
    """Yield the tensors of one piece of a weight, in a layout."""
    model_tensor, layout = fill.model_tensor, fill.layout
    assert layout is not None
    spec, shape = _quantizer(model_tensor), fill.shape_of(piece)
    assert spec is not None
    _check_fits(model_tensor, spec, layout, shape)
    for each in expected(layout, shape):
        make = partial(_made, fill, piece, each.suffix)
        yield piece.name + each.suffix, Planned(each.dtypes[0], each.shapes[0], make)


def _check_fits(model_tensor: ModelTensor, spec: Quantizer, layout: Layout, shape: tuple[int, ...]) -> None:
    layer = layer_of(model_tensor)
    why = unsupported_refinement(spec, layout) or unsupported_columns(layout, shape[-1])
    if not why and layer.recipe.stateful and not isinstance(model_tensor.tensor, QuantizedWeight):
        why = "its recipe scales by earlier steps. Use fp8-current, or octavo.quantize_weights before"
    if model_tensor.tensor.is_meta:
        why = "it is on the meta device, and has no values"
    if why:
        raise UnsupportedConfig(
            f"{model_tensor.name} runs in {layer.recipe}, whose weights are {spec}, and cannot be saved as "
            f"{layout.name}: {why}. Name another layout=, or {WAY_OUT}."
        )


def _made(fill: Fill, piece: Piece, suffix: str, dtype: str = "") -> Tensor:
    layout, model_tensor = fill.layout, fill.model_tensor
    assert layout is not None
    shape, spec = fill.shape_of(piece), _quantizer(model_tensor)
    assert spec is not None
    if piece.expert is None and len(shape) == 3:
        each = [_parts(model_tensor, spec, i, 0, shape[1]) for i in range(shape[0])]
        parts = [torch.stack(list(same)) for same in zip(*each, strict=True)]
    else:
        parts = _parts(model_tensor, spec, piece.expert, piece.start, shape[-2])
    scales = dtype if suffix == layout.scale else ""
    return in_file(layout, refined(parts, spec, layout, shape), shape, scales)[suffix]


def _parts(model_tensor: ModelTensor, spec: Quantizer, expert: int | None, start: int, rows: int) -> list[Tensor]:
    """Return codes, scales and the second level of rows of a weight: what its forward multiplies."""
    weight: Any = model_tensor.tensor
    if isinstance(weight, QuantizedWeight):
        group = weight.group if expert is None else expert
        proto = spec.proto(TensorProto((rows, weight.shape[-1]), weight.dtype, torch.device("meta")))
        like = list(proto.empty().tensors())
        return rows_of(weight, group, start, like)
    matrix = weight.detach() if expert is None else weight.detach()[expert]
    whole = spec.quantize(matrix)[start : start + rows] if start or rows != matrix.shape[0] else spec.quantize(matrix)
    codes, *rest = whole.tensors()
    return [codes.view(torch.uint8), *rest]


# -- like the folder that the model came from --------------------------------------------------------------------------


def _like(model: nn.Module, source: Path) -> dict[str, Planned]:
    """Return the tensors of that folder, in its order: those of the model, or the folder's own where they are equal."""
    made = matched(model, source)
    found = {name: Planned.copy_of(entry) for name, entry in made.entries.items()}
    for fill in made.fills:
        layout, tensor, spec = fill.layout, fill.model_tensor, _quantizer(fill.model_tensor)
        for piece in fill.pieces:
            make: Callable[..., Tensor] = _equal_or_own
            if layout is None:
                check_plain(tensor.name, tensor.tensor)
                make = _equal_or_own_values
            elif spec is None:
                make = partial(_codes_of_values, made.entries)
            else:
                _check_fits(tensor, spec, layout, fill.shape_of(piece))
            parts = [] if layout is None else expected(layout, fill.shape_of(piece))
            for suffix in [each.suffix for each in parts] or [""]:
                entry = made.entries[name := piece.name + suffix]
                found[name] = Planned(entry.dtype, entry.shape, partial(make, fill, piece, suffix, entry))
    return found


def _equal_or_own_values(fill: Fill, piece: Piece, suffix: str, entry: Entry) -> Tensor:
    source, mine = read_entry(entry), piece.of(fill.model_tensor.tensor.detach()).cpu()
    return source if torch.equal(source.to(mine.dtype), mine) else mine.to(source.dtype)


def _equal_or_own(fill: Fill, piece: Piece, suffix: str, entry: Entry) -> Tensor:
    """Return the tensor of the file, if the model still has its codes or scales, and else the model's."""
    assert fill.layout is not None
    source = read_entry(entry)
    own = _made(fill, piece, suffix, entry.dtype).cpu()
    shape = fill.shape_of(piece)
    before, now = (in_memory_part(fill.layout, suffix, t, shape) for t in (source, own))
    if torch.equal(before, now):
        return source
    if own.dtype != source.dtype:
        raise UnsupportedConfig(
            f"{piece.name}{suffix} is {entry.dtype} in {entry.path.parent}, which cannot hold the trained scales. Save "
            "with layout= instead of like=."
        )
    return own.reshape(entry.shape)


def _codes_of_values(entries: dict[str, Entry], fill: Fill, piece: Piece, suffix: str, entry: Entry) -> Tensor:
    """Return the codes of the file for a weight that the model has as values, if these are still those of the codes."""
    assert fill.layout is not None
    own = piece.of(fill.model_tensor.tensor.detach())
    if not torch.equal(values_of(fill, piece, Source(entries), own.dtype, own.device), own):
        raise UnsupportedConfig(
            f"{fill.model_tensor.name} was dequantized from {fill.layout.name} and trained as values, so no codes are "
            "its own. Give its layer a recipe before you train, or save with layout=, which saves it as values."
        )
    return read_entry(entry)
