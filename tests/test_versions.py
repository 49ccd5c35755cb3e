"""The suite with one torch after another (`tests/versions`): counting, resuming, and the page that is on file."""

import json
import os
import subprocess
import sys

import pytest

from tests.support.pages import blocks, links, paragraphs
from tests.versions import HERE, NEWEST, TRITON_OF, Places, environment, page, results, suite
from tests.versions.__main__ import main
from tests.versions.environment import Environment, InstallationFailed, Sources

REPORT = """<?xml version="1.0" encoding="utf-8"?>
<testsuites><testsuite name="pytest" errors="2" failures="1" skipped="2" tests="8">
<testcase classname="tests.test_a" name="test_one" file="tests/test_a.py" line="3" time="0.1" />
<testcase classname="tests.test_a.TestOf" name="test_two[x-1]" file="tests/test_a.py" line="9" time="0.1">
<failure message="AssertionError: /home/me/octavo/test_a.py differs&#10;second line">a traceback</failure></testcase>
<testcase classname="tests.sub.test_b" name="test_three" file="tests/sub/test_b.py" line="1" time="0.1">
<skipped type="pytest.skip" message="no C++ compiler">tests/sub/test_b.py:1: no C++ compiler</skipped></testcase>
<testcase classname="tests.sub.test_b" name="test_four" file="tests/sub/test_b.py" line="1" time="0.1">
<skipped type="pytest.skip" message="no C++ compiler">tests/sub/test_b.py:1: no C++ compiler</skipped></testcase>
<testcase classname="tests.test_a" name="test_five" file="tests/test_a.py" line="3" time="0.1" />
<testcase classname="tests.test_a" name="test_five" file="tests/test_a.py" line="3" time="0.1">
<error message="failed on teardown with &quot;OSError: gone&quot;">a traceback</error></testcase>
<testcase classname="" name="tests.test_c" time="0.0"><error message="collection failure">why</error></testcase>
</testsuite></testsuites>
"""
PASSED = """<testsuites><testsuite tests="1">
<testcase classname="tests.test_a" name="test_one" file="tests/test_a.py" /></testsuite></testsuites>"""
FAST_PATHS = [
    {"name": "launches", "what": "starts kernels without Triton's own launcher", "on": True, "why": ""},
    {"name": "direct calls", "what": "calls layers | without the dispatcher", "on": False, "why": "the check raised"},
]
DOCTOR = json.dumps({"machine": {"gpu": None}, "recipes": {}, "fast_paths": FAST_PATHS})
# an interpreter that answers what it is asked: its facts, its doctor, and pytest with a report and an exit code
INTERPRETER = """#!{python}
import json, pathlib, sys
words, folder = sys.argv[1:], pathlib.Path(__file__).parent
with open(folder / "asked", "a") as asked:
    print(*words[:2], *[word for word in words if word.startswith("tests/")], file=asked)
if words[0] == "-c":
    print(json.dumps({{"torch": "{torch}+cpu", "triton": "3.9.0", "cuda": None, "python": "3.11.7"}}))
elif words[1] == "octavo":
    print((folder / "doctor.json").read_text())
elif words[1] == "pytest":
    report = next(word for word in words if word.startswith("--junitxml=")).removeprefix("--junitxml=")
    pathlib.Path(report).write_text((folder / "report.xml").read_text())
    sys.exit(int((folder / "code").read_text()))
"""


def git(root, *command):
    who = ("-c", "user.name=test", "-c", "user.email=test@example.org")
    subprocess.run(["git", *who, *command], cwd=root, check=True, capture_output=True)


def commit(root, **files):
    """Commits files, whose names have two underscores for a slash."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    git(root, "add", ".")
    git(root, "commit", "--quiet", "-m", "a commit")


@pytest.fixture
def places(tmp_path):
    """A small checkout."""
    root = tmp_path / "checkout"
    root.mkdir()
    git(root, "init", "--quiet")
    (root / ".gitignore").write_text(".versions/\n")
    commit(root, octavo="the package")
    return Places(root)


@pytest.fixture
def interpreter(tmp_path):
    """Makes an interpreter with a torch, whose suite ends as told."""

    def made(torch="2.15.0", report=PASSED, code=0, doctor=DOCTOR):
        folder = tmp_path / f"python-{torch}" / "bin"
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in (("report.xml", report), ("code", str(code)), ("doctor.json", doctor), ("asked", "")):
            (folder / name).write_text(text)
        path = folder / "python"
        path.write_text(INTERPRETER.format(python=sys.executable, torch=torch))
        path.chmod(0o755)
        return path

    return made


def asked(interpreter):
    """How often pytest was run, and on what."""
    lines = (interpreter.parent / "asked").read_text().splitlines()
    return [line.removeprefix("-m pytest").strip() for line in lines if line.startswith("-m pytest")]


# -- one version -------------------------------------------------------------------------------------------------------


def test_a_report_is_counted_and_a_test_with_two_entries_has_the_worse(tmp_path):
    (tmp_path / "report.xml").write_text(REPORT)
    counted = suite.count(tmp_path / "report.xml")
    assert counted["tests"] == {"passed": 1, "skipped": 2, "failed": 3}
    assert counted["skips"] == {"no C++ compiler": 2}
    assert counted["failures"] == [
        {"test": "tests.test_c", "said": "collection failure"},
        {"test": "tests/test_a.py::TestOf::test_two[x-1]", "said": "AssertionError: .../test_a.py differs"},
        {"test": "tests/test_a.py::test_five", "said": 'failed on teardown with "OSError: gone"'},
    ]


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ("\n  one\ntwo", "one"),
        ("ERROR: no torch in /home/me/wheels/ or https://user:word@index.example/simple/torch/", None),
        ("in bf16/fp8, 1/2 and tests/test_a.py", "in bf16/fp8, 1/2 and tests/test_a.py"),
        ("", ""),
    ],
)
def test_a_message_names_no_place_of_this_machine(said, kept):
    found = results.message(said)
    assert "home" not in found and "index.example" not in found and "word" not in found
    assert kept is None or found == kept
    assert len(results.message("x" * 1000)) < 300


def test_a_result_has_versions_counts_and_the_doctor(places, interpreter, capsys):
    python = interpreter(report=REPORT, code=1)
    assert main(["--python", str(python)], places) == 1
    result = json.loads((places.versions / "torch-2.15.0.json").read_text())
    assert (result["torch"], result["triton"], result["python"]) == ("2.15.0+cpu", "3.9.0", "3.11.7")
    assert result["complete"] and result["error"] is None and len(result["commit"]) == 7
    assert result["tests"] == {"passed": 1, "skipped": 2, "failed": 3}
    assert result["doctor"] == {"fast_paths": FAST_PATHS}
    assert places.page.read_text() == page.text(places)
    assert str(places.root) not in json.dumps(result)
    assert "1 passed, 3 failed, 2 skipped." in capsys.readouterr().out


@pytest.mark.parametrize("code", [2, 3, 5])
def test_a_suite_that_did_not_end_is_not_complete(places, interpreter, code):
    assert main(["--python", str(interpreter(code=code))], places) == 1
    result = results.read("2.15.0", places.versions)
    assert not result["complete"] and f"exit code {code}" in result["error"]


def test_a_doctor_that_says_nothing_is_recorded(places, interpreter):
    assert main(["--python", str(interpreter(doctor="no report"))], places) == 0
    result = results.read("2.15.0", places.versions)
    assert result["complete"] and "error" in result["doctor"]
    assert "not recorded" in places.page.read_text()


def test_selected_tests_are_no_result_of_a_version(places, interpreter):
    python = interpreter()
    assert main(["--python", str(python), "--", "tests/quant"], places) == 0
    assert asked(python) == ["tests/quant"]
    assert results.read("2.15.0", places.folder)["selected"] == ["tests/quant"]
    assert not places.versions.exists() and not places.page.exists()


def test_the_command_says_what_is_wrong(places, tmp_path, capsys):
    with pytest.raises(SystemExit, match="Name the interpreter of an environment with torch"):
        main(["--python", str(tmp_path / "none")], places)
    with pytest.raises(SystemExit):
        main(["--versions", "2.13"], places)
    assert "'2.13' is no full version of torch. Write it as 2.13.0." in capsys.readouterr().err
    with pytest.raises(SystemExit, match="Clone the repository"):
        environment.check_out(Places(tmp_path / "nothing"))


# -- one after another -------------------------------------------------------------------------------------------------


@pytest.fixture
def made(monkeypatch, interpreter):
    """Environments are made without pip, and none is for 2.12.1. Returns the versions that were asked for."""
    found = []

    def make(version, folder, sources, log):
        found.append(version)
        folder.mkdir()
        if version == "2.12.1":
            raise InstallationFailed("pip: ERROR: no disk")
        return Environment(interpreter(version), dict(os.environ))

    monkeypatch.setattr(environment, "make", make)
    return found


def test_versions_run_one_after_another_and_leave_no_environment(places, made, capsys):
    assert main([], places) == 1  # one of them could not be installed
    assert made == list(TRITON_OF)
    assert sorted(path.name for path in places.versions.iterdir()) == [f"torch-{v}.json" for v in sorted(TRITON_OF)]
    assert [version for version in TRITON_OF if (places.folder / version).exists()] == []
    failed = results.read("2.12.1", places.versions)
    assert not failed["complete"] and failed["error"] == "pip: ERROR: no disk" and "tests" not in failed
    assert "not run: pip: ERROR: no disk" in places.page.read_text()
    assert main(["--versions", "2.11.0", "--again", "--keep"], places) == 0
    assert (places.folder / "2.11.0").exists()


def test_a_run_goes_on_with_what_is_missing(places, made):
    """A version whose installation failed is tried again."""
    main(["--versions", "2.11.0", "2.12.1"], places)
    made.clear()
    main(["--versions", "2.11.0", "2.12.1", "2.15.0"], places)
    assert made == ["2.12.1", "2.15.0"]


def test_a_commit_of_results_starts_nothing_again(places, made):
    main(["--versions", "2.11.0"], places)
    commit(places.root, benchmarks__results__other="{}")
    assert main(["--versions", "2.11.0"], places) == 0
    assert made == ["2.11.0"]
    commit(places.root, octavo="another package")
    main(["--versions", "2.11.0"], places)
    assert made == ["2.11.0", "2.11.0"]


def test_a_file_is_written_whole(tmp_path, monkeypatch):
    results.write({"version": "2.11.0", "complete": True}, tmp_path)

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        results.write({"version": "2.11.0", "complete": False}, tmp_path)
    assert [result["complete"] for result in results.read_all(tmp_path)] == [True]


# -- an environment ----------------------------------------------------------------------------------------------------


def test_an_environment_has_the_pins_that_go_with_every_torch(monkeypatch, tmp_path):
    """And is made once: a run that was interrupted leaves it complete."""
    installed = []
    monkeypatch.setattr(environment, "_pip", lambda where, sources, log, *words: installed.append(words))
    monkeypatch.setattr(environment, "facts", lambda where: {"triton": None})
    monkeypatch.setattr(environment.subprocess, "run", lambda command, **_: command[-1].mkdir())
    sources = Sources(HERE.root, "abc1234")
    for _ in range(2):
        where = environment.make("2.11.0", tmp_path / "2.11.0", sources, tmp_path / "log")
    (_, constraints, torch, *packages), triton, octavo = installed
    assert torch == "torch==2.11.0" and triton == ("triton==3.6.0",) and octavo[0] == "--no-deps"
    assert {"pytest", "pytest-xdist", "hypothesis"} <= set(packages) and not {"ruff", "mypy"} & set(packages)
    lines = constraints.read_text().splitlines()
    assert [line for line in lines if line.startswith(("torch==", "setuptools=="))] == []
    assert any(line.startswith("pytest==") for line in lines)
    assert where.variables["CUDA_VISIBLE_DEVICES"] == "" and "PYTHONPATH" not in where.variables
    assert {"ONEDNN_MAX_CPU_ISA", "OMP_WAIT_POLICY", "OMP_NUM_THREADS"} <= set(where.variables)


def test_pip_says_why_it_failed(interpreter, tmp_path):
    """Its last error, without what it said before."""
    python = interpreter()
    python.write_text(f"#!{sys.executable}\nprint('ERROR: none of these')\nprint('ERROR: no torch==9.9.9')\nexit(1)\n")
    (tmp_path / "log").write_text("ERROR: an older one\n")
    with pytest.raises(InstallationFailed, match=r"^pip: ERROR: no torch==9.9.9$"):
        environment._pip(Environment(python, {}), Sources(tmp_path, ""), tmp_path / "log", "torch==9.9.9")


def test_a_given_interpreter_runs_the_octavo_of_the_commit(tmp_path):
    where = environment.given(tmp_path / "bin" / "python", Sources(tmp_path / "sources", "abc1234"))
    assert where.variables["PYTHONPATH"] == str(tmp_path / "sources")


# -- the page ----------------------------------------------------------------------------------------------------------


def test_the_page_on_file_is_made_of_the_results_on_file():
    """If this fails: python -m tests.versions --page"""
    assert HERE.page.read_text() == page.text(HERE)


@pytest.mark.parametrize("name", ["README.md", "docs/install.md"])
def test_pages_say_what_a_plain_installation_of_torch_gets(name):
    assert f"torch {NEWEST}" in " ".join((HERE.root / name).read_text().split())


def test_the_results_on_file_are_of_whole_suites():
    for result in results.read_all(HERE.versions):
        assert "selected" not in result
        assert results.path_of(result["version"], HERE.versions).exists()


def test_a_page_without_results_says_so(tmp_path):
    text = page.text(Places(tmp_path))
    assert "No version is on record" in text and "No Triton is on record" in text
    assert "torch 2.15.0, with Triton 3.9.0 and CUDA 13.2" in text


def test_a_page_has_versions_failures_and_what_is_off(places, interpreter):
    main(["--python", str(interpreter("2.15.0", report=REPORT, code=1))], places)
    main(["--python", str(interpreter("2.11.0"))], places)
    text = places.page.read_text()
    rows = [line for line in text.splitlines() if line.startswith("| [2.")]
    assert [row.split("]")[0] for row in rows] == ["| [2.11.0+cpu", "| [2.15.0+cpu"]
    assert "| 1 | 3 | 2 | direct calls |" in rows[1]
    assert "| direct calls | calls layers \\| without the dispatcher | 2.11.0, 2.15.0 | the check raised |" in text
    assert "- torch 2.15.0: `tests/test_a.py::test_five`: failed on teardown" in text
    assert "Not tried: torch 2.12.1, 2.13.0, 2.14.1." in text
    assert [link for link in links(text) if link.endswith(".json")] == [
        f"../benchmarks/results/versions/torch-{version}.json" for version in ("2.11.0", "2.15.0")
    ]


def test_a_page_has_the_kernels_of_each_triton(tmp_path):
    folder = tmp_path / "benchmarks" / "results"
    folder.mkdir(parents=True)
    for triton, a, extra in (
        ("3.10.0", {"error": "ptxas: no [such] name"}, {}),
        ("3.6.0", {"sm90": [168, 60]}, {"every": {"configurations": 9, "fail or spill": [{"error": "x"}]}}),
    ):
        kernels = {"octavo.a._kernel": {"variant": "a"} | a, "octavo.b._kernel": {"variant": "b", "sm90": [32, 0]}}
        record = {"triton": triton, "kernels": kernels} | extra
        (folder / f"kernels-triton-{triton}.json").write_text(json.dumps(record))
    (folder / "triton-h200.json").write_text(
        json.dumps({"versions": {"3.6.0": {}, "3.9.0": {"hashes": {}}, "3.7.1": {}}})
    )
    text = page.text(Places(tmp_path))
    assert "| [3.6.0](../benchmarks/results/kernels-triton-3.6.0.json) | 2 of 2 | 1 | 9 | 1 | 0 |\n| [3.10.0]" in text
    assert "kernels-triton-3.10.0.json) | 1 of 2 | 0 | – | – | – |" in text
    assert "- Triton 3.10.0: `octavo.a._kernel`: ptxas: no \\[such\\] name" in text
    assert "| `octavo.a._kernel` | 168 + 60 | does not build |" in text
    assert "They ran there with Triton 3.9.0 too" in text and "With Triton 3.7.1 layers were timed" in text
    assert max(len(paragraph.split()) for paragraph in paragraphs(text)) < 100
    assert [block.language for block in blocks(text)] == ["bash"]
