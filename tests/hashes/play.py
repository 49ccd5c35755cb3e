"""Run one case, eager and compiled, and hash all that comes out of it."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._ops import OpOverload
from torch.utils.checkpoint import checkpoint

import octavo
from tests.hashes.cases import Case
from tests.hashes.models import GROUPS, SIZES, K, N
from tests.hashes.record import ANY, NODES
from tests.hashes.values import grid, rows_of

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
STEPS = {"cpu": 2, "cuda": 4}  # a GPU replays calls from the third on
PARTS = ("y", "dx", "dw", "db", "main", "state", "keys")
LAYERS = (octavo.Linear, octavo.GroupedLinear)
Labelled = list[tuple[str, str, Any]]  # part, label, tensor or text or None


class Differs(AssertionError):
    """A compiled case gave other bits than the eager one."""


# -- hashes ------------------------------------------------------------------------------------------------------------


def line_of(case: Case, device: str = "cpu", graphs: bool = True) -> str:
    """The line of a case: a hash of everything, four digits for each part, and our nodes in its graphs. Without
    `graphs` it runs in eager mode alone, and nothing is said of nodes."""
    want = played(case, device, lambda call: call)
    own = {part: digest(entry for entry in want if entry[0] == part) for part in PARTS}
    words = [f"{part}={own[part][:4]}" for part in PARTS if any(entry[0] == part for entry in want)]
    whole = hashlib.sha256(" ".join(own.values()).encode()).hexdigest()[:16]
    if graphs and case.how.in_graph:
        captured = Graphs()
        _assert_same(case, "aot_eager", want, played(case, device, compiled_by(captured)))
        words.append(f"{NODES}={captured.count['forward']}+{captured.count['backward']}")
    if graphs and case.inductor:
        _assert_same(case, "Inductor", want, played(case, device, compiled_by("inductor")))
    return " ".join([whole, *words])


def digest(entries: Iterable[tuple[str, str, Any]]) -> str:
    """sha256 over label, dtype, shape and bytes of each entry, in their order."""
    total = hashlib.sha256()
    for _, label, value in entries:
        if isinstance(value, Tensor):
            value = value.detach().cpu()
            total.update(f"{label}:{value.dtype}:{tuple(value.shape)};".encode())
            total.update(data_of(value))
        else:
            total.update(f"{label}:{value};".encode())
    return total.hexdigest()


def data_of(tensor: Tensor) -> bytes:
    """The bytes of a tensor, row by row. NaNs are all alike: their sign and payload are the CPU's choice."""
    if tensor.is_floating_point() and tensor.element_size() > 1:
        tensor = torch.where(tensor.isnan(), torch.full((), float("nan"), dtype=tensor.dtype), tensor)
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def section_of(case: Case, device: str = "cpu") -> str:
    """The section of the record that the case's hash belongs to, on this machine."""
    version = torch.__version__.split("+")[0]
    if device == "cuda":
        return f"torch {version}, {torch.cuda.get_device_name()}"
    return ANY if case.is_portable else f"torch {version}, probe {_probe()}"


def _probe() -> str:
    """A hash of torch's own arithmetic on this machine, of the kinds that cases which are not portable run."""
    found: Labelled = []
    for name, dtype in DTYPES.items():
        x = grid("probe", 22, K).to(dtype)
        for made in (torch.tanh(x / 3), (x * x / 3).sum(0), torch.add(x / 3, x / 5, alpha=0.3)):
            found.append(("probe", name, made))
    return digest(found)[:8]


def _assert_same(case: Case, how: str, want: Labelled, found: Labelled) -> None:
    if [entry[:2] for entry in want] != [entry[:2] for entry in found]:
        raise Differs(f"{case.name}: {how} gives other results than eager: {_labels(found)} for {_labels(want)}.")
    differs = [
        label for (part, label, a), (_, _, b) in zip(want, found, strict=True)
        if digest([(part, label, a)]) != digest([(part, label, b)])
    ]  # fmt: skip
    if differs:
        raise Differs(f"{case.name}: {how} gives other bits than eager in {', '.join(differs)}.")


def _labels(entries: Labelled) -> str:
    return ", ".join(label for _, label, _ in entries)


# -- graphs ------------------------------------------------------------------------------------------------------------


class Graphs:
    """A backend that runs graphs as they are, and counts octavo's nodes in them."""

    def __init__(self) -> None:
        self.count = Counter[str]()

    def __call__(self, graph: Any, inputs: Any) -> Any:
        backend = aot_autograd(fw_compiler=self._counting("forward"), bw_compiler=self._counting("backward"))
        return backend(graph, inputs)

    def _counting(self, side: str) -> Callable[[Any, Any], Any]:
        def compiler(graph: Any, _: Any) -> Any:
            self.count[side] += sum(is_ours(node) for node in graph.graph.nodes)
            return make_boxed_func(graph.forward)

        return compiler


def is_ours(node: Any) -> bool:
    """Whether a node calls an operator of octavo's, itself or wrapped by functionalization."""
    called = (node.target, *node.args[:1])
    return node.op == "call_function" and any(isinstance(t, OpOverload) and t.namespace == "octavo" for t in called)


def compiled_by(backend: Any) -> Callable[[Any], Any]:
    return lambda call: torch.compile(call, fullgraph=True, backend=backend)


# -- a case, step by step ----------------------------------------------------------------------------------------------


def played(case: Case, device: str, wrap: Callable[[Any], Any]) -> Labelled:
    """All that a fresh module of the case gives, over some steps."""
    torch._dynamo.reset()
    torch.manual_seed(0)  # of what draws from torch's generator: seeds of rounding, where they were not given
    model = built(case, device)
    call, found = wrap(_call_of(case, model)), []
    for step in range(STEPS[device]):
        for microbatch, keywords in enumerate(case.how.calls):
            found += _microbatch(case, model, call, keywords, f"{step}.{microbatch}", device)
        found += _gradients(model, step)
        octavo.step(model)
        if not case.how.quantized_weight:
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(-0.75)
    found += [("state", name, tensor.clone()) for name, tensor in sorted(octavo.state_dict(model).items())]
    return [*found, ("keys", "keys", [*model.state_dict(), *octavo.state_dict(model)])]


def built(case: Case, device: str) -> nn.Module:
    """The module of a case with its weights, as the option wants them."""
    how = case.how
    recipe = None if how.ambient else case.recipe
    model = case.kind.build(recipe, **how.settings).to(device)
    model.to(torch.float32 if how.float32_weights else DTYPES[case.dtype])
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(grid(name, *p.shape, unit=2**-8 if p.dim() == 1 else 2**-14, signs=(1, 1)))
            p.requires_grad_(not any(part in name for part in how.frozen))
    _set_seeds(model, case)
    if how.quantized_weight:
        octavo.quantize_weights(model)
    for layer in (m for m in model.modules() if how.main_grad and isinstance(m, LAYERS)):
        for name, p in layer.named_parameters():
            if "weight" in name and p.requires_grad:
                p.main_grad = grid(f"main {name}", *p.shape).to(device)
                if how.main_grad == "overwrite":
                    p.main_grad, p.overwrite_main_grad = p.main_grad.bfloat16(), True
    return model


def _set_seeds(model: nn.Module, case: Case) -> None:
    """Seeds of stochastic rounding that do not depend on how parameters are drawn."""
    state = octavo.state_dict(model)
    seeds = {name: torch.tensor([1000 + i, 5]) for i, name in enumerate(state) if name.endswith("rounding.seed")}
    if case.how.ambient and case.recipe == "nvfp4" and isinstance(model, LAYERS):
        seeds = {"rounding.seed": torch.tensor([1000, 5])}  # kept until the layer has run in the recipe
    if seeds:
        octavo.load_state_dict(model, state | seeds)


def _call_of(case: Case, model: nn.Module) -> Callable[..., Any]:
    how, recipe = case.how, case.recipe

    def forward(*inputs: Any, **keywords: Any) -> Any:
        if how.ambient:
            with octavo.autocast(recipe):
                return model(*inputs, **keywords)
        return model(*inputs, **keywords)

    if not how.checkpoint:
        return forward
    return lambda *inputs, **keywords: checkpoint(forward, *inputs, use_reentrant=False, **keywords)


def _microbatch(case: Case, model: nn.Module, call: Any, given: dict[str, Any], at: str, device: str) -> Labelled:
    """Forward and backward. Outputs and gradients of inputs."""
    how = case.how
    inputs, keywords = _inputs(case, at, device), _keywords(case, model, given, device)
    with nullcontext() if how.grad else torch.no_grad():
        outputs = list(_tensors(call(*inputs, **keywords)))
    found: Labelled = [("y", f"y{i} {at}", y.detach().clone()) for i, y in enumerate(outputs)]
    wanting = [y for y in outputs if y.requires_grad and y.grad_fn is not None]
    if wanting:
        dys = [rows_of(f"dy{i} {at}", y.shape[:-1], y.shape[-1], unit=2**-13, signs=(1, -1)).to(y)
               for i, y in enumerate(wanting)]  # fmt: skip
        if how.spoiled:
            dys[0].view(-1)[5] = float("nan")
        torch.autograd.backward(wanting, dys)
    if how.delay:
        for layer in (m for m in model.modules() if isinstance(m, LAYERS)):
            layer.backward_dw()
    leaves = [t for t in inputs if isinstance(t, Tensor) and t.is_floating_point()]
    found += [("dx", f"dx{i} {at}", t.grad) for i, t in enumerate(leaves)]
    return found + [("y" if n == "out" else "dx", n, keywords[n]) for n in ("out", "dgrad_out") if n in keywords]


def _tensors(outputs: Any) -> Iterator[Tensor]:
    for y in outputs if isinstance(outputs, tuple) else (outputs,):
        if isinstance(y, octavo.QTensor):
            yield from (t for t in (y.codes, y.scale, y.global_scale) if t is not None)
        elif y is not None:
            yield y


def _inputs(case: Case, at: str, device: str) -> list[Any]:
    kind, how, dtype = case.kind, case.how, DTYPES[case.dtype]
    lead = kind.lead if how.lead is None else how.lead
    x = rows_of(f"x {at}", lead, kind.width).to(device, dtype)
    if how.spoiled:
        x.view(-1)[3] = float("inf")
    found: list[Any] = [x.requires_grad_(how.grad and "x" not in how.frozen)]
    for extra in kind.extra:
        if extra == "sizes":
            sizes = list(how.sizes or SIZES)
            assert len(sizes) == GROUPS
            found.append(sizes if how.listed else torch.tensor(sizes, device=device))
        else:
            width = 1 if extra == "scales" else kind.extra_width
            more = rows_of(f"{extra} {at}", lead, width).to(device, dtype)
            found.append((more[..., 0] if extra == "scales" else more).clone().requires_grad_(how.grad))
    return found


def _keywords(case: Case, model: nn.Module, given: dict[str, Any], device: str) -> dict[str, Any]:
    """The keywords of a call, where the module takes them."""
    if case.how.flag:
        given = {name: torch.tensor([int(value)], device=device) for name, value in given.items()}
    if case.how.buffers:
        rows, dtype = case.kind.lead[0], DTYPES[case.dtype]
        room = {"out": N, "dgrad_out": K}
        given = given | {name: torch.full((rows, n), 7.0, dtype=dtype, device=device) for name, n in room.items()}
    if given and isinstance(model, octavo.Sequential):
        given = {"op_kwargs": {i: given for i, m in enumerate(model) if isinstance(m, LAYERS)}}
    return _moved(case.kind.keywords, device) | given


def _moved(value: Any, device: str) -> Any:
    if isinstance(value, dict):
        return {name: _moved(inner, device) for name, inner in value.items()}
    return value.to(device) if isinstance(value, Tensor) else value


def _gradients(model: nn.Module, step: int) -> Labelled:
    """Gradients of parameters, which are then gone, and main_grad."""
    found: Labelled = []
    for name, p in model.named_parameters():
        found.append(("db" if "bias" in name else "dw", f"{name}.grad {step}", p.grad))
        if hasattr(p, "main_grad"):
            found.append(("main", f"{name}.main_grad {step}", p.main_grad.clone()))
        p.grad = None
    return found
