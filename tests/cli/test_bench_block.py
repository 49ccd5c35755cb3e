"""`octavo bench block`: what it prints and writes, on a CPU, and the block it measures."""

import json

import pytest
import torch

import octavo
from octavo.cli import main
from octavo.cli.bench import block_bench, training_steps
from octavo.demo.transformer import swiglu_block
from octavo.recipes import SHIPPED

pytestmark = pytest.mark.usefixtures("forgetful_compiler")

TINY = block_bench.SIZES["tiny"]
COMMAND = ("bench", "block", "--size", "tiny", "--device", "cpu", "--no-peers")


def test_a_run_prints_both_tables_and_writes_what_they_were_made_from(tmp_path, capsys):
    path = tmp_path / "block.json"
    assert main([*COMMAND, "--recipes", "fp8-current,fp8-delayed", "--json", str(path)]) == 0
    report, printed = json.loads(path.read_text()), capsys.readouterr().out
    assert report["backend"] == "aot_eager" and "backend aot_eager" in printed
    assert report["machine"]["torch"] == torch.__version__
    assert report["size"] == vars(TINY)
    cases = {row["case"]: row for row in report["results"]}
    assert list(cases) == ["bf16", "octavo fp8-current", "octavo fp8-delayed"]
    for row in cases.values():
        assert len(row["readings_ms"]) == len(row["eager_readings_ms"]) == training_steps.CPU_REPEATS
        assert min(row["readings_ms"]) <= row["ms"] <= max(row["readings_ms"])
        assert row["of_bf16"] == row["ms"] / cases["bf16"]["ms"]
        assert row["compile_s"] > row["ms"] / 1e3  # tracing a block takes longer than running a tiny one
        assert row["peak_mib"] is None and row["eager_peak_mib"] is None
    assert [row["case"] for row in report["host"]] == ["nn.Linear", *[f"octavo {name}" for name in SHIPPED]]
    assert all(row["skips"] == 0 for row in report["host"])
    for case in (*cases, *[row["case"] for row in report["host"]]):
        assert f"\n{case}  " in printed


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("arguments", [("block",), ("linear",), ("quantize",)], ids=str)
def test_without_a_gpu_a_bench_says_what_it_needs(arguments, capsys):
    assert main(["bench", *arguments]) == 2
    assert "octavo bench: A bench times a GPU, and torch sees none here." in capsys.readouterr().err


def test_every_projection_of_the_block_is_converted():
    model = swiglu_block(TINY)
    report = octavo.convert(model, "fp8-block")
    assert [row.path for row in report] == ["attention.qkv", "attention.out", "mlp.up", "mlp.down"]


def test_a_position_reads_itself_and_those_before_it():
    model, x = swiglu_block(TINY), torch.randn(1, TINY.length, TINY.width)
    changed = x.clone()
    changed[0, 9] += 1
    before, after = model(x), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert (before[:, 9:] != after[:, 9:]).any(dim=-1).all()


def test_heads_are_apart_and_q_k_v_in_their_places():
    """Against attention written out, head by head."""
    model = swiglu_block(TINY).attention
    x = torch.randn(2, TINY.length, TINY.width)
    q, k, v = model.qkv(x).chunk(3, dim=-1)
    each = TINY.width // TINY.heads
    mixed = []
    for head in range(TINY.heads):
        part = slice(head * each, (head + 1) * each)
        scores = q[..., part] @ k[..., part].mT / each**0.5
        future = torch.ones(TINY.length, TINY.length, dtype=torch.bool).triu(1)
        mixed.append(scores.masked_fill(future, -torch.inf).softmax(-1) @ v[..., part])
    torch.testing.assert_close(model(x), model.out(torch.cat(mixed, dim=-1)), rtol=1e-4, atol=1e-5)
