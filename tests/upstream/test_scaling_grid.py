"""Delayed scaling over windows, algorithms, margins and formats: each scale is the range of its format over an amax of
the window, as a formula in float64 has it."""

from collections import deque

import torch

import octavo
from tests.support.pairs import pairs
from tests.support.steps import step

STEPS = 5
RANGES = {"E4M3": 448.0, "E5M2": 57344.0}


def amaxes_of(layer, x, dy):
    return {"x": x.abs().max(), "w": layer.weight.detach().abs().max(), "dy": dy.abs().max()}


@pairs(
    history=(1, 2, 8), algorithm=("max", "most_recent"), margin=(0, 2, -1), grad_format=tuple(RANGES),
    microbatches=(1, 3), grouped=(False, True),
)  # fmt: skip
def test_scales_after_each_step(history, algorithm, margin, grad_format, microbatches, grouped):
    settings = f"history={history},algorithm={algorithm!r},margin={margin},grad_format={grad_format}"
    recipe = f"fp8-delayed({settings})"
    layer = octavo.GroupedLinear(1, 32, 16, recipe=recipe) if grouped else octavo.Linear(32, 16, recipe=recipe)
    given = {"m_splits": torch.tensor([8])} if grouped else {}
    generator = torch.Generator().manual_seed(history)
    windows = {name: deque(maxlen=history) for name in ("x", "w", "dy")}
    for _ in range(STEPS):
        seen = []
        for _ in range(microbatches):
            x, dy = (torch.randn(8, n, generator=generator) * 10 ** float(torch.randn((), generator=generator))
                     for n in (32, 16))  # fmt: skip
            step(layer, x, dy, **given)
            seen.append(amaxes_of(layer, x, dy))
        octavo.step(layer)
        for name, window in windows.items():
            window.append(max(float(amaxes[name]) for amaxes in seen))
        with torch.no_grad():
            layer.weight.mul_(1.5)
        state = octavo.state_dict(layer)
        found = [*state["scaling.forward.encode"].tolist(), *state["scaling.backward.encode"].tolist()]
        ranges = {"x": RANGES["E4M3"], "w": RANGES["E4M3"], "dy": RANGES[grad_format]}
        for name, scale in zip(("x", "w", "dy"), found, strict=True):
            amax = max(windows[name]) if algorithm == "max" else windows[name][-1]
            want = ranges[name] / amax / 2.0**margin
            assert abs(scale - want) <= 1e-6 * want, (name, scale, want)
