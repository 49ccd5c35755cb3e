"""A training report as one HTML page: how it ended, curves, what recipes did to the tensors of each layer, time,
memory, and how all of it was made."""

import math
from collections.abc import Container, Sequence
from shlex import quote
from statistics import fmean, stdev
from typing import Any

from octavo.demo.headline import ABOVE, LOST, card, caution, headline, outcome
from octavo.demo.train_text import gap_text, runs_of
from octavo.inspection import webpage as web
from octavo.inspection.charts import Curve, figure
from octavo.inspection.heat import HeatMap, Sample, scale
from octavo.inspection.inspection_page import RELOAD, RUNNING
from octavo.inspection.picture import Histogram, pictures
from octavo.inspection.provenance import provenance
from octavo.inspection.timeline import timelines

SMOOTH = 0.05  # of the steps: how far the running mean of a curve reaches
COLOURS = ("#8a8f98", "#2f7ed8", "#d9822b", "#2a9d6f", "#a855c7", "#c2416b", "#5b6ee1", "#7a8b00")  # the baseline first
MODELS = {"gpt": "A GPT", "llama": "A Llama"}
WHERE = "Native: by the chip; emulated: the same codes, multiplied in bfloat16; reference: in float64."
NOISE = "After ± is the standard error of the gap over the pieces of the held-out text."
BAND = "The band is two standard errors of the running mean."
RANKING = (
    "One run is no ranking: another seed moves the gap of a small model by half a percent, after few steps by more."
)
NUMERICS = "Means over the sampled steps, each measured by octavo.inspect on a copy of the model."
MEMORY = (
    "A step is the mean of the second half. The first step contains the compilation of kernels and graphs. Kept: what "
    "one forward keeps for its backward, eager, without the parameters. Peak: the most that the GPU held, weights, "
    "gradients and optimizer included."
)


def render(report: dict[str, Any]) -> str:
    """Return the page of a report of `octavo train`, as far as it got."""
    runs, plan, gpu = runs_of(report), report["plan"], bool(report["machine"]["gpu"])
    base, *others = runs
    colours = {run["recipe"]: COLOURS[i % len(COLOURS)] for i, run in enumerate(runs)}
    losses = [Curve(run["recipe"], smooth(run["losses"], plan["steps"]), colours[run["recipe"]]) for run in runs]
    heats = {run["recipe"]: _heat(place, run) for place, run in enumerate(runs) if run.get("numerics")}
    ended = [run for run in runs if run["loss"] is not None]
    title = f"Training loss by step, mean over {100 * SMOOTH:.0f} % of the steps"
    maps = [part for run in runs if run["recipe"] in heats for part in _numerics(run, heats[run["recipe"]], colours)]
    running = bool(report.get("running"))
    parts = [
        *((web.paragraph(RUNNING),) if running else ()),
        *((web.paragraph(caution(plan["steps"])),) if others else ()),
        web.cards([card(run, base, heats.get(run["recipe"]), gpu=gpu) for run in others]),
        web.section(
            "Loss",
            *(_gaps(runs, colours, plan["steps"]) if others else ()),
            figure(losses, title, "loss, nats per byte"),
            _summary(runs, colours),
        ),
        *(
            (web.section("What the recipe does to each layer", web.paragraph(NUMERICS, soft=True), scale(), *maps),)
            if heats
            else ()
        ),
        *(_steps(run, heats[run["recipe"]]) for run in runs if plan.get("every") and run["recipe"] in heats),
        pictures(_worst(runs)),
        *(() if running else (_next(others, plan, report.get("policies", {})),)),
        *(_cost(ended, colours, plan) if ended else ()),
        *(part for run in runs if run.get("load") for part in _load(run)),
        *(_routes(report["routes"]) if report.get("routes") else ()),
        *(part for name, policy in report.get("policies", {}).items() for part in _rules(name, policy)),
        web.folded("All settings", web.table("All settings", (), _settings(plan, report["machine"]), words=True)),
    ]
    return web.document(headline(runs, plan["steps"]), _made(report, runs), parts, reload=RELOAD if running else 0)


def _next(others: Sequence[dict[str, Any]], plan: dict[str, Any], policies: Container[str]) -> web.Markup:
    """Return what to run now: a recipe that ended above with a GEMM of it unquantized, or this run with other seeds."""
    shape = plan["shape"]
    model = "moe" if shape.get("mixture") else shape["family"]
    size = ",".join(str(shape[name]) for name in ("width", "layers", "heads", "context") if name in shape)
    base = f"octavo train --model {model} --size {size} --steps {plan['steps']} --batch {plan['batch']}"
    base += (f" --data {quote(plan['data'])}" if plan.get("data") else "") + (" --compile" if plan["compile"] else "")
    names = [run["recipe"] for run in others]
    sick = [run["recipe"] for run in others if outcome(run) in (ABOVE, LOST) and run["recipe"] not in policies]
    if sick:
        said = "See whether the gap comes from the weight gradients or from the forward: leave one of them in bf16."
        name = sick[0].removesuffix(")") + (", " if sick[0].endswith(")") else "(")
        unquantized = [gemm for gemm in ("wgrad", "fprop") if f"{gemm}=" not in name]
        return web.try_next(said, [f"{base} --recipe \"{name}{gemm}='bf16')\"" for gemm in unquantized])
    given = "".join(f" --policy {name}" if name in policies else f' --recipe "{name}"' for name in names)
    said = "Run other seeds: a gap that keeps its sign and size over three seeds is one."
    return web.try_next(said, [f"{base}{given} --seed {plan['seed'] + n}" for n in (1, 2)])


def _model(plan: dict[str, Any]) -> str:
    return "A GPT with experts" if plan["shape"].get("mixture") else MODELS[plan["shape"]["family"]]


def _made(report: dict[str, Any], runs: Sequence[dict[str, Any]]) -> web.Markup:
    facts, plan = report["machine"], report["plan"]
    shape = plan["shape"]
    width = f" of {shape['layers']} layers of {shape['width']} features" if "width" in shape else ""
    steps = f"{plan['steps']} steps of {plan['batch']} × {shape['context']} bytes, seed {plan['seed']}"
    triton = f", triton {facts['triton']}" if facts.get("triton") else ""
    return provenance(
        model=f"{_model(plan)}{width}" + (", compiled" if plan["compile"] else ""),
        recipes=", ".join(run["recipe"] for run in runs),
        measured=steps + (". Interrupted." if report.get("interrupted") else ""),
        device=facts["gpu"] or "a CPU",
        made_with=f"octavo {facts['octavo']}, torch {facts['torch']}{triton}",
        command=report.get("command", ""),
    )


def _settings(plan: dict[str, Any], facts: dict[str, Any]) -> list[tuple[str, str]]:
    shape = {name: value for name, value in plan["shape"].items() if name != "mixture"}
    settings = {
        "text": plan.get("data") or "Alice's Adventures in Wonderland, in the package",
        "compiled": "yes" if plan["compile"] else "no",
        **facts, **shape, **(plan["shape"].get("mixture") or {}),
    }  # fmt: skip
    return [(name, str(value)) for name, value in settings.items() if value is not None]


# -- curves ------------------------------------------------------------------------------------------------------------


def _gaps(runs: Sequence[dict[str, Any]], colours: dict[str, str], whole: int) -> list[web.Markup]:
    """Return the curves of losses above the baseline's, and how to read them."""
    above = []
    for run in runs[1:]:
        values, band = gaps(run["losses"], runs[0]["losses"], whole)
        above.append(Curve(run["recipe"], values, colours[run["recipe"]], band))
    title = f"Training loss above {runs[0]['recipe']} by step, running means"
    said = [NOISE, *([BAND] if any(curve.with_band() for curve in above) else []), RANKING]
    return [figure(above, title, "above bf16, percent", zero=True), web.paragraph(" ".join(said), soft=True)]


def smooth(values: Sequence[float], whole: int) -> list[float]:
    """Return the mean of each value and those before it, of a run of `whole` steps."""
    return [fmean(values[first:end]) for first, end in _reaches(len(values), whole)]


def gaps(losses: Sequence[float], base: Sequence[float], whole: int) -> tuple[list[float], list[float]]:
    """Return how far losses are above those of a baseline on the same batches, in percent of its mean, smoothed; and
    two standard errors of that. It is NaN where the baseline is zero."""
    steps = min(len(losses), len(base))
    found, noise = [], []
    for first, end in _reaches(steps, whole):
        differences = [mine - theirs for mine, theirs in zip(losses[first:end], base[first:end], strict=True)]
        mean = fmean(base[first:end])
        unit = 100 / mean if mean else math.nan
        found.append(unit * fmean(differences))
        spread = all(map(math.isfinite, differences)) and len(differences) > 1
        noise.append(abs(unit) * 2 * stdev(differences) / len(differences) ** 0.5 if spread else math.nan)
    return found, noise


def _reaches(steps: int, whole: int) -> list[tuple[int, int]]:
    """Return the steps that the running mean at each step covers, of a run of `whole` steps."""
    reach = max(1, round(SMOOTH * whole))
    return [(max(0, end - reach), end) for end in range(1, steps + 1)]


# -- tables ------------------------------------------------------------------------------------------------------------


def _summary(runs: Sequence[dict[str, Any]], colours: dict[str, str]) -> web.Markup:
    rows = []
    for run in runs:
        ended, reached = run["loss"] is not None, len(run["losses"])
        rows.append([
            web.named(colours[run["recipe"]], run["recipe"]),
            f"{run['loss']:.4f}" if ended else f"{'at' if run.get('running') else 'interrupted after'} step {reached}",
            gap_text(run),
            f"{run['losses'][-1]:.4f}",
            f"{run['tokens_per_s']:.0f}" if ended else "",
        ])  # fmt: skip
    return web.table(
        "How the runs ended", ("recipe", "held-out loss", "gap", "training loss, last step", "tokens/s"), rows
    )


def _cost(runs: Sequence[dict[str, Any]], colours: dict[str, str], plan: dict[str, Any]) -> list[web.Markup]:
    """Return a table of time and memory."""
    tokens = plan["batch"] * plan["shape"]["context"]
    rows = [
        [
            web.named(colours[run["recipe"]], run["recipe"]),
            f"{1e3 * tokens / run['tokens_per_s']:.1f} ms",
            _time(run.get("first_step_s")),
            _time(run["seconds"]),
            _unit(run.get("kept_mib"), "MiB"),
            _unit(run.get("peak_mib"), "MiB"),
        ]
        for run in runs
    ]
    header = ("recipe", "a step", "first step", "all steps", "kept", "peak")
    name = "Time and memory"
    return [web.section(name, web.table(name, header, rows), web.paragraph(MEMORY, soft=True))]


def _time(seconds: float | None) -> str:
    return _unit(seconds, "s") if seconds is None or seconds >= 1 else _unit(1e3 * seconds, "ms")


def _unit(value: float | None, unit: str) -> str:
    return "–" if value is None else f"{value:.1f} {unit}"


def _load(run: dict[str, Any]) -> list[web.Markup]:
    """Return a table of the share of the held-out text that each expert of each layer got."""
    rows = [[str(n), *(f"{100 * share:.1f} %" for share in shares)] for n, shares in enumerate(run["load"], 1)]
    experts = [f"expert {n}" for n in range(1, len(run["load"][0]) + 1)]
    name = f"Load of the experts: {run['recipe']}"
    return [web.section(name, web.table(name, ["layer", *experts], rows))]


def _routes(routes: Sequence[dict[str, str]]) -> list[web.Markup]:
    header = ("recipe", "fprop", "dgrad", "wgrad")
    rows = [[row[name] for name in header] for row in routes]
    return [web.section("What ran how", web.table("What ran how", header, rows), web.paragraph(WHERE, soft=True))]


def _rules(name: str, policy: dict[str, Any]) -> list[web.Markup]:
    """Return a table of a policy's rules, with the number of layers that each took at the first step."""
    rows = [
        [str(number), ", ".join(f"{k} = {v!r}" for k, v in rule.items()), str(count)]
        for number, (rule, count) in enumerate(zip(policy["rules"], policy["layers"], strict=True), 1)
    ]
    notes = [web.paragraph(note, soft=True) for note in policy["notes"]]
    title = f"Rules of {name}"
    return [web.section(title, web.table(title, ("rule", "setting", "layers"), rows), *notes)]


# -- tensors -----------------------------------------------------------------------------------------------------------


def _samples(run: dict[str, Any]) -> list[Sample]:
    return [Sample(sample["step"], sample["layers"]) for sample in run["numerics"]]


def _steps(run: dict[str, Any], heat: HeatMap) -> web.Markup:
    return timelines(_samples(run), heat, run["recipe"])


def _worst(runs: Sequence[dict[str, Any]]) -> dict[str, list[Histogram]]:
    """Return the worst tensors of each run at its last sampled step."""
    sampled = [run for run in runs if run.get("numerics")]
    return {run["recipe"]: [Histogram(**one) for one in run["numerics"][-1].get("worst", ())] for run in sampled}


def _heat(place: int, run: dict[str, Any]) -> HeatMap:
    samples = _samples(run)
    found = list(dict.fromkeys(sentence for sample in run["numerics"] for sentence in sample["findings"]))
    return HeatMap(f"run{place}", samples, found)


def _numerics(run: dict[str, Any], heat: HeatMap, colours: dict[str, str]) -> list[web.Markup]:
    """Return what is wrong in sentences, and the heat map of a run."""
    at = [str(sample["step"]) for sample in run["numerics"]]
    steps = ", ".join(at if len(at) <= 8 else [*at[:3], "…", at[-1]])
    title = web.heading(web.named(colours[run["recipe"]], f"{run['recipe']}, steps {steps}"), 3)
    return [title, heat.findings(), heat.html(heat.caption(run["recipe"]))]
