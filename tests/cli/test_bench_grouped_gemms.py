"""`octavo bench grouped-gemms`: the products it times, their rates, and what it prints."""

import pytest
import torch

from octavo.cli import bench
from octavo.cli.bench import grouped_bench, grouped_gemms_bench
from octavo.kernels import grouped_gemm

SHAPE = (2, 300, 256, 128)
CPU = torch.device("cpu")
FACTS = {"gpu": "a GPU", "torch": "2", "triton": "3"}


@pytest.fixture
def shapes(monkeypatch):
    """Results of readings of one and two milliseconds, of which wgrad and a recipe fail."""
    readings = iter([1.0, 2.0] * 20)

    def device_ms(call):
        call()
        ms = next(readings)
        return ms, [ms]

    def fail(*args, **settings):
        raise RuntimeError("out of memory\nmore")

    monkeypatch.setattr(grouped_gemms_bench, "device_ms", device_ms)
    monkeypatch.setattr(grouped_gemm, "grouped_wgrad", fail)
    found = []
    for experts in (4, 2):
        grouped_gemms_bench._measure_shape((experts, *SHAPE[1:]), ["fp8-delayed", "mxfp8"], CPU, found)
    grouped_gemms_bench._measure_shape((2, 300, 128, 128), ["bf16"], CPU, found)
    monkeypatch.setattr(grouped_bench, "parts_of", fail)
    grouped_gemms_bench._measure_shape((2, 300, 128, 256), ["fp8-block"], CPU, found)
    return found


def test_operands_are_quantized_once_and_products_are_those_of_a_layer():
    calls = {}
    torch.manual_seed(0)
    grouped_gemms_bench._prepare("fp8-block", SHAPE, CPU, calls)
    assert set(grouped_gemms_bench.GEMMS) < set(calls)
    assert calls["fprop"]().shape == (300, 128) and calls["dgrad"]().shape == (300, 256)
    assert calls["wgrad"]().shape == (2, 128, 256)


def test_rates_count_the_tokens_that_there_are(shapes):
    first = shapes[0]
    assert sum(first["splits"]) == 300 and first["splits"] == grouped_bench.uneven(4, 300).tolist()
    row = first["results"][1]
    assert (row["case"], row["recipe"], row["gemm"]) == ("octavo fp8-delayed, dgrad", "fp8-delayed", "dgrad")
    assert row["ms"] == 2.0 and row["tflops"] == 2 * 300 * 256 * 128 / 2e9


def test_a_product_or_a_recipe_that_fails_is_a_line(shapes):
    failed = [row["case"] for row in shapes[0]["results"] if "error" in row]
    assert failed == ["octavo fp8-delayed, wgrad", "octavo mxfp8, wgrad"]
    assert shapes[3]["results"] == [{"case": "octavo fp8-block", "error": "RuntimeError: out of memory"}]
    text = grouped_gemms_bench.render({"machine": FACTS, "shapes": shapes})
    assert "\noctavo fp8-delayed, wgrad  failed: RuntimeError: out of memory\n" in text
    assert "\noctavo fp8-delayed, dgrad  2.000  0\n" in text
    assert "\noctavo bf16, wgrad " in text


def test_numbers_of_experts_are_compared(shapes):
    found = {(e["recipe"], e["gemm"]): e for e in grouped_gemms_bench.by_experts(shapes)}
    assert list(found) == [(name, gemm) for name in ("fp8-delayed", "mxfp8") for gemm in ("fprop", "dgrad")]
    fprop = found["fp8-delayed", "fprop"]
    assert fprop["shape"] == [300, 256, 128] and fprop["experts"] == [2, 4] and fprop["ms"] == [1.0, 1.0]
    shapes[0]["results"][0]["ms"] = 1.5
    text = grouped_gemms_bench.render({"machine": FACTS, "shapes": shapes})
    assert "\n300 256 128      octavo fp8-delayed, fprop  2: 1.000, 4: 1.500  1.50 (4 / 2)\n" in text


def test_a_report_without_rows_is_empty():
    assert bench.render({}) == "" == bench.render({"suite": "grouped-gemms", "shapes": [{"results": []}]})
