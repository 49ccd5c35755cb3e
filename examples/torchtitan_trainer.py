"""Train torchtitan's debug Llama in its own Trainer, converted by an override that its config names.

    pip install torchtitan
    python examples/torchtitan_trainer.py                       # seconds on one GPU
    python examples/torchtitan_trainer.py --recipe fp8-delayed --steps 100 --out runs/titan
    python -m tests.integration.titan_on_cpu                    # torchtitan alone asks for a GPU

With torchtitan's own command the line is: --override.imports 'octavo.integrations.torchtitan.convert={"recipe":
"fp8-current"}'. It converts the model, ends Octavo's step after the optimizer's, and puts the state of recipes
into checkpoints.
"""

import argparse
import os
import tempfile
from dataclasses import dataclass

import torch

from octavo.demo import corpus

try:
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.config import TrainingConfig
    from torchtitan.config.override import OverrideConfig
    from torchtitan.models import llama3
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.trainer import Trainer
except ImportError:
    raise SystemExit("This example needs torchtitan: pip install torchtitan") from None

CONVERT = "octavo.integrations.torchtitan.convert"


class Bytes(BaseTokenizer):
    """Tokens are bytes."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config, *, tokenizer_path):
        super().__init__()

    def encode(self, text):
        return list(text.encode())

    def decode(self, tokens):
        return bytes(tokens).decode(errors="replace")

    def get_vocab_size(self):
        return 256


class Book(BaseDataLoader):
    """Batches of the book that comes with Octavo, from where the last one ended."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config, *, seq_len, local_batch_size, dp_rank, dp_world_size, **_):
        rows = corpus.load()[0].long().unfold(0, seq_len + 1, seq_len)
        self.batches = rows[dp_rank::dp_world_size].split(local_batch_size)
        self.made = 0

    def __iter__(self):
        while True:
            batch = self.batches[self.made % (len(self.batches) - 1)]
            self.made += 1
            positions = torch.arange(batch.shape[1] - 1).expand(len(batch), -1)
            yield {"input": batch[:, :-1], "positions": positions}, batch[:, 1:]

    def state_dict(self):
        return {"made": self.made}

    def load_state_dict(self, state):
        self.made = state["made"]


class Recorded(MetricsProcessor):
    """torchtitan's metrics, which keep the loss of each step."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    losses = None

    def log(self, step, loss, *rest, **more):
        self.losses = [*(self.losses or ()), loss]
        super().log(step, loss, *rest, **more)


def config_of(settings, folder):
    spec = llama3.model_registry("debugmodel")
    spec.model.layers = spec.model.layers[:2]
    if not torch.cuda.is_available():
        for layer in spec.model.layers:  # flex attention has no backward on a CPU
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return Trainer.Config(
        loss=CrossEntropyLoss.Config(global_vocab_size=spec.model.vocab_size),
        model_spec=spec,
        dump_folder=folder,
        tokenizer=Bytes.Config(),
        dataloader=Book.Config(),
        optimizer=default_adamw(lr=settings.lr),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(
            local_batch_size=settings.batch, seq_len=settings.length, steps=settings.steps, disable_cuda_graphs=True
        ),
        metrics=Recorded.Config(log_freq=1),
        checkpoint=CheckpointManager.Config(enable=settings.out is not None, interval=max(1, settings.steps // 2)),
        override=OverrideConfig(imports=[(CONVERT, {"recipe": settings.recipe})]),  # the one line for Octavo
    )


def train(settings):
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}.items():
        os.environ.setdefault(name, value)  # torchrun sets them
    os.environ.setdefault("MASTER_PORT", "29511")
    with tempfile.TemporaryDirectory() as folder:
        trainer = config_of(settings, settings.out or folder).build()
        try:
            trainer.train()
        finally:
            trainer.close()
            torch.distributed.destroy_process_group()
    losses = trainer.metrics_processor.losses
    print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}")
    return losses


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="fp8-current")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--out", help="a folder for checkpoints, from which a run goes on")
    return train(parser.parse_args(arguments))


if __name__ == "__main__":
    main()
