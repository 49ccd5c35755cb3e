"""The command of `tests.hashes`: run cases in parallel, compare with the record or rewrite it."""

import os

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")  # some virtual machines die on bfloat16 matmuls

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.hashes import record
from tests.hashes.workers import run


def main(arguments: Sequence[str] | None = None, path: Path | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hashes", description=__doc__)
    parser.add_argument("--only", default="", metavar="PATTERN", help="a part of a case's name, or a glob")
    parser.add_argument("--write", action="store_true", help="rewrite the record; cases that fail keep their lines")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--eager", action="store_true", help="eager mode alone, a tenth of the time; writes nothing")
    parser.add_argument("--times", action="store_true", help="print the seconds of each case")
    parser.add_argument("--workers", type=int, default=None, help="processes; by default one a core, on a GPU one")
    given = parser.parse_args(arguments)
    if given.eager and given.write:
        parser.error("--write takes graphs too: leave out --eager.")
    from tests.hashes.cases import CASES, chosen

    path = path or record.path_of(given.device)
    names = [case.name for case in chosen(given.only)]
    if not names:
        print(f"No case matches {given.only!r}.")
        return 2
    workers = given.workers or (1 if given.device == "cuda" else os.cpu_count() or 1)
    found, done = run(names, given.device, workers, not given.eager)
    errors = {one.name: one.error for one in done if one.error}
    on_record = record.read(path)
    outcome = record.compare(on_record, found, set(CASES), not given.eager)
    for name, error in errors.items():
        print(f"failed   {name}\n{error}")
    for name, what in outcome.changed.items():
        print(f"changed  {name}: {what}")
    for word, names_of in (("new", outcome.new), ("gone", outcome.gone)):
        print("".join(f"{word:8} {name}\n" for name in names_of), end="")
    if outcome.elsewhere:
        print(f"skipped  {len(outcome.elsewhere)} cases that run torch's own arithmetic, recorded for another one.")
    if given.times:
        print("".join(f"{one.seconds:7.2f}  {one.name}\n" for one in sorted(done, key=lambda one: one.seconds)), end="")
    ran = sum(map(len, found.values()))
    print(
        f"{ran} cases ran, {len(errors)} failed, {len(outcome.changed)} changed, {len(outcome.new)} new, "
        f"{len(outcome.gone)} gone."
    )
    if given.write:
        record.write(path, record.merged(on_record, found, set(CASES)))
    return 0 if not errors and (given.write or outcome.is_clean) else 1


if __name__ == "__main__":
    sys.exit(main())
