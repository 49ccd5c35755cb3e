"""From `nn.Linear` to `octavo.Linear` and back, in place.

A module changes its class, not its identity: parameters, hooks, references and optimizer states all stay.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import nn

from octavo.errors import UnsupportedConfig
from octavo.kernels.gemm import native, spec_route
from octavo.modules.linear import SEED, Linear
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
    cannot be converted and is not left alone by the policy is an error; otherwise it is reported as skipped."""
    default = resolve(recipe)
    planned = [(path, module, _choice(policy, path, module, default)) for path, module in _linears(model)]
    refused = [(path, why) for path, module, choice in planned if choice and (why := _refusal(module))]
    if strict and refused:
        path, why = refused[0]
        raise UnsupportedConfig(
            f"convert cannot take {path or 'the model'}: {why}. Leave it out with policy=lambda path, module: "
            f"path != {path!r}, or pass strict=False."
        )
    return Report(tuple(_converted(path, module, choice) for path, module, choice in planned))


def revert(model: nn.Module) -> None:
    """Make every octavo.Linear an nn.Linear again; weights held as codes become what the codes stand for."""
    for _, module in list(_linears(model)):
        if type(module) is Linear:
            module.release_codes()
            module._codes.drop(module)
            module._scaling.drop(module)
            module._buffers.pop(SEED, None)
            module._non_persistent_buffers_set.discard(SEED)
            for name in _OWN:
                del module.__dict__[name]
            module.__class__ = nn.Linear  # type: ignore[assignment]


_OWN = (
    "return_bias",
    "fuse_wgrad_accumulation",
    "delay_wgrad_compute",
    "_codes",
    "_scaling",
    "_mailbox",
    "_recipe",
    "_seed",
    "_last",
    "_pending",
)


def _linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear):
            yield path, module


def _choice(policy: Policy | None, path: str, module: nn.Linear, default: Recipe) -> Recipe | None:
    wish = True if policy is None else policy(path, module)
    if wish is False:
        return None
    return default if wish is None or wish is True else resolve(wish)


def _refusal(module: nn.Linear) -> str:
    """Why a module cannot change its class; empty if it can."""
    if type(module) in (nn.Linear, Linear):
        return ""
    return f"it is a {type(module).__qualname__}, whose own behaviour would be lost"


def _converted(path: str, module: nn.Linear, choice: Recipe | None) -> Row:
    if choice is None:
        return Row(path, "", "skipped", "left alone by the policy")
    if why := _refusal(module):
        return Row(path, "", "skipped", why)
    if isinstance(module, Linear):
        module.recipe = choice  # type: ignore[assignment]
    else:
        module.__class__ = Linear
        module._set_up(choice, path=path)  # type: ignore[operator]
    return Row(path, str(choice), *_route(module, choice))


def _route(module: nn.Linear, recipe: Recipe) -> tuple[str, str]:
    """How the layer's GEMMs run on the device it is on."""
    device, quant = module.weight.device, recipe.linear()
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
