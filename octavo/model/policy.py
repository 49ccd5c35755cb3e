"""What the user wants: `octavo.Policy`, rules that give recipes to layers by their paths, and the rules of one model.

A `Policy` is a value that knows no model, from Python values or from a TOML file. A `MatchedPolicy` is a policy and a
model: the rule that decides for each layer, and rules that decide nothing. `selection.py` asks it.
"""

import difflib
import json
import os
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from octavo.errors import UnknownSetting, UnsupportedConfig, did_you_mean, nearest
from octavo.model.third_party.third_party_experts import inside_of, is_experts
from octavo.ops.quantized import Quantized
from octavo.recipes import Recipe
from octavo.recipes import recipe as resolve
from octavo.recipes.recipe import GEMMS
from octavo.values import excerpt

OVERRIDES = (*GEMMS, "backward")  # settings that every recipe but bf16 has
KEYS = ("layers", "blocks", "recipe", *OVERRIDES, "from_step")
NONE = "none"  # in place of a recipe: leave the layer as it is
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)  # of blocks
_BLOCKS = re.compile(r"(first|last) ([1-9][0-9]{0,5})")
_HEADER = re.compile(r"\s*\[\[\s*rules\s*\]\]")


@dataclass(frozen=True)
class PolicyRule:
    """One rule of an `octavo.Policy`. Its string is a short form for messages.

    Args:
        layers: paths or globs of paths. Each also covers all layers inside a module that it matches.
        recipe: the recipe of these layers; None leaves them as they are.
        blocks: "first N" or "last N": only layers in these blocks. Empty does not look at blocks.
        from_step: the number of steps after which the rule applies.
    """

    layers: tuple[str, ...]
    recipe: Recipe | None
    blocks: tuple[str, ...] = ()
    from_step: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Return the rule as plain data, for TOML or JSON.

        Returns:
            The keys of a rule in a policy file, without those that have their defaults.
        """
        data: dict[str, Any] = {"layers": self.layers[0] if len(self.layers) == 1 else list(self.layers)}
        if self.blocks:
            data["blocks"] = self.blocks[0] if len(self.blocks) == 1 else list(self.blocks)
        data["recipe"] = NONE if self.recipe is None else str(self.recipe)
        if self.from_step:
            data["from_step"] = self.from_step
        return data

    def _takes_block(self, index: int, count: int) -> bool:
        """Return whether the rule takes the block at an index out of `count` blocks."""
        for entry in self.blocks:
            side, number = entry.split()
            if index < int(number) if side == "first" else index >= count - int(number):
                return True
        return False

    def __str__(self) -> str:
        where = " or ".join(map(repr, self.layers))
        # "last 1" is the last block, "last 2" the last 2 blocks
        named = " and ".join(f"{b.removesuffix(' 1')} block{'' if b.endswith(' 1') else 's'}" for b in self.blocks)
        blocks = f" in the {named}" if named else ""
        start = f" from step {self.from_step}" if self.from_step else ""
        return f"{where}{blocks}{start}: {NONE if self.recipe is None else self.recipe}"


@dataclass(frozen=True, init=False, repr=False)
class Policy:
    """Rules that give recipes to the layers of a model by their paths. The first rule that matches a layer decides.

    A policy is an immutable value. Pass it to `octavo.convert`. Its string is a TOML file, which `Policy.load` reads.

    Args:
        rules: the rules in order: each a pair (layers, recipe), or a dict with the keys of a rule in a file.
            `layers` is a path, a glob of paths or a list of these, "*" by default. `recipe` is a name, a string with
            settings, a `Recipe`, or "none", which leaves the layers as they are. `fprop`, `dgrad`, `wgrad` and
            `backward` change that setting of the recipe. `blocks` ("first 1", "last 2", or a list) keeps to these
            blocks. `from_step` is the number of steps after which the rule applies.

    Raises:
        UnsupportedConfig: a rule has a value without a meaning, or two rules have the same conditions.
        UnknownSetting: a rule has an unknown key, or its recipe has no such setting.

    Example:
        >>> import warnings
        >>> policy = octavo.Policy([
        ...     {"blocks": ["first 1", "last 1"], "recipe": "bf16"},
        ...     ("*.down", "fp8-block(wgrad='bf16')"),
        ...     ("*", "fp8-current"),
        ... ])
        >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4)))
        >>> with warnings.catch_warnings(action="ignore"):
        ...     report = octavo.convert(model, policy)
        >>> [(row.path, row.recipe, row.rule) for row in report][:2]
        [('0.0', 'bf16', 1), ('1.0', 'fp8-current', 3)]
        >>> [str(rule) for rule in report.unused]
        ["'*.down': fp8-block(wgrad='bf16')"]
        >>> octavo.Policy([("*", octavo.recipes.Block())]).to_dict()
        {'rules': [{'layers': '*', 'recipe': 'fp8-block'}]}
        >>> octavo.Policy.from_dict(policy.to_dict()) == policy
        True
    """

    rules: tuple[PolicyRule, ...]

    def __init__(self, rules: Iterable[Any]) -> None:
        object.__setattr__(self, "rules", _read_rules(rules, lambda index: f"rule {index + 1}"))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Policy":
        """Return the policy of plain data, as TOML or JSON has it.

        Args:
            data: a dict with one key, "rules": a list of rules.

        Returns:
            The policy.

        Raises:
            UnsupportedConfig: the data has another form, or a rule has a value without a meaning.
            UnknownSetting: the data or a rule has an unknown key.
        """
        return cls(_listed(data))

    @classmethod
    def load(cls, path: "str | os.PathLike[str]") -> "Policy":
        """Return the policy of a TOML file, which has a table `[[rules]]` for each rule.

        Args:
            path: the file.

        Returns:
            The policy.

        Raises:
            UnsupportedConfig: the file cannot be read, is no TOML, or a rule has a value without a meaning. The message
                has the line, where it is known.
            UnknownSetting: the file or a rule has an unknown key.

        Example:
            >>> import pathlib, tempfile
            >>> folder = tempfile.TemporaryDirectory()
            >>> path = pathlib.Path(folder.name, "policy.toml")
            >>> _ = path.write_text('[[rules]]\\nlayers = "*.up"\\nrecipe = "mxfp8"\\nwgrad = "bf16"\\n')
            >>> octavo.Policy.load(path).rules[0].recipe
            mxfp8(wgrad='bf16')
            >>> folder.cleanup()
        """
        if not isinstance(path, str | bytes | os.PathLike):
            raise UnsupportedConfig(
                f"Policy.load takes the path of a TOML file, got {_described(path)}. Policy([...]) takes rules, and "
                "Policy.from_dict data."
            )
        name = os.fsdecode(path)
        try:
            with open(name, encoding="utf-8") as file:
                text = file.read()
            data = tomllib.loads(text)
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise UnsupportedConfig(f"The policy file {name} is no TOML: {error}. Correct it.") from None
        except (OSError, ValueError) as error:  # a path with a null byte is a ValueError
            why = error.strerror if isinstance(error, OSError) else error
            raise UnsupportedConfig(
                f"The policy file {name} cannot be read: {why}. Name a TOML file with a table [[rules]] for each rule."
            ) from None
        lines = [number for number, line in enumerate(text.splitlines(), start=1) if _HEADER.match(line)]

        def where(index: int) -> str:
            # rules may also be an inline array, whose lines are not known
            return f"{name}, " + (f"line {lines[index]}, " if index < len(lines) else "") + f"rule {index + 1}"

        try:
            rules = _listed(data)
        except UnsupportedConfig as error:
            raise type(error)(f"{name}: {error}") from None
        policy = cls(())
        object.__setattr__(policy, "rules", _read_rules(rules, where))
        return policy

    def to_dict(self) -> dict[str, Any]:
        """Return the policy as plain data, which `from_dict` takes.

        Returns:
            A dict with "rules". Settings of single GEMMs are part of the recipes' strings.
        """
        return {"rules": [rule.as_dict() for rule in self.rules]}

    def __str__(self) -> str:
        tables = []
        for rule in self.rules:
            lines = [f"{key} = {_toml(value)}" for key, value in rule.as_dict().items()]
            tables.append("\n".join(["[[rules]]", *lines]) + "\n")
        return "\n".join(tables)

    def __repr__(self) -> str:
        return f"octavo.Policy({self.to_dict()['rules']!r})"


def _toml(value: str | int | list[str]) -> str:
    # a JSON string is a TOML string, except for the control character that JSON leaves as it is
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


# -- reading -----------------------------------------------------------------------------------------------------------


def _listed(data: Any) -> list[Any]:
    """Return the rules of a dict, unread."""
    if not isinstance(data, Mapping):
        raise UnsupportedConfig(f"A policy as data is a dict with a list 'rules', got {type(data).__name__}.")
    for key in data:
        if key != "rules":
            raise UnknownSetting(f"A policy has no key {key!r}.{_near(key, ('rules',))} Its only key is 'rules'.")
    rules = data.get("rules", [])
    if not isinstance(rules, list | tuple):
        raise UnsupportedConfig(f"'rules' is a list, in TOML a table [[rules]] for each, got {_described(rules)}.")
    return list(rules)


def _read_rules(specs: Any, where: Callable[[int], str]) -> tuple[PolicyRule, ...]:
    """Return the rules; `where` names the rule at an index in errors."""
    if isinstance(specs, str | Mapping) or not isinstance(specs, Iterable):
        way_out = " Policy.load takes a file." if isinstance(specs, str) else ""
        way_out = " Policy.from_dict takes a dict." if isinstance(specs, Mapping) else way_out
        raise UnsupportedConfig(f"A policy takes a list of rules, got {_described(specs)}.{way_out}")
    rules: list[PolicyRule] = []
    first: dict[Any, int] = {}
    for index, spec in enumerate(specs):
        try:
            rule = _read_rule(spec)
        except UnsupportedConfig as error:
            raise type(error)(f"{where(index)}: {error}") from None
        condition = (frozenset(rule.layers), frozenset(rule.blocks), rule.from_step)
        if condition in first:
            raise UnsupportedConfig(
                f"{where(index)}: it has the same conditions as rule {first[condition] + 1} ({rule}), which comes "
                "first and takes all its layers. Remove one of the two."
            )
        first[condition] = index
        rules.append(rule)
    return tuple(rules)


def _read_rule(spec: Any) -> PolicyRule:
    if isinstance(spec, PolicyRule):
        spec = vars(spec)  # its constructor checks nothing
    if isinstance(spec, list | tuple) and len(spec) == 2:
        spec = {"layers": spec[0], "recipe": spec[1]}
    if not isinstance(spec, Mapping):
        raise UnsupportedConfig(
            f"A rule is a pair (layers, recipe) or a dict with keys out of {', '.join(KEYS)}, got {_described(spec)}."
        )
    for key in spec:
        if key not in KEYS:
            raise UnknownSetting(f"A rule has no key {key!r}.{_near(key, KEYS)} Keys: {', '.join(KEYS)}.")
    if "recipe" not in spec:
        raise UnsupportedConfig("A rule needs a recipe. Give it one, or recipe = 'none' to leave its layers alone.")
    return PolicyRule(
        _read_layers(spec.get("layers", "*")),
        _read_recipe(spec["recipe"], {name: spec[name] for name in OVERRIDES if name in spec}),
        _read_blocks(spec.get("blocks", ())),
        _read_step(spec.get("from_step", 0)),
    )


def _read_layers(layers: Any) -> tuple[str, ...]:
    found = (layers,) if isinstance(layers, str) else layers
    if not isinstance(found, list | tuple) or not found or not all(isinstance(one, str) and one for one in found):
        raise UnsupportedConfig(
            f"layers is a path, a glob of paths or a list of these, got {_described(layers)}. '*' takes every layer."
        )
    return tuple(dict.fromkeys(found))


def _read_recipe(spec: Any, overrides: dict[str, Any]) -> Recipe | None:
    if spec is None or (isinstance(spec, str) and spec.strip().lower() == NONE):
        if overrides:
            names = ", ".join(overrides)
            raise UnsupportedConfig(f"recipe 'none' leaves layers alone and has no {names}. Remove it.")
        return None
    if isinstance(spec, bool):
        raise UnsupportedConfig(f"A recipe is a name, a canonical string or a Recipe, got {spec}. Use 'none' for none.")
    found = resolve(spec)
    return replace(found, **overrides) if overrides else found  # type: ignore[type-var]


def _read_blocks(blocks: Any) -> tuple[str, ...]:
    found = (blocks,) if isinstance(blocks, str) else blocks
    if not isinstance(found, list | tuple):
        found = (found,)
    for entry in found:
        if not isinstance(entry, str) or not _BLOCKS.fullmatch(entry):
            near = _near(entry.split()[0], ("first 1", "last 1")) if isinstance(entry, str) and entry.split() else ""
            raise UnsupportedConfig(f"blocks is 'first N', 'last N' or a list of these, got {_described(entry)}.{near}")
    return tuple(dict.fromkeys(found))


def _read_step(step: Any) -> int:
    if type(step) is not int or step < 0:
        raise UnsupportedConfig(f"from_step is a number of steps from 0 up, got {_described(step)}.")
    return step


def _near(key: object, names: Iterable[str]) -> str:
    return nearest(key, names) if isinstance(key, str) else ""


def _described(value: object) -> str:
    return excerpt(repr(value))


# -- on a model --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Match:
    """A rule that matches a layer."""

    number: int  # of the rule, from 1
    rule: PolicyRule
    exact: bool  # the rule has the layer's own path
    names: bool  # the rule means this layer, and not only layers around it or all of them


class MatchedPolicy:
    """A policy on the layers of one model."""

    def __init__(self, policy: Policy, model: nn.Module) -> None:
        self.policy = policy
        self.modules = [path for path, _ in model.named_modules(remove_duplicate=False)]
        self.blocks = blocks_of(model)
        self._matches: dict[str, list[Match]] = {path: [] for path, _ in layers_in(model)}
        for number, rule in enumerate(policy.rules, start=1):
            roots = {root for pattern in rule.layers for root in matching(pattern, self.modules)}
            for path, found in self._matches.items():
                if any(root in roots for root in around(path)) and self._in_blocks(path, rule):
                    exact = path in rule.layers
                    names = exact or any(_names(pattern, path) for pattern in rule.layers)
                    found.append(Match(number, rule, exact, names))
        self.starts = tuple(sorted({0} | {rule.from_step for rule in policy.rules}))  # steps at which rules begin

    def match(self, path: str, step: int) -> Match | None:
        """Return the first rule that matches a layer and has begun at a step; None if none does."""
        return next((found for found in self._matches.get(path, ()) if found.rule.from_step <= step), None)

    def _in_blocks(self, path: str, rule: PolicyRule) -> bool:
        if not rule.blocks:
            return True
        block = next((self.blocks[root] for root in around(path) if root in self.blocks), None)
        return block is not None and rule._takes_block(*block)

    def unused(self, used: Iterable[int]) -> list[tuple[PolicyRule, str]]:
        """Return the rules that decide for no layer, each with a sentence; `used` are the numbers of those that do."""
        numbers = set(used)
        return [
            (rule, f"Rule {number} ({rule}) decides for no layer: {self._why_unused(number, rule)}")
            for number, rule in enumerate(self.policy.rules, start=1)
            if number not in numbers
        ]

    def _why_unused(self, number: int, rule: PolicyRule) -> str:
        matched = [found for found in self._matches.values() if any(match.number == number for match in found)]
        if any(found[0].number == number for found in matched):
            return "the layers that it matches are left alone for reasons of their own."
        if matched:
            return "rules before it take every layer that it matches."
        if rule.blocks and not self.blocks:
            return "this model has no blocks, which are modules of one class in an nn.ModuleList or nn.Sequential."
        hints = [near(pattern, self.modules) for pattern in rule.layers if not matching(pattern, self.modules)]
        return "it matches none." + next((hint for hint in hints if hint), "")


def layers_in(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (path, module) for every path to what may get a recipe. Layers inside of converted experts are left out:
    their owner stands for them."""
    modules = list(model.named_modules(remove_duplicate=False))
    inside = {id(layer) for _, module in modules for layer in inside_of(module)}
    return ((path, module) for path, module in modules if is_layer(module) and id(module) not in inside)


def is_layer(module: nn.Module) -> bool:
    """Return whether a module may get a recipe."""
    return isinstance(module, nn.Linear | Quantized) or is_experts(module)


def _names(pattern: str, path: str) -> bool:
    """Return whether the last part of a pattern is more than wildcards and matches the last part of a path."""
    own, name = pattern.rpartition(".")[2], path.rpartition(".")[2]
    return any(character.isalnum() for character in own) and fnmatchcase(name, own) and fnmatchcase(path, pattern)


def blocks_of(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Return the blocks of a model: their paths, each with its index and the number of blocks beside it.

    Blocks are the modules in a ModuleList, a ModuleDict or a Sequential that are two or more, all of one class, and all
    hold layers. Of such containers inside each other the outermost one counts, so that experts are no blocks."""
    found: dict[str, tuple[int, int]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if not isinstance(module, CONTAINERS) or any(root in found for root in around(path)):
            continue
        inside = [(name, child) for name, child in module._modules.items() if child is not None]
        if len(inside) > 1 and len({type(child) for _, child in inside}) == 1 and all(_holds(c) for _, c in inside):
            prefix = f"{path}." if path else ""
            found |= {f"{prefix}{name}": (index, len(inside)) for index, (name, _) in enumerate(inside)}
    return found


def _holds(module: nn.Module) -> bool:
    """Return whether a module is no layer itself and contains one."""
    return not is_layer(module) and any(is_layer(inner) for inner in module.modules())


# -- paths -------------------------------------------------------------------------------------------------------------


def matching(pattern: str, paths: Collection[str]) -> list[str]:
    """Return the paths that a pattern means. A pattern that is a path is not read as a glob, since a path may contain
    a glob's characters."""
    return [pattern] if pattern in paths else [path for path in paths if fnmatchcase(path, pattern)]


def around(path: str) -> Iterator[str]:
    """Yield the path of a module and of every module that contains it, the model's ("") last."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


def near(pattern: str, paths: Collection[str]) -> str:
    """Return " Did you mean 'x'?" for a pattern that matches none of these paths; "" if none is like it."""
    if any(path.endswith(f".{pattern}") for path in paths):
        return did_you_mean([f"*.{pattern}"])
    if not any(character in pattern for character in "*?["):
        return did_you_mean(difflib.get_close_matches(pattern, paths, 1))
    names = {name for path in paths for name in path.split(".")}
    parts = [next(iter(difflib.get_close_matches(part, names, 1)), part) for part in pattern.split(".")]
    changed = ".".join(parts)
    return did_you_mean([changed] if changed != pattern and matching(changed, paths) else [])
