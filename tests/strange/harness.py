"""The harness: it runs a layer for a few steps in an environment, and compares all that the layer computes and holds,
bit for bit, with a run of the same layer that never saw the environment."""

import fnmatch
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import octavo
from octavo.lower.replay import calls
from octavo.weights.held import HeldWeight
from tests.state_tensors import named_tensors
from tests.strange.environments import Environment
from tests.strange.layers import Draw, Layer, Place

Record = dict[str, Any]  # tensors, numbers and texts by name
PLAIN = Environment("plain")
EXTRA = 1000  # the seed of inputs of a call that is no step
# the end of a step reads and clears this count if it has arrived from the device
TIMED = ("version of *dropped",)
# torch.compile traces a layer again in another state of torch, which writes these buffers once more
RETRACED = ("version of *scaling_*",)


def seed_torch(seed: int, device: str) -> None:
    """As torch.manual_seed, which takes a millisecond where CUDA is not initialized."""
    torch.default_generator.manual_seed(seed)
    if device == "cuda":
        torch.cuda.manual_seed_all(seed)


class Run:
    """A layer in training. `record` collects what its steps compute."""

    def __init__(self, layer: Layer, recipe: str, device: str = "cpu", backend: str | None = None) -> None:
        self.layer, self.place = layer, Place(device=device, dtype=torch.bfloat16)
        seed_torch(0, device)  # of stochastic rounding
        self.module = layer.build(recipe, self.place)
        generator = Draw(self.place, seed=1)
        for parameter in self.module.parameters():
            parameter.data.copy_(generator.normal(*parameter.shape) * 0.1)
        layer.prepare(self.module)
        self.backend, self.steps, self.record = backend, 0, Record()

    def call(self, seed: int) -> tuple[tuple[Any, ...], Any]:
        """Returns inputs that follow from a seed, and the module's outputs for them."""
        seed_torch(seed, self.place["device"])  # of dropout
        inputs = self.layer.inputs(Draw(self.place, seed))
        module = self.module
        if self.backend is not None:
            module = torch.compile(module, backend=self.backend, fullgraph=True)
        return inputs, module(*inputs)

    def inputs(self) -> tuple[Any, ...]:
        """Returns inputs of no step."""
        return self.layer.inputs(Draw(self.place, EXTRA))

    def extra_call(self) -> None:
        """Calls the module on inputs of no step."""
        self.call(EXTRA)

    def step(self) -> None:
        """Runs forward and backward, ends the step, records outputs and gradients, and updates the weights."""
        inputs, outputs = self.call(self.steps)
        found = list(tensors_in(outputs))
        wanting = [y for y in found if y.requires_grad]
        if wanting:
            draw = Draw(self.place, EXTRA + self.steps)
            torch.autograd.backward(wanting, [(draw.normal(*y.shape) * 0.01).to(y) for y in wanting])
        for part in self.module.modules():
            if getattr(part, "delay_wgrad_compute", False):
                part.backward_dw()
        octavo.step(self.module)
        named = dict(self.module.named_parameters())
        new: Record = {f"output {i}": y for i, y in enumerate(found)}
        new |= {f"input {i} gradient": x.grad for i, x in enumerate(inputs) if isinstance(x, Tensor)}
        new |= {f"{name} gradient": p.grad for name, p in named.items()}
        new |= {f"{name} main_grad": p.main_grad for name, p in named.items() if hasattr(p, "main_grad")}
        if isinstance(self.module, octavo.MoE):
            new["loss"] = self.module.aux_loss
        self.record |= {f"step {self.steps}, {name}": kept(value) for name, value in new.items()}
        with torch.no_grad():
            for p in named.values():
                if p.grad is not None:
                    p.add_(p.grad, alpha=-0.5)
                    p.grad = None
        self.steps += 1

    def finish(self) -> Record:
        """Returns the record with all that the layer holds: its weights, the state of its recipe, and versions."""
        tensors = [*self.module.named_parameters(), *named_tensors(self.module)]
        held = {f"held {name}": kept(t) for name, t in tensors}
        held |= {f"version of {name}": t._version for name, t in tensors}
        held |= {f"state dict {name}": kept(t) for name, t in self.module.state_dict().items()}
        held |= {f"recipe state {name}": kept(t) for name, t in octavo.state_dict(self.module).items()}
        return self.record | held


def tensors_in(outputs: Any) -> Iterator[Tensor]:
    for y in outputs if isinstance(outputs, tuple) else (outputs,):
        yield from y.tensors() if isinstance(y, octavo.QTensor) else (y,)


def kept(value: Any) -> Any:
    if isinstance(value, HeldWeight):
        value = value.dequantize()
    return value.detach().clone() if isinstance(value, Tensor) else value


def record_of(
    layer: Layer, recipe: str, environment: Environment, device: str = "cpu", backend: str | None = None
) -> Record:
    """Runs a new layer for three steps: one before the environment, one in it, and one after it."""
    calls.forget()  # nothing is reused that was recorded in another environment
    with environment.around():
        run = Run(layer, recipe, device, backend)
        run.step()
        with environment.during():
            run.step()
        environment.between(run)
        run.step()
        return run.finish()


@functools.cache
def plain_record(layer: Layer, recipe: str, device: str = "cpu", backend: str | None = None) -> Record:
    """Returns the record of a layer that never saw an environment."""
    return record_of(layer, recipe, PLAIN, device, backend)


def differences(found: Record, want: Record, may_differ: tuple[str, ...] = ()) -> list[str]:
    """Lists the names of values that differ between two records: in a bit, in a dtype, a device or a layout."""
    names = sorted(found.keys() ^ want.keys())
    names += [name for name in want if name in found and not same(found[name], want[name])]
    return [name for name in names if not any(fnmatch.fnmatch(name, pattern) for pattern in may_differ)]


def same(a: Any, b: Any) -> bool:
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return type(a) is type(b) and a == b
    alike = (a.dtype, a.device, a.shape, a.stride()) == (b.dtype, b.device, b.shape, b.stride())
    return alike and torch.equal(bits(a), bits(b))


def bits(t: Tensor) -> Tensor:
    return t.contiguous().view(-1).view(torch.uint8)


def traces(
    layer: Layer, recipe: str, environment: Environment, device: str = "cpu", backend: str | None = None
) -> list[str]:
    """Lists what a layer computes or holds otherwise in an environment than without one."""
    want = plain_record(layer, recipe, device, backend)
    found = record_of(layer, recipe, environment, device, backend)
    return differences(found, want, environment.may_differ + TIMED + (RETRACED if backend else ()))
