"""Activations of rows in groups into codes: the same bytes as the activation written and then cast group by group."""

import math

import pytest
import torch
import torch.nn.functional as F

from octavo import backend
from octavo.errors import UnsupportedShape
from octavo.formats import E4M3, E5M2
from octavo.kernels import activation, grouped_gemm
from octavo.kernels.activation import ACTIVATIONS, Inputs, Wanted
from octavo.kernels.activation import cast as kernel
from octavo.kernels.tile_cast import NOTHING, TileCast
from octavo.quant import MX, Block1D, Block2D, Rowwise, TensorProto, Tensorwise
from octavo.quant.grouped import GroupedTensor, fill_groups, grouped_proto
from octavo.quant.groups import split
from octavo.quant.quantizer import CastArgs
from tests.support.activation_formulas import data, seed_of
from tests.support.activation_formulas import sizes as halves
from tests.support.filled_codes import DTYPES, ODD, assert_same_bytes, contents
from tests.support.pairs import pairs, triples

PACKAGE = "octavo.kernels.activation.cast"
DELAYED = [Tensorwise(), Tensorwise(E5M2)]
BLOCKS = [Block1D(), Block1D(E5M2, "fp32"), Block2D(), Block2D(E4M3, "fp32")]
OTHERS = [Rowwise(), MX()]
CASES = {
    "one": [200],
    "three": [65, 0, 130],
    "edges": [0, 1, 128, 127, 0],
    "empty": [0, 0, 0],
    "sixty-five": [i % 4 for i in range(65)],
}
TAIL = 7

every = pytest.mark.parametrize("name", ACTIVATIONS)
by_32 = ACTIVATIONS["swiglu"]._replace(interleave=32)


class Case:
    """Packed operands with a tail of NaN, and the groups that they are in."""

    def __init__(
        self, fn, sizes, h, dtype=torch.bfloat16, device="cpu", scaled=True, odd=(), strided=False, tail=TAIL,
        drop=False,
    ):  # fmt: skip
        self.n, self.rows = sum(sizes), sum(sizes) + tail
        self.fn, self.h, self.dtype, self.device = fn, h, dtype, torch.device(device)
        self.groups = split(torch.tensor(sizes, device=device), self.rows)
        x, dy = data(self.rows, h * halves(fn), dtype=dtype), data(self.rows, h, dtype=dtype, seed=1, size=1e-2)
        scales = torch.rand(self.rows, generator=torch.Generator().manual_seed(2))
        for t in (x, dy):
            for i, value in enumerate(odd):
                t.view(-1)[7 + 31 * i :: 1009] = torch.tensor(value).to(dtype)
        for t in (x, dy, scales):
            t[self.n :] = math.nan
        x, dy, scales = (t.to(device) for t in (x, dy, scales))
        if strided:
            x, dy = x.T.contiguous().T, dy.T.contiguous().T
        self.x, self.dy = x, dy
        self.extra = {"scales": scales if scaled else None, "seed": seed_of(77, 2, device) if drop else None}
        self.inputs = Inputs(x, **self.extra)

    def target(self, spec, k, sides="rc", delayed=True, inverse_scale=0.37):
        """Codes to be filled, poisoned, and the arguments of their cast."""
        wide, groups, found = -(-k // 16) * 16, self.groups, []
        for side, letter in (("row", "r"), ("column", "c")):
            q = None
            if letter in sides:
                q = grouped_proto(spec, groups.padded, groups.number, wide, side, self.dtype, self.device).empty()
                for t in q.tensors():
                    flat = t.as_strided((t.untyped_storage().nbytes() // t.element_size(),), (1,))
                    flat.view(torch.uint8).fill_(0xA5)
            found.append(q)
        given = CastArgs(groups=groups)
        if delayed and spec.takes_inverse_scale:
            encodes = inverse_scale * (1 + torch.arange(groups.number, device=self.device) % 3)
            given = given._replace(inverse_scale=encodes.float(), running_amax=torch.full_like(encodes, 1e-3).float())
        return TileCast(tuple(found), given)

    def fill(self, value, target):
        """The cast of GroupedLinear."""
        row, column = target.pair
        codes = (
            None if row is None else GroupedTensor(row, self.groups, "row"),
            None if column is None else GroupedTensor(column, self.groups, "column"),
        )
        fill_groups(F.pad(value, (0, -value.shape[1] % 16)), codes, target.cast_args)

    def check_forward(self, spec, sides="rc", delayed=True, **settings):
        found, want = (self.target(spec, self.h, sides, delayed) for _ in range(2))
        if settings:
            backend.implementation(PACKAGE, self.x).forward(self.fn, self.inputs, found, **settings)
        else:
            kernel.forward(self.fn, self.inputs, found)
        self.fill(activation.forward(self.fn, self.x, **self.extra), want)
        assert_same_bytes(contents(*found), contents(*want), what=f"y {spec} {sides}")

    def check_backward(self, spec, again=None, sides="rc", delayed=True, **settings):
        fn, dy, groups = self.fn, self.dy, self.groups
        wide, sums = self.h * halves(fn), {"bias_grad": torch.float32, "scales_grad": None}
        if self.extra["scales"] is not None:
            sums["scales_grad"] = torch.float32
        found, want = (self.target(spec, wide, sides, delayed, 411.0) for _ in range(2))
        found_y = want_y = NOTHING
        if again is not None:
            found_y, want_y = (self.target(again, self.h, "c", delayed) for _ in range(2))
        if settings:
            twin = backend.implementation(PACKAGE, dy)
            vectors = twin.backward(fn, dy, self.inputs, found, found_y, *sums.values(), **settings)
        else:
            vectors = kernel.backward(fn, dy, self.inputs, found, found_y, **sums)
        gradients = activation.backward(fn, dy, self.x, **self.extra, wanted=Wanted(scales=sums["scales_grad"]))
        self.fill(gradients.x, want)
        if again is not None:
            self.fill(activation.forward(fn, self.x, **self.extra), want_y)
            assert_same_bytes(contents(*found_y), contents(*want_y), what=f"y {again}")
        assert_same_bytes(contents(*found), contents(*want), what=f"dx {spec} {sides}")
        self.check_bias(vectors.bias, gradients.x)
        assert (vectors.scales is None) == (gradients.scales is None)
        if vectors.scales is not None:
            self.check_scales(vectors.scales, gradients.scales)
        assert groups.rows == self.rows

    def check_bias(self, found, dx):
        want = grouped_gemm.column_sums_of(dx, self.groups, torch.float32)
        terms = grouped_gemm.column_sums_of(dx.abs(), self.groups, torch.float32)
        assert found.shape == want.shape == (self.groups.number, dx.shape[1]) and found.dtype == torch.float32
        assert_close(found, want, terms, self.device)

    def check_scales(self, found, want):
        assert found.shape == (self.rows,) and not found[self.n :].any()
        y = activation.forward(self.fn, self.x, seed=self.extra["seed"]).double()
        terms = (self.dy.double() * y).abs().sum(1)
        assert_close(found[: self.n], want[: self.n], terms[: self.n], self.device)


def assert_close(found, want, terms, device):
    """The same bits by the reference; on a GPU, sums in another order."""
    found, want = (t.nan_to_num(7e30, 7e31, -7e31) for t in (found, want))
    if device.type == "cpu":
        assert torch.equal(found, want)
    else:
        assert ((found - want).abs() <= 1e-6 * want.abs() + 1e-5 * terms.nan_to_num(0.0, 0.0)).all()


# -- anywhere ----------------------------------------------------------------------------------------------------------


@every
@pytest.mark.parametrize("spec", DELAYED + BLOCKS, ids=str)
def test_forward_fills_what_casts_of_groups_would(name, spec):
    for scaled in (True, False):
        Case(ACTIVATIONS[name], CASES["three"], 48, scaled=scaled).check_forward(spec)


@every
@pytest.mark.parametrize("spec", DELAYED + BLOCKS, ids=str)
def test_backward_fills_what_casts_of_groups_would(name, spec):
    for scaled in (True, False):
        Case(ACTIVATIONS[name], CASES["three"], 48, scaled=scaled).check_backward(spec, Tensorwise())


@pytest.mark.parametrize("sizes", CASES.values(), ids=CASES)
@pytest.mark.parametrize("spec", [Tensorwise(), Block1D(), *OTHERS], ids=str)
@pytest.mark.parametrize("delayed", [True, False], ids=["delayed", "current"])
def test_groups_of_any_size(sizes, spec, delayed):
    for fn in (ACTIVATIONS["swiglu"], ACTIVATIONS["srelu"], by_32):
        case = Case(fn, sizes, 32)
        case.check_forward(spec, delayed=delayed)
        case.check_backward(spec, spec, delayed=delayed)
    Case(fn, sizes, 32, tail=0).check_forward(spec, delayed=delayed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleave", [0, 1, 16, 32])
def test_layouts_and_dtypes(interleave, dtype):
    fn = ACTIVATIONS["clamped-swiglu"]._replace(interleave=interleave)
    for spec in (Tensorwise(), Block1D(), Block2D()):
        case = Case(fn, CASES["three"], 96, dtype, strided=True)
        for sides in ("r", "c", "rc"):
            case.check_forward(spec, sides)
        case.check_backward(spec, spec)


@pytest.mark.parametrize("h", [1, 51])
def test_codes_may_be_wider_than_the_values(h):
    """GroupedLinear allocates whole steps of 16 columns, the last of them zeros."""
    for fn in (ACTIVATIONS["swiglu"], ACTIVATIONS["gelu"]):
        for spec in (Tensorwise(), Block1D()):
            case = Case(fn, CASES["three"], h)
            case.check_forward(spec)
            case.check_backward(spec, spec)


def test_dropout_draws_by_the_packed_row():
    fn = ACTIVATIONS["swiglu"]._replace(drop=0.3)
    case = Case(fn, CASES["three"], 48, drop=True)
    case.check_forward(Tensorwise())
    case.check_backward(Tensorwise(E5M2), Tensorwise())


def test_the_tail_and_codes_past_the_last_group_change_nothing():
    """Codes of the same rows with another tail, and in a longer tensor."""
    fn, results = ACTIVATIONS["swiglu"], []
    for tail in (0, 3, 300):
        case = Case(fn, [5, 0, 130], 32, tail=0)
        x = torch.cat((case.x, torch.full((tail, 64), math.inf, dtype=case.dtype)))
        case.groups = split(torch.tensor([5, 0, 130]), len(x))
        target = case.target(Block1D(), 32)
        scales = torch.cat((case.extra["scales"], torch.full((tail,), math.nan)))
        kernel.forward(fn, Inputs(x, scales), target)
        row, column = target.pair
        results.append([row.codes[:384].view(torch.uint8), column.codes[:, :384].contiguous().view(torch.uint8)])
    assert_same_bytes(results[0], results[1])
    assert_same_bytes(results[0], results[2])


def test_amaxes_of_groups_are_observed():
    case = Case(ACTIVATIONS["srelu"], [3, 0, 6], 32, torch.float32, scaled=False)
    target = case.target(Tensorwise(), 32)
    kernel.forward(case.fn, case.inputs, target)
    y = activation.forward(case.fn, case.x)
    want = torch.stack((y[:3].max(), torch.tensor(1e-3), y[3:9].max()))
    assert torch.equal(target.cast_args.running_amax, want)


def test_gradients_of_bias_and_scales_need_no_codes_of_dx():
    """Gradients of bias and scales where no codes of dx are wanted; the groups come with an empty target."""
    case = Case(ACTIVATIONS["swiglu"], [3, 0, 6], 32)
    nothing = TileCast(cast_args=CastArgs(groups=case.groups))
    sums = kernel.backward(case.fn, case.dy, case.inputs, nothing, NOTHING, torch.bfloat16, torch.float16)
    want = activation.backward(case.fn, case.dy, case.x, **case.extra, wanted=Wanted(scales=torch.float16))
    assert torch.equal(sums.bias, grouped_gemm.column_sums_of(want.x, case.groups, torch.bfloat16))
    assert torch.equal(sums.scales[:9], want.scales[:9]) and not sums.scales[9:].any()
    assert kernel.backward(case.fn, case.dy, case.inputs, nothing) == (None, None)


def test_a_call_without_groups_has_the_gradient_of_scales():
    case = Case(ACTIVATIONS["swiglu"], [9], 32, tail=0)
    want = activation.backward(case.fn, case.dy, case.x, **case.extra, wanted=Wanted(scales=torch.float32))
    found = kernel.backward(case.fn, case.dy, case.inputs, NOTHING, scales_grad=torch.float32)
    assert found.bias is None and torch.equal(found.scales, want.scales)


def test_codes_that_do_not_fit_are_refused():
    case = Case(ACTIVATIONS["swiglu"], [3, 0, 6], 32)
    for pair in (case.target(Block1D(), 16, "r").pair, case.target(Block1D(), 16, "c").pair):
        with pytest.raises(UnsupportedShape, match="y is 16 x 32, so that codes of"):
            kernel.forward(case.fn, case.inputs, TileCast(pair, CastArgs(groups=case.groups)))
    other = split(torch.tensor([3, 6]), 12)
    with pytest.raises(UnsupportedShape, match="its groups are of 12 rows"):
        kernel.forward(case.fn, case.inputs, TileCast(cast_args=CastArgs(groups=other)))


# -- on a GPU ----------------------------------------------------------------------------------------------------------


SCHEMES = {  # and whether a scale is given; blocks have scales of their own
    "delayed": (Tensorwise(), True),
    "current": (Tensorwise(E5M2), False),
    "block-1d": (Block1D(), False),
    "block-2d": (Block2D(E4M3, "fp32"), False),
}


@pytest.mark.gpu
@pairs(name=list(ACTIVATIONS), scheme=SCHEMES, scaled={"scaled": True, "unscaled": False})
def test_triton_fills_the_same_bytes_for_every_activation(name, scheme, scaled):
    spec, delayed = scheme
    for odd in ((), ODD):
        case = Case(ACTIVATIONS[name], [130, 0, 65, 1], 144, device="cuda", scaled=scaled, odd=odd)
        case.check_forward(spec, delayed=delayed)
        if not odd:  # sums of NaN are NaN
            case.check_backward(spec, spec, delayed=delayed)


@pytest.mark.gpu
@pairs(
    scheme={**SCHEMES, "delayed": (Tensorwise(E5M2), True), **{str(spec): (spec, False) for spec in OTHERS}},
    sizes=CASES,
    fn={"swiglu": ACTIVATIONS["swiglu"], "srelu": ACTIVATIONS["srelu"], "by 32": by_32},
    h=[32, 256, 1056],
    tail=[0, TAIL, 400],
)
def test_triton_takes_groups_of_any_size(scheme, sizes, fn, h, tail):
    spec, delayed = scheme
    case = Case(fn, sizes, h, device="cuda", tail=tail)
    case.check_forward(spec, delayed=delayed)
    case.check_backward(spec, Tensorwise(), delayed=delayed)


@pytest.mark.gpu
@triples(
    spec=[Tensorwise(), Block1D(), Block2D()],
    dtype=DTYPES,
    strided={"contiguous": False, "strided": True},
    sides=["r", "c", "rc"],
    interleave=[0, 1, 16, 32],
    name=["clamped-swiglu", "situglu"],
)
def test_triton_takes_every_layout_and_dtype(spec, dtype, strided, sides, interleave, name):
    fn = ACTIVATIONS[name]._replace(interleave=interleave)
    case = Case(fn, CASES["three"], 96, dtype, "cuda", strided=strided)
    case.check_forward(spec, sides)
    case.check_backward(spec, spec if sides == "rc" else None, sides)


@pytest.mark.gpu
@pytest.mark.parametrize("delayed", [True, False], ids=["delayed", "current"])
def test_triton_fills_the_same_bytes_in_every_configuration(delayed):
    from octavo.kernels.activation.cast.triton import CONFIGS, GATED_CONFIGS, GROUP_CONFIGS

    for name in ("swiglu", "srelu"):
        case = Case(ACTIVATIONS[name], [257, 0, 128, 3], 272, device="cuda")
        for config in dict.fromkeys((*CONFIGS, *GATED_CONFIGS, *GROUP_CONFIGS)):
            case.check_forward(Tensorwise(), delayed=delayed, config=config)
            if config != (128, 128, 16):
                case.check_backward(Tensorwise(E5M2), Tensorwise(), delayed=delayed, config=config)


@pytest.mark.gpu
def test_triton_takes_a_thousand_groups():
    case = Case(ACTIVATIONS["swiglu"], [i % 5 for i in range(1024)], 64, device="cuda")
    for delayed in (True, False):
        case.check_forward(Tensorwise(), delayed=delayed)
        case.check_backward(Tensorwise(E5M2), Tensorwise(), delayed=delayed)


@pytest.mark.gpu
@pytest.mark.gpu_smoke
def test_triton_draws_dropout_by_the_packed_row_and_takes_wider_codes():
    fn = ACTIVATIONS["swiglu"]
    for case in (
        Case(fn._replace(drop=0.3), CASES["three"], 96, device="cuda", drop=True),
        Case(fn, CASES["three"], 51, device="cuda"),
    ):
        case.check_forward(Tensorwise())
        case.check_backward(Tensorwise(E5M2), Tensorwise())


@pytest.mark.gpu
def test_triton_gives_the_same_sums_again():
    case, results = Case(ACTIVATIONS["swiglu"], [513, 0, 300], 2048, device="cuda"), []
    for _ in range(2):
        target = case.target(Tensorwise(E5M2), 4096)
        sums = kernel.backward(case.fn, case.dy, case.inputs, target, NOTHING, torch.float32, torch.float32)
        results.append([t.cpu().view(torch.uint8) for t in sums] + contents(*target))
    assert_same_bytes(*results)


@pytest.mark.gpu
def test_triton_has_the_gradient_of_scales_without_groups():
    for fn in (ACTIVATIONS["swiglu"], ACTIVATIONS["srelu"], by_32):
        case = Case(fn, [257], 288, device="cuda", tail=0)
        want = activation.backward(fn, case.dy, case.x, **case.extra, wanted=Wanted(scales=torch.float32))
        like = TensorProto((case.rows, case.h * halves(fn)), case.dtype, case.device)
        target = TileCast(
            (Tensorwise(E5M2).proto(like).empty(), None), CastArgs(inverse_scale=torch.ones(1, device="cuda"))
        )
        found = kernel.backward(fn, case.dy, case.inputs, target, scales_grad=torch.float32)
        case.check_scales(found.scales, want.scales)
