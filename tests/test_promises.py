"""The page of what upstream promises: every item once, every test there, and numbers that are those of the tables."""

import ast
import re
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parent
PAGE = (ROOT.parent / "docs" / "promises.md").read_text()
OF_OPERATIONS = {"S": 8, "C": 13, "K": 9, "P": 10, "B": 22, "F": 14, "Y": 17}
LISTS = {
    "Linear and torch.compile": [str(i) for i in range(1, 54)],
    "Operations": [
        f"{letter}{i}{more}" for letter, last in OF_OPERATIONS.items() for i in range(1, last + 1)
        for more in (("", "b") if (letter, i) == ("Y", 14) else ("",))
    ],
    "Grouped layers and mixtures": [str(i) for i in range(1, 56)],
}  # fmt: skip
GRIDS = (
    "test_linear_grid", "test_operation_grid", "test_grouped_grid", "test_block_grid", "test_scaling_grid",
    "test_distributed",
)  # fmt: skip


def rows_of(title):
    section = PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in rows if row[0] != "behaviour"]


def names_in(row):
    return re.findall(r"`(\S+?)::(\S+?)`", row[3])


@cache
def functions_of(path):
    """The test functions of a file, and which of them need a GPU."""
    tree = ast.parse((ROOT / path).read_text())
    marks = [ast.unparse(n.value) for n in tree.body if isinstance(n, ast.Assign) and "pytestmark" in ast.unparse(n)]
    everywhere = any("mark.gpu" in mark for mark in marks)
    return {
        node.name: everywhere or any("mark.gpu" in ast.unparse(d) for d in node.decorator_list)
        for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)
    }  # fmt: skip


@pytest.mark.parametrize("title", LISTS)
def test_every_item_is_there_once_with_tests_that_exist(title):
    rows = rows_of(title)
    assert [row[0] for row in rows] == LISTS[title]
    for row in rows:
        found = names_in(row)
        assert found, f"{row[0]} names no test"
        for path, name in found:
            assert name in functions_of(path), f"{row[0]}: {path}::{name}"
        needs = [functions_of(path)[name] for path, name in found]
        if row[2].startswith("on a GPU"):
            assert all(needs), f"{row[0]} has a test that needs no GPU"
        elif row[2].startswith("yes"):
            assert not all(needs), f"{row[0]} has no test that runs on a CPU"
        else:
            assert len(row[2]) > len("differs: ") + 10, f"{row[0]} says neither yes nor what differs"


def test_the_numbers_are_those_of_the_tables():
    counts = re.findall(r"^\| [\w ,.]+ \| (\d+) \| (\d+) \| (\d+) \|$", PAGE.split("\n## ")[0], re.M)
    found = [
        tuple(str(sum(row[2].startswith(here) for row in rows_of(title))) for here in ("yes", "on a GPU", "differs"))
        for title in LISTS
    ]
    assert counts == found
    assert sum(int(n) for row in counts for n in row) == 202


def test_the_counts_of_the_grids():
    table = dict(re.findall(r"^\| `(\S+)` \| (\d+ \| \d+) \|$", PAGE, re.M))
    found = {}
    for grid in GRIDS:
        module = import_module(f"tests.upstream.{grid}")
        for name, function in vars(module).items():
            if name.startswith("test_"):
                (mark,) = [m for m in function.pytestmark if m.name == "parametrize"]
                cases = mark.args[1]
                fast = sum(not any(m.name == "slow" for m in case.marks) for case in cases)
                found[f"{grid}.py::{name}"] = f"{len(cases)} | {fast}"
    assert table == found
