"""fp8-delayed: one scale per tensor, from the amaxes of earlier steps, so that each tensor is read only once.

The fastest FP8 recipe, and the only one with state: see `octavo.quant.DelayedState`. E4M3 forward, E5M2 for gradients.
"""

from octavo.errors import UnsupportedConfig, check_choice
from octavo.formats import E4M3, E5M2, Format, check_format
from octavo.quant import Tensorwise
from octavo.quant.state import ALGORITHMS, COLD_STARTS, check_margin
from octavo.recipes.recipe import LinearQuant, Recipe
from octavo.values import register


@register("fp8-delayed")
class Delayed(Recipe):
    """Tensorwise scales from the amaxes of earlier steps."""

    grad_format: Format = E5M2
    history: int = 1024  # steps in the window of amaxes
    algorithm: str = "max"  # the window's maximum, or its "most_recent" entry
    margin: int = 0  # powers of two kept free above the largest amax
    cold_start: str = "current"  # until a step has seen a tensor, scale it by its own amax; "one": by 1
    fprop: str = "quantized"
    dgrad: str = "quantized"
    wgrad: str = "quantized"
    backward: str = "quantized"
    fast: tuple[str, ...] = ("fprop",)

    stateful = True

    def gemms(self) -> LinearQuant:
        x, dy = Tensorwise(), Tensorwise(self.grad_format)
        return LinearQuant.of(x=(x, x), w=(x, x), dy=(dy, dy), fast=self.fast)

    def validate(self) -> None:
        super().validate()
        check_format(self.grad_format, (E4M3, E5M2), what="Delayed.grad_format")
        check_choice(self.algorithm, ALGORITHMS, what="Delayed.algorithm")
        check_choice(self.cold_start, COLD_STARTS, what="Delayed.cold_start")
        if type(self.history) is not int or not 1 <= self.history <= 2**20:
            raise UnsupportedConfig(f"Delayed.history is an int from 1 to 2^20 steps, got {self.history!r}.")
        check_margin(self.margin, what="Delayed.margin")
