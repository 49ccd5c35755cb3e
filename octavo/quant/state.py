"""State of delayed scaling: for each slot (x, w, dy) a window of amaxes and the multiplier derived from it, as tensors.

    observe   current[slot] = max(current[slot], amax of the tensor just cast)     any number of times a step
    update    once a step, for every slot:
                a non-finite current is counted and dropped, a zero one (an unused slot, a cached weight) is a no-op;
                else it enters the window, over its oldest entry, and
                encode = (fp8_max / a) / 2^margin,  a = the window's max, or its newest entry ("most_recent")
                with Inf replaced by float32's max, and a window without a positive amax keeping the multiplier it had
              then current = 0

Nothing here reads a value on the host, so an update can be captured in a graph. An Inf never enters the window: it
would freeze the scale for as long as the window lasts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from octavo._torch.fakes import FakeTensor
from octavo._torch.foreach import foreach_copy_
from octavo.errors import UnsupportedConfig, UnsupportedDevice, UnsupportedShape, check_choice
from octavo.formats import E4M3, E5M2, Format, check_format
from octavo.quant.scale import FLOAT32_MAX, encode_scale
from octavo.quant.tensorwise import Tensorwise

ALGORITHMS = ("max", "most_recent")
COLD_STARTS = ("one", "current")
KEPT = ("history", "head", "encode", "current", "nonfinite")  # the tensors that a checkpoint stores


def check_margin(margin: object, *, what: str) -> None:
    if type(margin) is not int or abs(margin) > 64:
        raise UnsupportedConfig(f"{what} is an int from -64 to 64, got {margin!r}.")


def with_margin(encode: Tensor, margin: int) -> Tensor:
    """Returns encode / 2^margin, clamped to float32's range: the quotient may leave it though encode did not, and a
    multiplier of zero would decode to NaN."""
    s = encode * 2.0**-margin
    return torch.where(s.isinf(), FLOAT32_MAX, s.clamp_min(torch.finfo(torch.float32).tiny))


@dataclass(frozen=True, eq=False)
class DelayedState:
    """State of S slots. Only `observe`, `update` and `restore` mutate the tensors, in place: their addresses never
    change."""

    history: Tensor  # [S, L] float32: ring buffer of amaxes
    head: Tensor  # [S] int64: amaxes ever written; the next goes to head % L
    encode: Tensor  # [S] float32: the multiplier into codes, 1 at first
    current: Tensor  # [S] float32: this step's amax so far
    nonfinite: Tensor  # [S] int64: steps whose amax was Inf or NaN
    limit: Tensor  # [S] float32: the largest value of each slot's format

    @classmethod
    def create(
        cls, formats: tuple[Format, ...], length: int = 1024, device: torch.device | str | None = None
    ) -> "DelayedState":
        """Returns a new state with one slot per format."""
        if not formats or length < 1:
            raise UnsupportedShape(
                f"A delayed state has at least one slot and one entry, got {len(formats)} and {length}."
            )
        for fmt in formats:
            check_format(fmt, (E4M3, E5M2), what="a slot's format")
        slots = len(formats)
        return cls(
            history=torch.zeros(slots, length, dtype=torch.float32, device=device),
            head=torch.zeros(slots, dtype=torch.int64, device=device),
            encode=torch.ones(slots, dtype=torch.float32, device=device),
            current=torch.zeros(slots, dtype=torch.float32, device=device),
            nonfinite=torch.zeros(slots, dtype=torch.int64, device=device),
            limit=torch.tensor([fmt.max for fmt in formats], dtype=torch.float32, device=device),
        )

    def tensors(self) -> dict[str, Tensor]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def observe(self, slot: int, amax: Tensor) -> None:
        """Folds an amax of this step into its slot. NaN wins over every number, so that `update` counts it."""
        self.current[slot].copy_(torch.maximum(self.current[slot], amax.view(())))

    def update(self, *, algorithm: str = "max", margin: int = 0) -> None:
        """Ends the step: moves each slot's amax into its window and derives the new multipliers."""
        check_choice(algorithm, ALGORITHMS, what="amax algorithm")
        check_margin(margin, what="margin")
        finite = self.current.isfinite()
        entering = finite & (self.current > 0)
        self.nonfinite.add_(~finite)
        self._write_window(entering)
        a = self.current if algorithm == "most_recent" else self.history.amax(1)
        fresh = with_margin(self.limit / a, margin)
        self.encode.copy_(torch.where(entering & (a > 0), fresh, self.encode))
        self.current.zero_()

    def _write_window(self, entering: Tensor) -> None:
        at = (self.head % self.history.shape[1])[:, None]
        newest = torch.where(entering[:, None], self.current[:, None], self.history.gather(1, at))
        self.history.scatter_(1, at, newest)
        self.head.add_(entering)

    def encode_for(self, slot: int, spec: Tensorwise, x: Tensor, *, cold_start: str = "one", margin: int = 0) -> Tensor:
        """Returns the multiplier [1] to cast x with."""
        check_choice(cold_start, COLD_STARTS, what="cold_start")
        check_margin(margin, what="margin")
        kept = self.encode[slot : slot + 1].clone()
        if cold_start == "one":
            return kept
        warm = self.head[slot : slot + 1] > 0
        return warm_encode(kept, warm, spec.amax(x, skip=warm).view(1), spec, margin)

    def export(self) -> dict[str, Tensor]:
        """Returns copies of the tensors that a checkpoint stores, with the window ordered from oldest to newest."""
        length = self.history.shape[1]
        first = torch.where(self.head >= length, self.head % length, 0)
        order = (first[:, None] + torch.arange(length, device=self.head.device)) % length
        kept = {"history": self.history.gather(1, order)}
        return kept | {name: getattr(self, name).clone() for name in KEPT[1:]}

    @torch.no_grad()
    def restore(self, kept: dict[str, Tensor]) -> None:
        """Loads the tensors that `export` returned. A window of another length keeps its newest entries."""
        self.check(kept)
        length, device = self.history.shape[1], self.history.device
        history, head = kept["history"].to(device), kept["head"].to(device)
        filled = head.clamp_max(history.shape[1])  # entries 0 ... filled, oldest to newest
        keep = filled.clamp_max(length)
        age = torch.arange(length, device=device)[None, :]  # of `length` places, 0 the oldest kept
        taken = history.gather(1, ((filled - keep)[:, None] + age).clamp_max(history.shape[1] - 1))
        places = ((head - keep)[:, None] + age) % length
        self.history.scatter_(1, places, torch.where(age < keep[:, None], taken, 0.0))
        for name in KEPT[1:]:
            getattr(self, name).copy_(kept[name])

    def check(self, kept: Mapping[str, object]) -> None:
        """Raises for tensors that `restore` cannot load."""
        check_kept({name: kept.get(name) for name in KEPT}, self.current.numel())


_VALUES: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {  # of a checkpoint: the rule, and which values break it
    "history": ("finite and not negative", lambda t: ~t.isfinite() | (t < 0)),
    "head": ("not negative", lambda t: t < 0),
    "encode": ("finite and positive", lambda t: ~t.isfinite() | (t <= 0)),
    "current": ("not negative", lambda t: t < 0),  # a step may have seen Inf and NaN
    "nonfinite": ("not negative", lambda t: t < 0),
}


def check_kept(kept: Mapping[str, object], slots: int, prefix: str = "") -> None:
    """Raises for tensors that no state of `slots` slots can have exported. Their names follow `prefix`."""
    for name, found in kept.items():
        dtype = torch.int64 if name in ("head", "nonfinite") else torch.float32
        fits = isinstance(found, Tensor) and found.dtype == dtype and found.dim() == (2 if name == "history" else 1)
        if not isinstance(found, Tensor) or not fits or found.shape[0] != slots or found.numel() < slots:
            what = f"{found.dtype} {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise UnsupportedShape(
                f"A delayed state of {slots} slots takes {prefix}{name} as {dtype} with {slots} rows, got {what}."
            )
        if found.is_meta:
            raise UnsupportedDevice(f"{prefix}{name} is on the meta device, and has no values. Load it from a file.")
        rule, wrong = _VALUES[name]
        bad = found.new_empty(0) if isinstance(found, FakeTensor) else found[wrong(found)]
        if bad.numel():
            raise UnsupportedConfig(
                f"{prefix}{name} of a delayed state is {rule}, got {bad[0].item()}. The checkpoint is damaged: load "
                "another, or none, and the first step measures."
            )


def warm_encode(encode: Tensor, warm: Tensor, amax: Tensor, spec: Tensorwise, margin: int) -> Tensor:
    """Returns the multipliers of warm slots; for slots that have seen no amax yet, those derived from the tensor's own
    amax: a multiplier of 1 would flush gradients below 2^-17 to zero on the first step. NaN if that amax is not
    finite: no multiplier fits."""
    just_in_time = encode_scale(amax, spec.fmt.max, eps=spec.eps, ceiling=FLOAT32_MAX, pow2=spec.pow2)
    measured = torch.where(amax.isfinite(), with_margin(just_in_time, margin), float("nan"))
    return torch.where(warm, encode, measured)


def update_all(
    states: Sequence[DelayedState],
    *,
    algorithm: str = "max",
    margin: int = 0,
    reduce: Callable[[Tensor], None] | None = None,
) -> None:
    """Updates many states of one window length and device at once, in a fixed number of launches. `reduce` may take the
    maximum of all their amaxes over processes, in place."""
    if not states:
        return
    names = tuple(states[0].tensors())
    stacked = DelayedState(**{name: torch.cat([getattr(s, name) for s in states]) for name in names})
    if reduce is not None:
        reduce(stacked.current)
    stacked.update(algorithm=algorithm, margin=margin)
    sizes = [s.current.numel() for s in states]
    for name in names:
        if name != "limit":
            foreach_copy_([getattr(s, name) for s in states], list(getattr(stacked, name).split(sizes)))
