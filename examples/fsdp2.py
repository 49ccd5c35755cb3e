"""Train over several processes with FSDP2, which sends the weights as FP8 codes.

    torchrun --nproc-per-node 2 examples/fsdp2.py               # over gloo on a CPU; over NCCL where there are GPUs
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-endpoint host:29500 --rdzv-backend c10d examples/fsdp2.py

It was run over gloo on CPUs, and never over several GPUs.
"""

import argparse
import gc
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import octavo
from octavo.demo import corpus
from octavo.demo.gpt import GPT, Shape
from octavo.distributed import gather_codes


def train(settings):
    on_gpu = torch.cuda.is_available()
    device = f"cuda:{os.environ['LOCAL_RANK']}" if on_gpu else "cpu"
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    mesh = init_device_mesh(device.split(":")[0], (dist.get_world_size(),), mesh_dim_names=("dp",))

    model = GPT(Shape(width=64, layers=2, heads=4, context=64), seed=0, device=device)  # equal on all ranks
    report = octavo.convert(model, settings.recipe)
    gather_codes(model)  # after convert, and before fully_shard
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)  # of the shards
    octavo.attach(model, optimizer, group=mesh.get_group())  # ranks agree on the scales of fp8-delayed

    text, _ = corpus.load()
    losses = []
    batches = corpus.batches(text, steps=settings.steps, batch=4, context=64, seed=dist.get_rank())
    for batch in batches:  # another batch on each rank
        batch = batch.to(device)
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    if dist.get_rank() == 0:
        print(report.summary())
        print(f"loss {losses[0]:.3f} to {losses[-1]:.3f} on {dist.get_world_size()} ranks")
    dist.barrier()
    return losses


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="fp8-delayed")
    parser.add_argument("--steps", type=int, default=15)
    losses = train(parser.parse_args(arguments))
    gc.collect()  # FSDP2's objects hold each other, and the group that ends here
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
