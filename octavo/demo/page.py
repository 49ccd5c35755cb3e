"""A training report as one HTML page: curves, what recipes did to the tensors of each layer, time, memory, and how all
of it was made."""

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

from octavo.demo.train_text import gap_text, runs_of
from octavo.inspection.charts import Curve, figure
from octavo.inspection.webpage import Markup, bullets, document, heading, named, paragraph, shaded, table

SMOOTH = 0.05  # of the steps: how far the running mean of a curve reaches
COLOURS = ("#8a8f98", "#2f7ed8", "#d9822b", "#2a9d6f", "#a855c7", "#c2416b", "#5b6ee1", "#7a8b00")  # the baseline first
MODELS = {"gpt": "A GPT", "llama": "A Llama"}
WHERE = "Native: by the chip; emulated: the same codes, multiplied in bfloat16; reference: in float64."
NOISE = "After ± is the standard error of the gap over the pieces of the held-out text."
BAND = "The band is two standard errors of the running mean."
RANKING = (
    "One run is no ranking: another seed moves the gap of a small model by half a percent, after few steps by more."
)
NUMERICS = (
    "Means over the sampled steps, each measured by octavo.inspect on a copy of the model. Underflow: values that are "
    "not zero and become zero; saturated, where there are any: values beyond the largest code; SQNR: signal to "
    "quantization noise; cosine: that of dx and dw with those of the same layer in float32. The more "
    "orange a cell, the worse."
)
MEMORY = (
    "A step is the mean of the second half. The first step contains the compilation of kernels and graphs. Kept: what "
    "one forward keeps for its backward, eager, without the parameters. Peak: the most that the GPU held, weights, "
    "gradients and optimizer included."
)
# columns of a layer's row: the number, the tensors that have it, the values at which a cell is not and is fully shaded
COLUMNS = (
    ("underflow", ("x", "w", "dy"), 0.02, 0.3),
    ("saturated", ("x", "w", "dy"), 0.0, 0.05),
    ("sqnr", ("x", "w", "dy", "y"), 26.0, 12.0),
    ("cosine", ("dx", "dw"), 0.999, 0.95),
)


def render(report: dict[str, Any]) -> str:
    """Return the page of a report of `octavo train`, as far as it got."""
    runs, plan = runs_of(report), report["plan"]
    colours = {run["recipe"]: COLOURS[i % len(COLOURS)] for i, run in enumerate(runs)}
    losses = [Curve(run["recipe"], smooth(run["losses"]), colours[run["recipe"]]) for run in runs]
    sampled = [run for run in runs if run.get("numerics")]
    ended = [run for run in runs if run["loss"] is not None]
    parts = [
        paragraph(_head(report), soft=True),
        heading("Loss"),
        figure(losses, f"Training loss by step, in nats per byte, mean over {100 * SMOOTH:.0f} % of the steps"),
        _summary(runs, colours),
        *(_gaps(runs, colours) if len(runs) > 1 else ()),
        *((heading("What the recipe does to each layer"), paragraph(NUMERICS, soft=True)) if sampled else ()),
        *(part for run in sampled for part in _numerics(run, colours[run["recipe"]])),
        *(_cost(ended, colours, plan) if ended else ()),
        *(part for run in runs if run.get("load") for part in _load(run)),
        *(_routes(report["routes"]) if report.get("routes") else ()),
        *(part for name, policy in report.get("policies", {}).items() for part in _rules(name, policy)),
        heading("How it was made"),
        table((), _settings(plan, report["machine"]), left=True),
    ]
    return document(f"{_model(plan)}: {', '.join(run['recipe'] for run in runs)}", parts, wide=bool(sampled))


def _model(plan: dict[str, Any]) -> str:
    return "A GPT with experts" if plan["shape"].get("mixture") else MODELS[plan["shape"]["family"]]


def _head(report: dict[str, Any]) -> str:
    facts, plan = report["machine"], report["plan"]
    said = f"{plan['steps']} steps of {plan['batch']} × {plan['shape']['context']} bytes, seed {plan['seed']}, on "
    said += facts["gpu"] or "a CPU"
    return said + (". Interrupted." if report.get("interrupted") else ".")


def _settings(plan: dict[str, Any], facts: dict[str, Any]) -> list[tuple[str, str]]:
    shape = {name: value for name, value in plan["shape"].items() if name != "mixture"}
    settings = {
        "text": plan.get("data") or "Alice's Adventures in Wonderland, in the package",
        "compiled": "yes" if plan["compile"] else "no",
        **facts, **shape, **(plan["shape"].get("mixture") or {}),
    }  # fmt: skip
    return [(name, str(value)) for name, value in settings.items() if value is not None]


# -- curves ------------------------------------------------------------------------------------------------------------


def _gaps(runs: Sequence[dict[str, Any]], colours: dict[str, str]) -> list[Markup]:
    """Return the curves of losses above the baseline's, and how to read them."""
    above = []
    for run in runs[1:]:
        values, band = gaps(run["losses"], runs[0]["losses"])
        above.append(Curve(run["recipe"], values, colours[run["recipe"]], band))
    title = f"Training loss above {runs[0]['recipe']} by step, in percent, smoothed alike"
    said = [NOISE, *([BAND] if any(curve.with_band() for curve in above) else []), RANKING]
    return [figure(above, title, zero=True), paragraph(" ".join(said), soft=True)]


def smooth(values: Sequence[float]) -> list[float]:
    """Return the mean of each value and those before it."""
    return [fmean(values[first:end]) for first, end in _reaches(len(values))]


def gaps(losses: Sequence[float], base: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return how far losses are above those of a baseline on the same batches, in percent of its mean, smoothed; and
    two standard errors of that. It is NaN where the baseline is zero."""
    steps = min(len(losses), len(base))
    found, noise = [], []
    for first, end in _reaches(steps, len(losses)):
        differences = [mine - theirs for mine, theirs in zip(losses[first:end], base[first:end], strict=True)]
        mean = fmean(base[first:end])
        unit = 100 / mean if mean else math.nan
        found.append(unit * fmean(differences))
        spread = all(map(math.isfinite, differences)) and len(differences) > 1
        noise.append(abs(unit) * 2 * stdev(differences) / len(differences) ** 0.5 if spread else math.nan)
    return found, noise


def _reaches(steps: int, whole: int | None = None) -> list[tuple[int, int]]:
    """Return the steps that the running mean at each step covers, of a run of `whole` steps."""
    reach = max(1, round(SMOOTH * (steps if whole is None else whole)))
    return [(max(0, end - reach), end) for end in range(1, steps + 1)]


# -- tables ------------------------------------------------------------------------------------------------------------


def _summary(runs: Sequence[dict[str, Any]], colours: dict[str, str]) -> Markup:
    rows = []
    for run in runs:
        ended = run["loss"] is not None
        rows.append([
            named(colours[run["recipe"]], run["recipe"]),
            f"{run['loss']:.4f}" if ended else f"interrupted after step {len(run['losses'])}",
            gap_text(run),
            f"{run['losses'][-1]:.4f}",
            f"{run['tokens_per_s']:.0f}" if ended else "",
        ])  # fmt: skip
    return table(("recipe", "held-out loss", "gap", "training loss, last step", "tokens/s"), rows)


def _cost(runs: Sequence[dict[str, Any]], colours: dict[str, str], plan: dict[str, Any]) -> list[Markup]:
    """Return a table of time and memory."""
    tokens = plan["batch"] * plan["shape"]["context"]
    rows = [
        [
            named(colours[run["recipe"]], run["recipe"]),
            f"{1e3 * tokens / run['tokens_per_s']:.1f} ms",
            _time(run.get("first_step_s")),
            _time(run["seconds"]),
            _unit(run.get("kept_mib"), "MiB"),
            _unit(run.get("peak_mib"), "MiB"),
        ]
        for run in runs
    ]
    header = ("recipe", "a step", "first step", "all steps", "kept", "peak")
    return [heading("Time and memory"), table(header, rows), paragraph(MEMORY, soft=True)]


def _time(seconds: float | None) -> str:
    return _unit(seconds, "s") if seconds is None or seconds >= 1 else _unit(1e3 * seconds, "ms")


def _unit(value: float | None, unit: str) -> str:
    return "–" if value is None else f"{value:.1f} {unit}"


def _load(run: dict[str, Any]) -> list[Markup]:
    """Return a table of the share of the held-out text that each expert of each layer got."""
    rows = [[f"layer {n}", *(f"{100 * share:.1f} %" for share in shares)] for n, shares in enumerate(run["load"], 1)]
    experts = [f"expert {n}" for n in range(1, len(run["load"][0]) + 1)]
    return [heading(f"Load of the experts: {run['recipe']}"), table(["", *experts], rows)]


def _routes(routes: Sequence[dict[str, str]]) -> list[Markup]:
    header = ("recipe", "fprop", "dgrad", "wgrad")
    rows = [[row[name] for name in header] for row in routes]
    return [heading("What ran how"), table(header, rows), paragraph(WHERE, soft=True)]


def _rules(name: str, policy: dict[str, Any]) -> list[Markup]:
    """Return a table of a policy's rules, with the number of layers that each took at the first step."""
    rows = [
        [str(number), ", ".join(f"{k} = {v!r}" for k, v in rule.items()), str(count)]
        for number, (rule, count) in enumerate(zip(policy["rules"], policy["layers"], strict=True), 1)
    ]
    notes = [paragraph(note, soft=True) for note in policy["notes"]]
    return [heading(f"Rules of {name}"), table(("rule", "", "layers"), rows), *notes]


# -- tensors -----------------------------------------------------------------------------------------------------------


def _numerics(run: dict[str, Any], colour: str) -> list[Markup]:
    """Return a table with a row for each layer, and what is wrong in sentences."""
    samples = run["numerics"]
    steps = ", ".join(str(sample["step"]) for sample in samples)
    layers = list(dict.fromkeys(layer for sample in samples for layer in sample["layers"]))
    header, columns = ["layer"], [[layer or "(model)" for layer in layers]]
    for number, tensors, *bounds in COLUMNS:
        for tensor in tensors:
            found = [_over_steps(samples, layer, tensor, number) for layer in layers]
            if _is_shown(number, found):
                header.append(f"{'SQNR' if number == 'sqnr' else number} {tensor}")
                columns.append([_cell(by_step, number, bounds) for by_step in found])
    sentences = list(dict.fromkeys(sentence for sample in samples for sentence in sample["findings"]))
    head = heading(named(colour, f"{run['recipe']}, steps {steps}"), 3)
    return [head, *([bullets(sentences)] if sentences else []), table(header, list(zip(*columns, strict=True)))]


def _over_steps(samples: Sequence[dict[str, Any]], layer: str, tensor: str, number: str) -> dict[int, float]:
    """Return a number of a layer's tensor by step, where it exists."""
    found = {sample["step"]: sample["layers"].get(layer, {}).get(tensor, {}).get(number) for sample in samples}
    return {step: value for step, value in found.items() if value is not None}


def _is_shown(number: str, column: Sequence[dict[int, float]]) -> bool:
    """Whether a column says anything: saturation is rare, and a column of zeros would only widen the table."""
    values = [value for by_step in column for value in by_step.values()]
    return any(values) if number == "saturated" else bool(values)


def _cell(by_step: dict[int, float], number: str, bounds: Sequence[float]) -> str:
    """Return the mean as text, shaded by how bad it is; each step's value is in the title."""
    if not by_step:
        return "–"
    mean, (good, bad) = fmean(by_step.values()), bounds
    each = ", ".join(f"step {step}: {_number(value, number)}" for step, value in by_step.items())
    return shaded(_number(mean, number), min(max((mean - good) / (bad - good), 0.0), 1.0), each)


def _number(value: float, number: str) -> str:
    if number == "sqnr":
        return f"{value:.1f} dB"
    if number == "cosine":
        return f"{value:.4f}"
    return "0 %" if value == 0 else f"{100 * value:.2f} %" if value >= 5e-5 else "< 0.01 %"
