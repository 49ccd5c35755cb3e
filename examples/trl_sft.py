"""Tune a converted model on text with TRL's SFTTrainer.

    pip install trl
    python examples/trl_sft.py                                  # a tiny Llama with random weights, seconds on a CPU
    python examples/trl_sft.py --model your/model --recipe fp8-delayed --steps 1000 --out runs/sft

TRL's trainers are transformers' Trainers: the callback is the one line for Octavo beside `convert`.
"""

import argparse
import tempfile

import torch

import octavo
from octavo.demo import corpus

try:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer
except ImportError:
    raise SystemExit("This example needs trl: pip install trl") from None

from octavo.integrations.hugging_face import OctavoCallback

TINY = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2}


def model_and_tokenizer(name):
    if name is not None:
        return AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16), AutoTokenizer.from_pretrained(name)
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    torch.manual_seed(0)
    characters = Tokenizer(models.BPE({chr(number): number for number in range(256)}, []))  # a token for each character
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters, eos_token="\x00", pad_token="\x00")
    return LlamaForCausalLM(LlamaConfig(**TINY, num_attention_heads=4)), tokenizer


def train(settings):
    model, tokenizer = model_and_tokenizer(settings.model)
    print(octavo.convert(model, settings.recipe).summary())  # before the trainer makes its optimizer
    text = bytes(corpus.load()[0].tolist()).decode("latin-1")
    parts = [text[start : start + settings.length] for start in range(0, 200 * settings.length, settings.length)]
    with tempfile.TemporaryDirectory() as folder:
        trainer = SFTTrainer(
            model,
            SFTConfig(
                settings.out or folder,
                max_steps=settings.steps,
                per_device_train_batch_size=settings.batch,
                learning_rate=settings.lr,
                max_length=settings.length,
                bf16=True,
                use_cpu=not torch.cuda.is_available(),
                gradient_checkpointing=False,
                logging_steps=1,
                save_strategy="steps" if settings.out else "no",
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_dict({"text": parts}),
            processing_class=tokenizer,
            callbacks=[OctavoCallback()],  # scales after each step; their state in checkpoints
        )
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
