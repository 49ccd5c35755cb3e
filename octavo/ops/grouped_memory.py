"""Memory that the caller of a grouped layer passes: for y, for dx, and for codes of dy."""

from typing import Any, NamedTuple

from torch import Tensor

from octavo._torch.tracing import claim, is_captured, is_inside_operator, is_static
from octavo.communication.tensor_parallel import Parallel
from octavo.errors import UnsupportedConfig, UnsupportedDtype, UnsupportedShape
from octavo.quant.gradient_codes import GradientCodes


class CallersMemory(NamedTuple):
    """The buffers that the caller passed; None for those that the layer makes."""

    out: Tensor | None  # for y
    dgrad_out: Tensor | None  # for dx
    dy_codes: GradientCodes | None = None  # where dy may arrive as codes

    def unsupported_reason(self, layer: Any) -> str:
        """Return why a graph that is being traced cannot take this memory of a layer's call; empty if it can."""
        if self.dy_codes is not None:
            return (
                f"{layer.op_describe()} does not compile: dy_codes passes codes to backward beside autograd, and a "
                "graph's gradients are tensors. Leave dy_codes out, or build the layer with strict=False, to run "
                "outside."
            )
        if self.out is None and self.dgrad_out is None:
            return ""
        captured, nested = is_captured(), is_inside_operator()
        for name, buffer in (("out", self.out), ("dgrad_out", self.dgrad_out)):
            if buffer is None:
                continue
            why = ""
            if captured and not is_static(buffer):
                why = (
                    f"a CUDA graph writes to the memory it was captured with, and {name} may be another each time. "
                    "Make it, whole, with octavo.buffer(...), or compile without CUDA graphs"
                )
            elif not nested and not claim(buffer):
                why = f"two calls in one graph write to one {name}, or {name} overlaps another buffer of that graph. "
                why += "Give each call buffers of its own"
            if why:
                way_out = "or build the layer with strict=False, to run outside."
                return f"{layer.op_describe()} does not compile: {why}, {way_out}"
        return ""

    def check(self, layer: Any, x: Tensor, needs_dx: bool) -> None:
        """Check the metadata of memory for y and dx, without reading its values."""
        for name, buffer, width in (
            ("out", self.out, layer.out_features),
            ("dgrad_out", self.dgrad_out, layer.in_features),
        ):
            if buffer is None:
                continue
            if not isinstance(buffer, Tensor):
                raise UnsupportedDtype(f"GroupedLinear takes a tensor as {name}, got {type(buffer).__name__}.")
            want = (x.shape[0], width)
            if (
                tuple(buffer.shape) != want or buffer.dtype != x.dtype or buffer.device != x.device
                or not buffer.is_contiguous() or buffer.requires_grad
            ):  # fmt: skip
                raise UnsupportedShape(
                    f"{name} must be {x.dtype} {want} on {x.device}, contiguous, without requires_grad; got "
                    f"{buffer.dtype} {tuple(buffer.shape)} on {buffer.device}, strides {buffer.stride()}, "
                    f"requires_grad={buffer.requires_grad}. For a buffer that was returned before, pass it detached."
                )
        if self.dgrad_out is not None and not needs_dx:
            raise UnsupportedConfig("dgrad_out is for the gradient of x, and x needs none here. Leave it out.")

    def check_split(self, layer: Any, parallel: Parallel) -> None:
        """Raise for memory and codes of the caller's that a layer cannot use whose y or dx is summed over ranks."""
        for name in ("dgrad_out",) if parallel.mode == "column" else ("out", "dy_codes"):
            if getattr(self, name) is not None:
                raise UnsupportedConfig(
                    f"{layer.op_describe()}: {name} is memory of one rank, and a {parallel.mode} layer sums over ranks "
                    "after it has written. Leave it out."
                )
