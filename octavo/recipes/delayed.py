"""fp8-delayed: one scale per tensor, from the amaxes of earlier steps, so that each tensor is read only once.

The only recipe with state: see `octavo.quant.DelayedState`. E4M3 forward, E5M2 for gradients.
"""

from dataclasses import field

from octavo.errors import UnsupportedConfig, check_choice
from octavo.formats import E5M2, Format
from octavo.quant import Tensorwise
from octavo.recipes.amax_algorithms import ALGORITHMS, COLD_STARTS, check_margin
from octavo.recipes.recipe import LinearQuant, Overridable
from octavo.values import register


@register("fp8-delayed")
class Delayed(Overridable):
    """`fp8-delayed`: FP8 with one scale for each tensor, from its amaxes in earlier steps.

    Use it where the casts cost time: the scale is known beforehand, so a kernel reads each tensor once, and a fused
    producer writes codes directly. It is the only recipe with state. Call `octavo.step(model)` after each optimizer
    step, or `octavo.attach(model, optimizer)` once, and save `octavo.state_dict(model)` with a checkpoint. A tensor
    that grows between steps beyond the margin saturates until the next step.

        fprop   x E4M3 · w E4M3            fast accumulation
        dgrad   dy grad_format · w E4M3    precise
        wgrad   dy grad_format · x E4M3    precise

    Args:
        grad_format: format of dy, E5M2 by default, for its range. E4M3 has one mantissa bit more.
        history: steps in the window of amaxes, 1024 by default, at most 2^20. A shorter window forgets a spike sooner.
        algorithm: "max", the default, scales by the window's largest amax; "most_recent" by its newest, which follows
            the tensor faster and saturates more often.
        margin: 0 by default: powers of two to keep free above that amax, -64 to 64. Raise it if tensors grow quickly
            and saturate.
        cold_start: "current", the default, scales a tensor by its own amax until a step has seen it. "one" starts with
            an inverse scale of 1 and measures nothing, which flushes gradients below 2^-17 to zero in the first step.
        fast: ("fprop",) by default: the GEMMs in which the GPU may accumulate FP8 products in fewer bits. The others
            promote their sum to float32 every 128 products. Use () for the most exact sums.

    Overrides of single GEMMs, which `octavo.recipes.Recipe` describes: fprop, dgrad, wgrad, backward.

    Raises:
        UnsupportedConfig: a setting has a value without a meaning.

    Example:
        >>> model = nn.Sequential(nn.Linear(32, 32))
        >>> report = octavo.convert(model, octavo.recipes.Delayed(history=16))
        >>> model(torch.randn(4, 32)).sum().backward()
        >>> octavo.step(model)
        >>> model[0].recipe
        fp8-delayed(history=16)
    """

    grad_format: Format = E5M2
    history: int = 1024
    algorithm: str = "max"
    margin: int = 0
    cold_start: str = "current"
    fast: tuple[str, ...] = field(default=("fprop",), kw_only=True)  # after the overrides

    stateful = True

    def gemms(self) -> LinearQuant:
        x, dy = Tensorwise(), Tensorwise(self.grad_format)
        return LinearQuant.of(x=(x, x), w=(x, x), dy=(dy, dy), fast=self.fast)

    def validate(self) -> None:
        super().validate()
        if callable(self.algorithm):
            raise UnsupportedConfig(
                "Delayed.algorithm is a name, 'max' or 'most_recent', because a recipe is data: it is saved in "
                f"checkpoints and is a constant of a graph. Got the function {self.algorithm!r}. 'max' with history= "
                "and margin= covers a window and a safety factor."
            )
        check_choice(self.algorithm, ALGORITHMS, what="Delayed.algorithm")
        check_choice(self.cold_start, COLD_STARTS, what="Delayed.cold_start")
        if type(self.history) is not int or not 1 <= self.history <= 2**20:
            raise UnsupportedConfig(f"Delayed.history is an int from 1 to 2^20 steps, got {self.history!r}.")
        check_margin(self.margin, what="Delayed.margin")
