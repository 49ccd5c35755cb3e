"""Numerics of a run: a recipe's effect on tensors at sampled steps, and the memory that one step keeps for backward.

Both are measured on copies of the model, so that a sampled run has every bit of one that is not.
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from octavo.demo.gpt import loss_of
from octavo.inspection.inspect import inspect
from octavo.inspection.picture import worst_of
from octavo.inspection.tensor_rows import by_layer
from octavo.model.layer_lookup import layers

PICTURED = 2  # tensors of a sample


class Sampler:
    """Inspect a model at so many of its steps, evenly spaced, or at each `every`th; the last one is among them."""

    def __init__(self, steps: int, count: int, every: int | None = None) -> None:
        self.at = {max(1, round(steps * n / count)) for n in range(1, count + 1)}
        if every is not None and count:
            self.at = {*range(every, steps + 1, every), steps}
        self.samples: list[dict[str, Any]] = []
        self.kept_mib: float | None = None
        self._batch: Tensor | None = None

    def following(self, data: Iterable[Tensor], device: torch.device) -> Iterator[Tensor]:
        """Yield the batches, and remember the latest."""
        for batch in data:
            self._batch = batch.to(device)
            yield self._batch

    def due(self, step: int) -> bool:
        return step in self.at

    def take(self, step: int, model: nn.Module) -> None:
        """Measure the model after a step, on the batch of that step."""
        assert self._batch is not None
        if self.kept_mib is None:
            self.kept_mib = bytes_kept(model, self._batch) / 2**20
        if next(layers(model), None) is not None:
            self.samples.append({"step": step, **tensors_of(model, self._batch)})

    def go_on(self, samples: list[dict[str, Any]], kept_mib: float | None) -> None:
        """Go on with what a saved run has."""
        self.samples[:] = samples
        self.kept_mib = kept_mib


def tensors_of(model: nn.Module, batch: Tensor) -> dict[str, Any]:
    """Return the numbers of `octavo.inspect` over one forward and backward of a copy: by layer, tensor and name, with
    what is wrong in sentences, and the histograms of the worst tensors."""
    with _apart(batch):
        subject = copy.deepcopy(model)
        with inspect(subject) as report:
            loss_of(subject, batch).backward()  # type: ignore[no-untyped-call]
        worst = [one._asdict() for one in worst_of(*report._results(), PICTURED)]
        return {"layers": by_layer(report.rows()), "findings": report.findings(), "worst": worst}


def bytes_kept(model: nn.Module, batch: Tensor) -> int:
    """Return the bytes that autograd keeps from a forward for its backward, without the parameters' own."""
    with _apart(batch):
        subject = copy.deepcopy(model)
        return bytes_saved(subject, lambda: loss_of(subject, batch))


def bytes_saved(model: nn.Module, run: Callable[[], object]) -> int:
    """Return the bytes that autograd saves while `run` calls the model, each storage once and parameters left out."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}  # bytes by address

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()  # all that is saved has an address of its own while this lives
    del result
    return sum(kept.values())


def _apart(batch: Tensor) -> Any:
    """Return a context that leaves torch's generators as they were."""
    return torch.random.fork_rng(devices=[batch.device] if batch.device.type == "cuda" else [])
