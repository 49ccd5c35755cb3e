"""Conditions of rules, mostly on a Linear's config, each with the sentence for its refusal."""

from collections.abc import Sequence
from typing import Any

from octavo.fusion.rule import KNOWN_SCALE, Condition

QUANTIZED = "fprop is quantized"
KEPT_AS_CODES = "x is kept as codes"


def of(place: int, name: str, holds: Any, sentence: str) -> Condition:
    """Return a condition on one stage of a pattern."""

    def asked(configs: Sequence[Any]) -> bool:
        return bool(holds(configs[place]))

    return Condition(name, asked, sentence)


def quantizes_x(place: int) -> Condition:
    return of(
        place, QUANTIZED, lambda c: c.casts_x,
        "the recipe multiplies x as it is in fprop, so there is no cast to fuse",
    )  # fmt: skip


def keeps_codes_of_x(place: int) -> Condition:
    return of(
        place, KEPT_AS_CODES, lambda c: c.kept_x != "plain",
        "wgrad is in high precision and needs x itself, which must then be written anyway",
    )  # fmt: skip


def casts_x_once(place: int) -> Condition:
    return of(
        place, KEPT_AS_CODES, lambda c: c.kept_x != "again",
        "save_original_input=True keeps x itself, which must then be written anyway",
    )  # fmt: skip


def knows_scale_of_x(place: int) -> Condition:
    return of(place, KNOWN_SCALE, lambda c: not c.measures_x, _first_step("x"))


def knows_scale_of_dy(place: int) -> Condition:
    return of(place, KNOWN_SCALE, lambda c: not c.measures_dy, _first_step("dy"))


def _first_step(name: str) -> str:
    return (
        f"no octavo.step has seen {name} yet: the first step measures it before it is cast, so that it must be written "
        "first; later ones fuse"
    )


def x_as_codes(place: int) -> tuple[Condition, ...]:
    """Return the conditions on a layer whose x a kernel writes as codes."""
    return quantizes_x(place), keeps_codes_of_x(place), casts_x_once(place), knows_scale_of_x(place)


def dy_as_codes(place: int) -> tuple[Condition, ...]:
    """Return the conditions on a layer whose dy a kernel writes as codes."""
    return wants_gradients(place), quantizes_dy(place), knows_scale_of_dy(place), runs_now(place)


def wants_dx(place: int, layer: str) -> Condition:
    return of(place, "dx is wanted", lambda c: c.wants_dx, f"nothing before the second {layer} wants a gradient")


def quantizes_wgrad(place: int, layer: str) -> Condition:
    return of(
        place, "wgrad is quantized", lambda c: not c.wants_dw or c.kept_x == "column",
        f"{layer} keeps x otherwise than as column codes",
    )  # fmt: skip


def keeps_h(place: int) -> Condition:
    return of(place, "h is kept", lambda c: c.keeps_x, "the activation keeps nothing that its value could be made of")


def wants_gradients(place: int) -> Condition:
    return of(
        place, "gradients are wanted", lambda c: c.wants_dx or c.wants_dw,
        "neither x nor the weight wants a gradient here",
    )  # fmt: skip


def quantizes_dy(place: int) -> Condition:
    return of(
        place, "dy is taken as codes", _takes_codes,
        "a backward GEMM in high precision needs dy itself, which must then be written anyway",
    )  # fmt: skip


def _takes_codes(config: Any) -> bool:
    row, column = config.dy_pair
    if config.wants_dw and column is None:
        return False
    return not config.wants_dx or row is not None


def runs_now(place: int) -> Condition:
    return of(
        place, "dW is computed in backward", lambda c: c.deferred_wgrad != "buffers",
        "delay_wgrad_compute=True in a graph has dy's codes go elsewhere",
    )  # fmt: skip


def no_scale_gradient(place: int) -> Condition:
    return of(
        place, "row scales want no gradient", lambda c: not c.wants_ds,
        "the gradient of row scales is a sum over whole rows, in a pass of its own",
    )  # fmt: skip


def one_dim(place: int) -> Condition:
    return of(
        place, "rows are of one dim", lambda c: c.dims == 1,
        "normalized_shape has several dims, and a Linear contracts over one",
    )  # fmt: skip
