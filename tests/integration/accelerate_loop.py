"""accelerate: prepare(model, optimizer, loader), mixed precision, gradients of two microbatches accumulated, and
save_state / load_state, with octavo's state registered for them."""

from pathlib import Path

import torch
from accelerate import Accelerator
from safetensors.torch import load_model
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

import octavo
from tests.integration.hugging_face import SIZES, VOCABULARY
from tests.integration.subject import Subject, Watch, tokens

MICROBATCHES = 2


class RecipeState:
    """An object with the two methods that Accelerator.register_for_checkpointing asks for."""

    def __init__(self, model: nn.Module):
        self.model = model

    def state_dict(self) -> dict[str, Tensor]:
        return octavo.state_dict(self.model)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        octavo.load_state_dict(self.model, state)


class Accelerated(Subject):
    name = "accelerate"
    package = "accelerate"
    left = ("lm_head",)
    saves_state = True
    compiles = True

    def build(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(**SIZES))

    def loss(self, model: nn.Module, step: int) -> Tensor:
        ids = tokens(step, vocabulary=VOCABULARY)
        return model(input_ids=ids, labels=ids).loss

    def train(self, model: nn.Module, steps: int, watch: Watch) -> list[float]:
        self.accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=MICROBATCHES)
        rows = torch.cat([tokens(step, vocabulary=VOCABULARY) for step in range(MICROBATCHES * steps)])
        model, optimizer, loader = self.accelerator.prepare(
            model, watch.adamw(), DataLoader(TensorDataset(rows), batch_size=4)
        )
        octavo.attach(model, optimizer)
        losses = []
        for (ids,) in loader:
            with self.accelerator.accumulate(model):
                loss = model(input_ids=ids, labels=ids).loss
                self.accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        return [sum(losses[at : at + MICROBATCHES]) / MICROBATCHES for at in range(0, len(losses), MICROBATCHES)]

    def save(self, model: nn.Module, folder: Path) -> None:
        self.accelerator.register_for_checkpointing(RecipeState(model))
        self.accelerator.save_state(str(folder))

    def load(self, folder: Path, recipe: str | None) -> nn.Module:
        accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=MICROBATCHES)
        model = self.build(9)
        if recipe is None:  # the weights alone
            model = accelerator.prepare(model)
            load_model(model, folder / "model.safetensors")
            return model
        self.convert(model, recipe)
        model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        accelerator.register_for_checkpointing(RecipeState(model))
        accelerator.load_state(str(folder))
        return model


SUBJECTS = (Accelerated(),)
