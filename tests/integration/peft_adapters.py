"""PEFT: LoRA on a converted model, and conversion of a model that has LoRA. The adapters stay in high precision."""

from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from octavo.model.conversion import ConversionReport
from tests.integration.hugging_face import SIZES, VOCABULARY
from tests.integration.subject import Subject, Watch, expect, measured, plain_loop, tokens


class Adapted(Subject):
    package = "peft"
    left = ("*.lm_head", "*.lora_A.*", "*.lora_B.*")
    frozen = (  # where weights and inputs both are, no gradient passes
        "*.layers.0.self_attn.[qkv]_proj.base_layer.scaling.backward.*",
        "*.layers.0.self_attn.[qkv]_proj.base_layer.rounding.*",
    )

    def build(self, seed: int) -> nn.Module:
        return adapted(base(seed), seed)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        ids = tokens(step, vocabulary=VOCABULARY)
        return model(input_ids=ids, labels=ids).loss

    def train(self, model: nn.Module, steps: int, watch: Watch) -> list[float]:
        return plain_loop(self, model, steps, watch.adamw())

    def save(self, model: nn.Module, folder: Path) -> None:
        model.save_pretrained(folder)


class ConvertedFirst(Adapted):
    name = "peft-after"  # convert, then get_peft_model
    unreported = ("*.lora_[AB].*",)

    def converted(self, seed: int, recipe: str) -> tuple[nn.Module, ConversionReport]:
        model = base(seed)
        report = self.convert(model, recipe)
        return adapted(model, seed), report

    def path_now(self, path: str) -> str:
        adapted = path.endswith("_proj")
        return f"base_model.model.{path}{'.base_layer' if adapted else ''}"

    def load(self, folder: Path, recipe: str | None) -> nn.Module:
        model = base(0)
        if recipe is not None:
            self.convert(model, recipe)
        return PeftModel.from_pretrained(model, folder, is_trainable=True).train()


class AdaptedFirst(Adapted):
    name = "peft-before"  # get_peft_model, then convert
    compiles = True

    def compare(self, recipe: str) -> None:
        """The order makes no difference, but for the seeds of nvfp4's gradients, which follow from a layer's path."""
        (loss, gradient), (other, expected) = (measured(s, s.converted(0, recipe)[0]) for s in (self, ConvertedFirst()))
        expect(loss == other, f"adapted first the loss is {loss}, converted first {other}")
        expect(recipe == "nvfp4" or torch.equal(gradient, expected), "the gradients depend on the order")

    def load(self, folder: Path, recipe: str | None) -> nn.Module:
        model = PeftModel.from_pretrained(base(0), folder, is_trainable=True).train()
        if recipe is not None:
            self.convert(model, recipe)
        return model


def base(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def adapted(model: nn.Module, seed: int) -> nn.Module:
    torch.manual_seed(50 + seed)
    return get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))


SUBJECTS = (ConvertedFirst(), AdaptedFirst())
