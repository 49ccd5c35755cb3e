"""Wheel and sdist: bytes that the sources decide, the package and nothing else. README's example runs from a wheel."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from octavo.version import __version__
from tests import release
from tests.support.pages import examples

ROOT = Path(__file__).parent.parent
SOURCES = ("octavo_command.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE")
SOURCES += ("CHANGELOG.md", "CITATION.cff", "SECURITY.md")
EPOCH = 1_800_000_000


def sources(folder):
    """Returns a copy of the sources, with files that a release leaves out. A build leaves files in it."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "octavo", folder / "octavo", ignore=ignored)
    for name in SOURCES:
        shutil.copyfile(ROOT / name, folder / name)
    for name in ("tests/test_wheel.py", "benchmarks/picture.py", "docs/index.md"):
        (folder / name).parent.mkdir()
        shutil.copyfile(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return release.build(sources(tmp_path_factory.mktemp("sources")), tmp_path_factory.mktemp("dist"), EPOCH)


@pytest.fixture(scope="module")
def wheel(built):
    return built[0]


def package_files():
    files = [path for path in (ROOT / "octavo").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {str(path.relative_to(ROOT)) for path in files if path.suffix in (".py", ".typed", ".txt")}


def test_the_wheel_is_one_small_file_for_every_platform(wheel):
    assert wheel.name == f"octavo-{__version__}-py3-none-any.whl"
    release.check(wheel)


def test_the_wheel_has_the_package_its_script_and_nothing_else(wheel):
    packed = {name for name in release.names(wheel) if not name.split("/")[0].endswith(".dist-info")}
    assert packed == {"octavo_command.py", *package_files()}


def test_the_sdist_has_the_package_and_what_builds_it(built):
    sdist = built[1]
    assert sdist.name == f"octavo-{__version__}.tar.gz"
    release.check(sdist)
    packed = {name for name in release.names(sdist) if not name.startswith("octavo.egg-info/")}
    assert packed == {*SOURCES, "PKG-INFO", "setup.cfg", *package_files()}


def test_another_build_has_the_same_bytes(built, tmp_path):
    """In another folder, at another time, with another umask and another order of files."""
    before = os.umask(0o077)
    try:
        folder = sources(tmp_path / "elsewhere")
        for path in folder.rglob("*.py"):
            os.utime(path, (1, 1))
        again = release.build(folder, tmp_path / "out", EPOCH)
    finally:
        os.umask(before)
    for first, second in zip(built, again, strict=True):
        assert first.name == second.name and first.read_bytes() == second.read_bytes()


def test_the_sdist_builds_the_wheel(built, tmp_path):
    wheel, sdist = built
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    again, _ = release.build(tmp_path / f"octavo-{__version__}", tmp_path / "out", EPOCH)
    assert again.read_bytes() == wheel.read_bytes()


def description(path):
    """What an index shows of a wheel."""
    with zipfile.ZipFile(path) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        return archive.read(name).decode().partition("\n\n")[2]


LINK = re.compile(r"\]\(([^)]*)\)")


def test_what_an_index_shows_has_no_link_that_only_a_clone_resolves(wheel):
    """No address was given to this build: the words stay, the links and the pictures go."""
    shown, readme = description(wheel), (ROOT / "README.md").read_text()
    assert LINK.findall(readme) and [link for link in LINK.findall(shown) if not link.startswith("https://")] == []
    assert "| the same in fused blocks | 1.44 | model-h200 |" in shown and "![" not in shown


def test_links_of_the_readme_get_the_address_of_the_repository_and_name_files_of_it():
    readme = (ROOT / "README.md").read_text()
    shown = release.standalone(readme, "https://example.org/octavo/", "9.8")
    ours = [link for link in LINK.findall(readme) if not link.startswith(("https://", "#"))]
    found = [link for link in LINK.findall(shown) if link not in LINK.findall(readme)]
    assert len(found) == len(ours) > 20
    for link, target in zip(found, ours, strict=True):
        kind = "raw" if target.endswith((".png", ".svg")) else "blob"
        assert link == f"https://example.org/octavo/{kind}/v9.8/{target}"
        assert (ROOT / target.partition("#")[0]).is_file()
    assert release.standalone(shown, "https://example.org/octavo", "9.8") == shown  # an sdist builds the same


def test_entries_have_the_time_that_is_given(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (moment,) = {entry.date_time for entry in archive.infolist()}
    assert moment == (2027, 1, 15, 8, 0, 0)


@pytest.mark.parametrize("name", ["tests/test_a.py", "octavo/__pycache__/a.pyc"])
def test_a_file_that_does_not_belong_into_a_release_is_found(wheel, tmp_path, name):
    spoiled = shutil.copy(wheel, tmp_path / wheel.name)
    with zipfile.ZipFile(spoiled, "a") as archive:
        archive.writestr(name, "")
    with pytest.raises(AssertionError, match=f"has .'{name}'"):
        release.check(spoiled)


def test_a_release_without_the_packages_data_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "octavo.whl", "w") as archive:
        archive.writestr("octavo/__init__.py", "")
    with pytest.raises(AssertionError, match=r"lacks .*alice.txt"):
        release.check(tmp_path / "octavo.whl")


def test_the_citation_and_the_changelog_have_the_version():
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()
    versions = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == __version__ and len(versions) == len(set(versions))


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
