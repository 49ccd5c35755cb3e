"""`octavo.explain`: compile and run a model, and report what torch.compile made of it.

It runs a deep copy. Forward writes delayed scaling's memory, backward adds to `.grad` and `main_grad` and advances the
rounding counter, and hooks of a parameter may step an optimizer: restoring all of this would never be complete, and a
copy has its own. A deep copy lacks the attributes of parameters, such as `main_grad`: explain copies them too.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from octavo import backend
from octavo._torch import fast_paths
from octavo._torch.compilation import mode_options, modes
from octavo._torch.modules import uncompiled
from octavo._torch.tensors import tree_leaves, tree_map
from octavo.communication.gathered_rows import describe_communication
from octavo.errors import UnsupportedConfig, check_choice
from octavo.inspection.capture import Capture
from octavo.inspection.model_memory import measure
from octavo.inspection.report import CompileReport, Layer
from octavo.inspection.steps import own_copy
from octavo.model.convert import route
from octavo.model.layer_lookup import check_model, layers
from octavo.ops.quantized import UNQUANTIZED, Quantized
from octavo.recipes.ambient import ambient
from octavo.recipes.recipe import GEMMS
from octavo.weights.code_memory import Kind
from octavo.weights.main_grad import has_buffer
from octavo.weights.quantized_weight import QuantizedWeight

FOLLOWS = "from octavo.autocast"
CUDAGRAPHS = "triton.cudagraphs"
Call = tuple[tuple[Any, ...], dict[str, Any]]  # what a model is called with, by position and by name
REPLAYED = 3  # calls until a CUDA graph is replayed: warm-up, recording, replay


def explain(
    model: nn.Module,
    *inputs: object,
    kwargs: Mapping[str, object] | None = None,
    then: Iterable[tuple[object, ...] | Mapping[str, object]] = (),
    mode: str | None = None,
    backward: bool = True,
    dynamic: bool | None = None,
    memory: bool = False,
    optimizer: torch.optim.Optimizer | None = None,
) -> CompileReport:
    """Compile a copy of a model, call it, and report graphs, graph breaks, recompiles and the route of each layer.

    The model, its state, the inputs and torch's generators stay as they are. The call runs `torch._dynamo.reset()`
    before and after: other compiled functions of this process are compiled again.

    Args:
        model: a module. It is copied, which takes the memory of a second model.
        *inputs: the inputs of the first call.
        kwargs: the inputs of the first call by keyword, such as a batch of transformers: `kwargs=batch`.
        then: the inputs of further calls, a tuple or a dict each. Pass another batch size here to see whether it
            recompiles.
        mode: a mode of torch.compile, such as "default" or "reduce-overhead", for Inductor. None is "reduce-overhead"
            on a GPU; on a CPU it captures the graphs and generates no code, so that no C++ compiler is needed.
        backward: also run backward, from ones, where the output requires a gradient.
        dynamic: whether sizes are symbols, as for torch.compile.
        memory: also count the memory of a step by module, and on a GPU measure its peak. The copy runs eagerly once or
            twice more.
        optimizer: the optimizer of the model, whose states `memory` counts.

    Returns:
        The report. Print it, or check its fields in a test.

    Raises:
        UnsupportedConfig: `model` is no module, cannot be copied, or `mode` is none of torch.compile's.

    Example:
        >>> model = nn.Sequential(octavo.Linear(16, 8, recipe="fp8-current"))
        >>> report = octavo.explain(model, torch.ones(4, 16))
        >>> report.graphs, len(report.breaks), report.count("octavo::run", "forward")
        (1, 0, 1)
    """
    model = uncompiled(model)
    check_model(model, "explain", error=UnsupportedConfig)
    subject = copied(model, "explain")
    first: Call = inputs, dict(kwargs or {})
    devices = _devices(subject, first)
    device = devices[0] if devices else torch.device("cpu")
    mode = "reduce-overhead" if mode is None and device.type == "cuda" else mode
    if mode is not None:
        check_choice(mode, modes(), what="mode")
    options = None if mode is None else mode_options(mode, dynamic)
    cudagraphs = options is not None and bool(options.get(CUDAGRAPHS))
    capture = Capture(options)
    with torch.random.fork_rng(devices=[d for d in devices if d.type == "cuda"]), capture.recording():
        compiled = torch.compile(subject, backend=capture, dynamic=dynamic)
        for batch in (first, *(_call_of(entry) for entry in then)):
            for _ in range(REPLAYED if cudagraphs else 1):
                _step(subject, compiled, batch, backward)
        counted = None
        if memory:
            counted = measure(model, subject, lambda: _step(subject, subject, first, backward), optimizer)
    return CompileReport(
        compiler=f"{'Tracing alone' if mode is None else f'Inductor, mode {mode}'}, on {device}",
        cudagraphs=cudagraphs,
        breaks=capture.breaks(),
        recompiles=capture.recompiles(),
        skips=capture.skips(),
        graphs=capture.graphs,
        captured=tuple(capture.captured),
        layers=tuple(_layer(path, layer, capture) for path, layer in layers(subject)),
        runs=tuple(capture.runs),
        off=(*fast_paths.off(), *backend.emulated().values()),
        memory=counted,
    )


# -- the copy ----------------------------------------------------------------------------------------------------------


def copied(model: nn.Module, function: str) -> nn.Module:
    try:
        subject: nn.Module = copy.deepcopy(model)
    except Exception as error:
        raise UnsupportedConfig(
            f"{function} runs a deep copy, and this {type(model).__name__} has none ({type(error).__name__}: {error}). "
            f"{function.capitalize()} the module before it is wrapped, or one block of it."
        ) from error
    for path, layer in layers(subject):
        layer.strict = False  # explain reports its refusals by its path, and goes on
        layer._path = path
    for theirs, ours in zip(model.parameters(), subject.parameters(), strict=True):
        ours.__dict__.update({name: _attribute(name, value, ours) for name, value in theirs.__dict__.items()})
        if theirs.requires_grad and (theirs._backward_hooks or theirs._post_accumulate_grad_hooks):
            ours.register_hook(lambda gradient: None)  # type: ignore[no-untyped-call]  # hooks are not copied, but a graph may refuse them
    return subject


def _attribute(name: str, value: Any, weight: Tensor) -> Any:
    """Return a parameter's attribute for the parameter's copy, with its own memory for what backward writes."""
    if name == "get_main_grad":
        buffer = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        return lambda: buffer
    return value.detach().clone() if isinstance(value, Tensor) else value


def _call_of(entry: Any) -> Call:
    return ((), dict(entry)) if isinstance(entry, Mapping) else (tuple(entry), {})


def _devices(model: nn.Module, inputs: Any) -> list[torch.device]:
    """Return the devices of a call's tensors, that of the parameters first."""
    found = [*model.parameters(), *model.buffers(), *tree_leaves(inputs)]
    return list(dict.fromkeys(t.device for t in found if isinstance(t, Tensor)))


def _step(model: nn.Module, compiled: Callable[..., Any], batch: Call, backward: bool) -> None:
    """Run one forward, and one backward from the outputs that require a gradient."""
    torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
    own, named = tree_map(own_copy, batch)
    made = [t for t in tree_leaves(compiled(*own, **named)) if isinstance(t, Tensor) and t.requires_grad]
    if made and backward:
        lent = _lend_buffers(model)
        torch.autograd.backward(made, [torch.ones_like(t) for t in made])
        for weight in lent:
            del weight.main_grad
    model.zero_grad()


def _lend_buffers(model: nn.Module) -> list[Any]:
    """Give a main_grad to the weights that lack one, and return these weights. The missing buffer is already reported
    as a refusal of forward, and must not end the report here."""
    fused = [m for _, m in layers(model) if m.fuse_wgrad_accumulation]
    found: list[Any] = [weight for m in fused for weight in m._weight_parts() if not has_buffer([weight])]
    for weight in found:
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
    return found


# -- layers ------------------------------------------------------------------------------------------------------------


def _layer(path: str, layer: Quantized, capture: Capture) -> Layer:
    weight = layer._weight_parts()[0]
    given = (*layer.parameters(recurse=False), *layer._hidden.buffers())
    own, seen = layer.recipe, next((capture.recipes[id(t)] for t in given if id(t) in capture.recipes), None)
    recipe = own or seen or ambient.recipe or UNQUANTIZED
    gemms = {name: getattr(recipe.linear(), name) for name in GEMMS}
    kind = weight.kind if isinstance(weight, QuantizedWeight) else None
    if kind is not None and not kind.columns and not kind.turns:
        gemms["dgrad"] = gemms["dgrad"].as_mode("high_precision")
    return Layer(
        path,
        recipe=recipe.key if own else f"{FOLLOWS}: {recipe.key}",
        routes=tuple((name, layer._gemm_route(g.left, g.right, weight.device)) for name, g in gemms.items()),
        why=route(weight.device, recipe)[1],
        uncompiled="" if seen else _why_uncompiled(path, layer, capture.unsupported_reasons()),
        codes="" if kind is None else _codes(kind),
        parallel="" if (split := layer._split_over_ranks()) is None else describe_communication(split, recipe),
    )


def _codes(kind: Kind) -> str:
    """Return how dx is made of a weight that is codes."""
    if kind.columns:
        return "its weight is codes by row and by column"
    if kind.turns:
        return "its weight is row codes, which backward transposes for dx"
    return "its weight is row codes; dx is made of their values, since wᵀ has other codes"


def _why_uncompiled(path: str, layer: Quantized, unsupported_reasons: tuple[str, ...]) -> str:
    """Return the refusal that names the layer, or else a general reason."""
    own = [text for text in unsupported_reasons if f"at {path!r}" in text]
    if not own and layer._parametrized_weights():
        return "whether it is in a graph is found by its weight, and this one is made by a parametrization"
    return own[0] if own else "it was not called, or ran outside of the graphs"
