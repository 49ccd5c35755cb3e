"""The suite in one environment: run by pytest, counted from its report, with what `octavo doctor` says there."""

import collections
import json
import subprocess
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from tests.versions import environment
from tests.versions.environment import Environment, InstallationFailed, Sources
from tests.versions.results import message

ENDED = (0, 1)  # exit codes of pytest: all passed, some failed
STATES = ("passed", "skipped", "failed")  # from good to bad


def not_installed(version: str, sources: Sources, why: InstallationFailed) -> dict[str, Any]:
    """The result of a version that could not be tried."""
    return _result(version, sources, {}, complete=False, error=message(str(why)))


def run(
    version: str,
    where: Environment,
    sources: Sources,
    log: Path,
    *,
    selected: Sequence[str] = (),
    hours: float = 4,
    workers: int = 2,
) -> dict[str, Any]:
    """Runs the suite, or the tests selected by arguments of pytest, and returns the result."""
    versions = environment.facts(where)
    doctor = examine(where, sources)
    report, code = log.with_suffix(".xml"), None
    report.unlink(missing_ok=True)
    command = ("-m", "pytest", "-q", "-n", str(workers), "--dist", "loadfile", "-p", "no:cacheprovider")
    command += ("-o", "junit_family=xunit1", f"--junitxml={report}", *selected)
    try:
        code = where.run(*command, folder=sources.folder, log=log, limit=hours * 3600)
        error = f"pytest ended with exit code {code}, and its log says why"
    except subprocess.TimeoutExpired:
        error = f"the suite did not end in {hours:g} hours"
    counted = count(report) if report.exists() else {}
    complete = code in ENDED and bool(counted)
    result = _result(version, sources, versions, complete=complete, error=None if complete else error)
    return result | ({"selected": list(selected)} if selected else {}) | counted | {"doctor": doctor}


def _result(version: str, sources: Sources, versions: dict[str, str | None], **outcome: Any) -> dict[str, Any]:
    today = date.today().isoformat()
    return {"version": version, **versions, "commit": sources.commit, "date": today, **outcome}


def count(report: Path) -> dict[str, Any]:
    """Returns counts, failures and reasons of skips from a JUnit report. A test with two entries has the worse."""
    states: dict[str, str] = {}
    said: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name, (state, text) = name_of(case), outcome_of(case)
        if STATES.index(state) >= STATES.index(states.get(name, "passed")):
            states[name], said[name] = state, message(text)
    failures = [{"test": name, "said": said[name]} for name, state in states.items() if state == "failed"]
    skips = collections.Counter(said[name] for name, state in states.items() if state == "skipped")
    totals = collections.Counter(states.values())
    return {
        "tests": {state: totals[state] for state in STATES},
        "failures": sorted(failures, key=lambda failure: failure["test"]),
        "skips": dict(sorted(skips.items())),
    }


def name_of(case: ElementTree.Element) -> str:
    """`tests/quant/test_mx.py::test_codes[a]`. A file that could not be collected has its own name alone."""
    file, classes = case.get("file", ""), case.get("classname", "")
    inner = classes.removeprefix(file.removesuffix(".py").replace("/", ".")).strip(".").replace(".", "::")
    return "::".join(filter(None, (file, inner if file else "", case.get("name"))))


def outcome_of(case: ElementTree.Element) -> tuple[str, str]:
    """Returns the state of a test, and what it said."""
    for kind, state in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        found = case.find(kind)
        if found is not None:
            return state, found.get("message") or found.text or ""
    return "passed", ""


def examine(where: Environment, sources: Sources) -> dict[str, Any]:
    """Returns what `octavo doctor` reports, but for the machine and the table of recipes, or why it reports nothing."""
    command = [where.python, "-m", "octavo", "doctor", "--json", "--device", "cpu"]
    done = subprocess.run(command, cwd=sources.folder, env=where.variables, capture_output=True, text=True, check=False)
    try:
        report = json.loads(done.stdout)
    except json.JSONDecodeError:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return {"error": message(lines[-1] if lines else f"exit code {done.returncode}")}
    return {name: value for name, value in report.items() if name not in ("machine", "recipes")}
