"""Which twin runs, how it is forced, and what is said where it cannot."""

import threading
import warnings

import pytest
import torch

from octavo import backend
from octavo.errors import UnsupportedConfig, UnsupportedDevice, UnsupportedHardware
from octavo.quant import Block1D
from tests.support.processes import output_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _restore():
    before = list(backend._forces)
    yield
    backend._forces[:] = before
    backend.unsupported_by_triton.cache_clear()


@pytest.fixture
def chip(monkeypatch):
    """Pretend to be a GPU of some capability."""

    def pretend(capability, *, triton=True):
        backend.unsupported_by_triton.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a chip")
        monkeypatch.setattr(backend.importlib.util, "find_spec", lambda name: object() if triton else None)

    return pretend


def test_cpu_and_meta_run_the_reference():
    assert backend.choose(CPU) == backend.choose(torch.device("meta")) == "reference"


@pytest.mark.parametrize("capability", [(8, 9), (9, 0)])
def test_a_gpu_runs_triton_from_sm89_on(chip, capability):
    chip(capability)
    assert backend.choose(CUDA) == "triton"


def test_an_older_gpu_runs_the_reference_and_says_so_once(chip):
    chip((8, 0))
    with pytest.warns(UserWarning, match=r"needs SM89 or newer, a chip is SM80.*plain torch reference"):
        assert backend.choose(CUDA) == "reference"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert backend.choose(CUDA) == "reference"


def test_threads_take_back_their_own_force_only():
    """Overlapping in any order, nothing is left in force."""

    def flip():
        for _ in range(50):
            with backend.use("reference"):
                assert backend.forced() == "reference"

    threads = [threading.Thread(target=flip) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert backend.forced() == "auto"


def test_forcing_the_reference_works_on_any_chip(chip):
    chip((9, 0))
    with backend.use("reference"):
        assert backend.choose(CUDA) == "reference"
    assert backend.choose(CUDA) == "triton"


def test_use_is_restored_by_an_exception_and_nests():
    with pytest.raises(KeyError), backend.use("reference"), backend.use("triton"):
        raise KeyError
    assert backend.forced() == "auto"


def test_use_without_with_lasts():
    backend.use("reference")
    assert backend.forced() == "reference"


def test_a_name_that_is_no_backend_is_refused():
    choices = "'auto', 'strict', 'checked', 'reference', 'triton', 'emulated'"
    with pytest.raises(UnsupportedConfig, match=f"backend must be one of {choices}, got 'cuda'"):
        backend.use("cuda")


def test_strict_raises_where_a_gemm_is_emulated(monkeypatch):
    monkeypatch.setattr(backend, "_emulated", {})
    with backend.use("strict"), pytest.raises(UnsupportedHardware, match=r"it does not build.*octavo doctor"):
        backend.note_emulated("a GEMM", "it does not build", CPU)
    assert backend.emulated() == {}
    with pytest.warns(UserWarning, match="it does not build. On cpu Octavo emulates this GEMM"):
        backend.note_emulated("a GEMM", "it does not build", CPU)
    assert backend.emulated() == {"a GEMM": "it does not build"}
    with pytest.raises(UnsupportedHardware, match="This process emulates a GEMM: it does not build"):
        backend.use("strict")
    assert backend.forced() == "auto"


def test_strict_follows_the_device_and_emulated_needs_a_gpu():
    with backend.use("strict"):
        assert backend.choose(CPU) == "reference"
    with backend.use("emulated"), pytest.raises(UnsupportedHardware, match="No Triton kernels here"):
        backend.choose(CPU)


def test_forced_triton_on_a_cpu_says_why_not():
    with (
        backend.use("triton"),
        pytest.raises(UnsupportedHardware, match=r"this one is on cpu\. Call octavo\.backend\.use"),
    ):
        Block1D().quantize(torch.ones(4, 4))


def test_forced_triton_on_an_old_chip_says_why_not(chip):
    chip((8, 6))
    with (
        backend.use("triton"),
        pytest.warns(UserWarning, match="is SM86"),
        pytest.raises(UnsupportedHardware, match=r"needs SM89 or newer, a chip is SM86.*use"),
    ):
        backend.choose(CUDA)


def test_a_missing_triton_is_no_silent_fallback(chip):
    chip((9, 0), triton=False)
    with pytest.raises(UnsupportedHardware, match=r"triton is not installed.*backend\.use\('reference'\)"):
        backend.choose(CUDA)


def test_another_device_is_refused():
    with pytest.raises(UnsupportedDevice, match="runs on cpu and cuda tensors, got one on mps"):
        backend.choose(torch.device("mps"))


def test_triton_is_imported_only_when_used():
    """The CPU wheel of torch brings no triton: importing, quantizing and training must not ask for it. In a process of
    its own: a second octavo in this one would have registered its values in place of the first one's."""
    source = """
import builtins
real = builtins.__import__

def without_triton(name, *args, **kwargs):
    if name.split(".")[0] == "triton":
        raise ImportError(name)
    return real(name, *args, **kwargs)

builtins.__import__ = without_triton
import octavo, torch
assert octavo.quant.MX().quantize(torch.ones(2, 32)).dequantize().sum() == 64
for _ in range(3):
    octavo.Linear(32, 32, recipe="fp8-delayed")(torch.ones(2, 32)).sum().backward()
print("trained")
"""
    assert output_of(source) == "trained\n"
