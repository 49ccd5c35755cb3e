"""Models in the loops of their packages: python -m tests.integration loops [names] [--recipe R] [--steps N]."""

import argparse
import importlib
import sys
import tempfile
import time
import traceback
import warnings
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from octavo.recipes import SHIPPED
from tests.integration.subject import Outcome, Subject, Unmet, trial

MODULES = ("hugging_face", "titan", "accelerate_loop", "lightning_module", "peft_adapters")
COMPILED = "fp8-delayed"  # whose report is printed, and which is compiled; another if this one was not asked for
REQUIREMENTS = "tests/integration/requirements.txt"
PACKAGES = ("torch", "transformers", "torchtitan", "accelerate", "lightning", "peft", "torchao", "safetensors")


def main(argv: list[str] | None = None) -> int:
    arguments = parsed(argv)
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        print(f"Not installed: {', '.join(missing)}. Run pip install -r {REQUIREMENTS} in an environment of its own.")
        return 2
    print(f"versions: {', '.join(f'{name} {version(name)}' for name in PACKAGES)}, python {sys.version.split()[0]}")
    every = found()
    unknown = [name for name in arguments.names if not any(name in s.name for s in every)]
    if unknown:
        print(f"No subject has {', '.join(unknown)} in its name. There are: {', '.join(s.name for s in every)}.")
        return 2
    subjects = [s for s in every if not arguments.names or any(name in s.name for name in arguments.names)]
    started, outcomes, failures = time.perf_counter(), [], []
    recipes = arguments.recipe or SHIPPED
    for subject in subjects:
        print(f"\n== {subject.name}: {type(subject).__module__.removeprefix('tests.integration.')}", flush=True)
        compiled = COMPILED if COMPILED in recipes else recipes[0]
        for recipe in recipes:
            outcome = tried(subject, recipe, arguments.steps, compiled=subject.compiles and recipe == compiled)
            if isinstance(outcome, Outcome):
                if recipe == compiled:
                    print(outcome.report, flush=True)
                outcomes.append(outcome)
            else:
                failures.append((subject.name, recipe, outcome))
                print(f"FAILED in {recipe}: {outcome}", flush=True)
    print(f"\n{table(outcomes)}\n")
    for name, recipe, why in failures:
        print(f"FAILED {name} in {recipe}: {why.strip().splitlines()[-1]}")
    print(f"{len(outcomes)} trials passed, {len(failures)} failed, {time.perf_counter() - started:.0f} s")
    return 1 if failures else 0


def parsed(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.integration loops", description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of subjects' names; all of them by default")
    parser.add_argument("--recipe", action="append", choices=SHIPPED, help="may be repeated; all of them by default")
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps")
    return parser.parse_args(argv)


def found() -> list[Subject]:
    return [s for name in MODULES for s in importlib.import_module(f"tests.integration.{name}").SUBJECTS]


def tried(subject: Subject, recipe: str, steps: int, *, compiled: bool) -> Outcome | str:
    """The outcome, or what went wrong. Octavo's own warnings are printed, once each."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            result: Outcome | str = trial(subject, recipe, steps, Path(folder), compiled=compiled)
        except Unmet as unmet:
            result = str(unmet)
        except Exception:
            result = traceback.format_exc()
    for message in dict.fromkeys(str(w.message) for w in said if "octavo" in f"{w.filename} {w.message}".lower()):
        print(f"warned in {recipe}: {message}", flush=True)
    return result


def table(outcomes: list[Outcome]) -> str:
    head = ("subject", "recipe", "converted", "left", "loss", "unconverted", "cosine", "losses", "compiled", "s")
    rows = [
        (
            o.subject,
            o.recipe,
            str(o.converted),
            str(o.left),
            f"{o.first:.4f}",
            f"{o.plain:.4f}",
            f"{o.cosine:.3f}",
            " ".join(f"{loss:.3f}" for loss in o.losses),
            o.compiled,
            f"{o.seconds:.1f}",
        )
        for o in outcomes
    ]
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in [head, *rows]
    )
