"""The environments of the harness. Each is a state of torch, or something that is done to a layer, and must leave no
trace in what the layer computes. Adding one is a line of `ENVIRONMENTS`."""

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import stage as stage_module
from torch.optim.swa_utils import AveragedModel
from torch.utils.flop_counter import FlopCounterMode

from tests.exports import attempt_export

Enter = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Environment:
    """A state of torch, by when a run is in it. `harness.record_of` has the order of events."""

    name: str
    around: Enter = nullcontext  # from before the layer is built until after its last step
    during: Enter = nullcontext  # for one step, after one outside
    between: Callable[[Any], None] = lambda run: None  # between two steps; it may replace `run.module`
    may_differ: tuple[str, ...] = ()  # patterns of the names, in a record, of values that the environment changes
    leaves_out: tuple[str, ...] = ()  # names of layers that it is not for
    needs_gpu: bool = False

    def __str__(self) -> str:
        return self.name


# -- states of torch ---------------------------------------------------------------------------------------------------


@contextmanager
def default_device(name: str) -> Iterator[None]:
    if name == "cuda":
        torch.cuda.init()  # torch.utils.checkpoint of CPU tensors refuses to be the first to do so
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def deterministic() -> Iterator[None]:
    """Operators without a deterministic form raise, and memory without values is filled with NaN."""
    before, fill = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it torch multiplies no matrices on a GPU
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = True
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before)
            torch.utils.deterministic.fill_uninitialized_memory = fill


@contextmanager
def device_block() -> Iterator[None]:
    torch.cuda.init()
    with torch.device("cuda"):
        yield


# a layer trains in these, and does so in the same bits
DEFAULTS: dict[str, Enter] = {
    "default device meta": lambda: default_device("meta"),
    "with device meta": lambda: torch.device("meta"),
    "default dtype float64": lambda: default_dtype(torch.float64),
    "default dtype float16": lambda: default_dtype(torch.float16),
    "default dtype bfloat16": lambda: default_dtype(torch.bfloat16),
    "deterministic algorithms": deterministic,
}
GPU_DEFAULTS: dict[str, Enter] = {
    "default device cuda": lambda: default_device("cuda"),
    "with device cuda": device_block,
}
# in these no layer trains: it is called
WITHOUT_GRADIENTS: dict[str, Enter] = {"no_grad": torch.no_grad, "inference mode": torch.inference_mode}


# -- environments ------------------------------------------------------------------------------------------------------


def whole_run(name: str, enter: Enter, **others: Any) -> Environment:
    return Environment(f"{name}, whole run", around=enter, **others)


def one_step(name: str, enter: Enter, **others: Any) -> Environment:
    return Environment(f"{name}, one step", during=enter, **others)


def one_call(name: str, enter: Enter, **others: Any) -> Environment:
    """The layer is called once more between two steps, and what it returns is dropped."""

    def between(run: Any) -> None:
        with enter():
            run.extra_call()

    return Environment(f"{name}, one call", between=between, **others)


def on_shapes_alone(run: Any) -> None:
    """The layer is called on tensors without data, as tools do that want to know shapes."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    inputs = [mode.from_tensor(t) if isinstance(t, torch.Tensor) else t for t in run.inputs()]
    with mode:
        run.module(*inputs)


def exported(run: Any) -> None:
    attempt_export(run.module, run.inputs())


def called_with_copies(run: Any) -> None:
    copies = {name: p.detach().clone() for name, p in run.module.named_parameters()}
    with torch.no_grad():
        torch.func.functional_call(run.module, copies, run.inputs())


def deep_copied(run: Any) -> None:
    run.module = copy.deepcopy(run.module)


def pickled(run: Any) -> None:
    run.module = pickle.loads(pickle.dumps(run.module))


def evaluated(run: Any) -> None:
    run.module.eval()
    run.extra_call()
    run.module.train()


def averaged(run: Any) -> None:
    """An average of weights and buffers is made and updated."""
    AveragedModel(run.module, use_buffers=True).update_parameters(run.module)


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


def shapes_inferred(run: Any) -> None:
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


def counted() -> FlopCounterMode:
    return FlopCounterMode(display=False)


# a mixture counts the tokens of every call in two buffers, and the first microbatch of several writes a cached weight
WRITTEN = ("version of *load", "version of *dropped", "version of *weight_row_*", "version of *weight_column_*")
ROUTING = "routing functions"
TITAN = "converted experts of torchtitan"
ENVIRONMENTS: tuple[Environment, ...] = (
    *[place(name, enter) for name, enter in DEFAULTS.items() for place in (whole_run, one_step)],
    *[place(name, enter, needs_gpu=True) for name, enter in GPU_DEFAULTS.items() for place in (whole_run, one_step)],
    *[one_call(name, enter, may_differ=WRITTEN) for name, enter in WITHOUT_GRADIENTS.items()],
    # functions that update a bias at every call: none of them is a layer, which has modes
    Environment("a call on shapes alone", between=on_shapes_alone, may_differ=WRITTEN, leaves_out=(ROUTING,)),
    Environment("torch.export", between=exported, may_differ=WRITTEN),
    Environment("functional_call", between=called_with_copies, may_differ=WRITTEN),
    # a copy of a parameter lacks attributes such as main_grad, in torch too
    Environment("deepcopy", between=deep_copied, may_differ=("version of *",), leaves_out=("Linear, main_grad",)),
    # torchtitan's class is a stand-in here, which cannot be imported
    Environment(
        "pickle", between=pickled, may_differ=("version of *",), leaves_out=("converted experts of torchtitan",)
    ),
    Environment("evaluation", between=evaluated, may_differ=WRITTEN, leaves_out=(ROUTING,)),
    Environment("AveragedModel", between=averaged),
    Environment("pipeline shape inference", between=shapes_inferred, leaves_out=(ROUTING, "quantizers")),
    # torch takes the gradient of torchtitan's own silu apart to count it
    one_step("FLOP counter", counted, may_differ=("version of *",), leaves_out=(TITAN,)),
)
