"""Cases in several processes."""

import multiprocessing
import time
import traceback
import warnings
from collections.abc import Sequence
from typing import NamedTuple

from tests.hashes import record


class Done(NamedTuple):
    """The outcome of a case."""

    name: str
    section: str
    line: str  # empty where it failed
    error: str
    seconds: float


def run_one(job: tuple[str, str, bool]) -> Done:
    """Run the case of that name on that device."""
    import torch

    from tests.hashes.cases import CASES
    from tests.hashes.play import line_of, section_of

    torch.set_num_threads(1)
    name, device, graphs = job
    case, start = CASES[name], time.perf_counter()
    line = error = ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            line = line_of(case, device, graphs)
        except Exception:
            error = traceback.format_exc()
        return Done(name, section_of(case, device), line, error, time.perf_counter() - start)


def run(names: Sequence[str], device: str, workers: int, graphs: bool) -> tuple[record.Sections, list[Done]]:
    """(lines by section, all cases)."""
    jobs = [(name, device, graphs) for name in names]
    if workers < 2 or len(jobs) < 8:
        done = [run_one(job) for job in jobs]
    else:
        with multiprocessing.get_context("spawn").Pool(workers) as pool:
            done = pool.map(run_one, jobs, chunksize=4)
    sections: record.Sections = {}
    for one in done:
        if not one.error:
            sections.setdefault(one.section, {})[one.name] = one.line
    return sections, done
