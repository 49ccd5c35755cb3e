"""benchmarks/vision.py and nanochat.py at tiny sizes: what is drawn, what is compared, and when a gap is too large."""

import json
import math

import pytest
import torch

from benchmarks import drawn_pictures, nanochat, vision
from benchmarks.drawn_pictures import CLASSES, draw


def drawn(seed, count=512):
    return draw(count, 3, 32, torch.Generator().manual_seed(seed))


def test_pictures_follow_their_seed_and_show_their_class(monkeypatch):
    pictures, kinds = drawn(0)
    again, same = drawn(0)
    assert torch.equal(pictures, again) and torch.equal(kinds, same)
    assert not torch.equal(pictures, drawn(1)[0]) and len(kinds.unique()) == CLASSES
    monkeypatch.setattr(drawn_pictures, "NOISE", 0.0)
    clean = drawn(0)[0]
    assert torch.allclose((pictures - clean)[:, :, 0, 0].std(), torch.tensor(0.3), atol=0.03)
    # away from figures a ground is linear in x and y; an outline has more edges than the filled figure
    edges = clean.diff(n=2).abs().sum((1, 2, 3))
    filled = torch.stack([edges[kinds == kind].mean() for kind in range(CLASSES)]).view(2, 8)
    assert (filled[1] > 1.2 * filled[0]).all()


@pytest.mark.parametrize("model", ["vit", "dit"])
def test_a_tiny_run(model, tmp_path, capsys):
    path = tmp_path / "vision.json"
    options = ["--device", "cpu", "--size", "tiny", "--steps", "12", "--seeds", "0", "--json", str(path)]
    assert vision.main([*options, "--models", model]) == 0
    report = json.loads(path.read_text())
    (row,) = report["results"]
    (plain, mine) = report["runs"]
    assert (plain["recipe"], mine["recipe"], row["model"]) == ("bf16", "fp8-delayed", model)
    assert row["gaps_percent"] == [100 * (mine["loss"] / plain["loss"] - 1)] and row["gaps_percent"] != [0.0]
    # equal weights, pictures and noise: at first the two differ by a recipe's rounding alone
    assert mine["curve"][0] == pytest.approx(plain["curve"][0], rel=0.01) and len(set(mine["curve"])) == 12
    assert "convolution: 1 layer" in mine["converted"] and mine["converted"].startswith("Converted 8 layers")
    assert ("conditioning" in mine["converted"]) == (model == "dit")
    assert "within" in capsys.readouterr().out


def test_a_gap_is_held_against_the_spread_of_the_seeds():
    def judged(*pairs):
        runs = [
            {"model": "vit", "recipe": recipe, "seed": seed, "loss": loss}
            for seed, pair in enumerate(pairs)
            for recipe, loss in zip(("bf16", "fp8-block"), pair, strict=True)
        ]
        return vision.judge(runs, "vit", "fp8-block")

    assert judged((1.0, 1.004))["ok"] and not judged((1.0, 1.006))["ok"] and not judged((1.0, 0.994))["ok"]
    wide = judged((1.0, 1.006), (1.01, 1.016))
    assert wide["ok"] and wide["bar_percent"] == pytest.approx(100 * 0.01 / 1.005)
    assert not judged((1.0, math.nan))["ok"]


def test_nanochat_proves_that_its_layers_only_cast(tmp_path, capsys):
    path = tmp_path / "nanochat.json"
    options = ["--device", "cpu", "--size", "tiny", "--batch", "1", "--steps", "2", "--json", str(path)]
    with torch.compiler.set_stance("force_eager"):
        assert nanochat.main([*options, "--recipes", "bf16", "torchao", "fp8-block"]) == 0
    plain, absent, mine = json.loads(path.read_text())["results"]
    assert "missing" in absent and mine["converted"].startswith("Converted 12 layers")
    assert abs(mine["losses"][1] / plain["losses"][1] - 1) < 0.01 and mine["losses"] != plain["losses"]
    assert mine["tokens_per_s"] == 1e3 * nanochat.SIZES["tiny"].length / mine["ms"]
    assert "not installed" in capsys.readouterr().out
