"""The report of `octavo.convert`: a row for every module that holds a matrix, those that are no layers included, and a
summary."""

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from octavo._torch.modules import Convolution
from octavo.model.policy import PolicyRule
from octavo.model.selection import CONVERT, qualified
from octavo.ops.quantized import UNQUANTIZED, Quantized
from octavo.recipes import recipe as resolve
from octavo.text import columns, path_names, path_pattern, plural, printable

_TABLE = "embedding"  # the reason of tables, which are looked up and not multiplied


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
        """Return the row as plain data, for JSON.

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
        share: the part of all matrix elements that the model multiplies by, from 0 to 1; 0 for tables, which are looked
            up.
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
        Converted 1 layer (100.0% of the weights); embedding: 1 layer.
    """

    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    unused: tuple[PolicyRule, ...] = ()

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def shares(self) -> dict[str, Share]:
        """Count layers and weights by reason. A shared layer and a tied weight count once: a table that is also an
        output head counts as the head.

        Returns:
            The share of each reason, "converted" first.
        """
        return self._shares(self.rows)

    def unquantized(self) -> Share:
        """Count the converted layers whose recipe quantizes nothing, such as bf16.

        Returns:
            Their share, a part of "converted" in `shares`.
        """
        plain = UNQUANTIZED.linear()
        rows = [row for row in self.rows if row.reason == CONVERT and resolve(row.recipe).linear() == plain]
        found = self._shares(rows).get(CONVERT, Share(0, 0, 0.0))
        total = sum(share.weights for reason, share in self.shares().items() if reason != _TABLE)
        return replace(found, share=found.weights / (total or 1))

    def _shares(self, rows: Sequence[Row]) -> dict[str, Share]:
        found = dict.fromkeys(row.reason for row in rows)
        order = sorted(found, key=lambda reason: (reason != CONVERT, reason == _TABLE))
        counted: set[int] = set()
        counts: dict[str, tuple[int, int]] = {}
        for reason in order:
            layers = {row.module: row for row in rows if row.reason == reason}
            weights = 0
            for row in layers.values():
                if not row.identities or not counted.issuperset(row.identities):
                    weights += row.weights
                counted.update(row.identities)
            counts[reason] = (len(layers), weights)
        total = sum(weights for reason, (_, weights) in counts.items() if reason != _TABLE) or 1
        return {
            reason: Share(layers, weights, 0.0 if reason == _TABLE else weights / total)
            for reason, (layers, weights) in counts.items()
        }

    def summary(self) -> str:
        """Sum the report up in one line.

        Returns:
            The share that was converted, with the part of it that is not quantized, and the shares that were left
            alone, by reason. Tables that are looked up, such as embeddings, and norms are no part of 100 %.
        """
        shares, unquantized = self.shares(), self.unquantized()
        done = shares.pop(CONVERT, Share(0, 0, 0.0))
        text = f"Converted {done}"
        if 0 < unquantized.layers < done.layers:
            text += f", of which unquantized: {unquantized}"
        tables = shares.pop(_TABLE, None)
        text += "".join(f"; {reason}: {share}" for reason, share in shares.items())
        return f"{text}." if tables is None else f"{text}; {_TABLE}: {plural(tables.layers, 'layer')}."

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain data, for JSON.

        Returns:
            A dict with `shares`, `unquantized`, `notes`, `unused` and `rows`.
        """
        shares = {reason: dict(vars(share)) for reason, share in self.shares().items()}
        unused, unquantized = [rule.as_dict() for rule in self.unused], dict(vars(self.unquantized()))
        return {
            "shares": shares,
            "unquantized": unquantized,
            "notes": list(self.notes),
            "unused": unused,
            "rows": [r.as_dict() for r in self.rows],
        }

    def __str__(self) -> str:
        """Return the table, one line for paths that differ only in their numbers, then the reasons and the summary.
        The numbers are named where others have another recipe or reason."""
        rules = any(row.rule is not None for row in self.rows)
        equal: dict[tuple[str, ...], list[str]] = {}
        everywhere = [row.path for row in self.rows]
        for row in self.rows:
            cell_texts = [row.kind, row.recipe or "-", row.route]
            if rules:
                cell_texts.append("-" if row.rule is None else str(row.rule))
            equal.setdefault((path_pattern(row.path), row.why, *cell_texts), []).append(row.path)
        reasons: dict[str, list[str]] = {}
        cells: list[Sequence[str]] = [("layers", "count", "class", "recipe", "route", *(["rule"] if rules else []))]
        for (_, why, *texts), paths in equal.items():
            cells.append((path_names(paths, everywhere), str(len(paths)), *texts))
            if why:
                reasons.setdefault(why, []).extend(paths)
        notes = [f"{path_names(paths, everywhere)}: {why}." for why, paths in reasons.items()]
        return printable("\n".join([*columns(cells), *notes, *self.notes, self.summary()]))


# -- modules that are no layers ----------------------------------------------------------------------------------------

# (class, reason in a word, why it stays)
_KNOWN: tuple[tuple[tuple[type, ...], str, str], ...] = (
    ((nn.Embedding, nn.EmbeddingBag), "embedding", "a table that is looked up, not multiplied"),
    ((Convolution,), "convolution", "a convolution, and recipes are for matrix products"),
    ((nn.Bilinear,), "bilinear", "a product of two inputs, and recipes are for products of one with a weight"),
    ((nn.RNNBase, nn.RNNCellBase), "recurrent", "it multiplies its matrices itself. Build the cell from nn.Linear"),
)
_ADDED = ("embed", "token", "position")  # in names of parameters that are added to activations
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)  # their weights may have several dims but are not matrices


def other_rows(model: nn.Module, counted: Container[int]) -> Iterator[Row]:
    """Yield rows of modules that hold matrices but are no linear layers. `counted` are the ids of the weights of
    experts, some of which hold them in a module inside."""
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.Linear) or not (found := _matrices(module)):
            continue
        if all(id(p) in counted for p in found.values()):
            continue
        above = path.rpartition(".parametrizations.")[0]
        if isinstance(module, ParametrizationList) and isinstance(model.get_submodule(above), (nn.Linear, Quantized)):
            continue  # the row of its layer counts the weight
        reason, why = _why_left(module, found)
        weights, ids = sum(p.numel() for p in found.values()), tuple(id(p) for p in found.values())
        yield Row(path, qualified(module), "", "skipped", why, reason, weights, id(module), ids)


def _matrices(module: nn.Module) -> dict[str, Tensor]:
    """Return the module's own parameters, not its children's, that have at least two dims longer than 1."""
    if isinstance(module, _NORMS):
        return {}
    own = {name: p for name, p in module._parameters.items() if p is not None and not is_lazy(p)}
    return {name: p for name, p in own.items() if sum(n > 1 for n in p.shape) > 1}


def _why_left(module: nn.Module, found: dict[str, Tensor]) -> tuple[str, str]:
    """Return (reason in a word, sentence) for a module that convert does not change."""
    for classes, reason, why in _KNOWN:
        if isinstance(module, classes):
            return reason, why
    listed = ", ".join(f"{name} {list(p.shape)}" for name, p in found.items())
    if isinstance(module, ParametrizationList):
        return "parametrized", f"{listed} is what a parametrization makes another module's weight of"
    if "router" in type(module).__name__.lower():
        return "router", f"a router, with {listed}, stays in high precision"
    if all(any(word in name.lower() for word in _ADDED) for name in found):
        return "embedding", f"{listed} is a table that is added or looked up, not multiplied"
    if any(p.dim() == 3 and p.shape[0] > 1 for p in found.values()):
        return "stacked matrices", f"it multiplies {listed} itself. octavo.GroupedLinear multiplies stacked experts"
    return "other matrices", f"it uses {listed} in a forward of its own. Put an nn.Linear there to convert it"
