"""What a rank of experts says when another ends, stops, or calls the layer in another way."""

import subprocess
import sys
import textwrap
import time

import pytest

from octavo import moe
from octavo.errors import Unsupported
from tests.support.processes import ROOT
from tests.support.split_experts import data, mixture

TIMEOUT = 8  # seconds, of the group
SCRIPT = """
import os, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
import octavo

rank, store, fault, engine = int(sys.argv[1]), *sys.argv[2:]
if sys.platform == "linux":
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2, timeout=timedelta(seconds=%d))
torch.manual_seed(0)
model = octavo.MoE(64, 64, 4, 2, recipe="fp8-block", dispatcher=octavo.moe.ExpertParallel(engine=engine))
x = torch.randn(40, 64, requires_grad=True)
y = model(x)  # all is well
dist.barrier()
if rank == 1:
    if fault == "raises":
        model.experts.fc1.register_forward_pre_hook(lambda *given: 1 / 0)
        try:
            model(x)
        except ZeroDivisionError:
            time.sleep(%d)
    if fault == "stops":
        time.sleep(%d)
    os._exit(3)
started = time.time()
try:
    y.sum().backward() if fault == "dies before backward" else model(x)
except RuntimeError as error:
    print(f"{time.time() - started:.1f} | {type(error).__name__} | {error}", flush=True)
    os._exit(0)
"""


@pytest.mark.parametrize(
    ("engine", "fault", "what"),
    [pytest.param("all-to-all", "stops", "all-gather of torch.int64", marks=pytest.mark.slow),
     ("all-to-all", "dies before backward", "all-to-all of torch.uint8"),
     pytest.param("all-to-all", "raises", "all-to-all of torch.float32", marks=pytest.mark.slow),
     pytest.param("symmetric", "stops", "all-gather of torch.int64", marks=pytest.mark.slow),
     pytest.param("symmetric", "dies before backward", "barrier of torch.int32", marks=pytest.mark.slow),
     pytest.param("symmetric", "raises", "barrier of torch.int32", marks=pytest.mark.slow)],
)  # fmt: skip
def test_a_rank_that_is_gone_is_told_within_the_timeout(tmp_path, engine, fault, what):
    script = textwrap.dedent(SCRIPT) % (TIMEOUT, 3 * TIMEOUT, 3 * TIMEOUT)
    commands = [[sys.executable, "-c", script, str(rank), str(tmp_path / "store"), fault, engine] for rank in (0, 1)]
    started, processes = time.time(), [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for command in commands
    ]  # fmt: skip
    out, error = processes[0].communicate(timeout=120)
    assert processes[0].returncode == 0, error
    processes[1].kill()
    processes[1].communicate()
    seconds, kind, message = out.split(" | ")
    assert float(seconds) <= 2 * TIMEOUT and kind == "CollectiveFailed" and time.time() - started <= 100
    assert f"ExpertParallel(ranks=2, engine={engine!r}, payload='auto') waited in {what}" in message
    assert "as rank 0 of 2 in the process group" in message
    assert "Another rank has ended, raised an error before this call, or passed other shapes" in message


def _different(group, rank, difference):
    """The error of a rank whose call differs."""
    recipe = ("fp8-block", "mxfp8")[rank] if difference == "recipe" else "fp8-block"
    capacity = (20, 24)[rank] if difference == "capacity" else None
    engine = (
        ("padded", "symmetric")[rank] if difference == "engine" else "symmetric" if difference == "tokens" else "auto"
    )
    model = mixture(recipe, dispatcher=moe.ExpertParallel(group, capacity=capacity, engine=engine))
    x, _ = data(rank, 40 + 8 * rank)
    try:
        model(x)
    except Unsupported as error:
        return str(error)
    return ""


@pytest.mark.parametrize("difference", ["recipe", "capacity", "tokens", "engine"])
def test_ranks_that_call_it_in_different_ways_all_raise(ranks, difference):
    for rank, error in enumerate(ranks.run(_different, difference, size=2)):
        assert error.startswith("The 2 ranks of experts call their layer alike. Rank ")
        assert f"rank {1 - rank} differs. Build the same layer on all ranks" in error
