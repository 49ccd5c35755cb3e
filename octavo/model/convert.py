"""The act: `octavo.convert` and `octavo.revert`, from `nn.Linear` to `octavo.Linear` and back, in place.

    policy.py        what the user wants: rules, and the rule that decides for each layer
    selection.py     what is convertible and why not: a plan for each layer
    convert.py       carries the plans out, and takes them back
    conversion.py    the report

A module changes its class, not its identity: parameters, hooks, references and optimizer states all stay. Experts of
other packages' models are converted by `octavo.model.third_party.third_party_experts`.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from octavo.errors import UnsupportedConfig, check_choice, warn
from octavo.fusion.sequential import Sequential
from octavo.kernels.gemm import native, spec_route
from octavo.model import selection
from octavo.model.conversion import ConversionReport, Row, other_rows
from octavo.model.high_precision import HIGH_PRECISION
from octavo.model.layer_lookup import check_model, refuse_parts
from octavo.model.policy import Policy, PolicyRule
from octavo.model.selection import CONVERT, Plan, PolicyFunction
from octavo.model.third_party import third_party_experts
from octavo.model.third_party.third_party_experts import is_experts, is_third_party
from octavo.model.third_party.third_party_linear import class_for, is_patched, planned_forward, stock_class, unpatch
from octavo.ops.linear import Linear
from octavo.ops.quantized import Quantized
from octavo.recipes import Recipe
from octavo.text import path_names, plural

LITTLE = 0.1  # of the weights: a share below it gains nothing
SETTINGS = ("keep_weight_codes", "save_original_input", "fuse_wgrad_accumulation", "delay_wgrad_compute")
# attributes that must be 0 so that the module calls its layers
_SHORTCUTS = {
    nn.TransformerEncoderLayer: "activation_relu_or_gelu", nn.TransformerEncoder: "use_nested_tensor",
}  # fmt: skip
# attributes of an octavo.Linear's instance that its teardown leaves
_OF_LINEAR = (
    "return_bias", "keep_weight_codes", "save_original_input", "parallel", "column_blocks", "keeps_dtensors",
    "_ranks_checked", "_number", "_codes_chosen", "amax_group", "_sharded",
)  # fmt: skip


def convert(
    model: nn.Module,
    recipe: str | Recipe | Policy,
    policy: PolicyFunction | Policy | None = None,
    *,
    exclude: str | type[nn.Module] | Iterable[str | type[nn.Module]] = (),
    high_precision: str | Iterable[str] = HIGH_PRECISION,
    replace_forward: type[nn.Linear] | Iterable[type[nn.Linear]] = (),
    overwrite: bool = False,
    strict: bool = True,
    step: int = 0,
    keep_weight_codes: bool | None = None,
    save_original_input: bool | None = None,
    fuse_wgrad_accumulation: bool | None = None,
    delay_wgrad_compute: bool | None = None,
) -> ConversionReport:
    """Make every `nn.Linear` of a model an `octavo.Linear` in this recipe, in place.

    It also gives the recipe to every Octavo layer without one, and to the experts of transformers' and torchtitan's
    mixtures. Parameters, hooks, references and optimizer states stay.
    A subclass of `nn.Linear` is converted and stays an instance of its class if it inherits its forward, or if its
    forward is `F.linear` in another form, such as one that casts the weight. convert tries the latter on small random
    tensors.

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
        high_precision: kinds of layers to leave alone: "head" (the layer that predicts tokens or classes), "adapters"
            (factors of low-rank adapters), "routers" (layers that choose experts), "conditioning" (layers of time
            embeddings and of adaptive norms); by default these four. "small" leaves layers with fewer than 512 inputs
            or outputs too. An empty tuple converts all.
        replace_forward: subclasses of `nn.Linear` whose own forward octavo.Linear's is to replace, whatever it does.
        overwrite: also change Octavo layers that have a recipe of their own.
        strict: raise for a linear layer that cannot be converted, and later for a setting of a converted layer that
            torch.compile cannot hold. With False the report lists the former as skipped, and the latter runs outside of
            the graph.
        step: the number of steps that the run has made already, for a policy with rules that begin at a step.
        keep_weight_codes: this setting for the converted layers, as in `octavo.Linear`; None keeps each layer's own.
        save_original_input: this setting for the converted layers, as in `octavo.Linear`; None keeps each layer's own.
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
    given = keep_weight_codes, save_original_input, fuse_wgrad_accumulation, delay_wgrad_compute
    by_name = dict(zip(SETTINGS, given, strict=True))
    settings = {name: value for name, value in by_name.items() if value is not None}
    for name, value in (*settings.items(), ("overwrite", overwrite), ("strict", strict)):
        check_choice(value, (True, False), what=name)
    chosen = selection.select(
        model, recipe, policy, exclude=exclude, high_precision=high_precision, replace_forward=replace_forward,
        overwrite=overwrite, step=step,
    )  # fmt: skip
    plans = chosen.plan(model, settings)
    if strict:
        _raise_refused(plans)
    rows = {plan.path: _applied(plan, strict, settings, step) for plan in plans}
    unused = chosen.unused_rules(plans)
    report = _report(model, plans, rows, unused)
    _warn_of_nothing(model, report, str(chosen.default))
    _warn_of_experts(plans)
    _warn_of_little(report)
    if unused:
        warn(f"octavo.convert: {' '.join(why for _, why in unused)}", stacklevel=2)
    return report


def revert(model: nn.Module) -> None:
    """Undo `convert`: make every `octavo.Linear` of a model an `nn.Linear` again, in place.

    A layer that was a subclass of `nn.Linear` becomes that subclass again. Experts of transformers' and
    torchtitan's mixtures run as before the conversion. Other Octavo layers, and those in a
    `LayerNormLinear` or `LayerNormMLP`, keep their class and lose the recipe that `convert` gave them. Weights stored
    as codes become their dequantized values.

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
    # layers of subclasses of Sequential that require fusions, such as LayerNormMLP, keep their class
    blocks = [m for m in model.modules() if isinstance(m, Sequential) and type(m) is not Sequential and m.require]
    bound = {id(module) for block in blocks for module in block.modules()}
    experts = [(path, module) for path, module in model.named_modules() if is_third_party(module)]
    inside = [(path, layer) for path, module in experts for layer in third_party_experts.layers_of(module)]
    bound |= {id(layer) for _, layer in inside}
    linears = [(path, m) for path, m in model.named_modules() if isinstance(m, Linear) and id(m) not in bound]
    _check_revertible([*linears, *experts], [*linears, *inside])
    changed = {id(module) for _, module in [*linears, *inside]}
    for _, module in experts:
        third_party_experts.revert(module)
    for other in model.modules():
        if isinstance(other, Quantized) and id(other) not in changed:
            other._restore_weight()
            if other._given_recipe:
                other._lose_recipe()
    for _, module in linears:
        _restore_class(module)
    for encoder in model.modules():
        if "_fast_path" in encoder.__dict__:
            name, value = encoder.__dict__.pop("_fast_path")
            setattr(encoder, name, value)


# -- converting --------------------------------------------------------------------------------------------------------


def _refuse_scripted(model: nn.Module) -> None:
    """Raise if a module of the model is TorchScript, whose layers run by code that was compiled for them."""
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            what = repr(path) if path else "the model"
            raise UnsupportedConfig(
                f"octavo.convert takes modules that run as Python, and {what} is TorchScript (torch.jit.script or "
                "torch.jit.trace), which keeps the layers it was made from. Convert the module that it was made from, "
                "and use torch.compile in its place."
            )


def _raise_refused(plans: list[Plan]) -> None:
    """Raise for the first layer that should be converted and cannot be, with all its paths as the way out."""
    refused = next((plan for plan in plans if plan.refused), None)
    if refused is None:
        return
    kind = type(refused.module)
    number = 0 if kind is nn.Linear else sum(plan.refused and type(plan.module) is kind for plan in plans)
    alike = f" ({number} layers are of this class: exclude={selection.qualified(refused.module)})" if number > 1 else ""
    paths = [plan.path for plan in plans if plan.module is refused.module]
    left_out = repr(paths[0]) if len(paths) == 1 else repr(paths)
    raise UnsupportedConfig(
        f"convert cannot take {refused.path or 'the model'}: {refused.choice.why}. Leave it out with "
        f"exclude={left_out}{alike}, or pass strict=False."
    )


def _applied(plan: Plan, strict: bool, settings: dict[str, bool], step: int) -> Row:
    """Convert a layer as planned, and return its row."""
    module: Any = plan.module
    choice = plan.choice
    weights = [p for p in _weights(module) if p is not None and not is_lazy(p)]
    # a parametrized weight is counted by the layer's sizes
    number = sum(p.numel() for p in weights) if weights else module.in_features * module.out_features
    converts = choice.recipe is not None and choice.reason == CONVERT and not plan.refused
    if converts:
        _change(module, plan.path, choice.recipe, strict)
    for layer in third_party_experts.layers_of(module) or [module]:
        if converts or (choice.reason == selection.KEEP and not choice.why):
            for name, value in settings.items():
                setattr(layer, name, value)
            if "keep_weight_codes" in settings:
                layer._codes_chosen = True
        if converts:
            layer._follow_schedule(choice.later, step, choice.since)
    recipe, name, how, why = selection.recipe_of(module), "", "skipped", ""  # a layer left alone may have its own
    if recipe is not None:
        name, (how, why) = str(recipe), route(weights[0].device if weights else torch.device("cpu"), recipe)
    identities = tuple(id(p) for p in weights)
    why = choice.why or why
    return Row(plan.path, plan.kind, name, how, why, choice.reason, number, id(module), identities, choice.rule)


def _weights(module: Any) -> Sequence[nn.Parameter | None]:
    """Return the parameters that a layer multiplies by; None in the place of a parametrized one."""
    if not isinstance(module, nn.Linear | Quantized):
        return third_party_experts.weights_of(module)
    names = ["weight"] if isinstance(module, nn.Linear) else module._names_of_weights()
    return [module._parameters.get(name) for name in names]


def _change(module: Any, path: str, recipe: Any, strict: bool) -> None:
    """Give a layer its recipe; a module that is no layer of Octavo's becomes one, or gets layers inside."""
    if isinstance(module, Quantized):
        module._given_recipe = module.recipe is None or module._given_recipe
        module.recipe = recipe
        module.strict = strict
    elif is_experts(module):
        third_party_experts.convert(module, path, recipe, strict)
    else:
        wrap = planned_forward(module)
        unpatch(module)
        module.__class__ = class_for(type(module))
        module._set_up(recipe, strict=strict, path=path)
        if wrap is not None:
            wrap()


def _changes(planned: list[Plan]) -> Iterator[str]:
    """Yield a note for each sequence of recipes that layers run through."""
    alike: dict[tuple[Any, ...], list[str]] = {}
    for plan in planned:
        if plan.choice.later:
            alike.setdefault((plan.choice.recipe, *plan.choice.later), []).append(plan.path)
    for (first, *later), paths in alike.items():
        changes = "".join(f", {recipe} from step {step} on" for step, recipe in later)
        yield f"{path_names(paths)}: {first}{changes}, as octavo.step or octavo.attach counts the steps."


def _report(
    model: nn.Module, plans: list[Plan], rows: dict[str, Row], unused: list[tuple[PolicyRule, str]]
) -> ConversionReport:
    """Return the report of the layers' rows, those of other modules, and notes on further changes and unused rules."""
    stands = [plan.module for plan in plans if is_experts(plan.module)]
    counted = {id(p) for module in stands for p in third_party_experts.weights_of(module)}
    rows |= {row.path: row for row in other_rows(model, counted) if row.path not in rows}
    order = [path for path, _ in model.named_modules(remove_duplicate=False) if path in rows]
    notes = (*_take_shortcuts_away(model), *_changes(plans), *(why for _, why in unused))
    return ConversionReport(tuple(rows[path] for path in order), notes, tuple(rule for rule, _ in unused))


def _take_shortcuts_away(model: nn.Module) -> Iterator[str]:
    """Turn off the fast path of torch's encoders, and yield a note. In eval mode without gradients an
    nn.TransformerEncoderLayer passes its layers' weights to a fused kernel, and an nn.TransformerEncoder makes nested
    tensors for that kernel."""
    paths = []
    for path, module in model.named_modules():
        name = next((name for kind, name in _SHORTCUTS.items() if isinstance(module, kind)), "")
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
    """Warn if no layer was converted, and none has this recipe already."""
    done = [row for row in report if row.recipe]
    if any(row.reason == CONVERT or row.recipe == recipe or row.rule is not None for row in done):
        return
    if done:
        text = "changed nothing: every layer has a recipe of its own. overwrite=True changes them"
    else:
        text = f"found nothing to convert in this {type(model).__name__}"
    warn(f"octavo.convert {text}. {report.summary()}", stacklevel=3)


def _warn_of_little(report: ConversionReport) -> None:
    """Warn of a conversion that gains nothing, since other kinds of modules do the work."""
    shares = report.shares()
    done, others = shares.get(CONVERT), {kind: shares[kind] for kind in ("convolution", "recurrent") if kind in shares}
    if done is None or not others or done.share >= LITTLE or sum(share.share for share in others.values()) < 0.5:
        return
    listed = ", ".join(f"{kind}: {share}" for kind, share in others.items())
    warn(
        f"octavo.convert took {done.share:.1%} of the weights, and other kinds of modules do the work ({listed}). "
        "Recipes are for matrix products: this conversion gains nothing.",
        stacklevel=3,
    )


def _warn_of_experts(plans: list[Plan]) -> None:
    """Warn of experts that were left although they were to be converted: they hold most of a model's weights."""
    left: dict[str, list[str]] = {}
    for plan in plans:
        if plan.choice.reason == selection.NEVER and not plan.refused and is_experts(plan.module):
            left.setdefault(plan.choice.why, []).append(plan.path or "the model")
    for why, paths in left.items():
        warn(
            f"octavo.convert left {path_names(paths)} as it was: {why}. The rest of the model is converted; "
            "exclude= ends this warning.",
            stacklevel=3,
        )


def route(device: torch.device, recipe: Recipe) -> tuple[str, str]:
    """Return (route, why): how a layer's GEMMs run on a device, and why they are emulated or on the reference."""
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


# -- reverting ---------------------------------------------------------------------------------------------------------


def _check_revertible(modules: Sequence[tuple[str, nn.Module]], layers: Sequence[tuple[str, Quantized]]) -> None:
    """Raise if a module's forward or class is no longer convert's, or a layer's weight gradients would be lost."""
    for path, module in modules:
        if is_patched(module):
            ours = "octavo.Linear" if isinstance(module, nn.Linear) else "the converted module"
            raise UnsupportedConfig(
                f"{path or 'The model'}: its forward was replaced by {selection.name_of(module.forward)} on the "
                f"instance, which would go on calling {ours}'s. Remove it first (accelerate: remove_hook_from_module)."
            )
        if is_parametrized(module) and not is_third_party(module):
            raise UnsupportedConfig(
                f"{path or 'The model'} has a parametrization, which made it a class of its own. Remove it first: "
                "torch.nn.utils.parametrize.remove_parametrizations."
            )
    for path, layer in layers:
        if pending := len(layer._wgrad.queue):
            raise UnsupportedConfig(
                f"{path or 'The model'} has {plural(pending, 'weight gradient')} pending, which would be lost. "
                "Call backward_dw() for each first, or discard_dw(captured=True)."
            )


def _restore_class(module: Linear) -> None:
    """Make an octavo.Linear an instance of its stock class again."""
    unpatch(module)
    module._tear_down()
    for name in _OF_LINEAR:
        module.__dict__.pop(name, None)
    module.__class__ = stock_class(module)  # type: ignore[assignment]
