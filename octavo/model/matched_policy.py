"""A policy and a model: the rule that decides for each layer, the blocks of the model, rules that decide nothing."""

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from octavo.model.paths import around, matching, near
from octavo.model.policy import Policy, PolicyRule
from octavo.model.third_party.third_party_experts import is_experts, layers_of
from octavo.ops.quantized import Quantized

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


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
        modules = dict(model.named_modules(remove_duplicate=False))
        inside = {id(layer) for module in modules.values() for layer in layers_of(module)}  # the experts' row has them
        self.layers = [path for path, module in modules.items() if is_layer(module) and id(module) not in inside]
        self.modules = list(modules)
        self.blocks = blocks_of(model)
        self._matches: dict[str, list[Match]] = {path: [] for path in self.layers}
        for number, rule in enumerate(policy.rules, start=1):
            roots = {root for pattern in rule.layers for root in matching(pattern, modules)}
            for path, found in self._matches.items():
                if any(root in roots for root in around(path)) and self._in_blocks(path, rule):
                    exact = path in rule.layers
                    names = exact or any(_names(pattern, path) for pattern in rule.layers)
                    found.append(Match(number, rule, exact, names))
        self.starts = tuple(sorted({0} | {rule.from_step for rule in policy.rules}))  # steps at which rules begin

    def match(self, path: str, step: int) -> Match | None:
        """Returns the first rule that matches a layer and has begun at a step; None if none does."""
        return next((found for found in self._matches.get(path, ()) if found.rule.from_step <= step), None)

    def _in_blocks(self, path: str, rule: PolicyRule) -> bool:
        if not rule.blocks:
            return True
        block = next((self.blocks[root] for root in around(path) if root in self.blocks), None)
        return block is not None and rule._takes_block(*block)

    def unused(self, used: Iterable[int]) -> list[tuple[PolicyRule, str]]:
        """Returns the rules that decide for no layer, each with a sentence; `used` are the numbers of those that do."""
        numbers = set(used)
        return [
            (rule, f"Rule {number} ({rule}) decides for no layer: {self._why_unused(number, rule)}")
            for number, rule in enumerate(self.policy.rules, start=1)
            if number not in numbers
        ]

    def _why_unused(self, number: int, rule: PolicyRule) -> str:
        found = [match for matches in self._matches.values() for match in matches if match.number == number]
        if found:
            firsts = [match for matches in self._matches.values() for match in matches[:1] if match.number == number]
            return (
                "the layers that it matches are left alone for reasons of their own."
                if firsts
                else "rules before it take every layer that it matches."
            )
        if rule.blocks and not self.blocks:
            return "this model has no blocks, which are modules of one class in an nn.ModuleList or nn.Sequential."
        hints = [near(pattern, self.modules) for pattern in rule.layers if not matching(pattern, self.modules)]
        return "it matches none." + next((hint for hint in hints if hint), "")


def is_layer(module: nn.Module) -> bool:
    """Whether a module may get a recipe."""
    return isinstance(module, nn.Linear | Quantized) or is_experts(module)


def _names(pattern: str, path: str) -> bool:
    """Whether the last part of a pattern is more than wildcards and matches the last part of a path."""
    own, name = pattern.rpartition(".")[2], path.rpartition(".")[2]
    return any(character.isalnum() for character in own) and fnmatchcase(name, own) and fnmatchcase(path, pattern)


def blocks_of(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Returns the blocks of a model: their paths, each with its index and the number of blocks beside it.

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
    """Whether a module is no layer itself and contains one."""
    return not is_layer(module) and any(is_layer(inner) for inner in module.modules())
