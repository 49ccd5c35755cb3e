"""Dropout as a module, by the layer of the activations (`octavo.ops.activation_layer`)."""

from typing import Any

import torch
from torch import Tensor, nn

from octavo.errors import UnsupportedConfig, UnsupportedDtype
from octavo.ops.activation import stage_of
from octavo.ops.activation_layer import Config
from octavo.ops.inputs import check_input, numbers, values_of
from octavo.ops.operation import Edge, FusibleOperation
from octavo.ops.settings import Settings
from octavo.quant import QTensor
from octavo.runtime.call import Stage
from octavo.values import Value


class Dropout(FusibleOperation, Settings, nn.Module):
    """In training, zero each element of x with probability p and divide the others by 1 - p; in eval, return x.

    An element's index and a seed determine whether it is kept, so backward keeps only the seed and draws the mask
    again. Activation checkpointing restores torch's generator before it recomputes forward, so both forwards zero the
    same elements.

    Args:
        p: the probability, from 0 to 1.

    Raises:
        UnsupportedConfig: p is outside of that range.

    Example:
        >>> dropout, x, seed = octavo.ops.Dropout(0.5), torch.ones(4, 8), torch.tensor([1234, 0])
        >>> torch.equal(dropout(x, seed=seed), dropout(x, seed=seed)), dropout.eval()(x) is x
        (True, True)
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self._derive_from_settings()

    op_keywords = ("seed",)
    _setting_names = ("p",)
    op_is_elementwise = True

    def forward(self, input: Tensor | QTensor, seed: Tensor | None = None) -> Tensor | QTensor:
        """Return x with elements dropped, or x itself in eval mode and for p = 0.

        Args:
            input: x, in float32, bfloat16 or float16. In training a QTensor is dequantized.
            seed: int64 [seed, step] on x's device; None draws one from torch's generator. Pass it to get the same mask
                again, and advance the step at every call. In a Sequential, pass it through op_kwargs.

        Returns:
            y of x's shape and dtype.

        Raises:
            UnsupportedDtype: x has another dtype, or seed is no tensor.
            UnsupportedConfig: seed has another dtype, shape or device.
        """
        if not self.training or self._keeps_all:
            return input
        return self.op_run(values_of(input), seed=seed)

    def _checked_setting(self, name: str, value: Any) -> Any:
        if not 0 <= value <= 1:
            raise UnsupportedConfig(f"p is a probability, from 0 to 1, got {value!r}.")
        return value

    def _derive_from_settings(self) -> None:
        super()._derive_from_settings()
        self._settings = f"drop={float(self.p)!r},"
        self._keeps_all = self.p == 0

    @classmethod
    def op_matches(cls, config: Value) -> bool:
        return isinstance(config, Config) and config.drop != 0.0

    def why_not_fusible(self, x: Any) -> str:
        return "" if self.op_makes_node() else "it leaves x as it is"

    def op_makes_node(self) -> bool:
        return self.training and not self._keeps_all

    def op_stage(self, x: Any, extra_inputs: tuple[Any, ...], kwargs: dict[str, Any], as_nodes: bool) -> Stage:
        check_input("Dropout", x)
        return stage_of(self._settings, x, seed=self._seed(x, kwargs.get("seed")))

    def _seed(self, x: Tensor | Edge, seed: Tensor | None) -> Tensor:
        if seed is None:
            return torch.randint(0, 2**62, (2,), device=x.device, dtype=torch.int64)
        if not isinstance(seed, Tensor):
            raise UnsupportedDtype(
                f"The seed of Dropout is an int64 tensor [seed, step] where x is ({x.device}), got {seed!r}."
            )
        if seed.dtype != torch.int64 or tuple(seed.shape) != (2,) or seed.device != x.device:
            raise UnsupportedConfig(
                f"The seed of Dropout is an int64 tensor [seed, step] where x is ({x.device}), got {seed.dtype} "
                f"{numbers(seed)} on {seed.device}."
            )
        return seed

    def extra_repr(self) -> str:
        return f"p={self.p}"
