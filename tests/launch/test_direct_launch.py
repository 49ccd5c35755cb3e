"""Launches without Triton's Python: the arguments in the form of each version, and the check that proves it."""

from types import SimpleNamespace

import pytest
import torch

from octavo import launch
from octavo.launch import DIRECT_LAUNCHES, Direct, Launch, Tiles

pytest.importorskip("triton")


def compiled(packs, **run):
    """A compiled kernel of Triton 3.6, or with `packs` of 3.7 and later, as far as a launch looks at it."""
    launched = []
    known = {
        "launch": lambda *arguments: launched.append(arguments), "launch_cooperative_grid": False, "launch_pdl": False,
        "global_scratch_size": 0, "profile_scratch_size": 0, **run,
    }  # fmt: skip
    known |= {"arg_annotations": "annotations", "kernel_signature": "signature"} if packs else {}
    return SimpleNamespace(run=SimpleNamespace(**known), function=7, packed_metadata=(4, 1, 0)), launched


def test_the_arguments_of_triton_3_6_follow_one_by_one():
    kernel, launched = compiled(packs=False)
    Direct(kernel)(5, 99, [1, 2, None])
    assert launched == [(5, 1, 1, 99, 7, False, False, None, None, (4, 1, 0), None, None, None, 1, 2, None)]


def test_the_arguments_of_later_versions_are_one_list():
    kernel, launched = compiled(packs=True)
    Direct(kernel)(5, 99, [1, 2, None])
    head = (5, 1, 1, 99, 7, False, False, (4, 1, 0), None, None, None, None, None, "annotations", "signature")
    assert launched == [(*head, [1, 2, None])]


def test_a_kernel_stays_loaded_while_its_launch_is_kept():
    """Triton 3.8 unloads a kernel when the object dies."""
    kernel, _ = compiled(packs=True)
    assert Direct(kernel).compiled is kernel


@pytest.mark.parametrize("run", [{"global_scratch_size": 8}, {"profile_scratch_size": 8}, {"gsan_enabled": True}])
def test_an_instrumented_kernel_is_launched_by_triton(run):
    assert Direct.takes(compiled(packs=True)[0])
    assert not Direct.takes(compiled(packs=True, **run)[0])


def test_every_launch_says_whether_products_and_sums_are_fused():
    """Triton 3.10 changes the default, and with it the last bits."""
    from octavo.launch.check import _tile_kernel

    assert Launch(_tile_kernel, 1, (), num_warps=4, SIZE=64).options["enable_fp_fusion"] is True


def test_a_matrix_by_tiles_has_what_every_version_asks_for():
    tiles = Tiles(torch.zeros(64, 64, dtype=torch.bfloat16), [64, 64], "layout")
    assert (tiles.padding, tiles.round_f32_to_tf32) == ("zero", False)


@pytest.mark.gpu
def test_kernels_are_launched_directly_on_this_machine():
    DIRECT_LAUNCHES.forget()
    assert DIRECT_LAUNCHES.is_on(), DIRECT_LAUNCHES.reason()


@pytest.mark.gpu
def test_a_direct_launch_that_does_nothing_is_found(monkeypatch):
    monkeypatch.setattr(Direct, "__call__", lambda self, *arguments: None)
    DIRECT_LAUNCHES.forget()
    try:
        assert not DIRECT_LAUNCHES.is_on()
        assert "launched directly gives a wrong result" in DIRECT_LAUNCHES.reason()
    finally:
        DIRECT_LAUNCHES.forget()


@pytest.mark.gpu
def test_nothing_is_decided_while_a_graph_is_captured(monkeypatch):
    DIRECT_LAUNCHES.forget()
    monkeypatch.setattr(launch, "is_capturing", lambda: True)
    assert not DIRECT_LAUNCHES.is_on() and not DIRECT_LAUNCHES.is_decided()
    monkeypatch.undo()
    assert DIRECT_LAUNCHES.is_on()
