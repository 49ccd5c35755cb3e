"""Number formats of eight bits or fewer: their ranges and exact codecs. The only file that knows 448.

    E4M3  1-4-3  max 448     no Inf, one NaN   values of the forward pass
    E5M2  1-5-2  max 57344   Inf and NaN       gradients, where range matters more than a mantissa bit
    E2M1  1-2-1  max 6       neither           0 .5 1 1.5 2 3 4 6, two codes to a byte
    E8M0  0-8-0  max 2^127   NaN, no zero      a power of two: the scale of an MX block

Encoding rounds to nearest, ties to even. A finite |x| > max saturates: it becomes max with its sign. A value that is
not finite stays visible if the format can hold it: NaN is the byte 0x7f in FP8 (what the hardware writes; torch would
keep the sign) and 255 in E8M0; Inf stays Inf in E5M2 and becomes NaN in E4M3 and E8M0, which have no Inf. E2M1 has
neither and writes 6: its scales mark it instead. Zeros keep their sign, subnormals are exact.

The clamp before each cast is deliberate: torch 2.11 turns an E4M3 overflow into NaN where 2.13 saturates, and both turn
an E5M2 overflow into Inf.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from octavo.errors import UnsupportedConfig, UnsupportedDtype, UnsupportedShape

__all__ = ["E2M1", "E4M3", "E5M2", "E8M0", "FORMATS", "Format", "check_format", "pack_nibbles", "unpack_nibbles"]


def __dir__() -> list[str]:
    return __all__


FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Format:
    """A number format of at most eight bits: its range, and the exact conversion to and from codes.

    Use the four instances E4M3, E5M2, E2M1 and E8M0. No recipe or quantizer takes a format that you construct.

    Args:
        name: the format's name, which is also its text in a recipe's string: `fp8-block(grad_format=E5M2)`.
        dtype: the dtype of stored codes. E2M1 and E8M0 use torch.uint8.
        bits: bits of one code, 4 or 8.
        max: the largest finite value.
        min_normal: the smallest positive normal value.
        min_subnormal: the smallest positive value.
        emax: the exponent of the largest power of two.
        inf: the code of +Inf, or None if the format has no Inf.

    Example:
        >>> octavo.formats.E4M3.max, octavo.formats.E5M2.max, octavo.formats.E2M1.max
        (448.0, 57344.0, 6.0)
        >>> octavo.recipe("fp8-current(grad_format=E4M3)").grad_format is octavo.formats.E4M3
        True
    """

    name: str
    dtype: torch.dtype
    bits: int
    max: float
    min_normal: float
    min_subnormal: float
    emax: int  # exponent of the largest power of two
    inf: int | None = None  # the code of +Inf, in a format that has one

    @cached_property
    def packed(self) -> int:
        """The number of codes in one stored element: 2 for E2M1, else 1."""
        return 2 if self.bits == 4 else 1

    def __repr__(self) -> str:
        return self.name

    def encode(self, x: Tensor) -> Tensor:
        """Return the code nearest to each element, without a scale.

        Ties go to the even code, and a finite value beyond `max` becomes ±max. E8M0 rounds |x| up to a power of two.

        Args:
            x: float32, bfloat16 or float16, of any shape.

        Returns:
            Codes of x's shape: FP8 in the format's own dtype, E2M1 and E8M0 as uint8 with one code in each byte.

        Raises:
            UnsupportedDtype: x is no tensor of these dtypes.

        Example:
            >>> codes = octavo.formats.E4M3.encode(torch.tensor([0.3, 1.0, 1000.0]))
            >>> codes.dtype
            torch.float8_e4m3fn
            >>> octavo.formats.E4M3.decode(codes).tolist()
            [0.3125, 1.0, 448.0]
        """
        if not isinstance(x, Tensor) or x.dtype not in FLOATS:
            found = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise UnsupportedDtype(
                f"{self.name}.encode takes float32, bfloat16 or float16, got {found}. Cast it first."
            )
        x = x.float()
        if self.name in _ENCODERS:
            return _ENCODERS[self.name](x)
        codes = x.clamp(-self.max, self.max).to(self.dtype).view(torch.uint8)
        infinite = FP8_NAN if self.inf is None else x.signbit().to(torch.uint8) * 0x80 + self.inf
        codes = torch.where(x.isinf(), infinite, codes)
        return torch.where(x.isnan(), FP8_NAN, codes).view(self.dtype)

    def decode(self, codes: Tensor) -> Tensor:
        """Return the exact value of each code.

        Args:
            codes: codes in the format's own dtype, or the same bytes as uint8. E2M1 takes one code in each byte: call
                `unpack_nibbles` on the packed codes of a QTensor first.

        Returns:
            float32 values of the same shape.

        Raises:
            UnsupportedDtype: codes have another dtype.

        Example:
            >>> octavo.formats.E2M1.decode(torch.arange(8, dtype=torch.uint8))
            tensor([0.0000, 0.5000, 1.0000, 1.5000, 2.0000, 3.0000, 4.0000, 6.0000])
        """
        if not isinstance(codes, Tensor) or codes.dtype not in (self.dtype, torch.uint8):
            found = codes.dtype if isinstance(codes, Tensor) else type(codes).__name__
            raise UnsupportedDtype(f"{self.name}.decode takes its codes as {self.dtype} or uint8, got {found}.")
        if self.name in _DECODERS:
            return _DECODERS[self.name](codes)
        return codes.view(self.dtype).float()  # FP8, which torch decodes


E4M3 = Format("E4M3", torch.float8_e4m3fn, 8, 448.0, 2.0**-6, 2.0**-9, 8)
E5M2 = Format("E5M2", torch.float8_e5m2, 8, 57344.0, 2.0**-14, 2.0**-16, 15, inf=0x7C)
E2M1 = Format("E2M1", torch.uint8, 4, 6.0, 1.0, 0.5, 2)
E8M0 = Format("E8M0", torch.uint8, 8, 2.0**127, 2.0**-126, 2.0**-127, 127)

FORMATS: dict[str, Format] = {f.name: f for f in (E4M3, E5M2, E2M1, E8M0)}
"""The four formats by name."""

E2M1_NAN = 7  # a NaN becomes +6
E8M0_NAN = 255
FP8_NAN = 0x7F


def _encode_e2m1(x: Tensor) -> Tensor:
    a = x.abs()
    # each comparison crosses one midpoint; strict where the tie falls to the even code below it
    code = (a > 0.25).to(torch.uint8)
    for crossed in (a >= 0.75, a > 1.25, a >= 1.75, a > 2.5, a >= 3.5, a > 5.0):
        code += crossed
    code |= x.signbit().to(torch.uint8) << 3
    return torch.where(x.isnan(), E2M1_NAN, code)


def _decode_e2m1(codes: Tensor) -> Tensor:
    exponent, mantissa = ((codes >> 1) & 3).int(), (codes & 1).float()
    # arithmetic, not a table: a table would be copied from the host, which no graph can capture
    magnitude = torch.where(exponent == 0, 0.5 * mantissa, (0.5 + 0.25 * mantissa) * (1 << exponent))
    return torch.where(codes & 8 > 0, -magnitude, magnitude)


def _encode_e8m0(x: Tensor) -> Tensor:
    """Encode the smallest power of two that is not below |x| (2^-127 for 0); NaN if |x| is Inf."""
    bits = x.view(torch.int32) & 0x7FFFFFFF
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    # exponent 0 holds float32's subnormals, where 2^-127 is the mantissa 0x400000
    up = torch.where(exponent == 0, mantissa > 0x400000, mantissa > 0)
    byte = (exponent + up).clamp(max=254)
    return torch.where(x.isfinite(), byte, E8M0_NAN).to(torch.uint8)


def _decode_e8m0(codes: Tensor) -> Tensor:
    byte = codes.to(torch.int32)
    bits = torch.where(byte == 0, 0x400000, byte << 23)
    return torch.where(byte == E8M0_NAN, 0x7FC00000, bits).view(torch.float32)


# of formats that torch does not convert itself, as it does FP8
_ENCODERS: dict[str, Callable[[Tensor], Tensor]] = {"E2M1": _encode_e2m1, "E8M0": _encode_e8m0}
_DECODERS: dict[str, Callable[[Tensor], Tensor]] = {"E2M1": _decode_e2m1, "E8M0": _decode_e8m0}


def format_named(text: str, among: Iterable[Format] = FORMATS.values()) -> Format | None:
    """Return the format that a string such as "e4m3", or the name of a dtype, means; None if there is none."""
    return next((fmt for fmt in among if fmt.name.lower() in text.lower()), None)


def check_format(fmt: object, allowed: tuple[Format, ...], *, what: str) -> None:
    """Raise for a format outside `allowed`. The `validate` method of a recipe or quantizer calls it.

    Args:
        fmt: the setting to check.
        allowed: the formats that the setting may have.
        what: the setting's name in the message, such as "MyRecipe.grad_format".

    Raises:
        UnsupportedConfig: `fmt` is another format, or no Format at all: a string or a dtype that names a format is
            refused too, and the message says which Format to pass.

    Example:
        >>> from octavo.formats import E4M3, E5M2, check_format
        >>> check_format(E5M2, (E4M3, E5M2), what="MyRecipe.grad_format")
        >>> check_format("e2m1", (E4M3, E5M2), what="MyRecipe.grad_format")
        Traceback (most recent call last):
        ...
        octavo.errors.UnsupportedConfig: MyRecipe.grad_format must be one of E4M3, E5M2, got 'e2m1'.
    """
    if isinstance(fmt, Format) and fmt in allowed:
        return
    meant = format_named(str(fmt), allowed) if isinstance(fmt, str | torch.dtype) else None
    hint = (
        f" Pass octavo.formats.{meant}, a Format and no {type(fmt).__name__}; in a recipe's string it is {meant}, "
        "without quotes."
    )
    names = ", ".join([choice.name for choice in allowed])
    raise UnsupportedConfig(f"{what} must be one of {names}, got {fmt!r}.{hint if meant else ''}")


def pack_nibbles(codes: Tensor) -> Tensor:
    """Pack four-bit codes into bytes, two codes in each.

    Args:
        codes: uint8 [..., K] with K even, one code from 0 to 15 in each byte.

    Returns:
        uint8 [..., K/2]: the code at an even index is the low nibble, the next one the high nibble.

    Raises:
        UnsupportedShape: the last dim is odd.

    Example:
        >>> octavo.formats.pack_nibbles(torch.tensor([1, 2, 3, 4], dtype=torch.uint8))
        tensor([33, 67], dtype=torch.uint8)
    """
    if codes.dim() == 0 or codes.shape[-1] % 2:
        raise UnsupportedShape(
            f"Two four-bit codes share a byte, so the last dim must be even, got shape {tuple(codes.shape)}. "
            "Pad it with a zero code."
        )
    low, high = codes[..., 0::2], codes[..., 1::2]
    return low | (high << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Unpack bytes into the two four-bit codes that each of them holds.

    Args:
        packed: uint8 [..., K/2], such as the codes of an NVFP4 QTensor.

    Returns:
        uint8 [..., K], the low nibble of each byte first.

    Example:
        >>> octavo.formats.unpack_nibbles(torch.tensor([33, 67], dtype=torch.uint8))
        tensor([1, 2, 3, 4], dtype=torch.uint8)
    """
    return torch.stack((packed & 0xF, packed >> 4), -1).flatten(-2)
