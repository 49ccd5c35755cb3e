"""When two QTensors are the same: every byte they hold, in logical order."""

import torch


def bytes_of(q):
    return [(t.view(torch.uint8) if t.element_size() == 1 else t).numpy().tobytes() for t in q.tensors()]


def assert_same(a, b):
    assert a.codes.shape == b.codes.shape
    assert a.scale.shape == b.scale.shape
    assert bytes_of(a) == bytes_of(b)
