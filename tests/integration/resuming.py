"""Runs that other packages' loops save and resume, with octavo.integrations: six steps, and three and three more.

    python -m tests.integration resuming                    or some: trainer --recipe nvfp4

Each loop trains six steps. Then it trains three, saves in its own way, and another process builds everything anew,
resumes, and trains three more: losses, weights, optimizer and state of recipes must have the same bits. A run that
resumes without the integration must not, in recipes with a state. The command exits with 1 if anything differs.
"""

import argparse
import hashlib
import json
import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers.utils.logging import disable_progress_bar

import octavo
from tests.integration.subject import LEARNING_RATE, REMEMBERS, tokens

VOCABULARY, WIDTH = 128, 96
STEPS, HALF = 6, 3
RECIPES = ("bf16", "fp8-delayed", "fp8-block", "nvfp4")
PACKAGES = ("torch", "transformers", "accelerate", "lightning", "safetensors")


def result(model: nn.Module, optimizer: Any, losses: list[float]) -> dict[str, Any]:
    """The results of a run, which another is compared with."""
    state = getattr(optimizer, "optimizer", optimizer).state_dict()["state"]
    moments = {f"{number}.{name}": t for number, entry in state.items() for name, t in entry.items()}
    return {
        "losses": losses, "weights": digest(model.state_dict()), "optimizer": digest(moments),
        "recipe": digest(octavo.state_dict(model)),
    }  # fmt: skip


def digest(tensors: dict[str, Tensor]) -> str:
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {tensor.double().flatten().tolist()}".encode())
    return found.hexdigest()


def rows() -> Tensor:
    return torch.cat([tokens(step, vocabulary=VOCABULARY) for step in range(STEPS)])


def llama(seed: int, recipe: str) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=VOCABULARY, use_cache=False, attention_dropout=0.1, **sizes)
    model = LlamaForCausalLM(config)
    octavo.convert(model, recipe)
    return model


# -- the loops: each trains from step `begin` to `end`, resumes from the folder if begin > 0, and saves at `end` -------


def trainer(folder: Path, recipe: str, begin: int, end: int, integrated: bool) -> dict[str, Any]:
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_callback import PrinterCallback

    from octavo.integrations.hugging_face import OctavoCallback

    class AttachAlone(TrainerCallback):
        def on_train_begin(self, *_: Any, model: nn.Module, optimizer: Any, **more: Any) -> None:
            octavo.attach(model, optimizer)

    class StopAt(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step >= end
            control.should_save = state.global_step >= end

    model = llama(7 if begin else 0, recipe)
    arguments = TrainingArguments(
        str(folder), max_steps=STEPS, per_device_train_batch_size=4, bf16=True, use_cpu=True, logging_steps=1,
        report_to=[], save_strategy="no", disable_tqdm=True, log_level="error", learning_rate=LEARNING_RATE, seed=3,
    )  # fmt: skip
    callbacks = [OctavoCallback() if integrated else AttachAlone(), StopAt()]
    dataset = [{"input_ids": row, "labels": row} for row in rows()]
    loop = Trainer(model, arguments, train_dataset=dataset, callbacks=callbacks)
    loop.remove_callback(PrinterCallback)
    loop.train(resume_from_checkpoint=True if begin else None)
    losses = [entry["loss"] for entry in loop.state.log_history if "loss" in entry]
    return result(loop.accelerator.unwrap_model(model), loop.optimizer, losses)


def accelerate(folder: Path, recipe: str, begin: int, end: int, integrated: bool) -> dict[str, Any]:
    from accelerate import Accelerator

    from octavo.integrations.accelerate import register

    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = llama(7 if begin else 0, recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(TensorDataset(rows()), batch_size=4))
    if integrated:
        register(accelerator, model, optimizer)
    else:
        octavo.attach(model, optimizer)
    batches = list(loader)  # a loader draws a seed
    torch.manual_seed(5)
    if begin:
        accelerator.load_state(str(folder))
    losses = []
    for (ids,) in batches[begin:end]:
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    accelerator.save_state(str(folder))
    return result(accelerator.unwrap_model(model), optimizer, losses)


def lightning(folder: Path, recipe: str, begin: int, end: int, integrated: bool) -> dict[str, Any]:
    import lightning

    from octavo.integrations.lightning import OctavoCallback

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(lightning.LightningModule):
        """Its epochs have three batches, so that a checkpoint is at the end of one."""

        def __init__(self) -> None:
            super().__init__()
            self.losses: list[float] = []
            self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
            layers = [nn.Sequential(nn.Linear(WIDTH, 160), nn.GELU(), nn.Linear(160, WIDTH)) for _ in range(2)]
            self.layers = nn.Sequential(*layers)

        def training_step(self, batch: list[Tensor]) -> Tensor:
            (ids,) = batch
            logits = self.head(self.layers(self.embedding(ids)))
            loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            optimizer = torch.optim.AdamW(self.parameters(), lr=LEARNING_RATE)
            if not integrated:
                octavo.attach(self, optimizer)
            return optimizer

    torch.manual_seed(7 if begin else 0)
    module = Module()
    octavo.convert(module, recipe)
    loop = lightning.Trainer(
        accelerator="cpu", precision="bf16-mixed", max_epochs=end // HALF, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[OctavoCallback()] if integrated else [],
    )  # fmt: skip
    loader = DataLoader(TensorDataset(rows()[: 4 * HALF]), batch_size=4)
    loop.fit(module, loader, ckpt_path=folder / "last.ckpt" if begin else None, weights_only=True)
    loop.save_checkpoint(folder / "last.ckpt")
    return result(module, loop.optimizers[0], module.losses)


LOOPS: dict[str, Callable[[Path, str, int, int, bool], dict[str, Any]]] = {
    "trainer": trainer, "accelerate": accelerate, "lightning": lightning,
}  # fmt: skip


# -- the comparison --------------------------------------------------------------------------------------------------


def in_a_process(loop: str, *arguments: object) -> dict[str, Any]:
    """Runs the second part of a loop in a process of its own."""
    command = [sys.executable, "-m", "tests.integration.resuming", "--second", json.dumps([loop, *map(str, arguments)])]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(run.stderr)
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


def differences(loop: str, recipe: str, wanted: dict[str, Any], integrated: bool = True) -> list[str]:
    """Returns the names of the results that differ after a save and a resume."""
    with tempfile.TemporaryDirectory() as folder:
        first = LOOPS[loop](Path(folder), recipe, 0, HALF, integrated)
        files = [str(path.relative_to(folder)) for path in Path(folder).rglob("octavo*.safetensors")]
        if loop != "lightning" and len(files) != integrated:
            return [f"files {files}"]
        second = in_a_process(loop, folder, recipe, int(integrated))
    losses = second["losses"] if loop == "trainer" else first["losses"] + second["losses"]
    return [name for name, value in wanted.items() if {**second, "losses": losses}[name] != value]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.integration resuming")
    parser.add_argument("loops", nargs="*", help=f"of {', '.join(LOOPS)}; all of them by default")
    parser.add_argument("--recipe", action="append", choices=RECIPES, help="may be repeated; all of them by default")
    parser.add_argument("--second", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.second:
        loop, folder, recipe, integrated = json.loads(arguments.second)
        print("\n" + json.dumps(LOOPS[loop](Path(folder), recipe, HALF, STEPS, bool(int(integrated)))))
        return 0
    disable_progress_bar()
    print(f"versions: {', '.join(f'{name} {version(name)}' for name in PACKAGES)}, python {sys.version.split()[0]}")
    failed = 0
    for loop in arguments.loops or LOOPS:
        for recipe in arguments.recipe or RECIPES:
            started = time.perf_counter()
            with tempfile.TemporaryDirectory() as folder:
                wanted = LOOPS[loop](Path(folder), recipe, 0, STEPS, True)
            found = differences(loop, recipe, wanted)
            note = ""
            if recipe in REMEMBERS:
                without = differences(loop, recipe, wanted, integrated=False)
                note = f"; without the integration, others: {', '.join(without)}"
                found += [] if without else ["nothing differs without the integration"]
            failed += bool(found)
            losses = " ".join(f"{loss:.4f}" for loss in wanted["losses"])
            verdict = f"DIFFERS in {', '.join(found)}" if found else f"every bit the same{note}"
            print(f"{loop:<10}  {recipe:<11}  {losses}  {verdict}  {time.perf_counter() - started:.0f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
