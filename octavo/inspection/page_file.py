"""A file that is replaced as a whole: a page that a reader reloads, a report, a policy."""

import os
import tempfile
from contextlib import suppress
from pathlib import Path


def write(path: Path, text: str) -> None:
    """Replace the file atomically: readers see the old text or the new, and a failure leaves the old one."""
    if is_device(path):
        path.write_text(text, encoding="utf-8")
        return
    path = real(path)
    handle, name = tempfile.mkstemp(prefix=".octavo-", dir=path.parent)
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, path.stat().st_mode & 0o7777 if path.exists() else 0o666 & ~_umask())
        os.replace(name, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(name)
        raise


def is_device(path: Path) -> bool:
    """Return whether the path can be written but not replaced: a pipe, /dev/null, /dev/stdout."""
    return path.exists() and (not path.is_file() or path.is_relative_to("/dev"))


def real(path: Path) -> Path:
    """Return the file that a link points to, so that the link stays a link."""
    return Path(os.path.realpath(path))


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
