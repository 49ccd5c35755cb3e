"""The forwards of converted modules: `FORWARDS`, by what a module is called with.

A converted module's class derives from one of these, besides its own. They are modules so that instances can change
their class to one that derives from them.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.errors import UnsupportedConfig
from octavo.model.third_party.known_experts import ATTENTION, EQUAL_ROWS, MATRIX, ROWS, TOKENS
from octavo.moe.experts import Experts
from octavo.moe.permutation import permute, sort, unpermute


class _TakesTokens(nn.Module):
    """The forward of experts that are called with tokens, the experts of each, and their weights."""

    octavo: Any

    def _octavo_split(self, dispatcher: Any) -> None:
        split_experts().split(self, dispatcher)

    def forward(self, *arguments: Any, **named: Any) -> Tensor:
        x, index, probs = (*arguments, *named.values())[:3]
        _check_implementation(self)
        layers, tokens = self.octavo, x.reshape(-1, x.shape[-1])
        if _is_split(self):
            sums: Tensor = split_experts().through(self, tokens, index, probs)
            return sums.to(x.dtype).view(x.shape)
        number = next(layers.children()).num_groups if not isinstance(layers, Experts) else layers.num_experts
        probs = probs if probs.dtype == x.dtype else probs.float()
        # transformers gives assignments to experts of other processes the index num_experts: `sort` drops them, and
        # Experts would refuse them
        permutation = sort(index, number)
        if isinstance(layers, Experts):
            y: Tensor = layers(tokens, permutation, probs)
        else:
            rows, _ = permute(tokens, permutation)
            y = unpermute(layers(rows, permutation.sizes), permutation, probs)
        return y.to(x.dtype).view(x.shape)


class _TakesRows(nn.Module):
    """The forward of experts that are called with sorted rows and the number of each expert's."""

    octavo: Any

    def _octavo_split(self, dispatcher: Any) -> None:
        split_experts().split(self, dispatcher)

    def forward(self, *arguments: Any, **named: Any) -> Tensor:
        x, sizes = (*arguments, *named.values())[:2]
        y: Tensor = split_experts().through_rows(self, x, sizes) if _is_split(self) else self.octavo(x, sizes)
        return y.to(x.dtype)


class _TakesEqualRows(nn.Module):
    """The forward of experts that are called with rows, as many for each expert."""

    octavo: Any

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        number = self.octavo.fc1.num_groups
        return self.octavo(rows, torch.full((number,), rows.shape[0] // number, dtype=torch.int64, device=rows.device))


class _TakesMatrix(nn.Module):
    """The forward of a linear layer in another layout."""

    octavo: Any

    def forward(self, x: Tensor) -> Tensor:
        return self.octavo(x)


class _TakesAttention(nn.Module):
    """The forward of an nn.MultiheadAttention, whose projections are layers."""

    octavo: Any
    batch_first: bool
    dropout: float
    num_heads: int
    bias_k: Tensor | None
    bias_v: Tensor | None

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None,
        need_weights: bool = True, attn_mask: Tensor | None = None, average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        if is_causal and attn_mask is None:
            raise UnsupportedConfig("is_causal=True is a hint that attn_mask is causal. Pass the mask too.")
        layers, is_batched = self.octavo, query.dim() == 3
        query, key, value = (self._with_batch_first(x) for x in (query, key, value))
        q, k, v = layers.query(query), layers.key(key), layers.value(value)
        if self.bias_k is not None and self.bias_v is not None:
            k, v = (
                torch.cat([x, bias.to(x.dtype).expand(x.shape[0], 1, -1)], dim=1)
                for x, bias in ((k, self.bias_k), (v, self.bias_v))
            )
        mask = self._mask(attn_mask, key_padding_mask, (q.shape[0], q.shape[1], k.shape[1]), q.dtype)
        q, k, v = (x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in (q, k, v))
        drops, weights = self.dropout if self.training else 0.0, None
        if need_weights:
            scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
            shares = F.dropout((scores if mask is None else scores + mask).softmax(-1), drops)
            y, weights = shares @ v, shares.mean(1) if average_attn_weights else shares
            weights = weights if is_batched else weights.squeeze(0)
        else:
            y = F.scaled_dot_product_attention(q, k, v, mask, drops)
        y = layers.out(y.transpose(1, 2).flatten(2))
        if not is_batched:
            return y.squeeze(0), weights
        return (y if self.batch_first else y.transpose(0, 1)), weights

    def _with_batch_first(self, x: Tensor) -> Tensor:
        if x.dim() == 2:
            return x.unsqueeze(0)
        return x if self.batch_first else x.transpose(0, 1)

    def _mask(
        self, mask: Tensor | None, padding: Tensor | None, shape: tuple[int, int, int], dtype: torch.dtype
    ) -> Tensor | None:
        """Return what is added to the scores [batch, heads, queries, keys]; None if nothing is."""
        batch, queries, keys = shape
        parts = []
        if mask is not None:
            added = _added(mask, dtype)
            parts.append(added if mask.dim() == 2 else added.view(batch, self.num_heads, queries, -1))
        if padding is not None:
            parts.append(_added(padding, dtype).view(batch, 1, 1, -1))
        # the key of bias_k is behind all others, and no mask has it
        parts = [F.pad(part, (0, keys - part.shape[-1])) for part in parts]
        return None if not parts else parts[0] if len(parts) == 1 else parts[0] + parts[1]


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask as numbers to add: True stands for a key that is not seen."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, float("-inf"))


FORWARDS: dict[str, type[nn.Module]] = {
    TOKENS: _TakesTokens, ROWS: _TakesRows, EQUAL_ROWS: _TakesEqualRows, MATRIX: _TakesMatrix,
    ATTENTION: _TakesAttention,
}  # fmt: skip


def split_experts() -> Any:
    """Return the module of experts over ranks, which imports this one."""
    from octavo.model.third_party import split_experts as found

    return found


def _is_split(module: nn.Module) -> bool:
    return "_octavo_dispatcher" in module.__dict__


def _check_implementation(module: Any) -> None:
    """Raise if the model was told to run its experts in another way, which a converted module would not follow. While
    transformers generates on a GPU it changes grouped_mm to batched_mm, which is no wish of the user's."""
    then = module.__dict__.get("_octavo_implementation")
    if then is None:
        return
    now = getattr(module.config, "_experts_implementation", None)
    if now != then and not (then == "grouped_mm" and now == "batched_mm" and not torch.is_grad_enabled()):
        raise UnsupportedConfig(
            f"set_experts_implementation({now!r}) came after octavo.convert, whose experts do not run it. Call "
            f"octavo.revert(model) first, or go back with set_experts_implementation({then!r})."
        )
