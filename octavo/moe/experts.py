"""`octavo.moe.Experts`: the experts of a mixture, from routed tokens to their weighted sum."""

from collections.abc import Iterable, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from octavo import backend
from octavo._torch.fakes import FakeTensor
from octavo.errors import (
    UnknownSetting,
    UnsupportedConfig,
    UnsupportedDevice,
    UnsupportedDtype,
    UnsupportedShape,
    check_choice,
    check_whole,
    nearest,
)
from octavo.fusion.blocks import KINDS, fc1_width
from octavo.fusion.explanation import Explanation
from octavo.fusion.rules.moe_experts import RULES
from octavo.fusion.sequential import Sequential
from octavo.moe.permutation import Permutation, check_permutation, sort
from octavo.moe.routing import checked_index
from octavo.ops.grouped_linear import GroupedLinear
from octavo.ops.inputs import check_input
from octavo.ops.permute import Permute, Unpermute
from octavo.ops.recipe_of_layers import RecipeOfLayers
from octavo.recipes import Recipe

PARALLEL = (
    "parallel_mode",
    "sequence_parallel",
    "tp_group",
    "gather_again",
    "column_blocks",
    "row_codes_only",
    "ep_group",
)  # keywords of layers


def keywords_of(function: Any) -> tuple[str, ...]:
    """Return the names of a function's arguments."""
    return tuple(name for name, p in signature(function).parameters.items() if p.kind is not p.VAR_KEYWORD)


# keywords of GroupedLinear that a mixture hands on
SETTINGS = tuple(
    name for name, p in signature(GroupedLinear).parameters.items() if p.default is not p.empty and name not in PARALLEL
)


class Experts(RecipeOfLayers, Sequential):
    """The experts of a mixture: each token goes through the experts that a router chose for it, and y is the sum of
    their outputs, weighted by the router's probabilities.

    It is a `Sequential` of `permute`, `fc1`, `activation`, `fc2` and `unpermute`. In a recipe that quantizes they run
    as one operation each way (rule `experts`). Backward keeps x and the output of `fc1`, and computes the rest again.
    In fp8-delayed, fp8-current and fp8-block no row is copied to its expert: casts read rows where they are. The rule
    needs layers without a bias in `fc2`, and a known scale, which fp8-delayed has once each expert has had rows and a
    step has ended. Otherwise the operations run by other rules, or one after the other; `explain` says why.

    With `fc1_output_storage="fp8"` the fused operation keeps the output of `fc1` as E4M3 codes with a float32 scale for
    every 128 elements of a row: 48 % less than in bfloat16. Forward computes with the output itself, so that y has the
    same bits. Backward decodes the codes into a temporary tensor, and all gradients lose precision: in fp8-block their
    errors against float64 went from about 6.7 % to 7.6 %. In a call that the rule `experts` does not apply to, the
    output of `fc1` is kept unquantized; `explain` says so, and its `saved_tensors` count the bytes.

    No token is dropped, and no size is read on the host, so that a CUDA graph follows a changing routing.

    Args:
        num_experts: the number of experts, 1 to 4096.
        hidden_size: the size of the last dim of x and of y.
        ffn_hidden_size: the size of the activated values. A gated activation makes `fc1` twice as wide.
        activation: as in `LayerNormMLP`: "swiglu", "gelu", "clamped-swiglu" and so on.
        bias: whether the layers have biases. With biases the permutation and the sum are operations of their own.
        recipe: the recipe of both layers: a name, a canonical string or a `Recipe`. None follows `octavo.autocast`.
        fc1_output_storage: the form in which the fused operation keeps the output of `fc1` for backward: "unquantized",
            the default, in its own dtype; or "fp8", as codes.
        device: the device of the parameters.
        dtype: the dtype of the parameters.
        **settings: further keywords of `octavo.GroupedLinear`, for both layers, such as `keep_weight_codes`.

    Raises:
        UnsupportedConfig: `activation`, `fc1_output_storage` or the recipe is unknown, a size is no number from 1 up,
            or `scale_bias` is True.
        UnsupportedShape: `num_experts` is out of range.

    Example:
        >>> experts = octavo.moe.Experts(4, 64, 96, recipe="fp8-block")
        >>> x, logits = torch.randn(10, 64), torch.randn(10, 4)
        >>> probs, indices = logits.softmax(-1).topk(2)
        >>> experts(x, indices, probs).shape
        torch.Size([10, 64])
        >>> experts.fc1.weight.shape
        torch.Size([4, 192, 64])

        The same experts with less memory from forward to backward; the third operation is the activation:

        >>> small = octavo.moe.Experts(4, 64, 96, recipe="fp8-block", fc1_output_storage="fp8")
        >>> x = x.requires_grad_()
        >>> [e.explain(x, indices, probs).saved_tensors[2].activations for e in (experts, small)]
        [15360, 4000]
    """

    refuses_nesting = (
        "Experts takes indices and probs besides x, and sorts them first, which a Sequential around it does not. Call "
        "it between two Sequentials: after(experts(before(x), indices, probs))."
    )

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        ffn_hidden_size: int,
        *,
        activation: str = "swiglu",
        bias: bool = False,
        recipe: str | Recipe | None = None,
        fc1_output_storage: str = "unquantized",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **settings: bool | str,
    ) -> None:
        check_settings("Experts", settings, keywords_of(Experts))
        self.num_experts, self.fc1_output_storage = num_experts, fc1_output_storage
        common: dict[str, Any] = {"bias": bias, "recipe": recipe, "device": device, "dtype": dtype, **settings}
        layers = expert_layers(num_experts, hidden_size, ffn_hidden_size, activation, common)
        layers["fc2"].scales_dy_alone = True
        rules = RULES[fc1_output_storage]
        super().__init__({"permute": Permute(), **layers, "unpermute": Unpermute()}, rules=rules)

    @property
    def fc1_output_storage(self) -> str:
        """The form in which the fused operation keeps the output of `fc1` for backward. Set it to "unquantized" or
        "fp8", from the next forward on."""
        found: str = self.__dict__["fc1_output_storage"]
        return found

    @fc1_output_storage.setter
    def fc1_output_storage(self, storage: str) -> None:
        check_choice(storage, tuple(RULES), what="fc1_output_storage")
        if rules := self.__dict__.get("rules"):  # a constructor sets them after this, and a caller may set others
            own = [rule for rule in rules if rule not in RULES[self.fc1_output_storage]]
            self.rules = (*RULES[storage], *own)
        self.__dict__["fc1_output_storage"] = storage

    def forward(  # type: ignore[override]
        self,
        input: Tensor,
        indices: Tensor | Permutation,
        probs: Tensor,
        *,
        is_first_microbatch: bool | Tensor | None = None,
    ) -> Tensor:
        """Run the experts.

        Args:
            input: x [..., hidden_size], in float32, bfloat16 or float16.
            indices: the experts of each token [..., K], int32 or int64. -1 drops the assignment: it adds nothing to y.
                Any other index of no expert raises on a CPU, and drops the assignment on a GPU, whose values are not
                read, and in a graph. Or a `Permutation` that `octavo.moe.sort` made of such an index.
            probs: the weight of each assignment [..., K], in float32 or in x's dtype. It receives a gradient.
            is_first_microbatch: True quantizes the weights into a cache, False uses the cache, None does neither, as in
                `octavo.GroupedLinear`.

        Returns:
            y [..., hidden_size], in the dtype of x or of torch.autocast where that is on.

        Raises:
            UnsupportedShape: `probs` has another shape than `indices`, or x other tokens; or a permutation is of
                another number of experts, or was made of a mask.
            UnsupportedDtype: x, `indices` or `probs` has the wrong dtype.
            UnsupportedDevice: `indices` or `probs` is on another device than x.
            UnsupportedConfig: on a CPU, an index is neither an expert's nor -1.
        """
        extra_inputs = self._extra_inputs(input, indices, probs)
        flag = {"is_first_microbatch": is_first_microbatch}
        kwargs: Any = None if is_first_microbatch is None else {1: flag, 3: dict(flag)}
        rows = input if input.dim() == 2 else input.flatten(0, -2)
        y = super().forward(rows, *extra_inputs, op_kwargs=kwargs)
        assert isinstance(y, Tensor)
        return y if y.shape == input.shape else y.view(input.shape)

    def explain(  # type: ignore[override]
        self, input: Tensor, indices: Tensor | Permutation, probs: Tensor
    ) -> Explanation:
        """Report how a call runs: which operations run together, which rules apply, and why others do not. It changes
        no state.

        Args:
            input: x, as in a call.
            indices: the experts of each token.
            probs: the weight of each assignment.

        Returns:
            The report of `Sequential.explain`, which prints as text.
        """
        rows = input if input.dim() == 2 else input.flatten(0, -2)
        report = super().explain(rows, *self._extra_inputs(input, indices, probs))
        if self.fc1_output_storage == "unquantized":
            return report
        more = "; the output of fc1 is kept unquantized"
        refused = [r._replace(sentence=r.sentence + more) if r.rule == "experts" else r for r in report.refused]
        return report._replace(refused=tuple(refused))

    def _extra_inputs(self, x: Tensor, indices: Tensor | Permutation, probs: Tensor) -> tuple[Tensor, ...]:
        """Return the extra inputs of the operations, in order, with all leading dims flattened."""
        check_input("Experts", x, owner=self)
        _refuse_swapped(indices, probs)
        check_input("Experts", probs, "probs")
        if isinstance(indices, Permutation):
            check_permutation("Experts", indices)
        index = indices.positions if isinstance(indices, Permutation) else indices
        checked_index("Experts", index)
        for name, t in (("indices", index), ("probs", probs)):
            if t.device != x.device:
                raise UnsupportedDevice(f"x is on {x.device} and {name} on {t.device}. Move them together.")
        if x.dim() < 2 or index.dim() < 2 or index.shape[-1] < 1:
            raise UnsupportedShape(
                f"Experts takes x [..., hidden] and indices [..., K] of two dims or more, K from 1 up; got "
                f"{tuple(x.shape)} and {tuple(index.shape)}."
            )
        if probs.shape != index.shape or index.shape[:-1] != x.shape[:-1]:
            raise UnsupportedShape(
                f"indices and probs have a number for each assignment of each token of x {tuple(x.shape)}, so shape "
                f"({', '.join(map(str, x.shape[:-1]))}, K); got {tuple(index.shape)} and {tuple(probs.shape)}."
            )
        assignments = index.shape[-1]
        if isinstance(indices, Permutation):
            permutation = indices
            if permutation.experts is not None or permutation.sizes.shape[0] != self.num_experts:
                kind = "an index" if permutation.experts is None else "a mask"
                raise UnsupportedShape(
                    f"Experts takes a permutation of an index of its {self.num_experts} experts, got one of {kind} of "
                    f"{permutation.sizes.shape[0]}. Make it with octavo.moe.sort(index, {self.num_experts})."
                )
        else:
            _check_range(index, self.num_experts)
            permutation = sort(index.reshape(-1, assignments), self.num_experts)
        sizes, positions, rows, _ = permutation
        positions = positions.reshape(-1, assignments)
        return positions, rows, sizes, sizes, positions, rows, probs.reshape(-1, assignments)

    def __getstate__(self) -> dict[str, Any]:
        # pickled by name: the conditions of a rule are functions
        own = RULES[self.fc1_output_storage]
        rules: Any = self.rules and tuple([rule.name if rule in own else rule for rule in self.rules])
        return {**super().__getstate__(), "rules": rules}

    def __setstate__(self, state: dict[str, Any]) -> None:
        known = {rule.name: rule for rule in RULES[state["fc1_output_storage"]]}
        rules = state["rules"] and tuple([known.get(rule, rule) for rule in state["rules"]])
        super().__setstate__({**state, "rules": rules})  # type: ignore[no-untyped-call]


def _check_range(index: Tensor, experts: int) -> None:
    """Raise for an index of no expert. On a GPU, where the host would wait for it, the device checks it under
    `octavo.backend.use("checked")`."""
    if torch.compiler.is_compiling() or isinstance(index, FakeTensor):
        return
    if index.device.type != "cpu":
        rule = f"Octavo: Experts takes indices from 0 to {experts - 1}, and -1 for an assignment without an expert"
        backend.check_on_device(lambda: ((index >= -1) & (index < experts)).all(), rule)
        return
    wrong = index[(index < -1) | (index >= experts)]
    if wrong.numel():
        raise UnsupportedConfig(
            f"Experts takes indices from 0 to {experts - 1}, and -1 for an assignment without an expert, got "
            f"{int(wrong[0])}. Check the router's number of experts, or write -1 for assignments to be "
            "dropped."
        )


def _refuse_swapped(indices: Any, probs: Any) -> None:
    both = isinstance(indices, Tensor) and isinstance(probs, Tensor)
    if both and indices.is_floating_point() and not probs.is_floating_point():
        raise UnsupportedDtype(
            f"Experts takes indices of integers, then probs, got {indices.dtype} and {probs.dtype}. route returns them "
            "the other way round: weights, index = octavo.moe.route(...), then experts(x, index, weights)."
        )


def check_settings(title: str, settings: Iterable[str], own: Sequence[str]) -> None:
    """Raise for keywords that neither the class `title`, whose own are `own`, nor its layers take."""
    more = [name for name in SETTINGS if name not in own]
    for name in settings:
        if name in PARALLEL:
            raise UnsupportedConfig(
                f"{title}({name}=...): it does not split its experts over ranks. Split their features with "
                "octavo.moe.permute, octavo.GroupedLinear(parallel_mode=...) and octavo.moe.unpermute, or give each "
                "rank some of the experts, or of their features, with octavo.MoE(ep_group=..., tp_group=...)."
            )
        if name not in (*own, *more):
            raise UnknownSetting(
                f"{title} has no setting {name!r}.{nearest(name, (*own, *more))} It takes {', '.join(own)}, and of "
                f"octavo.GroupedLinear: {', '.join(more)}."
            )


def expert_layers(
    num_experts: int, hidden_size: int, ffn_hidden_size: int, activation: str, settings: dict[str, Any]
) -> dict[str, Any]:
    """Return the layers of experts, `fc1`, `activation` and `fc2`; `settings` are keywords of GroupedLinear."""
    check_whole(hidden_size, what="hidden_size")
    wide = fc1_width(activation, ffn_hidden_size)
    if settings.get("scale_bias"):
        raise UnsupportedConfig(
            "Experts(scale_bias=True): the probabilities multiply the experts' outputs, biases too. Leave it out."
        )
    settings = {"tail": "untouched", **settings}
    column: dict[str, Any] = {}
    row: dict[str, Any] = {}
    if (group := settings.pop("tp_group", None)) is not None:
        blocks = wide // ffn_hidden_size
        column = {"parallel_mode": "column", "tp_group": group, "column_blocks": blocks}
        row = {"parallel_mode": "row", "tp_group": group}
    return {
        "fc1": GroupedLinear(num_experts, hidden_size, wide, **settings, **column),
        "activation": KINDS[activation](),
        "fc2": GroupedLinear(num_experts, ffn_hidden_size, hidden_size, **settings, **row),
    }
