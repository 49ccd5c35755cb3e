"""accelerate: hooks of an Accelerator.

octavo.convert(model, "fp8-delayed")
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
octavo.integrations.accelerate.register(accelerator, model, optimizer)
accelerator.save_state("run")       # writes run/octavo.safetensors too
accelerator.load_state("run")       # and loads it
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from octavo.errors import InvalidCheckpoint, UnsupportedDtype
from octavo.integrations import recipe_file
from octavo.model.attach import Attachment, OptimizerWrapper, attach
from octavo.model.layer_lookup import check_model

if TYPE_CHECKING:
    from accelerate import Accelerator


class Registration:
    """The handle that `register` returns. As a context manager it calls `remove()` at the end of its block.

    Args:
        attachment: the handle of `octavo.attach`, if there is one.
        hooks: the handles of the accelerator's hooks.
    """

    def __init__(self, attachment: Attachment | None, hooks: list[Any]) -> None:
        self.attachment, self.hooks = attachment, hooks

    def remove(self) -> None:
        """Remove all hooks. A second call does nothing."""
        for hook in self.hooks:
            hook.remove()
        if self.attachment is not None:
            self.attachment.remove()

    def __enter__(self) -> "Registration":
        return self

    def __exit__(self, *_: Any) -> None:
        self.remove()


def register(
    accelerator: "Accelerator", model: nn.Module, optimizer: Optimizer | OptimizerWrapper | None = None
) -> Registration:
    """Let an Accelerator save and load the state of recipes, and end Octavo's step after each optimizer step.

    `save_state(folder)` then writes `folder/octavo.safetensors`, with several processes one file each, and
    `load_state(folder)` loads it before anything else. Call this once, after `prepare`.

    Args:
        accelerator: an `accelerate.Accelerator`.
        model: the model, as `prepare` returned it or as it was before.
        optimizer: its optimizer, which `octavo.attach` then gets. None leaves that to the program.

    Returns:
        A handle. Its `remove()` ends all of it.

    Raises:
        UnsupportedHardware: accelerate is not installed.
        UnsupportedDtype: an argument has the wrong type.
        UnsupportedConfig: `octavo.attach` refuses the optimizer.
    """
    try:
        from accelerate import Accelerator
    except ImportError:
        raise recipe_file.missing("accelerate", "octavo.integrations.accelerate.register") from None
    if not isinstance(accelerator, Accelerator):
        raise UnsupportedDtype(f"register takes an accelerate.Accelerator first, got {type(accelerator).__name__}.")
    check_model(model, "integrations.accelerate.register", accelerator)
    name = recipe_file.name_of(accelerator.process_index, accelerator.num_processes)

    def save(models: Any, weights: Any, folder: str) -> None:
        recipe_file.save(Path(folder) / name, model)

    def load(models: Any, folder: str) -> None:
        path = Path(folder) / name
        if not path.exists():
            raise InvalidCheckpoint(
                f"{path} is not there: the state was saved without octavo.integrations.accelerate.register. Remove the "
                "registration to go on with new scales and counters."
            )
        recipe_file.load(path, model)

    attachment = None if optimizer is None else attach(model, optimizer)
    return Registration(
        attachment, [accelerator.register_save_state_pre_hook(save), accelerator.register_load_state_pre_hook(load)]
    )
