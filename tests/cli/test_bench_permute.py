"""`octavo bench permute`: the kernels it calls, the bytes it counts, and what it prints."""

import pytest
import torch

from octavo.cli.bench import permute_bench
from octavo.cli.bench.permute_bench import Case, Inputs
from octavo.quant.grouped import GroupedTensor

SHAPE = (192, 3, 2, 256)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def inputs():
    return Inputs.of(SHAPE, CPU)


@pytest.fixture
def report(monkeypatch):
    """A report of readings of one millisecond, of which the sums fail."""
    monkeypatch.setattr(permute_bench, "device_ms", lambda call: (call(), (1.0, [1.0]))[1])
    monkeypatch.setattr(permute_bench.moves, "combine", lambda *args: 1 / 0)
    monkeypatch.setattr(permute_bench, "COPY", 2**16)
    found = {
        "machine": {"gpu": "a GPU", "torch": "2", "triton": "3"},
        "bar": permute_bench.BAR,
        "copy": {"ms": 1.0, "bytes": 2**31, "gb_per_s": 0.2, "ms_after": None},
        "shapes": [],
    }
    permute_bench._measure_shape(SHAPE, CPU, found)
    return found


def moved(found):
    """The bytes of what a kernel writes, without padding."""
    total = 0
    for t in found if isinstance(found, tuple) else (found,):
        if isinstance(t, GroupedTensor):
            total += sum(t.q.codes.nbytes * size // t.groups.padded for size in t.groups.sizes())
        elif isinstance(t, torch.Tensor) and t.dtype == torch.bfloat16:
            total += t.nbytes
    return total


def test_the_router_prefers_some_experts():
    sizes = Inputs.of((4096, 8, 2, 16), CPU).permutation.sizes
    assert sizes.sum() == 8192 and 1.5 < sizes.max() / sizes.min() < 5


def test_the_bytes_of_a_case_are_what_it_reads_and_writes(inputs):
    tokens, _, assignments, hidden = SHAPE
    token, row = 2 * tokens * hidden, 2 * tokens * assignments * hidden
    read = {
        "permute": (token, row), "unpermute": (row, row), "permute backward": (row, row), "index_select": (token, row),
        "unpermute backward": (token + row, 2 * row), "unpermute backward, rows alone": (token, row),
    }  # fmt: skip
    cases = permute_bench.calls(inputs)
    assert list(cases)[:4] == ["sort", "layout", "permute", "unpermute"] and len(cases) == 14
    for name, case in cases.items():
        if name in ("sort", "layout"):
            assert case.call() is not None and case.once is None
            continue
        once, each = read.get(name, (token, row))
        scales = case.once - once - moved(case.call())
        assert case.each - each == case.once - once, name
        blocks = (("row" in name) + ("column" in name)) * tokens * assignments * hidden // 128
        assert scales == (4 * blocks if "1x128" in name else 0), name
        assert case.bar == (name in ("permute", "unpermute") or "cast" in name)


def test_casts_read_the_rows_of_their_experts(inputs):
    row, column = permute_bench.calls(inputs)["cast-permute 1x128, row and column"].call()
    wanted = inputs.x[inputs.source].float()
    for t in (row, column):
        assert torch.allclose(t.dequantize(torch.float32), wanted, rtol=0.1, atol=0.05)
    assert permute_bench.calls(inputs)["cast-permute, column"].call()[0] is None


def test_a_rate_is_a_fraction_of_the_copy():
    case = Case(lambda: None, 600, 1000, bar=True)
    found = permute_bench.rates(case, 1e-6, False, 1000.0)  # a nanosecond, so bytes are GB/s
    assert found["bytes"] == 1000 and found["gb_per_s"] == pytest.approx(1000)
    assert (found["of_copy"], found["of_copy_once"]) == pytest.approx((1.0, 0.6)) and found["reaches_bar"] == "gathers"
    found = permute_bench.rates(case, 1e-6, True, 700.0)
    assert found["bytes"] == 600 and found["of_copy"] == found["of_copy_once"] and found["reaches_bar"] == "yes"
    assert permute_bench.rates(case, 1e-6, False, 2000.0)["reaches_bar"] == "no"
    assert "of_copy" not in permute_bench.rates(case, 1e-6, False, None)
    assert permute_bench.rates(Case(lambda: None), 1.0, False, 1.0) == {}


def test_a_kernel_that_fails_is_a_line_and_the_others_are_measured(report):
    (entry,) = report["shapes"]
    failed = [r["case"] for r in entry["results"] if "error" in r]
    assert failed == ["unpermute", "permute backward"] and len(entry["results"]) == 14
    assert entry["tokens_counted_once"] and sum(entry["sizes"]) == entry["rows"] == 384
    assert entry["padded_rows"] % 128 == 0 and entry["padded_rows"] >= 384
    text = permute_bench.render(report)
    assert "plain copy of 1 GiB: 1.000 ms, 0 GB/s\n" in text
    assert "\nunpermute  failed: ZeroDivisionError: division by zero" in text
    assert "tokens are 0 MB, counted once\n" in text
    (line,) = [line.split() for line in text.splitlines() if line.startswith("permute  ")]
    assert line == ["permute", "1.0000", "0", "0", "1.47", "1.47", "yes"]


def test_a_shape_without_memory_is_a_line(report, monkeypatch):
    monkeypatch.setattr(permute_bench, "split", lambda *args: 1 / 0)
    permute_bench._measure_shape(SHAPE, CPU, report)
    assert report["shapes"][1]["results"] == [{"case": "inputs", "error": "ZeroDivisionError: division by zero"}]
    assert "\ninputs  failed: " in permute_bench.render(report)


def test_without_a_copy_there_are_rates_alone(report):
    report["copy"] = {"case": "copy", "error": "RuntimeError: no memory"}
    permute_bench._measure_shape(SHAPE, CPU, report)
    assert "of_copy" not in report["shapes"][1]["results"][2] and report["shapes"][1]["results"][2]["gb_per_s"] > 0
    assert "plain copy  failed: RuntimeError: no memory\n" in permute_bench.render(report)
