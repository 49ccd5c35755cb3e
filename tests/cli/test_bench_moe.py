"""`octavo bench moe`: its order, octavo.MoE itself, compiled cases, cases that fail, and other libraries."""

import json
import re
from argparse import Namespace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import octavo
from octavo.cli import main
from octavo.cli.bench import cases, isolated, moe_bench, peers
from octavo.errors import UnsupportedConfig
from octavo.weights.quantized_weight import QuantizedWeight

TINY = (16, 4, 2, 32, 64)
ROW = {
    "ms": 2.0, "readings_ms": [2.0], "tokens_per_s": 8000.0, "held_mib": 5.0, "kept_mib": 3.0, "codes_mib": 1.0,
    "peak_mib": 4.0,
}  # fmt: skip
FACTS = {"gpu": "a GPU", "torch": "2", "triton": "3"}
EAGER = ("octavo {}", "octavo {}, cached", "octavo {}, codes", "octavo {}, codes, columns kept")
COMPILED = tuple(f"{title}, compiled" for title in EAGER)
WHOLE = ("octavo.MoE {}", "octavo.MoE {}, captured", "octavo.MoE {}, compiled")


def titles(name, *, compiled=True):
    """The cases of a recipe, in order."""
    return [title.format(name) for title in (*EAGER, *WHOLE[:2], *((*COMPILED, WHOLE[2]) if compiled else ()))]


def asked(compiled, recipes=("fp8-delayed", "fp8-block"), **settings):
    own = {"weights": list(moe_bench.WEIGHTS), "optimizer": False, "brief": False, "allocations": False} | settings
    return Namespace(recipes=list(recipes), compiled=compiled, **own)


@pytest.fixture
def on_a_cpu(monkeypatch):
    """A timer that runs one step, no measurement of GPU memory, and graphs without generated code."""
    compile_ = nn.Module.compile
    for timer in ("eager_ms", "device_ms"):
        monkeypatch.setattr(moe_bench, timer, lambda step, **_: (step(), (2.0, [2.0]))[1])
    monkeypatch.setattr(moe_bench, "kept_mib", lambda module, x: 3.0)
    monkeypatch.setattr(moe_bench, "held_mib", lambda before, module, x: 5.0 + x.nbytes / 2**20)
    monkeypatch.setattr(moe_bench, "peak_mib", lambda step: (step(), 4.0)[1])
    monkeypatch.setattr(nn.Module, "compile", lambda self, **settings: compile_(self, backend="aot_eager", **settings))
    yield
    torch._dynamo.reset()


@pytest.fixture
def faked(monkeypatch):
    """Cases that take no time, of which those of fp8-block fail."""

    def case(make, shape, way, **settings):
        if "fp8-block" in make.args:
            raise RuntimeError("\nrecompile_limit reached\nmore")
        return ROW

    def kernels(shape, name):
        if name == "fp8-block":
            raise ZeroDivisionError
        return {"kernels": [{"kernel": "k", "calls": 1.0, "ms": 1.0}]}

    monkeypatch.setattr(moe_bench, "_case", case)
    monkeypatch.setattr(moe_bench, "_kernels", kernels)


@pytest.fixture
def shapes(faked):
    """The results of one shape and two recipes, of which fp8-block fails."""
    found = []
    moe_bench._measure_shape(TINY, asked(["fp8-delayed", "fp8-block"]), found)
    return found


# -- cases -----------------------------------------------------------------------------------------------------------


@torch._dynamo.config.patch(recompile_limit=3)
def test_more_compiled_cases_run_than_torch_compiles_one_forward(on_a_cpu):
    every_weight = [("fp8-delayed", weights) for weights in moe_bench.WEIGHTS]
    for name, weights in [*every_weight, ("fp8-block", "columns"), ("fp8-current", "cast")]:
        make = partial(moe_bench.Ours, TINY, name, weights, device="cpu")
        row = cases.attempt(name, partial(moe_bench._case, make, TINY, "compiled"))
        assert row["ms"] == 2.0 and row["tokens_per_s"] == 8000.0 and row["peak_mib"] == 4.0, row


def test_the_plain_layer_compiles_as_one_graph(on_a_cpu):
    assert "error" not in cases.attempt(
        "bf16", partial(moe_bench._case, partial(moe_bench.Stock, TINY, "cpu"), TINY, "compiled")
    )


@pytest.mark.parametrize("way", ["eager", "captured", "compiled"])
@pytest.mark.parametrize("name", ["bf16", "fp8-delayed", "fp8-block"])
def test_octavos_mixture_is_measured_each_way(on_a_cpu, name, way):
    row = cases.attempt(name, partial(moe_bench._case, partial(moe_bench.mixture, TINY, name, "cpu"), TINY, way))
    codes = 0 if name == "bf16" else 3 * 4 * 32 * 64 / 2**20
    assert row == {"case": name, **ROW, "kept_mib": 3.0 - codes, "codes_mib": codes}


def test_a_captured_case_is_timed_by_replays_alone(on_a_cpu, monkeypatch):
    monkeypatch.setattr(moe_bench, "device_ms", lambda step: (step(), (1.0, [1.0]))[1])
    make = partial(moe_bench.mixture, TINY, "fp8-block", "cpu")
    assert moe_bench._case(make, TINY, "captured")["ms"] == 1.0 and moe_bench._case(make, TINY, "eager")["ms"] == 2.0


def test_octavos_mixture_prefers_the_experts_of_the_other_cases():
    shape = (4096, 8, 2, 32, 64)
    layer, other = moe_bench.mixture(shape, "bf16", "cpu"), moe_bench.Router(shape, "cpu")
    assert isinstance(layer, octavo.MoE) and torch.equal(layer.router.preference, other.preference)
    layer(torch.randn(4096, 32, dtype=torch.bfloat16))
    order = layer.router.preference.argsort()
    assert 1.5 < layer.load[order[-1]] / layer.load[order[0]] < 6


@pytest.mark.parametrize(
    ("chosen", "compiled"),
    [
        (None, ["fp8-delayed", "fp8-block"]),
        ([], []),
        (["fp8-block"], ["fp8-block"]),
        (["fp8-block(scale='pow2')"], ["fp8-block"]),  # the same recipe in other words
    ],
)
def test_compiled_cases_are_those_asked_for(faked, chosen, compiled):
    found = []
    moe_bench._measure_shape(TINY, asked(moe_bench.compiled_of(["fp8-delayed", "fp8-block"], chosen)), found)
    ours = [title for name in ("fp8-delayed", "fp8-block") for title in titles(name, compiled=name in compiled)]
    assert [row["case"] for row in found[0]["results"]] == ["grouped_mm bf16, compiled", *ours, "grouped_mm bf16"]


def test_a_compiled_recipe_that_is_not_timed_is_refused(capsys):
    with pytest.raises(UnsupportedConfig, match=r"names recipes of --recipes, got mxfp8 besides fp8-block\."):
        moe_bench.compiled_of(["fp8-block"], ["fp8-block", "mxfp8"])
    with pytest.raises(SystemExit):
        main(["bench", "moe", "--compiled", "fp9"])
    assert "There is no recipe 'fp9'" in capsys.readouterr().err


def test_a_brief_run_has_the_weights_that_are_asked_for_and_steps_with_an_optimizer(faked):
    found = []
    chosen = asked(["fp8-delayed"], recipes=["fp8-delayed"], weights=["cached", "codes"], optimizer=True, brief=True)
    moe_bench._measure_shape(TINY, chosen, found)
    assert [row["case"] for row in found[0]["results"]] == [
        "grouped_mm bf16, compiled", "octavo fp8-delayed, cached", "octavo fp8-delayed, codes",
        "grouped_mm bf16, compiled, AdamW", "octavo fp8-delayed, codes, AdamW",
    ]  # fmt: skip
    assert ["of_floor" in row for row in found[0]["results"]] == [True, True, True, False, False]
    assert found[0]["kernels"] == {}


@pytest.mark.parametrize("weights", ["cast", "codes"])
@pytest.mark.parametrize("name", ["fp8-delayed", "fp8-block"])
def test_a_step_with_an_optimizer_trains_either_kind_of_weight(on_a_cpu, monkeypatch, name, weights):
    made = []
    monkeypatch.setattr(moe_bench, "kept_mib", lambda module, x: (made.append(module), 3.0)[1])
    make = partial(moe_bench.Ours, TINY, name, weights, device="cpu")
    torch.manual_seed(0)
    before = [p.detach().clone() for p in make().parameters()]
    torch.manual_seed(0)
    moe_bench._case(make, TINY, "eager", optimizer=True)
    (module,) = made
    assert isinstance(module.experts.fc1.weight, QuantizedWeight) == (weights == "codes")
    assert not any(torch.equal(p, was) for p, was in zip(module.experts.parameters(), before[1:], strict=True))


def test_weights_of_another_name_are_refused(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "moe", "--weights", "codes,bits"])
    assert "out of cast, cached, codes, columns, comma-separated; got 'bits'" in capsys.readouterr().err


def test_the_cases_that_matter_most_come_first(shapes):
    ours = [*titles("fp8-delayed"), *titles("fp8-block")]
    assert [row["case"] for row in shapes[0]["results"]] == ["grouped_mm bf16, compiled", *ours, "grouped_mm bf16"]


def test_a_case_that_fails_is_a_row_and_the_others_are_measured(shapes):
    (entry,) = shapes
    failed = [row for row in entry["results"] if "error" in row]
    assert [row["case"] for row in failed] == titles("fp8-block")
    assert {row["error"] for row in failed} == {"RuntimeError: recompile_limit reached"}
    measured = [row for row in entry["results"] if row not in failed]
    assert [row["of_bf16"] for row in measured] == [1.0] * 13
    assert measured[2]["of_floor"] == 2.0 / moe_bench.floors(TINY)["cached"]
    assert entry["kernels"]["fp8-block"] == [{"case": "fp8-block", "error": "ZeroDivisionError"}]
    text = moe_bench.render({"machine": FACTS, "shapes": shapes})
    assert re.search(r"\noctavo fp8-delayed, cached\s+2.000  8000      1.00", text)
    assert "\noctavo fp8-block, cached  failed: RuntimeError: recompile_limit reached\n" in text
    assert "\nkernel, fp8-block  failed: ZeroDivisionError" in text


def test_without_a_time_of_bf16_there_is_no_ratio_to_it(monkeypatch):
    entry = {"shape": list(TINY), "floor_ms": moe_bench.floors(TINY), "results": [], "kernels": {}}
    moe_bench._add(entry, {"case": "grouped_mm bf16, compiled", "error": "no"})
    moe_bench._add(entry, {"case": "octavo fp8-block", **ROW})
    assert "of_bf16" not in entry["results"][1] and entry["results"][1]["of_floor"] > 0
    assert "failed: no" in moe_bench.render({"machine": FACTS, "shapes": [entry]})


def test_ctrl_c_is_no_failed_case():
    with pytest.raises(KeyboardInterrupt):
        cases.attempt("a case", lambda: (_ for _ in ()).throw(KeyboardInterrupt))


def test_a_long_error_is_cut():
    assert len(cases.first_line(RuntimeError("x" * 5000))) == cases.LONGEST
    assert cases.first_line(RuntimeError()) == "RuntimeError"


# -- other libraries -------------------------------------------------------------------------------------------------


@pytest.fixture
def process(monkeypatch):
    """Other processes end with this report, or none, and this text on stderr."""
    ending = SimpleNamespace(report=None, stderr="", commands=[])

    def run(command, **settings):
        ending.commands.append(command)
        if ending.report is not None:
            Path(command[-1]).write_text(json.dumps(ending.report))
        return SimpleNamespace(stderr=ending.stderr, returncode=134)

    monkeypatch.setattr(isolated.subprocess, "run", run)
    monkeypatch.setattr(peers, "products", lambda: {"torchao rowwise": lambda: None})
    return ending


ASSERTION = "Assertion `delta % 16 == 0` failed."


def test_other_libraries_are_measured_in_processes_of_their_own(shapes, process):
    process.report = {"shapes": [{"results": [{"case": "torchao rowwise", **ROW, "of_bf16": 1.0, "of_floor": 1.0}]}]}
    shapes[0]["results"][0]["ms"] = 4.0
    moe_bench._add_peers(shapes)
    *_, first, second = shapes[0]["results"]
    assert (first["case"], second["case"]) == ("torchao rowwise, compiled", "torchao rowwise")
    assert second["of_bf16"] == 0.5 and second["of_floor"] == 2.0 / moe_bench.floors(TINY)["fp8"]
    assert process.commands[0][2:-1] == [
        "octavo", "bench", "moe", "--shape", "16,4,2,32,64", "--peer", "torchao rowwise, compiled", "--json",
    ]  # fmt: skip


def test_an_assertion_on_the_gpu_is_in_the_row(shapes, process):
    process.stderr = f"warning\nGroupMM.cu:90: block: [0,0,0], thread: [3,0,0] {ASSERTION}\nmore {ASSERTION}\n"
    process.report = {"shapes": [{"results": [{"case": "torchao rowwise", "error": "RuntimeError: CUDA error"}]}]}
    moe_bench._add_peers(shapes)
    assert shapes[0]["results"][-1]["error"] == f"RuntimeError: CUDA error ({ASSERTION})"
    assert "\ntorchao rowwise  failed: RuntimeError: CUDA error (" in moe_bench.render(
        {"machine": FACTS, "shapes": shapes}
    )


def test_a_process_that_dies_is_a_row(shapes, process):
    process.stderr = "Traceback\nlibtorch: Aborted\n\n"
    moe_bench._add_peers(shapes)
    assert shapes[0]["results"][-1] == {"case": "torchao rowwise", "error": "RuntimeError: libtorch: Aborted"}


def test_the_process_of_another_library_measures_one_case(on_a_cpu, monkeypatch):
    stock = partial(moe_bench.Stock, device="cpu")
    monkeypatch.setattr(moe_bench, "Stock", stock)
    monkeypatch.setattr(peers, "products", lambda: {"torchao rowwise": lambda: moe_bench.grouped_mm})
    found = []
    moe_bench._measure_peer("torchao rowwise, compiled", TINY, found)
    moe_bench._measure_peer("unheard of", TINY, found)
    assert found[0]["results"][0]["case"] == "torchao rowwise, compiled" and found[0]["results"][0]["ms"] == 2.0
    assert found[1]["results"] == [{"case": "unheard of", "error": "KeyError: 'unheard of'"}]


def test_a_real_process_hands_over_its_report_or_its_last_words():
    report = isolated.report_of(["train", "--device", "cpu", "--steps", "1", "--batch", "1"])
    assert len(report["recipes"][0]["losses"]) == 1 and report["said"] == ""
    with pytest.raises(RuntimeError, match="octavo train: There is no device called 'abacus'"):
        isolated.report_of(["train", "--device", "abacus"])


def test_a_process_that_takes_too_long_is_ended(monkeypatch):
    monkeypatch.setattr(isolated, "SECONDS", 0.5)
    with pytest.raises(RuntimeError, match=r"The process was ended after 0\.5 seconds\."):
        isolated.report_of(["train", "--device", "cpu"])
