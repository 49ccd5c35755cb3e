"""`octavo.inspect`: record what a recipe does to every tensor of every layer of a model, while the model trains."""

import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from octavo._torch.modules import uncompiled
from octavo.errors import UnsupportedConfig
from octavo.inspection.advice import Advice, policy_of, try_recipes
from octavo.inspection.findings import Finding, findings, verdict
from octavo.inspection.heat import Sample
from octavo.inspection.inspected_layer import STATS, Inspected, Switch, inspected_class, is_inspected
from octavo.inspection.inspection_page import Made, page
from octavo.inspection.page_file import write
from octavo.inspection.picture import Picture, drawing
from octavo.inspection.provenance import subject
from octavo.inspection.statistics import SHAPE, TENSORS, fold
from octavo.inspection.steps import Loss, count_steps, listed
from octavo.inspection.tensor_rows import LayerState, TensorRow, by_layer, row_of, table, worst_first
from octavo.model.layer_lookup import alive, check_model, layers
from octavo.model.policy import Policy
from octavo.ops.quantized import UNQUANTIZED, Quantized
from octavo.recipes import recipe as resolve
from octavo.recipes.ambient import ambient
from octavo.text import plural

Log = Callable[[int, dict[str, float]], object]


class Inspection:
    """The block of `octavo.inspect`, and its report.

    Read it in the block or after it. A read waits for the device; a training step does not.

    Args:
        model: the model whose layers are inspected.
        every: measure one step of this many.
        html: the file of a page that is rewritten at each measured step; None for no page.
        log: a function that each measured step calls with its number and its numbers; None for none.

    Example:
        >>> model = nn.Sequential(octavo.Linear(64, 32, recipe="mxfp8"))
        >>> with octavo.inspect(model) as report:
        ...     model(torch.randn(16, 64)).square().mean().backward()
        >>> [row.tensor for row in report.rows()]
        ['x', 'w', 'dy', 'y', 'dw']
        >>> report.findings()
        []
        >>> report.reset()
        >>> report.rows()[0].calls
        0
    """

    def __init__(
        self, model: nn.Module, every: int = 1, html: str | Path | None = None, log: Log | None = None
    ) -> None:
        self._model, self._every, self._step = weakref.ref(model), every, 0
        self._html, self._log = html, log
        self._samples: list[Sample] = []  # of measured steps, if there is a page or a log
        self._folded: dict[str, Tensor] = {}  # the sums of the samples, by layer, on the CPU
        self._given: nn.Module | None = model  # until the block is entered: a block that is never left keeps no model
        self._switch = Switch()  # another one for each entry
        self._kept: dict[str, tuple[LayerState, Tensor]] = {}  # after the block
        self._hook: Any = None
        self._inside = False
        self._subject = subject(model)
        self._advice: list[Advice] = []

    # -- the block -------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        model = alive(self._model, "inspect")
        found = list(layers(model))
        taken = [path for path, layer in found if is_inspected(layer)]
        if taken or not found:
            raise UnsupportedConfig(
                f"octavo.inspect is already inspecting {taken[0] or 'this layer'}. Leave that block first."
                if taken
                else f"octavo.inspect watches layers of Octavo, and this {type(model).__name__} has none. Call "
                "octavo.convert(model, recipe) first."
            )
        on_meta = next((path for path, layer in found if layer._place().type == "meta"), None)
        if on_meta is not None:
            raise UnsupportedConfig(
                f"octavo.inspect records on the device of the weights, and {on_meta or 'this layer'} is on the meta "
                "device. Enter the block when the weights have values."
            )
        self._switch = Switch()
        self._switch.inside = self._switch.on = True
        self._step, self._kept, self._samples, self._folded = 0, {}, [], {}
        try:
            for _, layer in found:
                self._inspect(layer)
        except BaseException:
            self._leave()
            raise
        self._hook = count_steps(self)
        self._inside, self._given = True, None
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self._kept = {path: (state, stats) for path, state, stats in self._states()}
        finally:
            self._leave()
        if self._html is not None:
            write(Path(self._html), self.html())

    def __del__(self) -> None:
        if self.__dict__.get("_inside"):  # the block was never left, and nobody can read it any more
            self._leave()

    def _inspect(self, layer: Quantized) -> None:
        with torch.inference_mode(False):  # made there, it could not be written to elsewhere
            stats = torch.zeros(SHAPE, dtype=torch.float64, device=layer._place())
        layer._hidden.put(STATS, stats)
        layer.__dict__["inspection"] = self._switch
        if not isinstance(layer, Inspected):
            kind: Any = type(layer)
            layer.__class__ = inspected_class(kind)
        self._switch.layers.add(layer)

    def _leave(self) -> None:
        self._inside = False
        if self._hook is not None:
            self._hook.remove()
        self._switch.end()

    def next_step(self) -> None:
        """Count a step, so that `every` applies. A step of an optimizer with parameters of the model calls it; call it
        yourself where there is none.

        Example:
            >>> layer = octavo.Linear(64, 32, recipe="mxfp8")
            >>> with octavo.inspect(layer, every=2) as report:
            ...     for _ in range(4):
            ...         y = layer(torch.randn(16, 64))
            ...         report.next_step()
            >>> report.rows()[0].calls
            2
        """
        self._step += 1
        if self._inside and self._switch.on and (self._html is not None or self._log is not None):
            self._take_sample()
        self._switch.on = self._step % self._every == 0

    def _take_sample(self) -> None:
        """Read the numbers of the step that has ended, and begin anew for the next one."""
        rows = []
        for path, state, stats in self._measured():
            own = stats.cpu()
            rows += _rows(path, state, own)
            fold(self._folded.setdefault(path, torch.zeros_like(own)), own)
            stats.zero_()
        self._samples.append(Sample(self._step, by_layer(row for row in rows if row.calls)))
        if self._log is not None:
            self._log(self._step, _flat(rows))
        if self._html is not None:
            write(Path(self._html), self.html())

    def reset(self) -> None:
        """Forget all that was recorded so far."""
        for _, _, stats in self._measured() if self._inside else self._states():
            stats.zero_()
        self._samples, self._folded = [], {}

    # -- the report ------------------------------------------------------------------------------------------------

    def rows(self) -> list[TensorRow]:
        """Return the numbers of each layer's tensors, those that no call had left out.

        Returns:
            A row for x, w and y of each layer, and for dy, dx and dw where a backward ran; for a layer that never ran,
            one row of zeros.
        """
        rows = []
        for path, state, stats in self._states():
            rows += _rows(path, state, stats)
        return rows

    def _results(self) -> tuple[dict[str, LayerState], list[TensorRow]]:
        """Return what is known of each layer, and the rows."""
        return {path: state for path, state, _ in self._states()}, self.rows()

    def findings(self) -> list[str]:
        """Return a sentence for each fault that the numbers show: the layer, the tensor, the number, what to do.

        Returns:
            The sentences; an empty list if nothing is wrong.

        Example:
            >>> model = nn.Sequential(octavo.Linear(64, 64, recipe="fp8-current"))
            >>> with octavo.inspect(model) as report:
            ...     (model(torch.randn(16, 64)) * 0.0).sum().backward()
            >>> print(report.findings()[0])
            0: dy is zero in 1 of 1 calls, so neither this layer nor those before it learn from it. Look for a ...
        """
        return [str(finding) for finding in self._faults()]

    def try_recipes(self, batches: Iterable[Any], *, loss: Loss | None = None) -> list[Advice]:
        """Try other recipes for the layers with findings that a recipe can cure, on copies of the model, and measure
        the same numbers. The page then shows them. Call it after the block.

        Args:
            batches: the arguments of each call, a tuple each, or a tensor for a model of one argument. One or two are
                enough: the model runs about ten times on each.
            loss: a function of the model's output that returns the loss, as `octavo.compare` takes it.

        Returns:
            For each layer the recipe that helps most, never the one in use, with its number and those of all that
                were tried. A recipe that costs the layer's results more than it helps its tensor is none.

        Raises:
            UnsupportedConfig: the block has not ended, the model was deleted, or there are no batches.

        Example:
            >>> model = nn.Sequential(octavo.Linear(64, 64, recipe="fp8-current"))
            >>> with torch.no_grad():
            ...     model[0].weight[0, 0] = 1e6
            >>> x = torch.randn(32, 64)
            >>> with octavo.inspect(model) as report:
            ...     model(x).square().mean().backward()
            >>> advice = report.try_recipes([x])
            >>> advice[0].number, advice[0].before > 0.9, advice[0].after < 0.1
            ('underflow', True, True)
            >>> report.policy().rules[0].layers
            ('0',)
        """
        model = self._model()
        if self._inside or model is None:
            raise UnsupportedConfig(
                "report.try_recipes runs copies of the model: call it after the block of octavo.inspect, and keep the "
                "model in a variable."
            )
        self._advice = try_recipes(model, listed(batches), self._faults(), inspect, loss)
        return self._advice

    def policy(self) -> Policy:
        """Return the policy of what `try_recipes` found: the recipes that helped, and those in use for other layers.

        Returns:
            The policy. `str(policy)` is a TOML file, which `octavo.Policy.load` and `--policy` read.
        """
        return policy_of(self._advice, {path: str(state.recipe) for path, state, _ in self._states()})

    def _faults(self) -> list[Finding]:
        return findings(*self._results())

    def to_dict(self) -> dict[str, float]:
        """Return the numbers as a flat dict, for TensorBoard, W&B and other loggers.

        Returns:
            Numbers by "layer/tensor/number", such as "blocks.0.fc1/dy/underflow". Numbers that do not exist are left
                out, and so are histograms.

        Example:
            >>> layer = nn.Sequential(octavo.Linear(64, 32, recipe="mxfp8"))
            >>> with octavo.inspect(layer) as report:
            ...     y = layer(torch.ones(16, 64))
            >>> report.to_dict()["0/x/amax"]
            1.0
        """
        return _flat(self.rows())

    def save_html(self, path: str) -> None:
        """Write the report as one HTML file without other files: the findings, a heat map of the layers, pictures of
        the worst tensors in their formats, and the table.

        Args:
            path: the file.

        Example:
            >>> import os, tempfile
            >>> layer = octavo.Linear(64, 32, recipe="mxfp8")
            >>> with octavo.inspect(layer) as report, tempfile.TemporaryDirectory() as folder:
            ...     y = layer(torch.randn(16, 64))
            ...     report.save_html(os.path.join(folder, "report.html"))
        """
        write(Path(path), self.html())

    def html(self, command: str = "") -> str:
        """Return the text of `save_html`.

        Args:
            command: the command that made the report, which the page then names.

        Returns:
            A whole HTML page.

        Example:
            >>> layer = octavo.Linear(64, 32, recipe="mxfp8")
            >>> with octavo.inspect(layer) as report:
            ...     y = layer(torch.randn(16, 64))
            >>> report.html()[:15]
            '<!DOCTYPE html>'
        """
        states, rows = self._results()
        made = Made(self._subject, self._title(), command, running=self._inside and self._html is not None)
        faults = findings(states, rows)
        said = [fault.without_way() for fault in faults]
        return page(states, rows, said, self._advice, self._samples, made)

    def draw(self, layer: str, tensor: str) -> Picture:
        """Return the picture of a tensor in its format: a histogram of its magnitudes over the values that the format
        can hold at its scale, with the ranges in which values become zero and saturate.

        Args:
            layer: the layer's path in the model.
            tensor: "x", "w", "dy", "y", "dx" or "dw". The last three are not cast, and shown without a format.

        Returns:
            The picture. A notebook shows it; `.save("dy.svg")` and `.save("dy.png")` write it.

        Raises:
            UnsupportedConfig: nothing was measured of such a tensor.

        Example:
            >>> model = nn.Sequential(octavo.Linear(64, 32, recipe="mxfp8"))
            >>> with octavo.inspect(model) as report:
            ...     model(torch.randn(16, 64)).square().mean().backward()
            >>> report.draw("0", "dy").svg[:4]
            '<svg'
        """
        return drawing(*self._results(), layer, tensor)

    def text(self, top: int | None = None) -> str:
        """Return the report as text: the findings, what other recipes would do, and the table.

        Args:
            top: how many layers the table has, those with findings and then the worst first; None has all, in the
                order of the model.

        Returns:
            The text; `print(report)` prints it with all layers.

        Example:
            >>> model = nn.Sequential(octavo.Linear(64, 32, recipe="mxfp8"), octavo.Linear(32, 32, recipe="mxfp8"))
            >>> with octavo.inspect(model) as report:
            ...     y = model(torch.randn(16, 64))
            >>> print(report.text(top=1).splitlines()[-1])
            Left out: 1 layer, none of them with a finding.
        """
        states, rows = self._results()
        faults = findings(states, rows)
        said = [f"- {fault.without_way() if self._advice else fault}" for fault in faults] or [verdict(rows)]
        tried = ["", "Tried on the same batches:", *(f"- {one}" for one in self._advice)] if self._advice else []
        shown, rest = (rows, []) if top is None else worst_first(rows, {fault.layer for fault in faults}, top)
        return "\n".join([self._title(), "", *said, *tried, "", table(states, shown), *rest])

    def __str__(self) -> str:
        return self.text()

    def _title(self) -> str:
        return f"{plural(len(list(self._states())), 'layer')} over {plural(self._step, 'step')}" + (
            "" if self._every == 1 else f", one of {self._every} measured"
        )

    def _states(self) -> Iterator[tuple[str, LayerState, Tensor]]:
        if not self._inside:
            yield from ((path, state, stats) for path, (state, stats) in self._kept.items())
            return
        for path, state, stats in self._measured():
            if path in self._folded:
                whole = self._folded[path].clone()
                fold(whole, stats.cpu())
                stats = whole
            yield path, state, stats

    def _measured(self) -> Iterator[tuple[str, LayerState, Tensor]]:
        """Yield what was measured in the block since the last sample."""
        model = self._model()
        for path, layer in () if model is None else layers(model):
            stats = layer._hidden._buffers.get(STATS)
            if stats is not None:
                yield path, _state(layer), stats


def inspect(model: nn.Module, *, every: int = 1, html: str | Path | None = None, log: Log | None = None) -> Inspection:
    """Record what the recipe does to each tensor of each layer, for the calls in a block.

    For x, w and dy it measures the cast that the layer makes, with the scale in use: shares of values that underflow to
    zero, saturate or are not finite, the signal-to-noise ratio, histograms of amaxes and scales. It compares y, dx and
    dw with those of the same layer in float32 (the float32 reference), on the same x, w and dy.

    In the block each layer runs by itself: fusions that would hide one of its tensors are off, and so results may
    differ in their last bits. Gradients of `octavo.MoE` differ by the rounding of codes, some percent: the fused
    experts cast another dy. Of a layer that is split over ranks, each rank measures its own part, before sums over
    ranks; enter the block on all of them. A step takes several times as long. Nothing waits for the device until the
    report is read. Compiled functions are compiled again in the block, and their graphs of before serve again after it;
    a CUDA graph that was captured before records nothing. Outside of the block the layers are as they were.

    Args:
        model: a module with Octavo layers. The block changes their classes, and restores them. It keeps no reference
            to the model, so that you must.
        every: measure one step of this many, as optimizers count them, or `report.next_step()`.
        html: a file. Each measured step rewrites it as a page with the numbers so far and a time axis for each layer.
        log: a function `log(step, numbers)`, which each measured step calls with what `to_dict` returns of that step
            alone. Both wait for the device once for each measured step. Give each process a file of its own.

    Returns:
        The block and its report: `with octavo.inspect(model) as report`. Print it, or call its methods.

    Raises:
        UnsupportedConfig: `model` is no module, has no layer of Octavo or is inspected already; or `every` is no int
            from 1 up.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
        >>> octavo.convert(model, "nvfp4").summary()
        'Converted 2 layers (100.0% of the weights).'
        >>> with octavo.inspect(model) as report:
        ...     model(torch.randn(32, 64)).square().mean().backward()
        >>> report.to_dict()["2/dw/cosine"] > 0.9
        True
    """
    model = uncompiled(model)
    check_model(model, "inspect", error=UnsupportedConfig)
    if type(every) is not int or every < 1:
        raise UnsupportedConfig(f"octavo.inspect(every=) is an int from 1 up, got {every!r}. 10 measures a tenth.")
    return Inspection(model, every, html, log)


def _rows(path: str, state: LayerState, stats: Tensor) -> list[TensorRow]:
    """Return the rows of a layer's tensors that were measured; one of zeros if none was."""
    numbers = stats.tolist()
    made = [row_of(path, state, name, numbers[i]) for i, name in enumerate(TENSORS)]
    return [row for row in made if row.calls] or made[:1]


def _flat(rows: Iterable[TensorRow]) -> dict[str, float]:
    return {
        f"{row.layer or 'model'}/{row.tensor}/{name}": value for row in rows for name, value in row.numbers().items()
    }


def _state(layer: Quantized) -> LayerState:
    recipe = layer.recipe or layer.__dict__.get("inspected_recipe") or ambient.recipe or UNQUANTIZED
    return LayerState(resolve(recipe), layer._scaling._updates)
