"""A GroupedTensor as a value: its gradient, both orientations, shared memory, its node, and what torch refuses."""

import copy

import pytest
import torch
import torch.nn.functional as F

from octavo._torch.fakes import FakeTensorMode
from octavo.errors import UnsupportedConfig, UnsupportedShape
from octavo.quant import MX, NVFP4, Block1D, Block2D, GroupedTensor, Rowwise, Tensorwise
from octavo.quant.grouped import fill_groups, grouped_proto, restore
from octavo.quant.groups import BLOCK, abstract, blocks_for, split
from tests.support.ragged_groups import laid_out
from tests.support.same_tensors import assert_same

SPECS = [Tensorwise(), Rowwise(), Block1D(), Block2D(), MX(), MX(square=True), NVFP4()]
PAIRS = [(Tensorwise(), None), (Block1D(), Block1D()), (MX(), None), (NVFP4(), NVFP4(rht=True))]
SIZES, ROWS, USED = (65, 0, 130), 200, 195
specs = pytest.mark.parametrize("spec", SPECS, ids=str)
pairs = pytest.mark.parametrize(("spec", "column"), PAIRS, ids=str)
SOURCE = torch.tensor([3, 0, 3, -1, 7, 99, 1, 1, 2], dtype=torch.int32)

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def rows(columns: int = 48, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(ROWS, columns, generator=torch.Generator().manual_seed(1)).to(dtype)


def sizes(*of: int) -> torch.Tensor:
    return torch.tensor(of or SIZES)


def raw(t: torch.Tensor) -> torch.Tensor:
    """Bytes in logical order."""
    return torch.empty(t.numel(), dtype=t.dtype).copy_(t.flatten()).view(torch.uint8)


# -- the gradient ------------------------------------------------------------------------------------------------------


@pairs
def test_the_gradient_of_the_values_is_that_of_the_rows_and_none_of_the_tail(spec, column):
    x, dy = rows().requires_grad_(), rows()
    q = spec.quantize_groups(x, sizes(), column=column)
    assert q.requires_grad and q.anchor.untyped_storage().nbytes() == q.anchor.element_size()
    q.dequantize().backward(dy)
    assert torch.equal(x.grad[:USED], dy[:USED]) and not x.grad[USED:].any()


@pytest.mark.parametrize(
    ("spec", "column", "gathered"),
    [(Tensorwise(), None, False), (NVFP4(), NVFP4(rht=True), False), (Block1D(), Block1D(), True)],
    ids=str,
)
def test_a_graph_has_the_bits_and_the_gradient_of_eager_mode(spec, column, gathered):
    source, splits = (SOURCE, sizes(4, 3)) if gathered else (None, sizes())

    def run(x):
        q = spec.quantize_groups(x, splits, source=source, column=column)
        return q.dequantize(), q

    found = []
    for call in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        x = rows()[:10].clone().requires_grad_() if gathered else rows().requires_grad_()
        values, q = call(x)
        values.backward(torch.ones_like(values))
        assert q.requires_grad and isinstance(q, GroupedTensor)
        found.append([values.detach(), x.grad, *(t for m in q.detach().members() for t in m.tensors())])
    for eager, compiled in zip(*found, strict=True):
        assert torch.equal(raw(eager), raw(compiled))


def test_a_graph_follows_the_number_of_rows():
    spec = Block1D()
    run = torch.compile(
        lambda x, s: spec.quantize_groups(x, s).dequantize(), fullgraph=True, backend="aot_eager", dynamic=True
    )
    for count in (200, 300, 7):
        x = torch.randn(count, 48)
        assert torch.equal(run(x, sizes(3, 2)), spec.quantize_groups(x, sizes(3, 2)).dequantize())


def test_rows_that_were_copied_add_their_gradients():
    x, dy = torch.randn(8, 16, requires_grad=True), torch.randn(9, 16)
    q = Tensorwise().quantize_groups(x, sizes(4, 3), source=SOURCE)
    q.dequantize().backward(dy)
    want = torch.zeros(8, 16)
    for row, token in enumerate(SOURCE.tolist()[:7]):
        if 0 <= token < 8:
            want[token] += dy[row]
    assert torch.equal(x.grad, want)


def test_members_carry_the_gradient_of_their_rows():
    x, dy = rows().requires_grad_(), rows()
    second = Block1D().quantize_groups(x, sizes()).members()[2]
    second.dequantize().backward(dy[65:USED])
    assert torch.equal(x.grad[65:USED], dy[65:USED])
    assert not x.grad[:65].any() and not x.grad[USED:].any()


def test_without_a_need_there_is_no_gradient():
    x = rows().requires_grad_()
    with torch.no_grad():
        assert not Block1D().quantize_groups(x, sizes()).requires_grad
    q = Block1D().quantize_groups(x, sizes())
    assert not Block1D().quantize_groups(x.detach(), sizes()).requires_grad
    assert not q.detach().requires_grad and not q.detach().dequantize().requires_grad
    assert not copy.deepcopy(q).requires_grad and copy.copy(q).requires_grad


# -- both orientations -------------------------------------------------------------------------------------------------


@specs
def test_columns_beside_rows_are_those_of_a_cast_of_their_own(spec):
    x = rows()
    both = spec.quantize_groups(x, sizes(), column=spec)
    for q, orientation, axis in ((both.q, "row", -1), (both.columns, "column", 0)):
        alone = spec.quantize_groups(x, sizes(), axis)
        for a, b in zip(GroupedTensor(q, both.groups, orientation).members(), alone.members(), strict=True):
            assert_same(a, b)


def test_columns_beside_columns_are_refused():
    with pytest.raises(UnsupportedConfig, match="axis=0"):
        Block1D().quantize_groups(rows(), sizes(), 0, column=Block1D())


# -- shapes and sizes --------------------------------------------------------------------------------------------------


@specs
@pytest.mark.parametrize("of", [(50, 50, 50, 50), (64, 96, 40), (0, 0, 200), (0,), (200,)], ids=str)
def test_equal_and_varying_groups_dequantize_to_what_each_dequantizes_to(spec, of):
    x = rows()
    values, at = spec.quantize_groups(x, sizes(*of)).dequantize(), 0
    for size in of:
        assert torch.equal(values[at : at + size], spec.quantize(x[at : at + size]).dequantize())
        at += size
    assert not values[at:].any()


@pytest.mark.parametrize(
    "splits",
    [sizes().int(), torch.tensor([SIZES, SIZES]).T[:, 0], torch.tensor([0, *SIZES])[1:], sizes().flip(0).flip(0)],
    ids=["int32", "strided", "offset", "copied"],
)
def test_sizes_of_either_integer_and_any_strides(splits):
    want = Block1D().quantize_groups(rows(), sizes())
    found = Block1D().quantize_groups(rows(), splits)
    assert all(torch.equal(a, b) for a, b in zip(want.groups.tensors(), found.groups.tensors(), strict=True))
    assert torch.equal(found.dequantize(), want.dequantize())


def test_places_of_more_elements_than_32_bits_count():
    """Rows are counted in 32 bits, and elements in 64: 600,000 rows of 7168 are 4.3e9 elements."""
    count, k, number = 600_000, 7168, 16
    groups = split(torch.tensor([count // 2, 0, count // 2 - 9]), count)
    assert groups.start.tolist() == [0, count // 2, count // 2, count - 9]
    last = int(groups.block[-2])
    assert int(groups.source[last]) == count // 2 and last == -(-count // 2 // BLOCK)
    assert int(groups.source[int(groups.block[-1]) - 1]) < count - 9
    padded = abstract(count, number, torch.device("meta"))[2].shape[0] * BLOCK
    assert padded == blocks_for(count, number) * BLOCK and padded * k > 2**32
    for spec in SPECS:
        for side in ("row", "column"):
            q = grouped_proto(spec, padded, number, k, side, torch.bfloat16, torch.device("meta")).empty()
            assert q.codes.numel() * spec.fmt.packed == padded * k
            whole = q.codes.untyped_storage().nbytes()
            assert whole == q.codes.numel() * q.codes.element_size() > 2**31


def test_sizes_that_no_32_bits_hold_are_cut_off():
    groups = laid_out(torch.tensor([2**40, 5]), 300)
    assert groups.start.tolist() == [0, 300, 300]
    with pytest.raises(UnsupportedShape, match="32 bits"):
        split(torch.tensor([1]), 2**31)


# -- shared memory -----------------------------------------------------------------------------------------------------


@specs
@pytest.mark.parametrize("axis", [-1, 0])
def test_a_member_that_is_quantized_again_changes_the_whole(spec, axis):
    x, other = rows(256), rows(256).flip(0)
    q = spec.quantize_groups(x, sizes(), axis)
    before, member = q.dequantize(), q.members()[2]
    spec.quantize_into(member, other[65:USED], axis=axis)
    found = q.dequantize()
    assert torch.equal(found[:65], before[:65])
    want = spec.quantize(other[65:USED], axis)
    assert_same(member, want)
    assert torch.equal(found[65:USED], want.dequantize() if axis else want.dequantize().T)
    spec.quantize_into(member, x[65:USED], torch.ones(1), axis=axis)  # skipped
    assert torch.equal(q.dequantize(), found)


@pairs
def test_the_whole_that_is_quantized_again_changes_its_members_and_copies(spec, column):
    x, other = rows(), rows().flip(0)
    q = spec.quantize_groups(x, sizes(), column=column)
    members, shared, detached, deep = q.members(), copy.copy(q), q.detach(), copy.deepcopy(q)
    before = q.dequantize()
    spec.quantize_into(q, other, torch.ones(1))
    assert torch.equal(q.dequantize(), before)
    spec.quantize_into(q, other)
    want = spec.quantize_groups(other, sizes(), column=column)
    for a, b in zip(members, want.members(), strict=True):
        assert_same(a, b)
    for each in (q, shared, detached):
        assert torch.equal(each.dequantize(), want.dequantize())
    assert torch.equal(deep.dequantize(), before)
    if column is not None:
        fresh = GroupedTensor(want.columns, want.groups, "column")
        assert torch.equal(GroupedTensor(q.columns, q.groups, "column").dequantize(), fresh.dequantize())


def test_what_does_not_fit_is_not_written_into():
    q = Block1D().quantize_groups(rows(), sizes())
    with pytest.raises(UnsupportedShape, match="block-1d made"):
        MX().quantize_into(q, rows())
    with pytest.raises(UnsupportedConfig, match="Leave out amax and inverse_scale"):
        Tensorwise().quantize_into(Tensorwise().quantize_groups(rows(), sizes()), rows(), inverse_scale=torch.ones(1))
    with pytest.raises(UnsupportedConfig, match="got Tensor"):
        Block1D().quantize_into(rows(), rows())
    for wrong in (rows()[:100], rows(64)):
        with pytest.raises(UnsupportedShape):
            Block1D().quantize_into(q, wrong)


# -- torch -------------------------------------------------------------------------------------------------------------


def test_functions_of_torch_say_what_to_call_instead():
    q = Block1D().quantize_groups(rows(), sizes())
    calls = {
        "reshape": lambda: torch.reshape(q, (-1,)), "transpose": lambda: torch.transpose(q, 0, 1),
        "cat": lambda: torch.cat((q, q)), "mm": lambda: torch.mm(rows(), q), "linear": lambda: F.linear(q, rows()),
    }  # fmt: skip
    for name, call in calls.items():
        with pytest.raises(TypeError, match=rf"{name}.*does not take a GroupedTensor.*dequantize"):
            call()


@pytest.mark.parametrize(("spec", "column"), PAIRS[::3], ids=str)
def test_saved_for_backward_in_eager_mode_and_in_a_graph(spec, column):
    class Through(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            tensors, ctx.settings = spec.quantize_groups(x, sizes(), column=column).save()
            ctx.save_for_backward(*tensors)
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            return dy * restore(ctx.saved_tensors, ctx.settings).dequantize(dy.dtype)

    want = spec.quantize_groups(rows(), sizes()).dequantize()
    for call in (Through.apply, torch.compile(Through.apply, fullgraph=True, backend="aot_eager")):
        x = rows().requires_grad_()
        call(x).sum().backward()
        assert torch.equal(x.grad, want)


def test_fakes_have_the_shapes_of_real_ones():
    real = Block1D().quantize_groups(rows(), sizes(), column=Block1D())
    with FakeTensorMode() as mode:
        fake = Block1D().quantize_groups(mode.from_tensor(rows()), mode.from_tensor(sizes()), column=Block1D())
        values = fake.dequantize()
    assert [t.shape for t in fake.tensors()] == [t.shape for t in real.tensors()]
    assert [t.stride() for t in fake.tensors()] == [t.stride() for t in real.tensors()]
    assert values.shape == (ROWS, 48)


@pairs
def test_save_and_restore_keep_both_orientations(spec, column):
    q = spec.quantize_groups(rows(), sizes(), column=column)
    back = restore(*q.save())
    assert all(a is b for a, b in zip(back.tensors(), q.tensors(), strict=True))
    assert (back.shape, back.dtype, back.device, repr(back)) == (q.shape, q.dtype, q.device, repr(q))
    fill_groups(rows(), (back.detach(), None))
    assert torch.equal(back.dequantize(), q.dequantize())


def test_the_node_keeps_what_it_declares():
    arguments = (rows().float().requires_grad_(), sizes(), None, None, "block-1d", "nv")
    assert set(torch.library.opcheck(torch.ops.octavo.quantize_groups.default, arguments).values()) == {"SUCCESS"}
