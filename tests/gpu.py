"""Runs the GPU tests in many processes: `python3 -m tests.gpu`, or `python3 -m tests.gpu -m gpu_smoke`.

Each process collects the tests once and then takes units of work, the most expensive first. A unit is some cases of one
test function. All processes, and later runs, share the kernels that Triton compiles: they are in `build/triton`. What
follows `--` goes to pytest: paths, `-k`.

- `results.jsonl` in the folder `--out` has a line for each test, written when it ends; `summary.json` has the sums. A
  run that is killed leaves the first.
- `--seed` orders and distributes the tests at random. No result may depend on it.
- `--limit` is the time after which no test is begun. The others are reported as not run.
- `--write-costs` records what each test function takes in `tests/gpu_costs.json`, by which the next run is ordered.

The exit status is 0 if every test was run, none failed, and not all were skipped.
"""

import argparse
import itertools
import json
import math
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict, deque
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.fast import function_of

ROOT = Path(__file__).parent.parent
COSTS = Path(__file__).with_name("gpu_costs.json")
KERNELS = ROOT / "build" / "triton"  # a run finds what earlier ones compiled

UNIT = 6.0  # seconds that a unit should take
UNKNOWN = 2.0  # seconds of a case of which nothing is recorded
GRACE = 25.0  # seconds after the limit in which running tests may end
ATTEMPTS = 3  # workers that may die before their first test

Costs = dict[str, float]
Unit = list[int]


def file_of(test: str) -> str:
    return test.split("::")[0]


def seconds_of(functions: set[str], costs: Costs) -> Costs:
    """The seconds of a case of each function: as recorded, else the mean of its file."""
    files = defaultdict(list)
    for function, seconds in costs.items():
        files[file_of(function)].append(seconds)
    means = {file: sum(found) / len(found) for file, found in files.items()}
    return {each: costs.get(each, means.get(file_of(each), UNKNOWN)) for each in functions}


def units_of(tests: list[str], costs: Costs, *, seed: int | None = None, sample: int | None = None) -> list[Unit]:
    """Every test once, as places in `tests`, in the order in which workers take them.

    The first unit of each function comes before the second of any: it compiles what the others share. Within this order
    the most expensive comes first. A seed shuffles the cases of a function, and units whose cost is alike.
    """
    rng = None if seed is None else random.Random(seed)
    functions: dict[str, list[int]] = defaultdict(list)
    for index, test in enumerate(tests):
        functions[function_of(test)].append(index)
    seconds = seconds_of(set(functions), costs)
    units = []
    for function, cases in functions.items():
        if sample is not None and len(cases) > sample:
            cases = [cases[i * len(cases) // sample] for i in range(sample)]
        if rng is not None:
            rng.shuffle(cases)
        count = max(1, min(len(cases), round(len(cases) * seconds[function] / UNIT)))
        cuts = [i * len(cases) // count for i in range(count + 1)]
        for begin, end in itertools.pairwise(cuts):
            units.append((begin > 0, seconds[function] * (end - begin), cases[begin:end]))

    def place(unit: tuple[bool, float, Unit]) -> tuple[bool, float, float]:
        later, cost, _ = unit
        if rng is None:
            return later, -cost, 0.0
        return later, -math.floor(math.log2(max(cost, 0.25))), rng.random()

    return [cases for _, _, cases in sorted(units, key=place)]


class Worker:
    """A process of `tests.gpu_worker`, and what it was given."""

    def __init__(self, number: int, arguments: list[str], folder: Path, deadline: float) -> None:
        self.number, self.log = number, folder / f"worker{number}.log"
        mine, theirs = socket.socketpair()
        command = [sys.executable, "-m", "tests.gpu_worker", str(theirs.fileno()), str(deadline), *arguments]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            "PYTHONHASHSEED": "0",  # every worker collects the same ids
            "TRITON_CACHE_DIR": os.environ.get("TRITON_CACHE_DIR", str(KERNELS)),
            "TORCHINDUCTOR_CACHE_DIR": str(folder / f"inductor{number}"),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",  # there is a worker for each core
            "OMP_NUM_THREADS": "1",
        }
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
                stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        theirs.close()
        self.connection = Connection(mine.detach())
        self.waiting: list[int] = []  # given, and not begun
        self.running: int | None = None
        self.tests, self.ended = 0, False

    def tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def close(self) -> None:
        self.connection.close()
        if self.process.poll() is None:
            try:
                self.process.wait(timeout=10)  # fixtures of the session end
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait()


class Run:
    """Hands units to workers, replaces the ones that die, and writes down what they report."""

    def __init__(self, options: argparse.Namespace, arguments: list[str], folder: Path) -> None:
        self.options, self.arguments, self.folder = options, arguments, folder
        self.began = time.time()
        self.deadline = self.began + options.limit
        self.tests: list[str] = []
        self.chosen = 0  # how many of them
        self.units: deque[Unit] = deque()
        self.records: dict[int, dict[str, Any]] = {}
        self.workers: list[Worker] = []
        self.started = self.lost = 0
        self.out = (options.out / "results.jsonl").open("w")

    def say(self, text: str) -> None:
        print(f"{time.time() - self.began:6.0f} s  {text}", flush=True)

    def start(self) -> None:
        self.workers.append(Worker(self.started, self.arguments, self.folder, self.deadline))
        self.started += 1

    def __call__(self) -> None:
        reported = self.began
        for _ in range(self.options.workers):
            self.start()
        try:
            while self.workers:
                ready = wait([worker.connection for worker in self.workers], timeout=1)
                for worker in list(self.workers):
                    if worker.connection in ready or worker.process.poll() is not None:
                        self.hear(worker)
                if time.time() > reported + 20:
                    reported = time.time()
                    outcomes = Counter(record["outcome"] for record in self.records.values())
                    self.say(f"{len(self.records)} of {self.chosen}: {dict(outcomes)}")
                if time.time() > self.deadline + GRACE:
                    for worker in list(self.workers):
                        self.give_up(worker)
        finally:
            for worker in self.workers:
                worker.process.kill()
                worker.close()
            self.out.close()
        if not self.tests:
            raise SystemExit("No process collected tests.")

    def hear(self, worker: Worker) -> None:
        """Takes every message that is there. A worker that ended has nothing after its last one."""
        try:
            while worker.connection.poll():
                kind, *content = worker.connection.recv()
                getattr(self, f"on_{kind}")(worker, *content)
        except (EOFError, ConnectionError):
            self.end(worker)
            return
        if worker.process.poll() is not None and not worker.connection.poll():
            self.end(worker)

    def on_errors(self, worker: Worker, errors: list[str]) -> None:
        raise SystemExit("The tests cannot be collected:\n" + "\n".join(errors))

    def on_collected(self, worker: Worker, tests: list[str]) -> None:
        if not self.tests:
            if not tests:
                raise SystemExit("No test was selected.")
            self.tests = tests
            costs = json.loads(COSTS.read_text()) if COSTS.exists() else {}
            self.units.extend(units_of(tests, costs, seed=self.options.seed, sample=self.options.sample))
            self.chosen = sum(map(len, self.units))
            self.say(
                f"{self.chosen} of {len(tests)} tests in {len(self.units)} units, {self.options.workers} processes"
            )
        if tests != self.tests:
            different = sorted(set(tests) ^ set(self.tests))[:10]
            raise SystemExit(f"Two processes collected different tests, or in different orders: {different}")

    def on_next(self, worker: Worker) -> None:
        unit = self.units.popleft() if self.units and time.time() < self.deadline else []
        worker.waiting.extend(unit)
        worker.connection.send(unit)

    def on_start(self, worker: Worker, index: int) -> None:
        worker.running = index
        worker.waiting.remove(index)

    def on_result(self, worker: Worker, index: int, record: dict[str, Any]) -> None:
        worker.running = None
        worker.tests += 1
        self.write(worker, index, record)

    def on_poisoned(self, worker: Worker) -> None:
        self.say(f"worker {worker.number} is replaced: CUDA is unusable after its last test")

    def on_done(self, worker: Worker) -> None:
        worker.ended = True

    def write(self, worker: Worker, index: int, record: dict[str, Any]) -> None:
        record["began"] = round(record["began"] - self.began, 3)
        record["worker"] = worker.number
        self.records[index] = record
        print(json.dumps(record), file=self.out, flush=True)
        if record["outcome"] in ("failed", "crashed"):
            self.say(f"{record['outcome']}: {record['id']}")

    def crashed(self, worker: Worker, text: str) -> None:
        """Records the test that the worker was running."""
        if worker.running is not None:
            record = {"id": self.tests[worker.running], "outcome": "crashed", "began": time.time(), "seconds": 0.0,
                      "cpu": 0.0, "text": f"{text}\n{worker.tail()}"}  # fmt: skip
            self.write(worker, worker.running, record)

    def end(self, worker: Worker) -> None:
        """Tests that the worker was given and did not begin go to others."""
        self.workers.remove(worker)
        worker.close()
        if worker.waiting:
            self.units.appendleft(worker.waiting)
        if not worker.ended:
            self.crashed(worker, f"its process ended with {worker.process.returncode}")
            if not worker.tests and worker.running is None:
                self.lost += 1
                self.say(f"worker {worker.number} ended with {worker.process.returncode}:\n{worker.tail()}")
            if self.lost >= ATTEMPTS:
                raise SystemExit("Workers end before their first test.")
        if self.units and time.time() < self.deadline and len(self.workers) < self.options.workers:
            self.start()

    def give_up(self, worker: Worker) -> None:
        worker.process.kill()
        self.crashed(worker, f"did not end within {GRACE:.0f} s after the limit")
        self.workers.remove(worker)
        worker.close()

    def summary(self) -> dict[str, Any]:
        records = list(self.records.values())
        functions, files = defaultdict(list), defaultdict(list)
        for record in records:
            functions[function_of(record["id"])].append(record)
            files[file_of(record["id"])].append(record)

        def sums(groups: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
            found = {
                name: {"tests": len(group), "cpu": round(sum(r["cpu"] for r in group), 1),
                       "seconds": round(sum(r["seconds"] for r in group), 1)}
                for name, group in groups.items()
            }  # fmt: skip
            return dict(sorted(found.items(), key=lambda each: -each[1]["cpu"]))

        return {
            "outcomes": {"passed": 0, "failed": 0, "crashed": 0, "skipped": 0}
            | Counter(record["outcome"] for record in records)
            | {"not run": self.chosen - len(records)},
            "wall": round(time.time() - self.began, 1),
            "busy": round(sum(record["seconds"] for record in records), 1),
            "workers": self.options.workers, "started": self.started, "seed": self.options.seed,
            "files": sums(files),
            "functions": sums(functions),
            "not_run": sorted({self.tests[index] for unit in self.units for index in unit})[:50],
        }  # fmt: skip


def printed(summary: dict[str, Any], records: list[dict[str, Any]]) -> str:
    """The sums, then the failures: the end of the output is what one sees."""
    lines = ["", "tests  CPU s  wall s  file"]
    lines += [f"{v['tests']:5} {v['cpu']:6.0f} {v['seconds']:7.0f}  {name}" for name, v in summary["files"].items()]
    lines += ["", "tests  CPU s  wall s  the 25 most expensive functions"]
    for name, v in list(summary["functions"].items())[:25]:
        lines.append(f"{v['tests']:5} {v['cpu']:6.0f} {v['seconds']:7.0f}  {name}")
    for record in [record for record in records if record["outcome"] in ("failed", "crashed")][:12]:
        lines += ["", f"{record['outcome']}: {record['id']}", record["text"][-900:]]
    outcomes = ", ".join(f"{count} {name}" for name, count in summary["outcomes"].items())
    lines += ["", f"{outcomes}; {summary['wall']:.0f} s, {summary['busy']:.0f} s of tests"]
    return "\n".join(lines)


def write_costs(results: Path) -> None:
    """Means of each function's cases, in seconds. Functions that were not run keep what they have."""
    found = defaultdict(list)
    for line in results.read_text().splitlines():
        record = json.loads(line)
        if record["outcome"] == "passed":
            found[function_of(record["id"])].append(record["seconds"])
    costs = json.loads(COSTS.read_text()) if COSTS.exists() else {}
    costs |= {name: round(sum(seconds) / len(seconds), 2) for name, seconds in found.items()}
    COSTS.write_text(json.dumps(dict(sorted(costs.items())), indent=0) + "\n")


def files_with(word: str) -> list[str]:
    """Test files that have the word, and those of folders whose conftest.py has it: a fixture of it may mark their
    tests. The others need not be imported."""
    folders = {path.parent for path in (ROOT / "tests").rglob("conftest.py") if word in path.read_text()}
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    chosen = [path for path in files if path.parent in folders - {ROOT / "tests"} or word in path.read_text()]
    return [str(path.relative_to(ROOT)) for path in chosen]


def parsed(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(prog="python3 -m tests.gpu", description="Runs the GPU tests in many processes.")
    parser.add_argument("-m", dest="marker", default="gpu", help="which tests; none that are slow unless it names them")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="how many processes, one for each core")
    parser.add_argument("--seed", type=int, help="order and distribute the tests at random")
    parser.add_argument("--sample", type=int, help="run so many cases of each test function")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds after which no test is begun")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu", help="a folder for results")
    parser.add_argument("--write-costs", action="store_true", help="record the seconds of each function")
    options = parser.parse_args(arguments[:split])
    if "slow" not in options.marker:
        options.marker = f"({options.marker}) and not slow" if options.marker else "not slow"
    return options, arguments[split + 1 :]


def main(arguments: list[str]) -> int:
    options, rest = parsed(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    if not any(not each.startswith("-") and Path(each.split("::")[0]).exists() for each in rest):
        rest = rest + files_with("gpu_smoke" if "gpu_smoke" in options.marker else "gpu")
    folder = Path(tempfile.mkdtemp(prefix="octavo-gpu-"))
    run = Run(options, ["-q", "-p", "no:cacheprovider", "-m", options.marker, *rest], folder)
    try:
        run()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    summary = run.summary()
    (options.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    if options.write_costs:
        write_costs(options.out / "results.jsonl")
    print(printed(summary, list(run.records.values())), flush=True)
    outcomes = summary["outcomes"]
    return int(not outcomes["passed"] or any(outcomes[each] for each in ("failed", "crashed", "not run")))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
