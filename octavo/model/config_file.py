"""`octavo.from_config`: a conversion as data, from a file beside a trainer's own settings."""

import importlib
import os
import tomllib
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from octavo.errors import UnknownSetting, UnsupportedConfig, nearest
from octavo.model.conversion import ConversionReport
from octavo.model.convert import SETTINGS, convert
from octavo.model.policy import Policy

SECTION = "octavo"  # the key of the settings in a file that has others too
MOST_VALUES = 100_000  # of a file, each counted where it stands: aliases of YAML can stand for billions
KEYS = ("recipe", "rules", "exclude", "high_precision", "overwrite", "strict", "step", *SETTINGS)


def from_config(model: nn.Module, config: str | os.PathLike[str] | Mapping[str, Any]) -> ConversionReport:
    """Convert a model as a file says, or a dict of the same keys.

    The keys are the arguments of `octavo.convert`: `recipe`, `exclude`, `high_precision`, `strict` and so on. `rules`
    is the list of an `octavo.Policy`. If there is a key `octavo`, the settings are below it, and other keys are left to
    others: the file may be a trainer's own. Only data is read: a YAML file with a tag of Python's is refused.

    Args:
        model: the model, which is changed in place.
        config: the path of a TOML or YAML file (YAML needs the package pyyaml), or a mapping.

    Returns:
        The report of `octavo.convert`.

    Raises:
        UnsupportedConfig: the file cannot be read, or has other than settings; and as `octavo.convert`.
        UnknownSetting: there is an unknown key.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        >>> config = {"recipe": "fp8-current", "rules": [{"layers": "2", "recipe": "bf16"}]}
        >>> report = octavo.from_config(model, config)
        >>> [str(layer.recipe) for layer in (model[0], model[2])]
        ['fp8-current', 'bf16']
    """
    data, name = (config, "the config") if isinstance(config, Mapping) else read_file(config, "from_config")
    settings = data.get(SECTION, data)
    if not isinstance(settings, Mapping):
        raise UnsupportedConfig(
            f"{SECTION} in {name} has settings by name, got {settings!r}. Write recipe: fp8-current."
        )
    for key in settings:
        if key not in KEYS:
            raise UnknownSetting(f"{name} has no setting {key!r}.{nearest(str(key), KEYS)} It takes {', '.join(KEYS)}.")
    given = dict(settings)
    recipe, rules = given.pop("recipe", None), given.pop("rules", None)
    policy = None if rules is None else Policy.from_dict({"rules": rules})
    if recipe is None and policy is None:
        raise UnsupportedConfig(f"{name} names no recipe. Write recipe: fp8-current, or rules.")
    if recipe is None:
        return convert(model, policy, **given)  # type: ignore[arg-type]
    return convert(model, recipe, policy, **given)


def read_file(
    path: Any, title: str, others: Mapping[str, Callable[[str], Any]] | None = None
) -> tuple[Mapping[str, Any], str]:
    """Return the data that a TOML or YAML file holds, and its name. `others` are readers of further endings."""
    if not isinstance(path, str | os.PathLike):
        raise UnsupportedConfig(f"{title} takes the path of a TOML or YAML file or a dict, got {path!r}.")
    name = os.fsdecode(path)
    try:
        with open(name, encoding="utf-8") as file:
            text = file.read()
    except (OSError, ValueError) as error:
        raise UnsupportedConfig(f"The config file {name} cannot be read: {error}. Name a TOML or YAML file.") from None
    ending = os.path.splitext(name)[1]
    kind = "YAML" if ending in (".yaml", ".yml") else ending[1:].upper() if ending in (others or {}) else "TOML"
    read = _yaml(name) if kind == "YAML" else (others or {}).get(ending, tomllib.loads)
    try:
        data = read(text)
    except Exception as error:  # each parser has errors of its own
        raise UnsupportedConfig(f"The config file {name} is no {kind} of plain data: {error}. Correct it.") from None
    if _has_more_values(data, MOST_VALUES):
        raise UnsupportedConfig(
            f"The config file {name} holds more than {MOST_VALUES} values, those of its aliases counted each time. "
            "Write the settings of Octavo into a file of their own."
        )
    if not isinstance(data, Mapping):
        raise UnsupportedConfig(f"The config file {name} holds {data!r}. Write settings by name, recipe: fp8-current.")
    return data, name


def _has_more_values(data: Any, most: int) -> bool:
    """Return whether there are more values than this in a list or mapping, and in those inside of it."""
    waiting, seen = [data], 0
    while waiting and seen <= most:
        value = waiting.pop()
        seen += 1
        if isinstance(value, Mapping):
            waiting += [*value, *value.values()]
        elif isinstance(value, list | tuple | set):
            waiting += value
    return seen > most


def _yaml(name: str) -> Any:
    """Return the function that reads YAML without making objects of classes."""
    try:
        return importlib.import_module("yaml").safe_load
    except ImportError:
        raise UnsupportedConfig(
            f"{name} is YAML, and the package pyyaml is not installed. pip install pyyaml, or write TOML."
        ) from None
