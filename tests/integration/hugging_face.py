"""transformers: models from tiny configs, in a loop of one's own, with save_pretrained and from_pretrained."""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Trainer,
    TrainingArguments,
)
from transformers.trainer_callback import PrinterCallback
from transformers.utils.logging import disable_progress_bar

import octavo
from octavo.model.conversion import ConversionReport
from tests.integration.subject import Subject, Watch, plain_loop, tokens

disable_progress_bar()

VOCABULARY = 256
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 160,  # more than one block of 128, and not a multiple
    "intermediate_size": 352,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.05,
    "use_cache": False,
}


class HuggingFace(Subject):
    package = "transformers"

    def __init__(
        self,
        name: str,
        model: type[PreTrainedModel],
        config: PreTrainedConfig,
        *,
        left: tuple[str, ...],
        dtype: torch.dtype = torch.float32,
        compiles: bool = False,
        **options: object,
    ):
        self.name, self.model, self.config = name, model, config
        self.left, self.dtype, self.compiles, self.options = left, dtype, compiles, options

    def convert(self, model: nn.Module, recipe: str) -> ConversionReport:
        return octavo.convert(model, recipe, **self.options)

    def build(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return self.model(self.config).to(self.dtype)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        ids = tokens(step, vocabulary=VOCABULARY)
        return model(input_ids=ids, labels=ids).loss

    def train(self, model: nn.Module, steps: int, watch: Watch) -> list[float]:
        return plain_loop(self, model, steps, watch.adamw())

    def save(self, model: nn.Module, folder: Path) -> None:
        model.save_pretrained(folder)

    def load(self, folder: Path, recipe: str | None) -> nn.Module:
        model, info = self.model.from_pretrained(folder, dtype=self.dtype, output_loading_info=True)
        wrong = {kind: keys for kind, keys in info.items() if keys}
        if wrong:
            raise AssertionError(f"from_pretrained says {wrong}")
        model.train()
        if recipe is not None:
            self.convert(model, recipe)
        return model


class Trained(HuggingFace):
    """The same in transformers' own Trainer, which accumulates the gradients of two microbatches in bfloat16."""

    def train(self, model: nn.Module, steps: int, watch: Watch) -> list[float]:
        optimizer = watch.adamw()
        octavo.attach(model, optimizer)
        rows = torch.cat([tokens(step, vocabulary=VOCABULARY) for step in range(2 * steps)])
        with TemporaryDirectory() as folder:
            trainer = Trainer(
                model,
                TrainingArguments(
                    folder,
                    max_steps=steps,
                    per_device_train_batch_size=4,
                    gradient_accumulation_steps=2,
                    bf16=True,
                    use_cpu=True,
                    logging_steps=1,
                    report_to=[],
                    save_strategy="no",
                    disable_tqdm=True,
                    log_level="error",
                ),
                train_dataset=[{"input_ids": row, "labels": row} for row in rows],
                optimizers=(optimizer, None),
            )
            trainer.remove_callback(PrinterCallback)
            trainer.train()
        trainer.accelerator.unwrap_model(model, keep_fp32_wrapper=False)  # or forward would stay under autocast
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
GPT2 = GPT2Config(
    vocab_size=VOCABULARY,
    n_embd=160,
    n_layer=2,
    n_head=4,
    bos_token_id=0,
    eos_token_id=0,
    use_cache=False,
    **NO_DROPOUT,
)
EXPERTS = {"num_experts_per_tok": 2, "num_key_value_heads": 2}

SUBJECTS = (
    HuggingFace("llama", LlamaForCausalLM, LlamaConfig(**SIZES), left=("lm_head",), compiles=True),
    Trained("trainer", LlamaForCausalLM, LlamaConfig(**SIZES), left=("lm_head",)),
    HuggingFace(
        "mixtral", MixtralForCausalLM, MixtralConfig(**SIZES, **EXPERTS, num_local_experts=4), left=("lm_head",)
    ),
    HuggingFace(
        "qwen3-moe",
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(**SIZES, **EXPERTS, num_experts=4, moe_intermediate_size=96, head_dim=40),
        left=("lm_head",),
    ),
    # GPT-2's layers are Conv1D: nothing is converted by default, and its head, tied to the embedding, on demand
    HuggingFace("gpt2", GPT2LMHeadModel, GPT2, left=("lm_head",), dtype=torch.bfloat16),
    HuggingFace("gpt2-head", GPT2LMHeadModel, GPT2, left=(), dtype=torch.bfloat16, high_precision=()),
    HuggingFace(
        "bert",
        BertForMaskedLM,
        BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
        left=("cls.predictions.decoder",),
    ),
)
