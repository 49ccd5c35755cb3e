"""The list of planted faults fits the sources and the tests, and the tests catch every fault."""

import ast

import pytest

from tests import planted_faults
from tests.planted_faults import FAULTS, ROOT, Fault, occurrences

HARMLESS = Fault(
    "a text is another one",
    "octavo/formats.py",
    "Return the code nearest to each element",
    "Return the nearest code",
    "tests/test_formats.py::test_landmarks_of_the_range",
)


def test_the_source_of_every_planted_fault_occurs_once():
    assert {fault.name: occurrences(fault) for fault in FAULTS if occurrences(fault) != 1} == {}
    assert [fault.name for fault in FAULTS if fault.fault == fault.source] == []


def test_every_planted_fault_has_a_name_of_its_own_and_a_test_that_exists():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) == 30
    missing = []
    for fault in FAULTS:
        file, _, name = fault.test.partition("::")
        tree = ast.parse((ROOT / file).read_text())
        if name not in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}:
            missing.append(fault.test)
    assert missing == []


def test_a_source_that_is_gone_is_no_caught_fault(monkeypatch, capsys):
    gone = HARMLESS._replace(source="no such text")
    monkeypatch.setattr(planted_faults, "FAULTS", (gone,))
    monkeypatch.setattr(planted_faults, "outcome", lambda *_: planted_faults.Outcome(0, "", ""))
    assert planted_faults.main([]) == 1
    assert "its source occurs 0 times in octavo/formats.py" in capsys.readouterr().out


@pytest.mark.slow
def test_a_fault_that_changes_nothing_is_not_caught(monkeypatch, capsys):
    monkeypatch.setattr(planted_faults, "FAULTS", (HARMLESS,))
    assert planted_faults.main([]) == 1
    assert "NOT CAUGHT" in capsys.readouterr().out


@pytest.mark.slow
def test_every_planted_fault_is_caught_by_its_test(capsys):
    status = planted_faults.main([])
    assert status == 0, capsys.readouterr().out
