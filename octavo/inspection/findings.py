"""Faults that an inspection's numbers show, as sentences: the layer, the tensor, the number, what to do."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from octavo.inspection.heat import spoken
from octavo.inspection.tensor_rows import LayerState, TensorRow
from octavo.text import one_line

# limits for formats of 4 and of 8 bits: a healthy layer with bell-shaped values stays well within them
UNDERFLOW = {4: 0.5, 8: 0.2}  # the share of values that become zero
SQNR = {4: 8.0, 8: 15.0}  # dB: nvfp4 has about 20, E5M2 25, E4M3 31
COSINE = {4: 0.85, 8: 0.95}  # with the float32 reference's
SATURATED = 0.001  # the share of values beyond the largest code
LATE = 2  # updates of a weight without a step of delayed scaling

OPERANDS = {"y": ("x", "w"), "dx": ("dy", "w"), "dw": ("x", "dy")}  # of each result
NOT_FINITE = {
    "x": "Look at the model's input, and at the layers before this one.",
    "y": "Its values or its weight are too large for the dtype.",
}

TRY = "report.try_recipes(batches) tries other recipes, and measures which one helps."

Rows = Mapping[str, TensorRow]  # of one layer, by tensor


class Finding(NamedTuple):
    """A fault of a layer, in words; with the tensor and the number if another recipe may improve that, and then how to
    find one."""

    layer: str
    text: str
    tensor: str = ""
    number: str = ""
    way: str = ""

    def __str__(self) -> str:
        return f"{self.without_way()} {self.way}".rstrip()

    def without_way(self) -> str:
        """Return the sentences for a report that has the advice."""
        return f"{one_line(self.layer) or '(model)'}: {self.text}"


def verdict(rows: Sequence[TensorRow]) -> str:
    """Return the sentence of a report without findings."""
    if any(row.calls for row in rows):
        return "Nothing stands out."
    return "Nothing was measured: no layer ran in the block."


def findings(states: Mapping[str, LayerState], rows: Sequence[TensorRow]) -> list[Finding]:
    """Return the faults of all layers, in the order of the model."""
    by_layer: dict[str, dict[str, TensorRow]] = {path: {} for path in states}
    for row in rows:
        by_layer[row.layer][row.tensor] = row
    ran = any(_calls(own, "y") for own in by_layer.values())
    trained = any(_calls(own, "dy") for own in by_layer.values())
    found = []
    for path, own in by_layer.items():
        found += _of_layer(path, states[path], own, ran, trained)
    return found


def _of_layer(path: str, state: LayerState, rows: Rows, ran: bool, trained: bool) -> list[Finding]:
    found = [Finding(path, text) for text in _of_calls(state, rows, ran, trained)]
    if _calls(rows, "y"):
        for row in rows.values():
            found += [Finding(path, f"{row.tensor} {text}") for text in _not_finite(row, rows)]
            for text, name in _of_tensor(state, row):
                tries = bool(name) and not (name == "saturated" and _late(state))
                found.append(Finding(path, f"{row.tensor} {text}", row.tensor, name, TRY if tries else ""))
    return found


def _of_calls(state: LayerState, rows: Rows, ran: bool, trained: bool) -> list[str]:
    if not _calls(rows, "y"):
        if not ran:
            return []
        return [
            "it was never called in the block. If the model uses its weight without calling it, or a CUDA graph or a "
            "compiled function from before the block runs it, nothing can be seen: call it, or enter the block first."
        ]
    found = []
    if trained and not _calls(rows, "dy"):
        found.append(
            f"no gradient reached it in {rows['y'].calls} calls, while other layers had one: its output is not used, "
            "or detached. Look where its output goes."
        )
    if _late(state):
        found.append(
            f"its weight was updated {state.updates} times and its delayed scales never, so they are out of date. Call "
            "octavo.step(model) after each optimizer.step(), or octavo.attach(model, optimizer) once."
        )
    return found


def _late(state: LayerState) -> bool:
    return state.recipe.stateful and state.updates >= LATE


def _not_finite(row: TensorRow, rows: Rows) -> list[str]:
    """Return the sentence for Inf and NaN in a tensor. A result whose operand has some is not the cause: the operand
    has the sentence."""
    if row.nonfinite == 0 or any(name in rows and rows[name].nonfinite > 0 for name in OPERANDS.get(row.tensor, ())):
        return []
    way = NOT_FINITE.get(row.tensor, "Look at this layer and those after it.")
    return [f"has Inf or NaN in {spoken(row.nonfinite, 'nonfinite')} of its values. {way}"]


def _of_tensor(state: LayerState, row: TensorRow) -> list[tuple[str, str]]:
    """Return what is wrong with a tensor, with the number that another recipe may improve, or ""."""
    found = []
    if row.tensor == "dy" and row.zero == 1:
        text = (
            f"is zero in {row.calls} of {row.calls} calls, so neither this layer nor those before it learn from it. "
            "Look for a detached loss, a mask or a factor of zero after this layer."
        )
        found.append((text, ""))
    spec = state.quantizer(row.tensor)
    if spec is not None and row.underflow is not None and row.saturated is not None:
        found += _of_cast(state, row, spec.fmt.bits)
    limit = COSINE.get(state.bits)
    if limit is not None and row.cosine is not None and row.cosine < limit:
        text = (
            f"has a cosine of {row.cosine:.3f} with the float32 reference's, below {limit}. If no recipe "
            f"helps, leave this GEMM unquantized: {_gemm(row.tensor)}='bf16' in the recipe."
        )
        found.append((text, "cosine"))
    return found


def _of_cast(state: LayerState, row: TensorRow, bits: int) -> list[tuple[str, str]]:
    assert row.underflow is not None and row.saturated is not None
    stale = (
        " Its scale is delayed: it comes from earlier steps, if octavo.step(model) runs."
        if state.recipe.stateful
        else ""
    )
    found = []
    if row.saturated > SATURATED:
        share = spoken(row.saturated, "saturated")
        found.append(
            (f"saturates: {share} of its values are beyond the largest code of its scale.{stale}", "saturated")
        )
    if row.underflow > UNDERFLOW[bits]:
        share = spoken(row.underflow, "underflow")
        found.append((f"underflows: {share} of its values become zero (amax {row.amax:.3g}).{stale}", "underflow"))
    if not found and row.sqnr is not None and row.sqnr < SQNR[bits]:
        text = (
            f"has a signal-to-noise ratio of {row.sqnr:.1f} dB, below {SQNR[bits]:.0f}: its codes and scales do not "
            f"stand for its values.{stale} Check that scales and cached codes belong to this tensor."
        )
        found.append((text, "sqnr"))
    return found


def _gemm(tensor: str) -> str:
    return {"y": "fprop", "dx": "dgrad", "dw": "wgrad"}[tensor]


def _calls(rows: Rows, tensor: str) -> int:
    return rows[tensor].calls if tensor in rows else 0
