"""The functions of the package over models, each run in a context: doctor, reports, checkpoints, conversions. What they
return, and what the model computes afterwards, must not depend on the context. Adding one is a function and a line of
`FUNCTIONS`."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

import octavo
from octavo.cli import doctor
from octavo.demo import corpus, training
from octavo.demo.gpt import GPT, loss_of
from octavo.kernels.gemm import native
from octavo.kernels.grouped_gemm import hopper_support as grouped_native
from octavo.recipes import SHIPPED
from tests.strange.layers import BY_NAME, Draw, K, N, Place, Subclass
from tests.strange.run import Record, Run, kept, seed_torch
from tests.strange.states import Enter
from tests.support.recipe_traits import QUANTIZED

MODEL = BY_NAME["converted linears"]
Call = Callable[[Enter, str, str, Path], Record]  # of a context, a recipe, a device and an empty folder


@dataclass(frozen=True)
class Function:
    name: str
    call: Call
    recipes: tuple[str, ...] = SHIPPED
    devices: tuple[str, ...] = ("cpu", "cuda")
    may_differ: tuple[str, ...] = ()  # patterns of the names of values that differ where gradients are off
    is_lasting: bool = True  # whether a process always gets the same result without a context

    def __str__(self) -> str:
        return self.name


def stock(device: str) -> nn.Sequential:
    """Returns a model of other people's layers."""
    place = Place(device=device, dtype=torch.float32)
    model = nn.Sequential(nn.Linear(K, N, **place), nn.GELU(), Subclass(N, K, bias=False, **place))
    draw = Draw(place, seed=2)
    for parameter in model.parameters():
        parameter.data.copy_(draw.normal(*parameter.shape) * 0.1)
    seed_torch(0, device)  # a conversion derives the seed of stochastic rounding from torch's generator
    return model


def batch(device: str) -> torch.Tensor:
    return Draw(Place(device=device, dtype=torch.float32), seed=3).values(64, K).detach()


def trained(recipe: str, device: str) -> Run:
    run = Run(MODEL, recipe, device)
    run.step()
    return run


def probed(enter: Enter, recipe: str, device: str, folder: Path) -> Record:
    """The doctor's row of a recipe."""
    with enter():
        return {name: asdict(cell) for name, cell in doctor.probe(octavo.recipe(recipe), torch.device(device)).items()}


def diagnosed(enter: Enter, recipe: str, device: str, folder: Path) -> Record:
    """All that `octavo doctor` reports."""
    with enter():
        report: Record = {}
        doctor.examine(torch.device(device), report)
        return report


def probed_kernels(enter: Enter, recipe: str, device: str, folder: Path) -> Record:
    """The probes that decide which GEMMs of the chip are used. Their verdicts are cached; here each one runs."""
    place, gemms = torch.device(device, torch.cuda.current_device()), octavo.recipe(recipe).linear()
    pairs = {(g.left, g.right) for g in (gemms.fprop, gemms.dgrad, gemms.wgrad) if g.left is not None}
    with enter(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouped_native, "_verdicts", {})
        patch.setattr(native, "_probed", native._probed.__wrapped__)
        found = {str(pair): asdict(native.support(*pair, place)) for pair in sorted(pairs, key=str)}
        return found | {name: asdict(grouped_native.support(name, place)) for name in grouped_native._PROBES}


def demo_models(enter: Enter, recipe: str, device: str, folder: Path) -> Record:
    """The models of `octavo train`, their text, and a loss with its gradients."""
    found: Record = {}
    for name in training.MODELS:
        shape = training.shape_of(name, "64,1,2,16")
        seed_torch(0, device)
        with enter():
            model = GPT(shape, seed=0).to(device)
            training.converted(model, octavo.recipe(recipe))
            text, _ = corpus.load()
            (tokens,) = corpus.batches(text, steps=1, batch=2, context=shape.context, seed=0)
            loss = loss_of(model, tokens.to(device))
            if loss.requires_grad:
                loss.backward()
        found |= {f"{name} {key}": kept(p) for key, p in model.named_parameters()}
        found |= {f"{name} {key} gradient": kept(p.grad) for key, p in model.named_parameters()}
        found[f"{name} loss"] = kept(loss)
    return found


def inspected(enter: Enter, recipe: str, device: str, folder: Path) -> Record:
    """The report is opened, read and closed in the context; the step in it is not, as it may need gradients."""
    run = trained(recipe, device)
    with enter():
        inspection = octavo.inspect(run.module)
        inspection.__enter__()
    run.step()
    with enter():
        inspection.__exit__(None, None, None)
        found = inspection.to_dict() | {"text": str(inspection)}
    run.step()
    return found | run.finish()


def inspected_calls(enter: Enter, recipe: str, device: str, folder: Path) -> Record:
    """Calls without gradients are inspected in the context."""
    run = trained(recipe, device)
    with octavo.inspect(run.module) as inspection, torch.no_grad(), enter():
        run.extra_call()
    run.step()
    return inspection.to_dict() | run.finish()


def compared(enter: Enter, recipe: str, device: str, folder: Path) -> Record:
    model, x = stock(device), batch(device)
    with enter():
        comparison = octavo.compare(model, [x, 2 * x], recipe, "fp8-block")
    return comparison.to_dict() | {"text": str(comparison)}


def explained(enter: Enter, recipe: str, device: str, folder: Path) -> Record:
    run = trained(recipe, device)
    with enter():
        text = str(octavo.explain(run.module, *run.layer.inputs(Draw(run.place, seed=4))))
    run.step()
    return {"explanation": text} | run.finish()


def saved(enter: Enter, recipe: str, device: str, folder: Path) -> Record:
    """A checkpoint is saved and loaded into another model, which goes on as the first would have."""
    source, target = (Run(MODEL, recipe, device) for _ in range(2))
    source.step()
    with enter():
        octavo.save_checkpoint(folder, source.module, step=1)
        checkpoint = octavo.load_checkpoint(folder, target.module)
    target.steps = checkpoint.step
    target.step()
    return target.finish()


def loaded(enter: Enter, recipe: str, device: str, folder: Path) -> Record:
    source, target = trained(recipe, device), Run(MODEL, recipe, device)
    with enter():
        target.module.load_state_dict(source.module.state_dict())
        octavo.load_state_dict(target.module, octavo.state_dict(source.module))
    target.step()
    return target.finish()


def converted(enter: Enter, recipe: str, device: str, folder: Path) -> Record:
    """A model is converted, trained and reverted."""
    model, x = stock(device), batch(device)
    with enter():
        report = octavo.convert(model, recipe)
    losses = []
    for _ in range(2):
        loss = model(x).square().mean()
        loss.backward()
        octavo.step(model)
        losses.append(loss.item())
    gradients = {f"{name} gradient": p.grad.clone() for name, p in model.named_parameters()}
    with enter():
        octavo.revert(model)
    versions = {f"version of {name}": p._version for name, p in model.named_parameters()}
    return gradients | versions | {"report": str(report), "losses": losses, "reverted": model(x).detach()}


def quantized(enter: Enter, recipe: str, device: str, folder: Path) -> Record:
    """Weights are refreshed and then stored as codes."""
    run = trained(recipe, device)
    with enter():
        octavo.refresh_weights(run.module)
    run.step()
    with enter():
        octavo.quantize_weights(run.module)
    run.module.requires_grad_(False)
    run.step()
    return run.finish()


def stepped(enter: Enter, recipe: str, device: str, folder: Path) -> Record:
    """An optimizer that is attached, and steps in the context."""
    run = trained(recipe, device)
    optimizer = torch.optim.SGD(run.module.parameters(), lr=0.1, foreach=False)
    octavo.attach(run.module, optimizer)
    for seed in range(2):
        _, y = run.call(seed)
        y.square().mean().backward()
        with enter():
            optimizer.step()
            optimizer.zero_grad()
    run.step()
    return run.finish()


FUNCTIONS: tuple[Function, ...] = (
    Function("doctor.probe", probed),
    # it reports all recipes, and fast paths that a process decides when it first needs them
    Function("doctor.examine", diagnosed, ("bf16",), is_lasting=False),
    Function("probes of kernels", probed_kernels, QUANTIZED, devices=("cuda",)),
    Function("models of octavo train", demo_models, may_differ=("*gradient",)),
    Function("inspect", inspected),
    Function("inspect of calls", inspected_calls),
    Function("compare", compared),
    Function("explain", explained, may_differ=("explanation",)),  # of the call as it is made there
    Function("save_checkpoint and load_checkpoint", saved),
    Function("state_dict and load_state_dict", loaded),
    Function("convert and revert", converted),
    Function("refresh_weights and quantize_weights", quantized, QUANTIZED),
    Function("attach and step", stepped),
)
