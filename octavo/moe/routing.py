"""The choice of experts: `route`, the load of each expert, and the bias that balances it."""

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.communication.collectives import total
from octavo.communication.groups import Group, name_of, size_of
from octavo.errors import (
    UnsupportedConfig,
    UnsupportedDevice,
    UnsupportedDtype,
    UnsupportedShape,
    check_choice,
    check_factor,
    check_whole,
)
from octavo.foreign_keywords import refused
from octavo.ops.inputs import arrived, check_input

SCORES = ("softmax", "sigmoid", "sqrtsoftplus")
SMALLEST = 1e-20  # added to sums of scores, which may all be zero
STEEP = -15.0  # below it softplus(x) and exp(x) are one float32 number


@refused
def route(
    logits: Tensor,
    top_k: int,
    *,
    score: str = "softmax",
    normalize: bool | None = None,
    bias: Tensor | None = None,
    groups: int | None = None,
    top_groups: int | None = None,
    group_best: int = 2,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Choose the experts of each token, and the weights of their outputs.

    The function turns logits into scores, takes the best `top_k` experts of each token, and returns their scores as
    weights. It computes in float32. Gradients flow from the weights to the logits, and none through the choice. Nothing
    is read on the host, and two runs give the same bits.

    Of two experts with equal numbers the one with the lower index is chosen, on every device. Without a bias experts
    are ranked by their logits, so that scores that round to one number are no ties.

    A NaN counts as the largest number, so that it is not hidden: a token with a NaN among its logits has one among its
    weights. Indices are in range whatever the logits are.

    Args:
        logits: a number for each expert [..., E], in float32, bfloat16 or float16.
        top_k: the number of experts for each token, 1 to E.
        score: "softmax" over all experts; "sigmoid" of each logit; or "sqrtsoftplus", the root of softplus of each.
        normalize: divide the weights of a token by their sum. With softmax that is the softmax over the chosen experts
            alone. None, the default, is True unless `top_k` is 1, where a normalized weight is always 1 and the router
            would learn nothing from it.
        bias: a number for each expert [E], added to the scores for the choice, and not to the weights. It receives no
            gradient; `update_bias` moves it. None, the default, adds nothing.
        groups: the number of groups, of equal size and one after the other, that the experts form. A token then goes to
            experts of `top_groups` groups only. None, the default, allows for any experts.
        top_groups: the number of groups of a token, 1 to `groups`.
        group_best: groups are ranked by the sum of this number of their best scores, with the bias; of all scores
            where a group has fewer.
        scale: multiplies the weights.

    Returns:
        The weights [..., top_k] in float32, and the experts [..., top_k] in int64, the best first. Pass them to
            `octavo.moe.Experts`.

    Raises:
        UnsupportedConfig: `score` is unknown, `top_k`, `groups`, `top_groups`, `group_best` or `scale` is out of range,
            or only one of `groups` and `top_groups` is given.
        UnsupportedShape: the logits have no dims, or the bias is not [E].
        UnsupportedDtype: the logits or the bias have another dtype.
        UnsupportedDevice: the bias is on another device than the logits.

    Example:
        >>> logits = torch.tensor([[0.0, 2.0, 1.0, 2.0]])
        >>> octavo.moe.route(logits, 2)
        (tensor([[0.5000, 0.5000]]), tensor([[1, 3]]))
        >>> weights, index = octavo.moe.route(logits, 2, score="sigmoid", bias=torch.tensor([1.0, 0.0, 0.0, 0.0]))
        >>> index
        tensor([[0, 1]])
    """
    logits = checked_logits("route", logits)
    check_factor(scale, what="scale")
    size = group_size(logits.shape[-1], top_k, score, normalize, groups, top_groups, group_best)
    normalize = top_k > 1 if normalize is None else normalize
    x = logits.float()
    if score == "softmax" and normalize and bias is None and groups is None:
        index = _largest(x.detach(), top_k)
        return _scaled(x.gather(-1, index).softmax(-1), scale), index  # the same, and never a sum of zeros
    scores = scores_of(x, score)
    ranked, biased = x.detach(), scores.detach()
    if bias is not None:
        check_input("route", bias, "bias")
        if bias.shape != logits.shape[-1:]:
            raise UnsupportedShape(f"The bias is [{logits.shape[-1]}], one for each expert, got {tuple(bias.shape)}.")
        if bias.device != logits.device:
            raise UnsupportedDevice(
                f"The logits are on {logits.device} and the bias on {bias.device}. Move them together."
            )
        ranked = biased = biased + bias.detach().float()
    if groups is None or top_groups is None:
        index = _largest(ranked, top_k)
    else:
        best = _by_group(biased, size).topk(min(group_best, size)).values.sum(-1)
        index = _largest_inside(ranked, _largest(best, top_groups), size, top_k)
    weights = scores.gather(-1, index)
    return _scaled(shares(weights) if normalize else weights, scale), index


def counts(index: Tensor, num_experts: int, tokens: Tensor | int | None = None) -> Tensor:
    """Count the assignments of each expert.

    Args:
        index: the experts of each token [..., K], int32 or int64. Entries out of range, such as -1, are not counted.
        num_experts: the number of experts.
        tokens: the number of tokens that count, in the order of the flattened leading dims: an int, or an integer
            tensor of one element on the device. None, the default, counts all.

    Returns:
        The counts [num_experts], int64, on the device of the index.

    Raises:
        UnsupportedConfig: `num_experts` is no number from 1 up, or `tokens` none from 0 up.
        UnsupportedDtype: `index` or `tokens` has another dtype.
        UnsupportedShape: `index` has no dims, or `tokens` more than one element.

    Example:
        >>> octavo.moe.counts(torch.tensor([[0, 2], [2, 1], [2, -1]]), 4)
        tensor([1, 1, 3, 0])
    """
    check_whole(num_experts, what="The number of experts")
    assignments = checked_index("counts", index).reshape(-1, index.shape[-1]).long()
    counted = (assignments >= 0) & (assignments < num_experts)
    if (mask := first(tokens, assignments)) is not None:
        counted = counted & mask
    bins = torch.where(counted, assignments, num_experts).flatten()
    # sums of integers: their order does not matter
    return bins.new_zeros(num_experts + 1).scatter_add(0, bins, torch.ones_like(bins))[:num_experts]


def update_bias(bias: Tensor, counts: Tensor, rate: float = 1e-3, *, group: Group = None) -> None:
    """Move the bias of each expert by `rate`, in place: up if the expert had fewer assignments than the mean, down if
    more.

    With this bias `route` balances the load without an auxiliary loss. Call it once for each optimizer step, with the
    counts of all its tokens: sum the counts of microbatches before, and pass the group of the ranks with other tokens.

    Args:
        bias: the bias [E] of `route`, in float32.
        counts: the assignments of each expert [E], such as `MoE.load` or a result of `counts`.
        rate: how far the bias moves, a number from 0 up.
        group: the ranks whose counts are summed first, as in `octavo.step`, so that all move the bias alike: a
            ProcessGroup, its name, a DeviceMesh of one dim or (mesh, dim). None, the default, takes the counts as they
            are.

    Raises:
        UnsupportedConfig: the rate is no finite number from 0 up.
        UnsupportedShape: the bias and the counts have two shapes.
        UnsupportedDtype: the bias is not float32, whose steps a bias in fewer bits would round away; or an argument is
            no tensor, such as the `expert_bias` of an `octavo.MoE` without one.
        UnsupportedDevice: the bias and the counts are on two devices.

    Example:
        >>> bias = torch.zeros(3)
        >>> octavo.moe.update_bias(bias, torch.tensor([5, 3, 1]), rate=0.125)
        >>> bias
        tensor([-0.1250,  0.0000,  0.1250])
    """
    if not isinstance(bias, Tensor):
        way_out = " This octavo.MoE was built without expert_bias=True." if bias is None else ""
        raise UnsupportedDtype(f"update_bias takes a bias as a tensor, got {type(bias).__name__}.{way_out}")
    if not isinstance(counts, Tensor):
        raise UnsupportedDtype(f"update_bias takes counts as a tensor, got {type(counts).__name__}.")
    check_factor(rate, what="rate")
    if counts.dtype == torch.bool:
        raise UnsupportedDtype(
            "update_bias takes counts as numbers, got torch.bool. Pass MoE.load, or octavo.moe.counts."
        )
    if bias.shape != counts.shape or bias.dim() != 1:
        raise UnsupportedShape(
            f"update_bias takes a bias [E] and counts [E], got {tuple(bias.shape)} and {tuple(counts.shape)}."
        )
    if bias.dtype != torch.float32:
        raise UnsupportedDtype(
            f"update_bias takes a bias in float32, got {bias.dtype}. Keep the bias itself in float32: the update is in "
            "place, and would be lost with a cast made for this call."
        )
    if bias.device != counts.device:
        raise UnsupportedDevice(f"The bias is on {bias.device} and the counts on {counts.device}. Move them together.")
    with torch.no_grad():
        if group is not None and size_of(name := name_of(group)) > 1:
            counts = total(counts, name, "update_bias")
        bias.add_((counts.sum() - counts * counts.shape[0]).sign(), alpha=rate)


# -- scores ------------------------------------------------------------------------------------------------------------


def scores_of(x: Tensor, score: str) -> Tensor:
    """Return the scores of logits in float32."""
    if score == "softmax":
        return x.softmax(-1)
    if score == "sigmoid":
        return x.sigmoid()
    # two branches, each with an argument at which its gradient is finite
    steep = x < STEEP
    return torch.where(steep, (0.5 * x).exp(), F.softplus(torch.where(steep, STEEP, x)).sqrt())


def shares(scores: Tensor) -> Tensor:
    """Divide the last dim by its sum."""
    return scores / (scores.sum(-1, keepdim=True) + SMALLEST)


def first(tokens: Tensor | int | None, rows: Tensor) -> Tensor | None:
    """Return which rows [T, ...] are among the first `tokens`, as a mask [T, 1]; None if all count."""
    if tokens is None:
        return None
    number = torch.arange(rows.shape[0], device=rows.device, dtype=torch.int64)
    return number[:, None] < checked_tokens(tokens, rows.device)


def checked_tokens(tokens: Tensor | int, device: torch.device) -> Tensor | int:
    if isinstance(tokens, int) and not isinstance(tokens, bool):
        check_whole(tokens, what="tokens", least=0)
        return tokens
    if not isinstance(tokens, Tensor) or tokens.dtype not in (torch.int32, torch.int64):
        got = tokens.dtype if isinstance(tokens, Tensor) else type(tokens).__name__
        way_out = "For a mask, pass x[mask] alone." if got == torch.bool else "Cast it: tokens.long(), int(tokens)."
        raise UnsupportedDtype(f"tokens is an int, or an int32 or int64 tensor of one element, got {got}. {way_out}")
    if tokens.numel() != 1:
        raise UnsupportedShape(
            f"tokens is one number, how many of all rows come before the padding, got a tensor {tuple(tokens.shape)}. "
            "Pack sequences of these lengths one after the other, and pass the sum of the lengths."
        )
    if tokens.device != device:
        raise UnsupportedDevice(f"tokens is on {tokens.device} and the data on {device}. Move it, or pass an int.")
    return tokens.reshape(())


def _scaled(weights: Tensor, scale: float) -> Tensor:
    return weights if scale == 1.0 else weights * scale


# -- the choice --------------------------------------------------------------------------------------------------------


def _largest(x: Tensor, k: int) -> Tensor:
    """Return the indices of the k largest, in descending order; of equal ones, those with lower indices. torch.topk
    does not promise that order."""
    return x.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def _by_group(x: Tensor, size: int) -> Tensor:
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)


def _largest_inside(x: Tensor, groups: Tensor, size: int, k: int) -> Tensor:
    """Return the indices of the k largest in these groups. Experts of other groups are left out, not masked: none of
    them is chosen, whatever the numbers are."""
    groups = groups.sort(dim=-1).values  # so that of equal experts the first has the lower index
    inside = _by_group(x, size).gather(-2, groups[..., None].expand(*groups.shape, size)).flatten(-2)
    found = _largest(inside, k)
    group = groups.gather(-1, torch.div(found, size, rounding_mode="floor"))
    return group * size + found % size


# -- checks ------------------------------------------------------------------------------------------------------------


def checked_logits(title: str, logits: Tensor) -> Tensor:
    logits = arrived(logits)
    check_input(title, logits, "logits")
    if logits.dim() < 1 or logits.shape[-1] < 1:
        raise UnsupportedShape(f"{title} takes logits [..., E] for at least one expert, got {tuple(logits.shape)}.")
    return logits


def checked_index(title: str, index: Tensor) -> Tensor:
    if not isinstance(index, Tensor) or index.dtype not in (torch.int32, torch.int64):
        got = index.dtype if isinstance(index, Tensor) else type(index).__name__
        raise UnsupportedDtype(
            f"{title} takes an index as a tensor of int32 or int64, got {got}. {_way_to_an_index(index)}"
        )
    if index.dim() < 1 or index.shape[-1] < 1:
        raise UnsupportedShape(f"{title} takes an index [..., K] with K from 1 up, got {tuple(index.shape)}.")
    return index


def _way_to_an_index(found: object) -> str:
    """Return the way out for an index of another dtype. A cast of a mask or of weights would be an index too, of the
    wrong experts."""
    if isinstance(found, Tensor) and found.dtype == torch.bool:
        return "Make one of a mask by torch.where(mask, torch.arange(E, device=mask.device), -1)."
    if isinstance(found, Tensor) and found.is_floating_point():
        return "octavo.moe.route returns weights first, then the index."
    return "Pass a tensor, cast by .long()."


def _check_number(name: str, value: object, most: int, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise UnsupportedConfig(f"{name} is a number from 1 to {most}, {what}; got {value!r}.")


def group_size(
    experts: int,
    top_k: int,
    score: str,
    normalize: bool | None,
    groups: int | None,
    top_groups: int | None,
    group_best: int,
) -> int:
    """Check the settings of `route`, and return the number of experts in a group."""
    check_choice(score, SCORES, what="score")
    check_choice(normalize, (True, False, None), what="normalize")
    _check_number("top_k", top_k, experts, "the number of experts")
    if isinstance(group_best, bool) or not isinstance(group_best, int) or group_best < 1:
        raise UnsupportedConfig(f"group_best is the number of scores that rank a group, 1 or more; got {group_best!r}.")
    if groups is None and top_groups is None:
        return experts
    if groups is None or top_groups is None:
        given = f"groups={groups}, top_groups={top_groups}"
        raise UnsupportedConfig(f"A choice by groups needs both groups and top_groups, got {given}.")
    _check_number("groups", groups, experts, "the number of experts")
    _check_number("top_groups", top_groups, groups, "the number of groups")
    if experts % groups:
        raise UnsupportedConfig(f"groups divides the number of experts, {experts}, got {groups}.")
    _check_number("top_k", top_k, top_groups * experts // groups, "the number of experts in top_groups groups")
    return experts // groups
