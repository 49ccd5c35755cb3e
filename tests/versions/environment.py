"""Environments: an interpreter with one torch, made by pip or given, and the sources that it runs."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.versions import ROOT, TRITON_OF, Places
from tests.versions.results import message

LOOSE = ("torch", "setuptools")  # pins of constraints.txt left out: torch 2.11 and 2.12 refuse setuptools 82 and newer
DEFAULT = re.compile(r"^(?:test: )?export (\w+) \?= (\S+)$", re.MULTILINE)
FACTS = """
import importlib.metadata, json, platform, torch
triton = [each.version for each in importlib.metadata.distributions(name="triton")]
print(json.dumps({"torch": torch.__version__, "triton": triton[0] if triton else None, "cuda": torch.version.cuda,
                  "python": platform.python_version()}))
"""


class InstallationFailed(Exception):
    """pip could not make an environment, or torch does not start in it."""


class Sources(NamedTuple):
    """A folder with the files of a commit, and the last commit that changed anything but results."""

    folder: Path
    commit: str


class Environment(NamedTuple):
    """An interpreter, and the variables that it runs with."""

    python: Path
    variables: dict[str, str]

    def run(self, *command: str | Path, folder: Path, log: Path, limit: float | None = None) -> int:
        """Runs `python command...`, adds what it says to the log, and returns its exit code."""
        with log.open("a") as out:
            return subprocess.run(
                [self.python, *command], cwd=folder, env=self.variables, stdout=out, stderr=subprocess.STDOUT,
                timeout=limit, check=False,
            ).returncode  # fmt: skip


def check_out(places: Places) -> Sources:
    """Copies the last commit of a checkout. What is not committed stays out, and the number of files is said."""
    root, folder = places.root, places.folder / "sources"
    try:
        changed = _git(root, "status", "--porcelain").splitlines()
    except (subprocess.CalledProcessError, FileNotFoundError):
        raise SystemExit(f"{root} is no git checkout, and a result names its commit. Clone the repository.") from None
    if changed:
        print(f"{len(changed)} files differ from the last commit. The tests run without these changes.", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _git(root, "clone", "--quiet", str(root), str(folder))
    written = [f":(exclude){path.relative_to(root)}" for path in (places.results, places.page)]
    return Sources(folder, _git(folder, "log", "-1", "--abbrev=7", "--format=%h", "--", ".", *written).strip())


def _git(folder: Path, *command: str) -> str:
    return subprocess.run(["git", *command], cwd=folder, capture_output=True, text=True, check=True).stdout


def given(python: Path, sources: Sources) -> Environment:
    """An environment that somebody made. Its own octavo, if it has one, is not what runs."""
    python = Path(os.path.abspath(python))  # resolves no links: those of a virtual environment lead out of it
    return Environment(python, {**_variables(python), "PYTHONPATH": str(sources.folder)})


def make(version: str, folder: Path, sources: Sources, log: Path) -> Environment:
    """Makes a virtual environment with this torch, or takes the one that an interrupted run has left complete."""
    python, stamp = folder / "bin" / "python", folder / "complete.json"
    pins, packages = pinned(sources.folder), tests_need(sources.folder)
    environment = Environment(python, _variables(python))
    asked = json.dumps([version, pins, packages])
    if stamp.exists() and stamp.read_text() == asked:
        return environment
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(pins) + "\n")
    _pip(environment, sources, log, "-c", constraints, f"torch=={version}", *packages)
    if version in TRITON_OF and facts(environment)["triton"] is None:
        try:
            _pip(environment, sources, log, f"triton=={TRITON_OF[version]}")
        except InstallationFailed:
            print(f"No triton {TRITON_OF[version]} for this platform: tests that compile kernels are skipped.")
    _pip(environment, sources, log, "--no-deps", "-e", sources.folder)
    stamp.write_text(asked)
    return environment


def pinned(sources: Path) -> list[str]:
    """The lines of constraints.txt that go with every torch."""
    lines = [line for line in (sources / "constraints.txt").read_text().splitlines() if "==" in line]
    return [line for line in lines if line.partition("==")[0] not in LOOSE]


def tests_need(sources: Path) -> list[str]:
    """The packages that pyproject.toml names for Octavo and the tests, without torch and the linters."""
    project = tomllib.loads((sources / "pyproject.toml").read_text())["project"]
    names = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    return [name for name in names if not name.startswith(("torch", "mypy", "ruff"))]


def facts(environment: Environment) -> dict[str, str | None]:
    """Returns the versions of torch, Triton, CUDA and Python."""
    command = [environment.python, "-c", FACTS]
    try:
        done = subprocess.run(command, env=environment.variables, capture_output=True, text=True, check=False)
    except OSError as error:
        raise InstallationFailed(f"no interpreter: {error.strerror}") from None
    if done.returncode:
        raise InstallationFailed(f"torch does not start: {message(_last(done.stderr.splitlines()))}")
    found: dict[str, str | None] = json.loads(done.stdout.splitlines()[-1])
    return found


def _pip(environment: Environment, sources: Sources, log: Path, *arguments: str | Path) -> None:
    before = log.stat().st_size if log.exists() else 0
    options = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    if environment.run(*options, *arguments, folder=sources.folder, log=log):
        said = log.read_bytes()[before:].decode(errors="replace").splitlines()
        raise InstallationFailed(f"pip: {message(_last([line for line in said if line.startswith('ERROR')] or said))}")


def _last(lines: Sequence[str]) -> str:
    return next((line for line in reversed(lines) if line.strip()), "it said nothing")


def _variables(python: Path) -> dict[str, str]:
    """The variables of `make test`, and no GPU."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    defaults = dict(DEFAULT.findall((ROOT / "Makefile").read_text()))
    path = f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return {**defaults, **kept, "PATH": path, "VIRTUAL_ENV": str(python.parents[1]), "CUDA_VISIBLE_DEVICES": ""}
