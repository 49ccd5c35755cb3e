"""A subject, and the trial that each of them goes through in each recipe."""

import math
import time
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

import octavo
from octavo.model.conversion import ConversionReport

# how far the first loss, and the direction of its gradient, may be from the unconverted model's: (relative, cosine)
BOUNDS = {
    "bf16": (0.01, 0.99),
    "fp8-delayed": (0.03, 0.95),
    "fp8-current": (0.03, 0.95),
    "fp8-rowwise": (0.03, 0.95),
    "fp8-block": (0.03, 0.95),
    "mxfp8": (0.03, 0.95),
    "nvfp4": (0.10, 0.70),
}
LEARNING_RATE = 2e-3
REMEMBERS = ("fp8-delayed", "nvfp4")  # recipes with a state of their own


Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)


class Unmet(AssertionError):
    """An expectation of a trial that did not hold."""


def expect(condition: bool, sentence: str) -> None:
    if not condition:
        raise Unmet(sentence)


class Subject:
    """One model in one package's loop. A subclass says how its users build, train, save and load it."""

    name: str
    package: str  # distribution that it comes from
    left: tuple[str, ...] = ()  # globs of the linear layers that are to be left alone; all others are converted
    compiles = False  # tried once under torch.compile
    compiles_whole = False  # in one graph, even if the unconverted model does not
    saves_state = False  # save and load care for octavo's state too
    unreported: tuple[str, ...] = ()  # globs of parameters that came after the conversion
    frozen: tuple[str, ...] = ()  # globs of state that never moves, since no gradient passes that layer

    def build(self, seed: int) -> nn.Module:
        """An unconverted model, on the CPU, with weights of this seed."""
        raise NotImplementedError

    def convert(self, model: nn.Module, recipe: str) -> ConversionReport:
        return octavo.convert(model, recipe)

    def converted(self, seed: int, recipe: str) -> tuple[nn.Module, ConversionReport]:
        model = self.build(seed)
        return model, self.convert(model, recipe)

    def path_now(self, path: str) -> str:
        """The path in the finished model of the module at a path of the report."""
        return path

    def loss(self, model: nn.Module, step: int) -> Tensor:
        """The loss on the batch of that step."""
        raise NotImplementedError

    def train(self, model: nn.Module, steps: int, watch: "Watch") -> list[float]:
        """Train in the package's way, and give the loss of each step."""
        raise NotImplementedError

    def compare(self, recipe: str) -> None:
        """Whatever else is to hold of this subject."""

    def save(self, model: nn.Module, folder: Path) -> None:
        """Save in the package's way."""
        raise NotImplementedError

    def load(self, folder: Path, recipe: str | None) -> nn.Module:
        """Load in the package's way, into a model that had other weights; with a recipe, converted."""
        raise NotImplementedError


@dataclass
class Watch:
    """Looks at the gradients of each optimizer step, wherever a loop hides it."""

    model: nn.Module
    steps: int = 0
    without_gradient: set[str] = field(default_factory=set)

    def adamw(self) -> torch.optim.AdamW:
        """An optimizer of the model's trainable parameters, watched."""
        return self.on(torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=LEARNING_RATE))

    def on(self, optimizer: Optimizer) -> Optimizer:
        """The same optimizer, watched."""
        optimizer.register_step_post_hook(self._look)  # a closure makes the gradients inside of the step
        return optimizer

    def _look(self, *_: object) -> None:
        self.steps += 1
        named = self.model.named_parameters()
        self.without_gradient |= {name for name, p in named if p.requires_grad and p.grad is None}


@dataclass(frozen=True)
class Outcome:
    subject: str
    recipe: str
    report: ConversionReport
    plain: float  # first loss of the unconverted model
    first: float  # of the converted one
    cosine: float  # of their gradients
    losses: tuple[float, ...]
    compiled: str
    seconds: float

    @property
    def converted(self) -> str:
        done = self.report.shares().get("converted")
        return "0" if done is None else f"{done.layers} ({done.share:.0%})"

    @property
    def left(self) -> str:
        return ", ".join(f"{n.layers} {reason}" for reason, n in self.report.shares().items() if reason != "converted")


def trial(subject: Subject, recipe: str, steps: int, folder: Path, *, compiled: bool) -> Outcome:
    """Convert, compare with the unconverted model, train, save, load, revert, and compile if asked."""
    started = time.perf_counter()
    plain_loss, plain_gradient = measured(subject, subject.build(0))
    torch.manual_seed(1)  # nvfp4 draws a seed for its rounding
    model, report = subject.converted(0, recipe)
    check_report(subject, model, recipe, report)
    check_names(model, subject.build(0))
    loss, gradient = measured(subject, model)
    cosine = cosine_of(gradient, plain_gradient)
    check_first(recipe, plain_loss, loss, cosine)
    changed = "converted" in report.shares()
    expect(changed or (loss, cosine) == (plain_loss, 1.0), "nothing was converted, and the loss is another")
    expect(not changed or recipe == "bf16" or cosine < 1 - 1e-5, f"the gradient is as without {recipe}")

    model, _ = subject.converted(0, recipe)
    losses = check_training(subject, model, recipe, steps, remembers=changed and recipe in REMEMBERS)
    check_checkpoint(subject, model, recipe, steps, folder)
    check_evaluation(subject, model)
    check_revert(subject, model, folder, steps)
    subject.compare(recipe)
    said = check_compile(subject, recipe) if compiled else ""
    return Outcome(
        subject.name, recipe, report, plain_loss, loss, cosine, tuple(losses), said, time.perf_counter() - started
    )


def cosine_of(one: Tensor, other: Tensor) -> float:
    return 1.0 if torch.equal(one, other) else torch.nn.functional.cosine_similarity(one, other, dim=0).item()


def measured(subject: Subject, model: nn.Module, step: int = 0) -> tuple[float, Tensor]:
    """A loss, and its gradient in all trainable parameters as one vector."""
    trained = [p for p in model.parameters() if p.requires_grad]
    loss = subject.loss(model, step)
    gradients = torch.autograd.grad(loss, trained)
    return loss.item(), torch.cat([g.detach().double().flatten() for g in gradients])


def check_report(subject: Subject, model: nn.Module, recipe: str, report: ConversionReport) -> None:
    """No matrix is passed over, and the linear layers left alone are those that the subject says."""
    plain = subject.build(0)
    matrices = [name for name, p in plain.named_parameters() if p.dim() > 1]
    rows = {id(model.get_submodule(subject.path_now(row.path))) for row in report}
    unsaid = [name for name in matrices if id(model.get_submodule(name.rpartition(".")[0])) not in rows]
    unsaid = [name for name in unsaid if not matches(name, subject.unreported)]
    expect(not unsaid, f"the report does not mention {unsaid}")
    linears = {path for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    left = {path for path in linears if not isinstance(model.get_submodule(path), octavo.Linear)}
    expected = {path for path in linears if matches(path, subject.left)}
    expect(left == expected, f"left alone: {sorted(left)}, and expected was {sorted(expected)}")
    others = {row.recipe for row in report} - {"", recipe}
    expect(not others, f"layers have {others}, and {recipe} was asked for")
    expect(report.summary() in str(report), f"the report does not end with its summary: {report}")


def check_names(model: nn.Module, plain: nn.Module) -> None:
    mine, theirs = ({k: (v.shape, v.dtype) for k, v in m.state_dict().items()} for m in (model, plain))
    expect(mine == theirs, f"the state dict of the converted model differs in {sorted(mine.keys() ^ theirs.keys())}")


def check_first(recipe: str, plain: float, loss: float, cosine: float) -> None:
    relative, least = BOUNDS[recipe]
    expect(math.isfinite(loss), f"the first loss is {loss}")
    expect(
        abs(loss - plain) <= relative * plain, f"the first loss is {loss}, unconverted {plain}, bound {relative:.0%}"
    )
    expect(cosine >= least, f"the gradient's cosine with the unconverted one's is {cosine:.3f}, bound {least}")


def check_training(subject: Subject, model: nn.Module, recipe: str, steps: int, *, remembers: bool) -> list[float]:
    watch = Watch(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    state = {name: tensor.clone() for name, tensor in octavo.state_dict(model).items()}
    losses = subject.train(model, steps, watch)
    expect(watch.steps == steps, f"the optimizer stepped {watch.steps} times of {steps}")
    expect(not watch.without_gradient, f"no gradient came to {sorted(watch.without_gradient)}")
    expect(all(map(math.isfinite, losses)), f"losses {losses}")
    expect(len(set(losses)) == len(losses), f"losses do not move: {losses}")
    for name, parameter in model.named_parameters():
        moved = not torch.equal(parameter, before[name])
        expect(moved == parameter.requires_grad, f"{name} {'changed' if moved else 'did not change'} in training")
    after = octavo.state_dict(model)
    expect(bool(after) == remembers, f"{len(after)} tensors of state in {recipe}")
    still = [name for name, tensor in after.items() if moves(subject, name) and torch.equal(tensor, state[name])]
    expect(not still, f"after {steps} steps {len(still)} of {len(after)} did not move, such as {still[:2]}")
    return losses


def moves(subject: Subject, name: str) -> bool:
    """Whether a tensor of the state must be another after a step: windows, multipliers, counters, but not what was
    observed since the step, and not layers that no gradient passes."""
    return not name.endswith((".current", ".nonfinite")) and not matches(name, subject.frozen)


def matches(name: str, globs: tuple[str, ...]) -> bool:
    return any(fnmatch(name, glob) for glob in globs)


def check_checkpoint(subject: Subject, model: nn.Module, recipe: str, steps: int, folder: Path) -> None:
    """Loaded, converted and given its state, the model has the loss and the gradients that it would have had."""
    subject.save(model, folder)
    loaded = subject.load(folder, recipe)
    if not subject.saves_state:
        torch.save(octavo.state_dict(model), folder / "octavo.pt")
        octavo.load_state_dict(loaded, torch.load(folder / "octavo.pt", weights_only=True))
    loss, gradient = measured(subject, model, steps)
    again, same = measured(subject, loaded, steps)
    expect(again == loss, f"the loss after loading is {again}, it was {loss}")
    expect(torch.equal(same, gradient), "the gradients after loading are others")


def check_evaluation(subject: Subject, model: nn.Module) -> None:
    """In eval mode, a model computes the same with gradients and without: no shortcut goes around its layers."""
    model.eval()
    with torch.no_grad():
        without = subject.loss(model, 0).item()
    loss = subject.loss(model, 0).item()
    model.train()
    expect(math.isclose(without, loss, rel_tol=1e-5), f"in eval mode the loss is {loss}, under no_grad {without}")


def check_revert(subject: Subject, model: nn.Module, folder: Path, steps: int) -> None:
    """Reverted, the model is the unconverted one with the weights that were trained."""
    octavo.revert(model)
    expect(not any(isinstance(m, octavo.Linear) for m in model.modules()), "revert left layers converted")
    loss, gradient = measured(subject, model, steps)
    plain, expected = measured(subject, subject.load(folder, None), steps)
    expect(loss == plain, f"reverted, the loss is {loss}; loaded into an unconverted model, {plain}")
    expect(torch.equal(gradient, expected), "reverted, the gradients are not the unconverted model's")


def check_compile(subject: Subject, recipe: str) -> str:
    """Compiled whole where the unconverted model can be, the loss is that of eager mode."""
    whole = subject.compiles_whole or graph_is_whole(subject, subject.build(0))
    torch.manual_seed(1)
    eager, _ = subject.converted(0, recipe)
    torch.manual_seed(1)
    model, _ = subject.converted(0, recipe)
    torch.compiler.reset()
    model.compile(backend="aot_eager", fullgraph=whole)
    loss, gradient = measured(subject, model)
    wanted, expected = measured(subject, eager)
    expect(abs(loss - wanted) <= 1e-3 * wanted, f"compiled, the loss is {loss}; in eager mode {wanted}")
    cosine = cosine_of(gradient, expected)
    expect(cosine > 0.999, f"compiled, the gradient's cosine with that of eager mode is {cosine}")
    return "fullgraph" if whole else "with breaks, as unconverted"


def graph_is_whole(subject: Subject, plain: nn.Module) -> bool:
    """Whether torch.compile takes the unconverted model in one piece."""
    torch.compiler.reset()
    plain.compile(backend="aot_eager", fullgraph=True)
    try:
        subject.loss(plain, 0)
    except torch._dynamo.exc.TorchDynamoException:
        return False
    return True


def tokens(step: int, *, vocabulary: int, rows: int = 4, length: int = 32) -> Tensor:
    """Random tokens, the same ones for the same step."""
    return torch.randint(vocabulary, (rows, length), generator=torch.Generator().manual_seed(100 + step))


def plain_loop(subject: Subject, model: nn.Module, steps: int, optimizer: torch.optim.Optimizer) -> list[float]:
    """The loop that everybody writes."""
    if any(isinstance(module, octavo.Linear) for module in model.modules()):  # attach refuses a model without any
        octavo.attach(model, optimizer)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = subject.loss(model, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
