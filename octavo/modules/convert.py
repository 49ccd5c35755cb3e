"""From `nn.Linear` to `octavo.Linear` and back, in place.

A module changes its class, not its identity: parameters, hooks, references and optimizer states all stay.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from octavo.errors import UnsupportedConfig
from octavo.formats import FLOATS
from octavo.kernels.gemm import native, spec_route
from octavo.modules.linear import Linear
from octavo.modules.quantized import Quantized
from octavo.recipes import Recipe
from octavo.recipes import recipe as resolve

Policy = Callable[[str, nn.Linear], "bool | str | Recipe | None"]


@dataclass(frozen=True)
class Row:
    """What became of one linear layer."""

    path: str
    recipe: str  # empty where it was left alone
    route: str  # native, emulated, reference; or skipped
    why: str = ""


@dataclass(frozen=True)
class Report:
    rows: tuple[Row, ...]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        cells = [("module", "recipe", "route", "why")] + [(r.path or "(model)", r.recipe, r.route, r.why) for r in self]
        widths = [max(len(row[i]) for row in cells) for i in range(4)]
        return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells)


def convert(model: nn.Module, recipe: str | Recipe, policy: Policy | None = None, strict: bool = True) -> Report:
    """Make every nn.Linear in the model an octavo.Linear with this recipe.

    policy(path, module) may return False to leave one alone, or a recipe of its own for it. Strict: a linear layer that
    cannot be converted and is not left alone by the policy is an error, and so is, later, a setting of a converted one
    that torch.compile cannot hold. Otherwise the former is reported as skipped, the latter run outside the graph."""
    default = resolve(recipe)
    planned = [(path, module, _choice(policy, path, module, default)) for path, module in _linears(model)]
    refused = [(path, why) for path, module, choice in planned if choice and (why := _refusal(module, choice))]
    refused += _disagreements(planned)
    if strict and refused:
        path, why = refused[0]
        raise UnsupportedConfig(
            f"convert cannot take {path or 'the model'}: {why}. Leave it out with policy=lambda path, module: "
            f"path != {path!r}, or pass strict=False."
        )
    shared = {path: why for path, why in refused}
    return Report(
        tuple(_converted(path, module, choice, shared.get(path, ""), strict) for path, module, choice in planned)
    )


def revert(model: nn.Module) -> None:
    """Make every octavo.Linear an nn.Linear again; weights held as codes become what the codes stand for, those of
    other layers of ours too."""
    found = [(path, module) for path, module in model.named_modules() if type(module) is Linear]
    for path, module in found:
        if len(module._mailbox):
            raise UnsupportedConfig(
                f"{path or 'The model'} has {len(module._mailbox)} weight gradients pending, which would be lost. "
                "Call backward_dw() for each first, or discard_dw(captured=True)."
            )
    for path, module in model.named_modules():
        if isinstance(module, Linear) and is_parametrized(module):
            raise UnsupportedConfig(
                f"{path or 'The model'} has a parametrization, which made it a class of its own. Remove it first: "
                "torch.nn.utils.parametrize.remove_parametrizations."
            )
    for other in model.modules():
        if isinstance(other, Quantized) and not isinstance(other, Linear):
            other.release_codes()
    for _, module in found:
        module._tear_down()
        module.__dict__.pop("return_bias", None)
        module.__class__ = nn.Linear  # type: ignore[assignment]


def _linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Every path to a linear layer: a shared one has several."""
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.Linear):
            yield path, module


def _choice(policy: Policy | None, path: str, module: nn.Linear, default: Recipe) -> Recipe | None:
    wish = True if policy is None else policy(path, module)
    if wish is False:
        return None
    return default if wish is None or wish is True else resolve(wish)


def _refusal(module: nn.Linear, choice: Recipe) -> str:
    """Why a module cannot become an octavo.Linear of this recipe; empty if it can."""
    if type(module) not in (nn.Linear, Linear):
        return f"it is a {type(module).__qualname__}, whose own behaviour would be lost"
    if isinstance(module, Linear):
        return module.refusal(choice)
    if module.weight.dtype not in FLOATS:
        return f"its weight is {module.weight.dtype}, and float32, bfloat16 or float16 can be quantized"
    return ""


def _disagreements(planned: list[tuple[str, nn.Linear, Recipe | None]]) -> list[tuple[str, str]]:
    """(path, why) for each path of a shared layer that is to be something else than at its first path."""
    first: dict[int, tuple[str, Recipe | None]] = {}
    found = []
    for path, module, choice in planned:
        there, other = first.setdefault(id(module), (path, choice))
        if other != choice:
            found.append((path, f"it is the same layer as {there}, for which the policy chose {other}"))
    return found


def _converted(path: str, module: nn.Linear, choice: Recipe | None, why: str, strict: bool) -> Row:
    if choice is None:
        return Row(path, "", "skipped", why or "left alone by the policy")
    if why:
        return Row(path, "", "skipped", why)
    if isinstance(module, Linear):
        module.recipe = choice  # type: ignore[assignment]
        module.strict = strict
    else:
        module.__class__ = Linear
        module._set_up(choice, strict=strict, path=path)  # type: ignore[operator]
    return Row(path, str(choice), *route(module.weight.device, choice))


def route(device: torch.device, recipe: Recipe) -> tuple[str, str]:
    """How a layer's GEMMs run on a device."""
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
    return "emulated", f"{', '.join(emulated)}: {native.support(gemm.left, gemm.right, device).reason}"
