"""`octavo train --parallel`: the losses of one process, and what it refuses."""

import json
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from octavo.cli import main, train
from octavo.demo import split_model
from octavo.demo.gpt import GPT, Shape
from octavo.demo.pipeline_stages import Stage
from octavo.errors import UnsupportedConfig
from octavo.recipes import recipe
from tests.support.processes import ROOT

SMALL = Shape(width=64, layers=2, heads=4, context=32)


def losses(chosen, ranks=None):
    plan = train.Plan(steps=4, batch=4, shape=SMALL, ranks=ranks)
    return train.train(plan, None if chosen is None else recipe(chosen))


def _train(group, rank, chosen, tp, dp, fsdp, pp):
    assert dist.get_world_size() == tp * dp * fsdp * pp
    found = losses(chosen, split_model.joined(tp, dp, torch.device("cpu"), fsdp, pp))
    return [*found.losses, found.loss]


GRIDS = [(2, 2, 1, 1), (4, 1, 1, 1), (1, 4, 1, 1), (2, 1, 2, 1), (1, 2, 2, 1), (1, 1, 2, 2), (2, 1, 1, 2), (1, 2, 1, 2)]
FAST = [(None, (2, 2, 1, 1)), ("fp8-block", (2, 1, 2, 1)), ("fp8-delayed", (2, 1, 1, 2)), ("fp8-current", (1, 1, 2, 2))]


@pytest.mark.parametrize(
    ("chosen", "grid"),
    [*FAST, *[pytest.param(chosen, grid, marks=pytest.mark.slow) for grid in GRIDS
              for chosen in (None, "fp8-current", "fp8-delayed", "fp8-block") if (chosen, grid) not in FAST]],
)  # fmt: skip
def test_four_ranks_have_the_losses_of_one_process(ranks, chosen, grid):
    whole = losses(chosen)
    found = ranks.run(_train, chosen, *grid)
    for own in found:
        assert own == pytest.approx([*whole.losses, whole.loss], rel=2e-3)
        assert own == found[0] or grid[2] * grid[3] > 1


def _shapes(group, rank):
    model = GPT(SMALL, seed=0)
    train.converted(model, recipe("fp8-block"))
    split_model.split(model, split_model.joined(4, 1, torch.device("cpu")))
    block = model.blocks[0]
    names = ("attention.qkv", "attention.out", "mlp.up", "mlp.down")
    return [tuple(block.get_submodule(name).weight.shape) for name in names], block.attention.heads


def test_a_rank_has_some_heads_and_features(ranks):
    for shapes, heads in ranks.run(_shapes):
        assert heads == 1
        assert shapes == [(48, 64), (64, 16), (64, 64), (64, 64)]


@pytest.mark.parametrize("text", ["", "tp", "tp=0", "tp=2,tp=2", "ep=2", "tp=2;dp=2", "tp=-1"])
def test_other_texts_are_refused(text):
    with pytest.raises(UnsupportedConfig, match="--parallel takes pp=N, dp=N, fsdp=N, tp=N"):
        split_model.sizes(text)


@pytest.mark.parametrize(
    ("options", "says"),
    [(["tp=2", "--out", "run"], "--out saves whole models"), (["fsdp=2", "--model", "moe"], "splits the gpt"),
     (["pp=2", "--compile"], "runs in eager mode")],
)  # fmt: skip
def test_what_ranks_cannot_do_is_refused(options, says, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(train, "check_compiler", lambda device: None)
    assert main(["train", "--steps", "1", "--parallel", *options]) == 2
    assert says in capsys.readouterr().err


def test_a_stage_has_a_block():
    with pytest.raises(UnsupportedConfig, match="pp=3 gives each stage a block, and the model has 2"):
        Stage(GPT(SMALL, seed=0), 0, 3)


def test_too_few_ranks_are_told_the_command(capsys):
    assert main(["train", "--parallel", "tp=2,dp=2", "--steps", "1"]) != 0
    assert "torchrun --nproc-per-node 4 -m octavo train --parallel tp=2,dp=2" in capsys.readouterr().err


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(UnsupportedConfig, match="--batch 3 does not divide by the 2 data-parallel ranks"):
        split_model.Ranks(1, 2, "", "", "").own_rows(torch.ones(3, 4))


@pytest.mark.slow
@pytest.mark.parametrize(("parallel", "number"), [("tp=2,dp=2", 4), ("pp=2,fsdp=2,tp=2", 8)])
def test_torchrun(tmp_path, parallel, number):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(number)]
    command += ["-m", "octavo", "train", "--parallel", parallel]
    options = ["--steps", "8", "--recipe", "fp8-delayed", "--json", str(tmp_path / "f.json")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    run = subprocess.run([*command, *options], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("fp8-delayed") == 1  # one rank prints
    report = json.loads((tmp_path / "f.json").read_text())
    right = train.train(train.Plan(steps=8), recipe("fp8-delayed"))
    assert report["recipes"][0]["loss"] == pytest.approx(right.loss, rel=2e-3)


TORCHRUN = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        *[("WORLD_SIZE", value, "WORLD_SIZE in the environment") for value in ("abc", "", "-2", "0", "1.5", "9" * 30)],
        *[("RANK", value, "RANK in the environment is a whole number from 0 to 0") for value in ("abc", "-1", "", "1")],
        ("RANK", None, "RANK is not set"),
        ("MASTER_ADDR", None, "MASTER_ADDR is not set"),
        ("MASTER_PORT", None, "MASTER_PORT is not set"),
        *[("MASTER_PORT", value, "a whole number from 0 to 65535") for value in ("abc", "99999")],
    ],
)
def test_what_torchrun_would_not_set_is_refused_in_a_sentence(name, value, says, monkeypatch, capsys):
    for variable, usual in TORCHRUN.items():
        monkeypatch.setenv(variable, usual)
    monkeypatch.delenv(name)
    if value is not None:
        monkeypatch.setenv(name, value)
    assert main(["train", "--parallel", "tp=1,dp=1", "--steps", "1"]) == 2
    said = capsys.readouterr().err
    assert says in said and "torchrun" in said
    assert not dist.is_initialized()
