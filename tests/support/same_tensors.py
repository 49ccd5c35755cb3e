"""When two QTensors, or groups of them, are the same, byte by byte; poison for them; what a compiler relies on."""

import torch

from octavo.quant import GroupedTensor


def bytes_of(q):
    return [(t.view(torch.uint8) if t.element_size() == 1 else t).numpy().tobytes() for t in q.tensors()]


def assert_same(a, b):
    assert a.codes.shape == b.codes.shape
    assert a.scale.shape == b.scale.shape
    assert bytes_of(a) == bytes_of(b)


def facts(tensor):
    """Shape, strides, dtype and device. The stride of a dim of size one, or of nothing at all, addresses nothing."""
    strides = tuple(s for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1) if tensor.numel() else ()
    return tuple(tensor.shape), strides, tensor.dtype, tensor.device


def raw(t: torch.Tensor) -> torch.Tensor:
    """Bytes in logical order, on the CPU: as bytes, NaN is equal to itself."""
    t = t.view(torch.uint8) if t.element_size() == 1 else t
    return torch.empty(t.numel(), dtype=t.dtype).copy_(t.reshape(-1)).view(torch.uint8)


def used(q: GroupedTensor) -> list[torch.Tensor]:
    """The codes of all blocks in use, nobody's included, and every group's own scales."""
    rows = 128 * int(q.groups.block[-1])
    codes = q.q.codes[:rows] if q.orientation == "row" else q.q.codes[:, : rows // q.q.spec.fmt.packed]
    return [raw(codes), *[raw(t) for m in q.members() for t in list(m.tensors())[1:]]]


def assert_same_used(a: GroupedTensor, b: GroupedTensor, what: object = "") -> None:
    assert a.orientation == b.orientation
    for i, (x, y) in enumerate(zip(used(a), used(b), strict=True)):
        name = f"scale {i - 1}" if i else "codes"
        assert torch.equal(x, y), f"{what} {a.orientation} {name}: {(x != y).sum()} of {y.numel()} bytes differ"


def assert_exact(found, want):
    assert found.dtype == want.dtype
    assert found.shape == want.shape
    assert torch.equal(found, want), f"{(found != want).sum()} of {found.numel()} differ"


def poison(q):
    """Fills all memory of all tensors, also what no element is in, with 0xA5; returns q."""
    for t in q.tensors():
        t.as_strided((t.untyped_storage().nbytes() // t.element_size(),), (1,)).view(torch.uint8).fill_(0xA5)
    return q
