"""A long training run keeps what it has: memory, tensors, compiled graphs and file descriptors do not grow with the
number of steps."""

import gc
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import octavo
from octavo.recipes import SHIPPED

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
K, ROWS, SIZES = 64, 96, ((32, 0, 64), (16, 48, 32), (96, 0, 0))  # sizes of groups, by turns
WARM = 15  # steps after which nothing may be new: every kind of call has come more than twice
MEMORY = 8 * 2**20  # bytes by which the memory of a process may grow: what is freed does not all go back


class Model(nn.Module):
    def __init__(self, recipe: str, device: str) -> None:
        super().__init__()
        place = {"device": device, "dtype": torch.bfloat16}
        self.first = octavo.Linear(K, K, recipe=recipe, **place)
        self.mlp = octavo.LayerNormMLP(K, 2 * K, recipe=recipe, **place)
        self.experts = octavo.GroupedLinear(len(SIZES[0]), K, K, recipe=recipe, **place)

    def forward(self, x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        return self.experts(self.mlp(self.first(x)), sizes)


@dataclass(frozen=True)
class Held:
    """What a process holds."""

    memory: int  # bytes of the process
    on_device: int  # bytes that torch has allocated on the GPU
    tensors: int  # that Python's collector knows
    graphs: int  # that torch.compile has made
    files: int

    @classmethod
    def now(cls) -> "Held":
        gc.collect()
        return cls(
            memory=int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
            on_device=torch.cuda.memory_allocated() if torch.cuda.is_available() else 0,
            tensors=sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects()),
            graphs=counters["stats"]["unique_graphs"],
            files=len(os.listdir("/proc/self/fd")),
        )


def trained(recipe: str, device: str, backend: str | None, steps: int) -> tuple[Held, Held]:
    """Trains a model. Returns what the process holds after some steps, and after all."""
    model = Model(recipe, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    octavo.attach(model, optimizer)
    called = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)
    generator = torch.Generator("cpu").manual_seed(0)

    def train(step: int) -> None:
        x = torch.randn(ROWS, K, generator=generator, device="cpu", dtype=torch.float32).to(device, torch.bfloat16)
        sizes = torch.tensor(SIZES[step % len(SIZES)], device=device, dtype=torch.int64)
        loss = called(x.requires_grad_(), sizes).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert loss.isfinite()

    for step in range(WARM):
        train(step)
    before = Held.now()
    for step in range(WARM, WARM + steps):
        train(step)
    return before, Held.now()


def check(recipe: str, device: str, backend: str | None, steps: int) -> None:
    before, after = trained(recipe, device, backend, steps)
    print(f"{recipe} {backend} {steps} steps: {before} -> {after}")
    assert after.memory - before.memory <= MEMORY
    for what in ("on_device", "tensors", "graphs", "files"):
        assert getattr(after, what) <= getattr(before, what), what


def cases():
    """Yields long runs, and a sample of short ones: all in eager mode, and two that compile."""
    for recipe in SHIPPED:
        for backend in (None, "aot_eager"):
            for steps in (60, 2000):
                long = steps == 2000 or (backend is not None and recipe not in ("fp8-delayed", "fp8-block"))
                marks = [pytest.mark.slow] * long
                yield pytest.param(recipe, backend, steps, marks=marks, id=f"{recipe}-{backend or 'eager'}-{steps}")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the memory of the process from /proc")
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("recipe", "backend", "steps"), list(cases()))
def test_a_long_run_holds_no_more_than_a_short_one(recipe, backend, steps, device):
    check(recipe, device, backend, steps)
