"""The quantizer protocol: prototypes, writing in place, given amaxes, transposes, values, and every refusal."""

import copy
import dataclasses
import math
import pickle

import pytest
import torch

import octavo.quant as Q
from octavo.errors import Unsupported, UnsupportedConfig, UnsupportedDevice, UnsupportedDtype, UnsupportedShape
from octavo.formats import E2M1, E4M3, E5M2, E8M0, unpack_nibbles
from octavo.quant import TensorProto
from octavo.quant.casts import KNOWN
from octavo.quant.tensorwise import reference as tensorwise_reference
from octavo.values import register
from tests.support.linear_oracle import randn
from tests.support.same_tensors import assert_same, bytes_of

DETERMINISTIC = [
    Q.Tensorwise(),
    Q.Tensorwise(E5M2, pow2=True),
    Q.Rowwise(),
    Q.Rowwise(E5M2),
    Q.Block1D(),
    Q.Block1D(scale="fp32"),
    Q.Block2D(),
    Q.MX(),
    Q.MX(square=True),
    Q.NVFP4(),
    Q.NVFP4(square=True),
    Q.NVFP4(rht=True),
]
STOCHASTIC = [Q.NVFP4(stochastic=True), Q.NVFP4(rht=True, stochastic=True)]
EVERY = DETERMINISTIC + STOCHASTIC
SQUARE = [Q.Tensorwise(), Q.Tensorwise(E5M2, pow2=True), Q.Block2D(), Q.MX(square=True), Q.NVFP4(square=True)]
SHAPES = [(1, 1), (33, 130), (128, 256), (0, 5), (5, 0), (2, 3, 40), (2, 1, 3, 40)]

every = pytest.mark.parametrize("spec", EVERY, ids=str)
deterministic = pytest.mark.parametrize("spec", DETERMINISTIC, ids=str)


def seed_for(spec):
    return torch.tensor([3, 7]) if getattr(spec, "stochastic", False) else None


def poison(q):
    """Fill the storage with bytes that no quantization of randn leaves everywhere."""
    for t in q.tensors():
        t.view(torch.uint8).fill_(0x5A) if t.element_size() == 1 else t.fill_(-1.0)
    return q


# -- prototypes ----------------------------------------------------------------------------------------------------


def assert_proto_fits(proto, q):
    assert (proto.shape, proto.dtype, proto.spec) == (q.shape, q.dtype, q.spec)
    for name in ("codes", "scale", "global_scale"):
        said, real = getattr(proto, name), getattr(q, name)
        assert (said is None) == (real is None)
        if real is not None:
            assert said.shape == tuple(real.shape)
            assert said.dtype == real.dtype
            assert said.device == real.device
            assert said.empty().stride() == real.stride()


@every
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_proto_is_what_quantize_returns(spec, shape, dtype):
    x = randn(*shape, dtype=dtype)
    for axis in (-1, 0):
        proto = spec.proto(TensorProto.of(x), axis)
        q = spec.quantize(x, axis, seed=seed_for(spec))
        assert_proto_fits(proto, q)
        assert_proto_fits(proto, proto.empty())
        assert not proto.unsupported_reason(q)


@every
def test_proto_does_not_depend_on_the_strides_of_x(spec):
    x = randn(130, 33).T
    assert spec.proto(TensorProto.of(x)) == spec.proto(TensorProto.of(x.contiguous()))


@pytest.mark.parametrize(
    ("spec", "codes", "scale", "scale_dtype"),
    [
        (Q.Tensorwise(), (130, 300), (1, 1), torch.float32),
        (Q.Rowwise(), (130, 300), (130, 1), torch.float32),
        (Q.Block1D(), (130, 300), (130, 3), torch.float32),
        (Q.Block2D(), (130, 300), (2, 3), torch.float32),
        (Q.MX(), (130, 300), (130, 10), torch.uint8),
        (Q.MX(square=True), (130, 300), (5, 10), torch.uint8),
        (Q.NVFP4(), (130, 152), (130, 19), torch.uint8),
        (Q.NVFP4(square=True), (130, 152), (9, 19), torch.uint8),
    ],
    ids=str,
)
def test_layouts_are_the_documented_ones(spec, codes, scale, scale_dtype):
    proto = spec.proto(TensorProto.of(randn(130, 300)))
    assert (proto.codes.shape, proto.scale.shape, proto.scale.dtype) == (codes, scale, scale_dtype)
    assert proto.codes.dtype == spec.fmt.dtype
    assert (proto.global_scale is not None) == isinstance(spec, Q.NVFP4)


def test_block_scales_are_stored_with_rows_fastest():
    assert Q.Block1D().quantize(randn(5, 300)).scale.stride() == (1, 5)


# -- in place ------------------------------------------------------------------------------------------------------


def into(spec, out, x, skip=None, **more):
    spec.quantize_into(out, x, skip, seed=seed_for(spec), **more)


@every
@pytest.mark.parametrize("axis", [-1, 0])
def test_quantize_into_writes_the_same_bytes_at_the_same_addresses(spec, axis):
    x = randn(33, 130)
    out = poison(spec.proto(TensorProto.of(x), axis).empty())
    addresses = [t.data_ptr() for t in out.tensors()]
    into(spec, out, x, axis=axis)
    assert [t.data_ptr() for t in out.tensors()] == addresses
    assert_same(out, spec.quantize(x, axis, seed=seed_for(spec)))


@every
def test_quantize_into_writes_a_pair(spec):
    x = randn(33, 130)
    like = TensorProto.of(x)
    pair = poison(spec.proto(like).empty()), poison(spec.proto(like, 0).empty())
    addresses = [t.data_ptr() for q in pair for t in q.tensors()]
    into(spec, pair, x)
    assert [t.data_ptr() for q in pair for t in q.tensors()] == addresses
    assert_same(pair[0], spec.quantize(x, seed=seed_for(spec)))
    assert_same(pair[1], spec.quantize(x, axis=0, seed=seed_for(spec)))


@every
@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_a_zero_skip_writes_and_any_other_leaves_everything(spec, dtype, shape):
    x, other = randn(33, 130), randn(33, 130, seed=1) * 8
    single = spec.quantize(other, seed=seed_for(spec))
    pair = spec.quantize_both(other, seed=seed_for(spec))
    before = [bytes_of(q) for q in (single, *pair)]
    stop, go = torch.ones(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
    into(spec, single, x, stop)
    into(spec, pair, x, stop)
    assert [bytes_of(q) for q in (single, *pair)] == before
    into(spec, single, x, go)
    into(spec, pair, x, go)
    assert_same(single, spec.quantize(x, seed=seed_for(spec)))
    assert_same(pair[0], single)
    assert_same(pair[1], spec.quantize(x, axis=0, seed=seed_for(spec)))


@pytest.mark.parametrize("flag", [0.25, -1.0, 2.0])
def test_skip_means_not_zero_rather_than_one(flag):
    x, out = randn(4, 40), Q.MX().quantize(randn(4, 40, seed=1))
    before = bytes_of(out)
    Q.MX().quantize_into(out, x, torch.tensor([flag]))
    assert bytes_of(out) == before


def test_a_skip_leaves_even_a_non_finite_source_out():
    out = Q.Tensorwise().quantize(randn(4, 40))
    before = bytes_of(out)
    Q.Tensorwise().quantize_into(out, torch.full((4, 40), math.nan), torch.tensor([1]))
    assert bytes_of(out) == before


def replace(q, **changes):
    return dataclasses.replace(q, **changes)


def test_quantize_into_refuses_what_does_not_fit_and_says_how_it_differs():
    spec, x = Q.Block1D(), randn(33, 130)
    fits = spec.quantize(x)
    outs = {
        r"codes with shape \(33, 131\) instead of \(33, 130\)": spec.quantize(randn(33, 131)),
        r"scale with shape \(33, 3\) instead of \(33, 2\)": replace(fits, scale=torch.empty(33, 3)),
        r"scale with strides \(2, 1\) instead of \(1, 33\)": replace(fits, scale=torch.empty(33, 2)),
        r"scale with dtype torch\.float16 instead of torch\.float32": replace(fits, scale=fits.scale.half()),
        r"codes with dtype torch\.uint8 instead of torch\.float8_e4m3fn": replace(
            fits, codes=fits.codes.view(torch.uint8)
        ),
        r"quantizer block-1d\(scale='fp32'\) instead of block-1d": Q.Block1D(scale="fp32").quantize(x),
        r"device meta instead of cpu": replace(fits, codes=fits.codes.to("meta")),
    }
    for message, out in outs.items():
        with pytest.raises(UnsupportedShape, match=message) as error:
            spec.quantize_into(out, x)
        assert "Allocate it with proto().empty()" in str(error.value)


def test_quantize_into_refuses_the_wrong_orientation_and_a_wrong_half_of_a_pair():
    spec, x = Q.Rowwise(), randn(33, 130)
    row, column = spec.quantize_both(x)
    before = bytes_of(row), bytes_of(column)
    for out, axis in ((row, 0), (column, -1), ((row, row), -1), ((column, column), -1), ((column, row), -1)):
        with pytest.raises(UnsupportedShape, match=r"shape .* instead of .*proto\(\)\.empty\(\)"):
            spec.quantize_into(out, x, axis=axis)
    assert (bytes_of(row), bytes_of(column)) == before, "a refused call must not have written half of its pair"


@pytest.mark.parametrize(
    ("spec", "other"),
    [
        (Q.Tensorwise(), Q.Block2D()),
        (Q.Tensorwise(), Q.Tensorwise(E5M2)),
        (Q.Rowwise(), Q.MX()),
        (Q.MX(), Q.Rowwise()),
        (Q.Block1D(), Q.Block1D(scale="fp32")),
        (Q.NVFP4(), Q.MX()),
    ],
    ids=str,
)
def test_quantize_into_refuses_a_pair_of_another_quantizer(spec, other):
    x = randn(130, 130)
    pair = other.quantize_both(x)
    before = [bytes_of(q) for q in pair]
    with pytest.raises(Unsupported):
        spec.quantize_into(pair, x * 3)
    assert [bytes_of(q) for q in pair] == before


# -- amax ----------------------------------------------------------------------------------------------------------


@every
@pytest.mark.parametrize("shape", [(33, 130), (0, 5), (5, 0), (2, 3, 40)], ids=str)
def test_a_given_amax_of_its_own_changes_nothing(spec, shape):
    x, seed = randn(*shape), seed_for(spec)
    for axis in (-1, 0):
        assert_same(spec.quantize(x, axis, amax=spec.amax(x, axis), seed=seed), spec.quantize(x, axis, seed=seed))
    both = spec.amax_both(x)
    for found, want in zip(spec.quantize_both(x, amax=both, seed=seed), spec.quantize_both(x, seed=seed), strict=True):
        assert_same(found, want)
    for found, axis in zip(both, (-1, 0), strict=True):
        assert torch.equal(found, spec.amax(x, axis))


@deterministic
def test_amax_is_the_largest_magnitude_of_each_block(spec):
    x = randn(33, 130)
    found = spec.amax(x)
    assert found.dtype == torch.float32
    if spec.basis:  # the turned tensor has an amax of its own
        return
    rows, columns = (None, None) if isinstance(spec, Q.NVFP4) else spec.block
    rows, columns = rows or 33, columns or 130
    want = [[x[i : i + rows, j : j + columns].abs().max() for j in range(0, 130, columns)] for i in range(0, 33, rows)]
    assert torch.equal(found.flatten(), torch.tensor(want).flatten())


@deterministic
def test_a_larger_given_amax_is_used(spec):
    # what a collective brings: the amax of other ranks
    x = randn(33, 130)
    amax = spec.amax(x)
    wider = spec.quantize(x, amax=amax * 4)
    own = spec.quantize(x)
    if isinstance(spec, Q.MX):
        assert torch.equal(wider.scale.int(), own.scale.int() + 2)
    elif isinstance(spec, Q.NVFP4):
        torch.testing.assert_close(wider.global_scale, own.global_scale * 4)
    else:
        assert torch.equal(wider.scale, own.scale * 4)
    assert not torch.equal(wider.codes.view(torch.uint8), own.codes.view(torch.uint8)) or isinstance(spec, Q.NVFP4)


def test_encode_is_the_multiplier_itself_and_saturates():
    x = torch.tensor([[1.0, 3.0, -200.0, 300.0]])
    q = Q.Tensorwise().quantize(x, inverse_scale=torch.tensor([2.0]))
    assert q.codes.float().tolist() == [[2.0, 6.0, -384.0, 448.0]]  # 400 is a tie, 600 too large
    assert q.scale.tolist() == [[0.5]]
    row, column = Q.Tensorwise().quantize_both(x, inverse_scale=torch.tensor([2.0]))
    assert_same(row, q)
    assert_same(column, q.transpose())


# -- transposes ----------------------------------------------------------------------------------------------------


@every
@pytest.mark.parametrize("shape", [(33, 130), (128, 256), (1, 1), (2, 3, 40)], ids=str)
def test_transpose_is_lossless_or_refused_with_a_reason(spec, shape):
    x = randn(*shape)
    q = spec.quantize(x, seed=seed_for(spec))
    if spec in SQUARE:
        assert_same(q.transpose(), spec.quantize(x, axis=0))
        assert q.transpose().shape == (shape[-1], math.prod(shape[:-1]))
        return
    with pytest.raises(
        TypeError, match=r"blocks along the contraction.*quantize twice.*quantize\(x, axis=0\)"
    ) as error:
        q.transpose()
    assert str(spec) in str(error.value)


# -- values --------------------------------------------------------------------------------------------------------


def test_equal_settings_are_equal_values_and_others_are_not():
    assert Q.MX() == Q.MX(E4M3, "rceil", False)
    assert len({Q.MX(), Q.MX(E4M3), Q.MX(E5M2), Q.Block1D(), Q.Block2D()}) == 4
    assert {Q.Tensorwise(): "found"}[Q.Tensorwise(E4M3, False, 0.0)] == "found"
    assert Q.Block1D() != Q.Block2D()
    assert Q.Tensorwise(pow2=True) != Q.Rowwise()
    assert len(set(EVERY)) == len({str(s) for s in EVERY}) == len(EVERY)


@every
def test_a_quantizer_is_frozen_and_survives_copies(spec):
    field = dataclasses.fields(spec)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(spec, field, getattr(spec, field))
    for twin in (copy.copy(spec), copy.deepcopy(spec), pickle.loads(pickle.dumps(spec))):
        assert twin == spec
        assert hash(twin) == hash(spec)
        assert twin.key == spec.key


@every
def test_a_qtensor_is_frozen_and_no_tensor(spec):
    q = spec.quantize(randn(4, 40), seed=seed_for(spec))
    for field in dataclasses.fields(q):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(q, field.name, getattr(q, field.name))
    assert not isinstance(q, torch.Tensor)
    with pytest.raises(TypeError):
        torch.add(q, 1)
    with pytest.raises(TypeError):
        q + 1
    assert str(spec) in repr(q)
    assert "4x40" in repr(q)


@every
def test_tensors_lists_every_tensor_and_nbytes_counts_them(spec):
    q = spec.quantize(randn(33, 130), seed=seed_for(spec))
    held = [q.codes, q.scale] + ([] if q.global_scale is None else [q.global_scale])
    assert [t.data_ptr() for t in q.tensors()] == [t.data_ptr() for t in held]
    assert q.nbytes() == sum(t.untyped_storage().nbytes() for t in held)


@every
def test_an_input_that_requires_grad_leaves_no_graph(spec):
    x = randn(4, 40).requires_grad_()
    for q in spec.quantize_both(x, seed=seed_for(spec)):
        assert not any(t.requires_grad or t.grad_fn for t in q.tensors())
        assert q.dequantize().grad_fn is None
    amax = spec.amax(x)
    assert not amax.requires_grad
    assert_same(spec.quantize(x, seed=seed_for(spec)), spec.quantize(x.detach(), seed=seed_for(spec)))
    into(spec, spec.proto(TensorProto.of(x)).empty(), x)  # must not raise for a leaf either


@pytest.mark.parametrize("spec", [s for s in EVERY if not s.basis], ids=str)  # the turn itself overflows up there
def test_dequantize_returns_the_asked_dtype_and_saturates(spec):
    x = torch.full((2, 32), 3.0e38)
    q = spec.quantize(x, seed=seed_for(spec))
    assert q.dequantize().dtype == torch.float32
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        values = q.dequantize(dtype)
        assert values.dtype == dtype
        assert values.isfinite().all()


def test_two_calls_share_no_memory():
    x = randn(4, 40)
    a, b = Q.Tensorwise().quantize(x), Q.Tensorwise().quantize(x)
    assert {t.data_ptr() for t in a.tensors()}.isdisjoint(t.data_ptr() for t in b.tensors())
    row, column = Q.Tensorwise().quantize_both(x)
    assert {t.data_ptr() for t in row.tensors()}.isdisjoint(t.data_ptr() for t in column.tensors())


@pytest.mark.parametrize("spec", STOCHASTIC, ids=str)
def test_stochastic_bytes_follow_seed_and_step_and_nothing_else(spec):
    x = randn(33, 160)
    first = spec.quantize(x, seed=torch.tensor([3, 7]))
    torch.manual_seed(123)
    assert_same(spec.quantize(x, seed=torch.tensor([3, 7])), first)
    for other in ([3, 8], [4, 7], [7, 3]):
        assert not torch.equal(spec.quantize(x, seed=torch.tensor(other)).codes, first.codes)


# -- refusals: the rule, the value, the way out --------------------------------------------------------------------


def entries(spec, x):
    """Every entry that takes a tensor."""
    out = spec.quantize(randn(4, 40), seed=seed_for(spec))
    yield lambda: spec.quantize(x, seed=seed_for(spec))
    yield lambda: spec.quantize_both(x, seed=seed_for(spec))
    yield lambda: spec.amax(x)
    yield lambda: spec.amax_both(x)
    yield lambda: spec.quantize_into(out, x, seed=seed_for(spec))


@every
@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.float64, torch.bool, torch.complex64, torch.float8_e4m3fn], ids=str
)
def test_another_dtype_is_refused(spec, dtype):
    for entry in entries(spec, torch.zeros(4, 40).to(dtype)):
        with pytest.raises(UnsupportedDtype, match=rf"float32, bfloat16 or float16, got {dtype}\. Cast x first"):
            entry()


@every
@pytest.mark.parametrize("x", [[[1.0]], 1.0, None, "x"], ids=repr)
def test_what_is_no_tensor_is_refused(spec, x):
    for entry in entries(spec, x):
        with pytest.raises(UnsupportedDtype, match=rf"takes a torch\.Tensor as x, got {type(x).__name__}\. Use torch"):
            entry()


def test_a_qtensor_is_not_quantized_twice():
    with pytest.raises(UnsupportedDtype, match=r"takes a torch\.Tensor as x, got QTensor\. Pass its dequantize"):
        Q.MX().quantize(Q.MX().quantize(randn(4, 40)))


@every
@pytest.mark.parametrize(
    ("shape", "axis"), [((4, 40), 2), ((4, 40), -3), ((2, 4, 40), 1), ((2, 4, 40), -2), ((40,), 1)]
)
def test_another_axis_is_refused(spec, shape, axis):
    message = rf"axis must be -1 .* or 0 .*got {axis} for a tensor of {len(shape)} dims.*Permute"
    for call in (spec.quantize, spec.amax):
        with pytest.raises(UnsupportedShape, match=message):
            call(randn(*shape), axis)


@every
@pytest.mark.parametrize(
    ("ones", "shape"),
    [((1, 1), (2**31, 1)), ((1, 1), (1, 2**31)), ((1, 1, 1), (2**16, 2**16, 1)), ((1,), (2**31,))],
    ids=str,
)
def test_more_than_31_bits_of_rows_or_columns_are_refused(spec, ones, shape):
    x = torch.empty(ones).expand(shape)  # no memory behind it
    for entry in entries(spec, x):
        with pytest.raises(
            UnsupportedShape, match=r"at most 2\^31-256 rows and columns, got \d+ x \d+.*in pieces"
        ) as error:
            entry()
        assert str(shape) in str(error.value)


@every
def test_an_amax_of_another_shape_or_dtype_is_refused(spec):
    x = randn(33, 130)
    amax = spec.amax(x)
    for wrong in (amax.double(), amax.bfloat16(), amax.flatten()[:0], torch.cat([amax, amax]), amax.unsqueeze(-1)):
        with pytest.raises(
            UnsupportedShape, match=r"amax= must be float32 .* as amax\(x, axis\) returns it; got"
        ) as error:
            spec.quantize(x, amax=wrong, seed=seed_for(spec))
        assert f"{wrong.dtype} {tuple(wrong.shape)}" in str(error.value)
        assert str(tuple(amax.shape)) in str(error.value)


@every
def test_an_amax_on_another_device_is_refused(spec):
    x = randn(33, 130)
    with pytest.raises(UnsupportedShape, match=r"on cpu.*on meta"):
        spec.quantize(x, amax=spec.amax(x).to("meta"), seed=seed_for(spec))


@every
def test_an_amax_for_one_orientation_of_two_is_refused(spec):
    x = randn(33, 130)
    for pair in ((spec.amax(x), None), (None, spec.amax(x, 0))):
        with pytest.raises(
            UnsupportedConfig, match=r"both orientations, as amax_both\(x\) returns them, or for neither"
        ):
            spec.quantize_both(x, amax=pair, seed=seed_for(spec))


@pytest.mark.parametrize("spec", [s for s in EVERY if not isinstance(s, Q.Tensorwise)], ids=str)
def test_encode_is_refused_where_scales_come_from_the_data(spec):
    x, inverse_scale = randn(4, 40), torch.tensor([1.0])
    out = spec.quantize(x, seed=seed_for(spec))
    calls = (
        lambda: spec.quantize(x, inverse_scale=inverse_scale, seed=seed_for(spec)),
        lambda: spec.quantize_both(x, inverse_scale=inverse_scale, seed=seed_for(spec)),
        lambda: spec.quantize_into(out, x, inverse_scale=inverse_scale, seed=seed_for(spec)),
    )
    for call in calls:
        with pytest.raises(
            UnsupportedConfig, match=r"derives its scales from the data; inverse_scale= is for Tensorwise"
        ) as e:
            call()
        assert str(spec) in str(e.value)


@pytest.mark.parametrize(
    "inverse_scale",
    [torch.ones(2), torch.ones(1, dtype=torch.float64), torch.ones(1, device="meta"), torch.ones(0)],
    ids=str,
)
def test_an_encode_that_is_not_one_float32_is_refused(inverse_scale):
    with pytest.raises(
        UnsupportedShape, match=r"inverse_scale= is the inverse scale, one float32 on cpu; got"
    ) as error:
        Q.Tensorwise().quantize(randn(4, 40), inverse_scale=inverse_scale)
    assert f"{inverse_scale.dtype} {tuple(inverse_scale.shape)} on {inverse_scale.device}" in str(error.value)


@deterministic
def test_a_seed_is_refused_where_nothing_is_stochastic(spec):
    x, seed = randn(4, 40), torch.tensor([1, 2])
    out = spec.quantize(x)
    calls = (
        lambda: spec.quantize(x, seed=seed),
        lambda: spec.quantize_both(x, seed=seed),
        lambda: spec.quantize_into(out, x, seed=seed),
    )
    for call in calls:
        with pytest.raises(
            UnsupportedConfig, match=r"rounds to nearest; seed= is for NVFP4\(stochastic=True\)"
        ) as error:
            call()
        assert str(spec) in str(error.value)


@pytest.mark.parametrize("spec", STOCHASTIC, ids=str)
def test_a_stochastic_cast_without_a_seed_is_refused(spec):
    x = randn(4, 40)
    out = spec.quantize(x, seed=torch.tensor([1, 2]))
    for call in (spec.quantize, spec.quantize_both, lambda x: spec.quantize_into(out, x)):
        with pytest.raises(
            UnsupportedConfig, match=r"stochastically and needs seed=, an int64 tensor \[seed, step\]"
        ) as e:
            call(x)
        assert str(spec) in str(e.value)


@pytest.mark.parametrize("spec", STOCHASTIC, ids=str)
@pytest.mark.parametrize(
    "seed",
    [torch.tensor([1]), torch.tensor([1, 2, 3]), torch.tensor([1.0, 2.0]), torch.tensor([[1, 2]]), torch.tensor(1)],
    ids=str,
)
def test_a_seed_of_another_kind_is_refused(spec, seed):
    with pytest.raises(UnsupportedShape, match=r"seed= is an int64 tensor \[seed, step\] on cpu; got") as error:
        spec.quantize(randn(4, 40), seed=seed)
    assert f"{seed.dtype} {tuple(seed.shape)}" in str(error.value)


@every
@pytest.mark.parametrize("skip", [torch.zeros(2), torch.zeros(0), torch.zeros(1, device="meta")], ids=str)
def test_a_skip_that_is_not_one_element_here_is_refused(spec, skip):
    x = randn(4, 40)
    out = spec.quantize(x, seed=seed_for(spec))
    message = rf"skip is one element on the device of x \(cpu\).*got {skip.numel()} on {skip.device}"
    for call in (lambda: into(spec, out, x, skip), lambda: spec.amax(x, skip=skip)):
        with pytest.raises(UnsupportedDevice, match=message):
            call()


@pytest.mark.parametrize(
    ("row", "column"),
    [
        (Q.Tensorwise(), Q.Rowwise()),
        (Q.MX(), Q.MX(E5M2)),
        (Q.NVFP4(), Q.NVFP4(square=True)),
        (Q.Block1D(), Q.Block2D()),
    ],
    ids=str,
)
def test_a_pair_of_unlike_quantizers_is_refused(row, column):
    with pytest.raises(
        UnsupportedConfig, match=r"cannot share one read of x.*same scheme.*quantize\(x, axis\)"
    ) as error:
        row.quantize_both(randn(4, 40), column=column)
    assert str(row) in str(error.value)
    assert str(column) in str(error.value)


BAD_SETTINGS = [
    (lambda: Q.Tensorwise(E2M1), r"Tensorwise\.fmt must be one of E4M3, E5M2, got E2M1"),
    (lambda: Q.Tensorwise("E4M3"), r"Tensorwise\.fmt must be one of E4M3, E5M2, got 'E4M3'"),
    (lambda: Q.Tensorwise(pow2=1), r"Tensorwise\.pow2 must be one of False, True, got 1"),
    (lambda: Q.Tensorwise(eps=math.inf), r"eps.*inf"),
    (lambda: Q.Tensorwise(eps=math.nan), r"eps.*nan"),
    (lambda: Q.Tensorwise(eps=-1.0), r"eps.*-1\.0"),
    (lambda: Q.Tensorwise(eps="small"), r"eps.*'small'"),
    (lambda: Q.Tensorwise(eps=None), r"eps.*None"),
    (lambda: Q.Rowwise(E8M0), r"Rowwise\.fmt must be one of E4M3, E5M2, got E8M0"),
    (lambda: Q.Rowwise(pow2=None), r"Rowwise\.pow2 must be one of False, True, got None"),
    (lambda: Q.Rowwise(eps=-1.0), r"eps.*-1\.0"),
    (lambda: Q.Block1D(E2M1), r"Block1D\.fmt must be one of E4M3, E5M2, got E2M1"),
    (lambda: Q.Block1D(scale="e8m0"), r"Block1D\.scale must be one of 'pow2', 'fp32', got 'e8m0'"),
    (lambda: Q.Block1D(eps=-1.0), r"eps.*-1\.0"),
    (lambda: Q.Block2D(scale=None), r"Block2D\.scale must be one of 'pow2', 'fp32', got None"),
    (lambda: Q.MX(E2M1), r"MX\.fmt must be one of E4M3, E5M2, got E2M1"),
    (lambda: Q.MX(rounding="nearest"), r"MX\.rounding must be one of 'rceil', 'floor', 'ceil', 'even', got 'nearest'"),
    (lambda: Q.MX(square="yes"), r"MX\.square must be one of False, True, got 'yes'"),
    (lambda: Q.NVFP4(rht=1), r"NVFP4\.rht must be one of False, True, got 1"),
    (lambda: Q.NVFP4(square=True, rht=True), r"same both ways.*rht=True.*Use square=False"),
    (lambda: Q.NVFP4(square=True, stochastic=True), r"same both ways.*stochastic=True.*Use square=False"),
]


@pytest.mark.parametrize(("make", "message"), BAD_SETTINGS, ids=[message for _, message in BAD_SETTINGS])
def test_a_setting_without_meaning_is_refused(make, message):
    with pytest.raises(UnsupportedConfig, match=message):
        make()


def test_refusals_are_also_the_builtin_exceptions():
    for call, builtin in (
        (lambda: Q.MX().quantize(torch.zeros(4, 40, dtype=torch.int32)), TypeError),
        (lambda: Q.MX().quantize(torch.zeros(4, 40), axis=5), ValueError),
        (lambda: Q.MX(rounding="x"), ValueError),
    ):
        with pytest.raises(builtin) as error:
            call()
        assert isinstance(error.value, Unsupported)


# -- what would otherwise be ignored, or leak -------------------------------------------------------------------------


def test_a_multiplier_and_an_amax_together_are_refused():
    x, spec = randn(4, 40), Q.Tensorwise()
    with pytest.raises(UnsupportedConfig, match=r"inverse_scale= is given, and amax=.*Give one"):
        spec.quantize(x, inverse_scale=torch.ones(1), amax=spec.amax(x))


def test_one_reduced_amax_for_both_orientations_stays_one(monkeypatch):
    """As a collective leaves it. Two tensors would cost the cast a second read of x."""
    seen = []
    monkeypatch.setattr(tensorwise_reference, "cast", lambda x, row, column, given: seen.append(given.amax))
    x, spec = randn(4, 40), Q.Tensorwise()
    amax = spec.amax_both(x)
    amax[0].mul_(2)
    spec.quantize_both(x, amax=amax)
    spec.quantize_both(x, amax=(amax[0], amax[0].clone()))
    assert seen[0][0] is seen[0][1]
    assert seen[1][0] is not seen[1][1]


def test_amax_of_two_schemes_at_once_is_refused():
    with pytest.raises(UnsupportedConfig, match="cannot share one read of x"):
        Q.Tensorwise().amax_both(randn(4, 40), column=Q.Rowwise())


@every
def test_a_reduced_amax_reaches_a_cast_in_place(spec):
    """A collective may sit between the amax and the refresh of a cached weight."""
    x, seed = randn(20, 40), seed_for(spec)
    amax = tuple(2 * a for a in spec.amax_both(x))
    want = spec.quantize_both(x, amax=amax, seed=seed)
    pair = spec.quantize_both(x, seed=seed)
    spec.quantize_into(pair, x, amax=amax, seed=seed)
    row = spec.quantize(x, seed=seed)
    spec.quantize_into(row, x, amax=amax[0], seed=seed)
    for got, expected in ((pair[0], want[0]), (pair[1], want[1]), (row, want[0])):
        assert_same(got, expected)


def test_a_multiplier_that_requires_grad_leaves_no_graph():
    q = Q.Tensorwise().quantize(randn(4, 40), inverse_scale=torch.ones(1, requires_grad=True))
    assert not q.scale.requires_grad


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8], ids=str)
def test_decoding_into_another_dtype_is_refused(dtype):
    with pytest.raises(UnsupportedDtype, match=f"dequantize gives float32, bfloat16 or float16, got {dtype}"):
        Q.MX().quantize(randn(4, 40)).dequantize(dtype)


@pytest.mark.parametrize("spec", [Q.NVFP4(), Q.NVFP4(square=True)], ids=str)
def test_padding_of_packed_codes_is_zero_even_beside_a_nan(spec):
    x = randn(20, 40)
    x[3, 39] = float("nan")
    q = spec.quantize(x)
    assert (unpack_nibbles(q.codes)[:, 40:] == 0).all()
    if spec.square:
        assert torch.equal(q.transpose().codes, spec.quantize(x, axis=0).codes)


# ------------------------------------------------------------------------------------------------- QTensors as values


@pytest.mark.parametrize("spec", [Q.Tensorwise(), Q.Rowwise(), Q.Block1D(), Q.MX(), Q.NVFP4()], ids=str)
def test_rows_can_be_sliced_as_views(spec):
    q = spec.quantize(randn(12, 64))
    part = q[3:7]
    assert tuple(part.shape) == (4, 64)
    assert torch.equal(part.dequantize(), q.dequantize()[3:7])
    assert part.codes.untyped_storage().data_ptr() == q.codes.untyped_storage().data_ptr()


def test_a_slice_that_cuts_a_block_is_refused_with_the_way_out():
    q = Q.Block2D().quantize(randn(300, 256))
    assert torch.equal(q[128:300].dequantize(), q.dequantize()[128:])
    with pytest.raises(UnsupportedShape, match=r"cuts blocks of 128 rows.*multiples of 128"):
        q[100:300]
    for index in (3, slice(0, 8, 2), (slice(0, 2), slice(0, 2))):
        with pytest.raises(UnsupportedShape, match="range of rows"):
            q[index]


def test_a_qtensor_is_a_tree_of_tensors_and_is_not_pickled():
    q = Q.NVFP4().quantize(randn(12, 64))
    leaves, tree = torch.utils._pytree.tree_flatten(q)
    again = torch.utils._pytree.tree_unflatten(leaves, tree)
    assert (again.spec, again.shape, again.dtype) == (q.spec, q.shape, q.dtype)
    assert torch.equal(again.dequantize(), q.dequantize())
    with pytest.raises(TypeError, match="save its tensors"):
        pickle.dumps(q)
    copied = copy.deepcopy(q)
    copied.codes.zero_()
    assert not torch.equal(copied.codes, q.codes)


def test_a_qtensor_cannot_be_changed():
    q = Q.Tensorwise().quantize(randn(4, 16))
    with pytest.raises(dataclasses.FrozenInstanceError):
        q.codes = q.codes


@pytest.mark.parametrize("spec", [Q.Tensorwise(), Q.Block1D(), Q.MX(), Q.NVFP4()], ids=str)
def test_a_qtensor_assembled_from_plain_bytes_is_the_same(spec):
    q = spec.quantize(randn(12, 70))
    codes, *rest = q.tensors()
    again = spec.assemble([codes.view(torch.uint8), *rest], q.shape, q.dtype)
    assert torch.equal(again.dequantize(), q.dequantize())


def test_a_class_defined_again_runs_as_it_is_now():
    """As in a notebook: the name is the same, and so is the key."""

    def define(factor):
        class Redefined(Q.Tensorwise):
            __qualname__ = "Redefined"
            package = "octavo.quant.tensorwise"

            def _fill(self, x, pair, cast_args):
                super()._fill(x * factor, pair, cast_args)

        return register("tests-redefined")(Redefined)

    x = torch.full((4, 16), 3.0)
    for factor in (1.0, 2.0):
        kind = define(factor)
        q = kind().quantize(x)
        assert type(q.spec) is kind and q.dequantize()[0, 0] == 3 * factor


@pytest.mark.parametrize("spec", DETERMINISTIC, ids=str)
def test_a_pickle_has_no_number_of_its_process(spec):
    """Numbers follow the order in which a process makes quantizers, which another one makes in another order."""
    pickled = pickle.dumps(spec)
    assert b"number" not in pickled
    for made in (pickle.loads(pickled), copy.deepcopy(spec)):
        assert made == spec and made.number == spec.number and KNOWN[made.number] == spec
