"""Times a step of FSDP2 over NCCL with one rank, values gathered against codes, and the memory at its peak.

python -m benchmarks.fsdp_codes --recipe fp8-current
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import octavo
from octavo.distributed import gather_codes

WARM, TIMED = 5, 20


def built(recipe: str, codes: bool, layers: int, width: int) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)]).cuda()
    octavo.convert(model, recipe)
    if codes:
        gather_codes(model)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    settings = {"mesh": init_device_mesh("cuda", (1,)), "mp_policy": policy}
    for layer in model:
        fully_shard(layer, **settings)
    return fully_shard(model, **settings)


def measured(recipe: str, codes: bool, layers: int, width: int, tokens: int) -> tuple[float, float]:
    """Milliseconds of a step, and MiB at its peak."""
    model = built(recipe, codes, layers, width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    x = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)
    times = []
    torch.cuda.reset_peak_memory_stats()
    for _ in range(WARM + TIMED):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        octavo.step(model, dist.group.WORLD)
        torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - begin))
    return sorted(times[WARM:])[TIMED // 2], torch.cuda.max_memory_allocated() / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="fp8-current")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=8192)
    plan = parser.parse_args()
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    sizes = plan.layers, plan.width, plan.tokens
    for codes in (False, True):
        time_of_step, peak = measured(plan.recipe, codes, *sizes)
        print(f"{plan.recipe} {'codes' if codes else 'values'}: {time_of_step:.2f} ms, {peak:.0f} MiB", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
