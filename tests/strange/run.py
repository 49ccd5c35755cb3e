"""A layer in training, step by step, and the record of all that it computes and holds."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import octavo
from octavo.weights.quantized_weight import QuantizedWeight
from tests.strange.layers import Draw, Layer, Place
from tests.support.state_tensors import named_tensors

Record = dict[str, Any]  # tensors, numbers and texts by name
EXTRA = 1000  # the seed of inputs of a call that is no step


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
        self.called: Callable[..., Any] | None = None  # what calls the module, if that is not the caller of a step
        self.notes: dict[str, Any] = {}  # what an environment keeps from one event to the next

    def call(self, seed: int) -> tuple[tuple[Any, ...], Any]:
        """Returns inputs that follow from a seed, and the module's outputs for them."""
        seed_torch(seed, self.place["device"])  # of dropout
        inputs = self.layer.inputs(Draw(self.place, seed))
        called = self.module if self.called is None else self.called
        if self.backend is not None:
            called = torch.compile(called, backend=self.backend, fullgraph=True)
        return inputs, called(*inputs)

    def inputs(self) -> tuple[Any, ...]:
        """Returns inputs of no step."""
        return self.layer.inputs(Draw(self.place, EXTRA))

    def extra_call(self) -> None:
        """Calls the module on inputs of no step."""
        self.call(EXTRA)

    def backward(self, outputs: Any) -> None:
        """Runs backward from gradients that follow from the number of the step."""
        wanting = [y for y in tensors_in(outputs) if y.requires_grad]
        if wanting:
            draw = Draw(self.place, EXTRA + self.steps)
            torch.autograd.backward(wanting, [(draw.normal(*y.shape) * 0.01).to(y) for y in wanting])

    def step(self) -> None:
        """Runs forward and backward, ends the step, records outputs and gradients, and updates the weights."""
        inputs, outputs = self.call(self.steps)
        self.backward(outputs)
        for part in self.module.modules():
            if getattr(part, "delay_wgrad_compute", False):
                part.backward_dw()
        octavo.step(self.module)
        named = dict(self.named_parameters())
        new: Record = {f"output {i}": y for i, y in enumerate(tensors_in(outputs))}
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

    def clear_gradients(self) -> None:
        """Drops the gradients of a step that failed."""
        for name, p in self.named_parameters():
            p.grad = None
            if hasattr(p, "main_grad"):
                p.main_grad.copy_(self.record[f"step {self.steps - 1}, {name} main_grad"])
        for part in self.module.modules():
            if getattr(part, "delay_wgrad_compute", False):
                part.discard_dw()

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yields parameters by the names that they have without a parametrization."""
        for name, p in self.module.named_parameters():
            yield name.replace("parametrizations.", "").removesuffix(".original"), p

    def tensors(self) -> list[tuple[str, Tensor]]:
        return [*self.named_parameters(), *named_tensors(self.module)]

    def finish(self) -> Record:
        """Returns the record with all that the layer holds: its weights, the state of its recipe, and versions."""
        tensors = self.tensors()
        held = {f"held {name}": kept(t) for name, t in tensors}
        held |= {f"version of {name}": t._version for name, t in tensors}
        held |= {f"state dict {name}": kept(t) for name, t in self.module.state_dict().items()}
        held |= {f"recipe state {name}": kept(t) for name, t in octavo.state_dict(self.module).items()}
        return self.record | held


def tensors_in(outputs: Any) -> Iterator[Tensor]:
    for y in outputs if isinstance(outputs, tuple) else (outputs,):
        yield from y.tensors() if isinstance(y, octavo.QTensor) else (y,)


def kept(value: Any) -> Any:
    if isinstance(value, QuantizedWeight):
        value = value.dequantize()
    if isinstance(value, DTensor):
        value = value.to_local()  # of one rank: it is all there is
    return value.detach().clone() if isinstance(value, Tensor) else value
