"""The report of `octavo.convert`: a row for every module that holds a matrix, and a summary."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.model.policy import PolicyRule
from octavo.model.selection import CONVERT
from octavo.text import columns, path_names, path_pattern, plural, printable


@dataclass(frozen=True)
class Row:
    """One module at one path, in a `ConversionReport`.

    Args:
        path: its name in the model; "" is the model itself.
        kind: its class before the conversion, such as "torch.nn.Linear".
        recipe: the canonical string of its recipe after the conversion; "" if it has none.
        route: how its matrix products run: "native", "emulated" or "reference"; "skipped" without a recipe.
        why: a sentence that says why it was left alone, or why it is emulated.
        reason: the reason in a word or two: "converted", "kept", "output head", "embedding", and so on.
        weights: the number of elements of its matrices.
        module: the id of the module, which counts a module with several paths once.
        identities: the ids of its parameters, which count a tied parameter once.
        rule: the number of the policy's rule that decided, from 1; None if no rule did.
    """

    path: str
    kind: str
    recipe: str
    route: str
    why: str = ""
    reason: str = CONVERT
    weights: int = 0
    module: int = 0
    identities: tuple[int, ...] = ()
    rule: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """Returns the row as plain data, for JSON.

        Returns:
            The fields by name, without the ids.
        """
        return {name: value for name, value in vars(self).items() if name not in ("module", "identities")}


@dataclass(frozen=True)
class Share:
    """How many layers have one reason in a `ConversionReport`, and how many of the model's weights they hold.

    Args:
        layers: the number of layers.
        weights: the number of elements of their matrices.
        share: the part of all matrix elements of the model, from 0 to 1.
    """

    layers: int
    weights: int
    share: float

    def __str__(self) -> str:
        return f"{plural(self.layers, 'layer')} ({self.share:.1%} of the weights)"


@dataclass(frozen=True)
class ConversionReport:
    """The report of `octavo.convert`. It prints as a table with a summary, and iterates over its rows.

    Args:
        rows: a row for every module that holds a matrix, in the model's order.
        notes: further changes to the model and unused rules of the policy, a sentence each.
        unused: rules of the policy that decide for no layer.

    Example:
        >>> report = octavo.convert(nn.Sequential(nn.Embedding(8, 16), nn.Linear(16, 16)), "fp8-current")
        >>> print(report)
        layers  count  class               recipe       route
        0       1      torch.nn.Embedding  -            skipped
        1       1      torch.nn.Linear     fp8-current  reference
        0: a table that is looked up, not multiplied.
        Converted 1 layer (66.7% of the weights); embedding: 1 layer (33.3% of the weights).
    """

    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    unused: tuple[PolicyRule, ...] = ()

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def shares(self) -> dict[str, Share]:
        """Counts layers and weights by reason. A shared layer and a tied weight count once.

        Returns:
            The share of each reason, "converted" first.
        """
        order = sorted(dict.fromkeys(row.reason for row in self.rows), key=lambda reason: reason != CONVERT)
        counted: set[int] = set()
        counts: dict[str, tuple[int, int]] = {}
        for reason in order:
            layers = {row.module: row for row in self.rows if row.reason == reason}
            weights = 0
            for row in layers.values():
                if not row.identities or not counted.issuperset(row.identities):
                    weights += row.weights
                counted.update(row.identities)
            counts[reason] = (len(layers), weights)
        total = sum(weights for _, weights in counts.values()) or 1
        return {reason: Share(layers, weights, weights / total) for reason, (layers, weights) in counts.items()}

    def summary(self) -> str:
        """Sums the report up in one line.

        Returns:
            The share that was converted, and the shares that were left alone, by reason.
        """
        shares = self.shares()
        done = shares.pop(CONVERT, Share(0, 0, 0.0))
        text = f"Converted {done}"
        return text + "".join(f"; {reason}: {share}" for reason, share in shares.items()) + "."

    def as_dict(self) -> dict[str, Any]:
        """Returns the report as plain data, for JSON.

        Returns:
            A dict with `shares`, `notes`, `unused` and `rows`.
        """
        shares = {reason: dict(vars(share)) for reason, share in self.shares().items()}
        unused = [rule.as_dict() for rule in self.unused]
        return {"shares": shares, "notes": list(self.notes), "unused": unused, "rows": [r.as_dict() for r in self.rows]}

    def __str__(self) -> str:
        """Returns the table, one line for paths that differ only in their numbers, then the reasons and the summary."""
        rules = any(row.rule is not None for row in self.rows)
        equal: dict[tuple[str, ...], list[str]] = {}
        for row in self.rows:
            cell_texts = [row.kind, row.recipe or "-", row.route]
            if rules:
                cell_texts.append("-" if row.rule is None else str(row.rule))
            equal.setdefault((path_pattern(row.path), row.why, *cell_texts), []).append(row.path)
        reasons: dict[str, list[str]] = {}
        cells: list[Sequence[str]] = [("layers", "count", "class", "recipe", "route", *(["rule"] if rules else []))]
        for (_, why, *texts), paths in equal.items():
            cells.append((path_names(paths), str(len(paths)), *texts))
            if why:
                reasons.setdefault(why, []).extend(paths)
        notes = [f"{path_names(paths)}: {why}." for why, paths in reasons.items()]
        return printable("\n".join([*columns(cells), *notes, *self.notes, self.summary()]))
