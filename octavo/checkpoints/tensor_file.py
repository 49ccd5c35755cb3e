"""Reads and writes safetensors files: the length of a header in 8 bytes, the header as JSON, the bytes of the tensors.

Octavo has its own reader, so that it needs no further package, and so that every rule of the format is checked before a
tensor exists: the size of the header, names that come twice, dtypes, shapes, and ranges that leave the file, overlap or
leave gaps. Files of the safetensors package are read, and that package reads these.
"""

import ctypes
import hashlib
import json
import math
import os
import stat
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo._torch.fakes import FakeTensor
from octavo.errors import (
    InvalidCheckpoint,
    UnsupportedConfig,
    UnsupportedDevice,
    UnsupportedDtype,
    UnsupportedShape,
)
from octavo.values import shown

LARGEST_HEADER = 100_000_000  # bytes; the limit of the safetensors package
LARGEST_SIZE, MOST_DIMS = 2**62, 32  # of a shape
METADATA = "__metadata__"
WITHOUT_WAITING = getattr(os, "O_NONBLOCK", 0)  # Windows has no such flag, and no FIFOs
DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "U16": torch.uint16, "I16": torch.int16,
    "U32": torch.uint32, "I32": torch.int32, "U64": torch.uint64, "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
PICKLES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")  # beginnings of pickled files


class Digest(NamedTuple):
    """The size of a file, and the SHA-256 of its bytes."""

    bytes: int
    sha256: str


class TensorFile(NamedTuple):
    """The content of a file: tensors on the CPU by name, and texts by name."""

    tensors: dict[str, Tensor]
    metadata: dict[str, str]
    digest: Digest


class _Entry(NamedTuple):
    """A tensor in a header."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


# -- writing -----------------------------------------------------------------------------------------------------------


def write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> Digest:
    """Writes a new file, and returns after the disk has it. Raises, before it writes, for tensors without bytes."""
    for name, tensor in tensors.items():
        check_plain(name, tensor)
    if METADATA in tensors:
        raise UnsupportedConfig(
            f"A safetensors file keeps texts under the name {METADATA}, and a tensor has it. Rename it."
        )
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # keeps each aligned
    header: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    at = 0
    for name in order:
        tensor = tensors[name]
        end = at + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > LARGEST_HEADER:
        raise InvalidCheckpoint(
            f"The header of a safetensors file has at most {LARGEST_HEADER} bytes, and that of {path.name} would have "
            f"{len(text)}. Save fewer values outside of tensors."
        )
    digest = hashlib.sha256()
    with open(path, "xb") as file:
        for part in (len(text).to_bytes(8, "little"), text, *(tensors[name] for name in order)):
            buffer: Any = bytes_of(part) if isinstance(part, Tensor) else part
            digest.update(buffer)
            file.write(buffer)
        file.flush()
        os.fsync(file.fileno())
    return Digest(8 + len(text) + at, digest.hexdigest())


def check_plain(name: str, tensor: object) -> None:
    """Raises for what a file cannot hold: other objects, sparse, sharded and meta tensors, tensors of many dims."""
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.dtype not in NAMES:
        got = f"{tensor.dtype} {tensor.layout}" if isinstance(tensor, Tensor) else type(tensor).__name__
        raise UnsupportedDtype(
            f"A checkpoint holds dense tensors of the dtypes {', '.join(DTYPES)}, and {name} is {got}. Leave it out, "
            "or convert it."
        )
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        raise UnsupportedDtype(
            f"A checkpoint holds plain tensors, and {name} is a {type(tensor).__name__}. Save sharded models with "
            "torch.distributed.checkpoint and octavo.state_dict(model)."
        )
    if tensor.dim() > MOST_DIMS:
        raise UnsupportedShape(
            f"A checkpoint holds tensors of up to {MOST_DIMS} dims, and {name} has {tensor.dim()}. Reshape it."
        )
    if tensor.is_meta or isinstance(tensor, FakeTensor):
        raise UnsupportedDevice(
            f"{name} is on the meta device, and has no values. Call model.to_empty(device=...) first, or initialise it."
        )


def bytes_of(tensor: Tensor) -> Any:
    """Returns the bytes of a tensor, of a copy only if it is elsewhere or not contiguous."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    size = plain.numel() * plain.element_size()
    if size == 0:
        return b""
    buffer: Any = (ctypes.c_char * size).from_address(plain.data_ptr())
    buffer._tensor = plain  # lives as long as the buffer
    return memoryview(buffer).cast("B")


# -- reading -----------------------------------------------------------------------------------------------------------


def read(path: Path, expected: Digest | None = None) -> TensorFile:
    """Reads a whole file. Raises InvalidCheckpoint unless it keeps all rules of the format, and has that digest."""
    try:
        with opened(path) as file:
            return _read(file, path, expected)
    except OSError as error:
        raise InvalidCheckpoint(
            f"{path} could not be read: {error.strerror or error}. Check the path, and that it is a file."
        ) from None


@contextmanager
def opened(path: Path) -> Iterator[BufferedReader]:
    """Opens a regular file to read it. Raises InvalidCheckpoint for any other: a FIFO may never have a writer, and
    /dev/zero never ends. It opens a FIFO without waiting for a writer."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | WITHOUT_WAITING)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise damaged(path, "it is no regular file")
        yield file


def _read(file: BufferedReader, path: Path, expected: Digest | None) -> TensorFile:
    size = os.fstat(file.fileno()).st_size
    if expected is not None and size != expected.bytes:
        raise damaged(path, f"the file was written with {expected.bytes} bytes, and has {size}")
    start = file.read(8)
    length = int.from_bytes(start, "little")
    if len(start) < 8 or length > min(LARGEST_HEADER, size - 8):
        raise damaged(path, _no_header(start, length, size))
    text = file.read(length)
    if len(text) < length:
        raise damaged(path, f"it ended in its header of {length} bytes")
    digest = hashlib.sha256(start + text)
    entries, metadata = _entries(path, text, size - 8 - length)
    tensors = {}
    for entry in entries:
        data = bytearray(entry.end - entry.begin)
        if file.readinto(data) != len(data):
            raise damaged(path, f"it ended in {shown(repr(entry.name))}")
        digest.update(data)
        tensors[entry.name] = _tensor(path, entry, data)
    if expected is not None and digest.hexdigest() != expected.sha256:
        raise damaged(path, f"its SHA-256 is {digest.hexdigest()}, and it was written with {expected.sha256}")
    return TensorFile(tensors, metadata, Digest(size, digest.hexdigest()))


def damaged(path: Path, why: str) -> InvalidCheckpoint:
    return InvalidCheckpoint(f"{path} is damaged or no file of a checkpoint: {why}. Load another checkpoint.")


def _no_header(start: bytes, length: int, size: int) -> str:
    if start.startswith(PICKLES):
        return "it begins as a file of torch.save or pickle does, and Octavo reads none, since a pickle can run code"
    if len(start) < 8:
        return f"a safetensors file has 8 bytes before its header, and this one has {size} in all"
    return (
        f"its first 8 bytes announce a header of {length} bytes, and {size - 8} follow (a header has at most "
        f"{LARGEST_HEADER})"
    )


def _entries(path: Path, text: bytes, size: int) -> tuple[list[_Entry], dict[str, str]]:
    """Returns the tensors of a header, in the order of their bytes, and its texts. `size` is the number of bytes that
    follow the header; the tensors must cover them, each byte once."""
    header = parse_json(path, text)
    if not isinstance(header, dict):
        raise damaged(path, f"its header is {shown(repr(header))}, and no table of tensors")
    metadata = header.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise damaged(path, f"{METADATA} holds texts by name, and here something else")
    entries = sorted((_entry(path, *item) for item in header.items()), key=lambda entry: (entry.begin, entry.end))
    at = 0
    for entry in entries:
        if entry.begin != at:
            what = "overlap the tensor before them" if entry.begin < at else "leave a gap before them"
            raise damaged(path, f"the bytes of {shown(repr(entry.name))} begin at {entry.begin}, and {what}")
        at = entry.end
    if at != size:
        raise damaged(path, f"its tensors have {at} bytes, and {size} follow the header")
    return entries, metadata


def _entry(path: Path, name: str, entry: Any) -> _Entry:
    """Checks one entry of a header. That its range ends inside of the file is the caller's check."""
    what = shown(repr(name))
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise damaged(path, f"an entry has dtype, shape and data_offsets, and {what} is {shown(repr(entry))}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise damaged(path, f"{what} has the dtype {shown(repr(dtype))}, and the known ones are {', '.join(DTYPES)}")
    if not _are_sizes(shape) or len(shape) > MOST_DIMS or math.prod(max(n, 1) for n in shape) > LARGEST_SIZE:
        raise damaged(path, f"{what} has the shape {shown(repr(shape))}, and a shape is up to {MOST_DIMS} sizes")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise damaged(path, f"{what} has the data_offsets {shown(repr(offsets))}, and these are [begin, end]")
    size = math.prod(shape) * DTYPES[dtype].itemsize
    if offsets[1] - offsets[0] != size:
        raise damaged(path, f"{what} is {dtype} {shape}, which is {size} bytes, and its range is {offsets}")
    return _Entry(name, DTYPES[dtype], tuple(shape), offsets[0], offsets[1])


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n <= LARGEST_SIZE for n in value)


def _tensor(path: Path, entry: _Entry, data: bytearray) -> Tensor:
    if not data:
        return torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
    raw = torch.frombuffer(data, dtype=torch.uint8)
    if entry.dtype == torch.bool and raw.max() > 1:
        raise damaged(path, f"{shown(repr(entry.name))} is BOOL, whose bytes are 0 and 1, and has one of {raw.max()}")
    return raw.view(entry.dtype).view(entry.shape)


def parse_json(path: Path, text: bytes) -> Any:
    """Parses JSON that has no name twice in one object. Raises InvalidCheckpoint for anything else."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
            raise damaged(path, f"it has {shown(repr(twice))} twice")
        return found

    try:
        return json.loads(text.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        if isinstance(error, InvalidCheckpoint):
            raise
        raise damaged(path, f"it has text that is no JSON ({shown(str(error))})") from None
