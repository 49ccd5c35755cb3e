"""Build the files of a release: python -m tests.release, or `make dist`, which installs twine first.

The wheel and the sdist go to dist/. Their bytes follow from the committed files, from the time of the commit or
SOURCE_DATE_EPOCH, and from the versions of Python and setuptools: not from the clock, the folder, the umask or files
that git does not know. Each is read again and checked: what it must hold and must not, its size, and the description
that an index shows.
"""

import argparse
import gzip
import hashlib
import io
import os
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMIT = 1_200_000  # bytes of the wheel
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, 'build_' + sys.argv[1])(sys.argv[2]))"
NOT_SHIPPED = ("tests/", "benchmarks/", "docs/", ".github/")
LEVEL = 9


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.release", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="the folder of the two files; default: dist")
    arguments = parser.parse_args(argv)
    if find_spec("twine") is None:
        print("Not installed: twine, which checks what an index shows. Run `make dist`, or pip install twine.")
        return 2
    epoch = int(os.environ.get("SOURCE_DATE_EPOCH") or _said("git", "log", "-1", "--format=%ct"))
    if changed := _said("git", "status", "--porcelain"):
        print(f"Not committed, and not in the release:\n{changed}")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(f"git archive HEAD | tar x -C {folder}", shell=True, cwd=ROOT, check=True)
        made = build(Path(folder), arguments.out, epoch)
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *made], check=True)
    for path in made:
        check(path)
        print(f"{path.stat().st_size:9,} bytes  sha256 {hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}")
    return 0


def _said(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def build(sources: Path, out: Path, epoch: int) -> tuple[Path, Path]:
    """Build wheel and sdist of a folder of sources, and write them again with equal times, owners and modes.

    Args:
        sources: a copy of the repository. The build leaves files in it.
        out: the folder of the two files; it is made if it is not there.
        epoch: the time of every entry, in seconds.

    Returns:
        The wheel and the sdist.
    """
    out.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch), "PYTHONHASHSEED": "0"}
    made = []
    for kind, write in (("wheel", _zip_again), ("sdist", _tar_again)):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-c", BUILD, kind, folder]
            subprocess.run(command, cwd=sources, env=environment, check=True, capture_output=True)
            (raw,) = Path(folder).iterdir()
            path = out / raw.name
            path.write_bytes(write(raw, epoch))
        made.append(path)
    return made[0], made[1]


def _zip_again(raw: Path, epoch: int) -> bytes:
    when = time.gmtime(max(epoch, 315532800))[:6]  # a zip file knows no time before 1980
    stream = io.BytesIO()
    with zipfile.ZipFile(raw) as old, zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED, compresslevel=LEVEL) as new:
        for name in old.namelist():  # in the order of the wheel, whose metadata come last
            entry = zipfile.ZipInfo(name, when)
            entry.external_attr, entry.compress_type = 0o100644 << 16, zipfile.ZIP_DEFLATED
            new.writestr(entry, old.read(name))
    return stream.getvalue()


def _tar_again(raw: Path, epoch: int) -> bytes:
    plain = io.BytesIO()
    with tarfile.open(raw) as old, tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as new:
        for one in sorted(old.getmembers(), key=lambda member: member.name):
            entry = tarfile.TarInfo(one.name)
            entry.size, entry.mtime, entry.type = one.size, epoch, one.type
            entry.mode = 0o755 if one.isdir() else 0o644
            new.addfile(entry, old.extractfile(one) if one.isfile() else None)
    return gzip.compress(plain.getvalue(), compresslevel=LEVEL, mtime=epoch)


def names(path: Path) -> list[str]:
    """Return the files of a wheel, or those of an sdist below its folder."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as archive:
            return archive.namelist()
    with tarfile.open(path) as archive:
        return [member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()]


def check(path: Path) -> None:
    """Raise if a built file lacks the package's data, or has what a release leaves out.

    Raises:
        AssertionError: it has tests, benchmarks or pages, lacks a file, or is too large.
    """
    found = names(path)
    strange = [name for name in found if name.startswith(NOT_SHIPPED) or "__pycache__" in name]
    assert not strange, f"{path.name} has {strange[:3]}"
    needed = ["octavo/__init__.py", "octavo/py.typed", "octavo/demo/text/alice.txt", "octavo_command.py"]
    needed += [] if path.suffix == ".whl" else ["pyproject.toml", "README.md", "LICENSE"]
    lacking = [name for name in needed if name not in found]
    assert not lacking, f"{path.name} lacks {lacking}"
    assert path.suffix != ".whl" or path.stat().st_size < LIMIT, f"{path.name} has {path.stat().st_size} bytes"


if __name__ == "__main__":
    sys.exit(main())
