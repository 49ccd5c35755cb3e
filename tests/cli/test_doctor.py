"""`octavo doctor`: what it says on a machine without a GPU, and that a broken kernel does not pass."""

import json
import os
import subprocess
import sys

import pytest
import torch

from octavo import recipes
from octavo.cli import doctor, main
from octavo.cli.known_bad import known_bad
from octavo.kernels import gemm
from octavo.quant import Block1D, Block2D
from octavo.quant.block import reference as block_reference
from octavo.recipes.recipe import GEMMS

CPU = torch.device("cpu")


def test_every_recipe_runs_on_the_reference(capsys):
    assert main(["doctor", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    lines = {line.split()[0]: line.split()[1:] for line in printed.splitlines() if line.split()}
    assert lines["bf16"] == ["-", "reference", "reference", "reference", "reference"]
    for name in set(recipes.SHIPPED) - {"bf16"}:
        assert lines[name] == ["reference"] * 5
    assert f"All {len(recipes.SHIPPED)} recipes run here, on the reference" in printed


@pytest.mark.gpu
@pytest.mark.gpu_smoke
def test_every_recipe_runs_on_a_gpu(capsys):
    assert main(["doctor", "--device", "cuda", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["failed"] == []
    assert set(report["recipes"]) == set(recipes.SHIPPED)


def test_the_table_fits_a_screen(capsys):
    main(["doctor", "--device", "cpu"])
    assert len(capsys.readouterr().out.splitlines()) <= 24


def test_json_has_the_same_verdicts(capsys):
    assert main(["doctor", "--device", "cpu", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["failed"] == []
    assert report["machine"]["torch"] == torch.__version__
    assert set(report["recipes"]) == set(recipes.SHIPPED)
    assert report["recipes"]["mxfp8"]["wgrad"] == {"status": "reference", "why": ""}


def test_a_wrong_product_is_a_failed_probe(monkeypatch, capsys):
    """Off by a hundredth is far outside rounding: every GEMM cell must fail, and the exit code say so."""
    right = gemm.reference.gemm
    monkeypatch.setattr(gemm, "product", lambda a, b, dtype, bias, fast: right(a, b, dtype, bias) * 1.01)
    assert main(["doctor", "--device", "cpu"]) == 1
    printed = capsys.readouterr().out
    products = 3 * len(recipes.SHIPPED)
    assert printed.count("off its error bound by a factor") == products
    assert f"{products} probes failed" in printed


def columns_with(*quantizers, recipe):
    """The probes of a recipe that quantize with one of these quantizers."""
    quant = recipes.recipe(recipe).linear()
    operands = {name: (getattr(quant, name).left, getattr(quant, name).right) for name in GEMMS}
    gemms = [name for name, pair in operands.items() if any(isinstance(each, quantizers) for each in pair)]
    return [column for column in doctor.COLUMNS if gemms and (column in gemms or column not in GEMMS)]


def test_a_quantizer_that_raises_is_a_failed_probe(monkeypatch):
    def broken(*args):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(block_reference, "cast", broken)
    report = {}
    doctor.examine(CPU, report)
    assert report["recipes"]["fp8-block"]["quantize"] == {
        "status": "failed",
        "why": "RuntimeError: no such instruction",
    }
    assert report["recipes"]["mxfp8"]["quantize"]["status"] == "reference"
    failed = [f"{name} {column}" for name in recipes.SHIPPED for column in columns_with(Block1D, Block2D, recipe=name)]
    assert {name.split()[0] for name in report["failed"]} >= {"fp8-block"}
    assert report["failed"] == failed


@pytest.mark.parametrize(
    ("facts", "environment", "where"),
    [
        ({"torch": "2.11.0+cu130", "triton": None}, {}, "pytorch #180642"),
        ({"torch": "2.13.0", "triton": "3.6.0"}, {}, "triton #11111"),
        ({"torch": "2.13.0", "triton": None}, {"TRITON_INTERPRET": "1"}, "triton #8322"),
    ],
)
def test_known_bad_versions_are_named(facts, environment, where):
    (entry,) = known_bad(facts, environment)
    assert where in entry["where"]
    assert entry["octavo"]


def test_nothing_is_known_against_newer_versions():
    assert known_bad({"torch": "2.13.0", "triton": "3.7.0"}, {"TRITON_INTERPRET": "0"}) == []


def test_bench_without_a_gpu_says_what_to_do(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "quantize"]) == 2
    assert "torch sees none here. Run it on a machine that has one" in capsys.readouterr().err


def test_the_bare_command_avoids_the_instruction_trap():
    """Without the variable oneDNN may pick AMX and die; the command sets it before its first matmul."""
    environment = {k: v for k, v in os.environ.items() if k != "ONEDNN_MAX_CPU_ISA"}
    code = "import os, octavo.cli; print(os.environ['ONEDNN_MAX_CPU_ISA'])"
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "AVX512_CORE_FP16"
