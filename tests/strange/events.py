"""What programs do to a layer between two of its steps, and around one of them. All are functions of a `Run`."""

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import stage as stage_module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import octavo
from tests.strange.run import Run, tensors_in
from tests.strange.states import deterministic, swapped_on_conversion
from tests.support.exports import attempt_export

# -- calls between two steps -------------------------------------------------------------------------------------------


def on_shapes_alone(run: Run) -> None:
    """The layer is called on tensors without data, as tools do that want to know shapes."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    inputs = [mode.from_tensor(t) if isinstance(t, Tensor) else t for t in run.inputs()]
    with mode:
        run.module(*inputs)


def exported(run: Run) -> None:
    attempt_export(run.module, run.inputs())


def called_with_copies(run: Run) -> None:
    copies = {name: p.detach().clone() for name, p in run.module.named_parameters()}
    with torch.no_grad():
        torch.func.functional_call(run.module, copies, run.inputs())


def evaluated(run: Run) -> None:
    run.module.eval()
    run.extra_call()
    run.module.train()


def frozen(run: Run) -> None:
    """No parameter needs a gradient for one call."""
    trained = [p for p in run.module.parameters() if p.requires_grad]
    run.module.requires_grad_(False)
    with torch.no_grad():
        run.extra_call()
    for p in trained:
        p.requires_grad_()


def called_by_a_thread(run: Run) -> None:
    in_a_thread(lambda: call_without_gradients(run))


def compiled_call(run: Run) -> None:
    with compiled(run), torch.no_grad():
        run.extra_call()


def call_without_gradients(run: Run) -> None:
    with torch.no_grad():
        run.extra_call()


def in_a_thread(call: Callable[[], Any]) -> Any:
    """Calls a function in a thread of its own."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def transformed(run: Run) -> None:
    """torch.func.grad and vmap take the layer or refuse it. Their calls are without gradients of torch.autograd."""
    x, *rest = run.inputs()

    def loss(x: Tensor) -> Tensor:
        return next(y for y in tensors_in(run.module(x, *rest)) if y.is_floating_point()).float().sum()

    with torch.no_grad():
        for call, argument in ((torch.func.grad(loss), x), (torch.vmap(loss), torch.stack((x, x)))):
            with suppress(Exception):
                call(argument.detach())


# -- failures between two steps: the next step repeats the call that failed --------------------------------------------


class Halfway(Exception):
    """Raised by a hook."""


def raises(*ignored: Any) -> None:
    raise Halfway


def attempt(run: Run, *, backward: bool = True) -> None:
    """Begins the next step, in which a hook raises, and clears the gradients that there are."""
    with suppress(Halfway):
        _, outputs = run.call(run.steps)
        if backward:
            run.backward(outputs)
    run.clear_gradients()


def fails_in_forward(run: Run) -> None:
    """A hook raises: one of the layer's last part, then one of the layer."""
    for part in ([*run.module.modules()][-1], run.module):
        handle = part.register_forward_hook(raises)
        attempt(run, backward=False)
        handle.remove()


def fails_in_backward(run: Run) -> None:
    """The layer's backward does not get the tensors that its forward saved."""
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, raises):
        attempt(run)


def fails_after_backward(run: Run) -> None:
    """A hook on the gradient of x raises."""

    def watch_x(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        inputs[0].register_hook(raises)

    handle = run.module.register_forward_pre_hook(watch_x)
    attempt(run)
    handle.remove()


# -- copies and conversions between two steps --------------------------------------------------------------------------


def deep_copied(run: Run) -> None:
    run.module = copy.deepcopy(run.module)


def pickled(run: Run) -> None:
    run.module = pickle.loads(pickle.dumps(run.module))


def averaged(run: Run) -> None:
    """An average of weights and buffers is made and updated."""
    average_of(run).update_parameters(run.module)


def average_of(run: Run) -> AveragedModel:
    return AveragedModel(run.module, device=run.place["device"], use_buffers=True)


def begin_average(run: Run) -> None:
    if run.tensors():  # torch averages no module without any
        run.notes["average"] = average_of(run)


def update_average(run: Run) -> None:
    """An average that was made before the first step is updated, called, and updated again."""
    if average := run.notes.get("average"):
        average.update_parameters(run.module)
        with torch.no_grad():
            average(*run.inputs())
        average.update_parameters(run.module)


def swapped(run: Run) -> None:
    """Each parameter changes places with a copy of itself."""
    for p in run.module.parameters():
        other = nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad)
        other.__dict__.update(p.__dict__)
        torch.utils.swap_tensors(p, other)


def cast_and_cast_back(run: Run) -> None:
    run.module.to(torch.float32).to(run.place["dtype"])


def cast_and_swapped(run: Run) -> None:
    with swapped_on_conversion():
        cast_and_cast_back(run)


def loaded(run: Run) -> None:
    run.module.load_state_dict(run.module.state_dict())
    octavo.load_state_dict(run.module, octavo.state_dict(run.module))


def loaded_and_swapped(run: Run) -> None:
    with swapped_on_conversion():
        loaded(run)


def emptied_and_loaded(run: Run) -> None:
    """The layer's values wait in state dicts, and it is without memory meanwhile."""
    weights, recipes = states_of(run)
    run.module.to("meta").to_empty(device=run.place["device"])
    run.module.load_state_dict(weights)
    octavo.load_state_dict(run.module, recipes)


def emptied_and_assigned(run: Run) -> None:
    """The layer takes the tensors of a state dict for its own."""
    weights, recipes = states_of(run)
    run.module.to("meta").load_state_dict(weights, assign=True)
    octavo.load_state_dict(run.module, recipes)


def states_of(run: Run) -> list[dict[str, Any]]:
    """Copies the layer's state dict, and that of its recipe."""
    states = run.module.state_dict(), octavo.state_dict(run.module)
    return [{name: t.detach().clone() if isinstance(t, Tensor) else t for name, t in one.items()} for one in states]


def flattened(run: Run) -> None:
    """All parameters become parts of one tensor."""
    if parameters := list(run.module.parameters()):
        nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(parameters), parameters)


def zeroed(run: Run) -> None:
    """Gradients are zeros, as after zero_grad(set_to_none=False)."""
    for p in run.module.parameters():
        if p.requires_grad:
            p.grad = torch.zeros_like(p)
    run.module.zero_grad(set_to_none=False)


def sharded(run: Run) -> None:
    """FSDP2 holds the parameters from here on."""
    fully_shard(run.module, mesh=init_device_mesh(run.place["device"], (1,)))


# -- around one step ---------------------------------------------------------------------------------------------------


@contextmanager
def hooked(run: Run) -> Iterator[None]:
    """The module, its parameters, inputs and outputs have hooks that only look."""
    module = run.module
    handles = [p.register_hook(lambda gradient: None) for p in module.parameters() if p.requires_grad]
    handles += [
        module.register_forward_pre_hook(lambda module, inputs: watch(inputs)),
        module.register_forward_hook(lambda module, inputs, outputs: watch(outputs)),
        module.register_full_backward_pre_hook(lambda module, gradients: None),
        module.register_full_backward_hook(lambda module, gradients, of_outputs: None),
    ]
    yield
    for handle in handles:
        handle.remove()


def watch(tensors: Any) -> None:
    for t in tensors_in(tensors):
        if isinstance(t, Tensor) and t.requires_grad:
            t.register_hook(lambda gradient: None)


@contextmanager
def hooked_in_parts(run: Run) -> Iterator[None]:
    handles = [part.register_forward_hook(lambda module, inputs, outputs: None) for part in run.module.modules()]
    yield
    for handle in handles:
        handle.remove()


@contextmanager
def parametrized(run: Run) -> Iterator[None]:
    """Every parameter is a function of another one, the identity."""
    owners = [(part, name) for part in run.module.modules() for name, _ in part.named_parameters(recurse=False)]
    for part, name in owners:
        parametrize.register_parametrization(part, name, nn.Identity())
    yield
    for part, name in owners:
        parametrize.remove_parametrizations(part, name)


@contextmanager
def checkpointed(run: Run) -> Iterator[None]:
    """Backward computes the layer's forward again."""
    run.called = lambda *inputs: checkpoint(run.module, *inputs, use_reentrant=False)
    yield
    run.called = None


@contextmanager
def replicated(run: Run) -> Iterator[None]:
    """A DDP of one rank calls the layer."""
    if any(p.requires_grad for p in run.module.parameters()):  # DDP refuses others
        run.called = DistributedDataParallel(run.module)
    yield
    run.called = None


@contextmanager
def compiled(run: Run) -> Iterator[None]:
    before, run.backend = run.backend, "aot_eager"
    yield
    run.backend = before


@contextmanager
def forward_in_a_thread(run: Run) -> Iterator[None]:
    """A thread of its own runs forward, and the caller's runs backward."""
    run.called = lambda *inputs: in_a_thread(lambda: run.module(*inputs))
    yield
    run.called = None


@contextmanager
def beside_a_thread(run: Run) -> Iterator[None]:
    """Another thread calls a copy of the layer all the while."""
    module, inputs, ended = copy.deepcopy(run.module), run.inputs(), threading.Event()

    def call() -> None:
        with torch.no_grad():
            while not ended.is_set():
                module(*inputs)

    with ThreadPoolExecutor(1) as pool:
        calls = pool.submit(call)
        try:
            yield
        finally:
            ended.set()
        calls.result()


class OnRows(torch.nn.Module):
    """A module as a stage of a pipeline: other stages send it its floating-point inputs, and it returns a tensor."""

    def __init__(self, module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        super().__init__()
        self.module, self.inputs = module, inputs

    def forward(self, *sent: torch.Tensor) -> torch.Tensor:
        values = iter(sent)
        y = self.module(*[next(values) if is_sent(t) else t for t in self.inputs])
        return y[0] if isinstance(y, tuple) else y


def is_sent(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def shapes_inferred(run: Run) -> None:
    """A stage of a pipeline learns shapes: torch runs it on memory without values, both ways."""
    if not hasattr(PipelineStage, "_forward_metadata_inference"):
        return  # before torch 2.13 the pass has no gradients
    inputs = run.inputs()
    module = OnRows(run.module, inputs)
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=1)
    try:
        stage = PipelineStage(module, 1, 2, torch.device(run.place["device"]))
        metadata = stage_module._StageForwardMeta(stage_module.extract_tensor_metas(tuple(filter(is_sent, inputs))))
        with deterministic():  # which fills that memory with NaN
            stage._forward_metadata_inference(metadata, has_backward=True)
            stage._backward_metadata_inference(lambda y, target: y.float().sum(), torch.zeros(1))
    finally:
        dist.destroy_process_group()
