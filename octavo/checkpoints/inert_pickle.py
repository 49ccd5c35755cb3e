"""Read the tensors and plain values of a pickle, and execute nothing that it names.

A pickle is a program that imports functions and calls them. This reader knows the three that rebuild a tensor, and
builds tensors of its own there. Every other name stands for an `Inert`, which takes any call, state or item, and does
nothing. It reads what `pickle.dumps` writes, and the files of `torch.save`, which are archives.
"""

import io
import math
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pickle import Unpickler, UnpicklingError
from typing import Any

import torch
from torch import Tensor

__all__ = ["MOST_BYTES", "Inert", "UnpicklingError", "read"]
MOST_BYTES = 1 << 28  # of a state: a window of 65,536 amaxes of a thousand tensors
_DTYPES = {
    "FloatStorage": torch.float32, "HalfStorage": torch.float16, "BFloat16Storage": torch.bfloat16,
    "DoubleStorage": torch.float64, "LongStorage": torch.int64, "IntStorage": torch.int32, "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}  # fmt: skip


class Inert:
    """Stand for a class or an object that a pickle names: take everything, and do nothing."""

    def __new__(cls, *_: Any, **__: Any) -> "Inert":
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, *_: Any, **__: Any) -> "Inert":
        return self

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, item: Any) -> None:
        """Take an item of a pickled list."""

    def extend(self, items: Any) -> None:
        """Take items of a pickled list."""


class _Known:
    """Stand for a function that a pickle may call. A function itself has attributes, which a pickle could set."""

    __slots__ = ("_function",)
    _function: Callable[..., Any]

    def __init__(self, function: Callable[..., Any]) -> None:
        object.__setattr__(self, "_function", function)

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)

    def __setattr__(self, name: str, value: Any) -> None:
        raise UnpicklingError(f"it sets {name} of a function")


def _tensor(storage: Any, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: Any) -> Any:
    """Build a tensor, as `torch._utils._rebuild_tensor_v2` does."""
    if not isinstance(storage, Tensor):
        return Inert()
    if math.prod(size) > MOST_BYTES:  # a stride of 0 makes any number of elements out of one
        raise ValueError(f"a tensor of {tuple(size)}")
    return torch.as_strided(storage, size, stride, offset).clone()


def _storage(content: bytes) -> Any:
    """Read a storage that `pickle.dumps` has written, by the reader of torch that takes tensors alone."""
    found = torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
    return torch.empty(0, dtype=found.dtype, device="cpu").set_(found)


_KNOWN: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): _Known(_tensor),
    ("torch.storage", "_load_from_bytes"): _Known(_storage),
    ("collections", "OrderedDict"): OrderedDict,
    **{("torch", name): dtype for name, dtype in _DTYPES.items()},
}


class _Reader(Unpickler):
    def __init__(self, content: bytes, archive: zipfile.ZipFile | None = None, folder: str = "") -> None:
        super().__init__(io.BytesIO(content))
        self.archive, self.folder = archive, folder

    def find_class(self, module: str, name: str) -> Any:
        return _KNOWN.get((module, name), Inert)

    def persistent_load(self, pid: Any) -> Any:
        """Return a storage of the archive."""
        if self.archive is None or not isinstance(pid, tuple) or len(pid) < 5 or not isinstance(pid[1], torch.dtype):
            return Inert()
        entry = self.archive.getinfo(f"{self.folder}data/{pid[2]}")
        if entry.file_size > MOST_BYTES:
            raise ValueError(f"a tensor of {entry.file_size} bytes")
        content = bytearray(self.archive.read(entry))
        if not content:
            return torch.empty(0, dtype=pid[1], device="cpu")
        return torch.frombuffer(content, dtype=pid[1])


def read(content: bytes) -> Any:
    """Return what a pickle holds: dicts, lists, numbers, strings and tensors, and an Inert in place of all else.

    Raises ValueError if these bytes are no such pickle."""
    if len(content) > MOST_BYTES:
        raise ValueError(f"it has {len(content)} bytes")
    try:
        if not zipfile.is_zipfile(io.BytesIO(content)):
            return _Reader(content).load()
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            entry = next(name for name in archive.namelist() if name.endswith("data.pkl"))
            if archive.getinfo(entry).file_size > MOST_BYTES:
                raise ValueError("its program is too long")
            return _Reader(archive.read(entry), archive, entry.removesuffix("data.pkl")).load()
    except Exception as error:  # whatever damaged bytes make a reader raise
        raise ValueError(f"it cannot be read: {type(error).__name__}: {error}") from error
