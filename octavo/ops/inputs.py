"""Checks of the tensors passed to operations, which read plain strided memory in the dtypes that they support."""

from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.nn import Parameter

from octavo._torch.dispatcher import is_any_autocast_enabled, no_torch_dispatch, no_torch_function
from octavo._torch.fakes import FakeTensor, FunctionalTensor
from octavo._torch.functional_collectives import AsyncCollectiveTensor, wait_tensor
from octavo._torch.tensors import TensorBase, is_dtensor
from octavo._torch.tracing import while_tracing
from octavo.errors import UnsupportedDevice, UnsupportedDtype, UnsupportedShape
from octavo.formats import FLOATS
from octavo.ops.operation import Edge
from octavo.ops.published_codes import way_to_values
from octavo.quant.grouped import GroupedTensor
from octavo.quant.qtensor import QTensor
from octavo.weights.quantized_parameters import refuse_codes
from octavo.weights.quantized_weight import QuantizedWeight

OURS = (QuantizedWeight, FakeTensor, FunctionalTensor)  # subclasses that layers accept: Octavo's own, and tracers'
DISABLED = (no_torch_function, no_torch_dispatch)
NESTED = (
    "a nested one, whose rows differ in length. Call the layer on the rows and nest its result, for a jagged x by "
    "torch.nested.nested_tensor_from_jagged(layer(x.values()), x.offsets())"
)
PARALLEL = (
    "a DTensor, which only an octavo.Linear takes that octavo.distributed.ColwiseParallel or RowwiseParallel has "
    "split. Use these in the plan of parallelize_module, leave the layer out of it, or shard with FSDP2: fully_shard "
    "gives whole weights to the forward of the module it was called on"
)


def arrived(x: Any) -> Any:
    """Return x; if x is the pending result of an async collective, wait for it, as part of the graph."""
    return wait_tensor(x) if type(x) is AsyncCollectiveTensor else x


def values_of(x: Any) -> Any:
    """Return x as a plain tensor: dequantize codes, within autograd's graph, and wait for a collective's result."""
    if type(x) is Tensor:
        return x
    return x.dequantize() if isinstance(x, QTensor) else arrived(x)


def wanted_gradients(needs_dx: bool, *others: Any) -> tuple[bool, ...]:
    """Return whether backward may compute dx, and the gradient of each other tensor; None has no gradient."""
    if not torch.is_grad_enabled():
        return (False,) * (1 + len(others))
    return needs_dx, *[t is not None and t.requires_grad for t in others]


def numbers(x: Tensor | Edge) -> tuple[int, ...]:
    """Return x's shape for a message, as numbers even where the compiler uses symbols."""
    return tuple([len(range(n)) for n in x.shape])


def strange(tensor: Any, weight: bool = True) -> str:
    """Return why a layer cannot use a tensor as its weight, or as an input, and the way out. Empty if it can."""
    kind = type(tensor)
    if tensor.is_nested:
        return NESTED
    if tensor.layout is not torch.strided:
        way_out = "Make it dense first: .to_dense()" if weight else "Call it on x.to_dense()"
        return f"one of layout {tensor.layout}. {way_out}"
    if kind is Tensor or kind is Parameter:
        return ""
    return _strange_kind(kind, weight)


@while_tracing
def _strange_kind(kind: type, weight: bool) -> str:
    """Return why a layer cannot use a tensor of this class; empty if it can. A subclass that overrides nothing is plain
    memory. So is an input that overrides __torch_function__ alone; such a weight is refused, because nn.Linear calls
    the override and layers do not."""
    if kind in OURS:
        return ""
    if is_dtensor(kind):
        return PARALLEL
    if not _overrides(kind, "__torch_dispatch__") and not (weight and _overrides(kind, "__torch_function__")):
        return ""
    return (
        f"a {kind.__module__}.{kind.__qualname__}, a tensor subclass with operators of its own (torchao's quantized "
        "weights are such), and layers read plain memory. Use a plain tensor of its values, .dequantize() where it has "
        "that, or keep torch's own layer there"
    )


def _overrides(kind: type, name: str) -> bool:
    """Return whether a subclass overrides the method. A disabled one does not count."""
    owner = next(parent for parent in kind.__mro__ if name in parent.__dict__)
    return owner is not Tensor and owner.__dict__[name] not in DISABLED and owner is not TensorBase


def refuse_strange(title: str, why: str, name: str = "") -> NoReturn:
    """Raise an error with the reason that `strange` returned; `name` is the argument, if it is not x."""
    sparse = why.startswith("one of layout")
    error = UnsupportedShape if sparse or why is NESTED else UnsupportedDtype
    raise error(f"{title} takes {'dense' if sparse else 'plain'} tensors{_as(name)}, got {why}.")


def _as(name: str) -> str:
    return f" as {name}" if name else ""


def check_input(title: str, x: Any, name: str = "", owner: nn.Module | None = None) -> None:
    """Check that x is a tensor, or an object with a shape and a dtype that stands for one, in a supported dtype.

    `name` is the argument, if it is not x. `owner` is the module that multiplies x by its parameters: an error says if
    they have to be cast too.
    """
    if type(x) is not Tensor and isinstance(x, Proxy):  # some tracers' proxies have a dtype
        refuse_symbol(title)
    dtype = getattr(x, "dtype", None)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedDtype(
            f"{title} takes a tensor{_as(name)}, got {type(x).__name__}. Make one: torch.as_tensor(...)."
        )
    if type(x) is QuantizedWeight:  # isinstance asks the metaclass of tensors, ten times as long
        refuse_codes(title)
    if dtype not in FLOATS:
        what = name or "x"
        own = None if owner is None else next((p.dtype for p in owner.parameters() if p.dtype not in FLOATS), None)
        if own is not None:
            raise UnsupportedDtype(
                f"{title} takes {what} and its parameters in float32, bfloat16 or float16, got {dtype} and {own}. Cast "
                f"both: module.float()({what}.float())."
            )
        raise UnsupportedDtype(f"{title} takes {what} in float32, bfloat16 or float16, got {dtype}. Cast {what} first.")
    if type(x) is GroupedTensor:
        raise UnsupportedDtype(
            f"{title} takes a tensor{_as(name)}, got a GroupedTensor: only octavo.GroupedLinear, called by itself, "
            "multiplies codes of groups. Pass dequantize() of it."
        )
    if type(x) is QTensor:
        raise UnsupportedDtype(
            f"{title} takes a tensor{_as(name)}, got a QTensor, whose codes have no groups. Pass dequantize() of it; "
            "an octavo.GroupedLinear also takes the codes of quantizer.quantize_groups(rows, sizes)."
        )
    # a run has checked its x before it made an Edge, and a plain strided Tensor needs no further check
    if type(x) is not Edge and (type(x) is not Tensor or x.is_nested or x.layout is not torch.strided):
        check_layout(title, x, name)


def autocast_input(title: str, x: Any, owner: nn.Module) -> Tensor:
    """Check x, and return it in the dtype of torch.autocast where that is on."""
    x = x if type(x) is Tensor else arrived(x)
    if type(x) is not Tensor or x.dtype not in FLOATS or x.is_nested or x.layout is not torch.strided:
        check_input(title, x, owner=owner)
    if torch.compiler.is_compiling() or is_any_autocast_enabled():
        kind = x.device.type
        if kind != "meta" and torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
    return x


def check_weight(title: str, weight: Tensor | None, name: str) -> None:
    """Refuse a weight, or a bias, that is not a plain tensor."""
    if weight is None:
        raise UnsupportedDtype(f"{title} takes a tensor as {name}, got None. Give the layer a parameter there again.")
    if why := strange(weight):
        refuse_strange(title, why, name)


def check_features(x: Any, weight: Tensor, title: str = "Linear", bias: Tensor | None = None, dims: int = 1) -> None:
    """Raise if x (anything with a shape and a device), of so many dims or more, or the bias does not fit the weight. If
    x has `like`, () is unknown."""
    if type(weight) is not nn.Parameter or weight.layout is not torch.strided:
        check_weight(title, weight, "its weight")
    if weight.dtype not in FLOATS:
        raise UnsupportedDtype(
            f"{title} takes its weight in float32, bfloat16 or float16, got {weight.dtype}. "
            f"{way_to_values(weight.dtype)}"
        )
    shape, width = x.shape, weight.shape[-1]
    if (len(shape) < dims or shape[-1] != width) and (shape or getattr(x, "like", None) is None):
        sizes = tuple([len(range(n)) for n in shape])  # numbers, even where the compiler uses symbols
        least = " of two dims or more" if dims == 2 else ""
        raise UnsupportedShape(
            f"This {title} takes inputs [..., {width}]{least}, got {sizes}. Check the layer before it, or in_features."
        )
    if x.device != weight.device:
        raise UnsupportedDevice(f"x is on {x.device} and the weight on {weight.device}. Move them together.")
    if bias is not None:
        if type(bias) is not nn.Parameter:
            check_weight("Linear", bias, "its bias")
        if bias.dtype not in FLOATS:
            raise UnsupportedDtype(
                f"Linear takes its bias in float32, bfloat16 or float16, got {bias.dtype}. {way_to_values(bias.dtype)}"
            )
        if bias.device != weight.device:
            raise UnsupportedDevice(
                f"The bias is on {bias.device} and the weight on {weight.device}. Move them together."
            )


def check_layout(title: str, x: Any, name: str = "") -> None:
    """Refuse an input whose elements are not in plain strided memory; `strange` lists the cases."""
    if isinstance(x, Tensor) and (why := strange(x, weight=False)):
        refuse_strange(title, why, name)


def refuse_symbol(title: str) -> NoReturn:
    raise UnsupportedDtype(
        f"{title} takes a tensor, got a Proxy of torch.fx: symbolic_trace calls layers with symbols, and this one "
        "needs x's dtype, sizes and device. Use torch.export.export(model, args) or torch.compile, or trace with a "
        "torch.fx.Tracer whose is_leaf_module is True for Octavo's modules, so that each is one node."
    )
