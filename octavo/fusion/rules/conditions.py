"""Conditions of rules, mostly on a Linear's config, each with the sentence for its refusal."""

from collections.abc import Callable
from typing import Any, NamedTuple

from octavo.fusion.rule import KNOWN_SCALE, Condition

QUANTIZED = "fprop is quantized"
KEPT_AS_CODES = "x is kept as codes"


class On(NamedTuple):
    """A condition on one stage of a pattern, wherever it stands."""

    name: str
    holds: Callable[[Any], Any]  # takes the stage's config
    sentence: str  # braces stand for the names that `at` gets

    def at(self, place: int, *names: str) -> Condition:
        """Return the condition on the stage at this place."""
        return Condition(self.name, lambda configs: bool(self.holds(configs[place])), self.sentence.format(*names))


def _takes_codes(config: Any) -> bool:
    row, column = config.dy_pair
    if config.wants_dw and column is None:
        return False
    return not config.wants_dx or row is not None


_FIRST_STEP = (
    "no octavo.step has seen {} yet: the first step measures it before it is cast, so that it must be written "
    "first; later ones fuse"
)
_X_AS_CODES = (
    On(QUANTIZED, lambda c: c.casts_x, "the recipe multiplies x as it is in fprop, so there is no cast to fuse"),
    On(
        KEPT_AS_CODES, lambda c: c.kept_x != "plain",
        "wgrad is in high precision and needs x itself, which must then be written anyway",
    ),
    On(
        KEPT_AS_CODES, lambda c: c.kept_x != "again",
        "save_original_input=True keeps x itself, which must then be written anyway",
    ),
    On(KNOWN_SCALE, lambda c: not c.measures_x, _FIRST_STEP.format("x")),
)  # fmt: skip
WANTS_GRADIENTS = On(
    "gradients are wanted", lambda c: c.wants_dx or c.wants_dw, "neither x nor the weight wants a gradient here"
)
QUANTIZES_DY = On(
    "dy is taken as codes", _takes_codes,
    "a backward GEMM in high precision needs dy itself, which must then be written anyway",
)  # fmt: skip
RUNS_NOW = On(
    "dW is computed in backward", lambda c: c.deferred_wgrad != "buffers",
    "delay_wgrad_compute=True in a graph has dy's codes go elsewhere",
)  # fmt: skip
_DY_AS_CODES = (
    WANTS_GRADIENTS, QUANTIZES_DY, On(KNOWN_SCALE, lambda c: not c.measures_dy, _FIRST_STEP.format("dy")), RUNS_NOW,
)  # fmt: skip
WANTS_DX = On("dx is wanted", lambda c: c.wants_dx, "nothing before the second {} wants a gradient")
QUANTIZES_WGRAD = On(
    "wgrad is quantized", lambda c: not c.wants_dw or c.kept_x == "column",
    "{} keeps x otherwise than as column codes",
)  # fmt: skip
KEEPS_H = On("h is kept", lambda c: c.keeps_x, "the activation keeps nothing that its value could be made of")
NO_SCALE_GRADIENT = On(
    "row scales want no gradient", lambda c: not c.wants_ds,
    "the gradient of row scales is a sum over whole rows, in a pass of its own",
)  # fmt: skip
ONE_DIM = On(
    "rows are of one dim", lambda c: c.dims == 1, "normalized_shape has several dims, and a Linear contracts over one"
)


def x_as_codes(place: int) -> tuple[Condition, ...]:
    """Return the conditions on a layer whose x a kernel writes as codes."""
    return tuple(condition.at(place) for condition in _X_AS_CODES)


def dy_as_codes(place: int) -> tuple[Condition, ...]:
    """Return the conditions on a layer whose dy a kernel writes as codes."""
    return tuple(condition.at(place) for condition in _DY_AS_CODES)
