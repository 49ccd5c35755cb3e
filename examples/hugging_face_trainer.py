"""Convert a model of transformers, and train it in its Trainer.

    pip install transformers accelerate
    python examples/hugging_face_trainer.py                     # a tiny Llama with random weights, seconds on a CPU
    python examples/hugging_face_trainer.py --model your/model --recipe fp8-delayed --steps 1000

The callback updates scales after each step of the optimizer, and saves their state with the Trainer's checkpoints.
"""

import argparse
import tempfile

import torch

import octavo
from octavo.demo import corpus

try:
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        LlamaConfig,
        LlamaForCausalLM,
        Trainer,
        TrainingArguments,
    )
    from transformers.trainer_callback import PrinterCallback
except ImportError:
    raise SystemExit("This example needs transformers and accelerate: pip install transformers accelerate") from None

from octavo.integrations.hugging_face import OctavoCallback

TINY = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2}


def model_and_tokens(name):
    text, _ = corpus.load()
    if name is None:
        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(**TINY, num_attention_heads=4)), text.long()
    tokens = AutoTokenizer.from_pretrained(name)(bytes(text.tolist()).decode(), return_tensors="pt").input_ids[0]
    return AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16), tokens


def train(settings):
    model, tokens = model_and_tokens(settings.model)
    print(octavo.convert(model, settings.recipe).summary())  # before the Trainer makes its optimizer
    rows = tokens[: len(tokens) // settings.length * settings.length].view(-1, settings.length)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model,
            TrainingArguments(
                settings.out or folder,
                max_steps=settings.steps,
                per_device_train_batch_size=settings.batch,
                learning_rate=settings.lr,
                bf16=True,
                use_cpu=not torch.cuda.is_available(),
                logging_steps=1,
                save_strategy="steps" if settings.out else "no",
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=[{"input_ids": row, "labels": row} for row in rows],
            callbacks=[OctavoCallback()],  # scales after each step; their state in checkpoints
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}")
    return losses


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a name or folder of transformers; default: a tiny Llama with random weights")
    parser.add_argument("--recipe", default="fp8-delayed")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--out", help="a folder for checkpoints")
    return train(parser.parse_args(arguments))


if __name__ == "__main__":
    main()
