"""Lightning: a callback of its Trainer.

octavo.convert(module, "fp8-delayed")
trainer = lightning.Trainer(callbacks=[OctavoCallback()])
trainer.fit(module, loader, ckpt_path="last.ckpt")
"""

from typing import Any

from octavo.errors import InvalidCheckpoint
from octavo.integrations import recipe_file
from octavo.model.attach import Attachment, attach
from octavo.model.state_dicts import load_state_dict

try:
    from lightning.pytorch import Callback
except ImportError:  # the constructor says so
    Callback = None

KEY = "octavo"  # of the state in a checkpoint


class OctavoCallback(object if Callback is None else Callback):  # type: ignore[misc]
    """End Octavo's step after each optimizer step of a Trainer, and save and resume the state of recipes.

    It calls `octavo.attach` for each optimizer when training begins, and removes the attachments when it ends. The
    state is in Lightning's checkpoint, under "octavo", as plain tensors: `weights_only=True` loads it.

    Args:
        attach: False leaves `octavo.attach` to the program, which may pass a process group.

    Raises:
        UnsupportedHardware: lightning is not installed.
    """

    def __init__(self, attach: bool = True) -> None:
        if Callback is None:
            raise recipe_file.missing("lightning", "octavo.integrations.lightning.OctavoCallback")
        super().__init__()
        self.attach = attach
        self.attachments: list[Attachment] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach every optimizer. The Trainer calls it."""
        self._detach()
        if self.attach:
            self.attachments = [attach(pl_module, optimizer) for optimizer in trainer.optimizers]

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Remove the attachments. The Trainer calls it."""
        self._detach()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Remove the attachments. The Trainer calls it."""
        self._detach()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Add the state of recipes to a checkpoint. The Trainer calls it."""
        checkpoint[KEY] = recipe_file.state_of(pl_module)

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Load the state of recipes from a checkpoint. The Trainer calls it."""
        if KEY in checkpoint:
            load_state_dict(pl_module, checkpoint[KEY])
        elif recipe_file.state_of(pl_module):
            raise InvalidCheckpoint(
                "The checkpoint was saved without OctavoCallback, so the state of its recipes is lost. Remove the "
                "callback to go on with new scales and counters."
            )

    def _detach(self) -> None:
        for attachment in self.attachments:
            attachment.remove()
        self.attachments = []
