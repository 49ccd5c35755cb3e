"""torchtitan: its debug models, built and converted on the meta device, initialised as its trainer does, in its
container of optimizers, with torch.distributed.checkpoint."""

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torchtitan.components.optimizer import default_adamw
from torchtitan.models import llama3, qwen3
from torchtitan.models.common.attention import ScaledDotProductAttention

from octavo.model.conversion import ConversionReport
from tests.integration.subject import LEARNING_RATE, Subject, Watch, plain_loop, tokens

VOCABULARY = 2048


class Titan(Subject):
    package = "torchtitan"

    def __init__(self, name: str, config: object, *, left: tuple[str, ...], compiles: bool = False):
        self.name, self.config, self.left, self.compiles = name, config, left, compiles

    def build(self, seed: int) -> nn.Module:
        return initialised(self.on_meta(), seed)

    def on_meta(self) -> nn.Module:
        with torch.device("meta"):
            return self.config.build()

    def converted(self, seed: int, recipe: str) -> tuple[nn.Module, ConversionReport]:
        model = self.on_meta()
        report = self.convert(model, recipe)
        model.verify_module_protocol()
        return initialised(model, seed), report

    def loss(self, model: nn.Module, step: int) -> Tensor:
        ids = tokens(step, vocabulary=VOCABULARY)
        logits = model(ids, positions=torch.arange(ids.shape[1]).expand_as(ids))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())

    def train(self, model: nn.Module, steps: int, watch: Watch) -> list[float]:
        optimizers = default_adamw(lr=LEARNING_RATE).build(model_parts=[model])
        return plain_loop(self, model, steps, watch.on(optimizers))

    def save(self, model: nn.Module, folder: Path) -> None:
        dcp.save(model.state_dict(), checkpoint_id=folder / "step", no_dist=True)

    def load(self, folder: Path, recipe: str | None) -> nn.Module:
        model = self.build(9) if recipe is None else self.converted(9, recipe)[0]
        state = model.state_dict()  # wq, wk and wv of a layer that has them in one
        dcp.load(state, checkpoint_id=folder / "step", no_dist=True)
        model.load_state_dict(state)
        return model


def initialised(model: nn.Module, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_states()
    return model


def on_cpu(config: object, layers: int = 2) -> object:
    """A debug config with fewer layers, and the attention that has a backward on a CPU: flex and varlen have none."""
    config.layers = config.layers[:layers]
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return config


def with_experts(config: object, number: int) -> object:
    """A config of mixtures with fewer experts: the debug model has 64, of 600k parameters each."""
    for layer in config.layers:
        layer.moe.router.num_experts = layer.moe.num_experts = number
        layer.moe.router.gate.out_features = number
        layer.moe.routed_experts.inner_experts.num_experts = number
        layer.moe.routed_experts.token_dispatcher.num_experts = number
        layer.moe.router.top_k = layer.moe.routed_experts.token_dispatcher.top_k = 2
    return config


SUBJECTS = (
    Titan("titan-llama3", on_cpu(llama3.model_registry("debugmodel").model), left=("lm_head",), compiles=True),
    Titan(
        "titan-qwen3-moe",
        with_experts(on_cpu(qwen3.model_registry("debugmodel_moe").model), 8),
        left=("lm_head", "*.router.gate"),
    ),
)
