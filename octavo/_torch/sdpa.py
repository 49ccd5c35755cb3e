"""The kernel that torch chooses for scaled_dot_product_attention. Public functions tell only which are allowed."""

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend


def chosen_backend(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, enable_gqa: bool) -> str:
    """Return the name of the `SDPBackend` that a call with these arguments runs, in the present `sdpa_kernel`."""
    number = torch._fused_sdp_choice(q, k, v, is_causal=is_causal, enable_gqa=enable_gqa)
    return SDPBackend(number).name
