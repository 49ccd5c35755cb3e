"""Losses of a router: `aux_loss` balances the load of the experts, `z_loss` keeps logits small."""

import torch
from torch import Tensor

from octavo.communication.collectives import total
from octavo.communication.groups import Group, name_of, size_of
from octavo.errors import UnsupportedShape, check_choice
from octavo.moe.routing import SCORES, checked_index, checked_logits, checked_tokens, counts, first, scores_of, shares

GIVEN = "given"  # a score: the logits are probabilities


def aux_loss(
    logits: Tensor,
    index: Tensor,
    *,
    score: str = "softmax",
    tokens: Tensor | int | None = None,
    group: Group = None,
) -> Tensor:
    """Return a loss that is smaller the more evenly the router spreads its tokens over the experts.

    It is E · Σ f_i · P_i over the E experts: f_i is the share of assignments that expert i got, P_i its mean
    probability. The loss is 1 if both are even. Gradients flow to the logits through P. The function reads nothing on
    the host.

    Args:
        logits: the logits [..., E] of the router, in float32, bfloat16 or float16.
        index: the experts of each token [..., K], as `route` returned them, in int64 or int32. Entries out of range are
            assignments of no expert.
        score: the score function of the router. Scores of "sigmoid" and "sqrtsoftplus" are divided by their sum over
            all experts, which gives probabilities. With "given" the logits are probabilities already, of a router of
            your own, and are taken as they are.
        tokens: the number of tokens that count, in the order of the flattened leading dims: an int, or an integer
            tensor of one element on the device, which a CUDA graph reads at every replay. Tokens after them are padding
            and add nothing, whatever their logits are. None, the default, counts all.
        group: the ranks whose tokens count together, as in `octavo.step`: the mean over ranks of the loss is then that
            of one process with all tokens, and so is the mean of its gradients, which data parallelism takes. None,
            the default, counts those of this rank alone.

    Returns:
        The loss, a float32 tensor without dims. It is 0 if no token counts.

    Raises:
        UnsupportedConfig: `score` is unknown.
        UnsupportedShape: the leading dims of the logits and the index differ, or `tokens` has more than one element.
        UnsupportedDtype: an argument has another dtype.

    Example:
        >>> logits = torch.zeros(4, 2, requires_grad=True)
        >>> octavo.moe.aux_loss(logits, torch.tensor([[0], [1], [0], [1]]))
        tensor(1., grad_fn=<MulBackward0>)
    """
    check_choice(score, (*SCORES, GIVEN), what="score")
    logits, index = checked_logits("aux_loss", logits), checked_index("aux_loss", index)
    if logits.shape[:-1] != index.shape[:-1]:
        raise UnsupportedShape(
            f"aux_loss takes logits [..., E] and an index [..., K] of the same tokens, got {tuple(logits.shape)} and "
            f"{tuple(index.shape)}."
        )
    name = None if group is None else name_of(group)
    return balance(logits, counts(index, logits.shape[-1], tokens), index.shape[-1], score, tokens, name)


def balance(
    logits: Tensor, load: Tensor, assignments: int, score: str, tokens: Tensor | int | None, group: str | None = None
) -> Tensor:
    """Return `aux_loss`, given the number of assignments that each expert got, and the assignments of a token."""
    rows, mask, number = _counted(logits, tokens)
    if group is not None and size_of(group) > 1:
        load, number = _mean_of_ranks(load, number, group)
    if score == GIVEN:
        probs = rows
    else:
        probs = rows.softmax(-1) if score == "softmax" else shares(scores_of(rows, score))
    probs = probs if mask is None else torch.where(mask, probs, 0.0)
    return (load.float() / (number * assignments) * (probs.sum(0) / number)).sum() * rows.shape[-1]


def z_loss(logits: Tensor, *, tokens: Tensor | int | None = None, group: Group = None) -> Tensor:
    """Return the mean over tokens of log(Σ exp(logits))², which keeps the logits of a router from growing.

    Args:
        logits: the logits [..., E] of the router, in float32, bfloat16 or float16.
        tokens: the number of tokens that count, as in `aux_loss`.
        group: the ranks whose tokens count together, as in `aux_loss`.

    Returns:
        The loss, a float32 tensor without dims. It is 0 if no token counts.

    Raises:
        UnsupportedShape: the logits have no dims, or `tokens` has more than one element.
        UnsupportedDtype: an argument has another dtype.

    Example:
        >>> octavo.moe.z_loss(torch.zeros(4, 8))
        tensor(4.3241)
    """
    rows, mask, number = _counted(checked_logits("z_loss", logits), tokens)
    name = None if group is None else name_of(group)
    if name is not None and size_of(name) > 1:
        _, number = _mean_of_ranks(rows.new_zeros(0), number, name)
    squares = rows.logsumexp(-1, keepdim=True).square()
    return (squares if mask is None else torch.where(mask, squares, 0.0)).sum() / number


def _mean_of_ranks(load: Tensor, number: Tensor | int, group: str) -> tuple[Tensor, Tensor]:
    """Return the mean over ranks of the assignments of each expert, and of the number of tokens, in one collective."""
    own = torch.full((1,), number, device=load.device, dtype=torch.float64) if isinstance(number, int) else number
    both = torch.cat([load.double(), own.reshape(1).double()])
    mean = (total(both, group, "aux_loss") / size_of(group)).float()  # sums of integers: exact
    return mean[:-1], mean[-1]


def _counted(logits: Tensor, tokens: Tensor | int | None) -> tuple[Tensor, Tensor | None, Tensor | int]:
    """Return the logits [T, E] in float32, with zeros for padding so that its NaN has no gradient; the mask of tokens
    that count, or None for all; and their number, at least 1."""
    rows = logits.reshape(-1, logits.shape[-1]).float()
    if tokens is None:
        return rows, None, max(rows.shape[0], 1)
    mask, number = first(tokens, rows), checked_tokens(tokens, rows.device)
    assert mask is not None
    most = max(rows.shape[0], 1)
    number = number.clamp(1, most).float() if isinstance(number, Tensor) else min(max(number, 1), most)
    return torch.where(mask, rows, 0.0), mask, number
