"""Probes of the chip's own GEMMs: their verdicts, and errors that are none."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from octavo import backend
from octavo.kernels.gemm import native, reference
from octavo.kernels.grouped_gemm import hopper_support as grouped
from octavo.kernels.probe import Refused, answer_of, noise, verdict
from octavo.quant import Block1D, Block2D, Rowwise, Tensorwise

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _nothing_emulated(monkeypatch):
    monkeypatch.setattr(backend, "_emulated", {})


def test_a_gemm_within_its_bound_is_used():
    assert verdict("a GEMM", CPU, lambda: 0.5).ok
    assert backend.emulated() == {}


@pytest.mark.parametrize("worst", [1.5, float("inf"), float("nan")])
def test_a_gemm_off_its_bound_is_emulated(worst):
    with pytest.warns(UserWarning, match="a GEMM is off its error bound by a factor"):
        found = verdict("a GEMM", CPU, lambda: worst)
    assert not found.ok and "a GEMM" in backend.emulated()


def test_what_the_gemm_raises_is_its_answer():
    def gemm():
        raise NotImplementedError("no rowwise scales here.\nmore")

    with pytest.warns(UserWarning, match="a GEMM fails: no rowwise scales here. On cpu"):
        found = verdict("a GEMM", CPU, lambda: answer_of(gemm))
    assert found.reason == "a GEMM fails: no rowwise scales here"


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), MemoryError(), KeyboardInterrupt()])
def test_a_gemm_without_memory_is_no_verdict(error):
    def gemm():
        raise error

    with pytest.raises(type(error)):
        verdict("a GEMM", CPU, lambda: answer_of(gemm))
    assert backend.emulated() == {}


def test_an_error_around_the_gemm_is_no_verdict():
    def probe():
        raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")

    with pytest.raises(RuntimeError, match="generator"):
        verdict("a GEMM", CPU, probe)
    assert backend.emulated() == {}


def test_a_verdict_is_raised_under_strict_and_not_kept():
    with backend.use("strict"), pytest.raises(backend.UnsupportedHardware, match="off its error bound by a factor 2"):
        verdict("a GEMM", CPU, lambda: 2.0)


def test_noise_does_not_depend_on_its_surroundings():
    want = noise(8, 6, seed=1)
    with torch.device("meta"):
        assert torch.equal(noise(8, 6, seed=1), want)
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(noise(8, 6, seed=1), want) and want.dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.fixture
def scaled_mm(monkeypatch):
    """The chip's GEMM is the reference's: the probe of a chip that is right."""

    def gemm(a, b, dtype, bias, fast):
        return reference.gemm(a, b, dtype, bias)

    monkeypatch.setattr(native, "gemm", gemm)


@pytest.mark.parametrize(("a", "b"), [(Tensorwise(), Tensorwise()), (Rowwise(), Rowwise()), (Block1D(), Block2D())])
def test_the_probe_of_scaled_mm_accepts_the_reference(scaled_mm, a, b):
    assert native._probe(CPU, a.block, b.block, a.fmt, b.fmt, torch.bfloat16, False) <= 1.0


def test_the_probe_of_scaled_mm_needs_nothing_of_its_surroundings(scaled_mm):
    def ask():
        tensorwise = Tensorwise()
        return verdict("a GEMM", CPU, lambda: native._probe(
            CPU, tensorwise.block, tensorwise.block, tensorwise.fmt, tensorwise.fmt, torch.bfloat16, True
        )).ok  # fmt: skip

    with torch.device("meta"):
        assert ask()
    with FakeTensorMode(), torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert ask()
    assert torch.vmap(lambda x: x * ask())(torch.ones(2)).eq(1).all()


def test_the_probe_of_scaled_mm_finds_a_wrong_scale(monkeypatch):
    monkeypatch.setattr(native, "gemm", lambda a, b, dtype, bias, fast: reference.gemm(a, b, dtype, bias) * 1.05)
    tensorwise = Tensorwise()
    worst = native._probe(CPU, tensorwise.block, tensorwise.block, tensorwise.fmt, tensorwise.fmt, torch.bfloat16, True)
    assert worst > 1.0


def test_a_refusal_keeps_the_error_that_caused_it():
    def gemm():
        raise ValueError("no")

    with pytest.raises(Refused, match="no") as caught:
        answer_of(gemm)
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", list(grouped._PROBES))
def test_every_hopper_kernel_passes_its_probe(kernel, monkeypatch):
    device = torch.device("cuda", 0)
    if not grouped.is_hopper(device):
        pytest.skip("these kernels are for Hopper")
    monkeypatch.setattr(grouped, "_verdicts", {})
    with torch.device("cuda"):
        assert grouped.support(kernel, device).ok
    assert grouped._PROBES[kernel](device) <= 1.0


@pytest.mark.gpu
@pytest.mark.parametrize("a", [Tensorwise(), Rowwise(), Block1D()], ids=str)
def test_a_default_device_changes_no_verdict(a, monkeypatch):
    b = Block2D() if isinstance(a, Block1D) else a
    device = torch.device("cuda", 0)
    native._probed.cache_clear()
    torch.set_default_device("cuda")
    try:
        inside = native.support(a, b, device)
    finally:
        torch.set_default_device(None)
    native._probed.cache_clear()
    assert inside == native.support(a, b, device)


@pytest.mark.gpu
def test_a_kernel_that_does_not_build_is_emulated(monkeypatch):
    """As where a version of Triton has lost a function."""
    from octavo.kernels.grouped_gemm import hopper

    def rows(*arguments):
        raise AttributeError("async_load is gone")

    monkeypatch.setattr(grouped, "_verdicts", {})
    monkeypatch.setattr(hopper, "rows", rows)
    with pytest.warns(UserWarning, match="the Hopper kernel for rows in groups fails: async_load is gone"):
        assert not grouped.rows(Tensorwise(), Tensorwise(), torch.device("cuda", 0))
