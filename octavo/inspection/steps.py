"""One forward and backward of a model on a batch, without an optimizer, as `octavo compare` and `inspect` run it."""

import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from octavo._torch.tensors import tree_leaves, tree_map
from octavo.errors import UnsupportedConfig
from octavo.model.attach import parameter_ids
from octavo.model.convert import convert
from octavo.model.layer_lookup import layers
from octavo.model.policy import Policy
from octavo.ops.quantized import UNQUANTIZED, Quantized
from octavo.recipes import Recipe
from octavo.recipes import recipe as resolve

Loss = Callable[[Any], Tensor]


Batch = tuple[Any, ...] | Mapping[str, Any]  # the arguments of a call, by position or by keyword


def call(function: Callable[..., Any], batch: Batch) -> Any:
    """Call a function with copies of a batch."""
    own: Any = tree_map(own_copy, batch if isinstance(batch, tuple) else dict(batch))
    return function(*own) if isinstance(own, tuple) else function(**own)


def listed(batches: Iterable[Any]) -> list[Batch]:
    """Return the arguments of each call; a batch that is neither a tuple nor a mapping is the only argument of its
    call."""
    if isinstance(batches, Tensor):
        raise UnsupportedConfig(
            f"The batches are a list with the arguments of each call, got a tensor of shape {tuple(batches.shape)}. "
            "Write [x], or [(x, y)] for a model of two arguments."
        )
    if isinstance(batches, Mapping):
        raise UnsupportedConfig(
            "The batches are a list with the arguments of each call, got a dict. Write [batch] for one call by keyword."
        )
    found = [batch if isinstance(batch, tuple | Mapping) else (batch,) for batch in batches]
    if not found:
        raise UnsupportedConfig("There are no batches, so there is nothing to run. Pass at least one: [(x,)].")
    return found


def gradients_of(model: nn.Module, batch: Batch, loss: Loss | None = None) -> Tensor:
    """Call the model on copies of the batch, run backward, and return the loss."""
    made = call(model, batch)
    value = _default_loss(made) if loss is None else _checked_loss(loss(made))
    value.backward()  # type: ignore[no-untyped-call]
    return value.detach()


def seeded_gradients(model: nn.Module, batch: Batch, loss: Loss | None, seed: int) -> Tensor:
    """Do the same for the gradients of this batch alone, with torch's generators at a seed; they are then as before."""
    gpus = dict.fromkeys(p.device for p in model.parameters() if p.device.type == "cuda")
    with torch.random.fork_rng(devices=list(gpus)):
        torch.manual_seed(seed)
        model.zero_grad()
        return gradients_of(model, batch, loss)


def count_steps(block: Any) -> Any:
    """Have each step of an optimizer with parameters of a block's model call `block.next_step()`. Return the handle of
    the hook, which keeps the block not alive."""
    ref = weakref.ref(block)

    def count(optimizer: Optimizer, *_: Any) -> None:
        found: Any = ref()
        model = None if found is None else found._model()
        if model is not None and not parameter_ids(optimizer).isdisjoint(map(id, model.parameters())):
            found.next_step()

    return register_optimizer_step_post_hook(count)


def give_recipe(model: nn.Module, recipe: str | Recipe | Policy) -> None:
    """Run a model in another recipe: its layers of Octavo that are quantized, or that follow `octavo.autocast`; if it
    has no layer of Octavo, those that `convert` takes. A policy gives each layer the recipe of its rule. Raise if
    there is no such layer."""
    if isinstance(recipe, Policy):
        with warnings.catch_warnings(action="ignore"):  # of rules that match no layer: an error says if none does
            made = convert(model, recipe, overwrite=True)
        if next(layers(model), None) is None:
            raise UnsupportedConfig(
                f"The policy gives no layer of this {type(model).__name__} a recipe. {made.summary()}"
            )
        return
    found = [layer for _, layer in layers(model)]
    if not found:
        with warnings.catch_warnings(action="ignore"):  # an error says it
            report = convert(model, recipe)
        if next(layers(model), None) is None:
            raise UnsupportedConfig(
                f"No layer of this {type(model).__name__} can run in a recipe. {report.summary()} Pass a model with "
                "nn.Linear layers, or with layers of Octavo."
            )
    taken = [layer for layer in found if layer.recipe is None or layer.recipe.linear() != UNQUANTIZED.linear()]
    if found and not taken and resolve(recipe).linear() != UNQUANTIZED.linear():
        raise UnsupportedConfig(
            f"All layers of Octavo in this {type(model).__name__} are in bf16, and such layers stay so: none would run "
            f"in {recipe}. Call octavo.revert(model) first, or pass the model as it was before octavo.convert."
        )
    for layer in found:
        layer._schedule = None  # a policy's later recipe is none of the given ones
    for layer in taken:
        set_recipe(layer, recipe)


def set_recipe(layer: Quantized, recipe: str | Recipe) -> None:
    """Run a layer in another recipe from now on."""
    layer._schedule = None
    layer._restore_weight()
    layer._lose_recipe()
    layer.recipe = recipe  # type: ignore[assignment]


def own_copy(x: Any) -> Any:
    """Return a tensor's own leaf of a graph; what is no tensor stays as it is."""
    return x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x


def _checked_loss(value: Any) -> Tensor:
    if isinstance(value, Tensor) and value.numel() == 1 and value.requires_grad:
        return value.sum()
    kind = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    if isinstance(value, Tensor) and not value.requires_grad:
        kind += " without a gradient"
    raise UnsupportedConfig(
        f"loss= returns one number with a gradient, got {kind}. Return a sum or a mean of the output."
    )


def _default_loss(made: Any) -> Tensor:
    """Return the first output that takes a gradient if it is one number; else its product with a fixed random
    direction: a sum or a mean would have no gradient behind a norm."""
    found = next((t for t in tree_leaves(made) if isinstance(t, Tensor) and t.requires_grad), None)
    if found is None:
        raise UnsupportedConfig(
            f"No output of the model takes a gradient, got {type(made).__name__}. Return a loss or a tensor that "
            "depends on parameters, or pass loss=."
        )
    if found.numel() == 1:
        return found.sum()
    generator = torch.Generator("cpu").manual_seed(0)  # the same direction on every device
    direction = torch.randn(found.shape, generator=generator, device="cpu", dtype=torch.float32).to(found.device)
    return (found.float() * direction).sum() / found.numel() ** 0.5
