"""Published FP8 checkpoints with the packages that read them: python -m tests.integration published [NAME ...].

Each part writes a checkpoint of random weights in a published layout, loads it into a model of transformers that is
built on the meta device, trains it, saves it, and asks a reader for its values: transformers, compressed-tensors. peft
puts adapters on a base of codes.
"""

import json
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import torch
import transformers
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.quantizers.auto import AutoQuantizationConfig
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

import octavo
from octavo.checkpoints.published.layouts import LAYOUTS
from octavo.weights.quantized_weight import QuantizedWeight
from tests.integration.subject import expect
from tests.support.published_folders import bytes_of, tensors

disable_progress_bar()
set_verbosity_error()
PACKAGES = ("torch", "transformers", "compressed-tensors", "peft", "accelerate", "safetensors")
SIZES = {
    "vocab_size": 256, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "initializer_range": 0.05, "use_cache": False,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 128, "num_experts_per_tok": 2}
LATENT = {
    "num_key_value_heads": 4, "head_dim": 128, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "q_lora_rank": 128, "kv_lora_rank": 128,
    "qk_nope_head_dim": 64, "qk_rope_head_dim": 128, "v_head_dim": 64,
}  # fmt: skip
MODELS = {
    "Llama": {},
    "Qwen3": {},
    "Qwen3Moe": {**EXPERTS, "num_experts": 4},
    "DeepseekV3": {**EXPERTS, **LATENT},
}
IDS = torch.randint(256, (2, 32), generator=torch.Generator().manual_seed(0))


def made(kind: str, **more: object) -> nn.Module:
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **MODELS.get(kind, {}), **more})
    return getattr(transformers, f"{kind}ForCausalLM")(config).to(torch.bfloat16)


def on_meta(kind: str) -> nn.Module:
    with torch.device("meta"):
        return made(kind)


def published(kind: str, layout: str, folder: Path) -> nn.Module:
    """Write a checkpoint of random weights, and return the model that it is of."""
    torch.manual_seed(0)
    model = made(kind)
    octavo.convert(model, LAYOUTS[layout].recipe)
    octavo.save_fp8(model, folder, layout=layout)
    return model


def values(weight: Tensor) -> Tensor:
    return weight.values().detach() if isinstance(weight, QuantizedWeight) else weight.detach()  # type: ignore[no-any-return]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 5) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def same_values(reader: nn.Module, model: nn.Module) -> None:
    for name, weight in reader.named_parameters():
        expect(torch.equal(weight, values(model.get_parameter(name))), f"the reader has other values of {name}")


def of_transformers(kind: str, folder: Path) -> str:
    """From meta, five steps, saved, read by transformers."""
    original = published(kind, "fp8-block", folder / "out")
    model = on_meta(kind)
    report = octavo.load_fp8(model, folder / "out", device="cpu")
    expect(torch.equal(model(IDS).logits, original(IDS).logits), "the loaded model computes something else")
    octavo.save_fp8(model, folder / "same", like=folder / "out")
    expect((folder / "same/model.safetensors").read_bytes() == (folder / "out/model.safetensors").read_bytes(), "bytes")
    losses = train(model, octavo.optim.AdamW(model.parameters(), lr=1e-3))
    expect(losses[-1] < losses[0] - 1, f"it does not train: {losses}")
    octavo.save_fp8(model, folder / "trained", like=folder / "out")
    same_values(AutoModelForCausalLM.from_pretrained(folder / "trained", dtype=torch.bfloat16), model)
    again = on_meta(kind)
    octavo.load_fp8(again, folder / "trained", device="cpu")
    expect(torch.equal(again(IDS).logits, model(IDS).logits), "the saved model computes something else")
    return f"{len(report.codes)} weights of codes, loss {losses[0]:.2f} to {losses[-1]:.2f}, transformers reads it"


def of_compressed_tensors(layout: str, folder: Path) -> str:
    """Every weight that we write, decompressed by compressed-tensors, and the config by its own class."""
    model = published("Llama", layout, folder / "out")
    entry = json.loads((folder / "out/config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(entry)
    AutoQuantizationConfig.from_dict(dict(entry))
    (scheme,) = config.config_groups.values()
    compressor = BaseCompressor.get_value_from_registry(config.format)
    row, content, worst, number = LAYOUTS[layout], tensors(folder / "out"), 0.0, 0
    for path, layer in model.named_modules():
        if not isinstance(layer, octavo.Linear) or layer.recipe is None:
            continue
        state = {k.removeprefix(path + "."): t for k, t in content.items() if k.startswith(path + ".")}
        theirs = compressor.decompress(state, scheme)["weight"].float()
        ours = row.quantizer.quantize(layer.weight.detach()).dequantize(torch.float32)
        worst, number = max(worst, ((theirs - ours).abs() / ours.abs().max()).max().item()), number + 1
    expect(worst < 2**-8, f"compressed-tensors reads other values, up to {worst}")
    return f"{number} weights, {config.format}, apart by {worst:.1e} of the largest (its arithmetic is in bfloat16)"


def of_gpt_oss(folder: Path) -> str:
    """MXFP4 experts as GPT-OSS publishes them: our values are those of transformers' reader."""
    torch.manual_seed(0)
    model = made("GptOss", num_local_experts=4, num_experts_per_tok=2, intermediate_size=128)
    state = {name: p.detach() for name, p in model.named_parameters()}
    for name in [n for n in state if n.endswith(("gate_up_proj", "down_proj"))]:
        number, k, n = state.pop(name).shape
        state[f"{name}_blocks"] = torch.randint(256, (number, n, k // 32, 16), dtype=torch.uint8)
        state[f"{name}_scales"] = torch.randint(118, 124, (number, n, k // 32), dtype=torch.uint8)
    folder.joinpath("out").mkdir()
    octavo.checkpoints.tensor_file.write(folder / "out/model.safetensors", state, {"format": "pt"})
    left_out = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    entry = {"quant_method": "mxfp4", "modules_to_not_convert": left_out}
    config = {**model.config.to_dict(), "architectures": ["GptOssForCausalLM"], "quantization_config": entry}
    (folder / "out/config.json").write_text(json.dumps(config, default=str))
    with torch.device("meta"):
        loaded = made("GptOss", num_local_experts=4, num_experts_per_tok=2, intermediate_size=128)
    report = octavo.load_fp8(loaded, folder / "out", device="cpu")
    reader = AutoModelForCausalLM.from_pretrained(folder / "out", dtype=torch.bfloat16)
    same_values(reader, loaded)
    optimizer = torch.optim.AdamW([p for n, p in loaded.named_parameters() if "experts" not in n], lr=1e-3)
    losses = train(loaded, optimizer)
    octavo.save_fp8(loaded, folder / "like", like=folder / "out")
    before, after = tensors(folder / "out"), tensors(folder / "like")
    frozen = [n for n in before if n.endswith(("_blocks", "_scales"))]
    expect(all(torch.equal(before[n], after[n]) for n in frozen), "frozen experts changed")
    return f"{len(report.dequantized)} stacks of experts dequantized as transformers does, loss {losses[-1]:.2f}"


def of_peft(layout: str, folder: Path) -> str:
    """Adapters on a base of codes: dx of the same codes, a byte a weight, merged into the codes."""
    published("Llama", layout, folder / "out")
    base = on_meta("Llama")
    octavo.load_fp8(base, folder / "out", device="cpu", trainable=False)
    weights = [p for p in base.parameters() if isinstance(p, QuantizedWeight)]
    bytes_per = sum(t.nbytes for p in weights for t in p.tensors().values()) / sum(p.numel() for p in weights)
    model = get_peft_model(base, LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False))
    codes = [p.row_codes.clone() for p in weights]
    losses = train(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3), 8)
    expect(losses[-1] < losses[0] - 0.2, f"adapters do not train: {losses}")
    expect(all(torch.equal(p.row_codes, c) for p, c in zip(weights, codes, strict=True)), "the base changed")
    with torch.no_grad():
        before = model(IDS).logits
        merged = model.merge_and_unload()
        after = merged(IDS).logits
    expect(all(isinstance(p, QuantizedWeight) for p in weights), "merging made values of the base")
    near = nn.functional.cosine_similarity(before.flatten().float(), after.flatten().float(), 0).item()
    expect(near > 0.99, f"the merged model is another: cosine {near}")
    octavo.save_fp8(merged, folder / "merged", like=folder / "out")
    same = on_meta("Llama")
    octavo.load_fp8(same, folder / "merged", device="cpu")
    expect(torch.equal(same(IDS).logits, after), "the saved model computes something else")
    moved = sum(not torch.equal(bytes_of(p.row_codes), bytes_of(c)) for p, c in zip(weights, codes, strict=True))
    return (
        f"{bytes_per:.3f} bytes a weight, loss {losses[0]:.2f} to {losses[-1]:.2f}, {moved} merged, cosine {near:.4f}"
    )


def main(chosen: list[str]) -> int:
    print(f"versions: {', '.join(f'{name} {version(name)}' for name in PACKAGES)}")
    parts = [(f"{kind} by transformers", lambda f, k=kind: of_transformers(k, f)) for kind in MODELS]
    compressed = [name for name in LAYOUTS if name.startswith("compressed-tensors")]
    parts += [(f"{name} by its package", lambda f, n=name: of_compressed_tensors(n, f)) for name in compressed]
    parts += [("GPT-OSS", of_gpt_oss)]
    parts += [
        (f"peft on {name}", lambda f, n=name: of_peft(n, f)) for name in ("fp8-block", "compressed-tensors-channel")
    ]
    failed = 0
    for name, part in [(n, part) for n, part in parts if not chosen or any(c in n for c in chosen)]:
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            try:
                print(f"{name}: {part(Path(folder))} ({time.perf_counter() - began:.0f} s)", flush=True)
            except Exception as error:
                failed += 1
                print(f"FAILED {name}: {type(error).__name__}: {str(error)[:2000]}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
