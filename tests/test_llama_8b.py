"""The benchmark of an 8B model, at a tiny size: rows in processes of their own, on tokens that differ by step."""

import json
import math

import torch

from benchmarks import llama_8b
from octavo.cli.bench import isolated


def test_rows_run_in_processes_of_their_own(tmp_path, capsys):
    path = tmp_path / "llama.json"
    options = ["--device", "cpu", "--size", "tiny", "--steps", "2", "--batch", "2", "--json", str(path)]
    assert llama_8b.main([*options, "--rows", "streamed/fp8-block", "lora/bf16"]) == 0
    report = json.loads(path.read_text())
    streamed, adapted = report["results"]
    assert (streamed["how"], streamed["recipe"], adapted["how"]) == ("streamed", "fp8-block", "lora")
    assert adapted["parameters"] > streamed["parameters"] and report["size"]["batch"] == 2
    tokens = 2 * llama_8b.SIZES["tiny"].length
    for row in report["results"]:
        assert row["tokens_per_s"] == tokens / row["ms"] * 1e3
        assert all(abs(loss - math.log(512)) < 1 for loss in row["losses"])
    assert "lora" in capsys.readouterr().out


def test_a_row_that_fails_is_named_and_the_others_go_on(tmp_path, monkeypatch, capsys):
    def report_of(options, module):
        assert module == "benchmarks.llama_8b" and "--recompute" in options
        if "full/bf16" in options:
            raise RuntimeError("The process was ended after 300 seconds.")
        return {"results": [{"how": "lora", "recipe": "bf16", "model_gib": 1, "out_of_memory": "Tried to allocate"}]}

    monkeypatch.setattr(isolated, "report_of", report_of)
    options = ["--device", "cpu", "--size", "tiny", "--recompute", "--rows", "full/bf16", "lora/bf16"]
    assert llama_8b.main(options) == 1
    text = capsys.readouterr().out
    assert "ended after 300 seconds" in text and "out of memory" in text


def test_each_step_has_other_tokens():
    seen = []

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(()))

        def forward(self, tokens):
            seen.append(tokens)
            return self.weight * 1.0

    size = llama_8b.SIZES["tiny"]
    llama_8b.steps_of(Model(), lambda: None, size, 3, torch.device("cpu"))
    assert len(seen) == 3 and not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])
