"""Train a converted model in Lightning's Trainer, with a callback that saves the state of recipes.

    pip install lightning
    python examples/lightning_trainer.py                        # a tiny GPT, seconds on a CPU
    python examples/lightning_trainer.py --recipe fp8-delayed --steps 1000 --out runs/lightning

The callback is the one line for Octavo beside `convert`: `fit(module, loader, ckpt_path=...)` goes on from its
checkpoints.
"""

import argparse
import tempfile

import torch

import octavo
from octavo.demo import corpus
from octavo.demo.gpt import GPT, Shape, cross_entropy

try:
    from lightning import LightningModule, Trainer
except ImportError:
    raise SystemExit("This example needs lightning: pip install lightning") from None

from octavo.integrations.lightning import OctavoCallback


class Module(LightningModule):
    def __init__(self, settings):
        super().__init__()
        self.lr, self.losses = settings.lr, []
        self.model = GPT(Shape(width=64, context=settings.length), seed=0)
        print(octavo.convert(self.model, settings.recipe).summary())

    def training_step(self, batch):
        loss = cross_entropy(self.model(batch[:, :-1]), batch[:, 1:])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.model.parameters(), lr=self.lr)


def train(settings):
    module = Module(settings)
    rows = corpus.load()[0].long().unfold(0, settings.length + 1, settings.length)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            max_steps=settings.steps,
            precision="bf16-mixed",
            accelerator="auto" if torch.cuda.is_available() else "cpu",
            default_root_dir=settings.out or folder,
            enable_checkpointing=settings.out is not None,
            enable_progress_bar=False,
            enable_model_summary=False,
            logger=False,
            callbacks=[OctavoCallback()],
        )
        trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=settings.batch, shuffle=True))
    print(f"loss {module.losses[0]:.3f} to {module.losses[-1]:.3f}")
    return module.losses


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="fp8-delayed")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--out", help="a folder for checkpoints")
    return train(parser.parse_args(arguments))


if __name__ == "__main__":
    main()
