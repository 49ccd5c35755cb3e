"""`octavo train --parallel tp=2,dp=2`: one run on several ranks that torchrun has started.

The layers of a recipe are split over the tp ranks: the projections to q, k and v by heads, MLPs by features. The dp
ranks have parts of each batch, and average their gradients. The bf16 run is plain torch, whole on every tp rank.
"""

import argparse
import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from octavo.communication.collectives import total
from octavo.communication.groups import name_of, rank_of
from octavo.communication.tensor_parallel import own_part
from octavo.demo.gpt import Attention
from octavo.demo.transformer import MLP
from octavo.errors import UnsupportedConfig
from octavo.ops.linear import Linear

TIMEOUT = timedelta(seconds=300)  # for which a rank waits for another
WHERE = "octavo train"


@dataclass(frozen=True)
class Ranks:
    """How many ranks there are of each kind, and the names of this rank's groups."""

    tp: int
    dp: int
    tp_group: str
    dp_group: str
    everyone: str

    def own_rows(self, batch: Tensor) -> Tensor:
        """Return this rank's part of a batch."""
        if batch.shape[0] % self.dp:
            raise UnsupportedConfig(
                f"--batch {batch.shape[0]} does not divide by the {self.dp} data-parallel ranks of --parallel. Choose "
                f"a multiple of {self.dp}."
            )
        return batch.chunk(self.dp)[rank_of(self.dp_group)] if self.dp > 1 else batch

    def mean(self, x: Tensor) -> Tensor:
        """Return the mean over the data-parallel ranks."""
        return total(x, self.dp_group, WHERE) / self.dp if self.dp > 1 else x

    def finish(self, model: nn.Module, limit: float) -> None:
        """Average the gradients over the data-parallel ranks, and clip their norm over all layers of all ranks."""
        split = {
            id(layer.weight) for layer in model.modules() if isinstance(layer, Linear) and layer._split_over_ranks()
        }
        gradients = [(p.grad, id(p) in split) for p in model.parameters() if p.grad is not None]
        for gradient, _ in gradients:
            gradient.copy_(self.mean(gradient))
        # of parameters that all ranks have, and of parts
        squares = torch.zeros(2, device=gradients[0][0].device, dtype=torch.float32)
        for gradient, is_part in gradients:
            squares[int(is_part)] += gradient.float().square().sum()
        parts = total(squares[1:], self.tp_group, WHERE) if self.tp > 1 else squares[1:]
        norm = (squares[0] + parts[0]).sqrt()
        scale = (limit / (norm + 1e-6)).clamp(max=1.0)
        for gradient, _ in gradients:
            gradient.mul_(scale)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--parallel", default=None, metavar="tp=N,dp=N",
        help="split layers over N ranks and batches over N, under torchrun --nproc-per-node; default: one process",
    )  # fmt: skip


def sizes(text: str) -> tuple[int, int]:
    """Return the numbers of tensor-parallel and data-parallel ranks that an option names."""
    found = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(tp|dp)\s*=\s*([0-9]{1,4})\s*", part)
        if match is None or match[1] in found or int(match[2]) < 1:
            raise UnsupportedConfig(f"--parallel takes tp=N,dp=N, each from 1 up and at most once, got {text!r}.")
        found[match[1]] = int(match[2])
    return found.get("tp", 1), found.get("dp", 1)


def start(arguments: argparse.Namespace, device: torch.device) -> Ranks | None:
    """Join the ranks that torchrun has started; None without --parallel."""
    if arguments.parallel is None:
        return None
    tp, dp = sizes(arguments.parallel)
    world = _from_torchrun("WORLD_SIZE", 1, 2**31, "1")
    if world != tp * dp:
        raise UnsupportedConfig(
            f"--parallel tp={tp},dp={dp} needs {tp * dp} ranks, and there {'is' if world == 1 else 'are'} {world}. Run "
            f"torchrun --nproc-per-node {tp * dp} -m octavo train --parallel tp={tp},dp={dp}."
        )
    if arguments.out is not None:
        raise UnsupportedConfig("--parallel saves no checkpoints. Leave out --out.")
    if arguments.model != "gpt" and tp > 1:
        raise UnsupportedConfig(
            f"--parallel splits the layers of gpt, and batches of every model. Use tp=1 with {arguments.model}."
        )
    if device.type == "cuda":
        number = _from_torchrun("LOCAL_RANK", 0, torch.cuda.device_count() - 1, "0")
        torch.cuda.set_device(number)
    if not dist.is_initialized():
        _from_torchrun("RANK", 0, world - 1)
        _from_torchrun("MASTER_PORT", 0, 65535)
        if "MASTER_ADDR" not in os.environ:
            _refuse_unset("MASTER_ADDR")
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT)
    return joined(tp, dp, device)


def _from_torchrun(name: str, least: int, most: int, default: str | None = None) -> int:
    """Return a number that torchrun has set in the environment; without a default it must be set."""
    text = os.environ.get(name, default)
    if text is None:
        _refuse_unset(name)
    if not re.fullmatch(r"[0-9]{1,18}", text) or not least <= int(text) <= most:
        raise UnsupportedConfig(
            f"{name} in the environment is a whole number from {least} to {most}, got {text!r}. Start the command with "
            "torchrun, which sets it, or unset it."
        )
    return int(text)


def _refuse_unset(name: str) -> NoReturn:
    raise UnsupportedConfig(
        f"--parallel joins ranks that torchrun has started, and {name} is not set in the environment. Run torchrun "
        "--nproc-per-node N -m octavo train."
    )


def joined(tp: int, dp: int, device: torch.device) -> Ranks:
    """Make the groups of all ranks, which have joined already."""
    mesh = init_device_mesh(device.type, (dp, tp), mesh_dim_names=("dp", "tp"))
    return Ranks(tp, dp, name_of((mesh, "tp")), name_of((mesh, "dp")), name_of(dist.group.WORLD))


def split(model: nn.Module, ranks: Ranks) -> None:
    """Leave each rank its part of a converted GPT's layers. Layers that a recipe does not convert stay whole."""
    if ranks.tp == 1:
        return
    for module in model.modules():
        if isinstance(module, Attention) and isinstance(module.qkv, Linear) and isinstance(module.out, Linear):
            if module.heads % ranks.tp:
                raise UnsupportedConfig(
                    f"--parallel tp={ranks.tp} splits attention by heads, and {module.heads} do not divide by it."
                )
            module.heads //= ranks.tp
            _split_layer(module.qkv, "column", 3, ranks)
            _split_layer(module.out, "row", 1, ranks)
        elif isinstance(module, MLP) and isinstance(module.up, Linear) and isinstance(module.down, Linear):
            _split_layer(module.up, "column", 1, ranks)
            _split_layer(module.down, "row", 1, ranks)


def _split_layer(layer: Linear, mode: str, blocks: int, ranks: Ranks) -> None:
    layer.set_tensor_parallel_group(ranks.tp_group, mode, column_blocks=blocks)
    assert layer.parallel is not None
    part = own_part(layer.weight.detach(), layer.parallel, 0 if mode == "column" else 1)
    layer.weight = nn.Parameter(part.clone(), layer.weight.requires_grad)
    layer.out_features, layer.in_features = part.shape


@contextlib.contextmanager
def first_rank_speaks(ranks: Ranks | None, arguments: argparse.Namespace) -> Iterator[None]:
    """Let rank 0 alone print and write files, and end the groups."""
    if ranks is None:
        yield
        return
    try:
        if rank_of(ranks.everyone) == 0:
            yield
            return
        arguments.json = arguments.html = None
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            yield
    finally:
        dist.destroy_process_group()
