"""`octavo.MoE`: a mixture of experts, from tokens to tokens: router, experts, shared experts, losses, load."""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from octavo._torch.tracing import while_tracing
from octavo.communication.groups import ALONE, Group, name_of
from octavo.errors import UnsupportedConfig, UnsupportedShape, check_choice, check_factor, check_whole, is_whole
from octavo.fusion.blocks import KINDS, fc1_width
from octavo.fusion.sequential import Sequential
from octavo.moe.dispatch import Dispatch, check_combined, check_dispatched, check_dispatcher
from octavo.moe.dispatched_experts import DispatchedExperts, run_experts
from octavo.moe.expert_parallel import ExpertParallel, over_ranks
from octavo.moe.experts import Experts, check_settings, expert_layers, keywords_of
from octavo.moe.losses import balance, z_loss
from octavo.moe.payload import payload_of
from octavo.moe.permutation import sort
from octavo.moe.router import Router
from octavo.moe.routing import counts, first, group_size, route
from octavo.ops.grouped_linear import GroupedLinear
from octavo.ops.inputs import arrived, check_input
from octavo.ops.linear import Linear
from octavo.ops.recipe_of_layers import RecipeOfLayers
from octavo.quant.groups import MAX_GROUPS
from octavo.recipes import Recipe
from octavo.recipes.ambient import process

# keywords of GroupedLinear that Linear has too
COMMON = ("bias", "delay_wgrad_compute", "fuse_wgrad_accumulation", "keep_weight_codes", "strict")


_STORAGE_WITH_DISPATCHER = (
    "MoE(fc1_output_storage=...) is for experts that are fused with their permutation, and a dispatcher takes the "
    "place of that. Leave one of them out."
)
_BUILT = (
    "its experts were built for the other case: with a dispatcher they are a Sequential of fc1, activation and fc2, "
    "without one an octavo.moe.Experts. Build another MoE with dispatcher= as wanted; both have the same state dict: "
    "new.load_state_dict(old.state_dict()) moves the parameters. One dispatcher may be replaced by another."
)


class MoE(RecipeOfLayers, nn.Module):
    """A mixture of experts in place of a transformer's MLP: each token goes to the experts that a router chooses.

    It consists of `router`, an `octavo.moe.Router`, which computes in float32, `experts`, an `octavo.moe.Experts` in
    the recipe, and, if asked for, `shared`, an MLP for all tokens, with `shared_gate`. In a recipe that quantizes the
    experts are one operation each way. Memory is allocated for tokens · top_k rows, so that no token is dropped
    whatever the routing is. Nothing is read on the host: a CUDA graph follows a changing routing.

    After a forward `load` has the number of assignments that chose each expert, and in training `aux_loss` the sum of
    the losses with a coefficient, which you add to your own loss. The next forward overwrites `load` in place, where a
    CUDA graph finds it: clone it to keep its numbers.

    Args:
        hidden_size: the size of the last dim of x and of y.
        ffn_hidden_size: the size of the activated values of an expert. A gated activation makes `fc1` twice as wide.
        num_experts: the number of experts, 1 to 4096.
        top_k: the number of experts for each token.
        recipe: the recipe of the experts and of the shared MLP: a name, a canonical string or a `Recipe`. None follows
            `octavo.autocast`. The router has none.
        activation: as in `LayerNormMLP`: "swiglu", "gelu", "clamped-swiglu" and so on.
        score: "softmax", "sigmoid" or "sqrtsoftplus", as in `octavo.moe.route`.
        normalize: divide the weights of a token by their sum, as in `octavo.moe.route`. None, the default, is True
            unless `top_k` is 1.
        groups: the number of groups of experts, as in `octavo.moe.route`, or None.
        top_groups: the number of groups of a token, as in `octavo.moe.route`, or None.
        group_best: groups are ranked by the sum of this number of their best scores.
        scale: multiplies the weights of the experts' outputs.
        expert_bias: whether there is a bias `expert_bias` for the choice of experts, a float32 buffer that is saved
            with the parameters. `octavo.moe.update_bias(moe.expert_bias, moe.load)` moves it.
        aux_loss_coef: the coefficient of `octavo.moe.aux_loss` in `aux_loss`.
        z_loss_coef: the coefficient of `octavo.moe.z_loss` in `aux_loss`.
        shared_ffn_size: the size of the activated values of the shared MLP. None, the default, is no shared MLP.
        shared_gate: multiply the shared MLP's output by the sigmoid of a linear layer of x.
        ep_group: the ranks over which the experts are split, equally many on each: a ProcessGroup, its name, a
            DeviceMesh of one dim or (mesh, dim). Each rank passes its own tokens; an `octavo.moe.ExpertParallel` moves
            them. Sizes are those of the whole layer, and seeds alike on all ranks give the parameters of one process.
            None, the default, has all experts here, and so has a group of one rank.
        tp_group: with `ep_group` or a dispatcher, the ranks over which the features of each expert are split, `fc1` as
            a column layer and `fc2` as a row layer. They have the same tokens.
        loss_group: the ranks whose tokens count together in `aux_loss`, as in `octavo.moe.aux_loss`. None, the default,
            counts those of this rank alone.
        dispatcher: an `octavo.moe.Dispatch`, which moves tokens to their experts and back. `experts` is then a
            `Sequential` of `fc1`, `activation` and `fc2`, with the same parameters. None, the default, leaves that to
            `experts`, which is faster.
        num_local_experts: with a dispatcher, the number of experts of this process. None, the default, is all.
        device: the device of the parameters.
        dtype: the dtype of the parameters.
        **settings: further keywords of `octavo.moe.Experts` and `octavo.GroupedLinear`, such as `keep_weight_codes`;
            with a dispatcher, of `octavo.GroupedLinear` alone. Those that `octavo.Linear` has too apply to the shared
            MLP as well.

    Raises:
        UnsupportedConfig: a setting is unknown or out of range, or does not fit the others.
        UnsupportedShape: `num_experts` is out of range.

    Example:
        >>> moe = octavo.MoE(64, 96, num_experts=8, top_k=2, recipe="fp8-block", aux_loss_coef=0.01)
        >>> y = moe(torch.randn(4, 10, 64))
        >>> y.shape, moe.load.sum()
        (torch.Size([4, 10, 64]), tensor(80))
        >>> (y.square().mean() + moe.aux_loss).backward()
        >>> sorted(moe.state_dict())
        ['experts.fc1.weight', 'experts.fc2.weight', 'router.weight']
    """

    load: Tensor
    expert_bias: Tensor | None
    dropped: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        recipe: str | Recipe | None = None,
        activation: str = "swiglu",
        score: str = "softmax",
        normalize: bool | None = None,
        groups: int | None = None,
        top_groups: int | None = None,
        group_best: int = 2,
        scale: float = 1.0,
        expert_bias: bool = False,
        aux_loss_coef: float = 0.0,
        z_loss_coef: float = 0.0,
        shared_ffn_size: int | None = None,
        shared_gate: bool = False,
        ep_group: Group = None,
        tp_group: Group = None,
        loss_group: Group = None,
        dispatcher: Dispatch | None = None,
        num_local_experts: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **settings: bool | str,
    ) -> None:
        super().__init__()
        if ep_group is not None:
            dispatcher = over_ranks(ep_group, dispatcher, num_local_experts, tp_group is not None)
        if isinstance(dispatcher, ExpertParallel) and num_local_experts is None:
            num_local_experts = dispatcher.local_experts(num_experts)
        _check_experts(num_experts, num_local_experts, dispatcher, settings, tp_group)
        own = keywords_of(MoE)
        check_settings("MoE", settings, own if dispatcher is not None else (*own, "fc1_output_storage"))
        group_size(num_experts, top_k, score, normalize, groups, top_groups, group_best)
        for name, factor in (("scale", scale), ("aux_loss_coef", aux_loss_coef), ("z_loss_coef", z_loss_coef)):
            check_factor(factor, what=name)
        for name, switch in (("expert_bias", expert_bias), ("shared_gate", shared_gate)):
            check_choice(switch, (True, False), what=name)
        check_whole(hidden_size, what="hidden_size")
        if shared_ffn_size is not None:
            check_whole(shared_ffn_size, what="shared_ffn_size")
        if shared_gate and shared_ffn_size is None:
            raise UnsupportedConfig("MoE(shared_gate=True) has no shared MLP to gate. Pass shared_ffn_size too.")
        self.hidden_size, self.num_experts, self.top_k = hidden_size, num_experts, top_k
        self.num_local_experts = num_experts if num_local_experts is None else num_local_experts
        self.score, self.scale = score, scale
        self.normalize, self.groups, self.top_groups, self.group_best = normalize, groups, top_groups, group_best
        self.aux_loss_coef, self.z_loss_coef = aux_loss_coef, z_loss_coef
        self.dispatcher, self.loss_group = dispatcher, None if loss_group is None else name_of(loss_group)
        self._loss: Tensor | None = None
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        layers: dict[str, Any] = {"recipe": recipe, **place, **settings}
        self.router = Router(hidden_size, num_experts, **place)
        self.experts: Experts | DispatchedExperts
        if dispatcher is None:
            self.experts = Experts(num_experts, hidden_size, ffn_hidden_size, activation=activation, **layers)
        else:
            common, number = {"bias": False, **layers, "tp_group": tp_group}, self.num_local_experts
            if isinstance(dispatcher, ExpertParallel):
                common, number = {**common, "ep_group": dispatcher.group}, num_experts
            self.experts = DispatchedExperts(expert_layers(number, hidden_size, ffn_hidden_size, activation, common))
            if self.num_local_experts != num_experts:  # scaled by own amaxes, whatever ranks `octavo.step` gets
                for layer in self.experts:
                    if isinstance(layer, GroupedLinear) and getattr(layer, "ep_group", None) is None:
                        layer.amax_group = ALONE
        self.shared: Sequential | None = None
        self.shared_gate: Router | None = None
        if shared_ffn_size is not None:
            common = {"recipe": recipe, **place, "bias": False}
            common |= {name: value for name, value in settings.items() if name in COMMON}
            self.shared = Sequential({
                "fc1": Linear(hidden_size, fc1_width(activation, shared_ffn_size), **common),
                "activation": KINDS[activation](),
                "fc2": Linear(shared_ffn_size, hidden_size, **common),
            })  # fmt: skip
        if shared_gate:
            self.shared_gate = Router(hidden_size, 1, **place)
        self.register_buffer(
            "expert_bias", torch.zeros(num_experts, dtype=torch.float32, device=device) if expert_bias else None
        )
        self.register_buffer("load", torch.zeros(num_experts, dtype=torch.int64, device=device), persistent=False)
        # the most since `overflow` was called, and since a step has ended
        dropped = None if dispatcher is None else torch.zeros(2, dtype=torch.int64, device=device)
        self.register_buffer("dropped", dropped, persistent=False)

    @property
    def fc1_output_storage(self) -> str:
        """The form in which the experts keep the output of `fc1` for backward, as in `Experts`. Set it to "unquantized"
        or "fp8". With a dispatcher it is "unquantized"."""
        return self.experts.fc1_output_storage if isinstance(self.experts, Experts) else "unquantized"

    @fc1_output_storage.setter
    def fc1_output_storage(self, storage: str) -> None:
        if not isinstance(self.experts, Experts):
            raise UnsupportedConfig(_STORAGE_WITH_DISPATCHER)
        self.experts.fc1_output_storage = storage

    def reset_parameters(self) -> None:
        """Set `expert_bias` and `load` to zero. The layers inside have a `reset_parameters` of their own.

        Example:
            >>> moe = octavo.MoE(64, 96, 8, 2, expert_bias=True, device="meta").to_empty(device="cpu")
            >>> for module in moe.modules():
            ...     if hasattr(module, "reset_parameters"):
            ...         module.reset_parameters()
            >>> moe.expert_bias.count_nonzero()
            tensor(0)
        """
        for buffer in (self.expert_bias, self.load, self.dropped):
            if buffer is not None:
                buffer.zero_()

    def forward(
        self, input: Tensor, *, tokens: Tensor | int | None = None, is_first_microbatch: bool | Tensor | None = None
    ) -> Tensor:
        """Route the tokens, run their experts, and sum the weighted outputs.

        Args:
            input: x [..., hidden_size], in float32, bfloat16 or float16.
            tokens: the number of tokens that count, in the order of the flattened leading dims: an int, or an integer
                tensor of one element on the device, which a CUDA graph reads at every replay. The tokens after them are
                padding: no expert sees them, their y is zero but for the shared MLP's, and `load` and `aux_loss` leave
                them out. Their x must be finite. None, the default, counts all.
            is_first_microbatch: True quantizes the weights into a cache, False uses the cache, None does neither, as in
                `octavo.Linear`.

        Returns:
            y [..., hidden_size], in the dtype of x or of torch.autocast where that is on.

        Raises:
            UnsupportedShape: x has another last dim or fewer than two dims, or `tokens` more than one element.
            UnsupportedDtype: x or `tokens` has the wrong dtype.
            UnsupportedDevice: x and the parameters are on two devices.
        """
        x = self._rows(input)
        if self.load.is_meta and not x.is_meta:
            self._place_counts()
        if self.aux_loss_coef or self.z_loss_coef:
            # the last loss would keep gradient accumulators of the stream it ran on, and a capture refuses those
            self._loss = None
        logits = self.router(x)
        weights, index = route(
            logits, self.top_k, score=self.score, normalize=self.normalize, bias=self.expert_bias, groups=self.groups,
            top_groups=self.top_groups, group_best=self.group_best, scale=self.scale,
        )  # fmt: skip
        if (mask := first(tokens, x)) is not None:
            index = torch.where(mask, index, -1)
        flag = {} if is_first_microbatch is None else {"is_first_microbatch": is_first_microbatch}
        shared = None
        if self.dispatcher is None:
            if isinstance(self.experts, DispatchedExperts):
                raise UnsupportedConfig(f"MoE.dispatcher was set to None, and {_BUILT}")
            permutation = sort(index, self.num_experts)
            load = permutation.sizes
            y: Tensor = self.experts(x, permutation, weights, **flag)
        else:
            load = counts(index, self.num_experts)
            y, shared = self._dispatched(self.dispatcher, x, index, weights, flag)
        if not process.dry:
            self.load.copy_(load)
        if self.aux_loss_coef or self.z_loss_coef:
            self._loss = self._losses(logits, load, tokens) if self.training else None
        if self.shared is not None:
            y = y + (self._shared_output(x, flag) if shared is None else shared)
        return y if input.dim() == 2 else y.view(*input.shape[:-1], y.shape[-1])

    def _dispatched(
        self, dispatcher: Dispatch, x: Tensor, index: Tensor, weights: Tensor, flag: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        """Return the weighted sums, and the shared MLP's output if that was computed while rows travelled."""
        if isinstance(self.experts, Experts):
            raise UnsupportedConfig(f"MoE.dispatcher was set to {type(dispatcher).__name__}, and {_BUILT}")
        shared: list[Tensor] = []
        given: dict[str, Any] = {}
        if getattr(dispatcher, "takes_payload", False):
            given["payload"] = payload_of(self.experts)
            if self.shared is not None:
                given["meanwhile"] = lambda: shared.append(self._shared_output(x, flag))
        sent = dispatcher.dispatch(x, index, weights, self.num_experts, **given)
        check_dispatched(dispatcher, sent, self.num_local_experts)
        if sent.dropped is not None and not process.dry:
            assert self.dropped is not None
            self.dropped.copy_(torch.maximum(self.dropped, sent.dropped))  # the same if a checkpoint runs this again
        rows = run_experts(self.experts, sent, flag)
        y = dispatcher.combine(rows, sent)
        check_combined(dispatcher, y, x, rows)
        return y, shared[0] if shared else None

    def _shared_output(self, x: Tensor, flag: dict[str, Any]) -> Tensor:
        assert self.shared is not None
        # `octavo.revert` leaves plain layers here, which take no flag
        flags = {i: dict(flag) for i in (0, 2) if flag and isinstance(self.shared[i], Linear)}
        shared: Tensor = self.shared(x, op_kwargs=flags or None)
        if self.shared_gate is not None:
            shared = shared * self.shared_gate(x).sigmoid().to(shared.dtype)
        return shared

    def _losses(self, logits: Tensor, load: Tensor, tokens: Tensor | int | None) -> Tensor:
        loss = logits.new_zeros(())
        if self.aux_loss_coef:
            loss = loss + self.aux_loss_coef * balance(logits, load, self.top_k, self.score, tokens, self.loss_group)
        if self.z_loss_coef:
            loss = loss + self.z_loss_coef * z_loss(logits, tokens=tokens, group=self.loss_group)
        return loss

    def _rows(self, x: Any) -> Tensor:
        x = arrived(x)
        check_input("MoE", x, owner=self)
        if x.dim() < 2 or x.shape[-1] != self.hidden_size:
            raise UnsupportedShape(
                f"This MoE takes inputs [..., {self.hidden_size}] of two dims or more, got {tuple(x.shape)}. Check the "
                "layer before it, or hidden_size."
            )
        rows: Tensor = x if x.dim() == 2 else x.flatten(0, -2)
        return rows

    # -- results of the last forward -----------------------------------------------------------------------------------

    @property
    def aux_loss(self) -> Tensor:
        """The losses of the last forward, each multiplied by its coefficient, as a tensor without dims that you add to
        your own loss. It is zero if no coefficient is set, before the first forward, and after one in eval mode."""
        if self._loss is None:
            return torch.zeros((), dtype=torch.float32, device=self.router.weight.device)
        return self._loss

    def overflow(self) -> int:
        """Return the most assignments that one forward dropped since the last call, and starts to count anew.

        Only a dispatcher with fewer rows than assignments drops any; `octavo.step` warns of it too, by a count of its
        own. The call waits for the device.

        Returns:
            The number of assignments.

        Example:
            >>> octavo.MoE(64, 96, 8, 2).overflow()
            0
        """
        if self.dropped is None or self.dropped.is_meta:
            return 0
        number = int(self.dropped[0].item())
        self.dropped[0].zero_()
        return number

    # -- nn.Module -----------------------------------------------------------------------------------------------------

    @while_tracing
    def _place_counts(self) -> None:
        """Move the counts of the last forward from the meta device to the parameters, which were assigned: no state
        dict has the counts."""
        for name in ("load", "dropped"):
            if (counts := getattr(self, name)) is not None:
                setattr(self, name, torch.zeros_like(counts, device=self.router.weight.device))

    def extra_repr(self) -> str:
        named = {"score": "softmax", "normalize": None, "groups": None, "top_groups": None, "scale": 1.0,
                 "aux_loss_coef": 0.0, "z_loss_coef": 0.0, "dispatcher": None}  # fmt: skip
        changed = [f"{name}={getattr(self, name)}" for name, usual in named.items() if getattr(self, name) != usual]
        if self.expert_bias is not None:
            changed.append("expert_bias=True")
        return ", ".join([f"num_experts={self.num_experts}, top_k={self.top_k}", *changed])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Keep the bias in float32: 16 bits would round its small steps away. Set buffers that come from the meta
        device to zero: memory that `to_empty` allocates has any values, and the counts are in no state dict."""
        bias, was_meta = self.expert_bias, self.load.is_meta
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        moved = self.expert_bias
        if bias is not None and moved is not None and moved.dtype != bias.dtype:
            self.expert_bias = bias.to(moved.device)
        if was_meta and not self.load.is_meta:
            self.reset_parameters()
        return self

    def _load_from_state_dict(self, *given: Any) -> None:
        """Keep the bias in float32 where `assign=True` puts a tensor of 16 bits in its place."""
        super()._load_from_state_dict(*given)
        if self.expert_bias is not None and self.expert_bias.dtype != torch.float32:
            self.expert_bias = self.expert_bias.float()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_loss": None}  # a part of the graph of one forward


def _check_experts(
    number: int, local: int | None, dispatcher: Dispatch | None, settings: dict[str, Any], tp_group: Any
) -> None:
    if not is_whole(number) or not 1 <= number <= MAX_GROUPS:
        raise UnsupportedShape(f"MoE takes 1 to {MAX_GROUPS} experts, got num_experts={number!r}.")
    if dispatcher is not None:
        check_dispatcher(dispatcher)
    if local is not None and dispatcher is None:
        raise UnsupportedConfig(
            f"MoE(num_local_experts={local}) needs a dispatcher, which moves tokens to experts of other processes. "
            "Pass dispatcher too, or leave it out."
        )
    if local is not None and (not is_whole(local) or not 1 <= local <= number):
        raise UnsupportedConfig(f"num_local_experts is a number from 1 to num_experts, {number}, got {local!r}.")
    if tp_group is not None and dispatcher is None:
        raise UnsupportedConfig(
            "MoE(tp_group=...) splits the features of experts that stand between a dispatcher's two calls. Pass "
            "ep_group too, which may have one rank, or a dispatcher."
        )
    if dispatcher is not None and "fc1_output_storage" in settings:
        raise UnsupportedConfig(_STORAGE_WITH_DISPATCHER)
