"""`octavo.compare`: the gradients of two recipes, and of none, at the same weights on the same batches."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo._torch.modules import uncompiled
from octavo.errors import UnsupportedConfig
from octavo.inspection import webpage as web
from octavo.inspection.explain import copied
from octavo.inspection.heat import shaded
from octavo.inspection.inspect import inspect
from octavo.inspection.inspected_layer import is_inspected
from octavo.inspection.page_file import write
from octavo.inspection.picture import Histogram, pictures, worst_of
from octavo.inspection.provenance import Subject, provenance, subject
from octavo.inspection.steps import Batch, Loss, give_recipe, listed, seeded_gradients
from octavo.model.layer_lookup import check_model, layers
from octavo.model.policy import Policy
from octavo.model.step import step
from octavo.recipes import Recipe
from octavo.recipes import recipe as resolve
from octavo.text import columns, one_line, plural

ALL = "(all)"  # the row of all parameters together
WHOLE = "the whole model"  # the same on a page
ALIKE = 1.1  # two errors whose ratio is less are alike: few batches do not tell them apart
SHOWN, PICTURED = 16, 2  # parameters that a page does not fold; pictures of each recipe
ERROR, COSINE = (0.05, 0.5), (0.999, 0.9)  # the values at which a cell is not and is fully shaded
SHADING = "A cell is unshaded at an error of 5 % or a cosine of 0.999, and fully shaded at 50 % or 0.9."
MEANING = (
    "Error: the norm of the difference from the unquantized gradient, by the norm. Those whose errors differ most are "
    "first. An error of one step is no loss: octavo train shows where it ends."
)


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
        subject: the model and its device, in words.
        worst: of each recipe, the histograms of the tensors whose casts are worst, on the first batch.
    """

    recipes: tuple[str, str]
    batches: int
    losses: tuple[float, float, float]
    rows: tuple[ComparedRow, ...]
    subject: Subject = Subject("A model", "")
    worst: tuple[tuple[Histogram, ...], ...] = ()

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
        """Write the answer and the table, shaded by error, as one HTML file without other files.

        Args:
            path: the file.

        Example:
            >>> import os, tempfile
            >>> found = octavo.compare(octavo.Linear(64, 64), [torch.randn(32, 64)], "mxfp8", "nvfp4")
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     found.save_html(os.path.join(folder, "report.html"))
        """
        write(Path(path), self.html())

    def html(self, command: str = "") -> str:
        """Return the text of `save_html`.

        Args:
            command: the command that made the report, which the page then names.

        Returns:
            A whole HTML page.

        Example:
            >>> octavo.compare(octavo.Linear(64, 64), [torch.randn(32, 64)], "mxfp8", "nvfp4").html()[:15]
            '<!DOCTYPE html>'
        """
        header, *rows = self._cells(self._ordered())
        heat = [
            _heat_row(place, row, cells) for place, (row, cells) in enumerate(zip(self._ordered(), rows, strict=True))
        ]
        maps = [web.heat_map("Gradients of both recipes beside the unquantized ones", header, heat[: SHOWN + 1])]
        if rest := heat[SHOWN + 1 :]:
            said = f"{len(rest)} more parameters, whose errors differ less"
            maps.append(web.folded(said, web.heat_map("The other gradients", header, rest)))
        parts = [
            web.cards([self._card(place) for place in (0, 1)]),
            web.section("Gradients", web.shading(f"{SHADING} {MEANING}"), *maps),
            pictures(dict(zip(self._names(), self.worst, strict=False))),
        ]
        said = "See what each recipe does to the tensors of each layer, and where a training ends in it."
        target = command.split()[2] if command.startswith("octavo compare ") else web.EXAMPLE
        commands = [f'octavo inspect {target} --recipe "{recipe}" --html inspect.html' for recipe in self.recipes]
        made = provenance(
            model=self.subject.model,
            recipes=" and ".join(self._names()),
            measured=self._measured(),
            device=self.subject.device,
            command=command,
        )
        return web.document(self._headline(), made, [*parts, web.try_next(said, commands)])

    def text(self, top: int | None = None) -> str:
        """Return the result as text, with A for the first recipe and B for the second.

        Args:
            top: how many parameters the table has, those whose errors differ most; None has all.

        Returns:
            The text; `print(found)` prints it with all parameters.

        Example:
            >>> found = octavo.compare(octavo.Linear(64, 64), [torch.randn(32, 64)], "mxfp8", "nvfp4")
            >>> print(found.text(top=1).splitlines()[-1])
            Left out: 1 parameter, whose errors differ less.
        """
        names = [("A", self._names()[0]), ("B", self._names()[1])]
        losses = [f"mean loss {loss:.5g}" for loss in self.losses]
        head = [("", "unquantized", losses[0])]
        head += [(letter, name, loss) for (letter, name), loss in zip(names, losses[1:], strict=True)]
        rows = self._ordered() if top is None else self._ordered()[: top + 1]
        cells = [("gradient of", "error A", "error B", "cosine A", "cosine B")]
        for row in rows:
            numbers = f"{row.first_error:.2%}", f"{row.second_error:.2%}", f"{row.first:.5f}", f"{row.second:.5f}"
            cells.append((row.parameter, *numbers))
        left = len(self.rows) - len(rows)
        rest = [f"Left out: {plural(left, 'parameter')}, whose errors differ less."] if left else []
        title = f"Gradients over {plural(self.batches, 'batch', 'batches')}"
        return "\n".join([title, *columns(head), "", *columns(cells), *rest])

    def __str__(self) -> str:
        return self.text()

    def _ordered(self) -> list[ComparedRow]:
        """Return the whole gradient, then the parameters, those with the largest difference first."""
        whole, *rest = self.rows
        return [whole, *sorted(rest, key=lambda row: -abs(row.first_error - row.second_error))]

    def _headline(self) -> str:
        """Return which recipe's gradients are nearer to the unquantized ones, if one's are."""
        total, names = self.rows[0], self._names()
        errors = sorted(zip((total.first_error, total.second_error), names, strict=True))
        (low, nearer), (high, other) = errors
        if not math.isfinite(high) or not math.isfinite(low):
            lost = [name for error, name in errors if not math.isfinite(error)]
            return f"Gradients of {' and '.join(lost)} are not finite"
        if high <= ALIKE * low:
            both = f"({_percent(low)}, {_percent(high)})"
            return f"Gradients of {names[0]} and {names[1]} are about as near to unquantized ones {both}"
        errors_said = f"error {_percent(low)}, against {_percent(high)} in {other}"
        return f"Gradients of {nearer} are nearer to unquantized ones: {errors_said}"

    def _card(self, place: int) -> web.Card:
        whole, *rest = self.rows
        error = (whole.first_error, whole.second_error)[place]
        lines = [f"Cosine {(whole.first, whole.second)[place]:.5f}", f"Mean loss {self.losses[place + 1]:.5g}, "
                 f"{self.losses[0]:.5g} unquantized"]  # fmt: skip
        if rest:
            worst = max(rest, key=lambda row: (row.first_error, row.second_error)[place])
            row = web.link(one_line(worst.parameter), f"row-{self._ordered().index(worst)}")
            lines.append(web.joined("Worst: ", row, f", {_percent((worst.first_error, worst.second_error)[place])}"))
        return web.Card(self._names()[place], _percent(error), "error of the whole gradient", lines)

    def _measured(self) -> str:
        return f"gradients over {plural(self.batches, 'batch', 'batches')}, without an optimizer"

    def _cells(self, rows: Sequence[ComparedRow]) -> list[tuple[str, ...]]:
        first, second = self._names()
        sides = [web.joined(f"{what} ", web.unbroken(name)) for what in ("cosine", "error") for name in (first, second)]
        header = ["gradient of", "norm", *sides]
        cells: list[tuple[str, ...]] = [(*header, "mutual cosine")]
        for row in rows:
            cosines, errors = (row.first, row.second), (row.first_error, row.second_error)
            texts = [*[f"{cosine:.5f}" for cosine in cosines], *[f"{100 * error:.2f} %" for error in errors]]
            cells.append(
                (WHOLE if row.parameter == ALL else row.parameter, f"{row.size:.3g}", *texts, f"{row.mutual:.5f}")
            )
        return cells

    def _names(self) -> tuple[str, str]:
        first, second = self.recipes
        return first, f"{second} (2)" if first == second else second


def _heat_row(place: int, row: ComparedRow, cells: Sequence[str]) -> web.HeatRow:
    """Return a row of the page, from the text of its columns."""
    errors, cosines = (row.first_error, row.second_error), (row.first, row.second)
    shades = [0.0, *(shaded(value, COSINE) for value in cosines), *(shaded(value, ERROR) for value in errors), 0.0]
    name, *texts = cells
    return web.HeatRow(
        one_line(name), [web.Cell(t, shade) for t, shade in zip(texts, shades, strict=True)], f"row-{place}"
    )


@torch.inference_mode(False)
@torch.enable_grad()  # it compares gradients, which a caller without them asks for all the same
def compare(
    model: nn.Module,
    batches: Iterable[Any],
    first: str | Recipe | Policy,
    second: str | Recipe | Policy,
    *,
    loss: Loss | None = None,
) -> Comparison:
    """Compute the gradients of two recipes on the same batches at the same weights, beside the unquantized ones.

    It runs three deep copies of the model: one in each recipe, and one unquantized. The model and torch's generators
    stay as they are; dropout draws the same numbers in all three. The weights are not updated between batches; delayed
    scales are. At the end the two copies run the first batch once more in `octavo.inspect`, for the page's pictures.

    Args:
        model: a module. Its quantized layers get the recipes; if it has no Octavo layer, `octavo.convert` makes them.
        batches: the arguments of each call, a tuple each, or a tensor for a model of one argument.
        first: a recipe: a name, a canonical string or a `Recipe`.
        second: another recipe. Each may be an `octavo.Policy`, too.
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
    recipes = [one if isinstance(one, Policy) else resolve(one) for one in ("bf16", first, second)]
    runs = listed(batches)
    subjects = [copied(model, "compare") for _ in recipes]
    for copy, one in zip(subjects, recipes, strict=True):
        give_recipe(copy, one)
        for _, layer in layers(copy):
            layer.fuse_wgrad_accumulation = layer.delay_wgrad_compute = False  # every gradient is in .grad
    names = [name for name, p in subjects[0].named_parameters() if p.requires_grad]
    sums: dict[str, Tensor] = {}
    losses = []
    for place, batch in enumerate(runs):
        found = []
        for copy in subjects:
            found.append(seeded_gradients(copy, batch, loss, place))
            step(copy)
        losses.append(torch.stack([value.double() for value in found]))
        _add(sums, names, [dict(copy.named_parameters()) for copy in subjects])
    means = torch.stack(losses).mean(0).tolist()
    rows = [_row(name, numbers) for name, numbers in sums.items()]
    rows.sort(key=lambda row: row.parameter != ALL)  # the sum is known last, and comes first
    losses_of = (means[0], means[1], means[2])
    names_of = (name_of(recipes[1]), name_of(recipes[2]))
    worst = tuple(_worst(copy, runs[0], loss) for copy in subjects[1:])
    return Comparison(names_of, len(runs), losses_of, tuple(rows), subject(model), worst)


def _worst(model: nn.Module, batch: Batch, loss: Loss | None) -> tuple[Histogram, ...]:
    """Return the histograms of the worst casts of one more forward and backward; none in a block of `octavo.inspect`,
    whose copies record nothing more."""
    if any(is_inspected(layer) for _, layer in layers(model)):
        return ()
    with inspect(model) as report:
        seeded_gradients(model, batch, loss, 0)
    states, rows = report._results()
    return tuple(worst_of(states, rows, PICTURED))


def name_of(one: Recipe | Policy) -> str:
    return "policy" if isinstance(one, Policy) else one.key


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


def _percent(error: float) -> str:
    return f"{100 * error:.1f} %"
