"""Context managers for calls of layers. `with octavo.autocast(recipe):` sets the recipe of layers that have none of
their own; `with octavo.microbatch(first=...):` sets `is_first_microbatch` for calls that do not pass it. Each applies
to the thread that entered it, and forward reads it. A backward that runs forward again, for a checkpoint, does not.

`with octavo.dry_run():` has calls leave no trace in layers. It applies to all threads: on a GPU a checkpoint runs
forward again in a thread of its own.
"""

import threading
from typing import Any

from torch import Tensor

from octavo._torch.modules import mark_shape_inference
from octavo._torch.tracing import while_tracing
from octavo.errors import UnsupportedConfig, UnsupportedShape
from octavo.foreign_keywords import refused
from octavo.recipes import SHIPPED, Recipe, recipe
from octavo.values import excerpt


class _Ambient(threading.local):
    """The values in force, per thread. __init__ sets the fields, so that the compiler sees each thread's own value."""

    def __init__(self) -> None:
        self.recipe: Recipe | None = None
        self.outer: tuple[Recipe | None, object] | None = None
        self.first: bool | Tensor | None = None
        # the values in force around the block: a new tuple each time a block is entered
        self.outer_first: tuple[bool | Tensor | None, object] | None = None
        self.init: quantized_init | None = None  # the block in which layers are built with codes as their weights


class _Process:
    """The values in force in all threads."""

    def __init__(self) -> None:
        self.dry = 0  # `dry_run` blocks that are entered
        self.has_traced = False  # whether a graph has traced a layer: a graph may serve layers that it did not trace


ambient, process = _Ambient(), _Process()


class quantized_init:
    """A context manager in which layers are built with codes as their weights.

    A layer initialises its weight as ever, and keeps only the codes: no more than one layer's weight exists in high
    precision at a time. It takes the block's recipe if it has none of its own. Optimizers may train the weights, as
    after `octavo.quantize_weights(model, trainable=True)`. Blocks apply to the thread that enters them.

    Args:
        recipe: a name such as "fp8-block", a canonical string or a `Recipe`.
        preserve_high_precision: keep the initial values on the host, as `weight.high_precision_init`, until the first
            step of `octavo.optim.AdamW` takes its master copy from them. With False, or if the program has loaded or
            set the weight meanwhile, the master copy begins with the values of the codes.
        keep_columns: as in `octavo.quantize_weights`.

    Raises:
        UnsupportedConfig: there is no such recipe, or it quantizes no weight.

    Example:
        >>> with octavo.quantized_init("fp8-block"):
        ...     layer = octavo.Linear(256, 128, bias=False, dtype=torch.bfloat16)
        >>> layer
        Linear(in_features=256, out_features=128, bias=False, recipe=fp8-block, weight that is codes)
    """

    def __init__(self, recipe: str | Recipe, preserve_high_precision: bool = False, keep_columns: bool = False) -> None:
        self.recipe = autocast(recipe).recipe
        if self.recipe.linear().fprop.right is None:
            raise UnsupportedConfig(
                f"quantized_init builds layers whose weights are codes, and {self.recipe} quantizes no weight. Choose "
                "a recipe with a quantized fprop, such as fp8-block."
            )
        self.preserve_high_precision, self.keep_columns = preserve_high_precision, keep_columns
        self._outer: list[quantized_init | None] = []

    def __enter__(self) -> "quantized_init":
        self._outer.append(ambient.init)
        ambient.init = self
        return self

    def __exit__(self, *error: object) -> None:
        ambient.init = self._outer.pop()


class autocast:
    """A context manager in which layers without a recipe of their own run in this recipe.

    Forward reads it; backward runs in the recipe of its forward. Blocks nest, can be entered again, and apply to the
    thread that enters them. A checkpoint that runs forward again during backward does not see the block. Give
    layers inside a checkpoint their own recipe; or enter the block inside the checkpointed function, in eager mode.

    Args:
        recipe: a name such as "fp8-current", a canonical string or a `Recipe`.

    Raises:
        UnsupportedConfig: there is no such recipe.

    Example:
        >>> layer = octavo.Linear(16, 8)
        >>> x = torch.ones(4, 16)
        >>> with octavo.autocast("fp8-current"):
        ...     y = layer(x)
        >>> y.shape
        torch.Size([4, 8])
    """

    @refused
    def __init__(self, recipe: str | Recipe) -> None:
        if isinstance(recipe, str):
            _learn(recipe)
            self.recipe = getattr(_known, recipe)
        elif isinstance(recipe, Recipe):
            self.recipe = recipe
        else:
            self.recipe = _refused(recipe)

    def __enter__(self) -> "autocast":
        ambient.outer = (ambient.recipe, ambient.outer)
        ambient.recipe = self.recipe
        return self

    def __exit__(self, *error: object) -> None:
        ambient.recipe, ambient.outer = ambient.outer  # type: ignore[misc,assignment]


class microbatch:
    """A context manager that passes `is_first_microbatch` to every Octavo layer called in it.

    Use it to quantize weights once for several microbatches in a model whose forward has no argument for the flag. A
    call that passes its own flag keeps it. Blocks nest, can be entered again, and apply to the thread that enters them.

    Args:
        first: True quantizes the weights into caches, each once if a torch optimizer updates it; False uses the
            caches; None does neither, as outside of a block. A tensor of one element leaves the choice to the device:
            zero means False.

    Raises:
        UnsupportedConfig: `first` is none of these.
        UnsupportedShape: `first` is a tensor with more or fewer elements than one.

    Example:
        >>> model = nn.Sequential(octavo.Linear(16, 8, recipe="fp8-block"))
        >>> for i in range(2):
        ...     with octavo.microbatch(first=i == 0):
        ...         model(torch.ones(4, 16)).sum().backward()
        >>> model[0].weight.grad.shape
        torch.Size([8, 16])
    """

    def __init__(self, first: bool | Tensor | None) -> None:
        if isinstance(first, Tensor):
            if first.numel() != 1:
                raise UnsupportedShape(
                    f"octavo.microbatch(first=...) takes a tensor of one element, got shape {tuple(first.shape)}. Pass "
                    "one element of it."
                )
        elif first is not None and type(first) is not bool:
            raise UnsupportedConfig(
                "octavo.microbatch(first=...) takes True, False, None or a tensor of one element, got "
                f"{excerpt(repr(first))}. Write octavo.microbatch(first=i == 0)."
            )
        self.first = first

    def __enter__(self) -> "microbatch":
        ambient.outer_first = (ambient.first, ambient.outer_first)
        ambient.first = self.first
        return self

    def __exit__(self, *error: object) -> None:
        ambient.first, ambient.outer_first = ambient.outer_first  # type: ignore[misc,assignment]


class dry_run:
    """A context manager in which calls of layers leave no trace in them.

    Use it where a model runs on values that mean nothing, to learn shapes, times or sizes. In the block fp8-delayed
    observes no amax, nvfp4's counter does not advance, weights are not cached, `octavo.MoE` counts no tokens, and
    backward writes to no `main_grad` and leaves nothing for `backward_dw()`: the gradients of weights go to
    `weight.grad`. Forward reads it, and its backward does the same. A block applies to all threads of the process.

    The pass by which stages of `torch.distributed.pipelining` infer shapes is in such a block by itself.

    Example:
        >>> layer = octavo.Linear(16, 8, recipe="fp8-delayed")
        >>> with octavo.dry_run():
        ...     layer(torch.full((4, 16), 1e30)).sum().backward()
        >>> layer.zero_grad()
        >>> octavo.step(layer)
        >>> octavo.state_dict(layer)["scaling.forward.head"]
        tensor([0, 0])
    """

    def __enter__(self) -> "dry_run":
        process.dry += 1
        return self

    def __exit__(self, *error: object) -> None:
        process.dry -= 1


mark_shape_inference(dry_run)


class _Known:
    """Recipes as attributes, each named by its text: a compiler that traces a `with` statement reads them here and does
    not trace the parser. It reads an attribute as it is, but a dict as it was when the graph first read one."""


_known = _Known()
vars(_known).update({name: recipe(name) for name in SHIPPED})


def _refused(found: Any) -> Recipe:
    if found is None:
        raise UnsupportedConfig(
            "octavo.autocast takes a recipe, got None. For layers without quantization enter octavo.autocast('bf16'); "
            "to leave them as they are, leave autocast out: contextlib.nullcontext()."
        )
    return recipe(found)  # raises an error that describes what was passed


@while_tracing
def _learn(text: str) -> bool:
    if text not in vars(_known):
        setattr(_known, text, recipe(text))
    return True
