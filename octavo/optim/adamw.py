"""`octavo.optim.AdamW`: AdamW whose step ends in the codes of quantized weights."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from octavo._torch.tensors import is_sharded
from octavo.errors import UnsupportedConfig, check_choice
from octavo.kernels.adamw import Moments, adamw, reference
from octavo.weights.quantized_weight import QuantizedWeight

MASTERS = ("float32", "bfloat16")
STATES = ("float32", "bfloat16", "8bit")
_OF_MOMENTS = ("exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale")  # in the order of `Moments`


class AdamW(Optimizer):
    """AdamW that trains weights which are codes, and any other parameter.

    The optimizer keeps a master copy of each parameter that is not float32 itself, updates it in float32, and writes
    the result to the parameter: as codes and scales to a quantized weight, rounded to its dtype to any other. A step
    computes what `torch.optim.AdamW` computes for a float32 parameter, on a CPU to the bit.

    If the program writes to a parameter between two steps (it loads a checkpoint or merges an adapter, say), the next
    step takes the master copy from the parameter again.

    Args:
        params: parameters, or groups of them, as any torch optimizer takes them.
        lr: the learning rate: a number, or a tensor of one element, which a CUDA graph reads at each replay.
        betas: the decay of the running averages of the gradient and of its square.
        eps: added to the denominator.
        weight_decay: the factor of decoupled weight decay.
        maximize: ascend instead of descend.
        capturable: count steps on the device, so that a CUDA graph can capture `step()`.
        master: the dtype of master copies: "float32", or "bfloat16", which is rounded stochastically.
        states: the format of the running averages: "float32", "bfloat16", or "8bit" (codes with a scale for each 128).
        seed: the seed of stochastic rounding.

    Raises:
        UnsupportedConfig: a number is out of its range, or `master` or `states` is none of these.

    Example:
        >>> model = nn.Sequential(octavo.Linear(64, 32, recipe="fp8-block"))
        >>> octavo.quantize_weights(model, trainable=True)
        >>> optimizer = octavo.optim.AdamW(model.parameters(), lr=1e-3)
        >>> model(torch.ones(8, 64)).square().mean().backward()
        >>> optimizer.step()
        >>> type(model[0].weight).__name__, optimizer.state[model[0].weight]["master"].dtype
        ('QuantizedWeight', torch.float32)
    """

    writes_codes = True  # and keeps the values that they are made of (`octavo.weights.optimizer_hooks`)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        capturable: bool = False,
        master: str = "float32",
        states: str = "float32",
        seed: int = 0,
    ) -> None:
        check_choice(master, MASTERS, what="master")
        check_choice(states, STATES, what="states")
        ranges = {
            "lr": isinstance(lr, Tensor) or lr >= 0,
            "betas": all(0 <= beta < 1 for beta in betas),
            "eps": eps >= 0,
            "weight_decay": weight_decay >= 0,
        }
        given = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        for name, is_right in ranges.items():
            if not is_right:
                rule = (
                    "numbers from 0 up to, but not including, 1" if name == "betas" else "a number that is not negative"
                )
                raise UnsupportedConfig(f"{name} takes {rule}, got {given[name]!r}.")
        defaults = {
            **given,
            "maximize": maximize,
            "capturable": capturable,
            "master": master,
            "states": states,
            "seed": seed,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update every parameter that has a gradient, and return what `closure` returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            shared: dict[Any, Tensor] = {}  # the settings of parameters that have taken as many steps
            for number, parameter in enumerate(group["params"]):
                if parameter.grad is not None:
                    self._update(group, parameter, number, shared)
        return loss

    def _update(self, group: dict[str, Any], parameter: Tensor, number: int, shared: dict[Any, Tensor]) -> None:
        grad = parameter.grad
        assert grad is not None
        if grad.is_sparse:
            raise UnsupportedConfig("AdamW takes dense gradients, got a sparse one. Use torch.optim.SparseAdam for it.")
        if is_sharded(parameter):
            raise UnsupportedConfig(
                f"octavo.optim.AdamW updates whole parameters, and one of {tuple(parameter.shape)} is a DTensor. Use "
                "torch.optim.AdamW for parameters that are sharded."
            )
        state = self._state_of(group, parameter)
        state["step"] += 1
        values = state.get("master", parameter)
        settings = _settings(group, state["step"], values.device, shared)
        moments = Moments(*[state.get(name) for name in _OF_MOMENTS])  # type: ignore[arg-type]
        seed = None
        if values.dtype != torch.float32:
            base = torch.full((), (group["seed"] << 32) + number, dtype=torch.int64, device=values.device)
            seed = torch.stack([base, state["step"].to(values.device, torch.int64)])
        grad = grad.neg() if group["maximize"] else grad
        is_plain = not isinstance(parameter, QuantizedWeight) and values is not parameter
        copy = parameter.detach() if is_plain and parameter.is_contiguous() else None
        amax = adamw(values, grad, moments, settings, seed=seed, copy=copy)
        if isinstance(parameter, QuantizedWeight):
            parameter.write(values, amax)
        elif copy is None and values is not parameter:
            parameter.copy_(values)
        else:
            torch.autograd.graph.increment_version(parameter)  # kernels do not
        state["version"] = _version(parameter)

    def _state_of(self, group: dict[str, Any], parameter: Tensor) -> dict[str, Any]:
        """Return the state of a parameter, made at its first step; its master copy is taken again from a parameter
        that the program wrote to."""
        state: dict[str, Any] = self.state[parameter]
        if not state:
            device = parameter.device if group["capturable"] else "cpu"
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
        if "exp_avg" not in state:
            values = _values(parameter)
            moments = Moments.zeros(values, group["states"])
            state |= {name: t for name, t in zip(_OF_MOMENTS, moments, strict=True) if t is not None}
        if isinstance(parameter, QuantizedWeight) or parameter.dtype != torch.float32 or not parameter.is_contiguous():
            dtype = getattr(torch, group["master"])
            expected = state.get("version")
            if "master" not in state or (expected is not None and expected != _version(parameter)):
                initial = parameter.__dict__.pop("high_precision_init", None)  # of octavo.quantized_init
                values = _values(parameter) if initial is None else initial.to(parameter.device)
                state["master"] = values.to(dtype, memory_format=torch.contiguous_format, copy=True)
        return state

    # -- state dicts ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state. Its entries are those of `torch.optim.AdamW`, and `master` beside them."""
        found = super().state_dict()
        # versions count writes of this process, and mean nothing in another one
        found["state"] = {
            key: {name: value for name, value in state.items() if name != "version"}
            for key, state in found["state"].items()
        }
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of this optimizer, or of a `torch.optim.AdamW` over the same parameters."""
        formats = [{name: group[name] for name in ("master", "states")} for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, own, saved in zip(self.param_groups, formats, state_dict["param_groups"], strict=True):
            for name, value in self.defaults.items():
                group.setdefault(name, value)
            group |= own  # how the state is kept is this optimizer's choice, not that of the file
            for parameter, key in zip(group["params"], saved["params"], strict=True):
                if key in state_dict["state"]:
                    self.state[parameter] = _fitted(state_dict["state"][key], group, parameter)


def _fitted(saved: dict[str, Any], group: dict[str, Any], parameter: Tensor) -> dict[str, Any]:
    """Return a saved state in this group's formats, on the parameter's device. Torch's own loader would cast all of it
    to the parameter's dtype."""
    state = {name: value.to(parameter.device) if isinstance(value, Tensor) else value for name, value in saved.items()}
    counter = parameter.device if group["capturable"] else torch.device("cpu")
    state["step"] = torch.as_tensor(saved["step"], dtype=torch.float32, device=counter).clone()
    if "master" in state:
        state["master"] = state["master"].to(getattr(torch, group["master"]), copy=True).contiguous()
    if "exp_avg" in state:
        old = Moments(*[state.pop(name, None) for name in _OF_MOMENTS])  # type: ignore[arg-type]
        new = Moments.zeros(old.average, group["states"])
        if old.average_scale is not None and new.average_scale is not None:
            for target, source in zip(new, old, strict=True):
                target.copy_(source)  # type: ignore[union-attr,arg-type]
        else:
            reference.write(new, *reference.read(old))
        state |= {name: t for name, t in zip(_OF_MOMENTS, new, strict=True) if t is not None}
    return state


def _values(parameter: Tensor) -> Tensor:
    return parameter.values() if isinstance(parameter, QuantizedWeight) else parameter.detach()


def _version(parameter: Tensor) -> int:
    """Count the writes to a parameter; those to a quantized weight are counted by its codes."""
    return parameter.row_codes._version if isinstance(parameter, QuantizedWeight) else parameter._version


def _number(value: float | Tensor, device: torch.device) -> Tensor:
    """Return a number as a tensor of no dims: a capture allows fills, and no copies from the host."""
    if isinstance(value, Tensor):
        return value.to(device, torch.float32).reshape(())
    return torch.full((), value, dtype=torch.float32, device=device)


def _settings(group: dict[str, Any], step: Tensor, device: torch.device, shared: dict[Any, Tensor]) -> Tensor:
    """Return the numbers of a step, in the order of `octavo.kernels.adamw.SETTINGS`, on the device."""
    on_device = group["capturable"] or (isinstance(group["lr"], Tensor) and group["lr"].device.type != "cpu")
    key = device, id(step) if on_device else float(step)
    if key in shared:
        return shared[key]
    beta1, beta2 = group["betas"]
    lr, decay, eps = group["lr"], group["weight_decay"], group["eps"]
    if on_device:
        count = step.to(device)
        numbers = [
            1 - lr * decay, lr / (1 - beta1**count), (1 - beta2**count).sqrt(), 1 - beta1, beta2, 1 - beta2, eps
        ]  # fmt: skip
        found = torch.stack([_number(n, device) for n in numbers])
    else:
        rate, steps = float(lr), float(step)
        root = math.sqrt(1 - beta2**steps)
        numbers = [1 - rate * decay, rate / (1 - beta1**steps), root, 1 - beta1, beta2, 1 - beta2, eps]
        found = torch.tensor(numbers, dtype=torch.float32, device="cpu").to(device, non_blocking=True)
    shared[key] = found
    return found
