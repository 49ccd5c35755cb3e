"""What a rank says when another ends, stops or raises: the layer that waits, the collective and its own rank."""

import subprocess
import sys
import textwrap
import time

import pytest

from tests.support.processes import ROOT

TIMEOUT = 8  # seconds, of the group
SCRIPT = """
import os, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
import octavo

rank, store, fault = int(sys.argv[1]), sys.argv[2], sys.argv[3]
if sys.platform == "linux":
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2, timeout=timedelta(seconds=%d))
torch.manual_seed(0)
layer = octavo.Linear(64, 64, recipe="fp8-current", parallel_mode="row")
x = torch.ones(4, 32, requires_grad=True)
layer(x)  # all is well
column = octavo.Linear(64, 64, recipe="fp8-block", parallel_mode="column")
y = column(torch.ones(4, 64, requires_grad=True))
if fault.startswith("graph"):
    layer.compile(backend="aot_eager", fullgraph=True)
    layer(x)
dist.barrier()
if fault == "graph, forced to eager":
    torch.compiler.set_stance("force_eager")
if rank == 1:
    if fault == "dies" or fault.startswith("graph"):
        os._exit(3)
    if fault == "stops":
        time.sleep(%d)
        os._exit(4)
    if fault == "raises":
        layer(torch.ones(4, 33))
    if fault == "dies before backward":
        os._exit(3)
started = time.time()
try:
    y.sum().backward() if fault == "dies before backward" else layer(x)
except RuntimeError as error:
    print(f"{time.time() - started:.1f} | {type(error).__name__} | {error}", flush=True)
    os._exit(0)
"""


def outcomes(tmp_path, fault):
    script = textwrap.dedent(SCRIPT) % (TIMEOUT, 3 * TIMEOUT)
    commands = [[sys.executable, "-c", script, str(rank), str(tmp_path / "store"), fault] for rank in (0, 1)]
    started = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for command in commands
    ]
    said = started[0].communicate(timeout=120)
    for process in started[1:]:
        process.kill()
        process.communicate()
    return started[0].returncode, *said


@pytest.mark.parametrize(
    ("fault", "what"),
    [pytest.param("dies", "Linear(32, 64) waited in all-gather of torch.int64 (4,)", marks=pytest.mark.slow),
     pytest.param("graph, forced to eager", "Linear(32, 64) waited in all-gather", marks=pytest.mark.slow),
     ("dies before backward", "Linear(64, 32) waited in all-reduce of torch.float32 (4, 64)")],
)  # fmt: skip
def test_a_rank_that_ends_is_told_by_those_that_wait(tmp_path, fault, what):
    code, out, error = outcomes(tmp_path, fault)
    assert code == 0, error
    seconds, kind, message = out.split(" | ")
    assert float(seconds) <= 2 * TIMEOUT and kind == "CollectiveFailed"
    assert what in message
    assert "as rank 0 of 2 in the process group '0', and it failed: " in message
    assert "Another rank has ended, raised an error before this call, or passed other shapes" in message


@pytest.mark.slow
def test_a_graph_says_what_the_backend_says(tmp_path):
    code, out, error = outcomes(tmp_path, "graph")
    assert code == 0, error
    seconds, kind, message = out.split(" | ")
    assert float(seconds) <= 2 * TIMEOUT and kind == "RuntimeError" and "Linear" not in message


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["stops", "raises"])
def test_a_rank_that_stops_is_waited_for_no_longer_than_the_timeout(tmp_path, fault):
    started = time.time()
    code, out, error = outcomes(tmp_path, fault)
    assert code == 0, error
    assert "Linear(32, 64) waited in all-gather of torch.int64" in out  # whether the ranks call the layer alike
    assert time.time() - started <= 60
