"""Train LoRA adapters on a base whose weights are published FP8 codes, merge them, and save FP8 for a server.

    pip install transformers peft
    python examples/lora_on_fp8.py                              # on a tiny checkpoint that it writes first
    python examples/lora_on_fp8.py --base downloads/Qwen3-8B-FP8 --out tuned

The base is never written in bfloat16: its weights stay codes, one byte each.
"""

import argparse
import tempfile
from pathlib import Path

import torch

import octavo
from octavo.demo import corpus

try:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
except ImportError:
    raise SystemExit("This example needs transformers and peft: pip install transformers peft") from None

TINY = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}


def publish(folder):
    """Write a folder of FP8 codes and scales in the layout of DeepSeek-V3 and Qwen3."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**TINY, num_attention_heads=4)).to(torch.bfloat16)
    octavo.convert(model, "fp8-block(scale='fp32')")
    octavo.save_fp8(model, folder, layout="fp8-block")
    return folder


def train(settings, folder):
    base = settings.base or publish(f"{folder}/published")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = AutoConfig.from_pretrained(base)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # transformers would build its own FP8 layers
    with torch.device("meta"):  # shapes, and no memory
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    print(octavo.load_fp8(model, base, device=device, trainable=False))

    torch.manual_seed(1)
    model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=settings.lr)
    text, _ = corpus.load()
    losses = []
    for batch in corpus.batches(text, steps=settings.steps, batch=8, context=64, seed=1):
        ids = batch.to(device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}, {sum(map(torch.numel, adapters)):,} numbers trained")

    merged = model.merge_and_unload()  # each sum of base and adapter is rounded to codes once
    out = settings.out or f"{folder}/merged"
    octavo.save_fp8(merged, out, like=base)
    print("saved", sorted(file.name for file in Path(out).iterdir()))
    return losses


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", help="a folder with config.json and safetensors files of FP8 codes")
    parser.add_argument("--out", help="the folder of the merged checkpoint")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--lr", type=float, default=1e-2)
    with tempfile.TemporaryDirectory() as folder:
        return train(parser.parse_args(arguments), folder)


if __name__ == "__main__":
    main()
