"""Lightning: a module that converts itself, fitted by a Trainer, with octavo's state in the module's checkpoint."""

import logging
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import octavo
from octavo.model.conversion import ConversionReport
from tests.integration.subject import Subject, Watch, tokens

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

VOCABULARY = 128
WIDTH = 160


class Classifier(lightning.LightningModule):
    """A stack of torch's own encoder layers, which says for each text which token it begins with."""

    def __init__(self, recipe: str | None = None):
        super().__init__()
        self.save_hyperparameters()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 352, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.report = None if recipe is None else octavo.convert(self, recipe)
        self.watch: Watch | None = None
        self.losses: list[float] = []

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(ids)).mean(1))

    def training_step(self, batch: tuple[Tensor], _: int = 0) -> Tensor:
        (ids,) = batch
        loss = nn.functional.cross_entropy(self(ids).float(), ids[:, 0])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        assert self.watch is not None
        optimizer = self.watch.adamw()
        octavo.attach(self, optimizer)
        return optimizer

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["octavo"] = octavo.state_dict(self)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.report is not None:
            octavo.load_state_dict(self, checkpoint["octavo"])


class Fitted(Subject):
    name = "lightning"
    package = "lightning"
    left = ("head", "encoder.layers.*.self_attn.out_proj")
    saves_state = True
    compiles = True

    def build(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return Classifier()

    def converted(self, seed: int, recipe: str) -> tuple[nn.Module, ConversionReport]:
        torch.manual_seed(seed)
        model = Classifier(recipe)
        return model, model.report

    def loss(self, model: nn.Module, step: int) -> Tensor:
        ids = tokens(step, vocabulary=VOCABULARY)
        return nn.functional.cross_entropy(model(ids), ids[:, 0])

    def train(self, model: nn.Module, steps: int, watch: Watch) -> list[float]:
        model.watch, model.losses = watch, []
        rows = torch.cat([tokens(step, vocabulary=VOCABULARY) for step in range(steps)])
        self.trainer = lightning.Trainer(
            accelerator="cpu",
            precision="bf16-mixed",
            max_steps=steps,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        self.trainer.fit(model, DataLoader(TensorDataset(rows), batch_size=4))
        return model.losses

    def save(self, model: nn.Module, folder: Path) -> None:
        self.trainer.save_checkpoint(folder / "last.ckpt")

    def load(self, folder: Path, recipe: str | None) -> nn.Module:
        return Classifier.load_from_checkpoint(folder / "last.ckpt", recipe=recipe, weights_only=True).train()


SUBJECTS = (Fitted(),)
