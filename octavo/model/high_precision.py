"""What convert leaves in high precision by default: heads, adapters, routers, and layers of conditioning.

`in_high_precision` finds them in a model, by what modules say of themselves, by tied weights, and by names.
"""

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from torch import nn

from octavo.errors import UnsupportedConfig
from octavo.fusion.blocks import LayerNormMLP
from octavo.moe.router import Router

HIGH_PRECISION = ("head", "adapters", "routers", "conditioning")  # kinds of layers that convert leaves alone by default
KINDS = (*HIGH_PRECISION, "small")
SMALL = 512  # features from which on a layer of the kind "small" is converted
_PREDICTS = ("lm_head", "classifier", "score", "proj_out", "qa_outputs", "logits", "ctc_proj")
_CONDITIONS = ("timeembed", "timestepembed", "timetextembed", "tembedder", "adaln", "adalayernorm", "modulation")
_COUNTED = ("pos", "wpe", "type")  # in names of embeddings whose rows are positions or types of tokens

Found = tuple[int, str]  # the id of a layer, and why it stays


def in_high_precision(model: nn.Module, kinds: Any) -> dict[int, tuple[str, str]]:
    """Return the layers of these kinds, as a dict from a layer's id to (reason, sentence)."""
    kinds = (kinds,) if isinstance(kinds, str) or not isinstance(kinds, Iterable) else tuple(kinds)
    for kind in kinds:
        if kind not in KINDS:
            raise UnsupportedConfig(
                f"high_precision takes kinds out of {KINDS}, got {kind!r}. An empty tuple converts them too; "
                "exclude= leaves other layers out."
            )
    in_float32 = ("router", "octavo.moe.Router computes in float32")
    spared = {id(m): in_float32 for m in model.modules() if isinstance(m, Router)}
    for kind, (reason, found_in) in _FINDERS.items():
        if kind in kinds:
            spared |= {key: (reason, why) for key, why in found_in(model)}
    return spared


def _small(model: nn.Module) -> Iterator[Found]:
    """Yield layers whose products are too small to gain from quantized operands."""
    for _, module in _linears(model):
        if (least := min(module.in_features, module.out_features)) < SMALL:
            yield (
                id(module),
                f"{least} is below the {SMALL} inputs and outputs from which on casts take less time than the product "
                "gains",
            )


def _adapters(model: nn.Module) -> Iterator[Found]:
    for path, module in _linears(model):
        if factor := next((part for part in path.split(".") if part.lower().startswith("lora_")), ""):
            yield id(module), f"a factor ({factor}) of a low-rank adapter stays in high precision"


def _routers(model: nn.Module) -> Iterator[Found]:
    """Yield layers that choose experts: a layer named router, or a gate beside experts."""
    modules = dict(model.named_modules())
    for path, module in _linears(model):
        above, _, name = path.rpartition(".")
        beside = above in modules and "experts" in modules[above]._modules
        if "router" in path.lower().split(".") or (beside and name.lower().endswith("gate")):
            yield id(module), "a router stays in high precision"


def _conditioning(model: nn.Module) -> Iterator[Found]:
    """Yield layers of time embeddings and of adaptive norms, by the names of modules and classes around them."""
    modules = dict(model.named_modules())
    for path, module in _linears(model):
        parts = path.split(".")
        above = [type(modules[".".join(parts[:i])]).__name__ for i in range(1, len(parts))]
        words = "".join([*parts, *above]).lower().replace("_", "")
        if any(word in words for word in _CONDITIONS):
            yield id(module), "a layer of conditioning has one row for each image or token of time: it gains nothing"


def _heads(model: nn.Module) -> Iterator[Found]:
    """Yield layers that predict tokens or classes. The size of the vocabulary decides only
    for layers outside of modules whose `get_output_embeddings` names a head."""
    known: set[int] = set()
    of_vocabulary = (head for head in _vocabulary_heads(model) if head[0] not in known)
    # the ways after the first say more
    found = chain(_last_heads(model), _named_heads(model, known), _tied_heads(model), of_vocabulary)
    yield from ((key, f"the output head stays in high precision: {why}") for key, why in found)


def _named_heads(model: nn.Module, known: set[int]) -> Iterator[Found]:
    """Yield heads that `get_output_embeddings` returns; adds to `known` the ids of all layers in such modules."""
    for module in model.modules():
        ask = getattr(module, "get_output_embeddings", None)
        if not callable(ask):
            continue
        try:
            head = ask()
        except Exception:  # a model without a head may raise
            continue
        if isinstance(head, nn.Module):
            known.update(id(layer) for _, layer in _linears(module))
            yield from ((id(layer), "get_output_embeddings() returns it") for _, layer in _linears(head))


def _tied_heads(model: nn.Module) -> Iterator[Found]:
    tables = {id(m.weight): path for path, m in model.named_modules() if isinstance(m, nn.Embedding)}
    for _, module in _linears(model):
        if (path := tables.get(id(module._parameters.get("weight")))) is not None:
            yield id(module), f"its weight is {path or 'the model'}'s"


def _last_heads(model: nn.Module) -> Iterator[Found]:
    """Yield the last linear layer outside of numbered blocks, if a name on its path says that it predicts."""
    outside = [(path, m) for path, m in _linears(model) if not any(part.isdigit() for part in path.split("."))]
    if outside and len(list(_linears(model))) > 1:
        path, module = outside[-1]
        name = next((part for part in path.split(".") if part.rstrip("_0123456789") in _PREDICTS), "")
        if name:
            yield id(module), f"it is the last layer, and its name has {name}"


def _vocabulary_heads(model: nn.Module) -> Iterator[Found]:
    """Yield layers with as many outputs as the largest embedding has rows; embeddings of positions and layers inside a
    LayerNormMLP do not count. If a layer also has that many inputs, the number may be a width: then it yields the only
    such layer outside numbered blocks."""
    tables = [(path, m) for path, m in model.named_modules() if isinstance(m, nn.Embedding)]
    tables = [(path, m) for path, m in tables if not any(word in path.rpartition(".")[2].lower() for word in _COUNTED)]
    inside = {id(m) for block in model.modules() if isinstance(block, LayerNormMLP) for m in block.modules()}
    if not tables:
        return
    table, largest = max(tables, key=lambda entry: entry[1].num_embeddings)
    rows = largest.num_embeddings
    tied = any(m._parameters.get("weight") is largest.weight for _, m in _linears(model))
    heads = [] if tied else [(path, m) for path, m in _linears(model) if m.out_features == rows and id(m) not in inside]
    if rows in {m.in_features for _, m in _linears(model)}:
        heads = [(path, m) for path, m in heads if not any(part.isdigit() for part in path.split("."))]
        heads = heads if len(heads) == 1 else []
    yield from ((id(m), f"out_features {rows} is the vocabulary of {table}") for _, m in heads)


def _linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    return ((path, m) for path, m in model.named_modules() if isinstance(m, nn.Linear))


# by kind: the reason in a word, and what finds the layers; the reason of a later kind counts
_FINDERS = {
    "small": ("small", _small), "conditioning": ("conditioning", _conditioning), "adapters": ("adapter", _adapters),
    "routers": ("router", _routers), "head": ("output head", _heads),
}  # fmt: skip
