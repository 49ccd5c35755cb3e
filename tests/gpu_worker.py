"""A process that runs GPU tests for `tests.gpu`: it collects once, then runs the units that its parent sends."""

import os
import resource
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest

# after one of these every further call of CUDA in the process fails as well
POISON = ("illegal memory access", "unspecified launch failure", "device-side assert", "misaligned address",
          "illegal instruction", "an illegal address")  # fmt: skip
MUCH = 4 * 2**30  # bytes


def cpu_seconds() -> float:
    """CPU time of this process and of the children that have ended: ptxas and gcc are among them."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def release_memory() -> None:
    """Other processes use the same GPU: what torch only keeps for later is given back, if it is much."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized() and torch.cuda.memory_reserved() > MUCH:
        torch.cuda.empty_cache()


class Worker:
    """A plugin of pytest. It asks for the next unit before it runs the last test of one: pytest is told which test
    follows, and keeps or ends fixtures by that."""

    def __init__(self, parent: Connection, deadline: float) -> None:
        self.parent, self.deadline = parent, deadline
        self.errors: list[str] = []
        self.reports: list[pytest.TestReport] = []

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.errors.append(f"{report.nodeid}\n{report.longreprtext}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.reports.append(report)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if self.errors:
            self.parent.send(("errors", self.errors))
            return True
        self.parent.send(("collected", [item.nodeid for item in session.items]))
        ordered = self.indices()
        index = next(ordered, None)
        while index is not None and time.time() < self.deadline:
            following = next(ordered, None)
            self.parent.send(("start", index))
            if self.run(session, index, following):
                self.parent.send(("poisoned",))
                self.parent.close()
                os._exit(0)
            release_memory()
            index = following
        self.parent.send(("done",))
        return True

    def indices(self) -> Iterator[int]:
        """The tests to run, by their place in the collection."""
        while unit := self.unit():
            yield from unit

    def unit(self) -> list[int]:
        self.parent.send(("next",))
        unit: list[int] = self.parent.recv()
        return unit

    def run(self, session: pytest.Session, index: int, following: int | None) -> bool:
        """Runs one test, reports it, and says whether CUDA is unusable after it."""
        item, nextitem = session.items[index], None if following is None else session.items[following]
        self.reports, began, cpu = [], time.time(), cpu_seconds()
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=nextitem)
        outcomes = {report.outcome for report in self.reports}
        text = "\n".join(report.longreprtext for report in self.reports if report.failed)
        record: dict[str, Any] = {
            "id": item.nodeid,
            "outcome": "failed" if "failed" in outcomes else "skipped" if "skipped" in outcomes else "passed",
            "began": began,
            "seconds": round(time.time() - began, 4),
            "cpu": round(cpu_seconds() - cpu, 4),
        }
        if text:
            record["text"] = text
        self.parent.send(("result", index, record))
        return bool(text) and "CUDA" in text and any(each in text for each in POISON)


def main(arguments: list[str]) -> int:
    descriptor, deadline, *rest = arguments
    os.set_inheritable(int(descriptor), False)
    return int(pytest.main(rest, plugins=[Worker(Connection(int(descriptor)), float(deadline))]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
