"""Linear layers of other libraries, if installed, for the tables of the benches."""

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from octavo.version import installed

PACKAGES = ("torchao", "transformer_engine")

HAS_TORCHAO = importlib.util.find_spec("torchao") is not None
Product = Callable[[Tensor, Tensor, Tensor], Tensor]  # rows [rows, K], weights [experts, K, N], where each group ends


def versions() -> dict[str, str | None]:
    return {name: installed(name) for name in PACKAGES}


def linears() -> dict[str, Callable[[int, int], nn.Module]]:
    found: dict[str, Callable[[int, int], nn.Module]] = {}
    if HAS_TORCHAO:
        found |= {f"torchao {name} compiled": partial(_torchao, recipe=name) for name in ("tensorwise", "rowwise")}
    if importlib.util.find_spec("transformer_engine") is not None:
        found |= {f"TE {name}": partial(_transformer_engine, recipe=name) for name in ("delayed", "current", "block")}
    return found


def conversions() -> dict[str, Callable[[nn.Module], None]]:
    """Return functions that replace a model's nn.Linears by another library's; the suite then compiles the model."""
    return {"torchao tensorwise": partial(_to_torchao, recipe="tensorwise")} if HAS_TORCHAO else {}


def grouped() -> dict[str, Callable[[Tensor, int, int], nn.Module]]:
    """Return constructors of layers of many experts, which take splits and sizes."""
    return {"torchao rowwise, sizes in 16s": _TorchaoExperts} if HAS_TORCHAO else {}


def products() -> dict[str, Callable[[], Product]]:
    """Return functions that import another library's product of groups of any sizes."""
    return {"torchao rowwise": _torchao_product} if HAS_TORCHAO else {}


def _torchao_product() -> Product:
    from torchao.prototype.moe_training.fp8_grouped_mm import _to_fp8_rowwise_then_scaled_grouped_mm

    product: Product = _to_fp8_rowwise_then_scaled_grouped_mm  # pads the groups itself where its version can
    return product


class _TorchaoExperts(nn.Module):
    def __init__(self, splits: Tensor, k: int, n: int) -> None:
        super().__init__()
        self.ends = (splits.cumsum(0) // 16 * 16).to(torch.int32)  # torchao needs multiples of 16
        self.weight = nn.Parameter(torch.randn(len(splits), n, k, device="cuda", dtype=torch.bfloat16) * 0.02)

    def forward(self, x: Tensor) -> Any:
        product: Any = _torchao_product()
        return product(x, self.weight.transpose(-2, -1), self.ends, pad_token_groups_for_grouped_mm=False)


def _to_torchao(model: nn.Module, recipe: str) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe))


def _torchao(k: int, n: int, recipe: str) -> nn.Module:
    model = nn.Sequential(nn.Linear(k, n, bias=False, device="cuda", dtype=torch.bfloat16))
    _to_torchao(model, recipe)
    model.compile()  # type: ignore[no-untyped-call]
    return model


def _transformer_engine(k: int, n: int, recipe: str) -> nn.Module:
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe as recipes

    kinds = {
        "delayed": recipes.DelayedScaling,
        "current": recipes.Float8CurrentScaling,
        "block": recipes.Float8BlockScaling,
    }
    return _UnderAutocast(te, te.Linear(k, n, bias=False, params_dtype=torch.bfloat16), kinds[recipe]())


class _UnderAutocast(nn.Module):
    def __init__(self, te: Any, inner: nn.Module, recipe: Any) -> None:
        super().__init__()
        self.inner = inner
        self._enter: Any = lambda: te.fp8_autocast(enabled=True, fp8_recipe=recipe)

    def forward(self, x: torch.Tensor) -> Any:
        with self._enter():
            return self.inner(x)
