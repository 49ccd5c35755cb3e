"""`octavo bench model`: what it prints and writes, on a CPU, and the model that it trains."""

import json
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn

import octavo
from octavo.cli import main
from octavo.cli.bench import llama_weights, model_bench, peers, training_steps
from octavo.demo.llama import TURN, PlainAttention, Size, fused_blocks, plain_blocks

pytestmark = pytest.mark.usefixtures("forgetful_compiler")

TINY = model_bench.SIZES["tiny"]
CPU = torch.device("cpu")
COMMAND = ("bench", "model", "--size", "tiny", "--device", "cpu", "--recipes", "fp8-delayed")
ROWS = (
    "bf16, compiled",
    "octavo fp8-delayed, blocks",
    "octavo fp8-delayed, blocks, compiled",
    "octavo fp8-delayed, codes",
    "octavo fp8-delayed, codes, compiled",
    "octavo fp8-delayed, convert, compiled",
    "octavo fp8-delayed, convert",
    "bf16",
)


def makes(recipe):
    """The constructors of plain blocks, of converted ones, and of Octavo's own."""
    convert = partial(octavo.convert, recipe=recipe)
    return plain_blocks, partial(model_bench._converted, conversion=convert), partial(fused_blocks, recipe=recipe)


def losses(make, steps, size=TINY):
    """The losses of a run on one batch."""
    training = model_bench.Training(make, size, CPU, "cudnn")
    tokens = training.tokens.random_(size.vocabulary).clone()
    return [float(training.train(tokens)) for _ in range(steps)]


# -- the command -----------------------------------------------------------------------------------------------------


def test_a_run_has_a_row_for_every_case_and_mode(tmp_path, capsys):
    path = tmp_path / "model.json"
    assert main([*COMMAND, "--no-peers", "--json", str(path)]) == 0
    report, printed = json.loads(path.read_text()), capsys.readouterr().out
    assert report["backend"] == "aot_eager" and report["size"] == vars(TINY)
    assert report["attention"] == {"first": "cudnn", "kernel": "FLASH_ATTENTION"}  # that of a CPU
    rows = {row["case"]: row for row in report["results"]}
    assert tuple(rows) == ROWS
    for case, row in rows.items():
        assert len(row["readings_ms"]) == training_steps.CPU_REPEATS
        assert min(row["readings_ms"]) <= row["ms"] <= max(row["readings_ms"])
        assert row["of_bf16"] == row["ms"] / rows["bf16, compiled"]["ms"]
        assert row["tokens_per_s"] == TINY.tokens / row["ms"] * 1e3
        assert (row["mode"] == "compiled") == ("compile_s" in row) == case.endswith("compiled")
        assert row["peak_mib"] is None and row["held_mib"] is None and row["kernels"] == []
        assert row["losses"] == pytest.approx(rows["bf16"]["losses"], rel=0.01)
        assert len(row["losses"]) == model_bench.SETTLING + 1  # the last one of a compiled step
        assert row["losses"] == pytest.approx(rows[case.removesuffix(", compiled")]["losses"], rel=1e-3)
        assert f"\n{case}  " in printed or f"\n{case}\n  " in printed


def test_a_case_that_fails_is_printed_with_its_error_and_the_others_are_measured(monkeypatch, capsys):
    def refuse(blocks):
        raise RuntimeError("no such kernel\nat length")

    monkeypatch.setattr(peers, "conversions", lambda: {"torchao tensorwise": refuse})
    monkeypatch.setattr(model_bench, "kernels_ms", lambda step, device: [{"kernel": "gemm", "calls": 2.0, "ms": 1.5}])
    assert main(COMMAND) == 0
    printed = capsys.readouterr().out
    for mode in ("", ", compiled"):
        assert f"\ntorchao tensorwise{mode}  failed: RuntimeError: no such kernel\n" in printed
    assert all(f"\n{case}  " in printed or f"\n{case}\n  " in printed for case in ROWS)
    assert printed.count("ms a step") == 4 and "kernel, octavo fp8-delayed, blocks  " in printed


def test_a_brief_run_has_the_weights_that_are_asked_for(capsys):
    assert main([*COMMAND, "--brief", "--weights", "codes"]) == 0
    rows = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()]
    assert [row for row in rows if row.startswith(("bf16", "octavo", "torchao"))] == [
        "bf16, compiled",
        "octavo fp8-delayed, codes",
    ]


def test_without_a_baseline_there_is_no_ratio():
    row, failed = {"case": "bf16", "ms": 2.0}, {"case": "bf16, compiled", "error": "no"}
    assert model_bench._of_bf16(row, [{"ms": 4.0}]) == {"of_bf16": 0.5}
    assert model_bench._of_bf16(row, [failed]) == {} and model_bench._of_bf16(failed, []) == {}


# -- training --------------------------------------------------------------------------------------------------------


def test_all_models_have_the_first_weights_of_the_plain_one():
    first, *others = (model_bench.Training(make, TINY, CPU, "cudnn").model for make in makes("fp8-block"))
    for other in others:
        for a, b in zip(first.parameters(), other.parameters(), strict=True):
            assert torch.equal(a, b) and a.dtype == torch.bfloat16


def test_in_bf16_all_models_train_alike_and_learn_a_batch():
    plain, *others = (losses(make, 12) for make in makes("bf16"))
    for other in others:
        assert other == pytest.approx(plain, rel=2e-3)
    assert all(b < a for a, b in pairwise(plain))


@pytest.mark.parametrize("recipe", ["fp8-delayed", "fp8-current", "fp8-block"])
def test_a_recipe_learns_a_batch(recipe):
    plain, *others = (losses(make, 8) for make in makes(recipe))
    for other in others:
        assert other == pytest.approx(plain, rel=0.01)
        assert other[-1] < other[0]


def test_a_step_changes_weights_and_keeps_no_gradients():
    training = model_bench.Training(partial(fused_blocks, recipe="fp8-delayed"), TINY, CPU, "cudnn")
    before = [p.clone() for p in training.model.parameters() if p.dim() == 2]
    training.step()
    after = [p for p in training.model.parameters() if p.dim() == 2]
    assert all(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(p.grad is None for p in training.model.parameters())


def test_tokens_are_new_in_every_step():
    training = model_bench.Training(plain_blocks, TINY, CPU, "cudnn")
    training.step()
    before = training.tokens.clone()
    training.step()
    assert not torch.equal(before, training.tokens) and int(training.tokens.max()) < TINY.vocabulary


def test_calibrated_blocks_fuse_from_attention_to_attention():
    training = model_bench.Training(partial(fused_blocks, recipe="fp8-delayed"), TINY, CPU, "cudnn")
    for _ in range(model_bench.SETTLING):
        training.step()
    blocks = training.model.blocks
    assert isinstance(blocks, octavo.Sequential)
    plan = blocks.explain(torch.randn(2, 16, TINY.width, dtype=torch.bfloat16, requires_grad=True))
    assert {"norm-linear", "add-norm-linear", "mlp", "add-rmsnorm", "linear-rotary"} <= set(plan.fired)
    steps = [step for run in plan.runs for step in run.forward]
    assert steps.count("add-norm-linear") == 2 * TINY.layers - 1 and steps.count("add") == 1  # before the last norm
    assert len(plan.runs) == TINY.layers + 1


def test_projections_are_converted_and_the_head_is_not():
    whole = model_bench.Training(makes("fp8-block")[1], TINY, CPU, "cudnn").model
    found = [name for name, module in whole.named_modules() if isinstance(module, octavo.Linear)]
    each = ("attention.qkv", "attention.out", "mlp.up", "mlp.down")
    assert found == [f"blocks.{i}.{name}" for i in range(TINY.layers) for name in each]
    assert type(whole.head) is nn.Linear


# -- attention -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_is_that_written_out_head_by_head(kv_heads):
    size = Size(2, 8, 32, 4, kv_heads, 64, 1, 16)
    each, qkv = size.head_width, torch.randn(2, 8, size.qkv_width)
    parts = qkv.split(each, dim=-1)
    angle = torch.arange(8)[:, None] * TURN ** (-torch.arange(0, each, 2) / each)
    turn = torch.polar(torch.ones_like(angle), angle)

    def turned(x):
        z = torch.complex(*x.chunk(2, -1)) * turn
        return torch.cat((z.real, z.imag), -1)

    future = torch.ones(8, 8, dtype=torch.bool).triu(1)
    mixed = []
    for head in range(4):
        shared = head * kv_heads // 4
        q, k, v = turned(parts[head]), turned(parts[4 + shared]), parts[4 + kv_heads + shared]
        scores = (q @ k.mT / each**0.5).masked_fill(future, -torch.inf)
        mixed.append(scores.softmax(-1) @ v)
    torch.testing.assert_close(PlainAttention(size)(qkv), torch.cat(mixed, -1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("first", llama_weights.ATTENTION)
def test_the_order_of_kernels_holds_inside_of_its_context_and_in_a_graph(first):
    mix, qkv = PlainAttention(TINY), torch.randn(2, TINY.length, TINY.qkv_width, requires_grad=True)
    before = torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cuda.flash_sdp_enabled()
    with llama_weights.attention_order(first):
        assert torch.backends.cuda.cudnn_sdp_enabled() == (first == "cudnn")
        assert torch.backends.cuda.flash_sdp_enabled()
        graph = torch.compile(mix, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(graph(qkv), mix(qkv))
    assert (torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cuda.flash_sdp_enabled()) == before
    assert llama_weights.attention_kernel(TINY, CPU, first) == "FLASH_ATTENTION"
