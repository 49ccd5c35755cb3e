"""Safetensors files: the safetensors package reads and checks them, and one pass over the tensors writes them.

Reading: the package checks the format. Here are the refusals that it does not make: what is no regular file, names that
come twice, fields and dtypes that no checkpoint has, more than 32 dims, and bools of other bytes than 0 and 1. The
digest is taken of the bytes that were loaded, and not of the file, which may change between two reads.

Writing: the package's writer takes the addresses of all tensors at once, so a model on a GPU would be on the host as a
whole. This one copies a tensor at a time to the host, and hashes what it writes.
"""

import ctypes
import hashlib
import json
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
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
from octavo.values import excerpt

LARGEST_HEADER = 100_000_000  # bytes; the limit of the safetensors package
MOST_DIMS = 32
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
PICKLED = "it begins as a file of torch.save or pickle does, and Octavo reads none, since a pickle can run code"


class Digest(NamedTuple):
    """The size of a file, and the SHA-256 of its bytes."""

    bytes: int
    sha256: str


class Entry(NamedTuple):
    """A tensor of a file: its dtype by the file's name for it, its shape, and its first byte and the one after it."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class TensorFile(NamedTuple):
    """The content of a file: tensors on the CPU by name, and texts by name."""

    tensors: dict[str, Tensor]
    metadata: dict[str, str]
    digest: Digest


# -- writing -----------------------------------------------------------------------------------------------------------


def write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> Digest:
    """Write a new file, and return after the disk has it. Raise, before it is written, for tensors without bytes."""
    for name, tensor in tensors.items():
        check_plain(name, tensor)
    return write_made(path, tensors, tensors.__getitem__, metadata)


def write_made(
    path: Path, tensors: Mapping[str, Tensor], make: Callable[[str], Tensor], metadata: Mapping[str, str] | None = None
) -> Digest:
    """Do the same for tensors that `make` makes by their names, one at a time. Only dtypes and shapes of `tensors` are
    read."""
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
        for part in (len(text).to_bytes(8, "little"), text, *order):
            buffer: Any = bytes_of(make(part)) if isinstance(part, str) else part
            digest.update(buffer)
            file.write(buffer)
        file.flush()
        os.fsync(file.fileno())
    return Digest(8 + len(text) + at, digest.hexdigest())


def check_plain(name: str, tensor: object) -> None:
    """Raise for what a file cannot hold: other objects, sparse, sharded and meta tensors, many dims, some names."""
    if name == METADATA:
        raise UnsupportedConfig(
            f"A safetensors file keeps texts under the name {name}, and a tensor has it. Rename it."
        )
    if utf8(name) != name:
        raise UnsupportedConfig(f"A safetensors file has names in UTF-8, and {name!r} has none there. Rename it.")
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


def utf8(name: str) -> str:
    """Return a name with escapes for what UTF-8 does not have: halves of surrogate pairs."""
    return name.encode("utf-8", "backslashreplace").decode()


def bytes_of(tensor: Tensor) -> Any:
    """Return the bytes of a tensor, of a copy only if it is elsewhere or not contiguous."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    size = plain.numel() * plain.element_size()
    if size == 0:
        return b""
    buffer: Any = (ctypes.c_char * size).from_address(plain.data_ptr())
    buffer._tensor = plain  # lives as long as the buffer
    return memoryview(buffer).cast("B")


def write_text(path: Path, text: str) -> None:
    """Write a new file of text, and return after the disk has it."""
    with open(path, "x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


# -- reading -----------------------------------------------------------------------------------------------------------


def read(path: Path, expected: Digest | None = None) -> TensorFile:
    """Read a whole file. Raise InvalidCheckpoint unless it keeps all rules of the format, and has that digest."""
    with _checked(path) as file:
        size = os.fstat(file.fileno()).st_size
        if expected is not None and size != expected.bytes:
            raise damaged(path, f"the file was written with {expected.bytes} bytes, and has {size}")
        with _content(path, file) as (content, header, _):
            metadata, digest = content.metadata() or {}, hashlib.sha256(header)
            tensors = {name: _hashed(path, name, content, digest) for name in content.offset_keys()}
    if expected is not None and digest.hexdigest() != expected.sha256:
        raise damaged(path, f"its SHA-256 is {digest.hexdigest()}, and it was written with {expected.sha256}")
    return TensorFile(tensors, metadata, Digest(size, digest.hexdigest()))


def read_header(path: Path) -> dict[str, Entry]:
    """Return where each tensor of a file lies. Raise InvalidCheckpoint unless it keeps all rules of the format."""
    with _checked(path) as file, _content(path, file) as (_, start, header):
        return {
            name: Entry(path, entry["dtype"], tuple(entry["shape"]), *[len(start) + at for at in entry["data_offsets"]])
            for name, entry in header.items()
            if name != METADATA
        }


def read_entry(entry: Entry, buffer: Tensor | None = None) -> Tensor:
    """Read one tensor of a file: into a buffer of bytes on the CPU, or into memory of its own. Memory that is allocated
    and freed for each tensor, between others that stay, leaves gaps that no later tensor fits in."""
    number = entry.end - entry.start
    raw = torch.empty(number, dtype=torch.uint8, device="cpu") if buffer is None else buffer[:number]
    if isinstance(raw, FakeTensor):
        raise UnsupportedConfig(f"{entry.path} is read into memory, and a FakeTensorMode makes none. Leave that mode.")
    with _checked(entry.path) as file:
        file.seek(entry.start)
        if raw.numel() and file.readinto(bytes_of(raw)) != raw.numel():
            raise damaged(entry.path, "it became shorter while it was read")
    return raw.view(DTYPES[entry.dtype]).view(entry.shape)


@contextmanager
def _checked(path: Path) -> Iterator[BufferedReader]:
    """Open a file, and raise InvalidCheckpoint where the system or the safetensors package refuses it."""
    from safetensors import SafetensorError  # here: `import octavo` does not need it

    start = b""
    try:
        with opened(path) as file:
            start = file.peek(8)[:8]
            yield file
    except SafetensorError as error:
        why = PICKLED if start.startswith(PICKLES) else f"safetensors refuses it ({excerpt(str(error))})"
        raise damaged(path, why) from None
    except OSError as error:
        raise InvalidCheckpoint(
            f"{path} could not be read: {error.strerror or error}. Check the path, and that it is a file."
        ) from None


@contextmanager
def _content(path: Path, file: BufferedReader) -> Iterator[tuple[Any, bytes, dict[str, Any]]]:
    """Yield an open file as the safetensors package reads it, the bytes before its tensors, and its header."""
    from safetensors import safe_open

    start = file.read(8)
    # pread and not mmap: a mapped tensor would change, or end the process, when the file does. With pread the
    # package makes tensors on torch's default device, so that is the CPU here.
    with torch.device("cpu"), safe_open(path, framework="pt", device="cpu", backend="pread") as content:
        text = file.read(int.from_bytes(start, "little"))
        header = parse_json(path, text)
        _check_header(path, header)
        yield content, start + text, header


def _hashed(path: Path, name: str, content: Any, digest: Any) -> Tensor:
    """Return a tensor of an open file, and add its bytes to a digest."""
    tensor: Tensor = content.get_tensor(name)
    digest.update(bytes_of(tensor))
    if tensor.dtype == torch.bool and tensor.numel() and (largest := tensor.view(torch.uint8).max()) > 1:
        raise damaged(path, f"{excerpt(repr(name))} is BOOL, whose bytes are 0 and 1, and has one of {largest}")
    return tensor


@contextmanager
def opened(path: Path) -> Iterator[BufferedReader]:
    """Open a regular file to read it. Raise InvalidCheckpoint for any other: a FIFO may never have a writer, and
    /dev/zero never ends. A FIFO is opened without waiting for a writer."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | WITHOUT_WAITING)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise damaged(path, "it is no regular file")
        yield file


def damaged(path: Path, why: str) -> InvalidCheckpoint:
    """Return the error for a file that is not as Octavo wrote it."""
    return InvalidCheckpoint(f"{path} is damaged or no file of a checkpoint: {why}. Load another checkpoint.")


def _check_header(path: Path, header: dict[str, Any]) -> None:
    """Raise for entries that the safetensors package takes, and no checkpoint has."""
    for name, entry in header.items():
        if name == METADATA:
            continue
        what = excerpt(repr(name))
        if set(entry) != {"dtype", "shape", "data_offsets"}:
            raise damaged(path, f"an entry has dtype, shape and data_offsets, and {what} is {excerpt(repr(entry))}")
        if entry["dtype"] not in DTYPES:
            raise damaged(path, f"{what} has the dtype {entry['dtype']}, and the known ones are {', '.join(DTYPES)}")
        if len(entry["shape"]) > MOST_DIMS:
            raise damaged(path, f"{what} has the shape {excerpt(repr(entry['shape']))}, of more than {MOST_DIMS} sizes")


def read_json(path: Path, most: int) -> Any:
    """Return the content of a JSON file of at most so many bytes."""
    with opened(path) as stream:
        text = stream.read(most + 1)
    if len(text) > most:
        raise damaged(path, f"it has more than {most} bytes")
    return parse_json(path, text)


def parse_json(path: Path, text: bytes | str, read_object: Callable[[dict[str, Any]], Any] = dict) -> Any:
    """Parse JSON that has no name twice in one object. Raise InvalidCheckpoint for anything else. Each object, from the
    innermost on, is replaced by what `read_object` returns for it."""

    def unique(pairs: list[tuple[str, Any]]) -> Any:
        found = dict(pairs)
        if len(found) < len(pairs):
            (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
            raise damaged(path, f"it has {excerpt(repr(twice))} twice")
        return read_object(found)

    try:
        return json.loads(text.decode() if isinstance(text, bytes) else text, object_pairs_hook=unique)
    except InvalidCheckpoint:
        raise
    except (ValueError, TypeError, RecursionError) as error:
        raise damaged(path, f"it has text that is no JSON ({excerpt(str(error))})") from None
