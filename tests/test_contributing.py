"""CONTRIBUTING.md to the letter: its files and edits go into a copy of the package, and its checks run there."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import octavo
from tests.test_layers import violations

ROOT = Path(octavo.__file__).parents[1]
PATH = re.compile(r"# ((?:octavo|tests)/\S+\.py)\n")


class Block(NamedTuple):
    section: str
    kind: str  # python, diff, sh or text
    body: str

    @property
    def path(self):
        """The file that the block is about; empty for a check."""
        first = PATH.match(self.body)
        return first[1] if first else ""


def blocks(text):
    found = []
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        title = section.splitlines()[0]
        found += [Block(title, *pair) for pair in re.findall(r"^```(\w+)\n(.*?)^```$", section, re.S | re.M)]
    return found


BLOCKS = blocks((ROOT / "CONTRIBUTING.md").read_text())
SECTIONS = ["recipe", "scaling scheme", "activation", "operation", "fused operation", "kernel"]


def edited(text, diff):
    """The text after an edit: each place, which is there once, with its lines replaced."""
    for place in diff.split("@@\n"):
        lines = place.splitlines()
        old = "".join(f"{line[1:]}\n" for line in lines if line[:1] in (" ", "-", ""))
        new = "".join(f"{line[1:]}\n" for line in lines if line[:1] in (" ", "+", ""))
        assert ("\n" + text).count("\n" + old) == 1, f"not there once:\n{old}"
        text = ("\n" + text).replace("\n" + old, "\n" + new)[1:]
    return text


def follow(block, root):
    """Write the file of a block, or edit it."""
    path = root / block.path
    if block.kind == "python":
        assert not path.exists(), f"{block.path} is there already"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.body.split("\n", 1)[1])
    else:
        assert block.kind == "diff"
        path.write_text(edited(path.read_text(), block.body.split("\n", 1)[1]))


def checks(section):
    """(command, output or None) of each check of a section."""
    own = [block for block in BLOCKS if block.section == section]
    for block, after in zip(own, [*own[1:], None], strict=True):
        shown = after.body if after is not None and after.kind == "text" else None
        if block.kind == "python" and not block.path:
            yield ["-c", block.body], shown
        for line in block.body.splitlines() if block.kind == "sh" else ():
            assert line.startswith("python "), line
            yield line.split()[1:], shown


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The package and its tests after all snippets were followed, in order."""
    root = tmp_path_factory.mktemp("copy")
    for name in ("octavo", "tests"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", root)
    for block in BLOCKS:
        if block.path:
            follow(block, root)
    return root


@pytest.fixture(scope="module")
def started(copy):
    """Every check of the page as a process. They start together, since each spends most of its time on imports."""
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    found = {
        section: [
            (shown, subprocess.Popen([sys.executable, *command], cwd=copy, env=environment, text=True,
                                     stdout=subprocess.PIPE, stderr=subprocess.PIPE))
            for command, shown in checks(f"Add a{'n' if section[0] in 'ao' else ''} {section}")
        ]
        for section in SECTIONS
    }  # fmt: skip
    yield found
    for processes in found.values():
        for _, process in processes:
            process.kill()
            process.wait()


def test_every_section_has_files_edits_and_checks():
    titles = [block.section for block in BLOCKS if block.path]
    assert list(dict.fromkeys(titles)) == [f"Add a{'n' if name[0] in 'ao' else ''} {name}" for name in SECTIONS]
    assert all(list(checks(title)) for title in titles)
    assert {"python", "diff"} <= {block.kind for block in BLOCKS}
    assert {block.kind for block in BLOCKS} <= {"python", "diff", "text", "sh"}


@pytest.mark.parametrize("section", SECTIONS)
def test_its_checks_print_what_the_page_shows(section, started):
    for shown, process in started[section]:
        output, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        assert shown is None or output == shown
        if section == "recipe" and shown is None:
            assert re.search(r"^fp8-token +reference +reference +reference +reference +reference$", output, re.M)
            assert "All 8 recipes run here" in output


def test_new_files_keep_the_order_of_imports(copy):
    new = [block.path for block in BLOCKS if block.path.startswith("octavo/")]
    for path in new:
        assert violations((copy / path).read_text(), Path(path).relative_to("octavo")) == []


def test_its_kernels_compile_for_hopper_without_spills(copy):
    """The Triton twin of the kernel, and the activation's curve."""
    pytest.importorskip("triton")
    script = """
from octavo.kernels.activation import triton as activation
from octavo.kernels.column_scale import triton as column_scale
from tests import offline

assert "octavo.kernels.column_scale.triton" in offline.MODULES
curves = [v for v in activation.variants() if v.constants["CURVE"] is activation.softsign]
for variant in [*column_scale.variants(), *curves[:2]]:
    print(variant.name, offline.ptxas(offline.ptx_of(variant, 90), 90)[1])
"""
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    run = subprocess.run([sys.executable, "-c", script], cwd=copy, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert len(lines) == 8
    assert all(line.endswith(" 0") for line in lines)


def test_an_edit_of_a_place_that_is_not_there_fails():
    with pytest.raises(AssertionError, match="not there once"):
        edited("a\nb\n", " c\n+d\n")
    with pytest.raises(AssertionError, match="not there once"):
        edited("a\nb\na\n", " a\n+d\n")
    assert edited("a\nb\n", "-a\n+c\n") == "c\nb\n"
