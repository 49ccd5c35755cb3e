"""Supply a layer's call with its weight: plain, as cached codes, or as codes of a quantized weight.

This module fills, refreshes and checks the cache as `is_first_microbatch`, or the block of an `octavo.microbatch`,
says. The caller passes the layer to every method: a reference to it would keep a deleted model in memory until Python's
garbage collector runs.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from octavo._torch.autograd import current_graph_task
from octavo._torch.fakes import as_real_as
from octavo._torch.tracing import is_first_in_graph, is_inside_operator, is_watched, while_tracing
from octavo.errors import UnsupportedConfig, UnsupportedShape
from octavo.quant.qtensor import Parts
from octavo.recipes import Recipe
from octavo.recipes import recipe as resolve
from octavo.recipes.ambient import ambient
from octavo.runtime.contract import WeightCast
from octavo.runtime.stage import WantedGradients
from octavo.runtime.weight_nodes import refresh as refresh_in_graph
from octavo.weights.cache import WeightCache, refuse_dense
from octavo.weights.code_memory import Kind, codes_of, is_plain
from octavo.weights.quantized_parameters import is_whole, quantized
from octavo.weights.quantized_weight import QuantizedWeight
from octavo.weights.unsupported_wgrad import refuse_shards

Flag = bool | Tensor | None  # is_first_microbatch


class WeightCodes(WeightCache):
    """The codes of one layer's weight."""

    def supply(
        self, layer: Any, recipe: Recipe, weights: Sequence[Tensor], first: Flag, grads: WantedGradients,
        observe: bool, dry: bool,
    ) -> str:  # fmt: skip
        """Decide how this call gets the weight: "plain", "codes" (from the cache, filled or refreshed here) or
        "quantized"."""
        if type(weights[0]) is QuantizedWeight:
            _check_quantized(layer, recipe, weights)
            return "quantized"
        if self.has_quantized_weight:
            return refuse_dense(weights[0]) if recipe.linear().quantizes_weight else "plain"
        if dry:  # nothing is cached
            return "plain"
        tracing = torch.compiler.is_compiling()
        if grads.dw and not tracing:
            self.trained = True
        trusted = again = repeated = False
        fills = 0 if tracing else self.fills
        if first is None:
            first = ambient.first
            if tracing:
                again = first is True and not self._first_in_block()
                first = False if again else first
            elif first is not None or self.ambient:  # a graph would guard on what is noted
                first, trusted, repeated = self._noted(layer, first, grads, observe)
            # parametrized weights are refused for a layer by itself, and skipped in a model
            if first is None or layer._parametrized_weights():
                return "plain"
        else:
            layer._refuse_parametrized("is_first_microbatch")
        quant = recipe.linear()
        if not quant.quantizes_weight:
            return "plain"
        # a call without dx needs no columns, and makes none
        column = grads.dx and quant.dgrad.right is not None and layer._caches_columns(quant)
        first, skip = _decided(first)
        if tracing:
            if again and column and not layer._now("_codes.has", "column"):
                return "plain"  # a graph sees only the buffers that were there at its first call of the layer
            first = first or layer._now("_codes.is_unversioned")
            self._refresh_in_graph(layer, recipe, first, column, observe, skip, grads.dw)
            if is_inside_operator():  # which loses what a graph leaves behind in Python
                return "codes"
            # fresh after this, unless replays of an optimizer's step write to the weight unseen
            if first and skip is None:
                self.stale = self.captured
            elif not first and not again:
                layer._now("_codes.check_stale")
                if self.stale:  # never now; read here, it is a guard of the graph
                    raise UnsupportedConfig(self.stale)
            return "codes"
        there = self.recipe == recipe and not self.is_cold
        # False says that the codes are those of this weight: the host checks what it can
        if not first and there and not trusted:
            self.check_filled(layer._weight_parts())
        there = there and (not column or self.has(layer, "column"))
        if first or not there:
            skip = skip if there else None
            self.refresh(layer, recipe, column=column, observe=observe, skip=skip, repeated=repeated, fills=fills)
        return "codes"

    def of_call(self, layer: Any, kind: str, weight: Tensor) -> tuple[Parts, Parts]:
        """Return the weight's codes by row and by column, for a call that gets it as `supply` said."""
        if kind == "quantized":
            return codes_of(weight, "row"), codes_of(weight, "column")
        return self.parts(layer, "row"), self.parts(layer, "column")

    def refresh(
        self, layer: Any, recipe: Recipe, *, column: bool, observe: bool, skip: Tensor | None = None,
        repeated: bool = False, fills: int | None = None,
    ) -> None:  # fmt: skip
        """Quantize the weight into the cache. Where `skip`, on the device, is not zero, the codes do not change;
        `repeated` and `fills` as in `fill`."""
        weights = layer._weight_parts()
        if any([weight is None for weight in weights]):
            raise UnsupportedConfig(
                f"refresh_weights quantizes the weight of {layer.op_describe()} again, and that is None. Give the "
                "layer a parameter there again."
            )
        refuse_shards(weights, "refresh_weights")
        amaxes, scaling = layer._scaling.of_weight(layer, recipe, observe)
        all_reduced = layer._all_reduced_weight_amaxes(recipe, False)
        cast = WeightCast(layer._whole_weight(), (), (), amaxes, scaling, skip, all_reduced)
        self.fill(layer, recipe, column, cast, repeated, fills)

    def _noted(self, layer: Any, first: Flag, grads: WantedGradients, observe: bool) -> tuple[Flag, bool, bool]:
        """Return the flag of the block, whether the cache is used as it is, and whether the layer was called before in
        this block. The flag is noted for a checkpoint,
        which recomputes in backward, in any block and thread, and must save what its forward saved. A layer whose last
        training forward was in a block uses the cache there, and refills it only to observe a weight that its forward,
        without gradients, did not observe."""
        # inside of a backward: a checkpoint that recomputes must save what its forward saved
        if current_graph_task() != -1:
            if not self.ambient:
                return None, False, False
            refill = observe and self.ambient == "unobserved"
            if refill:
                self.ambient = "observed"
            return refill, self.on_device, False
        if first is not None:
            self.ambient, self.on_device = "observed" if observe else "unobserved", isinstance(first, Tensor)
        elif any(grads) or layer.training:
            self.ambient = ""
        repeated = False
        if first is True:
            weights = layer._weight_parts()
            repeated = self.entry is ambient.outer_first and self.is_fresh(weights)
            if repeated and self.is_heard(weights):
                return False, True, True
            self.entry = ambient.outer_first
        return first, False, repeated

    # -- in a graph ----------------------------------------------------------------------------------------------------

    def _refresh_in_graph(
        self, layer: Any, recipe: Recipe, first: bool, column: bool, observe: bool, skip: Tensor | None, trains: bool
    ) -> None:
        """Refresh while a graph is traced: missing buffers are made and filled now, once; the graph refreshes them if
        `first`."""
        layer._now("_codes.make_cache", recipe.key, column, observe and not first, trains)
        cached = self.recipe
        if cached is None or cached.key != recipe.key:  # never now; read here, it is a guard of the graph
            raise UnsupportedConfig(f"The weight cache holds codes of {cached}, and {recipe} is in force.")
        row, columns = self.parts(layer, "row"), self.parts(layer, "column")
        if not row and not columns:
            raise UnsupportedConfig(
                f"{layer.op_describe()} made its weight cache while a graph was traced that had read the layer before, "
                "as octavo.step does, and such a graph does not see new buffers. Call the layer once with "
                "is_first_microbatch=True before you compile, or octavo.step outside of the graph."
            )
        if first:
            amaxes, scaling = layer._scaling.of_weight(layer, recipe, observe)
            key = layer.NAME + "(recipe=" + recipe.key + ")"
            with torch.no_grad():
                weight = layer._whole_weight().detach()
                all_reduced = layer._all_reduced_weight_amaxes(recipe, True)
                refresh_in_graph(layer.NAME, key, WeightCast(weight, row, columns, amaxes, scaling, skip, all_reduced))

    def make_cache(self, layer: Any, recipe_key: str, column: bool, observe: bool, trains: bool) -> bool:
        """Make the cache that a graph is about to use."""
        recipe = resolve(recipe_key)
        self.trained = self.trained or trains
        if self.recipe != recipe or self.is_cold or (column and not self.has(layer, "column")):
            self.refresh(layer, recipe, column=column, observe=observe)
        return True

    def is_unversioned(self, layer: Any) -> bool:
        """Return whether nothing tells of writes to the weight: inference tensors have no version."""
        return any([weight.is_inference() for weight in layer._weight_parts()])

    @while_tracing
    def _first_in_block(self) -> bool:
        """Return whether the graph being traced, in a block that was entered outside of it, meets this layer for the
        first time."""
        return ambient.first is None or is_first_in_graph(self)

    # -- codes in the weight's place -----------------------------------------------------------------------------------

    def replace_weight(self, layer: Any, trainable: bool = False, keep_columns: bool = False) -> None:
        """Keep the weight as codes of the layer's recipe, and drop the weight itself."""
        if self.has_quantized_weight:
            return
        recipe = layer.recipe
        if recipe is None or recipe.linear().fprop.right is None:
            raise UnsupportedConfig(
                f"A weight is stored as the codes its fprop multiplies, and this layer's recipe is {recipe}. "
                "Give it one whose fprop is quantized: octavo.convert(model, recipe), or recipe= of the layer."
            )
        whole = layer._whole_weight()
        with as_real_as(whole):
            # scaled by the weight itself, whatever a delayed recipe has seen so far: there is no second chance
            kind = Kind(layer.NAME, recipe.key, tuple(whole.shape), trainable, keep_columns)
            layer._set_weights(quantized(kind, whole.detach()))

    def load(self, layer: Any, loaded: Sequence[Any], *, assign: bool) -> None:
        """Put codes of loaded weights in the place of a quantized weight's. Where the latter are on the meta device
        and the loaded weights are to be assigned, use the device of the loaded ones."""
        weights = layer._weight_parts()
        with torch.no_grad():
            if assign and weights[0].is_meta:
                if isinstance(loaded[0], QuantizedWeight) and is_whole(loaded):
                    layer._set_weights(loaded[0].whole())
                    return
                # parameters of groups are cast together, as one weight
                whole = loaded[0] if len(loaded) == 1 else torch.stack(list(loaded))
                layer._set_weights(quantized(weights[0].kind, whole.detach().to(weights[0].dtype)))
            else:
                for p, part in zip(weights, loaded, strict=True):
                    if not _has_values(p, part):  # its codes are kept then: others may stand for the same values
                        p.copy_(part)

    def check_whole(self, layer: Any) -> None:
        """Refuse quantized weights that are not all the layer's own."""
        weights = layer._weight_parts()
        if not is_whole(weights):
            refuse_dense(weights[0])

    def restore_weight(self, layer: Any) -> None:
        """Replace a quantized weight by a dense one, with the values that the codes stand for."""
        if self.has_quantized_weight:
            self.has_quantized_weight = False
            if all(isinstance(weight, QuantizedWeight) for weight in layer._weight_parts()):
                layer._set_weights(self.values(layer))


def _decided(first: Any) -> tuple[bool, Tensor | None]:
    """Return whether the host refreshes, and the device's flag to skip it: a captured graph reads the flag at each
    replay."""
    if isinstance(first, Tensor):
        if first.numel() != 1:
            raise UnsupportedShape(
                f"is_first_microbatch takes a tensor of one element, got shape {tuple(first.shape)}. Pass one element."
            )
        return True, first.reshape(1) == 0
    if not isinstance(first, bool):
        raise UnsupportedConfig(
            f"is_first_microbatch takes True, False, None or a tensor of one element, got {first!r}. Pass i == 0."
        )
    return first, None


def _has_values(weight: Any, loaded: Tensor) -> bool:
    """Return whether the codes of a weight stand for these values, bit for bit."""
    if not all(is_plain(t) and not t.is_meta for t in (weight.row_codes, loaded)) or is_watched():
        return False
    values = weight.values()
    given = loaded.detach().to(values.device, values.dtype)
    bits = torch.int32 if values.dtype == torch.float32 else torch.int16
    return torch.equal(values.view(bits), given.view(bits))


def _check_quantized(layer: Any, recipe: Recipe, weights: Sequence[Any]) -> None:
    """Refuse codes of a quantized weight of another recipe or layer, or of only a part of the weight."""
    kind = weights[0].kind
    if kind.recipe != recipe.key or kind.layer != layer.NAME:
        raise UnsupportedConfig(
            f"{layer.op_describe()}: its weight is stored as codes of {kind.recipe} for a {kind.layer} layer, and runs "
            f"in {recipe}. Use that recipe, or octavo.revert(model) first."
        )
    if torch.compiler.is_compiling():
        layer._now("_codes.check_whole")
    elif not is_whole(weights):
        refuse_dense(weights[0])
