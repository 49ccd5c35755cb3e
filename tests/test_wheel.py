"""Wheel and sdist: bytes that the sources decide, the package and nothing else. README's example runs from a wheel."""

import ast
import base64
import hashlib
import json
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
from tests.wheel_sources import stripped

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


def test_the_wheel_is_smaller_than_a_megabyte(wheel, monkeypatch):
    assert wheel.stat().st_size < 1_000_000
    monkeypatch.setattr(release, "LIMIT", wheel.stat().st_size)
    with pytest.raises(AssertionError, match=f"has {wheel.stat().st_size} bytes"):
        release.check(wheel)


def statements(source):
    """The syntax of a file with its lines and columns, without docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                del node.body[0]  # a docstring, or the dots in its place
            node.end_lineno = node.end_col_offset = None  # it may end with its docstring
    return ast.dump(tree, include_attributes=True)


def test_the_wheel_has_the_code_of_the_repository_line_by_line(wheel):
    with zipfile.ZipFile(wheel) as archive:
        packed = {name: archive.read(name).decode() for name in archive.namelist() if name.endswith(".py")}
    assert len(packed) > 400
    for name, source in packed.items():
        ours = (ROOT / name).read_text()
        assert source == ours or statements(source) == statements(ours), name


def test_a_stripped_source_has_no_comments_and_the_docstrings_that_help_shows():
    source = '''"""What the file is."""

__all__ = ["public"]  # the names


def public():
    """Stays."""
    return "# no comment"


def internal():
    """Goes,
    all of it."""


class Report:
    """Stays too."""

    def summary(self):
        """And this."""

    def _count(self):
        """Goes."""
        return 1
'''
    found = stripped({"octavo/a.py": source})["octavo/a.py"]
    assert found.count("\n") == source.count("\n")
    assert re.findall("# .*", found) == ['# no comment"']
    assert re.findall('"""(.*?)"""', found) == ["What the file is.", "Stays.", "Stays too.", "And this."]
    assert "def internal():\n    ...\n\n" in found and "        return 1" in found
    without = source.replace('__all__ = ["public"]', "")
    assert stripped({"octavo/a.py": without})["octavo/a.py"].startswith("\n\n")
    assert stripped({"octavo/cli/a.py": without})["octavo/cli/a.py"].startswith('"""What the file is."""')


def test_an_installer_finds_the_hashes_of_all_files(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (record,) = [name for name in archive.namelist() if name.endswith("/RECORD")]
        rows = [row.split(",") for row in archive.read(record).decode().splitlines()]
        assert sorted(row[0] for row in rows) == sorted(archive.namelist())
        for name, digest, size in rows:
            data = archive.read(name)
            found = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
            assert (digest, size) == (("", "") if name == record else (f"sha256={found}", str(len(data))))


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
    assert "| the same in fused blocks | 1.47 | model-h200 |" in shown and "![" not in shown


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


# every docstring that users reach by a public name
DOCUMENTATION = """
import importlib, inspect
documentation = {}
for module in ("octavo", "octavo.moe", "octavo.ops", "octavo.quant", "octavo.recipes"):
    thing = importlib.import_module(module)
    documentation[module] = thing.__doc__
    for name in thing.__all__:
        found = getattr(thing, name)
        documentation[f"{module}.{name}"] = inspect.getdoc(found)
        for member, value in inspect.getmembers(found) if inspect.isclass(found) else ():
            if not member.startswith("_"):
                documentation[f"{module}.{name}.{member}"] = inspect.getdoc(value)
"""


def test_the_readme_runs_from_the_wheel_and_help_is_that_of_the_repository(wheel, tmp_path):
    """In a process that finds the package in the wheel, and not in this checkout."""
    here = {}
    exec(DOCUMENTATION, here)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    readme = (ROOT / "README.md").read_text()
    example = next(block.text for block, _ in examples(readme) if "octavo.convert" in block.text)
    where = f"import octavo, json; print(octavo.__file__)\n{DOCUMENTATION}\nprint(json.dumps(documentation))"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", f"{example}\n{where}"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    *said, documentation = done.stdout.splitlines()
    assert said == ["Converted 2 layers (100.0% of the weights).", f"{tmp_path}/octavo/__init__.py"]
    assert len(here["documentation"]) > 500 and json.loads(documentation) == here["documentation"]
