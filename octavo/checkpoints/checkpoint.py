"""`octavo.save_checkpoint` and `octavo.load_checkpoint`: everything that a resumed run needs, in one folder.

    model.safetensors       model.state_dict(), by plain names: a stock model loads it
    recipe.safetensors      octavo.state_dict(model), with the codes of weights that are codes
    optimizer.safetensors   optimizer.state_dict(), if there is an optimizer
    run.safetensors         the state of random numbers, and what the caller adds
    checkpoint.json         the step, the recipe of each layer, the size and SHA-256 of each file, and its own SHA-256;
                            written last

A file holds values that are no tensors as JSON in its header. Nothing is pickled.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from octavo._torch.modules import plain_name, uncompiled
from octavo.checkpoints import layer_recipes, optimizer_state, random_state, tensor_file
from octavo.checkpoints.folder import find, is_step, name_of, new_checkpoint, read_manifest
from octavo.checkpoints.structure import decoded, encoded
from octavo.checkpoints.tensor_file import TensorFile, damaged
from octavo.checkpoints.undo import undo
from octavo.errors import InvalidCheckpoint, UnsupportedConfig, UnsupportedDtype, UnsupportedShape
from octavo.model.attach import OptimizerWrapper
from octavo.model.layer_lookup import check_model, refuse_parts
from octavo.model.state_dicts import checked_loads, state_dict, write_state
from octavo.text import some

MODEL, RECIPE, OPTIMIZER, RUN = (f"{name}.safetensors" for name in ("model", "recipe", "optimizer", "run"))
EXTRA_STATE = "_extra_state"  # of a module that saves a tensor of its own, of any shape


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that `octavo.load_checkpoint` has loaded.

    Attributes:
        path: its folder.
        step: the step that it was saved with.
        extra: the values that it was saved with. Tensors are on the CPU.
    """

    path: Path
    step: int
    extra: dict[str, Any]


def save_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | OptimizerWrapper | None = None,
    *,
    step: int = 0,
    extra: Mapping[str, object] | None = None,
) -> Path:
    """Save a training run, so that it can resume bit for bit.

    The checkpoint is a folder `step-000123` in `folder`. It gets that name when all its files are on the disk: a save
    that fails, or is interrupted, leaves the run's checkpoints as they were. `model.safetensors` in it has the names of
    `model.state_dict()`, without those of wrappers, and loads into a stock model. Weights that are codes are there as
    values, and in `recipe.safetensors` as codes and scales. Nothing is pickled.

    Args:
        folder: the folder of the run, which is made if it does not exist.
        model: the model, converted, compiled or wrapped by DistributedDataParallel, or none of it. With several
            processes, call this in one of them.
        optimizer: its optimizer, or a wrapper that has one at `.optimizer`.
        step: the number of steps that were made. A step is saved once.
        extra: what else the program needs, such as `{"schedule": schedule.state_dict()}`: numbers, texts, None,
            tensors, and lists, tuples and dicts of these.

    Returns:
        The folder of the checkpoint.

    Raises:
        UnsupportedConfig: the checkpoint of this step exists, `step` is negative, a weight is split over ranks, or a
            parameter is named `__metadata__`.
        UnsupportedDtype: `model` is no module, `optimizer` is no optimizer, `extra` is no dict, a tensor is sharded or
            sparse, or an object is no plain value.
        UnsupportedDevice: a tensor is on the meta device.
        UnsupportedShape: a tensor has more than 32 dims.
        OSError: the folder cannot be written.

    Example:
        >>> import tempfile
        >>> folder, model = tempfile.mkdtemp(), nn.Sequential(octavo.Linear(16, 8, recipe="fp8-delayed"))
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> octavo.save_checkpoint(folder, model, optimizer, step=100).name
        'step-000100'
        >>> octavo.load_checkpoint(folder, model, optimizer).step
        100
    """
    check_model(model, "save_checkpoint", folder, place="second, after the folder")
    if not is_step(step):
        raise UnsupportedConfig(f"A step is an int from 0 up to 10^18 - 1, got {step!r}.")
    if extra is not None and not isinstance(extra, Mapping):
        raise UnsupportedDtype(f'extra is a dict, got {type(extra).__name__}. Write extra={{"name": value}}.')
    model = unwrapped(model)
    refuse_parts(
        model, "save_checkpoint", "Save it with torch.distributed.checkpoint, after "
        "octavo.distributed.distribute_parameters(model, mesh) where a constructor made the parts.",
    )  # fmt: skip
    weights = {plain: tensor for plain, (_, tensor) in named_tensors(model).items()}
    recipe = {plain_name(name): tensor for name, tensor in state_dict(model).items()}
    contents: dict[str, tuple[dict[str, Tensor], dict[str, str]]] = {
        MODEL: (weights, {"format": "pt"}),  # what readers of transformers ask for
        RECIPE: (recipe, {}),
        RUN: encoded({"random": random_state.export(), "extra": dict(extra or {})}),
    }
    if optimizer is not None:
        contents[OPTIMIZER] = encoded(optimizer_state.export(optimizer, model))
    with new_checkpoint(Path(folder), step, layer_recipes.export(model)) as (partial, files):
        for name, (tensors, metadata) in contents.items():
            files[name] = tensor_file.write(partial / name, tensors, metadata)
    return Path(folder) / name_of(step)


def load_checkpoint(
    path: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer | OptimizerWrapper | None = None
) -> Checkpoint:
    """Load a checkpoint that `octavo.save_checkpoint` wrote.

    It reads and checks all files, and compares them with the model and the optimizer, before it writes anything. A call
    that raises changes nothing: where a hook of the program raises, it writes the former values back, of which it keeps
    a copy on the CPU. It also sets the random number generators of torch, Python and numpy.

    Args:
        path: the folder of a run, whose newest complete checkpoint is loaded, or the folder of one checkpoint.
        model: a model with the same parameters and recipes. `octavo.attach` may come before or after.
        optimizer: an optimizer of the same class for the same parameters, in the same order. None leaves a saved one
            out.

    Returns:
        The step, and the extra values.

    Raises:
        InvalidCheckpoint: there is none, or a file of it is missing, damaged or of another kind.
        UnsupportedConfig: names of the model or of the optimizer's parameters differ, or the recipes do.
        UnsupportedShape: a tensor of the model has another shape.
        UnsupportedDtype: a tensor of the model has another dtype, `model` is no module, or `optimizer` no optimizer.

    Example:
        >>> import tempfile
        >>> folder, model = tempfile.mkdtemp(), nn.Linear(4, 4)
        >>> path = octavo.save_checkpoint(folder, model, step=7, extra={"note": "warm-up is over"})
        >>> loaded = octavo.load_checkpoint(folder, model)
        >>> loaded.step, loaded.extra
        (7, {'note': 'warm-up is over'})
    """
    check_model(model, "load_checkpoint", path, place="second, after the folder")
    model = unwrapped(model)
    checkpoint = find(Path(path))
    manifest = read_manifest(checkpoint)
    wanted = [MODEL, RECIPE, RUN] + ([OPTIMIZER] if optimizer is not None else [])
    for name in wanted:
        if name not in manifest.files:
            raise _lacks(checkpoint, name)
    files = {name: tensor_file.read(checkpoint / name, manifest.files[name]) for name in wanted}
    weights = _checked_weights(files[MODEL], model)
    layer_recipes.check(manifest.recipes, model)
    recipe = checked_loads(model, files[RECIPE].tensors, way="")
    random, extra = _run(checkpoint / RUN, files[RUN])
    set_generators = random_state.restorer(checkpoint / RUN, random)
    if optimizer is not None:
        state = decoded(checkpoint / OPTIMIZER, files[OPTIMIZER])
        load_optimizer = optimizer_state.loader(checkpoint / OPTIMIZER, state, optimizer, model)
    restore = undo(model, optimizer)
    try:
        if optimizer is not None:
            load_optimizer()
        model.load_state_dict(weights)
        write_state(recipe)
        set_generators()
    except BaseException:  # of a hook, or of a class of the program's own
        restore()
        raise
    return Checkpoint(checkpoint, manifest.step, extra)


def extra_of(checkpoint: Path) -> dict[str, Any]:
    """Return the extra values of a checkpoint, and load nothing."""
    files = read_manifest(checkpoint).files
    if RUN not in files:
        raise _lacks(checkpoint, RUN)
    return _run(checkpoint / RUN, tensor_file.read(checkpoint / RUN, files[RUN]))[1]


def _run(path: Path, file: TensorFile) -> tuple[Any, dict[str, Any]]:
    """Return the state of random numbers, and the extra values."""
    match decoded(path, file):
        case {"random": random, "extra": dict(extra), **rest} if not rest:
            return random, extra
    raise damaged(path, "it does not have random and extra")


def _lacks(checkpoint: Path, name: str) -> InvalidCheckpoint:
    if name == OPTIMIZER:
        return InvalidCheckpoint(
            f"{checkpoint} was saved without an optimizer. Call octavo.load_checkpoint(path, model), or load one that "
            "was saved with octavo.save_checkpoint(folder, model, optimizer)."
        )
    return InvalidCheckpoint(f"{checkpoint} lists no {name}, which every checkpoint has. Load another.")


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside of torch.compile, DistributedDataParallel and DataParallel."""
    inside: nn.Module = uncompiled(model)
    if isinstance(inside, (DistributedDataParallel, DataParallel)):
        inside = inside.module
    return model if inside is model else unwrapped(inside)


def named_tensors(model: nn.Module) -> dict[str, tuple[str, Tensor]]:
    """Return the key and the tensor of each entry of a model's state dict, by the key without names of wrappers."""
    found: dict[str, tuple[str, Tensor]] = {}
    for key, tensor in model.state_dict().items():
        plain = tensor_file.utf8(plain_name(key))
        if plain in found:
            raise UnsupportedConfig(f"The model has {plain!r} twice: as {found[plain][0]} and as {key}. Rename one.")
        found[plain] = key, tensor
    return found


def _checked_weights(file: TensorFile, model: nn.Module) -> dict[str, Tensor]:
    """Return a file's tensors by the keys of the model. Raise unless they are the model's, in shape and dtype."""
    own = named_tensors(model)
    missing = [name for name in own if name not in file.tensors]
    unknown = [name for name in file.tensors if name not in own]
    if missing or unknown:
        first, second = (some(names, 3) or "nothing" for names in (missing, unknown))
        raise UnsupportedConfig(
            f"This model and the checkpoint do not match: missing {first}, unknown {second}. Build the model that the "
            "checkpoint was saved from."
        )
    for name, (_, tensor) in own.items():
        _check_weight(name, file.tensors[name], tensor)
    return {key: file.tensors[name] for name, (key, _) in own.items()}


def _check_weight(name: str, saved: Tensor, own: Any) -> None:
    if name.split(".")[-1] == EXTRA_STATE or is_lazy(own):
        return
    tensor_file.check_plain(name, own)
    if saved.shape != own.shape:
        raise UnsupportedShape(
            f"{name} of this model is {tuple(own.shape)}, and {tuple(saved.shape)} in the checkpoint. Build the model "
            "that the checkpoint was saved from."
        )
    if saved.dtype != own.dtype:
        raise UnsupportedDtype(
            f"{name} of this model is {own.dtype}, and {saved.dtype} in the checkpoint. Call "
            f"model.to({saved.dtype}) first, or build the model that the checkpoint was saved from."
        )
