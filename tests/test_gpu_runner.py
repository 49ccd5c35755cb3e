"""The runner of the GPU tests: what it hands out, in which order, and what it makes of a process that dies."""

import json
import re

import pytest

from tests import gpu, sanitizer

TESTS = [
    f"tests/a.py::test_{name}[{i}]" for name, count in (("dear", 7), ("cheap", 5), ("new", 3)) for i in range(count)
]
COSTS = {"tests/a.py::test_dear": 6.0, "tests/a.py::test_cheap": 0.1}


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_units_have_every_test_once_and_cases_of_one_function(seed):
    units = gpu.units_of(TESTS, COSTS, seed=seed)
    assert sorted(index for unit in units for index in unit) == list(range(len(TESTS)))
    assert all(len({gpu.function_of(TESTS[index]) for index in unit}) == 1 for unit in units)


def test_the_most_expensive_unit_comes_first_and_first_units_before_others():
    units = gpu.units_of(TESTS, COSTS)
    assert units[:4] == [[0], [12], [7, 8, 9, 10, 11], [13, 14]]  # an unknown function costs the mean of its file


def test_a_function_is_cut_by_its_cost():
    assert [len(unit) for unit in gpu.units_of(TESTS[:7], COSTS)] == [1] * 7
    assert [len(unit) for unit in gpu.units_of(TESTS[:7], {"tests/a.py::test_dear": 2.0})] == [3, 4]
    assert [len(unit) for unit in gpu.units_of(TESTS[:7], {"tests/a.py::test_dear": 0.1})] == [7]


def test_seeds_give_other_orders_and_one_seed_the_same():
    orders = [gpu.units_of(TESTS, COSTS, seed=seed) for seed in (None, 1, 2, 1)]
    assert orders[1] == orders[3]
    assert all(one != other for one, other in zip(orders[:3], orders[1:3] + orders[:1], strict=True))


def test_a_sample_has_some_cases_of_each_function():
    units = gpu.units_of(TESTS, COSTS, sample=2)
    assert sorted(index for unit in units for index in unit) == [0, 3, 7, 9, 12, 13]


SUITE = """
import os
import time

import pytest


@pytest.fixture(scope="module")
def shared():
    with open({log!r}, "a") as log:
        print(os.getpid(), "begins", file=log)
    yield
    with open({log!r}, "a") as log:
        print(os.getpid(), "ends", file=log)


@pytest.mark.parametrize("i", range(20))
def test_passes(shared, i):
    pass


def test_fails():
    assert 1 == 2


def test_poisons():
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_dies():
    os._exit(7)


def test_skips():
    pytest.skip("no reason")


@pytest.mark.parametrize("i", range(9))
def test_takes_long(i):
    time.sleep(0.5)
"""


@pytest.fixture
def suite(tmp_path):
    path = tmp_path / "test_suite.py"
    path.write_text(SUITE.format(log=str(tmp_path / "log")))
    return path


def run(suite, *arguments):
    """The exit status, the summary and the records by name, of a run without torch."""
    out = suite.parent / "out"
    status = gpu.main(["-m", "", "--workers", "2", "--out", str(out), *arguments])
    lines = (out / "results.jsonl").read_text().splitlines()
    records = {record["id"].split("::")[1]: record for record in map(json.loads, lines)}
    assert len(records) == len(lines)
    return status, json.loads((out / "summary.json").read_text()), records


def test_processes_that_die_are_replaced_and_the_rest_still_runs(suite, capsys):
    status, summary, records = run(suite, "--", str(suite), "-k", "not long")
    assert status == 1
    assert summary["outcomes"] == {"passed": 20, "failed": 2, "crashed": 1, "skipped": 1, "not run": 0}
    assert summary["started"] == 4  # two died
    assert "assert 1 == 2" in records["test_fails"]["text"]
    assert "its process ended with 7" in records["test_dies"]["text"]
    assert re.search(r"crashed: .*test_suite.py::test_dies\n.*ended with 7", capsys.readouterr().out)


def test_fixtures_of_a_module_are_made_once_in_a_process(suite):
    status, summary, records = run(suite, "--seed", "1", "--", str(suite), "-k", "passes")
    assert (status, summary["outcomes"]["passed"]) == (0, 20)
    lines = (suite.parent / "log").read_text().splitlines()
    assert len(set(lines)) == len(lines) == 2 * len({record["worker"] for record in records.values()})


def test_a_limit_leaves_tests_that_are_named(suite):
    status, summary, records = run(suite, "--limit", "1.5", "--", str(suite), "-k", "long")
    assert status == 1
    assert summary["outcomes"]["not run"] == len(summary["not_run"]) == 9 - len(records) > 0


def test_tests_that_cannot_be_collected_end_the_run(suite):
    suite.write_text("import octavo_that_is_not_there\n")
    with pytest.raises(SystemExit, match="octavo_that_is_not_there"):
        run(suite, "--", str(suite))


def test_the_sanitizer_runs_test_functions_that_exist():
    assert len(set(sanitizer.TESTS)) == len(sanitizer.TESTS) <= 30
    for test in sanitizer.TESTS:
        file, function = gpu.function_of(test).split("::")
        assert f"def {function}(" in (gpu.ROOT / file).read_text(), test


def test_the_sanitizer_reads_its_tools_reports(tmp_path):
    log, output = tmp_path / "log", tmp_path / "output"
    output.write_text("...\n3 passed in 2.50s\n")
    log.write_text(
        "========= Invalid __global__ read of size 4 bytes\n=========     at _cast_kernel+0x120 in triton.py:7\n"
        "========= ERROR SUMMARY: 2 errors\n"
    )
    found = sanitizer.outcome(log, output)
    assert (found["tests"], found["reports"], found["kernels"]) == ("3 passed in 2.50s", 2, {"_cast_kernel": 1})
    assert sanitizer.outcome(tmp_path / "none", output)["reports"] is None  # cut off


def test_a_run_has_the_files_whose_tests_a_fixture_of_their_folder_marks():
    chosen = gpu.files_with("gpu")
    assert "tests/runtime/test_host_calls.py" in chosen, "its fixture `device` has the mark"
    assert "tests/test_text.py" not in chosen
