"""CONTRIBUTING.md to the letter: its files and edits go into a copy of the package, and its checks run there."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import octavo
from tests.test_import_order import violations

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
TITLES = {
    "recipe": "Add a recipe",
    "scheme": "Add a scaling scheme",
    "activation": "Add an activation",
    "operation": "Add an operation",
    "fused operation": "Add a fused operation",
    "kernel": "Add a kernel",
    "parallel style": "Add a parallel style",
}


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
    """(script or arguments of python, output or None) of each check of a section."""
    own = [block for block in BLOCKS if block.section == section]
    for block, after in zip(own, [*own[1:], None], strict=True):
        shown = after.body if after is not None and after.kind == "text" else None
        if block.kind == "python" and not block.path:
            yield block.body, shown
        for line in block.body.splitlines() if block.kind == "sh" else ():
            assert line.startswith("python -m "), line
            yield line.split()[2:], shown


# one process runs all of them: most of the time of a short script is the import of torch
RUNNER = """
import contextlib, io, json, runpy, sys, traceback

def run(check):
    if isinstance(check, str):
        exec(compile(check, "check", "exec"), {"__name__": "__main__"})
        return
    sys.argv = [check[0], *check[1:]]
    try:
        runpy.run_module(check[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        assert not end.code, end.code

results = []
for check in json.load(sys.stdin):
    output, error = io.StringIO(), ""
    try:
        with contextlib.redirect_stdout(output):
            run(check)
    except BaseException:
        error = traceback.format_exc()
    results.append([output.getvalue(), error])
print(json.dumps(results))
"""
COMPILE = """
from octavo.kernels.activation import triton as activation
from tests.kernel_variants import activations
from octavo.kernels.column_scale import triton as column_scale
from tests import offline

assert column_scale in offline.modules()
column_scale._launch((5, 70), (70, 1), column_scale.CONFIGS[0])
curves = [v for v in activations.variants() if v.constants["CURVE"] is activation.softsign]
for variant in [*column_scale.variants(), *curves[:2]]:
    assert not offline.unsupported_reason(variant), offline.unsupported_reason(variant)
    print(variant.name, offline.resources(variant)[1])
"""
# a sample of the tests that sweep recipes, of each room that has bounds or exceptions by recipe
SWEEPS = (
    "tests/ops/test_linear_exact.py", "tests/ops/test_quantized_io.py", "tests/model/test_expert_layouts.py",
    "tests/fusion/test_blocks.py", "tests/weights/test_cached_minibatches.py", "tests/inspection/test_inspect.py",
)  # fmt: skip
HAS_TRITON = importlib.util.find_spec("triton") is not None


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
def results(copy):
    """(output, error) of every check of each section, and of the compilation of kernels."""
    wanted = {name: [check for check, _ in checks(title)] for name, title in TITLES.items()}
    wanted["offline"] = [COMPILE] if HAS_TRITON else []
    wanted["sweeps"] = [["pytest", "-q", "-p", "no:cacheprovider", "-k", "fp8-token", *SWEEPS]]
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-c", RUNNER], cwd=copy, env=environment, capture_output=True, text=True,
        input=json.dumps([check for own in wanted.values() for check in own]),
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    found = iter(json.loads(run.stdout.splitlines()[-1]))
    return {name: [next(found) for _ in own] for name, own in wanted.items()}


def test_every_section_has_files_edits_and_checks():
    titles = [block.section for block in BLOCKS if block.path]
    assert list(dict.fromkeys(titles)) == list(TITLES.values())
    assert all(list(checks(title)) for title in TITLES.values())
    assert {block.kind for block in BLOCKS} == {"python", "diff", "text", "sh"}


@pytest.mark.parametrize("section", TITLES)
def test_the_checks_of_the_page_print_what_the_page_shows(section, results):
    for (_, shown), (output, error) in zip(checks(TITLES[section]), results[section], strict=True):
        assert not error, error
        assert shown is None or output == shown


def test_the_doctor_lists_the_recipe(results):
    output = results["recipe"][-1][0]
    assert re.search(r"^fp8-token( +(native|emulated|reference)){5}$", output, re.MULTILINE)
    assert f"All {len(octavo.recipes.SHIPPED) + 1} recipes run here" in output


def test_a_recipe_is_two_files_of_the_package_and_a_kernel_four_with_its_test():
    files = {
        name: {block.path for block in BLOCKS if block.section == title and block.path}
        for name, title in TITLES.items()
    }
    assert len(files["recipe"]) == 2
    assert len([path for path in files["kernel"] if "column_scale/" in path or path.startswith("tests/")]) == 4


def test_tests_that_sweep_recipes_pass_for_the_new_one_without_a_line_about_it(results):
    ((output, error),) = results["sweeps"]
    assert not error, output
    passed = re.search(r"^(\d+) passed", output.splitlines()[-1])
    assert passed and int(passed[1]) >= 30, output


def test_the_test_of_the_kernel_runs(results):
    assert re.search(r"3 passed, 3 (skipped|deselected)|6 passed", results["kernel"][-1][0])


def test_the_test_of_the_parallel_style_runs(results):
    assert re.search(r"^2 passed", results["parallel style"][-1][0].splitlines()[-1])


def test_new_files_keep_the_order_of_imports(copy):
    new = [block.path for block in BLOCKS if block.path.startswith("octavo/")]
    for path in new:
        assert violations((copy / path).read_text(), Path(path).relative_to("octavo")) == []


def test_files_of_the_page_pass_the_linter(copy):
    paths = sorted({block.path for block in BLOCKS if block.path})
    for arguments in (["check", "--no-cache"], ["format", "--no-cache", "--diff"]):
        run = subprocess.run(
            [sys.executable, "-m", "ruff", *arguments, *paths], cwd=copy, capture_output=True, text=True
        )
        assert run.returncode == 0, run.stdout


@pytest.mark.skipif(not HAS_TRITON, reason="no triton here")
def test_the_kernels_of_the_page_compile_for_hopper_without_spills(results):
    """The Triton twin of the kernel, and the activation's curve."""
    ((output, error),) = results["offline"]
    assert not error, error
    assert len(output.splitlines()) == 8
    assert all(line.endswith(" 0") for line in output.splitlines())


def test_an_edit_of_a_place_that_is_not_there_fails():
    with pytest.raises(AssertionError, match="not there once"):
        edited("a\nb\n", " c\n+d\n")
    with pytest.raises(AssertionError, match="not there once"):
        edited("a\nb\na\n", " a\n+d\n")
    assert edited("a\nb\n", "-a\n+c\n") == "c\nb\n"
