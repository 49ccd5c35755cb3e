"""Activations into codes: the same bytes as the activation written and then cast."""

import pytest
import torch

from octavo import backend
from octavo.errors import UnsupportedShape
from octavo.formats import E4M3, E5M2
from octavo.kernels import activation
from octavo.kernels.activation import ACTIVATIONS, Function, Inputs, Wanted
from octavo.kernels.activation import cast as kernel
from octavo.kernels.tile_cast import NOTHING, TileCast
from octavo.quant import MX, Block1D, Block2D, Rowwise, Tensorwise
from octavo.quant.casts import fill_pair
from octavo.quant.quantizer import CastArgs
from tests.support.activation_formulas import data, seed_of, sizes
from tests.support.filled_codes import DTYPES, ODD, SPECS, assert_same_bytes, contents, empty_pair, given_to
from tests.support.pairs import pairs, triples

every = pytest.mark.parametrize("name", ACTIVATIONS)
specs = pytest.mark.parametrize("spec", SPECS, ids=str)


def operands(fn, m, h, dtype, device="cpu", extra=(), strided=False, odd=()):
    """x, dy and whatever goes along; `odd` are values among those of both."""
    x, dy = data(m, h * sizes(fn), dtype=dtype), data(m, h, dtype=dtype, seed=1, size=1e-2)
    for t in (x, dy):
        for i, value in enumerate(odd):
            t.view(-1)[7 + 31 * i :: 1009] = torch.tensor(value).to(dtype)  # Inf, where it is too large
    x, dy = x.to(device), dy.to(device)
    if strided:
        x, dy = x.T.contiguous().T, dy[:1].expand(m, h)
    found = {
        "scales": torch.rand(m, generator=torch.Generator().manual_seed(2)).to(device) if "scales" in extra else None,
        "bias": data(x.shape[1], dtype=dtype, seed=2).to(device) if "bias" in extra else None,
        "seed": seed_of(77, 2, device) if "seed" in extra else None,
    }
    return x, dy, found


def check_forward(fn, x, extra, spec, sides="rc", column=None, inverse_scale=0.37, **settings):
    m, h = x.shape[0], x.shape[1] // sizes(fn)
    results = []
    for fused in (True, False):
        pair, given = empty_pair(spec, m, h, x.dtype, x.device, sides, column), given_to(spec, x.device, inverse_scale)
        if not fused:
            fill_pair(activation.forward(fn, x, **extra), pair, given)
        elif settings:
            backend.implementation("octavo.kernels.activation.cast", x).forward(
                fn, Inputs(x, **extra), TileCast(pair, given), **settings
            )
        else:
            kernel.forward(fn, Inputs(x, **extra), TileCast(pair, given))
        results.append(contents(pair, given))
    assert_same_bytes(*results, what=f"y {spec} {sides}")


def check_backward(fn, x, dy, extra, spec, again=None, sides="rc", bias_grad=None, inverse_scale=411.0, **settings):
    (m, h), x = dy.shape, x if fn.remembers or again is not None else None
    n, results = h * sizes(fn), []
    for fused in (True, False):
        pair, given = empty_pair(spec, m, n, dy.dtype, dy.device, sides), given_to(spec, dy.device, inverse_scale)
        if again is not None:
            second, other = (
                empty_pair(again, m, h, x.dtype, dy.device, "c")[1],
                given_to(again, dy.device, inverse_scale),
            )
        else:
            second, other = None, CastArgs()
        targets = TileCast(pair, given), TileCast((None, second), other)
        if fused and not settings:
            db = kernel.backward(fn, dy, Inputs(x, **extra), *targets, bias_grad).bias
        elif fused:
            twin = backend.implementation("octavo.kernels.activation.cast", dy)
            db = twin.backward(fn, dy, Inputs(x, **extra), *targets, bias_grad, None, **settings).bias
        else:
            dx, _, db = activation.backward(fn, dy, x, **extra, wanted=Wanted(bias=bias_grad))
            fill_pair(dx, pair, given)
            if second is not None:
                fill_pair(activation.forward(fn, x, **extra), (None, second), other)
        results.append((contents(pair, given), contents((None, second), other), db))
    (found, found_again, db), (want, want_again, want_db) = results
    assert_same_bytes(found, want, what=f"dx {spec} {sides}")
    assert_same_bytes(found_again, want_again, what=f"y {again}")
    assert (db is None) == (want_db is None)
    if db is not None:
        assert db.dtype == bias_grad
        terms = activation.backward(fn, dy, x, **extra).x.float().abs().sum(0)
        assert ((db - want_db).abs() <= torch.finfo(bias_grad).eps * want_db.abs() + 1e-5 * terms).all()


# -- anywhere ----------------------------------------------------------------------------------------------------------


@every
@specs
def test_forward_fills_what_a_cast_of_y_would(name, spec):
    fn = ACTIVATIONS[name]
    for sides in ("r", "c", "rc"):
        x, _, extra = operands(fn, 37, 130, torch.bfloat16, extra=("scales",))
        check_forward(fn, x, extra, spec, sides)


@every
@specs
def test_backward_fills_what_casts_of_dx_and_y_would(name, spec):
    fn = ACTIVATIONS[name]
    x, dy, extra = operands(fn, 37, 130, torch.bfloat16, extra=("bias",))
    check_backward(fn, x, dy, extra, spec, Tensorwise(), bias_grad=torch.float32)
    check_backward(fn, x, dy, extra, spec, sides="r")


@pytest.mark.parametrize("spec", [Tensorwise(), Rowwise(), MX(), Block1D()], ids=str)
def test_schemes_without_a_kernel_go_by_way_of_the_value(spec):
    fn = ACTIVATIONS["swiglu"]
    x, dy, extra = operands(fn, 5, 64, torch.bfloat16)
    for given in (CastArgs(), CastArgs(running_amax=torch.zeros(1))):
        row, column = empty_pair(spec, 5, 64, x.dtype, "cpu")
        kernel.forward(fn, Inputs(x, **extra), TileCast((row, column), given))
        want = spec.quantize_both(activation.forward(fn, x))
        assert_same_bytes(contents((row, column), CastArgs()), contents(want, CastArgs()))
    first, second = empty_pair(spec, 5, 128, x.dtype, "cpu")
    assert kernel.backward(fn, dy, Inputs(x), TileCast((first, second))) == (None, None)
    want = spec.quantize_both(activation.backward(fn, dy, x).x)
    assert_same_bytes(contents((first, second), CastArgs()), contents(want, CastArgs()))


ON_GPU = [pytest.param(name, "cuda", marks=pytest.mark.gpu) for name in ("gelu", "linear", "swiglu", "situglu")]


@pytest.mark.parametrize(("name", "device"), [*((name, "cpu") for name in ACTIVATIONS), *ON_GPU])
def test_backward_takes_the_amax_that_forward_measured(name, device):
    """To the bytes of a backward that measures y again. A given amax is used, not measured: twice as much is another
    scale."""
    fn, spec = ACTIVATIONS[name], Tensorwise()
    for shape, interleave in (((130, 256), 0), ((37, 144), 16)):
        fn = fn._replace(interleave=interleave if fn.gated else 0)
        x, dy, extra = operands(fn, *shape, torch.bfloat16, device, extra=("bias",))
        y = activation.forward(fn, x, **extra)
        row = empty_pair(spec, *shape, x.dtype, device, "r")
        amax = kernel.forward(fn, Inputs(x, **extra), TileCast(row))
        assert torch.equal(amax, y.float().abs().amax().view(1, 1))
        for given in (amax, 2 * amax, None):
            dx = empty_pair(Tensorwise(E5M2), shape[0], x.shape[1], x.dtype, device)
            column, want = (empty_pair(spec, *shape, x.dtype, device, "c") for _ in range(2))
            again = TileCast(column, CastArgs(amax=(None, given)))
            kernel.backward(fn, dy, Inputs(x, **extra), TileCast(dx), again)
            fill_pair(y, want, CastArgs(amax=(None, amax if given is None else given)))
            assert_same_bytes(contents(column, CastArgs()), contents(want, CastArgs()))
            want = Tensorwise(E5M2).quantize_both(activation.backward(fn, dy, x, **extra).x)
            assert_same_bytes(contents(dx, CastArgs()), contents(want, CastArgs()))


def test_no_amax_is_returned_where_a_multiplier_is_given_or_blocks_have_scales():
    fn = ACTIVATIONS["swiglu"]
    x, _, extra = operands(fn, 5, 64, torch.bfloat16)
    for spec, given in ((Tensorwise(), given_to(Tensorwise(), "cpu")), (Block1D(), CastArgs()), (MX(), CastArgs())):
        pair = empty_pair(spec, 5, 64, x.dtype, "cpu")
        assert kernel.forward(fn, Inputs(x, **extra), TileCast(pair, given)) is None


@every
@pytest.mark.parametrize("shape", [(0, 8), (3, 0)], ids=str)
def test_an_empty_tensor_gives_empty_codes(name, shape):
    fn = ACTIVATIONS[name]
    x, dy, extra = operands(fn, *shape, torch.bfloat16)
    check_forward(fn, x, extra, Tensorwise())
    check_backward(fn, x, dy, extra, Tensorwise(E5M2), Tensorwise(), bias_grad=torch.float32)


def test_only_what_is_wanted():
    fn = ACTIVATIONS["swiglu"]
    x, dy, extra = operands(fn, 5, 16, torch.bfloat16)
    kernel.forward(fn, Inputs(x, **extra), NOTHING)
    assert kernel.backward(fn, dy, Inputs(x, **extra), NOTHING) == (None, None)
    sums = kernel.backward(fn, dy, Inputs(x, **extra), NOTHING, bias_grad=torch.float32).bias
    assert torch.equal(sums, activation.backward(fn, dy, x, wanted=Wanted(bias=torch.float32)).bias)


def test_codes_of_another_shape_are_refused():
    fn = ACTIVATIONS["swiglu"]
    x, dy, extra = operands(fn, 5, 16, torch.bfloat16)
    for pair in (
        empty_pair(Block1D(), 5, 32, x.dtype, "cpu", "r"),
        empty_pair(Block1D(), 4, 16, x.dtype, "cpu", "c"),
    ):
        with pytest.raises(UnsupportedShape, match="y is 5 x 16"):
            kernel.forward(fn, Inputs(x, **extra), TileCast(pair))
    with pytest.raises(UnsupportedShape, match="dx is 5 x 32"):
        kernel.backward(fn, dy, Inputs(x, **extra), TileCast(empty_pair(Block1D(), 5, 16, x.dtype, "cpu")))


def test_which_casts_need_no_value_written():
    half = torch.bfloat16
    for spec in SPECS:
        for row, column in ((spec, spec), (spec, None), (None, spec)):
            assert kernel.fuses(row, column, half) == ""
    assert "take a pass each over the activation" in kernel.fuses(Block1D(), Block2D(), half)
    assert "no kernel that casts the activation" in kernel.fuses(MX(), None, half)
    assert "no kernel" in kernel.fuses(None, Rowwise(), half)
    assert "float32, bfloat16 or float16" in kernel.fuses(Block1D(), None, torch.float64)
    assert "Nobody wants" in kernel.fuses(None, None, half)


# -- on a GPU ----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@every
@pytest.mark.parametrize("spec", [Tensorwise(), Block1D(), Block2D(E4M3, "fp32")], ids=str)
def test_triton_fills_the_same_bytes_for_every_activation(name, spec):
    """Bytes of the unfused Triton kernels, whole tiles and edges, odd numbers among the values."""
    fn = ACTIVATIONS[name]
    for m, h in ((130, 256), (37, 144)):
        x, dy, extra = operands(fn, m, h, torch.bfloat16, "cuda")
        check_forward(fn, x, extra, spec)
        check_backward(fn, x, dy, extra, spec, spec)
    x, dy, extra = operands(fn, 37, 144, torch.bfloat16, "cuda", odd=ODD)
    check_forward(fn, x, extra, spec)
    check_backward(fn, x, dy, extra, spec, spec)


SHAPES = [(1, 37), (37, 1), (130, 130), (257, 48), (257, 1008), (128, 384)]


@pytest.mark.gpu
@pairs(shape=SHAPES, spec=[Tensorwise(E5M2), Block1D(), Block2D(E4M3, "fp32")], name=["gelu", "swiglu"])
def test_triton_fills_the_same_bytes_for_every_shape(name, spec, shape):
    fn = ACTIVATIONS[name]
    x, dy, extra = operands(fn, *shape, torch.bfloat16, "cuda")
    check_forward(fn, x, extra, spec)
    check_backward(fn, x, dy, extra, spec, Tensorwise(), bias_grad=torch.float32)


@pytest.mark.gpu
@triples(spec=SPECS, dtype=DTYPES, sides=["r", "c", "rc"], name=["swiglu", "situglu"])
def test_triton_fills_the_same_bytes_for_every_side_and_dtype(spec, dtype, sides, name):
    fn = ACTIVATIONS[name]
    x, dy, extra = operands(fn, 130, 256, dtype, "cuda", odd=ODD)
    check_forward(fn, x, extra, spec, sides)
    check_backward(fn, x, dy, extra, spec, Tensorwise() if sides == "r" else None, sides)


CASES = {
    "swiglu by 16": (ACTIVATIONS["swiglu"]._replace(interleave=16), ()),
    "swiglu by 1, strided": (ACTIVATIONS["swiglu"]._replace(interleave=1), ()),
    "clamped-swiglu by 3, scaled, strided": (ACTIVATIONS["clamped-swiglu"]._replace(interleave=3), ("scales",)),
    "clamped-swiglu, scaled": (ACTIVATIONS["clamped-swiglu"], ("scales",)),
    "clamped-swiglu by 128, with a bias": (ACTIVATIONS["clamped-swiglu"]._replace(interleave=128), ("bias",)),
    "situglu by 16, scaled": (ACTIVATIONS["situglu"]._replace(interleave=16), ("scales",)),
    "situglu with a bias, strided": (ACTIVATIONS["situglu"], ("bias",)),
    "situglu, clamped, offset, scaled": (ACTIVATIONS["situglu"]._replace(limit=2.0, offset=1.0), ("scales",)),
    "swiglu, scaled, strided": (ACTIVATIONS["swiglu"], ("scales",)),
    "swiglu with a bias": (ACTIVATIONS["swiglu"], ("bias",)),
    "swiglu with dropout, scaled, strided": (ACTIVATIONS["swiglu"]._replace(drop=0.3), ("scales", "seed")),
    "gelu with a bias, strided": (ACTIVATIONS["gelu"], ("bias",)),
    "gelu with a bias and dropout": (ACTIVATIONS["gelu"]._replace(drop=0.1), ("bias", "seed")),
    "dropout": (ACTIVATIONS["linear"]._replace(drop=0.5), ("seed",)),
    "sigmoid with a bias": (Function("sigmoid"), ("bias",)),
    "sigmoid, gated, offset": (Function("sigmoid", gated=True, offset=1.0), ()),
}


@pytest.mark.gpu
@pairs(
    case=list(CASES),
    spec=[Tensorwise(), Block1D(), Block2D(E4M3, "fp32")],
    operand=[(130, 384, torch.bfloat16), (37, 51, torch.float16), (37, 192, torch.float32)],
)
def test_triton_fills_the_same_bytes_whatever_goes_along(case, spec, operand):
    (fn, extra), (m, h, dtype) = CASES[case], operand
    h += -h % (fn.interleave or 1)
    x, dy, extra_inputs = operands(fn, m, h, dtype, "cuda", extra, strided="strided" in case)
    check_forward(fn, x, extra_inputs, spec)
    bias_grad = dtype if "bias" in extra else None
    check_backward(fn, x, dy, extra_inputs, spec, spec if fn.remembers else None, bias_grad=bias_grad)


@pytest.mark.gpu
@every
def test_triton_fills_the_same_bytes_by_a_scale_that_it_measures(name):
    fn = ACTIVATIONS[name]
    for m, h, odd in ((130, 256, ()), (37, 144, (0.0, -60.0, 1e-30)), (37, 144, ODD)):
        x, dy, extra = operands(fn, m, h, torch.bfloat16, "cuda", odd=odd)
        check_forward(fn, x, extra, Tensorwise(), inverse_scale=None)
        check_backward(fn, x, dy, extra, Tensorwise(E5M2), Tensorwise() if fn.remembers else None, inverse_scale=None)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sides", ["r", "c", "rc"])
def test_triton_measures_every_side_and_dtype(sides, dtype):
    fn, spec = ACTIVATIONS["swiglu"], Tensorwise(pow2=True)
    x, dy, extra = operands(fn, 130, 256, dtype, "cuda", odd=ODD[3:])
    check_forward(fn, x, extra, spec, sides, inverse_scale=None)
    check_backward(fn, x, dy, extra, spec, Tensorwise() if sides == "r" else None, sides, inverse_scale=None)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_triton_measures_whatever_goes_along(case):
    fn, extra = CASES[case]
    for m, h, dtype in ((130, 384, torch.bfloat16), (37, 51, torch.float16)):
        if fn.gated and fn.interleave and h % fn.interleave:
            continue
        x, dy, extra_inputs = operands(fn, m, h, dtype, "cuda", extra, strided="strided" in case)
        check_forward(fn, x, extra_inputs, Tensorwise(), inverse_scale=None)
        bias_grad = dtype if "bias" in extra else None
        again = Tensorwise() if fn.remembers else None
        check_backward(fn, x, dy, extra_inputs, Tensorwise(E5M2), again, bias_grad=bias_grad, inverse_scale=None)


@pytest.mark.gpu
def test_a_scale_of_zeros_alone_is_measured():
    fn = ACTIVATIONS["swiglu"]
    x, dy, extra = operands(fn, 130, 256, torch.bfloat16, "cuda")
    check_forward(fn, torch.zeros_like(x), extra, Tensorwise(), inverse_scale=None)
    check_backward(fn, x, torch.zeros_like(dy), extra, Tensorwise(), Tensorwise(), inverse_scale=None)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gelu", "swiglu"])
def test_triton_fills_the_same_bytes_in_every_configuration(name):
    from octavo.kernels.activation.cast.triton import CONFIGS, GATED_CONFIGS

    fn = ACTIVATIONS[name]
    x, dy, extra = operands(fn, 257, 272, torch.bfloat16, "cuda")
    for config in dict.fromkeys((*CONFIGS, *GATED_CONFIGS)):
        check_forward(fn, x, extra, Tensorwise(), config=config)
        check_backward(fn, x, dy, extra, Tensorwise(E5M2), Tensorwise(), bias_grad=torch.float32, config=config)
        if config.rows == config.columns == 128:
            for spec in (Block1D(), Block2D()):
                check_forward(fn, x, extra, spec, config=config)
                check_backward(fn, x, dy, extra, spec, config=config)


@pytest.mark.gpu
@pytest.mark.gpu_smoke
@pytest.mark.parametrize("pair", [(Tensorwise(), Block1D()), (Block1D(), Tensorwise())], ids=str)
def test_triton_has_gradient_and_value_by_schemes_of_their_own(pair):
    for name in ("gelu", "swiglu"):
        x, dy, extra = operands(ACTIVATIONS[name], 130, 272, torch.bfloat16, "cuda")
        check_backward(ACTIVATIONS[name], x, dy, extra, *pair)


@pytest.mark.gpu
@pytest.mark.parametrize("spec", [Tensorwise(), Block1D()], ids=str)
def test_triton_gives_the_same_bits_again(spec):
    fn = ACTIVATIONS["swiglu"]
    x, dy, extra = operands(fn, 513, 2048, torch.bfloat16, "cuda")
    results = []
    for _ in range(2):
        pair, given = empty_pair(spec, 513, 4096, x.dtype, "cuda"), given_to(spec, "cuda")
        db = kernel.backward(fn, dy, Inputs(x, **extra), TileCast(pair, given), bias_grad=torch.float32).bias
        results.append([*contents(pair, given), db.cpu().view(torch.uint8)])
    assert_same_bytes(*results)


@pytest.mark.gpu
def test_triton_nothing_gives_nothing():
    for name in ("gelu", "swiglu"):
        for shape in ((0, 8), (3, 0)):
            fn = ACTIVATIONS[name]
            x, dy, extra = operands(fn, *shape, torch.bfloat16, "cuda")
            for spec in (Tensorwise(), Block1D()):
                check_forward(fn, x, extra, spec)
                check_backward(fn, x, dy, extra, spec, spec)
