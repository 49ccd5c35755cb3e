"""The answer of a training report: how recipes ended beside bf16, in a sentence and as a card each."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from octavo.demo.train_text import gap_text
from octavo.inspection.heat import HeatMap
from octavo.inspection.webpage import Card

SEED_SPREAD = 0.5  # percent: the standard deviation of a small model's gap over seeds, after the default's 200 steps
SEED_NOISE = 2 * SEED_SPREAD  # beyond which one run says something
FEW_STEPS = 200  # below which seeds differ by more
ABOVE, WITHIN, BELOW, LOST, STOPPED, RUNNING = "above", "within", "below", "diverged", "stopped", "running"
BEYOND, UNSURE = " by more than seed noise", ", after too few steps to tell from seed noise"
NEAR, UNKNOWN = " within seed noise of bf16", " near bf16, after too few steps to tell"
MEASURED = (ABOVE, WITHIN, BELOW)
SENTENCES: dict[str, Callable[[str, bool], str]] = {
    LOST: lambda names, many: f"{names} diverged: the loss is not finite",
    ABOVE: lambda names, many: f"{names} {'end' if many else 'ends'} above bf16{BEYOND}",
    WITHIN: lambda names, many: f"{names} {'end' if many else 'ends'}{NEAR}",
    BELOW: lambda names, many: f"{names} {'end' if many else 'ends'} below bf16{BEYOND}",
    STOPPED: lambda names, many: f"{names} {'were' if many else 'was'} interrupted",
    RUNNING: lambda names, many: f"{names} still train{'' if many else 's'}",
}
CARDS = {
    LOST: ("look", "diverged"),
    ABOVE: ("look", f"above seed noise (± {SEED_NOISE:g} %)"),
    WITHIN: ("ok", f"within seed noise (± {SEED_NOISE:g} %)"),
    BELOW: ("ok", f"below by more than seed noise (± {SEED_NOISE:g} %)"),
    STOPPED: ("look", "interrupted"),
    RUNNING: ("", "still training"),
}


def outcome(run: dict[str, Any]) -> str:
    """Return how a run ended beside the baseline: a gap counts if it is beyond what another seed, or twice the standard
    error over the held-out text, would move it."""
    if run.get("running"):
        return RUNNING
    if run["loss"] is None or run.get("gap_percent") is None:
        return STOPPED
    if not math.isfinite(run["gap_percent"]):
        return LOST
    noise = max(SEED_NOISE, 2 * (run.get("gap_noise_percent") or 0.0))
    return WITHIN if abs(run["gap_percent"]) <= noise else ABOVE if run["gap_percent"] > 0 else BELOW


def headline(runs: Sequence[dict[str, Any]], steps: int) -> str:
    """Return the sentence for all runs, the baseline first. After few steps no gap is told from what seeds do."""
    base, *others = runs
    if not others:
        if base.get("running"):
            return "bf16 still trains"
        ended = base["loss"] is not None
        return f"bf16 ended at a loss of {base['loss']:.4f}" if ended else "bf16 was interrupted"
    said = []
    for kind, sentence in SENTENCES.items():
        found = [run for run in others if outcome(run) == kind]
        if found:
            numbers = f" ({', '.join(map(_gap, found))})" if kind in MEASURED else ""
            said.append(sentence(_listed([run["recipe"] for run in found]), len(found) > 1) + numbers)
    whole = "; ".join(said)
    return whole if steps >= FEW_STEPS else whole.replace(BEYOND, UNSURE).replace(NEAR, UNKNOWN)


def caution(steps: int) -> str:
    """Return what the headline does not show."""
    few = f" After {steps} steps, as here, by more." if steps < FEW_STEPS else ""
    seeds = f"another seed moves a gap of a small model by about {SEED_SPREAD} %, now and then by {SEED_NOISE:g} %"
    return f"One seed each: {seeds}.{few}"


def card(run: dict[str, Any], base: dict[str, Any], heat: HeatMap | None, *, gpu: bool) -> Card:
    """Return the card of a run beside the baseline. On a CPU its speed is that of the reference, and is no answer."""
    kind = outcome(run)
    status, word = CARDS[kind]
    lines = [word]
    if gpu and run.get("tokens_per_s") and base.get("tokens_per_s"):
        ratio = run["tokens_per_s"] / base["tokens_per_s"]
        lines.append(f"Speed: {run['tokens_per_s']:.0f} tokens/s, {ratio:.2f} × bf16")
    lines += [line for line in (_memory(run, base, "kept"), _memory(run, base, "peak")) if line]
    worst = None if heat is None else heat.worst()
    if heat is not None and worst is None:
        lines.append("No cell of its heat map is shaded.")
    if worst is not None:
        lines.append(worst.line())
    return Card(run["recipe"], _gap(run) if kind in MEASURED else "–", _small(run), lines, status)


def _gap(run: dict[str, Any]) -> str:
    """Return the gap without its noise."""
    return gap_text(run).split(" ±")[0].removesuffix(" %") + " %"


def _small(run: dict[str, Any]) -> str:
    noise = gap_text(run).partition("± ")[2]
    return "held-out loss against bf16" + (f", ± {noise} over the text" if noise else "")


def _memory(run: dict[str, Any], base: dict[str, Any], name: str) -> str:
    own, other = run.get(f"{name}_mib"), base.get(f"{name}_mib")
    if own is None:
        return ""
    said = {"kept": "Kept for backward", "peak": "Peak memory"}[name]
    return f"{said}: {own:.1f} MiB" + (f", {own / other:.2f} × bf16" if other else "")


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]
