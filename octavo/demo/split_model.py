"""`octavo train --parallel pp=2,dp=2,fsdp=2,tp=2`: one run on several ranks that torchrun has started.

The layers of a recipe are split over the tp ranks: the projections to q, k and v by heads, MLPs by features. The dp and
fsdp ranks have parts of each batch; the dp ranks average their gradients, and FSDP2 shards parameters over the fsdp
ranks. Each pp rank has some of the blocks (`octavo.demo.pipeline_stages`). The bf16 run is plain torch, whole on every
tp rank.
"""

import argparse
import contextlib
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from octavo._torch.tensors import local_part
from octavo.communication.collectives import total
from octavo.communication.groups import name_of, process_group, rank_of
from octavo.communication.tensor_parallel import own_part
from octavo.demo.gpt import Attention
from octavo.demo.transformer import MLP
from octavo.distributed.gather_codes import gather_codes
from octavo.errors import UnsupportedConfig
from octavo.ops.linear import Linear

TIMEOUT = timedelta(seconds=300)  # for which a rank waits for another
WHERE = "octavo train"
KINDS = ("pp", "dp", "fsdp", "tp")  # of ranks; those of the last are next to each other


@dataclass(frozen=True)
class Ranks:
    """How many ranks there are of each kind, and the names of this rank's groups."""

    tp: int
    dp: int
    tp_group: str
    dp_group: str
    everyone: str
    fsdp: int = 1
    pp: int = 1
    fsdp_group: str = ""
    pp_group: str = ""
    stage_group: str = ""  # the ranks with the same blocks

    @property
    def is_first(self) -> bool:
        """Whether this rank prints and writes files."""
        return rank_of(self.everyone) == 0

    def own_rows(self, batch: Tensor) -> Tensor:
        """Return this rank's part of a batch."""
        parts = self.dp * self.fsdp
        if batch.shape[0] % parts:
            raise UnsupportedConfig(
                f"--batch {batch.shape[0]} does not divide by the {parts} data-parallel ranks of --parallel. Choose "
                f"a multiple of {parts}."
            )
        if parts == 1:
            return batch
        at = self.fsdp * (rank_of(self.dp_group) if self.dp > 1 else 0)
        return batch.chunk(parts)[at + (rank_of(self.fsdp_group) if self.fsdp > 1 else 0)]

    def mean(self, x: Tensor) -> Tensor:
        """Return the mean over the ranks that have other parts of a batch."""
        for size, group in ((self.dp, self.dp_group), (self.fsdp, self.fsdp_group)):
            x = total(x, group, WHERE) / size if size > 1 else x
        return x

    def wait(self) -> None:
        """Wait until all ranks are here."""
        dist.barrier()

    def shard(self, model: Any) -> None:
        """Shard the parameters of a model with blocks over the fsdp ranks."""
        if self.fsdp == 1:
            return
        group, kind = process_group(self.fsdp_group), next(model.parameters()).device.type
        mesh = DeviceMesh.from_group(group, kind, mesh_dim_names=("fsdp",))
        gather_codes(model)
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)

    def finish(self, model: nn.Module, limit: float) -> None:
        """Average the gradients over the dp ranks, and clip their norm over all layers of all ranks."""
        split = {
            id(layer.weight) for layer in model.modules() if isinstance(layer, Linear) and layer._split_over_ranks()
        }
        # FSDP2 has averaged over the fsdp ranks
        gradients = [(local_part(p.grad), id(p) in split) for p in model.parameters() if p.grad is not None]
        for gradient, _ in gradients:
            if self.dp > 1:
                gradient.copy_(total(gradient, self.dp_group, WHERE) / self.dp)
        # of parameters that all tp ranks have, and of parts
        squares = torch.zeros(2, device=gradients[0][0].device, dtype=torch.float32)
        for gradient, is_part in gradients:
            squares[int(is_part)] += gradient.float().square().sum()
        if self.fsdp > 1:
            squares = total(squares, self.fsdp_group, WHERE)
        square = squares[:1] + (total(squares[1:], self.tp_group, WHERE) if self.tp > 1 else squares[1:])
        if self.pp > 1:
            square = total(square, self.pp_group, WHERE)
        scale = (limit / (square[0].sqrt() + 1e-6)).clamp(max=1.0)
        for gradient, _ in gradients:
            gradient.mul_(scale)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--parallel", default=None, metavar="KIND=N,...",
        help="tp=N splits layers over N ranks, dp=N batches, fsdp=N batches and parameters, pp=N the depth; under "
        "torchrun --nproc-per-node; default: one process",
    )  # fmt: skip


def sizes(text: str) -> dict[str, int]:
    """Return the number of ranks of each kind, from an option's text."""
    found: dict[str, int] = {}
    for part in text.split(","):
        match = re.fullmatch(rf"\s*({'|'.join(KINDS)})\s*=\s*([0-9]{{1,4}})\s*", part)
        if match is None or match[1] in found or int(match[2]) < 1:
            raise UnsupportedConfig(
                f"--parallel takes {', '.join(f'{kind}=N' for kind in KINDS)}, each from 1 up and at most once, got "
                f"{text!r}."
            )
        found[match[1]] = int(match[2])
    return {kind: found.get(kind, 1) for kind in KINDS}


def start(arguments: argparse.Namespace, device: torch.device) -> Ranks | None:
    """Join the ranks that torchrun has started; None without --parallel."""
    if arguments.parallel is None:
        return None
    numbers = sizes(arguments.parallel)
    text, needed = arguments.parallel, math.prod(numbers.values())
    world = _from_torchrun("WORLD_SIZE", 1, 2**31, "1")
    if world != needed:
        raise UnsupportedConfig(
            f"--parallel {text} needs {needed} ranks, and there {'is' if world == 1 else 'are'} {world}. Run "
            f"torchrun --nproc-per-node {needed} -m octavo train --parallel {text}."
        )
    if needed > numbers["dp"] and arguments.out is not None:
        raise UnsupportedConfig(
            f"--out saves whole models, and --parallel {text} leaves each rank a part. Use dp=N alone, or leave out "
            "--out."
        )
    if needed > numbers["dp"] and arguments.model != "gpt":
        raise UnsupportedConfig(
            f"--parallel splits the gpt, and batches of every model. Use dp=N alone with {arguments.model}."
        )
    if numbers["fsdp"] * numbers["pp"] > 1 and arguments.compile:
        raise UnsupportedConfig(
            f"--parallel {text} runs in eager mode. Leave out --compile, or use dp=N and tp=N alone."
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
    return joined(numbers["tp"], numbers["dp"], device, numbers["fsdp"], numbers["pp"])


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


def joined(tp: int, dp: int, device: torch.device, fsdp: int = 1, pp: int = 1) -> Ranks:
    """Make the groups of all ranks, which have joined already."""
    mesh = init_device_mesh(device.type, (pp, dp, fsdp, tp), mesh_dim_names=KINDS)
    names = {kind: name_of((mesh, kind)) for kind in KINDS}
    everyone = name_of(dist.group.WORLD)
    stages = [dist.new_group(list(range(at * dp * fsdp * tp, (at + 1) * dp * fsdp * tp))) for at in range(pp)]
    stage = name_of(stages[rank_of(names["pp"])]) if pp > 1 else everyone
    return Ranks(tp, dp, names["tp"], names["dp"], everyone, fsdp, pp, names["fsdp"], names["pp"], stage)


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
        if ranks.is_first:
            yield
            return
        arguments.json = arguments.html = None
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            yield
    finally:
        dist.destroy_process_group()
