"""Selective checkpoints: what they keep of a forward, by the operators that gave it."""

import functools

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts


def saving(ops):
    """A policy that keeps what these operators give and recomputes the rest."""

    def policy(_, op, *__, **___):
        return CheckpointPolicy.MUST_SAVE if op in ops else CheckpointPolicy.PREFER_RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, policy)
