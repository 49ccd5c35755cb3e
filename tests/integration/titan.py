"""torchtitan: its debug models, built and converted on the meta device, initialised as its trainer does, in its
container of optimizers, with torch.distributed.checkpoint."""

import copy
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torchtitan.components.optimizer import default_adamw
from torchtitan.models import llama3, qwen3
from torchtitan.models.common.attention import ScaledDotProductAttention

from octavo.model.conversion import ConversionReport
from tests.integration.subject import LEARNING_RATE, Subject, Watch, expect, plain_loop, tokens

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


# how far a gradient of experts may be from that of torchtitan's own, which run in bfloat16
EXPERTS_BOUNDS = {"bf16": 0.02, "nvfp4": 0.4}
FP8_BOUND = 0.1


class TitanMixture(Titan):
    """A mixture of experts: the converted experts have the gradients of torchtitan's own, within bounds."""

    def compare(self, recipe: str) -> None:
        plain = self.build(0)
        torch.manual_seed(1)
        model, report = self.converted(0, recipe)
        paths = [row.path for row in report if row.path.endswith(".inner_experts") and row.recipe == recipe]
        expect(bool(paths), f"no experts have {recipe}")
        bound = EXPERTS_BOUNDS.get(recipe, FP8_BOUND)
        mine, theirs = (gradients(one.get_submodule(paths[0])) for one in (model, plain))
        torch.compiler.reset()
        compiled = copy.deepcopy(model.get_submodule(paths[0]))
        compiled.compile(backend="aot_eager", fullgraph=True)
        for kind, found in (("", mine), (", compiled,", gradients(compiled))):
            for name, wanted in theirs.items():
                error = ((found[name] - wanted).norm() / wanted.norm()).item()
                expect(error < bound, f"the gradient of {name}{kind} has an error of {error:.3f}, bound {bound}")


def gradients(experts: nn.Module) -> dict[str, Tensor]:
    """The gradients of one call of experts, in its rows and its parameters."""
    generator = torch.Generator().manual_seed(3)
    number, _, width = experts.w1_EFD.shape
    x = torch.randn(16 * number, width, generator=generator, requires_grad=True)
    y = experts(x, torch.full((number,), 16))
    trained = {"x": x, **dict(experts.named_parameters())}
    dy = torch.randn(y.shape, generator=generator)
    return dict(zip(trained, torch.autograd.grad(y, list(trained.values()), dy), strict=True))


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
    TitanMixture(
        "titan-qwen3-moe",
        with_experts(on_cpu(qwen3.model_registry("debugmodel_moe").model), 8),
        left=("lm_head", "*.router.gate"),
        compiles=True,
    ),
)
