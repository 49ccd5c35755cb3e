"""The wheel is one small file: the package, its script and nothing else. README's example runs from it alone."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from octavo.version import __version__
from tests.support.pages import examples

ROOT = Path(__file__).parent.parent
LIMIT = 1_150_000  # bytes
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy of the sources: a build leaves files behind."""
    copy, out = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("dist")
    shutil.copytree(ROOT / "octavo", copy / "octavo", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("octavo_command.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    done = subprocess.run([sys.executable, "-c", BUILD, out], cwd=copy, capture_output=True, text=True, check=True)
    return out / done.stdout.splitlines()[-1]


def test_the_wheel_is_one_small_file_for_every_platform(wheel):
    assert wheel.name == f"octavo-{__version__}-py3-none-any.whl"
    assert wheel.stat().st_size < LIMIT, f"{wheel.stat().st_size} bytes"


def test_the_wheel_has_the_package_its_script_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if not name.split("/")[0].endswith(".dist-info")}
    files = [path for path in (ROOT / "octavo").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    package = {str(path.relative_to(ROOT)) for path in files if path.suffix in (".py", ".typed", ".txt")}
    assert packed == {"octavo_command.py", *package}


def test_the_readme_runs_from_the_wheel(wheel, tmp_path):
    """In a process that finds the package in the wheel, and not in this checkout."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    readme = (ROOT / "README.md").read_text()
    example = next(block.text for block, _ in examples(readme) if "octavo.convert" in block.text)
    where = "import octavo; print(octavo.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", f"{example}\n{where}"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["Converted 2 layers (100.0% of the weights).", f"{tmp_path}/octavo/__init__.py"]
