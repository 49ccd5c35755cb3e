"""Delayed scaling's memory: for each slot (x, w, dy) a window of amaxes and the multiplier they led to, as tensors.

    observe   current[slot] = max(current[slot], amax of what was just cast)       any number of times a step
    update    once a step, for every slot:
                a non-finite current is counted and dropped, a zero one (an unused slot, a cached weight) is a no-op;
                else it enters the window, over its oldest entry, and
                encode = (fp8_max / a) / 2^margin,  a = the window's max, or its newest entry ("most_recent")
                with Inf replaced by float32's max, and a window without a positive amax keeping the multiplier it had
              then current = 0

Nothing here reads a value on the host, so an update can be captured in a graph. An Inf never enters the window: it
would freeze the scale for as long as the window lasts.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.errors import UnsupportedConfig, UnsupportedShape, check_choice
from octavo.formats import E4M3, E5M2, Format
from octavo.quant.scale import FLOAT32_MAX, divide, encode_scale
from octavo.quant.tensorwise import Tensorwise

ALGORITHMS = ("max", "most_recent")
COLD_STARTS = ("one", "current")


def check_margin(margin: object, *, what: str) -> None:
    if type(margin) is not int or abs(margin) > 64:
        raise UnsupportedConfig(f"{what} is an int from -64 to 64, got {margin!r}.")


def with_margin(encode: Tensor, margin: int) -> Tensor:
    """encode / 2^margin, kept in float32's range afterwards: the quotient may leave it though encode did not, and a
    multiplier of zero would decode to NaN."""
    s = encode * 2.0**-margin
    return torch.where(s.isinf(), FLOAT32_MAX, s.clamp_min(torch.finfo(torch.float32).tiny))


@dataclass(frozen=True, eq=False)
class DelayedState:
    """State of S slots. Only `observe` and `update` mutate the tensors, in place: their addresses never change."""

    history: Tensor  # [S, L] float32: ring buffer of amaxes
    head: Tensor  # [S] int64: amaxes ever written; the next goes to head % L
    encode: Tensor  # [S] float32: the multiplier into codes, 1 at first
    current: Tensor  # [S] float32: this step's amax so far
    nonfinite: Tensor  # [S] int64: steps whose amax was Inf or NaN

    @classmethod
    def create(cls, slots: int, length: int = 1024, device: torch.device | str | None = None) -> "DelayedState":
        if slots < 1 or length < 1:
            raise UnsupportedShape(f"A delayed state has at least one slot and one entry, got {slots} and {length}.")
        return cls(
            history=torch.zeros(slots, length, dtype=torch.float32, device=device),
            head=torch.zeros(slots, dtype=torch.int64, device=device),
            encode=torch.ones(slots, dtype=torch.float32, device=device),
            current=torch.zeros(slots, dtype=torch.float32, device=device),
            nonfinite=torch.zeros(slots, dtype=torch.int64, device=device),
        )

    def observe(self, slot: int, amax: Tensor) -> None:
        """Fold an amax of this step into its slot. NaN wins over everything, so that it is counted."""
        self.current[slot].copy_(torch.maximum(self.current[slot], amax.view(())))

    def update(self, formats: tuple[Format, ...], *, algorithm: str = "max", margin: int = 0) -> None:
        """End the step: one format a slot."""
        check_choice(algorithm, ALGORITHMS, what="amax algorithm")
        check_margin(margin, what="margin")
        for fmt in formats:
            check_choice(fmt, (E4M3, E5M2), what="a slot's format")
        if len(formats) != self.current.numel():
            raise UnsupportedConfig(
                f"update takes one format a slot: {self.current.numel()} slots, {len(formats)} formats."
            )
        finite = self.current.isfinite()
        entering = finite & (self.current > 0)
        self.nonfinite.add_(~finite)
        self._write_window(entering)
        a = self.current if algorithm == "most_recent" else self.history.amax(1)
        fresh = torch.stack([with_margin(divide(fmt.max, a[i]), margin) for i, fmt in enumerate(formats)])
        self.encode.copy_(torch.where(entering & (a > 0), fresh, self.encode))
        self.current.zero_()

    def _write_window(self, entering: Tensor) -> None:
        at = (self.head % self.history.shape[1])[:, None]
        newest = torch.where(entering[:, None], self.current[:, None], self.history.gather(1, at))
        self.history.scatter_(1, at, newest)
        self.head.add_(entering)

    def encode_for(self, slot: int, spec: Tensorwise, x: Tensor, *, cold_start: str = "one", margin: int = 0) -> Tensor:
        """The multiplier [1] to cast x with. With cold_start="current" a slot that has seen nothing yet takes it from x
        itself: a multiplier of 1 would flush gradients below 2^-17 to zero on the first step."""
        check_choice(cold_start, COLD_STARTS, what="cold_start")
        check_margin(margin, what="margin")
        kept = self.encode[slot : slot + 1].clone()
        if cold_start == "one":
            return kept
        warm = self.head[slot : slot + 1] > 0
        just_in_time = encode_scale(
            spec.amax(x, skip=warm).view(1), spec.fmt.max, eps=spec.eps, ceiling=FLOAT32_MAX, pow2=spec.pow2
        )
        return torch.where(warm, kept, with_margin(just_in_time, margin))
