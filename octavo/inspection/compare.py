"""`octavo.compare`: the gradients of two recipes, and of none, at the same weights on the same batches."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo._torch.modules import uncompiled
from octavo.errors import UnsupportedConfig
from octavo.inspection.charts import bars
from octavo.inspection.explain import copied
from octavo.inspection.steps import Loss, give_recipe, gradients_of, listed
from octavo.inspection.webpage import document, paragraph, table
from octavo.model.layer_lookup import check_model, layers
from octavo.model.step import step
from octavo.recipes import Recipe
from octavo.recipes import recipe as resolve
from octavo.text import columns

ALL = "(all)"  # the row of all parameters together


class ComparedRow(NamedTuple):
    """The gradient of one parameter in both recipes.

    Attributes:
        parameter: its name; "(all)" for all parameters together.
        size: the norm of the unquantized gradient, a mean over the batches in which the parameter has one.
        first: the mean cosine of the first recipe's gradient with the unquantized one.
        second: the same of the second recipe.
        mutual: the mean cosine of the two recipes' gradients with each other.
        first_error: the relative error of the first recipe's gradient: the norm of the difference by the norm.
        second_error: the same of the second recipe.
    """

    parameter: str
    size: float
    first: float
    second: float
    mutual: float
    first_error: float
    second_error: float


class Comparison(NamedTuple):
    """The result of `octavo.compare`. It prints as a table, the parameters with the largest difference first.

    Attributes:
        recipes: the strings of the two recipes.
        batches: how many batches were run.
        losses: the mean loss: unquantized, first recipe, second recipe.
        rows: a row for all parameters together, then one for each parameter, in the order of the model.
    """

    recipes: tuple[str, str]
    batches: int
    losses: tuple[float, float, float]
    rows: tuple[ComparedRow, ...]

    def to_dict(self) -> dict[str, float]:
        """Return the numbers as a flat dict, for loggers.

        Returns:
            Numbers by "parameter/recipe/number", such as "fc1.weight/nvfp4/cosine". The two names are distinct: the
                second of two equal recipes is marked by "(2)".

        Example:
            >>> model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
            >>> found = octavo.compare(model, [torch.randn(32, 64)], "mxfp8", "nvfp4").to_dict()
            >>> found["2.weight/mxfp8/cosine"] > found["2.weight/nvfp4/cosine"]
            True
        """
        first, second = self._names()
        found = {f"loss/{name}": loss for name, loss in zip(("unquantized", first, second), self.losses, strict=True)}
        for row in self.rows:
            found |= {
                f"{row.parameter}/{first}/cosine": row.first,
                f"{row.parameter}/{second}/cosine": row.second,
                f"{row.parameter}/{first}/error": row.first_error,
                f"{row.parameter}/{second}/error": row.second_error,
                f"{row.parameter}/mutual_cosine": row.mutual,
            }
        return {name: value for name, value in found.items() if math.isfinite(value)}

    def save_html(self, path: str) -> None:
        """Write the table and a plot of the errors as one HTML file without other files.

        Args:
            path: the file.

        Example:
            >>> import os, tempfile
            >>> found = octavo.compare(octavo.Linear(64, 64), [torch.randn(32, 64)], "mxfp8", "nvfp4")
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     found.save_html(os.path.join(folder, "report.html"))
        """
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.html())

    def html(self) -> str:
        """Return the text of `save_html`.

        Returns:
            A whole HTML page.

        Example:
            >>> octavo.compare(octavo.Linear(64, 64), [torch.randn(32, 64)], "mxfp8", "nvfp4").html()[:15]
            '<!DOCTYPE html>'
        """
        ordered, (first, second) = self._ordered(), self._names()
        header, *rows = self._cells(ordered)
        errors = [error for row in ordered for error in (row.first_error, row.second_error)]
        largest = max(filter(math.isfinite, errors), default=0) or 1
        plots = [bars(row.first_error, row.second_error, largest) for row in ordered]
        body = [[*cells, plot] for cells, plot in zip(rows, plots, strict=True)]
        head = (*header, f"error up to {largest:.0%}: {first} above, {second} below")
        return document("octavo.compare", [paragraph(self._title()), table(head, body, left=True)], wide=True)

    def __str__(self) -> str:
        return "\n".join([self._title(), "", *columns(self._cells(self._ordered()))])

    def _ordered(self) -> list[ComparedRow]:
        """The whole gradient, then the parameters, those with the largest difference first."""
        whole, *rest = self.rows
        return [whole, *sorted(rest, key=lambda row: -abs(row.first_error - row.second_error))]

    def _title(self) -> str:
        names = ("unquantized", *self._names())
        losses = ", ".join(f"{loss:.5g} {name}" for name, loss in zip(names, self.losses, strict=True))
        return f"Gradients over {self.batches} batch{'' if self.batches == 1 else 'es'}; mean loss {losses}"

    def _cells(self, rows: Sequence[ComparedRow]) -> list[tuple[str, ...]]:
        first, second = self._names()
        header = ["gradient of", "norm", f"cosine {first}", f"cosine {second}", f"error {first}", f"error {second}"]
        cells: list[tuple[str, ...]] = [(*header, "mutual cosine")]
        for row in rows:
            cosines, errors = (row.first, row.second), (row.first_error, row.second_error)
            texts = [*[f"{cosine:.5f}" for cosine in cosines], *[f"{error:.2%}" for error in errors]]
            cells.append((row.parameter, f"{row.size:.3g}", *texts, f"{row.mutual:.5f}"))
        return cells

    def _names(self) -> tuple[str, str]:
        first, second = self.recipes
        return first, f"{second} (2)" if first == second else second


@torch.inference_mode(False)
@torch.enable_grad()  # it compares gradients, which a caller without them asks for all the same
def compare(
    model: nn.Module, batches: Iterable[Any], first: str | Recipe, second: str | Recipe, *, loss: Loss | None = None
) -> Comparison:
    """Compute the gradients of two recipes on the same batches at the same weights, beside the unquantized ones.

    It runs three deep copies of the model: one in each recipe, and one unquantized. The model and torch's generators
    stay as they are; dropout draws the same numbers in all three. The weights are not updated between batches; delayed
    scales are.

    Args:
        model: a module. Its quantized layers get the recipes; if it has no Octavo layer, `octavo.convert` makes them.
        batches: the arguments of each call, a tuple each, or a tensor for a model of one argument.
        first: a recipe: a name, a canonical string or a `Recipe`.
        second: another recipe.
        loss: a function of the model's output that returns the loss. None takes the first output that needs a gradient
            if it is one number, and else its product with a fixed random direction.

    Returns:
        The cosine and the relative error of each parameter's gradient. Print it, or read its `rows`.

    Raises:
        UnsupportedConfig: `model` is no module or cannot be copied; there are no batches; no output takes a gradient;
            or a layer cannot run in a recipe.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
        >>> found = octavo.compare(model, [torch.randn(32, 64)], "fp8-block", "nvfp4")
        >>> found.rows[0].parameter, found.rows[0].first_error < found.rows[0].second_error
        ('(all)', True)
    """
    model = uncompiled(model)
    check_model(model, "compare", error=UnsupportedConfig)
    recipes = resolve("bf16"), resolve(first), resolve(second)
    runs = listed(batches)
    subjects = [copied(model, "compare") for _ in recipes]
    for subject, one in zip(subjects, recipes, strict=True):
        give_recipe(subject, one)
        for _, layer in layers(subject):
            layer.fuse_wgrad_accumulation = layer.delay_wgrad_compute = False  # every gradient is in .grad
    names = [name for name, p in subjects[0].named_parameters() if p.requires_grad]
    sums: dict[str, Tensor] = {}
    losses = []
    gpus = [t.device for t in model.parameters() if t.device.type == "cuda"]
    for place, batch in enumerate(runs):
        found = []
        for subject in subjects:
            with torch.random.fork_rng(devices=list(dict.fromkeys(gpus))):
                torch.manual_seed(place)
                subject.zero_grad()
                found.append(gradients_of(subject, batch, loss))
            step(subject)
        losses.append(torch.stack([value.double() for value in found]))
        _add(sums, names, [dict(subject.named_parameters()) for subject in subjects])
    means = torch.stack(losses).mean(0).tolist()
    rows = [_row(name, numbers) for name, numbers in sums.items()]
    rows.sort(key=lambda row: row.parameter != ALL)  # the sum is known last, and comes first
    return Comparison((recipes[1].key, recipes[2].key), len(runs), (means[0], means[1], means[2]), tuple(rows))


def _add(sums: dict[str, Tensor], names: Sequence[str], parameters: Sequence[dict[str, nn.Parameter]]) -> None:
    """Add the products of one batch's gradients, on the device: of each pair of the three copies."""
    whole: Tensor | None = None
    for name in names:
        own = [copy[name].grad for copy in parameters]
        if any(g is None for g in own):
            continue  # not all of them have one: a branch that this batch did not take
        a = torch.stack([g.double().flatten() for g in own if g is not None])
        products = a @ a.T
        whole = products if whole is None else whole + products.to(whole.device)
        _fold(sums, name, products)
    if whole is not None:
        _fold(sums, ALL, whole)


def _fold(sums: dict[str, Tensor], name: str, products: Tensor) -> None:
    """Count a batch and add its numbers, from the products of the gradients: unquantized, first, second."""
    norms = products.diagonal().sqrt()
    cosines = products / (norms[:, None] * norms[None, :]).clamp_min(1e-300)
    errors = [(products[0, 0] - 2 * products[0, i] + products[i, i]).clamp_min(0).sqrt() for i in (1, 2)]
    relative = [error / norms[0].clamp_min(1e-300) for error in errors]
    one = torch.ones_like(norms[0])
    found = torch.stack([one, norms[0], cosines[0, 1], cosines[0, 2], cosines[1, 2], *relative])
    sums[name] = found if name not in sums else sums[name] + found.to(sums[name].device)


def _row(name: str, numbers: Tensor) -> ComparedRow:
    batches, *totals = numbers.tolist()  # those in which the parameter has a gradient
    return ComparedRow(name, *(total / batches for total in totals))
