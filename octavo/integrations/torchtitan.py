"""torchtitan: an override of its config, by name.

    --override.imports 'octavo.integrations.torchtitan.convert={"recipe": "fp8-delayed"}'

torchtitan imports this module, and passes the configs of its model and of its optimizers to `convert`.
"""

from dataclasses import make_dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from octavo.checkpoints.checkpoint import unwrapped
from octavo.errors import InvalidCheckpoint
from octavo.integrations import recipe_file
from octavo.model.attach import attach
from octavo.model.config_file import from_config
from octavo.model.layer_lookup import layers
from octavo.model.state_dicts import load_state_dict

try:
    from torchtitan.components.optimizer import OptimizersContainer
    from torchtitan.config import Configurable
    from torchtitan.config.override import derive, override
    from torchtitan.protocols import BaseModel
    from torchtitan.tools.logging import logger
except ImportError:
    raise recipe_file.missing("torchtitan", "octavo.integrations.torchtitan") from None


class _IsTarget(type):
    """An override has one target: a class whose instances are the configs of models and of optimizers."""

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, (BaseModel.Config, OptimizersContainer.Config))


class _Target(Configurable.Config, metaclass=_IsTarget):  # type: ignore[misc]
    pass


@override(target=_Target, description="Octavo's low-precision layers")  # type: ignore[untyped-decorator]
def convert(config: Any, /, **settings: Any) -> Any:
    """Return a config that builds a converted model, or optimizers that end Octavo's step and keep its state.

    torchtitan calls it once for each of the two. The model is converted on the meta device, before it is parallelized
    and compiled. The state of recipes is in checkpoints beside that of the optimizers.

    Args:
        config: torchtitan's config of a model, or of its optimizers.
        settings: those of `octavo.from_config`, such as recipe, exclude and rules; or `config`, the path of a file
            that has them.

    Returns:
        The config that torchtitan builds: of a model the given one, of another class.

    Raises:
        UnsupportedHardware: torchtitan is not installed.
    """
    if isinstance(config, OptimizersContainer.Config):
        return derive(config, Optimizers.Config)
    kind = type(config)

    def build(self: Any, **given: Any) -> Any:
        model = kind.build(self, **given)
        logger.info(from_config(model, settings.get("config", settings)).summary())
        return model

    # in place: torchtitan has read the root of the model's configs before it applies overrides, and builds that
    config.__class__ = type(f"Converted{kind.__name__}", (kind,), {"__slots__": (), "build": build})
    return config


class Optimizers(OptimizersContainer):  # type: ignore[misc]
    """torchtitan's optimizers, attached to the parts of a converted model, with the state of recipes in theirs."""

    Config = make_dataclass("Config", [], bases=(OptimizersContainer.Config,), kw_only=True, slots=True)

    def __init__(self, config: Any, *, model_parts: list[Any]) -> None:
        super().__init__(config, model_parts=model_parts)
        self.converted = [part for part in model_parts if any(True for _ in layers(part))]
        self.attachments = [attach(part, self) for part in self.converted]

    def state_dict(self) -> dict[str, Any]:
        """Return torchtitan's state, and the state of this rank's recipes under names of its own."""
        prefix = _prefix()
        states = [recipe_file.state_of(part) for part in self.converted]
        return {**super().state_dict(), **{prefix + name: tensor for state in states for name, tensor in state.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load both."""
        prefix = _prefix()
        mine: dict[str, Tensor] = {k[len(prefix) :]: v for k, v in state_dict.items() if k.startswith(prefix)}
        super().load_state_dict({k: v for k, v in state_dict.items() if not k.startswith("octavo")})
        for part in self.converted:
            names = recipe_file.state_of(part)
            if not names.keys() <= mine.keys():
                raise InvalidCheckpoint(
                    "The checkpoint was saved without octavo.integrations.torchtitan, or by another number of ranks: "
                    "it has no state for the recipes of this one. Load the model alone: --checkpoint.initial_load_path."
                )
            if names:
                load_state_dict(unwrapped(part), {name: mine[name] for name in names})


def _prefix() -> str:
    """Return what the names of this rank's state begin with: ranks observe other tensors."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return "octavo." if ranks == 1 else f"octavo-{dist.get_rank()}."
