"""Scripts of examples/: each trains on a CPU, says which package it lacks, and has its line in the gallery."""

import math
import os
import re
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from octavo import values
from tests.integration.scripts import EXAMPLES, NEEDS, ON_RANKS, WITHOUT_GPU, command

ROOT = Path(__file__).parent.parent
# gloo may abort a process that has ended its work and its group: once in about forty runs, of FSDP2 without Octavo too
ABORTED = "terminate called without an active exception"
ALONE = [path for path in EXAMPLES if path.stem not in {*ON_RANKS, *NEEDS}]


def name(path):
    return path.stem


@pytest.fixture(autouse=True)
def _nothing_registered(monkeypatch):
    """An example registers its recipe for itself alone."""
    monkeypatch.setattr(values, "_BY_NAME", dict(values._BY_NAME))


def check_that_it_trains(path):
    losses = runpy.run_path(str(path), run_name="example")["main"](["--steps", "10"])
    assert len(losses) == 10 and all(map(math.isfinite, losses))
    assert losses[-1] < 0.95 * losses[0]


@pytest.mark.parametrize("path", ALONE, ids=name)
def test_an_example_trains(path):
    check_that_it_trains(path)


@pytest.mark.parametrize("stem", [stem for stem in NEEDS if stem not in WITHOUT_GPU])
def test_an_example_with_its_packages_trains(stem):
    if lacking := [package for package in NEEDS[stem] if find_spec(package) is None]:
        pytest.skip(f"not installed: {', '.join(lacking)}. python -m tests.integration scripts runs {stem}.py")
    check_that_it_trains(ROOT / "examples" / f"{stem}.py")


@pytest.mark.parametrize("stem", ON_RANKS)
def test_an_example_of_several_processes_trains(stem):
    done = subprocess.run(
        [*command(ROOT / "examples" / f"{stem}.py"), "--steps", "6"],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0 or ABORTED in done.stderr, done.stderr
    first, last = map(float, re.search(r"loss ([\d.]+) to ([\d.]+) on 2 ranks", done.stdout).groups())
    assert last < 0.9 * first


@pytest.mark.parametrize(("stem", "package"), [(stem, each) for stem, packages in NEEDS.items() for each in packages])
def test_an_example_without_its_package_says_what_to_install(stem, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit, match=rf"needs .*{package}.*: pip install .*{package}"):
        runpy.run_path(str(ROOT / "examples" / f"{stem}.py"), run_name="example")


def test_the_gallery_has_a_line_for_each_example():
    gallery = (ROOT / "docs/gallery.md").read_text()
    shown = re.findall(r"^\| \[`([\w.]+)`\]\(\.\./examples/\1\) \| \S", gallery, re.MULTILINE)
    assert sorted(shown) == sorted(path.name for path in EXAMPLES)


@pytest.mark.parametrize("path", EXAMPLES, ids=name)
def test_an_example_begins_with_its_own_command(path):
    text = path.read_text()
    commands = re.findall(
        r"^    (?:python|torchrun .*|accelerate launch) examples/(\w+\.py)", text.split('"""')[1], re.MULTILINE
    )
    assert commands and set(commands) == {path.name}
