"""The command of `tests.versions`: one version of torch after another, a result file for each, and the page."""

import argparse
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tests.versions
from tests.versions import HERE, TRITON_OF, Places, environment, page, results, suite
from tests.versions.environment import InstallationFailed, Sources


def main(arguments: Sequence[str] | None = None, places: Places = HERE) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    own, selected = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    options = parse(own)
    if options.page:
        page.write(places)
        return 0
    sources = environment.check_out(places)
    versions = options.versions if options.python is None else [version_of(options.python, sources)]
    outcomes = []
    for version in versions:
        done = results.read(version, places.versions)
        if done is not None and results.is_done(done, sources.commit) and not options.again and not selected:
            print(f"torch {version}: has run at {sources.commit}. {summary(done)}", flush=True)
        else:
            done = attempt(version, sources, places, selected, options)
            print(f"torch {version}: {summary(done)}", flush=True)
        outcomes.append(done)
    return 0 if all(done["complete"] and done["tests"]["failed"] == 0 for done in outcomes) else 1


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    first, _, rest = (tests.versions.__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m tests.versions", usage="%(prog)s [options] [-- arguments of pytest]", description=first,
        epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--versions", nargs="+", default=list(TRITON_OF), type=full, metavar="2.11.0")
    parser.add_argument("--again", action="store_true", help="run versions that have a result of this commit, too")
    parser.add_argument("--keep", action="store_true", help="leave the environments in .versions")
    parser.add_argument("--python", type=Path, help="an interpreter that has torch and the packages of the tests")
    parser.add_argument("--hours", type=float, default=4, help="stop the suite of a version after so many (4)")
    parser.add_argument("--workers", type=int, default=2, help="processes of pytest (2)")
    parser.add_argument("--page", action="store_true", help="write docs/compatibility.md, and run nothing")
    return parser.parse_args(arguments)


def full(version: str) -> str:
    """A version of torch with all its numbers: results are named by it."""
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise argparse.ArgumentTypeError(f"{version!r} is no full version of torch. Write it as 2.13.0.")
    return version


def version_of(python: Path, sources: Sources) -> str:
    """The torch that an interpreter has."""
    try:
        return str(environment.facts(environment.given(python, sources))["torch"]).partition("+")[0]
    except InstallationFailed as why:
        sys.exit(f"{python}: {why}. Name the interpreter of an environment with torch.")


def attempt(
    version: str, sources: Sources, places: Places, selected: Sequence[str], options: argparse.Namespace
) -> dict[str, Any]:
    """Installs a version, runs the suite and writes the result, then removes the environment.

    An interruption leaves the environment to the next run. The result of selected tests says little of a version, so it
    stays beside the log.
    """
    log = places.folder / f"torch-{version}.log"
    log.write_text("")
    print(f"torch {version}: running at {sources.commit}, log in {log.relative_to(places.root)}", flush=True)
    try:
        if options.python is not None:
            where = environment.given(options.python, sources)
        else:
            where = environment.make(version, places.folder / version, sources, log)
        limits = {"hours": options.hours, "workers": options.workers}
        result = suite.run(version, where, sources, log, selected=selected, **limits)
    except InstallationFailed as why:
        result = suite.not_installed(version, sources, why)
    results.write(result, places.folder if selected else places.versions)
    if not selected:
        page.write(places)
    if options.python is None and not options.keep:
        shutil.rmtree(places.folder / version, ignore_errors=True)
    return result


def summary(result: dict[str, Any]) -> str:
    """One sentence about a result."""
    counts = result.get("tests")
    said = f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped." if counts else ""
    return said if result["complete"] else f"Not complete: {result['error']}. {said}".rstrip()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("Interrupted. The same command goes on with the version that was running.")
