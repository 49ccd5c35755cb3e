"""Stand-ins for transformers' registry of experts, and for classes of experts that it dispatches."""

import copy
import functools
import types

import torch
import torch.nn.functional as F
from torch import nn

PACKAGE = "transformers.integrations.moe"


class Registry(dict):
    """The registry: implementations by name."""

    def register(self, name, function):
        self[name] = function

    def get_interface(self, name, default):
        return default if name == "eager" else self[name]


def package():
    """A module with an empty registry, to be put into sys.modules."""
    return types.SimpleNamespace(ALL_EXPERTS_FUNCTIONS=Registry())


class Config:
    """A config: it chooses an implementation, also for the configs inside."""

    def __init__(self, inner=None):
        self.sub_configs = {} if inner is None else {"inner": Config}
        self.inner, self._experts_implementation = inner, "eager"

    @property
    def _experts_implementation(self):
        return self._chosen

    @_experts_implementation.setter
    def _experts_implementation(self, name):
        self._chosen = name
        if self.inner is not None:
            self.inner._experts_implementation = name


def dispatched(registry, **flags):
    """The decorator of classes of experts."""
    flags = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True, **flags}

    def wrapper(cls):
        init, forward = cls.__init__, cls.forward

        def __init__(self, config, *args, **kwargs):
            init(self, *args, **kwargs)
            self.config = config
            self.__dict__.update(flags)

        @functools.wraps(forward)
        def dispatch(self, *args):
            return registry().get_interface(self.config._experts_implementation, forward)(self, *args)

        cls.__init__, cls.forward = __init__, dispatch
        return cls

    return wrapper


def registry_now():
    """The registry of the package that is imported now."""
    import sys

    return sys.modules[PACKAGE].ALL_EXPERTS_FUNCTIONS


class Loop(nn.Module):
    """Experts that run one after the other."""

    act_fn = staticmethod(F.silu)

    def __init__(self, experts=4, hidden=64, ffn=96, **place):
        super().__init__()
        self.num_experts = experts
        wide = 2 * ffn if hasattr(type(self), "_apply_gate") else ffn
        first = "gate_up_proj" if hasattr(type(self), "_apply_gate") else "up_proj"
        self.register_parameter(first, nn.Parameter(torch.randn(experts, wide, hidden, **place) * hidden**-0.5))
        self.down_proj = nn.Parameter(torch.randn(experts, hidden, ffn, **place) * ffn**-0.5)

    def forward(self, x, index, weights):
        first = self.gate_up_proj if self.has_gate else self.up_proj
        y = torch.zeros_like(x)
        for expert in range(self.num_experts):
            token, assignment = torch.where(index == expert)
            h = x[token] @ first[expert].mT
            h = (self._apply_gate(h) if self.has_gate else self.act_fn(h)) @ self.down_proj[expert].mT
            y = y.index_add(0, token, (h * weights[token, assignment, None]).to(y.dtype))
        return y


@dispatched(registry_now)
class Gated(Loop):
    """Experts with a gate: MixtralExperts and most others."""

    def _apply_gate(self, h):
        gate, up = h.chunk(2, dim=-1)
        return self.act_fn(gate) * up


@dispatched(registry_now, has_gate=False)
class Ungated(Loop):
    """Experts without a gate."""


class Mixture(nn.Module):
    """A block: a router, and experts."""

    def __init__(self, config, experts=4, hidden=64):
        super().__init__()
        self.gate = nn.Linear(hidden, experts, bias=False)
        self.experts = Gated(config, experts, hidden)

    def forward(self, x):
        weights, index = self.gate(x).softmax(-1).topk(2)
        return x + self.experts(x, index, weights)


class Model(nn.Module):
    """Two blocks, and a linear layer."""

    def __init__(self):
        super().__init__()
        self.config = Config()
        self.blocks = nn.ModuleList(Mixture(self.config) for _ in range(2))
        self.out = nn.Linear(64, 16)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def call(seed=0, tokens=48, hidden=64, experts=4, dtype=torch.float32):
    """The arguments of a call of experts, and a gradient of its output."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=generator).to(dtype).requires_grad_()
    weights, index = torch.rand(tokens, experts, generator=generator).topk(2)
    return (x, index, weights.requires_grad_()), torch.randn(tokens, hidden, generator=generator).to(dtype)


def gradients(function, parameters, arguments, dy):
    """y, and the gradients of x, of the weights of assignments, and of the parameters."""
    y = function(*arguments)
    return [y.detach(), *torch.autograd.grad(y, [arguments[0], arguments[2], *parameters], dy.to(y.dtype))]


def in_float64(experts, arguments, dy):
    """The same in float64, by the experts' own forward."""
    exact = copy.deepcopy(experts).double()
    x, index, weights = arguments
    wide = (x.detach().double().requires_grad_(), index, weights.detach().double().requires_grad_())
    return gradients(type(exact).forward.__wrapped__.__get__(exact), list(exact.parameters()), wide, dy.double())
