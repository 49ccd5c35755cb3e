"""A run of several ranks that loses one: torchrun starts all of them again, from the last checkpoint."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from octavo.cli import train
from octavo.demo.training import shape_of
from octavo.recipes import recipe
from tests.support.processes import ROOT

STEPS, SIZE = 60, "64,1,4,32"
PATIENCE = 240  # seconds
LINUX = pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds the ranks in /proc")


def started(folder, ranks, *options, restarts=0):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["--max-restarts", str(restarts), "--monitor-interval", "0.1", "-m", "octavo", "train"]
    command += ["--parallel", f"dp={ranks}", "--size", SIZE, "--steps", str(STEPS), "--recipe", "fp8-delayed"]
    command += ["--out", str(folder), "--save-every", "5", "--json", str(folder / "found.json"), *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    # the store of the agent has addresses of ranks that have ended (pytorch #135712)
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def kill_last_rank(run, checkpoints):
    """Ends the last rank once the run has some checkpoints."""
    end = time.monotonic() + PATIENCE
    while len(list(checkpoints.glob("step-*/checkpoint.json"))) < 2:
        assert run.poll() is None and time.monotonic() < end, "the run has ended, or makes no checkpoint"
        time.sleep(0.02)
    ranks = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    os.kill(int(ranks[-1]), signal.SIGKILL)


def ended(run):
    said, _ = run.communicate(timeout=PATIENCE)
    return run.returncode, said


@pytest.fixture(scope="module")
def right():
    """The losses of one process that loses nothing."""
    plan = train.Plan(steps=STEPS, shape=shape_of("gpt", SIZE))
    return train.train(plan, recipe("fp8-delayed")).losses


def losses(folder):
    return json.loads((folder / "found.json").read_text())["recipes"][0]["losses"]


@pytest.mark.slow
@LINUX
def test_torchrun_starts_all_ranks_again_from_the_last_checkpoint(tmp_path, right):
    run = started(tmp_path, 2, restarts=1)
    kill_last_rank(run, tmp_path / "fp8-delayed")
    code, said = ended(run)
    assert code == 0, said
    assert losses(tmp_path) == pytest.approx(right, rel=2e-3)
    assert said.count("bf16 (torch)  60/60") == 1  # the run that had ended was not repeated


@pytest.mark.slow
@LINUX
def test_another_number_of_ranks_goes_on(tmp_path, right):
    run = started(tmp_path, 2)
    kill_last_rank(run, tmp_path / "fp8-delayed")
    code, said = ended(run)
    assert code != 0, said
    made = sorted(path.name for path in (tmp_path / "fp8-delayed").glob("step-*/checkpoint.json"))
    assert made and not (tmp_path / "found.json").exists()
    code, said = ended(started(tmp_path, 4, "--resume"))
    assert code == 0, said
    assert losses(tmp_path) == pytest.approx(right, rel=2e-3)
