"""Several processes whose experts are over ranks of one machine: do they compute the bits of one process?

    python -m benchmarks.expert_parallel --processes 2

starts them, on one GPU where there is one, over gloo for control alone: torch's functional collectives end a process
that gives them CUDA tensors there. Rows go through symmetric memory (`engine="symmetric"`), which torch maps for
processes on one device if TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1. Without a GPU they share memory of the CPU.

Each process prints a line of JSON before and after each attempt, so that the last one says what ended it. An attempt
that torch refuses is printed in torch's words.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import octavo
from octavo import moe

D, N, E, K, T = 512, 768, 8, 2, 300  # of the layer; tokens of each rank
SMALL = 64, 96, 4, 2, 24
TIMEOUT = 45  # seconds that a rank waits for another
PAYLOADS = {"fp8-block": ("values", "codes"), "fp8-rowwise": ("values", "codes"), "mxfp8": ("values", "codes")}


# -- in each process ---------------------------------------------------------------------------------------------------


class Attempts:
    """The layers of one rank and of one process, and what is tried with them."""

    def __init__(self, rank: int, ranks: int, recipes: list[str], small: bool) -> None:
        self.rank, self.ranks, self.recipes = rank, ranks, recipes
        self.hidden, self.ffn, self.experts, self.top_k, self.tokens = SMALL if small else (D, N, E, K, T)
        self.device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")

    def mixture(self, recipe: str, **settings: Any) -> octavo.MoE:
        torch.manual_seed(3)  # equal seeds: each rank has its part of the parameters of one process
        shape = self.hidden, self.ffn, self.experts, self.top_k
        return octavo.MoE(*shape, recipe=recipe, device=self.device, dtype=torch.bfloat16, **settings)

    def split(self, recipe: str, **settings: Any) -> octavo.MoE:
        return self.mixture(recipe, dispatcher=moe.ExpertParallel(dist.group.WORLD, **settings))

    def batch(self, rank: int, seed: int = 0) -> list[torch.Tensor]:
        """x and dy of a rank, with outlier rows; a shift moves all tokens to some experts."""
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        x, dy = (torch.randn(self.tokens, self.hidden, generator=generator) for _ in range(2))
        x[::7] *= 20
        shift = torch.randn(1, self.hidden, generator=torch.Generator().manual_seed(seed))
        return [t.to(self.device, torch.bfloat16) for t in (x + seed % 3 * shift, dy / self.tokens)]

    def whole(self, recipe: str, seed: int = 0) -> list[torch.Tensor]:
        """What one process with the tokens of all ranks computes, this rank's part of it."""
        x, dy = (torch.cat(parts) for parts in zip(*[self.batch(r, seed) for r in range(self.ranks)], strict=True))
        found = stepped(self.mixture(recipe, dispatcher=moe.LocalDispatch()), x, dy)
        return [t.chunk(self.ranks)[self.rank] for t in found]

    def all(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        yield "memory of the other ranks", self.memory
        for recipe in self.recipes:
            for payload in PAYLOADS.get(recipe, ("values",)):
                yield f"{recipe}, {payload}", lambda recipe=recipe, payload=payload: self.bits(recipe, payload)
        yield "two layers", lambda: self.layers(self.recipes[-1])
        yield "no tokens on a rank", lambda: self.uneven(self.recipes[-1])
        if self.device.type == "cuda":
            yield "captured", lambda: self.captured(self.recipes[-1])
            yield "milliseconds of a step", lambda: self.milliseconds(self.recipes[-1])
            yield "all-to-all over gloo", lambda: stepped(self.split("bf16"), *self.batch(self.rank)) is not None

    def memory(self) -> bool:
        from octavo.communication.peer_memory import PeerMemory

        memory = PeerMemory("", self.device, {"part": 4096}, "this benchmark")
        memory.own("part", 1, 4096, torch.uint8).fill_(self.rank + 1)
        memory.barrier("this benchmark")
        found = all((part == rank + 1).all().item() for rank, part in enumerate(memory.part("part").memory))
        memory.barrier("this benchmark")
        return found

    def bits(self, recipe: str, payload: str) -> dict[str, Any]:
        """Bits of values; with codes columns are made of row codes, so that gradients of weights are near."""
        found = stepped(self.split(recipe, engine="symmetric", payload=payload), *self.batch(self.rank))
        return alike(found, self.whole(recipe), 0.0 if payload == "values" else 0.1)

    def layers(self, recipe: str) -> bool:
        """Two layers of one memory, by dx."""
        found = []
        for settings, ranks in (({"engine": "symmetric", "payload": "values"}, [self.rank]), ({}, range(self.ranks))):
            make = self.split if settings else self.mixture
            own = settings or {"dispatcher": moe.LocalDispatch()}
            first, second = (make(recipe, **own) for _ in range(2))
            x, dy = (torch.cat(parts) for parts in zip(*[self.batch(r) for r in ranks], strict=True))
            h = first(x.requires_grad_())
            second(h + x).backward(dy)  # type: ignore[no-untyped-call]
            found.append(x.grad if settings else x.grad.chunk(self.ranks)[self.rank])
        return torch.equal(*found)

    def uneven(self, recipe: str) -> bool:
        model = self.split(recipe, engine="symmetric", capacity=self.tokens * self.top_k)
        x, dy = self.batch(self.rank)
        number = 0 if self.rank else self.tokens
        return all(t.isfinite().all().item() for t in stepped(model, x[:number], dy[:number]))

    def captured(self, recipe: str) -> dict[str, Any]:
        model = self.split(recipe, engine="symmetric", payload="values")
        x, dy = self.batch(self.rank)
        leaves = [x.requires_grad_(), *model.parameters()]

        def run() -> torch.Tensor:
            for leaf in leaves:
                leaf.grad = None
            y: torch.Tensor = model(x)
            y.backward(dy)  # type: ignore[no-untyped-call]
            return y

        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = run()
        for seed in (1, 2):
            with torch.no_grad():
                for t, new in zip((x, dy), self.batch(self.rank, seed), strict=True):
                    t.copy_(new)
            graph.replay()
        torch.cuda.synchronize()
        gradients = [p.grad for p in (model.experts.fc1.weight, model.experts.fc2.weight)]  # type: ignore[union-attr]
        return alike([y.detach(), x.grad, *gradients], self.whole(recipe, 2), 0.0)

    def milliseconds(self, recipe: str) -> float:
        model, batch = self.split(recipe, engine="symmetric"), self.batch(self.rank)
        for _ in range(3):
            stepped(model, *batch)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(5):
            stepped(model, *batch)
        torch.cuda.synchronize()
        return round(200 * (time.perf_counter() - begin), 3)


def stepped(model: octavo.MoE, x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    """y, dx and the gradients of the experts."""
    model.zero_grad()
    leaf = x.clone().requires_grad_()
    y = model(leaf)
    y.backward(dy)  # type: ignore[no-untyped-call]
    return [y.detach(), leaf.grad, model.experts.fc1.weight.grad, model.experts.fc2.weight.grad]  # type: ignore


def alike(found: list[Any], want: list[torch.Tensor], near: float) -> dict[str, Any]:
    """Whether each tensor has the bits that it should have; how far it is, if not. Gradients of weights may be near."""
    said: dict[str, Any] = {}
    for name, a, b in zip(("y", "dx", "dw1", "dw2"), found, want, strict=True):
        far = float((a.float() - b.float()).norm() / b.float().norm())
        said[name] = True if torch.equal(a, b) else far
        said["right"] = said.get("right", True) and (said[name] is True or (name.startswith("dw") and far <= near))
    return said


def serve(store: str, rank: int, ranks: int, recipes: list[str], small: bool) -> None:
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    if torch.cuda.is_available():
        torch.cuda.set_device(0)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=TIMEOUT)
    )
    report: dict[str, Any] = {}
    for title, attempt in Attempts(rank, ranks, recipes, small).all():
        print(json.dumps(report | {title: "ended the process"}), flush=True)
        begin = time.perf_counter()
        try:
            report[title] = attempt()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        except Exception as error:
            traceback.print_exc()
            report[title] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        report[f"{title}: seconds"] = round(time.perf_counter() - begin, 1)
        print(json.dumps(report), flush=True)
        dist.barrier()
    os._exit(0)  # a failed backend may not end by itself


# -- the process that starts them --------------------------------------------------------------------------------------


def compared(ranks: int, recipes: list[str], small: bool, limit: int) -> dict[str, Any]:
    """Start the processes, print what each found, and return it with the number of attempts that failed."""
    environment = {**os.environ, "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
    with tempfile.TemporaryDirectory() as folder:
        shared = [os.path.join(folder, "store"), str(ranks), ",".join(recipes), str(int(small))]
        logs = [open(os.path.join(folder, f"log{rank}"), "w+") for rank in range(ranks)]  # noqa: SIM115
        processes = [
            subprocess.Popen([sys.executable, "-m", __name__, str(rank), *shared], stdout=subprocess.PIPE, stderr=log,
                             text=True, env=environment)
            for rank, log in enumerate(logs)
        ]  # fmt: skip
        end, answers = time.monotonic() + limit, []
        for process in processes:
            try:
                out, _ = process.communicate(timeout=max(end - time.monotonic(), 1))
            except subprocess.TimeoutExpired:
                process.kill()
                out, _ = process.communicate()
            lines = out.strip().splitlines()
            answers.append(json.loads(lines[-1]) if lines else {"started": f"ended with {process.returncode}"})
        failed = 0
        for rank, (answer, process, log) in enumerate(zip(answers, processes, logs, strict=True)):
            print(f"rank {rank} of {ranks}, ended with {process.returncode}")
            for title, found in answer.items():
                right = found["right"] if isinstance(found, dict) else found is True or isinstance(found, float)
                failed += not right and title != "all-to-all over gloo"  # which is refused
                print(f"  {title:34} {found}")
            log.seek(0)
            if errors := log.read().strip():
                print("  its errors:\n    " + "\n    ".join(errors.splitlines()[-12:]))
            log.close()
    return {"processes": ranks, "recipes": recipes, "ranks": answers, "failed": failed}


if __name__ == "__main__":
    arguments = sys.argv[1:]
    serve(arguments[1], int(arguments[0]), int(arguments[2]), arguments[3].split(","), arguments[4] == "1")
