"""One training step: a batch, forward and backward, a stand-in for an optimizer; and what two steps leave, compared."""

import torch

import octavo
from tests.support.linear_oracle import assert_same, spiky


def batch(i=0, m=21, k=48, n=40, *, dtype=torch.float32, seeds=(10, 20)):
    """x [m, k] and dy [m, n] that no other i has, signed, with outliers."""
    x_seed, dy_seed = seeds
    return spiky(m, k, seed=x_seed + i, dtype=dtype), spiky(m, n, seed=dy_seed + i, dtype=dtype)


def step(model, inputs, dys, *, call=None, frozen=(), **given):
    """One step that starts without gradients: outputs, then gradients of the inputs, then of the parameters.

    `frozen`: inputs, by position, that want no gradient. A dy that is None is left out."""
    inputs, dys = ([t] if isinstance(t, torch.Tensor) else list(t) for t in (inputs, dys))
    leaves = [
        t.detach().clone().requires_grad_(i not in frozen and t.is_floating_point()) for i, t in enumerate(inputs)
    ]
    model.zero_grad()
    y = (model if call is None else call)(*leaves, **given)
    outputs = y if isinstance(y, tuple) else (y,)
    found = [t.detach().clone() for t in outputs]
    pairs = [(t, dy) for t, dy in zip(outputs, dys, strict=True) if dy is not None]
    torch.autograd.backward([t for t, _ in pairs], [dy for _, dy in pairs])
    return [*found, *(t.grad for t in leaves), *(p.grad for p in model.parameters())]


def update(model):
    """A stand-in for an optimizer, and what follows it."""
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p.sub_(p.grad * 0.01)
    octavo.step(model)


def compiled(call, backend="aot_eager", **settings):
    """One graph, or an error."""
    return torch.compile(call, fullgraph=True, backend=backend, **settings)


def compiled_anew(call, backend="aot_eager"):
    """The same, after all other graphs are forgotten."""
    torch.compiler.reset()
    return compiled(call, backend)


# -- comparisons -------------------------------------------------------------------------------------------------------


def assert_equal(found, want, what=""):
    """Lists of tensors, bit by bit; NaN equals NaN."""
    for i, (a, b) in enumerate(zip(found, want, strict=True)):
        assert_same(a, b, f"{what} {i}")


def assert_state(a, b):
    """What recipes remember: windows and scales of delayed scaling, counters of stochastic rounding."""
    want = octavo.state_dict(b)
    assert octavo.state_dict(a).keys() == want.keys()
    for key, value in octavo.state_dict(a).items():
        assert_same(value, want[key], key)


def relative_error(found, want):
    """In the Frobenius norm, in float64."""
    found, want = found.double(), want.double()
    return ((found - want).norm() / want.norm()).item()
