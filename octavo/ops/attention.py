"""Attention between two projections, with rotary positions, by torch's kernels."""

import math
from collections.abc import Callable
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo._torch.tracing import while_tracing
from octavo.errors import UnsupportedConfig, UnsupportedDevice, UnsupportedShape
from octavo.ops.inputs import check_input, numbers, values_of
from octavo.ops.operation import Edge, FusibleOperation, last_dim
from octavo.ops.rotary_layer import Config
from octavo.ops.settings import Settings
from octavo.quant import QTensor
from octavo.runtime.call import Stage, call, takes_nodes


class RotaryFactors(Settings, nn.Module):
    """The cosines and sines of `positions` positions, in float32 whatever the dtype of the model."""

    own: Tensor  # [T, 1, D], for a channel itself
    other: Tensor  # [T, 1, D], for the other one of its pair
    _setting_names = ("positions", "head_width", "base")

    def __init__(self, positions: int, head_width: int, base: float, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.positions, self.head_width, self.base = positions, head_width, base
        self._register(device)
        self._settings_complete = True

    def _derive_from_settings(self) -> None:
        self._register(self.own.device)

    def _register(self, device: torch.device | str | None) -> None:
        for name, factor in zip(("own", "other"), self._factors(device), strict=True):
            self.register_buffer(name, factor, persistent=False)

    def _factors(self, device: torch.device | str | None) -> tuple[Tensor, Tensor]:
        # in float64: an angle of thousands of radians has few digits left after the point in float32
        pairs = torch.arange(0, self.head_width, 2, device=device, dtype=torch.float64)
        speed = self.base ** (-pairs / self.head_width)
        angle = torch.arange(self.positions, device=device, dtype=torch.int64)[:, None, None] * speed  # [T, 1, D/2]
        cosine, sine = angle.cos().float(), angle.sin().float()
        return torch.cat((cosine, cosine), -1), torch.cat((-sine, sine), -1)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Make the factors anew where the module goes: torch would cast them, or give them memory without values."""
        device = _target(fn, self.own.device)
        kept = {name: self._buffers.pop(name) for name in ("own", "other")}
        try:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
            kept = dict(zip(kept, self._factors(device), strict=True))
        finally:
            self._buffers.update(kept)
        return self

    @while_tracing
    def _materialize(self, place: str) -> None:
        """Give factors that are on the meta device values in this place: a state dict that is assigned has none."""
        if self.own.is_meta and place != "meta":
            self.own, self.other = self._factors(torch.device(place))


def _target(fn: Callable[[Tensor], Tensor], device: torch.device) -> torch.device:
    """Return the device to which a function for `nn.Module._apply` moves tensors of this one."""
    try:
        return fn(torch.empty(0, device=device, dtype=torch.float32)).device
    except NotImplementedError:  # nothing is copied from the meta device; where other tensors go, these are made
        return fn(torch.empty(0, device="cpu", dtype=torch.float32)).device


class RotaryAttention(FusibleOperation, RotaryFactors):
    """Attention with rotary positions, from rows of q, k and v, side by side, to rows of mixed values.

    x is [B, T, (heads + 2 · kv_heads) · head_width], as one Linear makes it: the heads of q, then those of k, then
    those of v. Channel i of a head of q or k and channel i + head_width / 2 are a pair, which position t rotates by
    t · base ** (-2 i / head_width) radians. Attention is torch's `scaled_dot_product_attention`. In a Sequential the
    gradient of q, k and v goes to the Linear before as codes.

    Args:
        heads: the heads of q.
        head_width: channels of a head, an even number.
        kv_heads: the heads of k and of v, of which `heads` is a multiple. None, the default: as many as `heads`.
        positions: the most positions that a sequence has.
        base: the slowest pair takes about this many positions per radian, 10000.0 by default; 1.0 at least.
        causal: True by default: a position attends to itself and those before it.
        device: the device of the factors of the positions; None for torch's default.

    Raises:
        UnsupportedConfig: a number is below 1, `head_width` is odd, `heads` is no multiple of `kv_heads`, or `causal`
            is no bool.

    Example:
        >>> from octavo import ops
        >>> block = octavo.Sequential(
        ...     ops.RMSNorm(64),
        ...     ops.Linear(64, 128, bias=False, recipe="fp8-current"),
        ...     ops.RotaryAttention(4, 16, kv_heads=2, positions=32),
        ...     ops.Linear(64, 64, bias=False, recipe="fp8-current"),
        ... )
        >>> block(torch.randn(2, 32, 64)).shape
        torch.Size([2, 32, 64])
    """

    op_needs_shape = True
    op_inner_outputs = 2
    op_layer_config = Config

    def __init__(
        self, heads: int, head_width: int, *, kv_heads: int | None = None, positions: int, base: float = 10000.0,
        causal: bool = True, device: torch.device | str | None = None,
    ) -> None:  # fmt: skip
        kv_heads = heads if kv_heads is None else kv_heads
        for name, value in (("heads", heads), ("head_width", head_width), ("kv_heads", kv_heads),
                            ("positions", positions), ("base", base), ("causal", causal)):  # fmt: skip
            self._checked_setting(name, value)
        if heads % kv_heads:
            raise UnsupportedConfig(
                f"RotaryAttention shares each head of k and v among equally many of q, got heads={heads} and "
                f"kv_heads={kv_heads}. Choose a multiple."
            )
        super().__init__(positions, head_width, float(base), device)
        self.heads, self.kv_heads, self.causal = heads, kv_heads, causal

    def _checked_setting(self, name: str, value: Any) -> Any:
        if name == "base":
            if not isinstance(value, int | float) or not 1.0 <= value < math.inf:
                raise UnsupportedConfig(f"RotaryAttention(base=) is a finite number from 1 up, got {value!r}.")
            return float(value)
        if name == "causal":
            if not isinstance(value, bool):
                raise UnsupportedConfig(f"RotaryAttention(causal=) is True or False, got {value!r}.")
        elif type(value) is not int or value < 1:
            raise UnsupportedConfig(f"RotaryAttention({name}=) is an int from 1 up, got {value!r}.")
        elif name == "head_width" and value % 2:
            raise UnsupportedConfig(f"RotaryAttention rotates channels in pairs, got head_width={value}, odd.")
        return value

    def forward(self, input: Tensor | QTensor) -> Tensor:
        """Return the values that each position attends to.

        Args:
            input: x [B, T, (heads + 2 · kv_heads) · head_width], in float32, bfloat16 or float16. A QTensor is
                dequantized.

        Returns:
            y [B, T, heads · head_width] in x's dtype, or in that of torch.autocast where that is on.

        Raises:
            UnsupportedShape: x has other dims or another width, or more than `positions` positions.
            UnsupportedDtype: x has another dtype.
            UnsupportedDevice: x and this module are on two devices.
        """
        x = values_of(input)
        as_nodes = takes_nodes([self])
        return self.op_inside(*call(self.op_stage(x, (), {}, as_nodes), x, as_nodes)[:3])

    def op_inside(self, y: Tensor, *sides: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (y, *sides))
        shares = self.kv_heads < self.heads
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=shares)
        return mixed.transpose(1, 2).flatten(-2)

    def op_stage(self, x: Any, extra_inputs: tuple[Any, ...], kwargs: dict[str, Any], as_nodes: bool) -> Stage:
        check_input("RotaryAttention", x)
        width = (self.heads + 2 * self.kv_heads) * self.head_width
        if len(x.shape) != 3 or last_dim(x) != width:
            raise UnsupportedShape(
                f"This RotaryAttention takes [B, T, {width}]: {self.heads} heads of q and {self.kv_heads} of k and of "
                f"v, {self.head_width} wide; got {numbers(x)}. Check the Linear before it."
            )
        batch, length, _ = x.shape
        if length > self.positions:
            raise UnsupportedShape(
                f"This RotaryAttention has {self.positions} positions, got a sequence of {len(range(length))}. Make "
                "it with more: positions=."
            )
        if torch.compiler.is_compiling() or self.own.is_meta:
            self._materialize(str(x.device))
        if x.device != self.own.device:
            raise UnsupportedDevice(f"x is on {x.device} and RotaryAttention on {self.own.device}. Move them together.")
        needs = x.requires_grad and torch.is_grad_enabled()
        owns = isinstance(x, Edge) and x.made_by == "linear"
        key = f"rotary(heads={self.heads},shared={self.kv_heads},owns={owns},wants_dx={needs})"
        q, k = (
            Edge((batch, length, count, self.head_width), x.dtype, x.device, needs)
            for count in (self.heads, self.kv_heads)
        )
        factors = self.own[:length], self.other[:length]
        return Stage("rotary", key, factors, (), needs, outputs=(q, k, k))

    def op_column_blocks(self, blocks: int) -> int:
        if not blocks or self.kv_heads != self.heads:  # no equal blocks are those of q, k and v
            return 0
        if blocks % 3:
            raise UnsupportedConfig(
                "RotaryAttention takes q, k and v side by side, and the layer before it has column_blocks="
                f"{blocks}, so that heads of q and k that belong together are on different ranks. Split each of the "
                "three by itself: Linear(parallel_mode='column', column_blocks=3)."
            )
        return blocks // 3

    def extra_repr(self) -> str:
        shared = "" if self.kv_heads == self.heads else f"kv_heads={self.kv_heads}, "
        return f"{self.heads}, {self.head_width}, {shared}positions={self.positions}, base={self.base}"
