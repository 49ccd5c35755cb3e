"""The samples of large grids: which cases `make test` runs, and that the functions that are named exist."""

from types import SimpleNamespace

from tests import fast, samples


def item(name, *marks):
    """Returns a collected test with these marks, to which more can be added."""
    found = list(marks)
    return SimpleNamespace(
        nodeid=name,
        marks=found,
        get_closest_marker=lambda mark: mark if mark in found else None,
        add_marker=lambda mark: found.append(mark.name),
    )


def test_one_case_of_each_period_stays(monkeypatch):
    monkeypatch.setattr(samples, "PERIODS", {"test_a.py": {"test_x": 3}})
    cases = [item(f"tests/test_a.py::test_x[{i}]") for i in range(7)]
    others = [item("tests/test_a.py::test_y[0]"), item("tests/test_a.py::test_x[gpu]", "gpu")]
    samples.mark_the_rest([*cases, *others])
    kept = [i for i, case in enumerate(cases) if "slow" not in case.marks]
    assert kept in ([0, 3, 6], [1, 4], [2, 5])
    assert [case.marks for case in others] == [[], ["gpu"]]


def test_samples_of_two_functions_start_at_other_cases(monkeypatch):
    monkeypatch.setattr(samples, "PERIODS", {"test_a.py": {f"test_{i}": 4 for i in range(8)}})
    starts = set()
    for i in range(8):
        cases = [item(f"tests/test_a.py::test_{i}[{j}]") for j in range(4)]
        samples.mark_the_rest(cases)
        starts.add(next(j for j, case in enumerate(cases) if not case.marks))
    assert len(starts) > 2


def test_every_function_with_a_period_exists():
    root = samples.ROOT
    missing = [
        f"{file}::{name}"
        for file, periods in samples.PERIODS.items()
        for name in periods
        if name.split("::")[-1] not in fast.functions_of(root / file)
    ]
    assert missing == []
