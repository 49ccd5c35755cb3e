"""Tests keep the rules of CONTRIBUTING.md: each asserts something, and each file says what it tests."""

import ast
import functools
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.test_import_order import ORDER

ROOT = Path(__file__).parent
MOODS = {"surprises", "corners", "breaches", "misc", "more", "others", "various", "acceptance"}


@functools.cache
def files():
    """Every file of the tests, parsed."""
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}


def functions(tree):
    """Functions and classes by name, with every name inside; "assert" stands for the statement."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            inside = (
                "assert" if isinstance(n, ast.Assert) else getattr(n, "id", None) or getattr(n, "attr", "")
                for n in ast.walk(node)
            )  # fmt: skip
            found[node.name] = found.get(node.name, set()) | {name for name in inside if isinstance(name, str)}
    return found


def imported(tree):
    """(file, name there, name here) of what comes from other files of the tests."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests."):
            path = node.module.removeprefix("tests.").replace(".", "/") + ".py"
            yield from ((path, alias.name, alias.asname or alias.name) for alias in node.names)


def silent(trees):
    """Tests that only an error on the way would fail: neither they nor what they call asserts, raises or warns."""
    inside = {path: functions(tree) for path, tree in trees.items()}
    imports = {path: list(imported(tree)) for path, tree in trees.items()}
    loud = {path: {"raises", "warns"} for path in trees}
    size = -1
    while size != (size := sum(map(len, loud.values()))):
        for path, found in inside.items():
            loud[path] |= {here for there, name, here in imports[path] if name in loud.get(there, ())}
            for name, names in found.items():
                if names & loud[path] or any(each.startswith("assert") for each in names):
                    loud[path].add(name)
    return [f"{path}: {name}" for path, found in inside.items() for name in found
            if name.startswith("test_") and name not in loud[path]]  # fmt: skip


def test_every_test_asserts():
    assert silent(files()) == []


def test_a_test_that_asserts_nothing_is_found():
    test, other = "from tests.b import {} as helper\ndef test_a():\n    helper(1)\n", "def check(x):\n    {}\n"
    for helper, statement, found in (
        ("check", "assert x", []),
        ("check", "print(x)", ["a.py: test_a"]),
        ("unknown", "assert x", ["a.py: test_a"]),
    ):
        assert silent({"a.py": ast.parse(test.format(helper)), "b.py": ast.parse(other.format(statement))}) == found


def test_every_file_says_what_it_is_and_is_named_by_its_subject():
    trees = {path: tree for path, tree in files().items() if tree.body}
    assert [path for path, tree in trees.items() if not ast.get_docstring(tree)] == []
    assert [path for path in trees if MOODS & set(Path(path).stem.split("_"))] == []


def test_what_test_files_share_is_in_support():
    """A test file is read, moved and split without a look at others. The order of imports is a table that stays."""
    taken = {
        f"{path}: {there}"
        for path, tree in files().items()
        for there, _, _ in imported(tree)
        if Path(there).name.startswith("test_") and there != "test_import_order.py"
    }
    assert taken == set()


ROLES = {
    "__init__.py",
    "__main__.py",
    "reference.py",
    "triton.py",
    "hopper.py",
}  # files that say their part in a folder


def test_a_file_name_of_the_package_occurs_once():
    """A newcomer who reads a name finds one file."""
    names = Counter(path.name for path in (ROOT.parent / "octavo").rglob("*.py") if path.name not in ROLES)
    assert [name for name, count in names.items() if count > 1] == []


def test_only_the_command_and_its_demo_print():
    """Everything else that the package says is an exception, a warning or a line of the logger "octavo"."""
    found = []
    for path in (ROOT.parent / "octavo").rglob("*.py"):
        tree = ast.parse(path.read_text())
        calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
        prints = any(isinstance(func, ast.Name) and func.id == "print" for func in calls)
        if prints and not {"cli", "demo"} & set(path.parts):
            found.append(path.name)
        names = [n.args[0].value for n in ast.walk(tree) if isinstance(n, ast.Call) and _is_logger(n.func)]
        assert all(name.split(".")[0] == "octavo" for name in names), path
    assert found == []


def _is_logger(func):
    return isinstance(func, ast.Attribute) and func.attr == "getLogger"


DESCRIBING = {"The", "A", "An", "Whether", "How", "What", "Which", "Who", "Where", "Of", "This"}
OBJECTS = {"a", "an", "the", "one", "each", "every", "its", "which", "what", "x"}  # they follow no noun


def descriptive_openings(tree):
    """Docstrings that describe where they should tell: "Returns the codes", "The codes", "Whether there are codes".

    A property, a class and a file are named like a thing; a verb in the third person is no name of one either.
    """
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module) or not ast.get_docstring(node):
            continue
        words = [word.strip(",.;") for word in re.sub(r"^`[^`]*`: ", "", ast.get_docstring(node)).split()]
        decorators = [ast.unparse(each) for each in getattr(node, "decorator_list", ())]
        is_function = isinstance(node, ast.FunctionDef) and not any("property" in each for each in decorators)
        is_third_person = re.fullmatch("[A-Za-z][a-z]*[^s]s", words[0]) and (is_function or words[1] in OBJECTS)
        if is_third_person or (is_function and words[0] in DESCRIBING):
            yield f"{getattr(node, 'name', 'the file')}: {' '.join(words[:4])}"


def test_docstrings_open_in_the_imperative():
    package = ROOT.parent / "octavo"
    paths = {path.relative_to(package): ast.parse(path.read_text()) for path in sorted(package.rglob("*.py"))}
    assert [f"{path}: {found}" for path, tree in paths.items() for found in descriptive_openings(tree)] == []


def test_a_docstring_that_describes_is_found():
    for code, found in (
        ('def f():\n    """Return x."""', []),
        ('def f():\n    """Returns x."""', ["f: Returns x"]),
        ('def f():\n    """Whether x is there."""', ["f: Whether x is there"]),
        ('class A:\n    @property\n    def f(self):\n        """The codes of x."""', []),
        ('class A:\n    """Rows of x."""', []),
        ('class A:\n    """Measures the rows of x."""', ["A: Measures the rows of"]),
        ('"""`octavo.step`: ends a step."""', ["the file: ends a step"]),
    ):
        assert list(descriptive_openings(ast.parse(code))) == found


# everyday words that stood for something of the package: each has the field's own word
REPLACED = {
    "adopted": "third-party", "extras": "auxiliary outputs", "known again": "call cache hit", "ledger": "report",
    "mail": "queue", "mailbox": "queue", "posted": "deferred", "settle": "materialize", "shadow": "float32 reference",
    "stranger": "third-party", "turned around": "transposed", "twin": "implementation", "unborn": "on meta",
}  # fmt: skip


def test_the_package_uses_the_words_of_its_field():
    pattern = re.compile(rf"\b({'|'.join(REPLACED)})s?\b", re.IGNORECASE)
    found = {
        f"{path.name}: {match[0]} is {REPLACED[match[1].lower()]}"
        for path in (ROOT.parent / "octavo").rglob("*.py")
        for match in pattern.finditer(path.read_text())
    }
    assert found == set()


ROOMS = sorted(path.parent for path in (ROOT.parent / "octavo").glob("*/__init__.py"))
INNER = [ROOT.parent / "octavo" / name for name in (
    "checkpoints/published", "fusion/custom", "model/third_party", "runtime/replay",
)]  # fmt: skip


def listed(room):
    """(docstring, the files that it lists, the files and folders that are there)."""
    text = ast.get_docstring(ast.parse((room / "__init__.py").read_text()), clean=False)
    files = {path.stem for path in room.glob("*.py")} | {path.parent.name for path in room.glob("*/__init__.py")}
    return text, set(re.findall(r"^    ([a-z_0-9]+)  +\S", text, re.M)), files


@pytest.mark.parametrize("room", ROOMS + INNER, ids=lambda room: room.name)
def test_a_room_opens_with_its_files(room):
    """The docstring has a line `    name    what is in it` for each file and folder, and for none that is not there."""
    _, names, files = listed(room)
    assert names - files == set()
    # a folder of kernels opens with a docstring of its own, so that a new family needs no line
    assert files - names - {"__init__", "__main__"} == set() or room.name == "kernels"


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
def test_a_room_says_which_rooms_it_may_import(room):
    above = ORDER[ORDER.index(room.name) - 1]
    assert listed(room)[0].strip().endswith(f"This room may import rooms up to `{above}`.")


def places():
    """(files of the package, names in them) of each row of "Where is it" on the page about the architecture."""
    page = (ROOT.parent / "docs/architecture.md").read_text()
    table = page[page.index("## Where is it") :].split("\n## ")[0]
    for row in re.findall(r"^\| .* \| (.*) \|$", table, re.M)[1:]:
        words = re.findall(r"`([^`]+)`", row)
        yield [word for word in words if "/" in word], [word for word in words if "/" not in word and ".py" not in word]


def test_the_places_of_behaviours_exist():
    package = ROOT.parent / "octavo"
    rows = list(places())
    assert len(rows) >= 25
    for paths, names in rows:
        assert paths and all((package / path).exists() for path in paths), paths
        files = [
            file
            for path in paths
            for file in (package.glob(path) if path.endswith(".py") else (package / path).glob("*.py"))
        ]
        text = "".join(file.read_text() for file in files)
        assert [name for name in names for part in name.split(".") if not re.search(rf"\b{part}\b", text)] == []
