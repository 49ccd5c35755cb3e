"""A drawing as a PNG file, without other packages: rectangles, and text in the characters of dot-matrix displays."""

import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

SCALE = 2  # pixels for each unit of a drawing
Colour = tuple[int, int, int]
# five columns a character, the lowest bit on top
_FONT = {
    " ": "0000000000", "%": "2313086462", "(": "001c224100", ")": "0041221c00", "*": "2a1c7f1c2a", "+": "08083e0808",
    ",": "0080703000", "-": "0808080808", ".": "0000606000", "/": "2010080402", "0": "3e5149453e", "1": "00427f4000",
    "2": "7249494946", "3": "2141494d33", "4": "1814127f10", "5": "2745454539", "6": "3c4a494931", "7": "4121110907",
    "8": "3649494936", "9": "464949291e", ":": "0000140000", ";": "0040340000", "=": "1414141414", "A": "7c1211127c",
    "B": "7f49494936", "C": "3e41414122", "D": "7f4141413e", "E": "7f49494941", "F": "7f09090901", "G": "3e41415173",
    "H": "7f0808087f", "I": "00417f4100", "J": "2040413f01", "K": "7f08142241", "L": "7f40404040", "M": "7f021c027f",
    "N": "7f0408107f", "O": "3e4141413e", "P": "7f09090906", "Q": "3e4151215e", "R": "7f09192946", "S": "2649494932",
    "T": "03017f0103", "U": "3f4040403f", "V": "1f2040201f", "W": "3f4038403f", "X": "6314081463", "Y": "0304780403",
    "Z": "6159494d43", "^": "0402010204", "_": "4040404040", "a": "2054547840", "b": "7f28444438", "c": "3844444428",
    "d": "384444287f", "e": "3854545418", "f": "00087e0902", "g": "18a4a49c78", "h": "7f08040478", "i": "00447d4000",
    "j": "2040403d00", "k": "7f10284400", "l": "00417f4000", "m": "7c04780478", "n": "7c08040478", "o": "3844444438",
    "p": "fc18242418", "q": "18242418fc", "r": "7c08040408", "s": "4854545424", "t": "04043f4424", "u": "3c4040207c",
    "v": "1c2040201c", "w": "3c4030403c", "x": "4428102844", "y": "4c9090907c", "z": "4464544c44",
}  # fmt: skip
_UNKNOWN = "7f4141417f"
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")


class Box(NamedTuple):
    """A filled rectangle."""

    x: float
    y: float
    width: float
    height: float
    colour: str  # a name of the drawing's palette
    opacity: float = 1.0
    title: str = ""  # shown under a pointer, where that is possible


class Label(NamedTuple):
    """A line of text, whose baseline is at y."""

    x: float
    y: float
    text: str
    anchor: str = "start"  # "start", "middle" or "end"


def png(width: int, height: int, shapes: Sequence[Box | Label], palette: dict[str, Colour]) -> bytes:
    """Return the bytes of a PNG file. The palette has the colours of boxes, and those of "ground" and "text"."""
    canvas = torch.empty(height * SCALE, width * SCALE, 3, dtype=torch.float32, device="cpu")
    canvas[:] = torch.tensor(palette["ground"], dtype=torch.float32, device="cpu")
    for shape in shapes:
        if isinstance(shape, Box):
            _fill(canvas, shape, palette[shape.colour])
        else:
            _write(canvas, shape, palette["text"])
    rows = canvas.round().to(torch.uint8)
    first = torch.zeros(rows.shape[0], 1, dtype=torch.uint8, device="cpu")  # each row begins with its filter: none
    pixels = torch.cat([first, rows.flatten(1)], 1)
    header = struct.pack(">IIBBBBB", width * SCALE, height * SCALE, 8, 2, 0, 0, 0)
    data = zlib.compress(bytes(pixels.flatten().tolist()), 9)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", data) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _fill(canvas: Tensor, box: Box, colour: Colour) -> None:
    left, top = round(SCALE * box.x), round(SCALE * box.y)
    right = max(round(SCALE * (box.x + box.width)), left + 1)
    bottom = max(round(SCALE * (box.y + box.height)), top + 1)
    part = canvas[max(top, 0) : bottom, max(left, 0) : right]
    part.lerp_(torch.tensor(colour, dtype=torch.float32, device="cpu").expand_as(part), box.opacity)


def _write(canvas: Tensor, label: Label, colour: Colour) -> None:
    """Write a character in six columns of a unit each; digits in superscript are raised."""
    text = label.text
    start = label.x - {"start": 0, "middle": 3 * len(text), "end": 6 * len(text)}[label.anchor]
    for place, character in enumerate(text):
        plain = character.translate(_RAISED)
        top = label.y - (10 if plain != character else 7)
        for column, bits in enumerate(bytes.fromhex(_FONT.get(plain, _UNKNOWN))):
            for row in range(8):
                if bits >> row & 1:
                    _fill(canvas, Box(start + 6 * place + column, top + row, 1, 1, ""), colour)
