"""`octavo.convert` and `octavo.revert`: from `nn.Linear` to `octavo.Linear` and back, in place.

A module changes its class, not its identity: parameters, hooks, references and optimizer states all stay. Experts of
other libraries' models are converted by `octavo.model.third_party.third_party_experts`.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

from octavo._torch.tensors import is_sharded
from octavo.errors import UnsupportedConfig, check_choice, warn
from octavo.fusion.sequential import Sequential
from octavo.kernels.gemm import native, spec_route
from octavo.model.conversion import ConversionReport, Row
from octavo.model.layer_lookup import check_model, refuse_parts
from octavo.model.matrices import holders, qualified, why_left
from octavo.model.policy import Policy
from octavo.model.selection import (
    CONVERT,
    HIGH_PRECISION,
    KEEP,
    NEVER,
    Choice,
    PolicyFunction,
    Selection,
    is_swapped,
    recipe_of,
    select,
)
from octavo.model.third_party import third_party_experts
from octavo.model.third_party.third_party_experts import is_experts, is_third_party
from octavo.model.third_party.third_party_linear import clashes, class_for, is_patched, is_plain, stock_class, unpatch
from octavo.ops.inputs import strange
from octavo.ops.linear import Linear
from octavo.ops.published_codes import unsupported_codes_reason
from octavo.ops.quantized import Quantized, unsupported_dtype_reason
from octavo.recipes import Recipe
from octavo.text import path_names, plural

SETTINGS = ("keep_weight_codes", "fuse_wgrad_accumulation", "delay_wgrad_compute")
# attributes that must be 0 so that the module calls its layers
_SHORTCUTS: dict[Any, str] = {
    nn.TransformerEncoderLayer: "activation_relu_or_gelu", nn.TransformerEncoder: "use_nested_tensor",
}  # fmt: skip


@dataclass(frozen=True)
class _Planned:
    """One path to a layer, and the choice for it."""

    path: str
    module: nn.Module
    kind: str  # the name of its class before the conversion
    choice: Choice
    refused: bool = False  # it should be converted, but cannot be


def _refuse_scripted(model: nn.Module) -> None:
    """Raises if a module of the model is TorchScript, whose layers run by code that was compiled for them."""
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            what = repr(path) if path else "the model"
            raise UnsupportedConfig(
                f"octavo.convert takes modules that run as Python, and {what} is TorchScript (torch.jit.script or "
                "torch.jit.trace), which keeps the layers it was made from. Convert the module that it was made from, "
                "and use torch.compile in its place."
            )


def convert(
    model: nn.Module,
    recipe: str | Recipe | Policy,
    policy: PolicyFunction | Policy | None = None,
    *,
    exclude: str | type[nn.Module] | Iterable[str | type[nn.Module]] = (),
    high_precision: str | Iterable[str] = HIGH_PRECISION,
    overwrite: bool = False,
    strict: bool = True,
    step: int = 0,
    keep_weight_codes: bool | None = None,
    fuse_wgrad_accumulation: bool | None = None,
    delay_wgrad_compute: bool | None = None,
) -> ConversionReport:
    """Makes every `nn.Linear` of a model an `octavo.Linear` in this recipe, in place.

    It also gives the recipe to every Octavo layer without one, and to the experts of transformers' and torchtitan's
    mixtures. Parameters, hooks, references and optimizer states stay.
    A subclass of `nn.Linear` that inherits its forward is converted and stays an instance of its class.

    Args:
        model: the model, which is changed in place.
        recipe: a name such as "fp8-current", a canonical string or a `Recipe`; or an `octavo.Policy`, which leaves
            layers alone that no rule of it matches.
        policy: an `octavo.Policy` for layers that are to get another recipe, or a function `policy(path, module)`. The
            function returns False to leave a layer alone, or a recipe for it, also for
            an output head, an adapter, a layer with a recipe of its own and a subclass with a forward of its own. None
            and True leave the decision to convert.
        exclude: layers to leave alone, with all modules inside them: a path, a glob of paths or a class of modules, or
            several of these.
        high_precision: kinds of layers to leave alone: "head" (the layer that predicts tokens), "adapters" (factors of
            low-rank adapters), "routers" (layers that choose experts). An empty tuple converts them.
        overwrite: also change Octavo layers that have a recipe of their own.
        strict: raise for a linear layer that cannot be converted, and later for a setting of a converted layer that
            torch.compile cannot hold. With False the report lists the former as skipped, and the latter runs outside of
            the graph.
        step: the number of steps that the run has made already, for a policy with rules that begin at a step.
        keep_weight_codes: this setting for the converted layers, as in `octavo.Linear`; None keeps each layer's own.
        fuse_wgrad_accumulation: this setting for the converted layers, as in `octavo.Linear`; None keeps each layer's
            own.
        delay_wgrad_compute: this setting for the converted layers, as in `octavo.Linear`; None keeps each layer's own.

    Returns:
        A report with a row for every module that holds a matrix. It tells which were converted, and why others were
            not. Print it, or read its `rows`.

    Raises:
        UnsupportedConfig: an argument is invalid, or a layer cannot be converted and `strict` is set. The model is then
            unchanged.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        >>> print(octavo.convert(model, "fp8-current", exclude="2").summary())
        Converted 1 layer (50.0% of the weights); excluded: 1 layer (50.0% of the weights).
    """
    check_model(model, "convert", recipe, UnsupportedConfig)
    _refuse_scripted(model)
    by_name = dict(zip(SETTINGS, (keep_weight_codes, fuse_wgrad_accumulation, delay_wgrad_compute), strict=True))
    settings = {name: value for name, value in by_name.items() if value is not None}
    for name, value in (*settings.items(), ("overwrite", overwrite), ("strict", strict)):
        check_choice(value, (True, False), what=name)
    chosen = select(
        model, recipe, policy, exclude=exclude, high_precision=high_precision, overwrite=overwrite, step=step
    )
    planned = _plan(model, chosen, settings)
    refused = next((plan for plan in planned if plan.refused), None)
    if strict and refused is not None:
        kind = type(refused.module)
        number = 0 if kind is nn.Linear else sum(plan.refused and type(plan.module) is kind for plan in planned)
        alike = f" ({number} layers are of this class: exclude={qualified(refused.module)})" if number > 1 else ""
        paths = [plan.path for plan in planned if plan.module is refused.module]
        left_out = repr(paths[0]) if len(paths) == 1 else repr(paths)
        raise UnsupportedConfig(
            f"convert cannot take {refused.path or 'the model'}: {refused.choice.why}. Leave it out with "
            f"exclude={left_out}{alike}, or pass strict=False."
        )
    rows = {plan.path: _applied(plan, strict, settings, step) for plan in planned}
    rows |= {row.path: row for row in _others(model) if row.path not in rows}
    order = [path for path, _ in model.named_modules(remove_duplicate=False) if path in rows]
    notes = [*_take_shortcuts_away(model), *_changes(planned)]
    unused = [] if chosen.rules is None else chosen.rules.unused(rule for plan in planned for rule in plan.choice.used)
    report = ConversionReport(
        tuple(rows[path] for path in order),
        (*notes, *(why for _, why in unused)),
        tuple(rule for rule, _ in unused),
    )
    _warn_of_nothing(model, report, str(chosen.default))
    if unused:
        warn(f"octavo.convert: {' '.join(why for _, why in unused)}", stacklevel=2)
    return report


def revert(model: nn.Module) -> None:
    """Undoes `convert`: makes every `octavo.Linear` of a model an `nn.Linear` again, in place.

    A layer that was a subclass of `nn.Linear` becomes that subclass again. Experts of transformers' and
    torchtitan's mixtures run as before the conversion. Other Octavo layers, and those in a
    `LayerNormLinear` or `LayerNormMLP`, keep their class and lose the recipe that `convert` gave them. Weights held as
    codes become their dequantized values.

    Args:
        model: the model, which is changed in place.

    Raises:
        UnsupportedConfig: `model` is no module; or a layer has weight gradients that wait for `backward_dw()`, a
            parametrization, a forward that was replaced on the instance, or a weight that is split over ranks. The
            model is then unchanged.

    Example:
        >>> model = nn.Sequential(nn.Linear(16, 8))
        >>> report = octavo.convert(model, "fp8-current")
        >>> octavo.revert(model)
        >>> type(model[0]) is nn.Linear
        True
    """
    check_model(model, "revert", error=UnsupportedConfig)
    refuse_parts(model, "revert", "Load a checkpoint of the ranks into a model without parallel layers.")
    # subclasses of Sequential that require fusions, such as LayerNormMLP
    blocks = [m for m in model.modules() if isinstance(m, Sequential) and type(m) is not Sequential and m.require]
    bound = {id(module) for block in blocks for module in block.modules()}
    linears = [(path, m) for path, m in model.named_modules() if isinstance(m, Linear) and id(m) not in bound]
    experts = [(path, module) for path, module in model.named_modules() if is_third_party(module)]
    inside = [(path, layer) for path, module in experts for layer in third_party_experts.layers_of(module)]
    for path, module in [*linears, *experts]:
        if is_patched(module):
            ours = "octavo.Linear" if isinstance(module, nn.Linear) else "the converted module"
            raise UnsupportedConfig(
                f"{path or 'The model'}: its forward was replaced by {_name_of(module.forward)} on the instance, which "
                f"would go on calling {ours}'s. Remove it first (accelerate: remove_hook_from_module)."
            )
        if is_parametrized(module) and not is_third_party(module):
            raise UnsupportedConfig(
                f"{path or 'The model'} has a parametrization, which made it a class of its own. Remove it first: "
                "torch.nn.utils.parametrize.remove_parametrizations."
            )
    for path, layer in [*linears, *inside]:
        if pending := len(layer._wgrad.queue):
            raise UnsupportedConfig(
                f"{path or 'The model'} has {plural(pending, 'weight gradient')} pending, which would be lost. "
                "Call backward_dw() for each first, or discard_dw(captured=True)."
            )
    changed = {id(module) for _, module in [*linears, *inside]}
    for _, module in experts:
        third_party_experts.release(module)
    for other in model.modules():
        if isinstance(other, Quantized) and id(other) not in changed:
            other._release_codes()
            if other._given_recipe:
                other._lose_recipe()
    for _, module in linears:
        unpatch(module)
        module._tear_down()
        for name in (
            "return_bias", "keep_weight_codes", "parallel", "column_blocks", "keeps_dtensors", "_ranks_checked",
            "_number",
        ):  # fmt: skip
            module.__dict__.pop(name, None)
        module.__class__ = stock_class(module)  # type: ignore[assignment]
    for encoder in model.modules():
        if "_fast_path" in encoder.__dict__:
            name, value = encoder.__dict__.pop("_fast_path")
            setattr(encoder, name, value)


# -- planning ----------------------------------------------------------------------------------------------------------


def _plan(model: nn.Module, chosen: Selection, settings: dict[str, bool]) -> list[_Planned]:
    """Returns a plan for every path to a linear layer or an Octavo layer; a shared layer has several paths."""
    modules = list(model.named_modules(remove_duplicate=False))
    inside = {id(layer) for _, module in modules for layer in third_party_experts.layers_of(module)}
    layers = [
        (path, module)
        for path, module in modules
        if (isinstance(module, (nn.Linear, Quantized)) and id(module) not in inside) or is_experts(module)
    ]
    planned = [_planned(path, module, chosen.choose(path, module), settings) for path, module in layers]
    if chosen.policy is not None and layers and all(plan.choice.reason == "policy" for plan in planned):
        if is_swapped(chosen.policy, layers):
            raise UnsupportedConfig(
                "policy left every layer alone as policy(path, module), and takes some as policy(module, path). Swap "
                "its parameters."
            )
    return _all_reduced(planned)


def _planned(path: str, module: nn.Module, choice: Choice, settings: dict[str, bool]) -> _Planned:
    why = ""
    if choice.recipe is not None and choice.reason == CONVERT:
        if isinstance(module, Quantized):
            why = module._recipe_unsupported_reason(choice.recipe) or _unknown_setting(module, settings)
        elif isinstance(module, nn.Linear):
            why = _unsupported_reason(module, choice.forced)
        else:
            why = third_party_experts.unsupported_reason(module, choice.recipe)
        why = why or _later_refusal(module, choice)
    if why:
        choice = Choice(None, NEVER, why, used=choice.used)
    return _Planned(path, module, qualified(module), choice, refused=choice.reason == NEVER)


def _later_refusal(module: nn.Module, choice: Choice) -> str:
    """Returns why a layer cannot take a recipe that a policy has for a later step; empty if it can."""
    for step, recipe in choice.later:
        why = ""
        if is_experts(module):
            why = third_party_experts.unsupported_reason(module, recipe)
        elif isinstance(module, Quantized) and not recipe.stateful:  # memory of amaxes is dropped before one with state
            why = module._recipe_unsupported_reason(recipe)
        if why:
            return f"from step {step} on, {why}"
    return ""


def _unknown_setting(module: Quantized, settings: dict[str, bool]) -> str:
    missing = next((name for name in settings if not hasattr(module, name)), "")
    return f"a {type(module).__name__} has no {missing}" if missing else ""


def _unsupported_reason(module: nn.Linear, forced: bool) -> str:
    """Returns why a module cannot become an octavo.Linear; empty if it can."""
    name = qualified(module)
    if is_parametrized(module):
        return "it is parametrized. Convert it first, then register the parametrization"
    if why := unsupported_codes_reason(module, ["weight"], own_forward=not is_plain(module)):
        return why
    if is_patched(module):
        return f"its forward was replaced by {_name_of(module.forward)} on the instance. Convert it before that"
    if not is_plain(module) and not forced:
        return (
            f"it is a {name}, whose own forward would be lost. A policy that returns a recipe for it replaces that "
            "forward by octavo.Linear's"
        )
    if names := clashes(module):
        both = ", ".join(names)
        return f"it is a {name}, and has {both} of its own, which octavo.Linear uses. Rename it, or leave the layer out"
    if is_lazy(module.weight):
        return f"it is a {name} without a size yet. Call the model once first"
    if not is_sharded(module.weight) and (why := strange(module.weight)):  # a shard is gathered before each call
        return f"its weight is {why}"
    if why := unsupported_dtype_reason(module.weight.dtype):
        return why
    try:
        class_for(type(module))
    except Exception as error:  # its metaclass or __init_subclass__ may raise
        return f"its class {name} cannot be subclassed ({type(error).__name__}: {error})"
    return ""


def _name_of(function: Any) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


def _all_reduced(planned: list[_Planned]) -> list[_Planned]:
    """Returns the plans, with a path of a shared layer refused if its recipe differs from the first path's."""
    first: dict[int, _Planned] = {}
    found = []
    for plan in planned:
        other = first.setdefault(id(plan.module), plan)
        if (other.choice.recipe, other.choice.later) != (plan.choice.recipe, plan.choice.later):
            why = f"it is the same layer as {other.path}, for which {other.choice.recipe or 'no recipe'} was chosen"
            plan = replace(plan, choice=replace(other.choice, why=why), refused=True)
        found.append(plan)
    return found


# -- converting --------------------------------------------------------------------------------------------------------


def _applied(plan: _Planned, strict: bool, settings: dict[str, bool], step: int) -> Row:
    """Converts a layer as planned, and returns its row."""
    module: Any = plan.module
    kind, names = plan.kind, _weight_names(module)
    weights = [p for name in names if (p := module._parameters.get(name)) is not None and not is_lazy(p)]
    choice = plan.choice
    shape: Any = dict(
        weights=_count(weights, module), module=id(module), identities=tuple(id(p) for p in weights), rule=choice.rule
    )
    if choice.reason == KEEP and not choice.why:
        _set(module, settings)
    if choice.recipe is not None and choice.reason == CONVERT and not plan.refused:
        _change(module, plan.path, choice.recipe, strict, settings)
        for layer in third_party_experts.layers_of(module) or [module]:
            layer._follow_schedule(choice.later, step, choice.since)
    recipe = recipe_of(module)  # a layer left alone may have its own
    if recipe is None:
        return Row(plan.path, kind, "", "skipped", choice.why, choice.reason, **shape)
    how, why = route(weights[0].device if weights else torch.device("cpu"), recipe)
    return Row(plan.path, kind, str(recipe), how, choice.why or why, choice.reason, **shape)


def _weight_names(module: Any) -> Sequence[str]:
    if isinstance(module, nn.Linear):
        return ["weight"]
    names: Sequence[str] = (
        module._names_of_weights() if isinstance(module, Quantized) else third_party_experts.weight_names(module)
    )
    return names


def _count(weights: Sequence[Any], module: Any) -> int:
    """Counts the elements of a layer's weight; a parametrized weight is counted by the layer's sizes."""
    return sum(p.numel() for p in weights) if weights else module.in_features * module.out_features


def _change(module: Any, path: str, recipe: Recipe, strict: bool, settings: dict[str, bool]) -> None:
    if isinstance(module, Quantized):
        module._given_recipe = module.recipe is None or module._given_recipe
        module.recipe = recipe  # type: ignore[assignment]
        module.strict = strict
    elif is_experts(module):
        third_party_experts.adopt(module, path, recipe, strict)
    else:
        unpatch(module)
        module.__class__ = class_for(type(module))
        module._set_up(recipe, strict=strict, path=path)
    _set(module, settings)


def _set(module: Any, settings: dict[str, bool]) -> None:
    for layer in third_party_experts.layers_of(module) or [module]:
        for name, value in settings.items():
            setattr(layer, name, value)


def _changes(planned: list[_Planned]) -> Iterator[str]:
    """Yields a note for each sequence of recipes that layers run through."""
    alike: dict[tuple[Any, ...], list[str]] = {}
    for plan in planned:
        if plan.choice.later:
            alike.setdefault((plan.choice.recipe, *plan.choice.later), []).append(plan.path)
    for (first, *later), paths in alike.items():
        changes = "".join(f", {recipe} from step {step} on" for step, recipe in later)
        yield f"{path_names(paths)}: {first}{changes}, as octavo.step or octavo.attach counts the steps."


def _others(model: nn.Module) -> Iterator[Row]:
    """Yields rows of modules that hold matrices but are not linear layers."""
    for path, module, found in holders(model):
        above = path.rpartition(".parametrizations.")[0]
        if isinstance(module, ParametrizationList) and isinstance(model.get_submodule(above), (nn.Linear, Quantized)):
            continue  # the row of its layer counts the weight
        reason, why = why_left(module, found)
        weights, ids = sum(p.numel() for p in found.values()), tuple(id(p) for p in found.values())
        yield Row(path, qualified(module), "", "skipped", why, reason, weights, id(module), ids)


def _take_shortcuts_away(model: nn.Module) -> Iterator[str]:
    """Turns off the fast path of torch's encoders, and yields a note. In eval mode without gradients an
    nn.TransformerEncoderLayer passes its layers' weights to a fused kernel, and an nn.TransformerEncoder makes nested
    tensors for that kernel."""
    paths = []
    for path, module in model.named_modules():
        name = _SHORTCUTS.get(next((kind for kind in _SHORTCUTS if isinstance(module, kind)), None), "")
        if name and getattr(module, name, False) and any(isinstance(inner, Linear) for inner in module.modules()):
            module._fast_path = (name, getattr(module, name))
            setattr(module, name, 0)
            paths.append(path)
    if paths:
        yield (
            f"{path_names(paths)}: the fast path of torch's encoder layers in eval mode is off, since it reads the "
            "weights and does not call the layers."
        )


def _warn_of_nothing(model: nn.Module, report: ConversionReport, recipe: str) -> None:
    """Warns if no layer was converted, and none has this recipe already."""
    done = [row for row in report if row.recipe]
    if any(row.reason == CONVERT or row.recipe == recipe or row.rule is not None for row in done):
        return
    if done:
        text = "changed nothing: every layer has a recipe of its own. overwrite=True changes them"
    else:
        text = f"found nothing to convert in this {type(model).__name__}"
    warn(f"octavo.convert {text}. {report.summary()}", stacklevel=3)


def route(device: torch.device, recipe: Recipe) -> tuple[str, str]:
    """Returns (route, why): how a layer's GEMMs run on a device, and why they are emulated or on the reference."""
    quant = recipe.linear()
    if device.type == "meta":
        return "reference", "on the meta device: moved elsewhere, it runs as that device can"
    routes = {}
    for name in ("fprop", "dgrad", "wgrad"):
        gemm = getattr(quant, name)
        routes[name] = spec_route(gemm.left, gemm.right, device)
    emulated = [name for name, route in routes.items() if route == "emulated"]
    if not emulated:
        return routes["fprop"], ""
    gemm = getattr(quant, emulated[0])
    why = native.support(gemm.left, gemm.right, device).reason or "octavo.backend.use('emulated') is in force"
    return "emulated", f"{', '.join(emulated)}: {why}"
