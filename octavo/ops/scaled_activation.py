"""Activations that multiply each row of their output by a scale."""

from typing import Any

from torch import Tensor

from octavo.errors import UnsupportedConfig
from octavo.ops.activation import Activation, ClampedSwiGLU, SiTUGLU, SReLU, SwiGLU
from octavo.ops.inputs import values_of
from octavo.quant import QTensor


class _Scaled(Activation):
    """Multiply each row of an activation's output by a scale, such as the probability that a router gave a token.

    Args:
        glu_interleave_size: as in `Activation`.
        activation_recompute_in_mlp: False, the only value: the operation keeps x and never y, so there is nothing to
            recompute. It is accepted so that code for other libraries runs.

    Raises:
        UnsupportedConfig: activation_recompute_in_mlp is True, or another setting has a value without a meaning.

    Example:
        >>> octavo.ops.ScaledSwiGLU()(torch.tensor([[1.0, 2.0, 10.0, 100.0]]), torch.tensor([0.5]))
        tensor([[ 3.6553, 88.0797]])
    """

    num_extra_inputs = 1

    def __init__(self, glu_interleave_size: int | None = None, *, activation_recompute_in_mlp: bool = False) -> None:
        self._construct(glu_interleave_size, activation_recompute_in_mlp)

    def _construct(self, glu_interleave_size: int | None, recompute: bool, **settings: float) -> None:
        """Call the constructor of the activation."""
        if recompute:
            raise UnsupportedConfig(
                f"{type(self).__name__} keeps x and the scales, and never y: activation_recompute_in_mlp=True has "
                "nothing to leave out. To keep less of what is around it, use torch.utils.checkpoint."
            )
        given: dict[str, Any] = {**settings}
        if glu_interleave_size is not None:
            given["glu_interleave_size"] = glu_interleave_size
        super().__init__(**given)

    def forward(self, input: Tensor | QTensor, scales: Tensor) -> Tensor:  # type: ignore[override]
        """Return the activated values times a scale for each row.

        Args:
            input: x [..., K], in float32, bfloat16 or float16. A QTensor is dequantized.
            scales: [...], one for each row of x, in float32, bfloat16 or float16. They get a gradient if they want one.

        Returns:
            y in x's dtype. Gated activations halve the last dim.

        Raises:
            UnsupportedShape: the scales are not one for each row, or x cannot be divided into a and b.
            UnsupportedDtype: x or scales have another dtype.
            UnsupportedDevice: x and scales are on two devices.
        """
        return self.op_run(values_of(input), scales)


class ScaledSwiGLU(_Scaled, SwiGLU):
    """SwiGLU with a scale for each row: y = swiglu(x) · scales[..., None]. Call it with (x, scales).

    Use it for experts: the scales are the probabilities that the router gave the tokens. `glu_interleave_size` is as in
    `Activation`. `activation_recompute_in_mlp` is accepted so that code for other libraries runs: only False.
    """


class ScaledClampedSwiGLU(_Scaled, ClampedSwiGLU):
    """ClampedSwiGLU, whose settings it has, with a scale for each row, as in `ScaledSwiGLU`.

    Example:
        >>> octavo.ops.ScaledClampedSwiGLU(limit=5.0)(torch.randn(4, 64), torch.rand(4)).shape
        torch.Size([4, 32])
    """

    def __init__(
        self,
        glu_interleave_size: int | None = None,
        *,
        activation_recompute_in_mlp: bool = False,
        limit: float = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
    ) -> None:
        settings = {"limit": limit, "alpha": alpha, "glu_linear_offset": glu_linear_offset}
        self._construct(glu_interleave_size, activation_recompute_in_mlp, **settings)


class ScaledSiTUGLU(_Scaled, SiTUGLU):
    """SiTUGLU, whose settings it has, with a scale for each row, as in `ScaledSwiGLU`.

    Example:
        >>> octavo.ops.ScaledSiTUGLU(beta1=2.0)(torch.randn(4, 64), torch.rand(4)).shape
        torch.Size([4, 32])
    """

    def __init__(
        self,
        glu_interleave_size: int | None = None,
        *,
        activation_recompute_in_mlp: bool = False,
        beta1: float = 4.0,
        beta2: float = 25.0,
    ) -> None:
        self._construct(glu_interleave_size, activation_recompute_in_mlp, beta1=beta1, beta2=beta2)


class ScaledSReLU(_Scaled, SReLU):
    """Squared ReLU with a scale for each row, as in `ScaledSwiGLU`. It has no gate, and so no glu_interleave_size."""
