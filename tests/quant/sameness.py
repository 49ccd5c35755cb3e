"""When two QTensors are the same, byte by byte in logical order, and what a compiler relies on in a tensor."""

import torch


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
