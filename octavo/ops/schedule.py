"""Recipes that a layer changes to at given steps of a run. The layer counts the steps on the host."""

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo._torch.fakes import FakeTensor
from octavo.errors import UnsupportedConfig, UnsupportedDevice, UnsupportedShape
from octavo.recipes import Recipe

STEP = "schedule.step"  # its name in a checkpoint


@dataclass
class RecipeSchedule:
    """The recipes of a layer by step, and the number of steps that it has made."""

    first: Recipe
    changes: tuple[tuple[int, Recipe], ...]  # in order of their steps
    step: int
    since: int = 0  # the step from which on the run has had the first recipe; the ones before it are not known

    def recipe_at(self, step: int) -> Recipe:
        """Return the recipe after a number of steps."""
        return next((recipe for start, recipe in reversed(self.changes) if start <= step), self.first)

    def export(self) -> Tensor:
        """Return the number of steps, for a checkpoint."""
        return torch.tensor(self.step, device="cpu", dtype=torch.int64)


def check_step(found: object, schedule: RecipeSchedule | None, path: str) -> None:
    """Raise if a checkpoint's number of steps is none, or is one at which the layer at `path` has another recipe."""
    name = f"{path}.{STEP}" if path else STEP
    if not isinstance(found, Tensor) or found.shape != () or found.dtype != torch.int64:
        raise UnsupportedShape(f"{name} is an int64 tensor without dims, got {found!r}.")
    if found.is_meta:
        raise UnsupportedDevice(f"{name} is on the meta device, and has no values. Load it from a file.")
    if isinstance(found, FakeTensor):
        return
    step = int(found)
    if step < 0:
        raise UnsupportedConfig(f"{name} is a number of steps from 0 up, got {step}.")
    if schedule is not None and step < schedule.since:
        raise UnsupportedConfig(
            f"{name} is {step}, and this layer runs in {schedule.recipe_at(schedule.step)} only from step "
            f"{schedule.since} on. Convert the model for that step before you load: "
            f"octavo.convert(model, policy, step={step})."
        )
    if schedule is not None and (wanted := schedule.recipe_at(step)) != schedule.recipe_at(schedule.step):
        raise UnsupportedConfig(
            f"{name} is {step}, and after that many steps this layer runs in {wanted}, not in "
            f"{schedule.recipe_at(schedule.step)}. Convert the model for that step before you load: "
            f"octavo.convert(model, policy, step={step})."
        )
