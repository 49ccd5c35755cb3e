"""Log an inspection to TensorBoard and W&B as docs/inspect.md does, and read it back:

    python -m tests.integration loggers

It needs `tensorboard` and `wandb`, and the network for neither: W&B runs offline, and its run is read from its summary.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version

import torch
from torch import nn

import octavo

EVERY, STEPS = 10, 25
MEASURED = [1, 11, 21]


def trained(log: Callable[[int, dict[str, float]], object]) -> list[str]:
    """Train a small model while it is inspected, and return the names that every measured step has."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    octavo.convert(model, "fp8-delayed", high_precision=())
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    octavo.attach(model, optimizer)
    seen: list[tuple[int, list[str]]] = []

    def logged(step: int, numbers: dict[str, float]) -> None:
        seen.append((step, sorted(numbers)))
        log(step, numbers)

    with octavo.inspect(model, every=EVERY, log=logged):
        for _ in range(STEPS):
            model(torch.randn(32, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [step for step, _ in seen] == MEASURED and all(names == seen[0][1] for _, names in seen)
    return seen[0][1]


def tensorboard(folder: str) -> str:
    """Write scalars by the lines of the page, and return what the event file has."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(folder)
    names = trained(lambda step, numbers: [writer.add_scalar(name, value, step) for name, value in numbers.items()])
    writer.close()
    events = EventAccumulator(folder)
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == names
    assert all([event.step for event in events.Scalars(name)] == MEASURED for name in names)
    return f"tensorboard {version('tensorboard')}: {len(names)} scalars at steps {MEASURED}"


def weights_and_biases(folder: str) -> str:
    """Log by the lines of the page, offline, and return what the run has."""
    import wandb

    run = wandb.init(project="octavo", mode="offline", dir=folder, settings=wandb.Settings(silent=True))
    names = trained(lambda step, numbers: run.log(numbers, step=step))
    found = {name for name in dict(run.summary) if not name.startswith("_")}
    last = run.step
    run.finish()
    assert found == set(names) and last == MEASURED[-1]
    return f"wandb {version('wandb')}: {len(names)} numbers, the last at step {last}"


def main(argv: list[str] | None = None) -> int:
    argparse.ArgumentParser(prog="python -m tests.integration loggers", description=__doc__).parse_args(argv)
    for subject in (tensorboard, weights_and_biases):
        with tempfile.TemporaryDirectory() as folder:
            print(subject(folder), flush=True)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("WANDB_MODE", "offline")
    sys.exit(main())
