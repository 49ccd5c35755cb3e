"""Models that transformers and torchtitan split by their own plans, over two processes:
python -m tests.integration plans [NAME ...] [--recipe R].

Each row trains three steps without octavo and converted, on two ranks and in one process, from equal weights. y and the
gradients of the converted model are those of one process but for the order of sums, or as far as those from those of
the unconverted model; its ranks send as many bytes as those of the unconverted model, but for amaxes.

    apart            the largest error of y or of a gradient, against the converted model in one process
    split            the same against the unconverted model, and that of one process

    llama            transformers' Llama: from_pretrained(distributed_config=DistributedConfig(tp_size=2)), then convert
    titan            torchtitan's Llama 3: convert, then parallelize_llama, with FSDP2 over one rank
    titan-sequence   the same, the sequence split between layers
    titan-parts      the same by spmd_types, with plain parts in place of DTensors: Module.parallelize alone, since the
                     FSDP2 of torch 2.13 refuses plain parts
"""

import argparse
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import octavo
from octavo.text import table
from tests.integration.subject import expect

RANKS, STEPS, BATCH, SEQUENCE = 2, 3, 2, 64
RECIPES = ("bf16", "fp8-current", "fp8-delayed", "fp8-block")
NAMES = ("llama", "titan", "titan-sequence", "titan-parts")
PACKAGES = ("transformers", "torchtitan", "accelerate")
# the error of y and of gradients against one process, by the order of sums, which moves a few codes
SUMS = {"bf16": 2e-6, "fp8-block": 5e-3}
# Where a tensor has one scale, ranks do not agree on that of dy of a column layer, nor on any where they have plain
# parts. Then the error against the unconverted model is that of one process, but for so much
ROUNDED = 1.25
# of the bytes of the unconverted model, where torch sums some gradients later and others as gradients of weights
SHARE = {"llama": (1, 1), "titan": (1, 2), "titan-sequence": (0.5, 2), "titan-parts": (1, 1)}
AMAXES = 0.002  # of the bytes: what ranks send to agree on amaxes, which fp8-delayed does at each call that is watched
Split = tuple[nn.Module, AbstractContextManager[Any]]


def errors(found: Tensor, right: Tensor) -> float:
    return ((found - right).norm() / right.norm().clamp_min(1e-30)).item()


# -- transformers ------------------------------------------------------------------------------------------------------


def llama_settings() -> dict[str, Any]:
    return {
        "vocab_size": 256, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.05, "use_cache": False,
    }  # fmt: skip


def llama(folder: Path, split: bool, recipe: str | None) -> Split:
    from transformers import LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    more = {"distributed_config": DistributedConfig(tp_size=RANKS)} if split else {}
    model = LlamaForCausalLM.from_pretrained(folder / "llama", dtype=torch.float32, **more)
    if recipe is not None:
        octavo.convert(model, recipe)
    return model, nullcontext()


def save_llama(folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**llama_settings())).save_pretrained(folder / "llama")


# -- torchtitan --------------------------------------------------------------------------------------------------------


def titan(name: str, split: bool, recipe: str | None) -> Split:
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims, parallel_dims
    from torchtitan.distributed.spmd_types import set_current_spmd_mesh
    from torchtitan.distributed.utils import set_spmd_backend
    from torchtitan.models import llama3
    from torchtitan.models.llama3.sharding import set_llama3_sharding_config

    from tests.integration.titan import initialised, on_cpu

    backend = "spmd_types" if name == "titan-parts" else "partial_dtensor"
    parallel_dims.device_type = "cpu"  # torchtitan takes cuda where it finds no accelerator
    set_spmd_backend(backend)
    config = on_cpu(llama3.model_registry("debugmodel").model)
    set_llama3_sharding_config(config, enable_sp=name != "titan")
    with torch.device("meta"):
        model = config.build()
    model = initialised(model, 0)
    if recipe is not None:
        octavo.convert(model, recipe)
    if not split:
        return model, nullcontext()
    ranks = {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": RANKS, "pp": 1, "ep": 1, "world_size": RANKS}
    dims = ParallelDims(**ranks, spmd_backend=backend)
    dims.build_mesh()
    if backend == "spmd_types":
        model.parallelize(dims)
        return model, set_current_spmd_mesh(dims._spmd_meshes[0])
    model = llama3.parallelize_llama(
        model, parallel_dims=dims,
        training=TrainingConfig(mixed_precision_param="float32", mixed_precision_reduce="float32"),
        parallelism=ParallelismConfig(tensor_parallel_degree=RANKS, spmd_backend=backend),
        compile_config=CompileConfig(enable=False), ac_config=None, dump_folder=tempfile.gettempdir(),
    )  # fmt: skip
    return model, nullcontext()


# -- one rank ----------------------------------------------------------------------------------------------------------


# what a rank receives in a collective, of the bytes of its tensor
SHARES = {"gather": RANKS - 1, "scatter": (RANKS - 1) / RANKS, "reduce": 2 * (RANKS - 1) / RANKS}


class Wire(TorchDispatchMode):
    """Counts the bytes that a rank receives, but for the numbers by which ranks compare their calls."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0.0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), settings: Any = None) -> Any:
        name = str(function).split(".")[1]
        if function.namespace in ("c10d", "_c10d_functional") and not name.startswith(("wait", "_wrap")):
            tensors = [t for a in arguments for t in (a if isinstance(a, list) else [a]) if isinstance(t, Tensor)]
            if tensors[-1].dtype != torch.int64:
                self.bytes += next(share for kind, share in SHARES.items() if kind in name) * tensors[-1].nbytes
        return function(*arguments, **(settings or {}))


def logits(name: str, model: nn.Module, ids: Tensor) -> Tensor:
    if name == "llama":
        return model(input_ids=ids).logits  # type: ignore[no-any-return]
    return model(ids, positions=torch.arange(ids.shape[1]).expand_as(ids))  # type: ignore[no-any-return]


def whole(t: Tensor) -> Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


def trained(name: str, built: Split) -> tuple[dict[str, Tensor], float]:
    """Logits and gradients of the last step, and the bytes that it sent."""
    model, context = built
    with context:
        for step in range(STEPS):
            ids = torch.randint(256, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(step))
            model.zero_grad()
            with Wire() as wire:
                y = logits(name, model, ids)
                dy = torch.randn((*ids.shape, 1), generator=torch.Generator().manual_seed(9)) / y.numel() ** 0.5
                (y * (dy.expand(y.shape) if not isinstance(y, DTensor) else _like(dy, y))).sum().backward()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                octavo.step(model)
        grads = {key: whole(p.grad).detach() for key, p in model.named_parameters()}
        return {"y": whole(y.detach()), **grads}, wire.bytes


def _like(dy: Tensor, y: DTensor) -> DTensor:
    """dy [B, T, 1], which all ranks have, as a DTensor."""
    from torch.distributed.tensor import Replicate

    return DTensor.from_local(dy, y.device_mesh, [Replicate()] * y.device_mesh.ndim, run_check=False)


def compare(name: str, recipe: str, folder: Path) -> list[str]:
    def run(split: bool, used: str | None) -> tuple[dict[str, Tensor], float]:
        return trained(name, llama(folder, split, used) if name == "llama" else titan(name, split, used))

    (exact, _), (one, _) = run(False, None), run(False, recipe)
    (stock, expected), (found, sent) = run(True, None), run(True, recipe)
    apart, of_split, of_one = 0.0, 0.0, 0.0
    for key, value in found.items():
        of_split = max(of_split, errors(value, stock[key]))
        of_one = max(of_one, errors(one[key], exact[key]))
        if name != "titan-parts":  # whose results are parts, and some gradients a part of the sum
            apart = max(apart, errors(value, one[key]))
    expect(apart <= SUMS.get(recipe, 1), f"{name} in {recipe}: {apart:.2g} from one process, bound {SUMS.get(recipe)}")
    what = f"{name} in {recipe}: an error of {of_split:.3g} by the plan, and of {of_one:.3g} in one process"
    expect(of_split <= max(ROUNDED * of_one, SUMS["bf16"]), what)
    share, (least, most) = sent / expected, SHARE[name]
    what = f"{name} in {recipe}: {share:.4f} of the bytes of the unconverted model"
    expect(least <= share <= most + (0 if recipe in SUMS else AMAXES), what)
    figures = ["" if name == "titan-parts" else f"{apart:.1e}", f"{of_split:.4f}", f"{of_one:.4f}"]
    return [name, recipe, *figures, f"{sent:.0f}", f"{share:.3f}"]


def serve(rank: int, folder: str, names: list[str], recipes: list[str]) -> None:
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS}
    os.environ.update({key: str(value) for key, value in ranks.items()})
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    rows = [compare(name, recipe, Path(folder)) for name in names for recipe in recipes]
    if rank == 0:
        print(table(("model", "recipe", "apart", "split", "one process", "bytes", "of stock"), rows), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.integration plans", description=__doc__)
    parser.add_argument("names", nargs="*", default=list(NAMES))
    parser.add_argument("--recipe", action="append", choices=RECIPES, help="may be repeated; all of them by default")
    arguments = parser.parse_args(argv)
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        print(f"Skipped: not installed: {', '.join(missing)}. pip install -r tests/integration/requirements.txt")
        return 2
    print(f"versions: torch {torch.__version__}, {', '.join(f'{name} {version(name)}' for name in PACKAGES)}")
    with tempfile.TemporaryDirectory() as folder:
        save_llama(Path(folder))
        spawn: Callable[..., Any] = torch.multiprocessing.spawn
        spawn(serve, (folder, arguments.names, arguments.recipe or list(RECIPES)), nprocs=RANKS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
