"""`octavo bench moe`: compiled cases beyond torch's limit, cases that fail, and what it prints."""

from functools import partial

import pytest
import torch
from torch import nn

from octavo.cli.bench import cases, moe

TINY = (16, 4, 2, 32, 64)
REPORT = {
    "machine": {"gpu": "a GPU", "torch": "2", "triton": "3"},
    "shapes": [{"shape": list(TINY), "floor_ms": moe.floors(TINY), "results": [], "kernels": {}}],
}


@pytest.fixture
def on_a_cpu(monkeypatch):
    """A timer that runs one step, no measurement of GPU memory, and graphs without generated code."""
    compile_ = nn.Module.compile
    monkeypatch.setattr(moe, "eager_ms", lambda step: (step(), (2.0, [2.0]))[1])
    monkeypatch.setattr(moe, "kept_mib", lambda module, x: 3.0)
    monkeypatch.setattr(nn.Module, "compile", lambda self, **settings: compile_(self, backend="aot_eager", **settings))
    yield
    torch._dynamo.reset()


def test_more_compiled_cases_run_than_torch_compiles_one_forward(on_a_cpu, monkeypatch):
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 3)
    for name in ("fp8-delayed", "fp8-block", "fp8-current"):
        for cached in (False, True):
            make = partial(moe.Ours, TINY, name, cached, device="cpu")
            row = cases.attempt(name, partial(moe._case, make, TINY, True))
            assert row["ms"] == 2.0, row


def test_a_case_that_fails_is_a_row_and_the_others_are_measured(monkeypatch):
    def case(make, shape, compiled):
        if "fp8-block" in make.args:
            raise RuntimeError("\nrecompile_limit reached\nmore")
        return {"ms": 2.0, "readings_ms": [2.0], "kept_mib": 3.0, "codes_mib": 1.0}

    monkeypatch.setattr(moe, "_case", case)
    monkeypatch.setattr(moe, "_kernels", lambda shape, name: {"kernels": []} if name == "fp8-delayed" else 1 / 0)
    shapes = []
    moe._measure_shape(TINY, ["fp8-block", "fp8-delayed"], True, shapes)
    (entry,) = shapes
    failed = [row for row in entry["results"] if "error" in row]
    assert len(failed) == 4 and all(row["case"].startswith("octavo fp8-block") for row in failed)
    assert {row["error"] for row in failed} == {"RuntimeError: recompile_limit reached"}
    assert [row["of_bf16"] for row in entry["results"] if "error" not in row] == [1.0] * 6
    assert entry["kernels"] == {
        "fp8-block": [{"case": "fp8-block", "error": "ZeroDivisionError: division by zero"}],
        "fp8-delayed": [],
    }
    text = moe.render(REPORT | {"shapes": shapes})
    assert (
        "\nocta" in text and "\nocta" + "vo fp8-block, cached  failed: RuntimeError: recompile_limit reached\n" in text
    )
    assert "kernels, fp8-block  failed: ZeroDivisionError: division by zero" in text


def test_ctrl_c_is_no_failed_case():
    with pytest.raises(KeyboardInterrupt):
        cases.attempt("a case", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
