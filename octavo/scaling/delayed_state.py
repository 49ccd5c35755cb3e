"""State of delayed scaling: for each slot (x, w, dy) a window of amaxes and the inverse scale derived from it, as
tensors.

    observe   running_amax[slot] = max(running_amax[slot], amax of the tensor just cast)     any number of times a step
    update    once a step, for every slot:
                a running amax that is not finite is counted and dropped, one of zero (an unused slot, a cached
                weight) changes nothing;
                else it enters the window, over its oldest entry, and
                inverse_scale = (fp8_max / a) / 2^margin,  a = the window's max, or its newest entry ("most_recent")
                with Inf replaced by float32's max, and a window without a positive amax keeping the inverse scale it
                had
              then running_amax = 0

Layers do not call `observe`: their casts do the same (`octavo.quant.tensorwise`).

Nothing here reads a value on the host, so an update can be captured in a graph. An Inf never enters the window: it
would freeze the scale for as long as the window lasts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from octavo._torch.fakes import FakeTensor
from octavo._torch.operators import foreach_copy_
from octavo.errors import UnsupportedConfig, UnsupportedDevice, UnsupportedShape, check_choice
from octavo.formats import E4M3, E5M2, Format, check_format
from octavo.quant.scale import FLOAT32_MAX, inverse_scale_from
from octavo.quant.tensorwise import Tensorwise
from octavo.recipes.amax_algorithms import ALGORITHMS, COLD_STARTS, check_margin

# the tensors that a checkpoint stores: its name of each, and the field
KEPT = {
    "history": "history",
    "head": "head",
    "encode": "inverse_scale",
    "current": "running_amax",
    "nonfinite": "nonfinite",
}


def with_margin(inverse_scale: Tensor, margin: int) -> Tensor:
    """Return inverse_scale / 2^margin, clamped to float32's range: the quotient may leave it though inverse_scale did
    not, and an inverse scale of zero would decode to NaN."""
    s = inverse_scale * 2.0**-margin
    return torch.where(s.isinf(), FLOAT32_MAX, s.clamp_min(torch.finfo(torch.float32).tiny))


@dataclass(frozen=True, eq=False)
class DelayedState:
    """Memory of delayed scaling: for each slot (a tensor of a layer) a window of amaxes and an inverse scale.

    Layers with the recipe `fp8-delayed` hold one, and `octavo.step` updates it. Build your own with `create` to use
    delayed scaling outside of a layer. `observe`, `update` and `restore` write the tensors in place, so their addresses
    never change and a CUDA graph may capture them.

    Args:
        history: float32 [S, L]: a ring buffer of the last L amaxes for each of S slots.
        head: int64 [S]: how many amaxes were ever written; the next one goes to head % L.
        inverse_scale: float32 [S]: the inverse scale, 1 at first.
        running_amax: float32 [S]: the largest amax of the present step so far.
        nonfinite: int64 [S]: how many steps had an amax of Inf or NaN.
        limit: float32 [S]: the largest value of each slot's format.

    Example:
        >>> from octavo.formats import E4M3, E5M2
        >>> state = octavo.quant.DelayedState.create((E4M3, E5M2), length=16)
        >>> state.observe(0, torch.tensor(7.0))
        >>> state.update()
        >>> state.inverse_scale
        tensor([64.,  1.])
    """

    history: Tensor  # [S, L] float32: ring buffer of amaxes
    head: Tensor  # [S] int64: amaxes ever written; the next goes to head % L
    inverse_scale: Tensor  # [S] float32: the inverse scale, 1 at first
    running_amax: Tensor  # [S] float32: this step's amax so far
    nonfinite: Tensor  # [S] int64: steps whose amax was Inf or NaN
    limit: Tensor  # [S] float32: the largest value of each slot's format

    @classmethod
    def create(
        cls, formats: tuple[Format, ...], length: int = 1024, device: torch.device | str | None = None
    ) -> "DelayedState":
        """Return a new state whose windows are empty.

        Args:
            formats: one format for each slot, E4M3 or E5M2.
            length: how many amaxes a window holds.
            device: the device of the tensors; None for torch's default.

        Returns:
            The state.

        Raises:
            UnsupportedShape: there is no slot, or the length is below 1.
            UnsupportedConfig: a format is neither E4M3 nor E5M2.

        Example:
            >>> octavo.quant.DelayedState.create((octavo.formats.E4M3,) * 3, length=16).history.shape
            torch.Size([3, 16])
        """
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
            inverse_scale=torch.ones(slots, dtype=torch.float32, device=device),
            running_amax=torch.zeros(slots, dtype=torch.float32, device=device),
            nonfinite=torch.zeros(slots, dtype=torch.int64, device=device),
            limit=torch.tensor([fmt.max for fmt in formats], dtype=torch.float32, device=device),
        )

    def tensors(self) -> dict[str, Tensor]:
        """Return the state's own tensors.

        Returns:
            The tensors by the names of the fields.

        Example:
            >>> state = octavo.quant.DelayedState.create((octavo.formats.E4M3,))
            >>> list(state.tensors())
            ['history', 'head', 'inverse_scale', 'running_amax', 'nonfinite', 'limit']
        """
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def observe(self, slot: int, amax: Tensor) -> None:
        """Take the maximum of a slot's amax of this step and a new one. Call it any number of times in a step.

        Args:
            slot: index of the slot.
            amax: one float32 element. NaN wins over every number, so that `update` counts it.

        Example:
            >>> state = octavo.quant.DelayedState.create((octavo.formats.E4M3,))
            >>> state.observe(0, torch.tensor(3.0))
            >>> state.observe(0, torch.tensor(2.0))
            >>> state.running_amax
            tensor([3.])
        """
        self.running_amax[slot].copy_(torch.maximum(self.running_amax[slot], amax.view(())))

    def update(self, *, algorithm: str = "max", margin: int = 0) -> None:
        """End the step: move each slot's amax into its window and derive the new inverse scales.

        A slot that observed nothing, or only zeros, keeps its window and inverse scale. So does one that observed Inf
        or NaN, which is counted in `nonfinite`.

        Args:
            algorithm: "max" scales by the window's largest amax, "most_recent" by its newest.
            margin: powers of two to keep free above that amax, -64 to 64.

        Raises:
            UnsupportedConfig: a setting has another value.

        Example:
            >>> state = octavo.quant.DelayedState.create((octavo.formats.E4M3,))
            >>> state.observe(0, torch.tensor(7.0))
            >>> state.update(margin=1)
            >>> state.inverse_scale, state.running_amax
            (tensor([32.]), tensor([0.]))
        """
        check_choice(algorithm, ALGORITHMS, what="amax algorithm")
        check_margin(margin, what="margin")
        finite = self.running_amax.isfinite()
        entering = finite & (self.running_amax > 0)
        self.nonfinite.add_(~finite)
        at = (self.head % self.history.shape[1])[:, None]
        newest = torch.where(entering[:, None], self.running_amax[:, None], self.history.gather(1, at))
        self.history.scatter_(1, at, newest)
        self.head.add_(entering)
        a = self.running_amax if algorithm == "most_recent" else self.history.amax(1)
        fresh = with_margin(self.limit / a, margin)
        self.inverse_scale.copy_(torch.where(entering & (a > 0), fresh, self.inverse_scale))
        self.running_amax.zero_()

    def inverse_scale_for(
        self, slot: int, spec: Tensorwise, x: Tensor, *, cold_start: str = "one", margin: int = 0
    ) -> Tensor:
        """Return the inverse scale to cast x with.

        Args:
            slot: index of the slot.
            spec: the quantizer that will cast x.
            x: the tensor. It is read only while the slot's window is empty and cold_start is "current".
            cold_start: the inverse scale while the window is empty: "one" for 1, "current" for the one that x's own
                amax gives, less `margin`.
            margin: powers of two to keep free above x's own amax.

        Returns:
            float32 [1], for `spec.quantize(x, inverse_scale=...)` or `spec.observe(x, inverse_scale)`. NaN if x is
            measured and not finite.

        Raises:
            UnsupportedConfig: a setting has another value.

        Example:
            >>> state, spec = octavo.quant.DelayedState.create((octavo.formats.E4M3,)), octavo.quant.Tensorwise()
            >>> x = torch.tensor([[7.0]])
            >>> state.inverse_scale_for(0, spec, x), state.inverse_scale_for(0, spec, x, cold_start="current")
            (tensor([1.]), tensor([64.]))
        """
        check_choice(cold_start, COLD_STARTS, what="cold_start")
        check_margin(margin, what="margin")
        kept = self.inverse_scale[slot : slot + 1].clone()
        if cold_start == "one":
            return kept
        warm = self.head[slot : slot + 1] > 0
        return calibrated_inverse_scale(kept, warm, spec.amax(x, skip=warm).view(1), spec, margin)

    def export(self) -> dict[str, Tensor]:
        """Return copies of the tensors that a checkpoint stores.

        Returns:
            All tensors but `limit`, by name. The window's entries go from oldest to newest, zeros after them if it is
            not full.

        Example:
            >>> state = octavo.quant.DelayedState.create((octavo.formats.E4M3,), length=3)
            >>> state.observe(0, torch.tensor(7.0))
            >>> state.update()
            >>> state.export()["history"]
            tensor([[7., 0., 0.]])
        """
        length = self.history.shape[1]
        first = torch.where(self.head >= length, self.head % length, 0)
        order = (first[:, None] + torch.arange(length, device=self.head.device, dtype=torch.int64)) % length
        kept = {name: getattr(self, field).clone() for name, field in KEPT.items()}
        return kept | {"history": self.history.gather(1, order)}

    @torch.no_grad()
    def restore(self, kept: dict[str, Tensor]) -> None:
        """Load the tensors that `export` returned, in place.

        Args:
            kept: the tensors by name. A window of another length is accepted: its newest entries are kept.

        Raises:
            UnsupportedShape: a tensor is missing, or has another dtype or number of slots.
            UnsupportedConfig: a tensor has values that no state exports, such as a negative amax.
            UnsupportedDevice: a tensor is on the meta device.

        Example:
            >>> old = octavo.quant.DelayedState.create((octavo.formats.E4M3,), length=3)
            >>> old.observe(0, torch.tensor(7.0))
            >>> old.update()
            >>> new = octavo.quant.DelayedState.create((octavo.formats.E4M3,), length=2)
            >>> new.restore(old.export())
            >>> new.inverse_scale, new.history
            (tensor([64.]), tensor([[7., 0.]]))
        """
        self.check(kept)
        length, device = self.history.shape[1], self.history.device
        history, head = kept["history"].to(device), kept["head"].to(device)
        filled = head.clamp_max(history.shape[1])  # entries 0 ... filled, oldest to newest
        keep = filled.clamp_max(length)
        age = torch.arange(length, device=device, dtype=torch.int64)[None, :]  # of `length` places, 0 the oldest kept
        taken = history.gather(1, ((filled - keep)[:, None] + age).clamp_max(history.shape[1] - 1))
        places = ((head - keep)[:, None] + age) % length
        self.history.scatter_(1, places, torch.where(age < keep[:, None], taken, 0.0))
        for name, field in KEPT.items():
            if name != "history":
                getattr(self, field).copy_(kept[name])

    def check(self, kept: Mapping[str, object]) -> None:
        """Raise for tensors that `restore` cannot load, and write nothing.

        Args:
            kept: the tensors by name.

        Raises:
            UnsupportedShape: a tensor is missing, or has another dtype or number of slots.
            UnsupportedConfig: a tensor has values that no state exports.
            UnsupportedDevice: a tensor is on the meta device.

        Example:
            >>> state = octavo.quant.DelayedState.create((octavo.formats.E4M3,))
            >>> state.check(state.export())
        """
        check_kept({name: kept.get(name) for name in KEPT}, self.running_amax.numel())


_VALUES: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {  # of a checkpoint: the rule, and which values break it
    "history": ("finite and not negative", lambda t: ~t.isfinite() | (t < 0)),
    "head": ("not negative", lambda t: t < 0),
    "encode": ("finite and positive", lambda t: ~t.isfinite() | (t <= 0)),
    "current": ("not negative", lambda t: t < 0),  # a step may have seen Inf and NaN
    "nonfinite": ("not negative", lambda t: t < 0),
}


def check_kept(kept: Mapping[str, object], slots: int, prefix: str = "") -> None:
    """Raise for tensors that no state of `slots` slots can have exported. Their names follow `prefix`."""
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
                "another, or none: the first step then measures the scales."
            )


def calibrated_inverse_scale(
    inverse_scale: Tensor, warm: Tensor, amax: Tensor, spec: Tensorwise, margin: int
) -> Tensor:
    """Return the inverse scales of warm slots; for slots that have seen no amax yet, those derived from the tensor's
    own amax: an inverse scale of 1 would flush gradients below 2^-17 to zero on the first step. NaN if that amax is not
    finite: no inverse scale fits."""
    just_in_time = inverse_scale_from(amax, spec.fmt.max, eps=spec.eps, ceiling=FLOAT32_MAX, pow2=spec.pow2)
    measured = torch.where(amax.isfinite(), with_margin(just_in_time, margin), float("nan"))
    return torch.where(warm, inverse_scale, measured)


def lend(states: Sequence[DelayedState], slots: int) -> None:
    """Give slots that have seen no amax the smallest inverse scale of those that have, among each `slots` slots in a
    row: those of one operand of several experts. An expert's first tokens are then cast without being measured."""
    head, inverse_scale = (
        torch.cat([getattr(s, name) for s in states]).view(-1, slots) for name in ("head", "inverse_scale")
    )
    running_amaxes = head > 0
    least = torch.where(running_amaxes, inverse_scale, float("inf")).amin(1, keepdim=True)
    lent = torch.where(running_amaxes | least.isinf(), inverse_scale, least).flatten()
    foreach_copy_([s.inverse_scale for s in states], list(torch.split(lent, [s.inverse_scale.numel() for s in states])))


def update_all(
    states: Sequence[DelayedState], *, algorithm: str = "max", margin: int = 0, sharing: Sequence[int] = ()
) -> None:
    """Update many states of one window length and device at once, in a fixed number of launches. `sharing` has for
    each state how many slots in a row `lend` inverse scales to each other, 1 where they do not."""
    if not states:
        return
    names = tuple(states[0].tensors())
    stacked = DelayedState(**{name: torch.cat([getattr(s, name) for s in states]) for name in names})
    stacked.update(algorithm=algorithm, margin=margin)
    sizes = [s.running_amax.numel() for s in states]
    for name in names:
        if name != "limit":
            foreach_copy_([getattr(s, name) for s in states], list(getattr(stacked, name).split(sizes)))
    for slots in sorted(set(sharing) - {1}):
        lend([state for state, number in zip(states, sharing, strict=True) if number == slots], slots)
