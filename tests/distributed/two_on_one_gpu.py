"""Two processes on one GPU: gloo for control and for the layers' collectives, symmetric memory between the two.

python -m tests.distributed.two_on_one_gpu STORE RANK prints lines of JSON, the last with everything that was tried:
True, or the error. What may end the process comes last. It needs TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1.
"""

import json
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

import octavo

M, K, N = 256, 512, 256


def main(store, rank):
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    torch.cuda.set_device(0)
    dist.init_process_group(
        "cpu:gloo,cuda:gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    report = {}
    for name, attempt in {
        "gloo all-reduce of CUDA tensors": all_reduce,
        "gloo all-gather of CUDA bytes": all_gather,
        "column layer": lambda: layer("column"),
        "row layer": lambda: layer("row"),
        "symmetric memory": symmetric,
        "symmetric memory: one-shot all-reduce": one_shot,
    }.items():
        print(json.dumps(report | {name: "ended the process"}), flush=True)
        try:
            report[name] = bool(attempt())
        except Exception as error:
            report[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        dist.barrier()
    print(json.dumps(report), flush=True)
    os._exit(0)  # a failed backend may not end by itself


def all_reduce():
    x = torch.full((4,), float(dist.get_rank() + 1), device="cuda")
    dist.all_reduce(x)
    return torch.equal(x.cpu(), torch.full((4,), 3.0))


def all_gather():
    x = torch.full((4,), dist.get_rank(), dtype=torch.uint8, device="cuda")
    out = torch.empty(8, dtype=torch.uint8, device="cuda")
    dist.all_gather_into_tensor(out, x)
    return out.tolist() == [0] * 4 + [1] * 4


def symmetric():
    import torch.distributed._symmetric_memory as symm_mem

    x = symm_mem.empty(1024, dtype=torch.float32, device="cuda")
    handle = symm_mem.rendezvous(x, dist.group.WORLD)
    x.fill_(float(dist.get_rank() + 1))
    torch.cuda.synchronize()
    dist.barrier()
    other = handle.get_buffer(1 - dist.get_rank(), (1024,), torch.float32)
    return bool((other == 2 - dist.get_rank()).all())


def one_shot():
    import torch.distributed._symmetric_memory as symm_mem

    x = symm_mem.empty(1024, dtype=torch.float32, device="cuda")
    symm_mem.rendezvous(x, dist.group.WORLD)
    x.fill_(float(dist.get_rank() + 1))
    torch.cuda.synchronize()
    dist.barrier()
    found = torch.ops.symm_mem.one_shot_all_reduce(x, "sum", dist.group.WORLD.group_name)
    return bool((found == 3).all())


def layer(mode):
    """A split layer's y and dw against those of the whole layer, both in fp8-block."""
    torch.manual_seed(0)
    x, dy = (torch.randn(M, n, device="cuda", dtype=torch.bfloat16) for n in (K, N))
    torch.manual_seed(2)
    whole = octavo.Linear(K, N, device="cuda", dtype=torch.bfloat16, recipe="fp8-block")
    torch.manual_seed(2)
    part = octavo.Linear(
        K, N, device="cuda", dtype=torch.bfloat16, recipe="fp8-block", parallel_mode=mode, sequence_parallel=True
    )
    y = whole(x)
    y.backward(dy)
    rank, dim = dist.get_rank(), 0 if mode == "column" else 1
    own = x.chunk(2, dim)[rank].contiguous()
    found = part(own)
    found.backward(dy.chunk(2, 1 - dim)[rank].contiguous())
    right = whole.weight.grad.chunk(2, dim)[rank]
    error = (part.weight.grad.float() - right.float()).norm() / right.float().norm()
    far = (found.float() - y.chunk(2, 1 - dim)[rank].float()).norm() / found.float().norm()
    return error.item() <= 1e-2 and far.item() <= 1e-2


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
