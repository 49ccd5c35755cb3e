"""`octavo.optim.AdamW`: AdamW whose step ends in the codes of quantized weights."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from octavo._torch.cuda import is_capturing
from octavo._torch.tensors import is_sharded
from octavo._torch.tracing import Untraced
from octavo.errors import UnsupportedConfig, check_choice
from octavo.kernels.adamw import Moments, adamw, reference
from octavo.optim import sharded
from octavo.weights.master_values import drop_master
from octavo.weights.quantized_weight import QuantizedWeight
from octavo.weights.stochastic_write import check_stochastic, write_stochastically

MASTERS = ("float32", "bfloat16", "none")
STATES = ("float32", "bfloat16", "8bit")
_OF_MOMENTS = ("exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale")  # in the order of `Moments`


class Scaler(NamedTuple):
    """The requests of a GradScaler to a step: a factor of gradients, and whether to leave everything as it is."""

    unscale: float | Tensor
    skip: float | Tensor


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
        master: the dtype of master copies: "float32", or "bfloat16", which is rounded stochastically. "none" keeps no
            copy and loses precision: codes of E4M3, and parameters in bfloat16, are updated in float32 and rounded
            stochastically, so that small updates add up on average. Other parameters keep a float32 copy.
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

    _step_supports_amp_scaling = True  # a GradScaler then leaves `grad_scale` and `found_inf`, and does not wait
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
        numbers = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        right = isinstance(lr, Tensor) or lr >= 0, all(0 <= beta < 1 for beta in betas), eps >= 0, weight_decay >= 0
        for (name, value), is_right in zip(numbers.items(), right, strict=True):
            if not is_right:
                rule = (
                    "numbers from 0 up to, but not including, 1" if name == "betas" else "a number that is not negative"
                )
                raise UnsupportedConfig(f"{name} takes {rule}, got {value!r}.")
        ways = {"maximize": maximize, "capturable": capturable, "master": master, "states": states, "seed": seed}
        super().__init__(params, numbers | ways)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update every parameter that has a gradient, and return what `closure` returned."""
        return outside.call(self, closure) if torch.compiler.is_compiling() else self._step(closure)

    @torch.no_grad()
    def _step(self, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if is_capturing() and not all(group["capturable"] for group in self.param_groups):
            raise UnsupportedConfig(
                "A CUDA graph captures AdamW(capturable=False), and its replays would repeat one step with the step "
                "count of now. Pass capturable=True, which counts steps on the device."
            )
        scaler = self._scaler()
        if scaler is None:
            return loss
        self._drop_stale_masters()
        try:
            for group in self.param_groups:
                shared: dict[Any, Tensor] = {}  # the settings of parameters that have taken as many steps
                for number, parameter in enumerate(group["params"]):
                    if parameter.grad is not None:
                        self._update(group, parameter, number, shared, scaler)
        finally:  # of all parameters: those of groups count the writes to each other
            for parameter, state in self.state.items():
                state["version"] = _version(parameter)
        return loss

    def _drop_stale_masters(self) -> None:
        """Forget master copies of parameters that the program has written to since the last step."""
        for parameter, state in self.state.items():
            if state.get("version", _version(parameter)) != _version(parameter):
                state.pop("master", None)

    def _scaler(self) -> "Scaler | None":
        """Return what a GradScaler has left for this step; None if the step is to be skipped. The host reads it, unless
        steps are counted on the device, where kernels read it."""
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if all(group["capturable"] for group in self.param_groups):
            return Scaler(1.0 if scale is None else 1 / scale, 0.0 if found_inf is None else found_inf)
        if found_inf is not None and found_inf.item():
            return None
        return Scaler(1.0 if scale is None else 1 / float(scale), 0.0)

    def _update(
        self, group: dict[str, Any], parameter: Tensor, number: int, shared: dict[Any, Tensor], scaler: "Scaler"
    ) -> None:  # fmt: skip
        grad = parameter.grad
        assert grad is not None
        if grad.is_sparse:
            raise UnsupportedConfig("AdamW takes dense gradients, got a sparse one. Use torch.optim.SparseAdam for it.")
        if is_sharded(parameter):
            grad = sharded.gradient(parameter, group["states"])
        state = self._state_of(group, parameter)
        skip = scaler.skip
        state["step"] += 1 - (skip.to(state["step"].device).reshape(()) if isinstance(skip, Tensor) else skip)
        draws = "master" not in state and isinstance(parameter, QuantizedWeight)  # codes are all there is
        target = sharded.part(parameter)
        values = target.base_values(torch.float32) if draws else sharded.part(state.get("master", parameter))  # type: ignore[attr-defined]
        settings = _settings(group, state["step"], values.device, shared, scaler)
        moments = Moments(*[sharded.part(state.get(name)) for name in _OF_MOMENTS])
        seed = None
        if draws or values.dtype != torch.float32:
            seed = _seed(group, number, state["step"], values.device, shared)
        grad = grad.neg() if group["maximize"] else grad
        is_plain = not isinstance(target, QuantizedWeight) and "master" in state
        copy = target.detach() if is_plain and target.is_contiguous() else None
        measured = target.amaxes() if isinstance(target, QuantizedWeight) else 0
        amaxes = adamw(values, grad, moments, settings, seed=None if draws else seed, copy=copy, amaxes=measured)
        if isinstance(parameter, QuantizedWeight):
            if draws and seed is not None:
                write_stochastically(parameter, values, amaxes, seed)
            else:
                parameter.write(values, amaxes)
            drop_master(parameter)
        else:
            if copy is None and is_plain:
                target.copy_(values)
            sharded.note_write(parameter)

    def _state_of(self, group: dict[str, Any], parameter: Tensor) -> dict[str, Any]:
        """Return the state of a parameter, made at its first step, with a master copy if it needs one."""
        state: dict[str, Any] = self.state[parameter]
        if not state:
            device = parameter.device if group["capturable"] else "cpu"
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
        if "exp_avg" not in state:
            moments = Moments.zeros(sharded.part(_values(parameter)), group["states"])
            state |= _named(moments, parameter)
        if _needs_master(group, parameter):
            dtype = torch.float32 if group["master"] == "none" else getattr(torch, group["master"])
            if "master" not in state:
                initial = parameter.__dict__.pop("high_precision_init", None)  # of octavo.quantized_init
                values = _values(parameter)
                if isinstance(parameter, QuantizedWeight) and initial is not None:
                    values = _unwritten(parameter, initial)
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


outside = Untraced(AdamW._step, "octavo.optim.AdamW runs outside of graphs: its step is one kernel for each parameter")


def _fitted(saved: dict[str, Any], group: dict[str, Any], parameter: Tensor) -> dict[str, Any]:
    """Return a saved state in this group's formats, on the parameter's device. Torch's own loader would cast all of it
    to the parameter's dtype."""
    state = {name: value.to(parameter.device) if isinstance(value, Tensor) else value for name, value in saved.items()}
    counter = parameter.device if group["capturable"] else torch.device("cpu")
    state["step"] = torch.as_tensor(saved["step"], dtype=torch.float32, device=counter).clone()
    if "master" in state:
        if _needs_master(group, parameter):
            dtype = torch.float32 if group["master"] == "none" else getattr(torch, group["master"])
            state["master"] = state["master"].to(dtype, copy=True).contiguous()
        else:
            del state["master"]
    if "exp_avg" in state:
        old = Moments(*[sharded.part(state.pop(name, None)) for name in _OF_MOMENTS])
        new = Moments.zeros(old.average, group["states"])
        if old.average_scale is not None and new.average_scale is not None:
            for target, source in zip(new, old, strict=True):
                target.copy_(source)  # type: ignore[union-attr,arg-type]
        else:
            reference.write(new, *reference.read(old))
        state |= _named(new, parameter)
    return state


def _named(moments: Moments, parameter: Tensor) -> dict[str, Tensor]:
    """Return the moments of a parameter, or of this rank's part of it, as entries of its state."""
    found = zip(_OF_MOMENTS, moments, strict=True)
    return {name: sharded.like(parameter, t) for name, t in found if t is not None}


def _needs_master(group: dict[str, Any], parameter: Tensor) -> bool:
    """Return whether updates are computed on values that the optimizer keeps."""
    if isinstance(parameter, QuantizedWeight):
        if group["master"] == "none":
            check_stochastic(parameter)
            parameter.__dict__.pop("high_precision_init", None)  # of octavo.quantized_init
        return bool(group["master"] != "none")
    own = torch.float32, *([torch.bfloat16] if group["master"] == "none" else [])
    return parameter.dtype not in own or not sharded.part(parameter).is_contiguous()


def _values(parameter: Tensor) -> Tensor:
    return parameter.values() if isinstance(parameter, QuantizedWeight) else parameter.detach()


def _unwritten(parameter: QuantizedWeight, initial: Tensor) -> Tensor:
    """Return the initial values of a weight that still has their codes, or else the values of its codes: a program has
    loaded or set it meanwhile. Versions do not tell, because a weight that moves gets new memory."""
    initial = initial.to(parameter.device)
    again: Any = parameter.detach().clone()
    again.write(initial)
    found = zip(again.tensors().values(), parameter.tensors().values(), strict=True)
    same = all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in found)
    return initial if same else parameter.values()


def _version(parameter: Tensor) -> int:
    """Count the writes to a parameter; those to a quantized weight are counted by its codes."""
    return parameter.row_codes._version if isinstance(parameter, QuantizedWeight) else parameter._version


def _number(value: float | Tensor, device: torch.device) -> Tensor:
    """Return a number as a tensor of no dims: a capture allows fills, and no copies from the host."""
    if isinstance(value, Tensor):
        return value.to(device, torch.float32).reshape(())
    return torch.full((), value, dtype=torch.float32, device=device)


def _settings(
    group: dict[str, Any], step: Tensor, device: torch.device, shared: dict[Any, Tensor], scaler: Scaler
) -> Tensor:
    """Return the numbers of a step, in the order of `octavo.kernels.adamw.SETTINGS`, on the device."""
    on_device = group["capturable"] or (isinstance(group["lr"], Tensor) and group["lr"].device.type != "cpu")
    key = device, id(step) if on_device else float(step)
    if key in shared:
        return shared[key]
    beta1, beta2 = group["betas"]
    lr, decay, eps = group["lr"], group["weight_decay"], group["eps"]
    rate, count = (lr, step.to(device)) if on_device else (float(lr), float(step))
    root = (torch if on_device else math).sqrt(1 - beta2**count)  # type: ignore[attr-defined]
    numbers = [1 - rate * decay, rate / (1 - beta1**count), root, 1 - beta1, beta2, 1 - beta2, eps, *scaler]
    there = torch.stack([_number(n, device) for n in numbers]) if on_device else _sent(numbers, torch.float32, device)
    shared[key] = there
    return there


def _seed(group: dict[str, Any], number: int, step: Tensor, device: torch.device, shared: dict[Any, Tensor]) -> Tensor:
    """Return the seed and the step of a parameter's stochastic rounding, int64 [2], on the device."""
    first = group["seed"] << 32
    if group["capturable"]:
        found = torch.full((2,), first + number, dtype=torch.int64, device=device)
        found[1].copy_(step)
        return found
    count = int(step)
    key = "seeds", device, count
    if key not in shared:
        rows = [(first + i, count) for i in range(len(group["params"]))]
        shared[key] = _sent(rows, torch.int64, device)
    return shared[key][number]


def _sent(numbers: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers on the device. A copy from pinned memory alone does not let the host wait for all that the device
    still has to do: forward and backward, and at each parameter the update of those before it."""
    there = torch.tensor(numbers, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
    return there.to(device, non_blocking=True)
