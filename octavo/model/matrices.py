"""Modules that hold a matrix but are not linear layers, and the reasons that a conversion reports for them."""

from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from octavo._torch.modules import Convolution

# (class, reason in a word, why it stays)
_KNOWN: tuple[tuple[tuple[type, ...], str, str], ...] = (
    ((nn.Embedding, nn.EmbeddingBag), "embedding", "a table that is looked up, not multiplied"),
    ((Convolution,), "convolution", "a convolution, and recipes are for matrix products"),
    ((nn.Bilinear,), "bilinear", "a product of two inputs, and recipes are for products of one with a weight"),
    ((nn.RNNBase, nn.RNNCellBase), "recurrent", "it multiplies its matrices itself. Build the cell from nn.Linear"),
    (
        (nn.MultiheadAttention,),
        "attention",
        "it multiplies in_proj_weight and out_proj.weight itself, without calling a layer. Use nn.Linear layers around "
        "F.scaled_dot_product_attention",
    ),
)
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)  # their weights may have several dims but are not matrices


def qualified(module: nn.Module) -> str:
    """Returns the qualified name of a module's class; classes of torch.nn by their public names."""
    kind = type(module)
    package = "torch.nn" if kind.__module__.startswith("torch.nn.modules.") else kind.__module__
    return f"{package}.{kind.__qualname__}"


def matrices(module: nn.Module) -> dict[str, Tensor]:
    """Returns the module's own parameters, not its children's, that have at least two dims longer than 1."""
    if isinstance(module, _NORMS):
        return {}
    own = {name: p for name, p in module._parameters.items() if p is not None and not is_lazy(p)}
    return {name: p for name, p in own.items() if sum(n > 1 for n in p.shape) > 1}


def holders(model: nn.Module) -> Iterator[tuple[str, nn.Module, dict[str, Tensor]]]:
    """Yields (path, module, its matrices) of every module that has matrices and is not an nn.Linear."""
    for path, module in model.named_modules(remove_duplicate=False):
        if not isinstance(module, nn.Linear) and (found := matrices(module)):
            yield path, module, found


def why_left(module: nn.Module, found: dict[str, Tensor]) -> tuple[str, str]:
    """Returns (reason in a word, sentence) for a module that convert does not change."""
    for classes, reason, why in _KNOWN:
        if isinstance(module, classes):
            return reason, why
    listed = ", ".join(f"{name} {list(p.shape)}" for name, p in found.items())
    if isinstance(module, ParametrizationList):
        return "parametrized", f"{listed} is what a parametrization makes another module's weight of"
    if "router" in type(module).__name__.lower():
        return "router", f"a router, with {listed}, stays in high precision"
    if all(_is_table(name) for name in found):
        return "embedding", f"{listed} is a table that is added or looked up, not multiplied"
    if any(p.dim() == 3 and p.shape[0] > 1 for p in found.values()):
        return "stacked matrices", f"it multiplies {listed} itself. octavo.GroupedLinear multiplies stacked experts"
    if type(module).__name__ == "Conv1D":
        return "Conv1D", f"its {listed} is [in, out], the transpose of nn.Linear's. Replace it by an nn.Linear"
    return "other matrices", f"it uses {listed} in a forward of its own. Put an nn.Linear there to convert it"


def _is_table(name: str) -> bool:
    """Whether a parameter's name says that it is added to activations: position embeddings, class tokens."""
    return any(word in name.lower() for word in ("embed", "token", "position"))
