"""The language model of `octavo bench model`, the kernels of its attention, and its first weights."""

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from octavo._torch.operators import chosen_backend
from octavo.demo.llama import PlainAttention, Size
from octavo.demo.transformer import Device, float32_on

STD = 0.02  # of the first weights

# kernels of attention, in the order in which they are tried; that of torch itself differs between its versions
ATTENTION = {
    "cudnn": (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH),
    "flash": (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH),
}


def attention_order(first: str) -> AbstractContextManager[Any]:
    """Return a context in which attention tries the kernels of ATTENTION[first] in that order. A call traced by
    torch.compile inside of it keeps the kernel that was chosen then."""
    return sdpa_kernel(list(ATTENTION[first]), set_priority=True)


class Llama(nn.Module):
    """Map tokens [B, T] to the loss of predicting each one's successor; the first token follows the last."""

    def __init__(self, size: Size, blocks: nn.Module, device: Device = "cpu") -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width, **float32_on(device))
        self.blocks = blocks  # with the last norm
        self.head = nn.Linear(size.width, size.vocabulary, bias=False, **float32_on(device))

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.blocks(self.embedding(tokens)))
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens.roll(-1, 1).flatten())


def reset(model: nn.Module, seed: int) -> None:
    """Draw the weights: equal for equal seeds, and for models with equal parameters in equal order."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.normal_(std=STD)


def attention_kernel(size: Size, device: torch.device, first: str) -> str:
    """Return the name of the kernel that attention runs in bfloat16."""
    mix = PlainAttention(size).to(device, torch.bfloat16)
    shape = (size.batch, size.length, size.qkv_width)
    qkv = torch.zeros(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
    with attention_order(first):
        return chosen_backend(*mix.heads(qkv), is_causal=True, enable_gqa=mix.shares)
