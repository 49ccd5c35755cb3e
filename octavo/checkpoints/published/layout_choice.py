"""The layout of a checkpoint: the entry `quantization_config` of its config.json, read and written.

Publishers name modules by regular expressions, globs, suffixes or whole paths. A module is left out if any of these
readings of a pattern matches it, as in the servers that read such files.
"""

import re
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from octavo.checkpoints import tensor_file
from octavo.checkpoints.published.layouts import LAYOUTS, Layout
from octavo.errors import InvalidCheckpoint, UnsupportedConfig, check_choice
from octavo.values import excerpt

CONFIG, ENTRY = "config.json", "quantization_config"
MODELOPT = "hf_quant_config.json"  # where ModelOpt writes it beside, or in place of, config.json
LARGEST = 64_000_000  # bytes of a JSON file
LEFT_OUT = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules", "exclude")
KNOWN = ", ".join(LAYOUTS)


class Choice(NamedTuple):
    """The layouts of a folder, each with the modules it is for, and the modules that are left out."""

    groups: tuple[tuple[Layout, tuple[str, ...]], ...]
    left_out: tuple[str, ...]

    def of(self, module: str) -> Layout | None:
        """Return the layout of a module, by its path in the file; None if it is left out."""
        if any(matches(pattern, module) for pattern in self.left_out):
            return None
        named = [row for row, targets in self.groups if any(matches(t, module) for t in targets)]
        return named[0] if named else next((row for row, targets in self.groups if "Linear" in targets), None)

    @property
    def names(self) -> str:
        return ", ".join(dict.fromkeys(row.name for row, _ in self.groups))


def matches(pattern: str, module: str) -> bool:
    """Return whether a pattern of a config names a module."""
    if pattern.startswith("re:"):
        return _regular(pattern[3:], module)
    if pattern == module or module.startswith(f"{pattern}.") or module.endswith(f".{pattern}"):
        return True
    return fnmatchcase(module, pattern) if "*" in pattern else False


def _regular(pattern: str, module: str) -> bool:
    try:
        return re.match(pattern, module) is not None
    except re.error as error:
        raise InvalidCheckpoint(
            f"The regular expression {excerpt(repr(pattern))} of {ENTRY} is none ({error}). Correct it in {CONFIG}."
        ) from None


def read_json(path: Path) -> Any:
    """Return the content of a JSON file of a folder."""
    try:
        return tensor_file.read_json(path, LARGEST)
    except OSError as error:
        raise InvalidCheckpoint(f"{path} could not be read: {error.strerror or error}. Check the folder.") from None


def config_of(folder: Path) -> Any:
    """Return the content of a folder's config.json; empty if it has none."""
    return read_json(folder / CONFIG) if (folder / CONFIG).exists() else {}


def read_entry_of(folder: Path) -> dict[str, Any]:
    """Return a folder's `quantization_config`; empty if it has none."""
    found: Any = None
    config = config_of(folder)
    if isinstance(config, dict):
        found = config.get(ENTRY) or config.get("compression_config")
    if not found and (folder / MODELOPT).exists():
        inner = read_json(folder / MODELOPT)
        quantization = inner.get("quantization") if isinstance(inner, dict) else None
        found = {**quantization, "quant_method": "modelopt"} if isinstance(quantization, dict) else None
    return found if isinstance(found, dict) else {}


def choose(folder: Path, layout: str | None) -> Choice:
    """Return the layouts that a folder's config names, or the one that the caller names."""
    entry = read_entry_of(folder)
    left_out = next((value for key in LEFT_OUT if isinstance(value := entry.get(key), list)), [])
    patterns = tuple(pattern for pattern in left_out if isinstance(pattern, str))
    if layout is not None:
        check_choice(layout, tuple(LAYOUTS), what="layout")
        return Choice(((LAYOUTS[layout], ("Linear",)),), patterns)
    if not entry:
        raise InvalidCheckpoint(
            f"{folder} has no {ENTRY} in its {CONFIG}, which says what its codes are. Name it: layout= one of {KNOWN}."
        )
    method = str(entry.get("quant_method"))
    reader = METHODS.get(method)
    groups = () if reader is None else tuple(reader(entry))
    unknown = [what for name, _, what in groups if name not in LAYOUTS]
    if not groups or unknown:
        what = unknown[0] if unknown else f"quant_method {excerpt(repr(method))}"
        raise UnsupportedConfig(
            f"{folder} has codes by {what}, and Octavo reads {KNOWN}. Convert the checkpoint with the program that "
            "wrote it, or name the layout= of its tensors."
        )
    return Choice(tuple((LAYOUTS[name], targets) for name, targets, _ in groups), patterns)


Group = tuple[str, tuple[str, ...], str]  # the name of a layout, the modules it is for, and what the config says


def _of_fp8(entry: dict[str, Any]) -> Iterable[Group]:
    size, scales = entry.get("weight_block_size"), entry.get("scale_fmt")
    said = f"quant_method 'fp8' with weight_block_size {size!r}, scale_fmt {scales!r}"
    names = {"[128, 128]": "fp8-block-ue8m0" if scales == "ue8m0" else "fp8-block", "None": "fp8-tensor"}
    name = "" if entry.get("expert_dtype") == "fp4" else names.get(str(size), "")
    return [("mxfp8" if str(size) == "[1, 32]" else name, ("Linear",), said)]


_BY_ALGORITHM = {
    "FP8": "modelopt-fp8",
    "NVFP4": "modelopt-nvfp4",
    "W4A16_NVFP4": "modelopt-nvfp4",
    "MXFP8": "modelopt-mxfp8",
}


def _of_modelopt(entry: dict[str, Any]) -> Iterable[Group]:
    algorithm = entry.get("quant_algo")
    if algorithm is None and isinstance(entry.get("config_groups"), dict):
        return _of_compressed_tensors(entry, {"tensor": "modelopt-fp8", "tensor_group": "modelopt-nvfp4"})
    return [(_BY_ALGORITHM.get(str(algorithm), ""), ("Linear",), f"ModelOpt's quant_algo {algorithm!r}")]


_BY_STRATEGY = {
    "tensor": "compressed-tensors-tensor", "channel": "compressed-tensors-channel",
    "block": "compressed-tensors-block", "group": "compressed-tensors-mxfp8",
    "tensor_group": "compressed-tensors-nvfp4",
}  # fmt: skip


def _of_compressed_tensors(entry: dict[str, Any], by_strategy: dict[str, str] | None = None) -> Iterable[Group]:
    names = _BY_STRATEGY if by_strategy is None else by_strategy
    groups = entry.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        weights = weights if isinstance(weights, dict) else {}
        strategy, bits = weights.get("strategy"), weights.get("num_bits")
        if strategy is None and weights.get("group_size") == 16:
            strategy = "tensor_group"  # ModelOpt leaves it out
        fits = weights.get("type") == "float" and bits == (4 if strategy == "tensor_group" else 8)
        fits = fits and (strategy != "group" or weights.get("group_size") == 32)
        fits = fits and (strategy != "block" or weights.get("block_structure") == [128, 128])
        said = f"config_groups with weights of {bits} bits, type {weights.get('type')!r}, strategy {strategy!r}"
        targets = group.get("targets") if isinstance(group, dict) else None
        named = tuple(t for t in targets if isinstance(t, str)) if isinstance(targets, list) else ("Linear",)
        yield names.get(str(strategy), "") if fits else "", named, said


METHODS: dict[str, Callable[[dict[str, Any]], Iterable[Group]]] = {
    "fp8": _of_fp8, "modelopt": _of_modelopt, "compressed-tensors": _of_compressed_tensors,
    "mxfp8": lambda entry: [("mxfp8", ("Linear",), "quant_method 'mxfp8'")],
    "mxfp4": lambda entry: [("gpt-oss-mxfp4", ("Linear",), "quant_method 'mxfp4'")],
}  # fmt: skip


def entry_for(layout: Layout, left_out: Iterable[str]) -> dict[str, Any]:
    """Return the `quantization_config` of a folder in a layout."""
    return {**layout.config, layout.left_out: sorted(left_out)}
