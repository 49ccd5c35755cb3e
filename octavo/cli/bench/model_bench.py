"""Time training steps of a whole model: forward, backward and AdamW, eager and compiled, beside bf16 and torchao.

The model has the proportions of Llama's: embedding, blocks of RMSNorm, causal attention with rotary positions and a
SwiGLU MLP, a last norm, a head that stays in bf16, and the cross-entropy of random tokens, in float32. Parameters are
bfloat16. A fused AdamW updates them, so that weights are quantized anew in every step. Weights that are codes are
updated by octavo.optim.AdamW, which keeps values of every parameter and states in bfloat16.

bf16                  plain torch
octavo R, convert     that model after octavo.convert in recipe R
octavo R, blocks      an octavo.Sequential of Octavo's own operations, with the residuals, between embedding and head
octavo R, codes       the same blocks after octavo.quantize_weights(trainable=True)

Each is timed eager, and compiled by torch.compile(fullgraph=True) in its default mode. The optimizer is always eager.

ms          one step after another
tokens/s    tokens of a step / ms
of bf16     ms / that of compiled bf16
compile s   seconds of the first compiled step beyond a later one; torch's caches of earlier runs are not read, but
            Octavo's own kernels were compiled by then
held MiB    memory that stays between steps: parameters, codes of them, states of the optimizer
peak MiB    the most that one step allocates beyond weights and optimizer state; gradients count
loss        of the fourth step, the first compiled one; all cases have the same first weights and tokens

All cases use the same attention: torch's scaled_dot_product_attention, by cuDNN's kernel where it is available. torch's
flash attention is version 2, which was not made for Hopper; --attention flash tries it first. The line above the table
names the kernel that runs. --brief takes fewer readings, and times compiled bf16 and Octavo's eager blocks alone. More
tables list the GPU kernels of one step of Octavo's blocks, the longest first; the JSON
file has those of every case. A case that fails is listed with its error, and the others go on.

On a CPU (--device cpu --size tiny) the suite only shows that everything runs: torch.compile generates no code there
(backend aot_eager).

example: octavo bench model --recipes fp8-delayed --json model.json
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from octavo._torch.compilation import reset as forget_graphs
from octavo.cli import machine, options
from octavo.cli.bench import cases, llama_weights, peers
from octavo.cli.bench.llama_weights import ATTENTION, Llama, attention_order
from octavo.cli.bench.training_steps import (
    adamw,
    allocated,
    backend,
    compiled,
    kernels_ms,
    no_caches,
    peak_mib,
    step_ms,
    step_seconds,
)
from octavo.demo.llama import Size, fused_blocks, plain_blocks
from octavo.model.convert import convert
from octavo.model.refresh import quantize_weights
from octavo.recipes import recipe

SIZES = {
    "full": Size(2, 4096, 4096, 32, 32, 14336, 4, 32000),
    "gqa": Size(2, 4096, 4096, 32, 8, 14336, 4, 32000),
    "tiny": Size(2, 16, 64, 2, 1, 96, 2, 64),
}
RECIPES = ("fp8-delayed",)  # with bf16 and torchao two minutes, most of them compilations; others on request
WARMUP, REPEATS = 5, 30
SETTLING = 3  # steps before the first reading: later ones of fp8-delayed measure no amax, as an uncalibrated one does
BRIEF = {"warmup": 2, "repeats": 10}
WEIGHTS = ("cast", "codes")  # bf16 that every step casts, or codes
FACTS: dict[str, Any] = {
    "bias": False,
    "method": {"warmup": WARMUP, "repeats": REPEATS, "settling": SETTLING, "statistic": "median"},
}
COLUMNS = (
    ("ms", "ms", ".2f"), ("tokens/s", "tokens_per_s", ".0f"), ("of bf16", "of_bf16", ".3f"),
    ("compile s", "compile_s", ".1f"), ("held MiB", "held_mib", ".0f"), ("peak MiB", "peak_mib", ".0f"),
    ("loss", "loss", ".3f"),
)  # fmt: skip

Make = Callable[[Size, torch.device], nn.Module]  # returns the blocks


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--size", choices=tuple(SIZES), default="full",
        help="full: 4 layers of width 4096, 2 x 4096 tokens; gqa: the same with 8 heads of keys and values for 32; "
        "tiny: for a CPU; default: %(default)s",
    )  # fmt: skip
    options.add_cpu_device(parser)
    parser.add_argument(
        "--attention", choices=tuple(ATTENTION), default="cudnn", help="the kernel to try first; default: %(default)s"
    )
    options.add_recipes(parser, RECIPES)
    parser.add_argument(
        "--weights", type=options.names(WEIGHTS), default=list(WEIGHTS), metavar="LIST",
        help=f"how Octavo's blocks have their weights: comma-separated, of {', '.join(WEIGHTS)}; default: both",
    )  # fmt: skip
    parser.add_argument(
        "--brief", action="store_true", help="compiled bf16 and Octavo's eager blocks alone; default: all cases"
    )
    options.add_no_peers(parser)


def measure(arguments: Namespace, report: dict[str, Any]) -> None:
    device, size, first = machine.parse_device(arguments.device), SIZES[arguments.size], arguments.attention
    results: list[dict[str, Any]] = []
    report |= {
        "size": vars(size),
        "attention": {"first": first, "kernel": llama_weights.attention_kernel(size, device, first)},
        "backend": backend(device),
        "results": results,
    }
    brief = arguments.brief
    if brief:
        report["method"] = FACTS["method"] | BRIEF
    found = _cases(arguments.recipes, arguments.weights, with_peers=not arguments.no_peers and not brief)
    if brief:
        found = [one for one in found if one[2] == ("compiled" if one[0] == "bf16" else "eager")]
        found = [one for one in found if not one[0].endswith("convert")]
    for case, make, mode in found:
        title = case if mode == "eager" else f"{case}, {mode}"
        row = cases.attempt(title, partial(_case, make, size, device, mode, first, case.endswith("codes"), brief))
        results.append(row | _of_bf16(row, results))


def _cases(recipes: list[str], weights: Sequence[str] = WEIGHTS, *, with_peers: bool) -> list[tuple[str, Make, str]]:
    """Return names, constructors and modes of the cases, those that matter most first: a run may be cut off."""
    found: list[tuple[str, Make, str]] = [("bf16", plain_blocks, "compiled")]
    for name in recipes:
        blocks, converted = f"octavo {name}, blocks", f"octavo {name}, convert"
        fused, stock = partial(fused_blocks, recipe=name), partial(_converted, conversion=partial(convert, recipe=name))
        if "cast" in weights:
            found += [(blocks, fused, "eager"), (blocks, fused, "compiled")]
        if "codes" in weights and recipe(name).linear().fprop.right is not None:
            found += [(f"octavo {name}, codes", fused, "eager"), (f"octavo {name}, codes", fused, "compiled")]
        if "cast" in weights:
            found += [(converted, stock, "compiled"), (converted, stock, "eager")]
    found.append(("bf16", plain_blocks, "eager"))
    for name, conversion in peers.conversions().items() if with_peers else ():
        stock = partial(_converted, conversion=conversion)
        found += [(name, stock, "compiled"), (name, stock, "eager")]
    return found


def _converted(size: Size, device: torch.device, conversion: Callable[[nn.Module], object]) -> nn.Module:
    blocks = plain_blocks(size, device)
    conversion(blocks)
    return blocks


def _of_bf16(row: dict[str, Any], results: list[dict[str, Any]]) -> dict[str, float]:
    """Return the ratio to compiled bf16, the first row, if both have a time."""
    baseline = results[0] if results else row
    return {"of_bf16": row["ms"] / baseline["ms"]} if "ms" in row and "ms" in baseline else {}


# -- one case --------------------------------------------------------------------------------------------------------


class Training:
    """A model with its optimizer. `call` runs in place of the model, such as its compiled form."""

    def __init__(self, make: Make, size: Size, device: torch.device, attention: str, codes: bool = False) -> None:
        self.size, self.attention = size, attention
        self.model = Llama(size, make(size, device), device).to(torch.bfloat16)
        llama_weights.reset(self.model, seed=0)
        if codes:
            quantize_weights(self.model, trainable=True)
        self.tokens = torch.zeros(size.batch, size.length, device=device, dtype=torch.int64)
        self.call: Callable[[Tensor], Tensor] = self.model
        self.optimizer = adamw(self.model)

    def step(self) -> Tensor:
        """Train on new tokens, so that none is learnt by heart, and return the loss."""
        return self.train(self.tokens.random_(self.size.vocabulary))

    def train(self, tokens: Tensor) -> Tensor:
        with attention_order(self.attention):
            loss = self.call(tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def _case(
    make: Make, size: Size, device: torch.device, mode: str, attention: str, codes: bool = False, brief: bool = False
) -> dict[str, Any]:
    """Measure the model with these blocks, eager or compiled."""
    before = allocated()
    training = Training(make, size, device, attention, codes)
    losses = [float(training.step()) for _ in range(SETTLING)]
    row: dict[str, Any] = {"mode": mode, "losses": losses}

    def first() -> None:
        losses.append(float(training.step()))

    if mode == "eager":
        first()
        return row | _readings(training, before, brief)
    forget_graphs()  # all cases share the code of one forward, and torch compiles that only so many times
    with no_caches(device):
        training.call = compiled(training.model, device)
        seconds = step_seconds(first, device)
        row |= _readings(training, before, brief)
    return row | {"compile_s": seconds - row["ms"] / 1e3}


def _readings(training: Training, before: int, brief: bool) -> dict[str, Any]:
    step, size, device = training.step, training.size, training.tokens.device
    ms, readings = step_ms(step, device, **(BRIEF if brief else {"warmup": WARMUP, "repeats": REPEATS}))
    return {
        "ms": ms,
        "readings_ms": readings,
        "tokens_per_s": size.tokens / ms * 1e3,
        "held_mib": (allocated() - before) / 2**20 if device.type == "cuda" else None,
        "peak_mib": peak_mib(step, device),
        "kernels": kernels_ms(step, device),
    }


# -- as text ---------------------------------------------------------------------------------------------------------


def render(report: dict[str, Any]) -> str:
    size, kernel = report["size"], report["attention"]["kernel"]
    what = f"bfloat16, forward + backward + AdamW, backend {report['backend']}, attention {kernel}"
    head = (
        f"{cases.heading(report, what)}\n"
        f"{size['layers']} layers of width {size['width']}, {size['heads']} heads ({size['kv_heads']} of keys and "
        f"values), MLP {size['hidden']}, vocabulary {size['vocabulary']}; {size['batch']} x {size['length']} tokens"
    )
    rows = [r if "error" in r else r | {"loss": r["losses"][-1]} for r in report["results"]]
    listed = [r for r in rows if r["case"].startswith("octavo") and "convert" not in r["case"] and r.get("kernels")]
    tables = [cases.kernel_table(r["kernels"], f"kernel, {r['case']}") for r in listed]
    return "\n\n".join([f"{head}\n{cases.render(COLUMNS, rows)}", *tables])
