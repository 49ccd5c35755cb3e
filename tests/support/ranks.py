"""One pool of four processes over gloo, for all tests that need several ranks.

A job is a function of a module, called on every rank with its group and its rank there: `job(group, rank, *arguments)`.
A job of one rank or two runs on the first.
"""

import io
import multiprocessing
import os
import sys
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist

WORLD = 4
GROUPS = {}  # of the first ranks, by size
TIMEOUT = 60  # seconds that a rank waits for another
LONGEST_JOB = 300  # seconds, after which ranks are taken to wait for each other forever


class Pool:
    """Four processes, started for the first job. A job that fails ends them: ranks may wait for each other no more."""

    def __init__(self, folder):
        self.folder, self.started, self.processes = folder, 0, []

    def _start(self):
        self.started += 1
        store = str(self.folder / f"store{self.started}")
        context = multiprocessing.get_context("forkserver")  # octavo is imported once, and each rank is a fork
        context.set_forkserver_preload(["octavo"])
        ends = [context.Pipe() for _ in range(WORLD)]
        self.pipes = [mine for mine, _ in ends]
        self.processes = [
            context.Process(target=_serve, args=(rank, store, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(ends)
        ]
        for process in self.processes:
            process.start()

    def run(self, job, *arguments, size=WORLD):
        """Returns what each rank returns; raises if a rank raised."""
        if not self.processes:
            self._start()
        for pipe in self.pipes[:size]:
            pipe.send_bytes(_packed((job, arguments, size)))
        answers = [self._answer(rank) for rank in range(size)]
        errors = [f"rank {rank}:\n{error}" for rank, (_, error) in enumerate(answers) if error is not None]
        if errors:
            self.close()
        assert not errors, "\n".join(errors)
        return [found for found, _ in answers]

    def _answer(self, rank):
        if not self.pipes[rank].poll(LONGEST_JOB):
            self.close()
            raise TimeoutError(f"Rank {rank} has not answered for {LONGEST_JOB} s: it waits for another.")
        return _unpacked(self.pipes[rank].recv_bytes())

    def close(self):
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.join()
        self.processes = []


def _packed(thing):
    stream = io.BytesIO()
    torch.save(thing, stream)
    return stream.getvalue()


def _unpacked(data):
    return torch.load(io.BytesIO(data), weights_only=False)


def _serve(rank, store, pipe):
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    os.environ["RANK"] = str(rank)
    join(store)
    while True:
        job, arguments, size = _unpacked(pipe.recv_bytes())
        try:
            torch._dynamo.reset()
            torch.manual_seed(0)
            pipe.send_bytes(_packed((job(GROUPS[size], rank, *arguments), None)))
        except Exception:
            pipe.send_bytes(_packed((None, traceback.format_exc())))


def join(store):
    """Makes the default group, of all ranks."""
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=int(os.environ["RANK"]), world_size=WORLD,
        timeout=timedelta(seconds=TIMEOUT),
    )  # fmt: skip
    for size in (1, 2, WORLD):
        GROUPS[size] = dist.new_group(range(size))
