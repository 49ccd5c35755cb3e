"""Experts over ranks: `ExpertParallel`, a dispatcher of `octavo.MoE` whose ranks have a part of the experts each.

Each rank routes its own tokens. Forward casts them once, sends each to the ranks of its experts as codes with their
scales, and sends the experts' outputs back, which the weights multiply where the tokens are. Backward sends dy there,
as codes too, and dx back.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from octavo._torch.autograd import mapped
from octavo._torch.cuda import is_capturing
from octavo._torch.fakes import FakeTensor
from octavo._torch.tracing import Untraced
from octavo.communication.groups import Group, name_of, size_of
from octavo.communication.rank_checks import check_alike
from octavo.errors import UnsupportedConfig, check_choice
from octavo.moe.agreed_scale import History
from octavo.moe.dispatch import Dispatch, Dispatched
from octavo.moe.expert_exchange import Exact, Padded, Plan, Ranks
from octavo.moe.payload import NO_CODES, WHOLE, Payload, decoded, encoded
from octavo.moe.permutation import check_capacity, unpermute
from octavo.moe.symmetric_exchange import Symmetric
from octavo.ops.inputs import autocast_input
from octavo.quant.gradient_codes import GradientCodes
from octavo.quant.grouped import GroupedTensor
from octavo.quant.quantizer import Quantizer

PAYLOADS = ("auto", "codes", "values")
ENGINES: dict[str, Any] = {"all-to-all": Exact, "padded": Padded, "symmetric": Symmetric}


class ExpertParallel(Dispatch):
    """A dispatcher over the ranks of a group, which have equally many experts each: rank 0 the first ones, and so on.

    `octavo.MoE(..., ep_group=group)` makes one with the default settings. Pass `dispatcher=ExpertParallel(...)` for
    others. Either way each rank gets its part of the experts.

    Recipes whose x has scales of its own in each row (fp8-rowwise, fp8-block, mxfp8) send codes and scales, about half
    of the bytes of bfloat16; backward sends dy so as well. The experts then make the column codes, for the weight
    gradient, from row codes: results are those of one process that does so, bit for bit. Other recipes send values.
    With `payload="codes"` fp8-current and fp8-delayed send codes too, of one scale for all experts, on which the ranks
    agree before the cast; where no codes can be sent it raises. Outputs and dx travel as values. So does all that a
    graph of torch.compile sends, because its gradients are tensors of values.

    Args:
        group: the ranks: a ProcessGroup, its name, a DeviceMesh of one dim or (mesh, dim). None is the default group.
        capacity: for the engines "padded" and "symmetric", the rows for each pair of ranks; "symmetric" has ranks ·
            capacity rows for all pairs together. Assignments beyond are dropped, and counted: `MoE.overflow` and
            `octavo.step` report them. None has a row for every assignment, whatever the routing is: ranks · tokens ·
            top_k rows on each rank, and as many tokens on all ranks.
        payload: "codes", "values", or "auto", the default: codes where the recipe allows and the engine is not
            "padded", which graphs of torch.compile may have.
        engine: "all-to-all" sends exactly the rows that there are; the host waits for their numbers. "padded" sends a
            fixed number, and the host reads nothing, for CUDA graphs and torch.compile. "symmetric" has ranks write to
            each other's memory, on one machine with NVLink, or between processes on a CPU; the host reads nothing, and
            a CUDA graph takes it. "auto", the default, is "padded" if there is a capacity, and "all-to-all" if not.

    Raises:
        UnsupportedConfig: a setting is unknown, `capacity` is no number of rows or given to "all-to-all", or there is
            no such group.

    Example:
        >>> ep = octavo.moe.ExpertParallel()  # of one process here; under torchrun, of all
        >>> moe = octavo.MoE(64, 96, num_experts=8, top_k=2, recipe="fp8-block", dispatcher=ep)
        >>> moe(torch.randn(10, 64)).shape
        torch.Size([10, 64])
        >>> ep
        ExpertParallel(ranks=1, engine='all-to-all', payload='auto')
    """

    takes_payload = True

    def __init__(
        self, group: Group = None, *, capacity: int | None = None, payload: str = "auto", engine: str = "auto"
    ) -> None:
        check_modes(payload, engine)
        if capacity is not None:
            check_capacity(capacity)
        if capacity is not None and engine == "all-to-all":
            raise UnsupportedConfig(
                f"ExpertParallel(capacity={capacity}) is a number of rows for engine='padded': 'all-to-all' sends "
                "exactly the rows that there are. Leave one of them out."
            )
        self.group = name_of(group)
        self.ranks = size_of(self.group)
        self.capacity, self.payload = capacity, payload
        self.engine = engine if engine != "auto" else "all-to-all" if capacity is None else "padded"
        self._ranks_checked = False

    def __repr__(self) -> str:
        capacity = "" if self.capacity is None else f", capacity={self.capacity}"
        return f"ExpertParallel(ranks={self.ranks}, engine={self.engine!r}, payload={self.payload!r}{capacity})"

    def op_describe(self) -> str:
        """Return what messages call this dispatcher."""
        return repr(self)

    def dispatch(  # type: ignore[override]
        self, x: Tensor, index: Tensor, weights: Tensor, num_experts: int, *, payload: Payload = NO_CODES,
        meanwhile: Callable[[], None] | None = None,
    ) -> Dispatched:  # fmt: skip
        """Send tokens to the ranks of their experts.

        Args:
            x: the tokens [T, hidden].
            index: the experts of each token [T, K].
            weights: the weight of each assignment [T, K].
            num_experts: the number of experts of all ranks.
            payload: the quantizers of the experts, which `octavo.MoE` passes.
            meanwhile: a function that is called while the rows travel.

        Returns:
            The rows of this rank's experts.

        Raises:
            UnsupportedConfig: the ranks do not divide the experts, differ, or have another number than before; a graph
                cannot hold the engine; or codes are asked for that the recipe does not have.
            UnsupportedHardware: for "symmetric", the ranks do not map each other's memory.
        """
        if torch.compiler.is_compiling() and (why := self._unsupported_in_graph()):
            torch._dynamo.graph_break(msg=why)  # under fullgraph=True this is the error
            _refused.call(why)
        self._check_experts(num_experts)
        x = autocast_input("ExpertParallel", x, self)  # type: ignore[arg-type]
        if self.engine == "all-to-all" and x.is_cuda and is_capturing():
            _refuse(self._unsupported_in_graph())
        spec, dy_spec = (None, None) if x.is_meta else self._quantizers(payload)
        self._check_alike(x, weights, num_experts, spec)
        ranks = Ranks(self.group, self.ranks, "ExpertParallel" if torch.compiler.is_compiling() else repr(self))
        plan: Plan = ENGINES[self.engine](x.detach(), index, num_experts, ranks, self.capacity)
        if spec is None:
            rows: Any = plan.tokens_to_experts(x)
            _pass_time(meanwhile)
            plan.wait()
        else:
            rows = _sent_as_codes(x, spec, plan, payload.x_history, meanwhile)
        needs = torch.is_grad_enabled() and dy_spec is not None and not torch.compiler.is_compiling()
        dy_codes = GradientCodes() if needs else None
        observed = None if payload.dy_history is None else (payload.dy_history, payload.dy_history.observes())
        state = plan, weights, dy_spec if needs else None, dy_codes, observed or (None, False)
        buffers = (None, None) if payload.is_split else plan.buffers()  # sums over ranks have memory of their own
        return Dispatched(rows, plan.sizes, state, plan.dropped, *buffers, dy_codes)

    def combine(self, rows: Tensor, dispatched: Dispatched) -> Tensor:
        """Send the experts' rows back to their tokens, and sum them with the weights.

        Args:
            rows: the experts' outputs.
            dispatched: the result of `dispatch`.

        Returns:
            y [T, hidden].
        """
        state: Any = dispatched.state
        plan, weights, dy_spec, dy_codes, observed = state

        def by_codes(dy: Tensor) -> Tensor:
            """Send dy to the experts as codes, past autograd."""
            sent, scale = encoded(dy, dy_spec, plan, *observed)
            arrived = plan.send(sent)
            plan.wait()
            codes: Tensor = dy_codes.put(decoded(arrived, dy_spec, scale, dy.shape[1], dy.dtype, plan))
            return codes

        returned = plan.to_tokens(rows) if dy_codes is None else mapped(rows, plan.to_tokens, by_codes)
        # rows of no assignment are not sent, and count only where one scale belongs to all of them
        tail = "zero" if dy_spec is not None and dy_spec.block == WHOLE else "untouched"
        return unpermute(returned, plan.permutation, weights, tail=tail)

    def local_experts(self, num_experts: int) -> int:
        """Return how many experts each rank has.

        Args:
            num_experts: the number of experts of all ranks.

        Returns:
            The number on this rank, and on each other.

        Raises:
            UnsupportedConfig: the ranks do not divide the experts, or their number has changed.
        """
        self._check_experts(num_experts)
        return num_experts // self.ranks

    # -- what a call needs ---------------------------------------------------------------------------------------------

    def _unsupported_in_graph(self) -> str:
        if self.engine == "all-to-all":
            return (
                "ExpertParallel(engine='all-to-all') reads on the host how many rows change ranks, which a graph "
                "cannot. Use engine='padded', with a capacity if you like, or leave this layer out of the graph."
            )
        if self.engine == "symmetric":
            return (
                "ExpertParallel(engine='symmetric') has ranks write to each other's memory, which no operator of a "
                "graph says. Use engine='padded', or leave this layer out of the graph; a CUDA graph takes it."
            )
        if self.payload == "codes":
            return (
                "ExpertParallel(payload='codes') passes codes of dy to backward beside autograd, and a graph's "
                "gradients are tensors. Use payload='values', or leave this layer out of the graph."
            )
        return ""

    def _quantizers(self, payload: Payload) -> tuple[Quantizer | None, Quantizer | None]:
        """Return those of x and dy as codes on the wire; None for values."""
        by_default = self.payload == "auto" and (self.engine == "padded" or payload.one_scale)
        if self.payload == "values" or by_default:
            return None, None
        if self.payload == "codes" and payload.why:
            raise UnsupportedConfig(
                f"ExpertParallel(payload='codes'): {payload.why}. Use payload='auto' or 'values', or a recipe whose "
                "codes travel: fp8-rowwise, fp8-block, mxfp8, fp8-current, fp8-delayed."
            )
        return payload.x, payload.dy

    def _check_experts(self, experts: int) -> None:
        size = size_of(self.group)
        if size != self.ranks:
            raise UnsupportedConfig(
                f"{self!r} was made for {self.ranks} ranks of {_title(self.group)}, which has {size} now. Call "
                "torch.distributed.init_process_group before you make the layer, and destroy_process_group after its "
                "last call."
            )
        if experts % size:
            raise UnsupportedConfig(
                f"{self!r} gives each rank equally many experts, and {experts} do not divide by {size}. Change "
                "num_experts, or the ranks of the group."
            )

    def _check_alike(self, x: Tensor, weights: Tensor, experts: int, spec: Quantizer | None) -> None:
        """Raise if the ranks call it in different ways, at the first call, and on a CPU at each."""
        if self.ranks == 1 or torch.compiler.is_compiling() or x.is_meta or isinstance(x, FakeTensor):
            return
        if self._ranks_checked and x.device.type != "cpu":
            return
        tokens = f", {x.shape[0]} tokens" if self.engine != "all-to-all" and self.capacity is None else ""
        grads = torch.is_grad_enabled() and x.requires_grad
        own = (
            f"{self!r}, {experts} experts, top_k={weights.shape[1]}, x {x.dtype} [tokens, {x.shape[1]}]{tokens}, sent "
            f"as {'values' if spec is None else spec}{', with a gradient' if grads else ''}"
        )
        rule = f"The {self.ranks} ranks of experts call their layer alike"
        check_alike(self, self.group, x, rule, own, "Build the same layer on all ranks, in the same recipe.")


def check_modes(payload: str, engine: str) -> None:
    """Raise if a setting is unknown."""
    check_choice(payload, PAYLOADS, what="ExpertParallel.payload")
    check_choice(engine, ("auto", *ENGINES), what="ExpertParallel.engine")


def _refuse(why: str) -> None:
    raise UnsupportedConfig(why)


_refused = Untraced(_refuse, "octavo: this dispatcher cannot be part of a graph")


def _title(group: str) -> str:
    return f"the process group {group!r}" if group else "the default process group"


def _pass_time(meanwhile: Callable[[], None] | None) -> None:
    if meanwhile is not None:
        meanwhile()


# -- codes on the wire -------------------------------------------------------------------------------------------------


def _sent_as_codes(
    x: Tensor, spec: Quantizer, plan: Plan, history: History | None, meanwhile: Callable[[], None] | None
) -> GroupedTensor:
    """Cast x once, send codes and scales, and put what arrives in the groups of the experts."""
    observes = history is not None and history.observes() and torch.is_grad_enabled()
    rows, scale = encoded(x.detach(), spec, plan, history, observes)
    arrived = plan.send_tokens(rows)
    _pass_time(meanwhile)
    plan.wait()
    anchor = None
    if x.requires_grad and torch.is_grad_enabled():
        shape = arrived.shape[0], x.shape[1]
        anchor = mapped(  # dx comes back to the tokens, and is summed for each
            x, lambda x: x.new_zeros(1).expand(shape),
            lambda dy: unpermute(plan.to_tokens(dy.contiguous()), plan.permutation),
        )  # fmt: skip
    return decoded(arrived, spec, scale, x.shape[1], x.dtype, plan, anchor)


# -- in a mixture ------------------------------------------------------------------------------------------------------


def over_ranks(group: Any, dispatcher: Any, local: int | None, splits_features: bool) -> ExpertParallel | None:
    """Return the dispatcher over the ranks of a group; None for a group of one rank, whose experts are all here and
    fused with their permutation, unless their features are split."""
    if dispatcher is not None or local is not None:
        raise UnsupportedConfig(
            "MoE(ep_group=...) makes a dispatcher and gives each rank its experts. Leave dispatcher and "
            "num_local_experts out, or pass dispatcher=octavo.moe.ExpertParallel(group, ...) instead of ep_group."
        )
    return None if size_of(name_of(group)) == 1 and not splits_features else ExpertParallel(group)
