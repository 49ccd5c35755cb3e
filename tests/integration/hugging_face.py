"""transformers: models from tiny configs, in a loop of one's own, with save_pretrained and from_pretrained."""

import copy
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
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
from tests.integration.subject import Subject, Watch, expect, plain_loop, tokens

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


# how far a gradient of experts may be from that of the model's own, relative to its norm
EXPERTS_BOUNDS = {"bf16": 1e-5, "nvfp4": 0.4}
FP8_BOUND = 0.1


class Mixture(HuggingFace):
    """A mixture of experts: the converted experts have the gradients of the model's own, within bounds, and the saved
    files are those of the unconverted model."""

    compiles_whole = True

    def __init__(self, *args: object, **options: object):
        super().__init__(*args, compiles=True, **options)

    def compare(self, recipe: str) -> None:
        plain, model = self.build(0), self.build(0)
        torch.manual_seed(1)
        report = self.convert(model, recipe)
        rows = [row for row in report if row.path.endswith(".experts")]
        expect(bool(rows), "the model has no experts")
        expect(all(row.recipe == recipe for row in rows), f"the experts are {[row.recipe for row in rows]}")
        expect(plain.config.to_dict() == model.config.to_dict(), "the config is another")
        bound = EXPERTS_BOUNDS.get(recipe, FP8_BOUND)
        torch.compiler.reset()
        for path in [row.path for row in rows]:
            mine, theirs = (gradients(one.get_submodule(path)) for one in (model, plain))
            compiled = copy.deepcopy(model.get_submodule(path))
            compiled.compile(backend="aot_eager", fullgraph=True)
            for kind, found in (("", mine), (", compiled,", gradients(compiled))):
                for name, wanted in theirs.items():
                    error = ((found[name] - wanted).norm() / wanted.norm()).item()
                    said = f"the gradient of {path}'s {name}{kind} has an error of {error:.3f}, bound {bound}"
                    expect(error < bound, said)
        with TemporaryDirectory() as folder:
            plain.save_pretrained(f"{folder}/plain")
            model.save_pretrained(f"{folder}/converted")
            files = {path.name: path.read_bytes() for path in Path(folder, "plain").iterdir()}
            others = {path.name: path.read_bytes() for path in Path(folder, "converted").iterdir()}
            expect(files == others, "save_pretrained writes other files after the conversion")


def gradients(experts: nn.Module) -> dict[str, Tensor]:
    """The gradients of one call of experts, in its inputs and its parameters."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(96, experts.config.hidden_size, generator=generator, requires_grad=True)
    scores = torch.rand(96, experts.num_experts, generator=generator, requires_grad=True)
    weights, index = scores.topk(2)
    y = experts(x, index, weights)
    trained = {"x": x, "scores": scores, **dict(experts.named_parameters())}
    dy = torch.randn(y.shape, generator=generator)
    return dict(zip(trained, torch.autograd.grad(y, list(trained.values()), dy), strict=True))


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
DEEPSEEK = DeepseekV3Config(
    **SIZES,
    num_experts_per_tok=2,
    num_key_value_heads=4,
    n_routed_experts=4,
    n_shared_experts=1,
    n_group=2,
    topk_group=1,
    moe_intermediate_size=96,
    first_k_dense_replace=1,
    q_lora_rank=48,
    kv_lora_rank=32,
    qk_rope_head_dim=16,
    qk_nope_head_dim=24,
    v_head_dim=32,
)

SUBJECTS = (
    HuggingFace("llama", LlamaForCausalLM, LlamaConfig(**SIZES), left=("lm_head",), compiles=True),
    Trained("trainer", LlamaForCausalLM, LlamaConfig(**SIZES), left=("lm_head",)),
    Mixture("mixtral", MixtralForCausalLM, MixtralConfig(**SIZES, **EXPERTS, num_local_experts=4), left=("lm_head",)),
    Mixture(
        "qwen3-moe",
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(**SIZES, **EXPERTS, num_experts=4, moe_intermediate_size=96, head_dim=40),
        left=("lm_head",),
    ),
    Mixture("deepseek-v3", DeepseekV3ForCausalLM, DEEPSEEK, left=("lm_head",)),
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
