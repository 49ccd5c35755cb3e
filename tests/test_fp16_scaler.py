"""The benchmark of float16 training with a GradScaler, in a moment's work: what it writes, and that scales fall."""

import json

import pytest

from benchmarks import fp16_scaler
from octavo.demo import corpus

TEXT, HELD_OUT = corpus.load()
TINY = {"device": "cpu", "steps": 24, "batch": 2, "width": 16, "layers": 1, "context": 8, "scale": 2**32, "interval": 4}


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(corpus, "load", lambda path=None: (TEXT[:4000], HELD_OUT[:200]))


def test_a_tiny_run(tmp_path, capsys):
    """Steps are skipped from the first one on until the scale fits, taken then, and the loss follows nn.Linear's."""
    path = tmp_path / "fp16.json"
    recipes = ["fp8-delayed", "fp8-rowwise"]
    settings = [part for name, value in TINY.items() for part in (f"--{name}", str(value))]
    code = fp16_scaler.main([*settings, "--json", str(path), "--recipes", *recipes])
    report = json.loads(path.read_text())
    runs = {row["recipe"]: row for row in report["results"]}
    assert list(runs) == ["nn.Linear", *recipes]
    for name, row in runs.items():
        skipped = row["skipped"]
        assert skipped[:5] == [1, 2, 3, 4, 5], name  # 2^32 is far too large, in every recipe
        assert len(skipped) < 20 and row["losses"][-1][0] == 24, name
        falls = [step for (_, a), (step, b) in zip(row["scales"], row["scales"][1:], strict=False) if b < a]
        assert falls == skipped, name
        assert any(b > a for (_, a), (_, b) in zip(row["scales"], row["scales"][1:], strict=False)), name
    counted = runs["fp8-delayed"]["nonfinite"]
    assert counted and all(sum(counts) > 0 for key, counts in counted.items() if "backward" in key)
    assert code == 0, capsys.readouterr().out
