"""benchmarks/fc1_storage.py: runs that differ in storage alone, and a report that says whether the gap is small."""

import json

import pytest

from benchmarks import fc1_storage
from octavo.demo import corpus


@pytest.fixture(autouse=True)
def _little_text(monkeypatch):
    text, held_out = corpus.load()
    monkeypatch.setattr(corpus, "load", lambda path=None: (text[:4000], held_out[:400]))
    monkeypatch.setattr(fc1_storage, "LAYER", (4, 2, 32, 64, 64))


def test_a_report(tmp_path, capsys):
    path = tmp_path / "report.json"
    code = fc1_storage.main(["--device", "cpu", "--steps", "3", "--seeds", "0", "--json", str(path)])
    report = json.loads(path.read_text())
    losses, gaps = report["losses"], report["gaps_percent"]
    assert code == (0 if report["ok"] else 1)
    assert [len(found) for found in (*losses.values(), *gaps.values())] == [1] * 5
    assert losses["fp8"] != losses["unquantized"] != losses["bf16"]
    assert gaps["fp8 against unquantized"] == [100 * (losses["fp8"][0] / losses["unquantized"][0] - 1)]
    rows, wide = 2 * report["tokens_per_step"], 2 * report["model"]["ffn"]
    assert report["kept_bytes"] == {"unquantized": 2 * rows * wide, "fp8": rows * (wide + 4 * wide // 128)}
    assert all(0 < error < 0.2 for found in report["gradient_errors"].values() for error in found.values())
    assert "fp8 against unquantized, %" in capsys.readouterr().out


def test_a_recipe_in_which_experts_are_not_fused_is_refused(capsys):
    assert fc1_storage.main(["--device", "cpu", "--recipe", "bf16"]) == 2
    assert "In bf16 the experts are not fused" in capsys.readouterr().err
