"""The small GPT as a pipeline: each pp rank has some of its blocks, and runs a batch in microbatches (1F1B)."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from octavo.communication.groups import process_group, rank_of, ranks_in
from octavo.demo.gpt import BYTES, GPT
from octavo.errors import UnsupportedConfig

Loss = Callable[[Tensor, Tensor], Tensor]  # of logits and targets


class Stage(nn.Module):
    """Some of the blocks of a GPT; the first stage also has the embedding, and the last one the head."""

    def __init__(self, model: GPT, at: int, of: int) -> None:
        super().__init__()
        layers = list(model.blocks)
        if len(layers) < of:
            raise UnsupportedConfig(
                f"--parallel pp={of} gives each stage a block, and the model has {len(layers)}. Choose more layers by "
                "--size, or fewer stages."
            )
        self.bytes = model.bytes if at == 0 else nn.Identity()
        self.blocks = nn.Sequential(*layers[at * len(layers) // of : (at + 1) * len(layers) // of])
        self.norm: nn.Module = model.norm if at == of - 1 else nn.Identity()
        self.head: nn.Module = model.head if at == of - 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            y: Tensor = self.head(self.norm(self.blocks(self.bytes(x))))
        return y


class Pipeline:
    """A stage with the others of its pipeline.

    Args:
        stage: this rank's.
        group: the name of the group of stages.
        rows: how many rows of a batch the pipeline gets.
        width: of the tensors between stages.
    """

    def __init__(self, stage: Stage, group: str, rows: int, width: int) -> None:
        self.stage, self.width, self.group = stage, width, process_group(group)
        self.at, self.ranks = rank_of(group), ranks_in(group)
        self.microbatches = next(n for n in range(min(rows, 2 * len(self.ranks)), 0, -1) if rows % n == 0)
        self.schedule: Any = None

    def backward(self, inputs: Tensor, targets: Tensor, loss: Loss) -> Tensor:
        """Run a batch forward and backward, and return its loss on all stages."""
        last = len(self.ranks) - 1
        if self.schedule is None:
            stage = PipelineStage(self.stage, self.at, last + 1, inputs.device, group=self.group)
            self.schedule = Schedule1F1B(stage, self.microbatches, loss_fn=loss)
        losses: list[Tensor] = []
        given = (inputs,) if self.at == 0 else ()
        own: Any = {"target": targets, "losses": losses} if self.at == last else {}
        self.schedule.step(*given, **own, return_outputs=False)
        found = torch.zeros((), device=inputs.device, dtype=torch.float32)
        if losses:
            found = torch.stack(losses).mean().detach().float()
        dist.broadcast(found, self.ranks[last], group=self.group)
        return found

    def __call__(self, x: Tensor) -> Tensor:
        """Return the logits of all stages together, without gradients."""
        for at, source in enumerate(self.ranks):
            if at == self.at:
                y = self.stage(x).float().contiguous()
            else:
                width = BYTES if at == len(self.ranks) - 1 else self.width
                y = torch.empty((*x.shape[:2], width), device=x.device, dtype=torch.float32)
            dist.broadcast(y, source, group=self.group)
            x = y
        return x
