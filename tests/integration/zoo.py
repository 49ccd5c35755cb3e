"""Small models of other packages with random weights, each built from its own package's config: name, builder, batch.

A model of transformers is its type: sizes are chosen by the names of its config's settings, so that a new one is a
word in a list.
"""

import importlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Batch = dict[str, Any]


class Entry(NamedTuple):
    """A model: how it is built, its batch of a seed, and its loss on a batch."""

    package: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]


VOCABULARY = 160
SIZES = {
    "hidden_size": 64, "n_embd": 64, "d_model": 64, "dim": 64, "embed_dim": 64, "embedding_size": 64, "n_inner": 128,
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "encoder_layers": 2, "decoder_layers": 2,
    "num_decoder_layers": 2, "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "d_kv": 16,
    "intermediate_size": 128, "ffn_dim": 128, "d_ff": 128, "hidden_dim": 128, "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
    "expert_ffn_hidden_size": 64, "ffn_hidden_size": 128, "vocab_size": VOCABULARY, "max_position_embeddings": 128,
    "n_positions": 128, "max_seq_len": 128, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "moe_num_experts": 4, "num_experts_per_tok": 2, "moe_k": 2, "moe_topk": 2, "n_group": 1, "topk_group": 1,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16, "v_head_dim": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1, "intermediate_size_mlp": 128, "zero_expert_num": 0, "kv_channels": 16,
    "image_size": 32, "patch_size": 8, "sliding_window": 32, "state_size": 16, "conv_dim": (32, 32),
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
    "max_source_positions": 32, "max_target_positions": 64, "num_mel_bins": 16, "layerdrop": 0.0, "mask_time_prob": 0.0,
    "mamba_d_state": 16, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "lru_width": 64,
    "attention_window_size": 32, "layerdrop_prob": 0.0, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0,
    "hidden_dropout": 0.0, "hidden_dropout_prob": 0.0, "attention_dropout": 0.0, "attention_probs_dropout_prob": 0.0,
    "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "dropout": 0.0, "dropout_rate": 0.0,
    "activation_dropout": 0.0, "embedding_dropout": 0.0, "resid_dropout": 0.0, "embed_dropout": 0.0,
    "feat_proj_dropout": 0.0, "final_dropout": 0.0, "drop_path_rate": 0.0, "embd_dropout": 0.0,
    "num_hash_layers": 0, "router_jitter_noise": 0.0, "input_jitter_noise": 0.0, "classifier_dropout": 0.0,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {  # settings beside those of SIZES
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
    },
    "gpt_neo": {"attention_types": [[["global"], 2]]},
    "opt": {"word_embed_proj_dim": 64},
    "llama4_text": {"num_experts_per_tok": 1, "interleave_moe_layer_step": 1},
    "gptj": {"rotary_dim": 16},
    "codegen": {"rotary_dim": 16},
    "swin": {"embed_dim": 24, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4, "patch_size": 2},
    "convnext": {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2, "patch_size": 4},
    "mpt": {"attn_config": {"attn_pdrop": 0}},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
              "use_mamba_kernels": False},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "num_key_value_heads": 1},
    "lfm2": {"full_attn_idxs": [1]},
    "nemotron_h": {"hybrid_override_pattern": "M*", "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 1},
    "phimoe": {"num_local_experts": 4},
    "xlm-roberta": {}, "bamba": {"attn_layer_indices": [1]},
    "wav2vec2": {
        "conv_kernel": (10, 4), "conv_stride": (5, 4), "num_feat_extract_layers": 2, "apply_spec_augment": False,
    },
    "mamba": {"conv_kernel": 4}, "falcon_mamba": {"conv_kernel": 4},
    "deepseek_v2": {"num_key_value_heads": 4}, "deepseek_v3": {"num_key_value_heads": 4},
    "longcat_flash": {"num_key_value_heads": 4},
    "hubert": {
        "conv_kernel": (10, 4), "conv_stride": (5, 4), "num_feat_extract_layers": 2, "apply_spec_augment": False,
    },
}  # fmt: skip


def _words(text: str) -> list[str]:
    return text.split()


CAUSAL = _words("""
    llama mistral qwen2 qwen3 gemma gemma2 gemma3_text phi phi3 gpt2 gpt_neo gpt_neox gptj opt bloom falcon mpt
    stablelm starcoder2 olmo olmo2 cohere cohere2 granite glm glm4 smollm3 nemotron codegen biogpt persimmon exaone4
    ernie4_5 helium seed_oss arcee apertus xglm gpt_bigcode lfm2 mamba mamba2 falcon_mamba recurrent_gemma bamba
    jamba mixtral qwen2_moe qwen3_moe gpt_oss llama4_text dbrx jetmoe granitemoe olmoe phimoe deepseek_v2
    deepseek_v3 ernie4_5_moe glm4_moe hunyuan_v1_moe dots1 flex_olmo longcat_flash minimax
""")
CLASSIFIERS = ["bert", "roberta", "electra", "distilbert", "albert", "deberta-v2", "modernbert", "xlm-roberta"]
SEQUENCES = ["t5", "bart", "switch_transformers"]
IMAGES = ["vit", "swin", "convnext", "dinov2", "beit"]
SOUNDS = ["wav2vec2", "hubert"]


def entries() -> Iterator[tuple[str, Entry]]:
    """Yield all models by name, whichever packages are installed."""
    for kind in CAUSAL:
        yield kind, transformers_entry(kind, "AutoModelForCausalLM", text)
    for kind in CLASSIFIERS:
        yield kind, transformers_entry(kind, "AutoModelForSequenceClassification", classified)
    for kind in SEQUENCES:
        yield kind, transformers_entry(kind, "AutoModelForSeq2SeqLM", text)
    for kind in IMAGES:
        yield kind, transformers_entry(kind, "AutoModelForImageClassification", images)
    for kind in SOUNDS:
        yield kind, transformers_entry(kind, "AutoModelForCTC", _sounds)
    yield "whisper", transformers_entry("whisper", "AutoModelForSpeechSeq2Seq", _mels)
    for kind in ("mixtral", "gpt_oss"):
        yield f"{kind}, LoRA on experts", _adapted(transformers_entry(kind, "AutoModelForCausalLM", text))
    yield from _timm()
    yield from _diffusers()
    yield from _litgpt()
    yield from _titan()
    yield from _torch()


# -- transformers ------------------------------------------------------------------------------------------------------


def transformers_entry(kind: str, auto: str, batch: Callable[[int], Batch]) -> Entry:
    def build() -> nn.Module:
        transformers: Any = importlib.import_module("transformers")
        mapping = importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING
        defaults = vars(mapping[kind]())
        renamed = set(getattr(mapping[kind], "attribute_map", {}))
        sizes = {name: value for name, value in SIZES.items() if name in defaults and name not in renamed}
        if defaults.get("layer_types"):
            kinds = list(dict.fromkeys(defaults["layer_types"]))
            sizes["layer_types"] = [kinds[0], kinds[-1]]
        config = mapping[kind](**{**sizes, **OWN.get(kind, {})})
        if auto == "AutoModelForSeq2SeqLM" and getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = 1
        return getattr(transformers, auto).from_config(config).float()

    return Entry("transformers", build, batch, lambda model, batch: model(**batch).loss)


def _adapted(entry: Entry) -> Entry:
    """Return the entry with adapters of the attention and of the experts' parameters."""

    def build() -> nn.Module:
        peft = importlib.import_module("peft")
        stacked = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        config = peft.LoraConfig(r=4, target_modules=["q_proj"], target_parameters=stacked, init_lora_weights=False)
        return peft.get_peft_model(entry.build(), config)

    return entry._replace(package="peft", build=build)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def text(seed: int) -> Batch:
    tokens = torch.randint(3, VOCABULARY, (2, 24), generator=_generator(seed))
    return {"input_ids": tokens, "labels": tokens}


def classified(seed: int) -> Batch:
    return {**text(seed), "labels": torch.tensor([0, 1])}


def images(seed: int) -> Batch:
    return {"pixel_values": torch.randn(2, 3, 32, 32, generator=_generator(seed)), "labels": torch.tensor([0, 1])}


def _sounds(seed: int) -> Batch:
    return {"input_values": torch.randn(2, 800, generator=_generator(seed)), "labels": torch.tensor([[3, 4], [5, 6]])}


def _mels(seed: int) -> Batch:
    labels = torch.randint(3, VOCABULARY, (2, 12), generator=_generator(seed))
    return {"input_features": torch.randn(2, 16, 64, generator=_generator(seed)), "labels": labels}


# -- timm, diffusers, torch --------------------------------------------------------------------------------------------


def _squared(model: nn.Module, batch: Batch) -> Tensor:
    y: Any = model(**batch)
    y = y[0] if isinstance(y, tuple) else getattr(y, "sample", y)
    return (y - 1).square().mean()


def _pictures(seed: int) -> Batch:
    return {"x": torch.randn(2, 3, 32, 32, generator=_generator(seed))}


def _timm() -> Iterator[tuple[str, Entry]]:
    transformer = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 4}
    models: dict[str, dict[str, Any]] = {
        "vit_tiny_patch16_224": transformer,
        "deit3_small_patch16_224": transformer,
        "eva02_tiny_patch14_224": transformer,
        "mixer_s32_224": {"img_size": 32},
        "convnext_atto": {"depths": (1, 1, 1, 1), "dims": (16, 16, 32, 32)},
        "resnet18": {},
        "swin_tiny_patch4_window7_224": {
            "img_size": 32, "patch_size": 4, "embed_dim": 32, "depths": (1, 1), "num_heads": (2, 4), "window_size": 4,
        },
    }  # fmt: skip
    for name, sizes in models.items():

        def build(name: str = name, sizes: dict[str, Any] = sizes) -> nn.Module:
            return importlib.import_module("timm").create_model(name, num_classes=10, **sizes)

        yield f"timm {name}", Entry("timm", build, _pictures, _squared)


def _diffusers() -> Iterator[tuple[str, Entry]]:
    def latents(seed: int, **more: Any) -> Batch:
        return {"hidden_states": torch.randn(2, 4, 8, 8, generator=_generator(seed)), **more}

    def noise(seed: int) -> Tensor:
        return torch.randn(2, 6, 32, generator=_generator(seed + 1))

    step = torch.tensor([3, 5])
    heads = {"num_attention_heads": 4, "attention_head_dim": 16, "num_layers": 2, "sample_size": 8, "patch_size": 2}
    table: dict[str, tuple[dict[str, Any], Callable[[int], Batch]]] = {
        "DiTTransformer2DModel": (
            {**heads, "in_channels": 4, "out_channels": 4, "dropout": 0.0, "num_embeds_ada_norm": 10},
            lambda s: latents(s, timestep=step, class_labels=torch.tensor([1, 2])),
        ),
        "SD3Transformer2DModel": (
            {**heads, "in_channels": 4, "out_channels": 4, "joint_attention_dim": 32, "caption_projection_dim": 64,
             "pooled_projection_dim": 32, "pos_embed_max_size": 8},
            lambda s: latents(s, timestep=step, encoder_hidden_states=noise(s), pooled_projections=noise(s)[:, 0]),
        ),
        "PixArtTransformer2DModel": (
            {**heads, "in_channels": 4, "out_channels": 4, "cross_attention_dim": 64, "caption_channels": 32},
            lambda s: latents(
                s, timestep=step, encoder_hidden_states=noise(s),
                added_cond_kwargs={"resolution": None, "aspect_ratio": None},
            ),
        ),
        "UNet2DModel": (
            {"sample_size": 8, "in_channels": 4, "out_channels": 4, "block_out_channels": (32, 32),
             "down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
             "layers_per_block": 1},
            lambda s: {"sample": latents(s)["hidden_states"], "timestep": step},
        ),
        "AutoencoderKL": (
            {"block_out_channels": (32, 32), "down_block_types": ("DownEncoderBlock2D",) * 2,
             "up_block_types": ("UpDecoderBlock2D",) * 2},
            lambda s: {"sample": _pictures(s)["x"]},
        ),
    }  # fmt: skip
    for name, (settings, batch) in table.items():

        def build(name: str = name, settings: dict[str, Any] = settings) -> nn.Module:
            return getattr(importlib.import_module("diffusers"), name)(**settings)

        yield f"diffusers {name}", Entry("diffusers", build, batch, _squared)


def _predicted(model: nn.Module, batch: Batch) -> Tensor:
    scores: Any = model(batch["input_ids"])
    return nn.functional.cross_entropy(scores.flatten(0, 1).float(), batch["labels"].flatten())


def _litgpt() -> Iterator[tuple[str, Entry]]:
    sizes = {"n_layer": 2, "n_embd": 64, "n_head": 4, "padded_vocab_size": VOCABULARY, "block_size": 64}
    gated = {**sizes, "n_query_groups": 2, "intermediate_size": 128}
    models: dict[str, dict[str, Any]] = {
        "pythia-14m": {**sizes, "intermediate_size": 128},
        "Llama-3.2-1B": gated,
        "Gemma-2-2b": {**gated, "head_size": 16},
        "Mixtral-8x7B-v0.1": {**gated, "n_expert": 4},
    }
    for name, settings in models.items():

        def build(name: str = name, settings: dict[str, Any] = settings) -> nn.Module:
            litgpt = importlib.import_module("litgpt")
            return litgpt.GPT(litgpt.Config.from_name(name, **settings))

        yield f"litgpt {name}", Entry("litgpt", build, text, _predicted)


def _titan() -> Iterator[tuple[str, Entry]]:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        ids = batch["input_ids"]
        scores: Any = model(ids, positions=torch.arange(ids.shape[1]).expand_as(ids))
        return nn.functional.cross_entropy(scores.flatten(0, 1).float(), batch["labels"].flatten())

    for name, flavor in (("llama3", "debugmodel"), ("qwen3", "debugmodel"), ("deepseek_v3", "debugmodel")):

        def build(name: str = name, flavor: str = flavor) -> nn.Module:
            config = importlib.import_module(f"torchtitan.models.{name}").model_registry(flavor).model
            attention = importlib.import_module("torchtitan.models.common.attention").ScaledDotProductAttention
            config.layers = config.layers[:2]
            for layer in config.layers:
                layer.attention.inner_attention = attention.Config()  # flex attention has no backward on a CPU
            model = config.build()
            with torch.no_grad():
                model.init_states()
            return model

        yield f"torchtitan {name} {flavor}", Entry("torchtitan", build, text, loss)


def _torch() -> Iterator[tuple[str, Entry]]:
    def both(seed: int) -> Batch:
        return {name: torch.randn(6, 2, 64, generator=_generator(seed)) for name in ("src", "tgt")}

    yield "nn.Transformer", Entry("torch", lambda: nn.Transformer(64, 4, 2, 2, 96, dropout=0.0), both, _squared)
