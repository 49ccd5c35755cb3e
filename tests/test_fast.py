"""The selection of `make test-fast`: one case of a function, none of a slow one, and a list that fits the tests."""

from typing import NamedTuple

from tests import fast


class Item(NamedTuple):
    """A collected test."""

    nodeid: str


def test_the_first_case_of_each_function_is_chosen(monkeypatch, tmp_path):
    monkeypatch.setattr(fast, "SLOW", tmp_path / "slow")
    fast.SLOW.write_text("tests/test_b.py::test_long\n")
    names = [
        "tests/test_a.py::test_x[1]",
        "tests/test_a.py::test_x[2]",
        "tests/test_b.py::test_long",
        "tests/test_b.py::test_y",
    ]
    assert sorted(item.nodeid for item in fast.chosen([Item(name) for name in names])) == [names[0], names[3]]


def test_a_function_is_slow_if_its_cheapest_case_with_its_setup_is():
    lines = ["0.20s call     {}x[1]", "0.20s setup    {}x[1]", "9.00s call     {}y[1]", "0.01s call     {}y[2]"]
    assert fast.slow_in("\n".join(line.format("tests/a.py::test_") for line in lines)) == ["tests/a.py::test_x"]


def test_functions_that_share_a_long_setup_are_slow_together(monkeypatch, tmp_path):
    monkeypatch.setattr(fast, "SLOW", tmp_path / "tests" / "slow")
    fast.SLOW.parent.mkdir()
    (tmp_path / "tests" / "test_a.py").write_text(
        "@pytest.fixture(scope='module')\ndef built(): ...\n"
        "@pytest.fixture\ndef copied(built): ...\n"
        "def test_x(built): ...\ndef test_y(copied): ...\ndef test_z(tmp_path): ...\n"
    )
    log = "9.00s setup    tests/test_a.py::test_x\n0.01s call     tests/test_a.py::test_y"
    assert fast.slow_in(log) == ["tests/test_a.py::test_x", "tests/test_a.py::test_y"]


def test_every_slow_function_exists():
    root, missing = fast.SLOW.parent.parent, []
    for name in fast.slow_functions():
        file, _, function = name.partition("::")
        if function.split("::")[-1] not in fast.functions_of(root / file):
            missing.append(name)
    assert missing == []
