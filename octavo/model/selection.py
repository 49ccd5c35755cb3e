"""What is convertible, and why not: the plan of `octavo.convert` for each layer of a model.

    select                      checks the arguments of convert: recipe or policy, exclude, high_precision
    Selection.plan              a Plan for each layer, decided by exclude, then the policy, then the layer's own reasons
    in_high_precision           heads, adapters and routers (`octavo.model.high_precision`)
    layer_unsupported_reason    why a layer cannot take what was chosen for it

`convert.py` carries the plans out.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from octavo._torch.tensors import is_sharded
from octavo.errors import UnsupportedConfig
from octavo.model.high_precision import in_high_precision
from octavo.model.policy import MatchedPolicy, Policy, PolicyRule, around, layers_in, matching, near
from octavo.model.third_party import third_party_experts, third_party_linear
from octavo.model.third_party.linear_trial import differs
from octavo.model.third_party.third_party_experts import is_experts, layers_of
from octavo.moe.router import Router
from octavo.ops.inputs import strange
from octavo.ops.published_codes import unsupported_codes_reason
from octavo.ops.quantized import Quantized, unsupported_dtype_reason
from octavo.recipes import Recipe
from octavo.recipes import recipe as resolve

PolicyFunction = Callable[[str, nn.Module], "bool | str | Recipe | None"]
CONVERT, KEEP = "converted", "kept"  # reasons; all other reasons are for layers left alone
NEVER = "cannot be converted"
_OWN = "has a recipe of its own"
_ONE_WINDOW = "and one window of amaxes cannot follow two recipes. Let it run in a recipe without state between them"


@dataclass(frozen=True)
class Choice:
    """The recipe chosen for a layer, or None and the reason."""

    recipe: Recipe | None
    reason: str = CONVERT
    why: str = ""
    forced: bool = False  # a policy's function returned the recipe, or a rule has the layer's own path
    rule: int | None = None  # the number of the policy's rule that decided
    later: tuple[tuple[int, Recipe], ...] = ()  # recipes that the layer changes to, and the steps
    since: int = 0  # the step from which on the policy has this recipe for the layer
    used: tuple[int, ...] = ()  # the rules that decide for the layer at some step


@dataclass(frozen=True)
class Plan:
    """One path to a layer, and the choice for it."""

    path: str
    module: nn.Module
    kind: str  # the name of its class before the conversion
    choice: Choice
    refused: bool = False  # it should be converted, but cannot be


@dataclass(frozen=True)
class Selection:
    """The layers of a model that a conversion is to change."""

    default: Recipe | None  # None: a policy alone was given
    policy: PolicyFunction | None
    rules: MatchedPolicy | None
    step: int  # the number of steps that the run has made
    overwrite: bool
    excluded: dict[str, str]  # path to the entry that excludes it
    spared: dict[int, tuple[str, str]]  # id of a layer to (reason, why)
    replaced: tuple[type[nn.Module], ...] = ()  # classes whose own forward octavo.Linear's replaces

    def plan(self, model: nn.Module, settings: dict[str, bool]) -> list[Plan]:
        """Return a plan for every path to a layer; a shared layer has several paths."""
        layers = list(layers_in(model))
        plans = [self._planned(path, module, settings) for path, module in layers]
        if self.policy is not None and plans and all(plan.choice.reason == "policy" for plan in plans):
            if _is_swapped(self.policy, layers):
                raise UnsupportedConfig(
                    "policy left every layer alone as policy(path, module), and takes some as policy(module, path). "
                    "Swap its parameters."
                )
        return _with_one_choice(plans)

    def unused_rules(self, plans: Iterable[Plan]) -> list[tuple[PolicyRule, str]]:
        """Return the rules of the policy that decide for no layer, each with a sentence."""
        used = (rule for plan in plans for rule in plan.choice.used)
        return [] if self.rules is None else self.rules.unused(used)

    def _planned(self, path: str, module: nn.Module, settings: dict[str, bool]) -> Plan:
        choice = self._choose(path, module)
        if isinstance(module, self.replaced):
            choice = replace(choice, forced=True)
        # experts of a form that nobody asked to convert by name are left, and the rest of the model is converted
        lenient = is_experts(module) and not choice.forced
        if choice.recipe is not None and choice.reason == CONVERT:
            if why := layer_unsupported_reason(module, choice, settings):
                choice = Choice(None, NEVER, why, used=choice.used)
        return Plan(path, module, qualified(module), choice, refused=choice.reason == NEVER and not lenient)

    def _choose(self, path: str, module: nn.Module) -> Choice:
        """Return the choice for the layer at a path."""
        if path in self.excluded:
            return Choice(None, "excluded", f"excluded by {self.excluded[path]}")
        if self.rules is not None:
            return self._scheduled(path, module, self.rules)
        wish = True if self.policy is None else _answer(self.policy, path, module)
        if isinstance(wish, Recipe):
            return Choice(wish, forced=True)
        if not wish:
            return Choice(None, "policy", "left alone by the policy")
        return self._of(self.default, module, is_named=False)

    def _of(self, wish: Recipe | None, module: nn.Module, *, is_named: bool) -> Choice:
        """Return the choice for a layer that is to get a recipe, unless a reason of its own speaks against it."""
        recipe = recipe_of(module)
        if id(module) in self.spared and not (is_named and not isinstance(module, Router)):
            reason, why = self.spared[id(module)]
            # a layer that already has a recipe is not in high precision
            return Choice(None, reason, why) if recipe is None else Choice(recipe, KEEP, f"this {reason} {_OWN}")
        if recipe is not None and not self.overwrite:
            return Choice(recipe, KEEP, "" if recipe == wish else f"it {_OWN}: overwrite=True changes it")
        return Choice(wish)

    # -- the rules of a policy -----------------------------------------------------------------------------------------

    def _scheduled(self, path: str, module: nn.Module, rules: MatchedPolicy) -> Choice:
        """Return the choice of the rules for a layer at the run's step, with the recipes that it changes to later."""
        first = self._ruled(path, module, rules, self.step)
        # once the layer is converted, the recipe that it has now is no longer its own
        later = replace(self, overwrite=True) if first.reason == CONVERT else self
        choices = {start: later._ruled(path, module, rules, start) for start in rules.starts}
        used = tuple(sorted({one.rule for one in (first, *choices.values()) if one.rule is not None}))
        last, changes = first, []
        for start, choice in choices.items():
            if start <= self.step or choice.recipe == last.recipe:
                continue
            if choice.recipe is None or last.recipe is None:
                return Choice(None, NEVER, _starts_or_ends(start, last, choice), used=used)
            if choice.recipe.stateful and last.recipe.stateful:
                why = f"it would change from {last.recipe} to {choice.recipe} at step {start}, {_ONE_WINDOW}"
                return Choice(None, NEVER, why, used=used)
            changes.append((start, choice.recipe))
            last = choice
        others = [start for start, one in choices.items() if start <= self.step and one.recipe != first.recipe]
        since = next((start for start in choices if start > max(others, default=-1)), 0)
        return replace(first, later=tuple(changes), since=since, used=used)

    def _ruled(self, path: str, module: nn.Module, rules: MatchedPolicy, step: int) -> Choice:
        """Return the choice of the first rule that matches a layer at a step."""
        match = rules.match(path, step)
        if match is None:
            if self.default is None:
                return Choice(None, "policy", "no rule of the policy matches it")
            return self._of(self.default, module, is_named=False)
        recipe = match.rule.recipe
        if recipe is None:
            return Choice(None, "policy", f"left alone by rule {match.number} of the policy", rule=match.number)
        if match.exact and not isinstance(module, Router):
            return Choice(recipe, forced=True, rule=match.number)
        choice = replace(self._of(recipe, module, is_named=match.names), forced=match.names)
        takes = choice.reason == CONVERT or (choice.reason == KEEP and not choice.why)
        return replace(choice, rule=match.number) if takes else choice


def _starts_or_ends(step: int, before: Choice, after: Choice) -> str:
    gets = f"get {after.recipe}" if before.recipe is None else "lose its recipe"
    return (
        f"it would {gets} at step {step}, and only a layer with a recipe before and after can change it between steps. "
        "Use the recipe bf16 in place of none"
    )


def _with_one_choice(plans: list[Plan]) -> list[Plan]:
    """Return the plans, with a path of a shared layer refused if its recipe differs from the first path's."""
    first: dict[int, Plan] = {}
    found = []
    for plan in plans:
        other = first.setdefault(id(plan.module), plan)
        if (other.choice.recipe, other.choice.later) != (plan.choice.recipe, plan.choice.later):
            why = f"it is the same layer as {other.path}, for which {other.choice.recipe or 'no recipe'} was chosen"
            plan = replace(plan, choice=replace(other.choice, why=why), refused=True)
        found.append(plan)
    return found


def recipe_of(module: nn.Module) -> Recipe | None:
    """Return the recipe that a layer has now; None if it has none."""
    layer = next(iter(layers_of(module)), module)
    return layer.recipe if isinstance(layer, Quantized) else None


def select(
    model: nn.Module, recipe: Any, policy: Any, *, exclude: Any, high_precision: Any, replace_forward: Any,
    overwrite: bool, step: Any,
) -> Selection:  # fmt: skip
    """Check the arguments of `octavo.convert` and return them as a Selection."""
    if isinstance(recipe, Policy) and policy is not None:
        raise UnsupportedConfig(f"convert takes one policy, got {recipe!r} and {policy!r}. Leave one out.")
    if isinstance(recipe, str) and recipe.endswith(".toml"):
        raise UnsupportedConfig(f"convert takes a recipe or a policy, got a file. Use octavo.Policy.load({recipe!r}).")
    if isinstance(recipe, list | tuple | dict):
        raise UnsupportedConfig(
            f"convert takes a recipe or a policy, got a {type(recipe).__name__}. octavo.Policy makes a policy of a "
            "list of rules, octavo.Policy.from_dict of a dict."
        )
    if type(step) is not int or step < 0:
        raise UnsupportedConfig(f"step is the number of steps that the run has made, from 0 up, got {step!r}.")
    rules = next((one for one in (recipe, policy) if isinstance(one, Policy)), None)
    default = None if isinstance(recipe, Policy) else resolve(recipe)
    function = None if isinstance(policy, Policy) else policy
    if function is not None:
        _check_policy(function)
    matched = None if rules is None else MatchedPolicy(rules, model)
    entry_of, spared = _excluded(model, exclude), in_high_precision(model, high_precision)
    classes = _classes(replace_forward)
    return Selection(default, function, matched, step, overwrite, entry_of, spared, classes)


def _classes(given: Any) -> tuple[type[nn.Linear], ...]:
    """Return the classes of `replace_forward`."""
    found = (given,) if isinstance(given, type) or not isinstance(given, Iterable) else tuple(given)
    for one in found:
        if not (isinstance(one, type) and issubclass(one, nn.Linear)):
            raise UnsupportedConfig(
                f"replace_forward takes subclasses of nn.Linear, got {one!r}. A policy gives a recipe to single layers."
            )
    return found


# -- exclude -----------------------------------------------------------------------------------------------------------


def _excluded(model: nn.Module, exclude: Any) -> dict[str, str]:
    """Return a dict from each excluded path to the entry of `exclude` that excludes it. An entry is a path, a glob of
    paths or a class of modules, and also excludes all modules inside."""
    one = isinstance(exclude, (str, type)) or not isinstance(exclude, Iterable)
    entries: Sequence[Any] = () if exclude is None else (exclude,) if one else tuple(exclude)
    modules = dict(model.named_modules(remove_duplicate=False))
    entry_of: dict[str, str] = {}
    for entry in entries:
        if not isinstance(entry, str) and not (isinstance(entry, type) and issubclass(entry, nn.Module)):
            raise UnsupportedConfig(f"exclude takes paths, globs or classes of modules, got {entry!r}.")
        if isinstance(entry, str):
            roots = set(matching(entry, modules))
        else:
            roots = {path for path, module in modules.items() if isinstance(module, entry)}
        if not roots:
            raise UnsupportedConfig(_excludes_nothing(entry, list(modules)))
        name = repr(entry) if isinstance(entry, str) else entry.__qualname__
        inside = (path for path in modules if any(root in roots for root in around(path)))
        entry_of.update((path, name) for path in inside if path not in entry_of)
    return entry_of


def _excludes_nothing(entry: Any, paths: list[str]) -> str:
    if not isinstance(entry, str):
        return f"exclude={entry.__qualname__} is no class of a module in this model. Leave it out."
    way_out = near(entry, paths) or " Use a path of model.named_modules(), a glob or a class."
    return f"exclude={entry!r} is no path of a module in this model.{way_out}"


# -- policy ------------------------------------------------------------------------------------------------------------


def _check_policy(policy: Any) -> None:
    """Raise if a policy cannot be called, or if its parameters are named (module, path)."""
    if not callable(policy):
        raise UnsupportedConfig(
            f"policy is a function of (path, module) or an octavo.Policy, got {policy!r}. exclude= takes names."
        )
    try:
        names = [name.lower() for name in inspect.signature(policy).parameters]
    except (TypeError, ValueError):  # a builtin may have no signature
        return
    if len(names) == 2 and names[0] in _MODULES and names[1] in _PATHS:
        raise UnsupportedConfig(
            f"policy is called as (path, module), and this one takes ({', '.join(names)}). Swap them."
        )


_MODULES = ("module", "mod", "m", "layer", "linear")
_PATHS = ("path", "name", "fqn", "p", "n", "key", "prefix")


def _answer(policy: PolicyFunction, path: str, module: nn.Module) -> Recipe | bool:
    """Return a policy's answer for a layer: a recipe, False to leave it alone, True to let convert decide."""
    try:
        wish = policy(path, module)
    except Exception as error:
        raise UnsupportedConfig(
            f"policy({path!r}, {type(module).__name__}) raised {type(error).__name__}: {error}. It is called as "
            "(path, module), path being a string."
        ) from error
    if wish is None or wish is True:
        return True
    if wish is False:
        return False
    if not isinstance(wish, (str, Recipe)):
        raise UnsupportedConfig(
            f"policy({path!r}, {type(module).__name__}) returned {wish!r}. It returns None or True (convert decides), "
            "False (leave it alone) or a recipe."
        )
    return resolve(wish)


def _is_swapped(policy: PolicyFunction, layers: Sequence[tuple[str, nn.Module]]) -> bool:
    """Return whether a policy takes some layer if it is called as (module, path); a call that raises counts as no."""
    try:
        return any(policy(module, path) for path, module in layers)  # type: ignore[arg-type]
    except Exception:
        return False


# -- what a layer refuses ----------------------------------------------------------------------------------------------


def layer_unsupported_reason(module: nn.Module, choice: Choice, settings: dict[str, bool]) -> str:
    """Return why a layer cannot take the recipes that were chosen for it, or a setting; empty if it can."""
    if isinstance(module, nn.Linear) and not isinstance(module, Quantized):
        return _linear_unsupported_reason(module, choice.forced)
    why = _recipe_unsupported_reason(module, choice.recipe)
    if isinstance(module, Quantized) and not why:
        missing = next((name for name in settings if not hasattr(module, name)), "")
        why = f"a {type(module).__name__} has no {missing}" if missing else ""
    for step, recipe in () if why else choice.later:
        # a layer drops its memory of amaxes before it takes a recipe with state
        if not (isinstance(module, Quantized) and recipe.stateful) and (
            later := _recipe_unsupported_reason(module, recipe)
        ):
            return f"from step {step} on, {later}"
    return why


def _recipe_unsupported_reason(module: Any, recipe: Any) -> str:
    """Return why a layer of Octavo's, or experts, cannot take a recipe; empty if they can."""
    if isinstance(module, Quantized):
        return module._recipe_unsupported_reason(recipe)
    return third_party_experts.unsupported_reason(module, recipe)


def _linear_unsupported_reason(module: nn.Linear, forced: bool) -> str:
    """Return why a module cannot become an octavo.Linear; empty if it can."""
    name = qualified(module)
    if is_parametrized(module):
        return "it is parametrized. Convert it first, then register the parametrization"
    if why := unsupported_codes_reason(module, ["weight"], own_forward=not third_party_linear.is_plain(module)):
        return why
    if third_party_linear.is_patched(module) and third_party_linear.planned_forward(module) is None:
        return third_party_linear.patched_reason(module, name_of(module.forward))
    if not third_party_linear.is_plain(module) and not forced and (why := differs(module)):
        return (
            f"it is a {name}, whose own forward would be lost, and which is not F.linear: it {why}. "
            f"replace_forward={name_of(type(module))} replaces that forward by octavo.Linear's"
        )
    if names := third_party_linear.clashes(module):
        both = ", ".join(names)
        return f"it is a {name}, and has {both} of its own, which octavo.Linear uses. Rename it, or leave the layer out"
    if is_lazy(module.weight):
        return f"it is a {name} without a size yet. Call the model once first"
    if not is_sharded(module.weight) and (why := strange(module.weight)):  # a shard is gathered before each call
        return f"its weight is {why}"
    if why := unsupported_dtype_reason(module.weight.dtype):
        return why
    try:
        third_party_linear.class_for(type(module))
    except Exception as error:  # its metaclass or __init_subclass__ may raise
        return f"its class {name} cannot be subclassed ({type(error).__name__}: {error})"
    return ""


def qualified(module: nn.Module) -> str:
    """Return the qualified name of a module's class; classes of torch.nn by their public names."""
    kind = type(module)
    package = "torch.nn" if kind.__module__.startswith("torch.nn.modules.") else kind.__module__
    return f"{package}.{kind.__qualname__}"


def name_of(function: Any) -> str:
    """Return the name of a function, or of the class of another callable."""
    return getattr(function, "__qualname__", type(function).__name__)
