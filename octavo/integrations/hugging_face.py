"""transformers: a callback of its Trainer.

    octavo.convert(model, "fp8-delayed")
    trainer = Trainer(model, arguments, train_dataset=..., callbacks=[OctavoCallback()])
    trainer.train(resume_from_checkpoint=True)

Without it the Trainer saves weights and optimizer, and not the scales of fp8-delayed or the counters of nvfp4.
"""

import os
from pathlib import Path
from typing import Any

from torch import nn

from octavo.checkpoints.checkpoint import unwrapped
from octavo.errors import InvalidCheckpoint
from octavo.integrations import recipe_file, weights_file
from octavo.model.attach import Attachment, attach
from octavo.text import SHOWN, some

try:
    from transformers.trainer_callback import ExportableState, TrainerCallback
except ImportError:  # the constructor says so
    TrainerCallback, ExportableState = None, None

BASES: Any = (object,) if TrainerCallback is None else (TrainerCallback, ExportableState)


class OctavoCallback(*BASES):  # type: ignore[misc]
    """End Octavo's step after each optimizer step of a Trainer, and save and resume the state of recipes.

    It calls `octavo.attach` when training begins, and removes the attachment when it ends. It writes
    `octavo.safetensors` into each of the Trainer's checkpoints, and loads it when the Trainer resumes. The file's
    fingerprint is in the Trainer's own `trainer_state.json`, so a file of another run is refused.

    Args:
        resume_from: the folder that is passed to `train(resume_from_checkpoint=...)`, if that is outside of the
            Trainer's `output_dir`: the Trainer does not tell its callbacks.
        attach: False leaves `octavo.attach` to the program, which may pass a process group.

    Raises:
        UnsupportedHardware: transformers is not installed.
    """

    def __init__(self, resume_from: str | os.PathLike[str] | None = None, attach: bool = True) -> None:
        if TrainerCallback is None:
            raise recipe_file.missing("transformers", "octavo.integrations.hugging_face.OctavoCallback")
        self.resume_from = None if resume_from is None else os.fspath(resume_from)
        self.attach = attach
        self.attachment: Attachment | None = None
        self.model: nn.Module | None = None

    def state(self) -> dict[str, Any]:
        """Return what `trainer_state.json` keeps of this callback. The Trainer calls it."""
        saved = "" if self.model is None else recipe_file.fingerprint(recipe_file.state_of(self.model))
        return {"args": {"resume_from": self.resume_from, "attach": self.attach}, "attributes": {"fingerprint": saved}}

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any, optimizer: Any, **_: Any) -> None:
        """Load the state of recipes if the Trainer resumes, and attach. The Trainer calls it."""
        self._detach()
        self.model = model
        if state.global_step > 0:
            self._check_weights(args, state, model)
            self._load(args, state, model)
        if self.attach:
            self.attachment = attach(model, optimizer)

    def on_save(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        """Write the state of recipes into the Trainer's checkpoint. The Trainer calls it."""
        if not state.is_hyper_param_search:  # whose folders have other names, and which no one resumes
            recipe_file.save(_checkpoint(args, state) / _name(args), model)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Remove the attachment. The Trainer calls it."""
        self._detach()

    def _detach(self) -> None:
        if self.attachment is not None:
            self.attachment.remove()
            self.attachment = None

    def _folders(self, args: Any, state: Any) -> list[Path]:
        """Return where the checkpoint may be that the Trainer resumes."""
        given = [Path(each) for each in (self.resume_from, args.resume_from_checkpoint) if isinstance(each, str)]
        return [*given, _checkpoint(args, state)]

    def _check_weights(self, args: Any, state: Any, model: nn.Module) -> None:
        """Raise if the Trainer has left parameters at other values than the checkpoint has: it loads by name, and
        transformers saves the experts of some models one by one."""
        for folder in self._folders(args, state):
            if left := weights_file.left_out(folder, unwrapped(model)):
                raise InvalidCheckpoint(
                    f"The Trainer resumed {folder} and left {some(left, SHOWN)} as they were: the checkpoint has them "
                    "under other names, such as experts one by one, and the Trainer loads by name (transformers issue "
                    f"48805). Build the model by from_pretrained({str(folder)!r}) before octavo.convert, then resume."
                )

    def _load(self, args: Any, state: Any, model: nn.Module) -> None:
        if not recipe_file.state_of(model):
            return  # recipes without state
        saved = _saved(state, type(self).__name__)
        paths = [folder / _name(args) for folder in self._folders(args, state)]
        for path in paths:
            # only the first process writes trainer_state.json, with its own fingerprint
            if path.is_file() and (args.process_index > 0 or recipe_file.fingerprint_in(path) == saved):
                recipe_file.load(path, model)
                return
        if not saved:
            raise InvalidCheckpoint(
                f"The Trainer resumes a checkpoint of step {state.global_step} that was saved without OctavoCallback, "
                "so the state of its recipes is lost. Remove the callback to go on with new scales and counters."
            )
        raise InvalidCheckpoint(
            f"The Trainer resumes a checkpoint of step {state.global_step}, and its state of recipes is not at "
            f"{' or '.join(map(str, paths))}. Pass OctavoCallback(resume_from=...) the folder that "
            "train(resume_from_checkpoint=...) gets."
        )


def _name(args: Any) -> str:
    return recipe_file.name_of(args.process_index, args.world_size)


def _checkpoint(args: Any, state: Any) -> Path:
    """Return the folder of the Trainer's checkpoint of this step."""
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def _saved(state: Any, name: str) -> str:
    """Return the fingerprint that a loaded trainer_state.json has; empty if it has none."""
    kept = state.stateful_callbacks.get(name)
    kept = kept[-1] if isinstance(kept, list) and kept else kept
    found = kept.get("attributes", {}).get("fingerprint", "") if isinstance(kept, dict) else ""
    return found if isinstance(found, str) else ""
