"""A Linear in one process, and the same layer split over ranks: the parts that each rank has, and what it computes."""

from functools import cache

import torch
from torch.distributed.device_mesh import DeviceMesh

import octavo
from octavo.errors import Unsupported

M, K, N = 512, 512, 512  # of 4 ranks, each has a whole block of 128 of any of them


def tensors(dtype=torch.bfloat16, outlier=False, tokens=M, seed=0):
    """x [M, K], dy [M, N], w [N, K] and a bias. An outlier is in the last token and the last feature."""
    g = torch.Generator().manual_seed(seed)
    x, dy = (torch.randn(tokens, n, generator=g) for n in (K, N))
    w, b = torch.randn(N, K, generator=g) / K**0.5, torch.randn(N, generator=g)
    if outlier and tokens:
        x[-1, -1], w[-1, -1] = 300.0, 3.0
    return x.to(dtype), dy.to(dtype), w.to(dtype), b.to(dtype)


def steps(layer, call, x, dy, number, group=None):
    """y, dx, dw and db of the last of several steps."""
    for _ in range(number):
        layer.weight.grad = None
        if layer.bias is not None:
            layer.bias.grad = None
        leaf = x.clone().requires_grad_()
        y = call(leaf)
        y.backward(dy)
        octavo.step(layer, group)
    return [t.detach().clone() for t in (y, leaf.grad, layer.weight.grad, layer.bias.grad)]


def loaded(layer, w, b):
    with torch.no_grad():
        layer.weight.copy_(w)
        layer.bias.copy_(b)
    return layer


@cache
def alone(recipe, number=1, **options):
    """The whole layer in one process."""
    torch.manual_seed(0)
    x, dy, w, b = tensors(**options)
    layer = loaded(octavo.Linear(K, N, dtype=x.dtype, recipe=recipe), w, b)
    return steps(layer, layer, x, dy, number)


def cut(tensor, group, dim):
    return tensor.chunk(group.size(), dim)[group.rank()]


def split(group, recipe, mode, sequence, compiled, number=1, options=None, **settings):
    """This rank's layer of the same: its y, dx, dw and db."""
    x, dy, w, b = tensors(**(options or {}))
    layer = octavo.Linear(
        K, N, dtype=x.dtype, recipe=recipe, parallel_mode=mode, sequence_parallel=sequence, tp_group=group, **settings
    )
    column = mode == "column"
    loaded(layer, cut(w, group, 0 if column else 1), cut(b, group, 0) if column else b)
    x, dy = (x, cut(dy, group, 1)) if column else (cut(x, group, 1), dy)
    if sequence:
        x, dy = (cut(x, group, 0), dy) if column else (x, cut(dy, group, 0))
    call = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    return steps(layer, call, x.contiguous(), dy.contiguous(), number, group)


def whole(found, mode, sequence):
    """All ranks' parts put together: y, dx, dw and db. What ranks have in common must be the same on all of them."""
    column = mode == "column"
    y, dx, dw, db = zip(*found, strict=True)
    join_y = _cat(y, 1) if column else (_cat(y, 0) if sequence else _same(y))
    join_dx = (_cat(dx, 0) if sequence else _same(dx)) if column else _cat(dx, 1)
    return [join_y, join_dx, _cat(dw, 0 if column else 1), _cat(db, 0) if column else _same(db)]


def _cat(parts, dim):
    return torch.cat(parts, dim)


def _same(parts):
    assert all(torch.equal(part, parts[0]) for part in parts)
    return parts[0]


def steps_of(recipe):
    """How many steps a comparison takes: delayed scaling measures in the first."""
    return 2 if recipe == "fp8-delayed" else 1


def mesh_of(group):
    return DeviceMesh.from_group(group, "cpu")


def message(call, *arguments):
    """The sentence that a rank refuses a call with."""
    try:
        call(*arguments)
    except Unsupported as found:
        return str(found)
    return "was not refused"


def joined(parts, blocks, dim):
    """The whole of a parameter whose blocks are split each by itself."""
    rows = [part.chunk(blocks, dim) for part in parts]
    return torch.cat([torch.cat([own[b] for own in rows], dim) for b in range(blocks)], dim)
