"""README from an empty virtual environment: its commands and code blocks, in their order, each with its time.

    python -m tests.journey                     # as README says; torch comes from where pip finds it
    python -m tests.journey --torch "torch==2.13.0+cpu"
    python -m tests.journey --all --json journey.json    # `make demo` too, which makes its own .venv

The sources are those of the last commit, copied into a folder of their own. The first command that fails ends it, with
exit code 1. Outside of `make test`, because it installs torch.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

from tests.support.pages import examples

ROOT = Path(__file__).parents[1]
COMMAND = re.compile(r"^    (?P<command>(?:make|pip|octavo) [^#\n]*?)\s*(?:#.*)?$", re.MULTILINE)
WITH_MAKE = ("make demo",)  # it makes .venv, and takes minutes


def commands(readme: str) -> list[str]:
    """Returns the shell commands of a page, in their order."""
    return [found["command"] for found in COMMAND.finditer(readme)]


def program(readme: str) -> str:
    """Returns the Python blocks of a page as one program."""
    return "\n".join(block.text for block, _ in examples(readme))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.journey", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--torch", default=None, metavar="SPEC", help="install this first; default: as pip decides")
    parser.add_argument("--all", action="store_true", help="also run make demo")
    parser.add_argument("--json", type=Path, default=None, help="write the times here")
    arguments = parser.parse_args(argv)
    readme = (ROOT / "README.md").read_text()
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        sources, place = Path(folder, "octavo"), Path(folder, "venv")
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(sources)], check=True)
        python, environment = _venv(place)
        steps = [f"pip install --quiet {arguments.torch}"] if arguments.torch else []
        steps += [one for one in commands(readme) if arguments.all or one not in WITH_MAKE]
        (sources / "readme.py").write_text(program(readme))
        for command in [*steps, f"{python} readme.py"]:
            started = time.perf_counter()
            done = subprocess.run(
                command, shell=True, cwd=sources, env=environment, capture_output=True, text=True, check=False
            )
            rows.append({"command": command.replace(folder, ""), "seconds": round(time.perf_counter() - started, 1)})
            print(f"{rows[-1]['seconds']:8.1f} s  {rows[-1]['command']}", flush=True)
            if done.returncode:
                print(done.stdout[-2000:], done.stderr[-4000:], f"exit code {done.returncode}", sep="\n")
                return 1
        if arguments.json is not None:
            arguments.json.write_text(json.dumps({"python": sys.version.split()[0], "steps": rows}, indent=1) + "\n")
    return 0


def _venv(place: Path) -> tuple[Path, dict[str, str]]:
    """Makes an empty virtual environment. Returns its Python, and an environment in which it is active."""
    venv.create(place, with_pip=True)
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    environment |= {"VIRTUAL_ENV": str(place), "PATH": f"{place / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    return place / "bin" / "python", environment


if __name__ == "__main__":
    sys.exit(main())
