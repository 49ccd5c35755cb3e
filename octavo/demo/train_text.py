"""A training report as text: a table of the runs, the load of experts, the rules of policies."""

from typing import Any

from octavo.model.policy import Policy
from octavo.text import table


def render(report: dict[str, Any]) -> str:
    """Return the text of a report of `octavo train`, as far as it got; "" if it has no run."""
    runs = runs_of(report)
    if not runs:
        return ""
    facts, plan = report["machine"], report["plan"]
    ended = [run for run in runs if run["loss"] is not None]
    rows = [[r["recipe"], f"{r['loss']:.4f}", gap_text(r), f"{r['tokens_per_s']:.0f}"] for r in ended]
    head = (
        f"{facts['gpu'] or 'CPU'}, torch {facts['torch']}; {plan['steps']} steps of "
        f"{plan['batch']} x {plan['shape']['context']} bytes, seed {plan['seed']}"
    )
    parts = [head, table(("recipe", "loss", "gap", "tokens/s"), rows)] if rows else [head]
    parts += [load_table(ended)] if ended and plan["shape"]["mixture"] else []
    parts += [rule_table(name, policy) for name, policy in report.get("policies", {}).items()]
    for run in runs:
        if run["loss"] is None:
            step, loss = len(run["losses"]), run["losses"][-1]
            parts.append(f"{run['recipe']} was interrupted after step {step}, at a training loss of {loss:.4f}.")
    if any("gap_percent" in run for run in ended):
        parts.append(
            "The gap is how far a loss is above that of bf16; ± is its standard error over the held-out text. "
            "Another seed moves a gap by half a percent, after few steps by more."
        )
    if facts["gpu"] is None:
        parts.append("A CPU runs the reference: the same codes and scales as a GPU, GEMMs in float64, not faster.")
    return "\n\n".join(parts)


def runs_of(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the runs that have losses, the baseline first."""
    found = [report.get("bf16"), *report.get("recipes", [])]
    return [run for run in found if run and run["losses"]]


def gap_text(run: dict[str, Any]) -> str:
    """Return a run's gap with its noise; "" for the baseline."""
    if run.get("gap_percent") is None:
        return ""
    said, noise = f"{round(run['gap_percent'], 2) + 0.0:+.2f}", run.get("gap_noise_percent")  # + 0.0: no minus zero
    if noise is not None:
        said += " ± < 0.01" if 0 < noise < 0.005 else f" ± {noise:.2f}"
    return said + " %"


def rule_table(name: str, policy: dict[str, Any]) -> str:
    """Return a table of a policy's rules and the number of layers that took each, with the notes of the conversion."""
    rules = [str(rule) for rule in Policy.from_dict({"rules": policy["rules"]}).rules]
    counted = enumerate(zip(rules, policy["layers"], strict=True), start=1)
    rows = [[str(number), rule, str(count)] for number, (rule, count) in counted]
    return "\n".join([table(("rule", f"of {name}", "layers"), rows), *policy["notes"]])


def load_table(runs: list[dict[str, Any]]) -> str:
    """Return a table of the smallest and the largest share of the held-out text that an expert of each layer got."""
    layers = range(1, len(runs[0]["load"]) + 1)
    rows = [
        [run["recipe"], *(f"{100 * min(shares):.1f} - {100 * max(shares):.1f} %" for shares in run["load"])]
        for run in runs
    ]
    even = 100 / len(runs[0]["load"][0])
    return table(("expert load", *(f"layer {layer}" for layer in layers)), rows) + f"\neven load: {even:.1f} %"
