"""What a Launch refuses, where there is no GPU: kernels, grids and sizes that it cannot launch, and their variants."""

import pytest

pytest.importorskip("triton")

import triton
import triton.language as tl

from octavo.errors import UnsupportedConfig
from octavo.launch import Launch, Variant, rules
from tests.offline import unsupported_reason


@triton.jit
def _copy_kernel(x, out, missing, N, stride, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + at, tl.load(x + at * stride, mask=at < N), mask=at < N)


@triton.jit
def _flat_kernel(x, N, SIZE: tl.constexpr):
    tl.store(x + tl.program_id(0) * SIZE + tl.program_id(axis=1), N)


@triton.jit
def second_index():
    return tl.num_programs(1)


@triton.jit
def _calling_kernel(x, N, SIZE: tl.constexpr):
    tl.store(x + second_index(), N)


@triton.jit
def _early_constant_kernel(x, SIZE: tl.constexpr, N):
    tl.store(x + N, SIZE)


@triton.jit
def _default_kernel(x, N=4, SIZE: tl.constexpr = 8):
    tl.store(x + N, SIZE)


@triton.jit
def _annotated_kernel(x, factor: tl.float32, SIZE: tl.constexpr):
    tl.store(x + SIZE, factor)


@triton.autotune([triton.Config({"SIZE": 8})], key=[])
@triton.jit
def _tuned_kernel(x, N, SIZE: tl.constexpr):
    tl.store(x + N, SIZE)


def launch(kernel=_copy_kernel, grid=4, sizes=(70, 1), **constants):
    return Launch(kernel, grid, sizes, num_warps=4, **(constants or {"SIZE": 8}))


def test_a_kernel_that_keeps_the_rules_is_taken():
    assert launch().tail == (70, 1, 8)
    assert launch(grid=0, sizes=(2**40, None)).sizes == (2**40, None)


@pytest.mark.parametrize("grid", [(4, 2), (4,), 4.0, True, None, str], ids=repr)
def test_a_grid_is_one_int(grid):
    with pytest.raises(UnsupportedConfig, match=r"_copy_kernel .*grid.* Pass the number of programs"):
        launch(grid=grid)


@pytest.mark.parametrize("size", [0.5, True, "8", (8, 8), tl.constexpr(8)], ids=str)
def test_a_size_is_an_int_or_none(size):
    with pytest.raises(UnsupportedConfig, match=r"_copy_kernel .*ints.* tl\.constexpr, or .* tensor"):
        launch(sizes=(70, size))


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (None, "triton.jit .*NoneType"),
        (_tuned_kernel, "triton.jit .*Autotuner"),
        (_flat_kernel, r"_flat_kernel .*program_id\(axis=1\).*one dimension.*tile_index"),
        (_calling_kernel, r"_calling_kernel .*num_programs\(1\) in second_index.*one dimension"),
        (_early_constant_kernel, r"_early_constant_kernel .*N.* after .*SIZE.* Move"),
        (_default_kernel, r"_default_kernel .*N.* default.* Remove"),
        (_annotated_kernel, r"_annotated_kernel .*factor.* tl\.constexpr, or .* tensor"),
    ],
    ids=["none", "tuned", "two dimensions", "two dimensions of another", "constant first", "default", "float"],
)
def test_a_kernel_that_it_cannot_launch_is_refused(kernel, message):
    for _ in range(2):  # what is refused is not remembered as checked
        with pytest.raises(UnsupportedConfig, match=message):
            launch(kernel, sizes=(4,))


@pytest.mark.parametrize("constants", [{"SIZ": 8}, {"SIZE": 8, "WIDE": True}, {"WIDE": 1}], ids=str)
def test_constants_are_the_parameters_that_are_constexpr(constants):
    with pytest.raises(UnsupportedConfig, match=r"_copy_kernel .*SIZE.*, got "):
        launch(**constants)


SIGNATURE = {"x": "*bf16", "out": "*bf16", "N": "i32"}
CONSTANTS = {"missing": None, "stride": 1, "SIZE": 8}


def variant(signature, constants, kernel=_copy_kernel):
    return Variant("a copy", kernel, signature, constants, 4)


def test_a_variant_that_a_launch_may_compile_is_taken():
    assert unsupported_reason(variant(SIGNATURE, CONSTANTS)) == ""
    assert unsupported_reason(variant(SIGNATURE | {"missing": "*u8", "stride": "i64"}, {"SIZE": 8})) == ""
    tiles = {"x": "tensordesc<bf16[64, 64],layout>"}
    assert unsupported_reason(variant(SIGNATURE | tiles, CONSTANTS | {"stride": None})) == ""


@pytest.mark.parametrize(
    ("signature", "constants", "message"),
    [
        ({"N": "fp32"}, {}, "a copy passes N as 'fp32'"),
        ({"N": "i1"}, {}, "a copy passes N as 'i1'"),
        ({}, {"stride": 0.5}, "a copy passes stride as 0.5"),
        ({}, {"stride": True}, "a copy passes stride as True"),
        ({"stride": "*i32"}, {}, "a copy has the pointer stride after the size N"),
        ({"x": "i32"}, {}, "a copy passes x first as 'i32'"),
        ({"factor": "i32"}, {}, "a copy has the types of factor"),
        ({"SIZE": "i32"}, {}, "a copy has the types of SIZE"),
        ({}, {"SIZ": 8}, "_copy_kernel takes the constants SIZE, got SIZE, SIZ"),
        ({}, {"SIZE": second_index}, "second_index calls num_programs(1)"),
    ],
    ids=str,
)
def test_a_variant_that_no_launch_compiles_is_refused(signature, constants, message):
    own = {name: value for name, value in CONSTANTS.items() if name not in signature or name == "SIZE"}
    assert message in unsupported_reason(variant(SIGNATURE | signature, own | constants))


def test_a_variant_names_every_parameter():
    assert "a copy does not say what stride is" in unsupported_reason(variant(SIGNATURE, {"missing": None, "SIZE": 8}))


def test_a_variant_is_refused_for_its_kernel():
    assert "one dimension" in unsupported_reason(variant({"x": "*bf16", "N": "i32"}, {"SIZE": 8}, _flat_kernel))


def test_it_finds_the_functions_that_a_kernel_calls():
    assert rules.reached(_calling_kernel) == [_calling_kernel, second_index]
