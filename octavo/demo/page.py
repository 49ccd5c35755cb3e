"""A training report as one HTML page: curves, what recipes did to the tensors of each layer, time, memory, and how all
of it was made."""

from collections.abc import Sequence
from html import escape
from statistics import fmean
from typing import Any

from octavo.demo.charts import SMOOTH, Curve, figure, gaps, has_band, smooth
from octavo.demo.train_text import gap_text, runs_of
from octavo.inspection.webpage import document, key, paragraph, table

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
    """Returns the page of a report of `octavo train`, as far as it got."""
    runs = runs_of(report)
    colours = {run["recipe"]: COLOURS[i % len(COLOURS)] for i, run in enumerate(runs)}
    plan = report["plan"]
    parts = [
        paragraph(_head(report), soft=True),
        "<h2>Loss</h2>",
        figure(
            [Curve(run["recipe"], smooth(run["losses"]), colours[run["recipe"]]) for run in runs],
            f"Training loss by step, in nats per byte, mean over {100 * SMOOTH:.0f} % of the steps",
        ),
        _summary(runs, colours),
    ]
    if len(runs) > 1:
        above = [
            Curve(run["recipe"], values, colours[run["recipe"]], band)
            for run in runs[1:]
            for values, band in [gaps(run["losses"], runs[0]["losses"])]
        ]
        parts += [
            figure(above, f"Training loss above {runs[0]['recipe']} by step, in percent, smoothed alike", zero=True),
            paragraph(" ".join([NOISE, *([BAND] if has_band(above) else []), RANKING]), soft=True),
        ]
    sampled = [run for run in runs if run.get("numerics")]
    parts += ["<h2>What the recipe does to each layer</h2>", paragraph(NUMERICS, soft=True)] if sampled else []
    parts += [_numerics(run, colours[run["recipe"]]) for run in sampled]
    ended = [run for run in runs if run["loss"] is not None]
    parts += [_cost(ended, colours, plan)] if ended else []
    parts += [_load(run) for run in runs if run.get("load")]
    parts += [_routes(report["routes"])] if report.get("routes") else []
    parts += [_rules(name, policy) for name, policy in report.get("policies", {}).items()]
    settings = [[escape(name), escape(str(value))] for name, value in _settings(plan, report["machine"])]
    parts += ["<h2>How it was made</h2>", table((), settings, left=True)]
    return document(f"{_model(plan)}: {', '.join(run['recipe'] for run in runs)}", parts, wide=bool(sampled))


def _model(plan: dict[str, Any]) -> str:
    return "A GPT with experts" if plan["shape"].get("mixture") else MODELS[plan["shape"]["family"]]


def _head(report: dict[str, Any]) -> str:
    facts, plan = report["machine"], report["plan"]
    said = f"{plan['steps']} steps of {plan['batch']} × {plan['shape']['context']} bytes, seed {plan['seed']}, on "
    said += facts["gpu"] or "a CPU"
    return said + (". Interrupted." if report.get("interrupted") else ".")


def _settings(plan: dict[str, Any], facts: dict[str, Any]) -> list[tuple[str, Any]]:
    text = plan.get("data") or "Alice's Adventures in Wonderland, in the package"
    shape = {name: value for name, value in plan["shape"].items() if name != "mixture"}
    mixture = (plan["shape"].get("mixture") or {}).items()
    listed = [
        ("text", text),
        ("compiled", "yes" if plan["compile"] else "no"),
        *facts.items(),
        *shape.items(),
        *mixture,
    ]
    return [(name, value) for name, value in listed if value is not None]


# -- tables ------------------------------------------------------------------------------------------------------------


def _name(run: dict[str, Any], colours: dict[str, str]) -> str:
    return key(colours[run["recipe"]]) + escape(run["recipe"])


def _summary(runs: Sequence[dict[str, Any]], colours: dict[str, str]) -> str:
    rows = []
    for run in runs:
        ended = run["loss"] is not None
        rows.append([
            _name(run, colours),
            f"{run['loss']:.4f}" if ended else f"interrupted after step {len(run['losses'])}",
            gap_text(run),
            f"{run['losses'][-1]:.4f}",
            f"{run['tokens_per_s']:.0f}" if ended else "",
        ])  # fmt: skip
    return table(("recipe", "held-out loss", "gap", "training loss, last step", "tokens/s"), rows)


def _cost(runs: Sequence[dict[str, Any]], colours: dict[str, str], plan: dict[str, Any]) -> str:
    """Returns a table of time and memory."""
    tokens = plan["batch"] * plan["shape"]["context"]
    rows = [
        [
            _name(run, colours),
            f"{1e3 * tokens / run['tokens_per_s']:.1f} ms",
            _time(run.get("first_step_s")),
            _time(run["seconds"]),
            _unit(run.get("kept_mib"), "MiB"),
            _unit(run.get("peak_mib"), "MiB"),
        ]
        for run in runs
    ]
    header = ("recipe", "a step", "first step", "all steps", "kept", "peak")
    return "<h2>Time and memory</h2>" + table(header, rows) + paragraph(MEMORY, soft=True)


def _time(seconds: float | None) -> str:
    return _unit(seconds, "s") if seconds is None or seconds >= 1 else _unit(1e3 * seconds, "ms")


def _unit(value: float | None, unit: str) -> str:
    return "–" if value is None else f"{value:.1f} {unit}"


def _load(run: dict[str, Any]) -> str:
    """Returns a table of the share of the held-out text that each expert of each layer got."""
    rows = [[f"layer {n}", *(f"{100 * share:.1f} %" for share in shares)] for n, shares in enumerate(run["load"], 1)]
    experts = [f"expert {n}" for n in range(1, len(run["load"][0]) + 1)]
    return f"<h2>Load of the experts: {escape(run['recipe'])}</h2>" + table(["", *experts], rows)


def _routes(routes: Sequence[dict[str, str]]) -> str:
    rows = [[escape(row[name]) for name in ("recipe", "fprop", "dgrad", "wgrad")] for row in routes]
    return "<h2>What ran how</h2>" + table(("recipe", "fprop", "dgrad", "wgrad"), rows) + paragraph(WHERE, soft=True)


def _rules(name: str, policy: dict[str, Any]) -> str:
    """Returns a table of a policy's rules, with the number of layers that each took at the first step."""
    rows = [
        [str(number), escape(", ".join(f"{k} = {v!r}" for k, v in rule.items())), str(count)]
        for number, (rule, count) in enumerate(zip(policy["rules"], policy["layers"], strict=True), 1)
    ]
    notes = "".join(paragraph(note, soft=True) for note in policy["notes"])
    return f"<h2>Rules of {escape(name)}</h2>" + table(("rule", "", "layers"), rows) + notes


# -- tensors -----------------------------------------------------------------------------------------------------------


def _numerics(run: dict[str, Any], colour: str) -> str:
    """Returns a table with a row for each layer, and what is wrong in sentences."""
    samples = run["numerics"]
    steps = ", ".join(str(sample["step"]) for sample in samples)
    shown = [(number, tensor, at) for number, tensors, *at in COLUMNS for tensor in tensors]
    values = {
        layer: [_over_steps(samples, layer, tensor, number) for number, tensor, _ in shown]
        for layer in _layers(samples)
    }
    columns = [i for i, (number, *_) in enumerate(shown) if _is_shown(number, [cells[i] for cells in values.values()])]
    header = ["layer", *(f"{'SQNR' if shown[i][0] == 'sqnr' else shown[i][0]} {shown[i][1]}" for i in columns)]
    rows = [
        [escape(layer or "(model)"), *(_cell(cells[i], shown[i][0], shown[i][2]) for i in columns)]
        for layer, cells in values.items()
    ]
    found = list(dict.fromkeys(sentence for sample in samples for sentence in sample["findings"]))
    said = f"<ul>{''.join(f'<li>{escape(sentence)}</li>' for sentence in found)}</ul>" if found else ""
    head = f"<h3>{key(colour)}{escape(run['recipe'])}, steps {steps}</h3>"
    return head + said + table(header, rows)


def _layers(samples: Sequence[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(layer for sample in samples for layer in sample["layers"]))


def _over_steps(samples: Sequence[dict[str, Any]], layer: str, tensor: str, number: str) -> dict[int, float]:
    """Returns a number of a layer's tensor by step, where it exists."""
    found = {sample["step"]: sample["layers"].get(layer, {}).get(tensor, {}).get(number) for sample in samples}
    return {step: value for step, value in found.items() if value is not None}


def _is_shown(number: str, column: Sequence[dict[int, float]]) -> bool:
    """Whether a column says anything: saturation is rare, and a column of zeros would only widen the table."""
    values = [value for by_step in column for value in by_step.values()]
    return any(values) if number == "saturated" else bool(values)


def _cell(by_step: dict[int, float], number: str, bounds: Sequence[float]) -> str:
    """Returns the mean as text, shaded by how bad it is; each step's value is in the title."""
    if not by_step:
        return "–"
    mean = fmean(by_step.values())
    good, bad = bounds
    shade = min(max((mean - good) / (bad - good), 0.0), 1.0)
    each = ", ".join(f"step {step}: {_number(value, number)}" for step, value in by_step.items())
    style, text = f"--shade:{shade:.2f}", escape(_number(mean, number))
    return f'<span class="shade" style="{style}" title="{escape(each)}">{text}</span>'


def _number(value: float, number: str) -> str:
    if number == "sqnr":
        return f"{value:.1f} dB"
    if number == "cosine":
        return f"{value:.4f}"
    return "0 %" if value == 0 else f"{100 * value:.2f} %" if value >= 5e-5 else "< 0.01 %"
