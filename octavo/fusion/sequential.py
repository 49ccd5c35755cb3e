"""`octavo.Sequential`: an `nn.Sequential` that runs consecutive operations together.

It calls ordinary modules as `nn.Sequential` does. The operations between them form groups, one `OperationFuser` each.
Sequentials inside are flattened: their operations fuse with their neighbours'.

Operations may take extra inputs and return extra outputs. The caller passes and receives them in order of operation and
slot. Those with a channel connect within the Sequential, also across ordinary modules.
"""

import copy
import itertools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from octavo._torch.tensors import tree_map
from octavo._torch.tracing import Untraced, while_tracing
from octavo.errors import UnsupportedConfig
from octavo.fusion.custom.legacy import outside, run_legacy
from octavo.fusion.layout import Layout, Part, check_there, routed, taken_apart
from octavo.fusion.plan import Planned, Run
from octavo.fusion.rule import FREE, KNOWN_SCALE, SIDES, NotFired, Rule, check_name, global_rules
from octavo.fusion.runs import Step, Told, Wire, told_run
from octavo.fusion.saved_tensor_report import SavedTensorReport
from octavo.ops.inputs import refuse_symbol
from octavo.ops.operation import WATCHED, FusibleOperation, NoTorchScript, has_hooks
from octavo.quant import QTensor
from octavo.text import plural

OUTPUT_BUFFER_KEY = "out"
"""The keyword of a GroupedLinear for the tensor that receives y: `model(x, op_kwargs={0: {OUTPUT_BUFFER_KEY: y}})`."""

GRAD_INPUT_BUFFER_KEY = "dgrad_out"
"""The keyword of a GroupedLinear for the tensor that receives dx, in `op_kwargs` too."""


class Explanation(NamedTuple):
    """The result of `Sequential.explain`: how a call runs. It prints as text.

    Attributes:
        runs: groups of operations that run together, in order. Each is one node of autograd's graph.
        fired: names of the fusion rules that apply.
        refused: rules whose pattern is present and that do not apply, and why.
        alone: modules and operations that join no run, and why.
        saved_tensors: the memory that the operations of runs keep for backward; it prints as a table of its own.
    """

    runs: tuple[Run, ...]
    fired: tuple[str, ...]
    refused: tuple[NotFired, ...]
    alone: tuple[str, ...] = ()  # operations that join no run, and why
    saved_tensors: SavedTensorReport = SavedTensorReport()

    def __str__(self) -> str:
        lines = []
        for run in self.runs:
            lines.append(f"run of {', '.join(run.ops)}")
            lines.append(f"  forward   {' | '.join(run.forward)}")
            lines.append(f"  backward  {' | '.join(run.backward) or 'nothing'}")
        lines += [f"refused: {r.rule} on {', '.join(r.ops)}: {r.sentence} ({r.condition})" for r in self.refused]
        return "\n".join([*lines, *[f"by itself: {text}" for text in self.alone]])


NO_OPERATION = "it is no operation of Octavo's, and is called as it is"


class Sequential(NoTorchScript, nn.Sequential):
    """An `nn.Sequential` that runs consecutive operations of `octavo.ops` together, fused where a rule applies.

    It calls ordinary modules as `nn.Sequential` does, and has the list operations (`append`, `[i]`, `+`) and the state
    dict of one. A Sequential inside another one is flattened: its operations fuse with their neighbours'.

    Args:
        *modules: operations and modules, in order; or one dict from names to them.
        rules: fusion rules of this Sequential, tried before the global ones: `ops.Forward(rule)`, `ops.Backward(rule)`
            or `ops.Joint(rule)`. None turns fusion off, which helps to compare results.
        require: the name of a fusion rule that must apply, or several names. A call in which one does not apply raises
            an error that says why. Use it where a lost fusion would be a silent loss of speed.

    Raises:
        UnsupportedConfig: `rules` is no tuple of rules with sides, a rule has the name of one of Octavo's, or the
            channels of the operations do not fit together.

    Example:
        >>> from octavo import ops
        >>> mlp = octavo.Sequential(
        ...     ops.RMSNorm(64),
        ...     ops.Linear(64, 128, recipe="fp8-block"),
        ...     ops.GELU(),
        ...     ops.Linear(128, 64, recipe="fp8-block"),
        ... )
        >>> y = mlp(torch.ones(8, 64, requires_grad=True))
        >>> y.shape
        torch.Size([8, 64])
        >>> mlp.explain(torch.ones(8, 64, requires_grad=True)).fired
        ('mlp', 'norm-linear')
    """

    _allowed_unsupported: tuple[str, ...] = (KNOWN_SCALE, WATCHED)  # what may keep a required rule from firing
    _way_out = "Leave it out of require=."
    refuses_nesting: ClassVar[str] = ""  # why a Sequential around this one cannot call it

    def __init__(
        self,
        *modules: nn.Module | dict[str, nn.Module],
        rules: tuple[Rule, ...] | None = (),
        require: str | Iterable[str] = (),
    ) -> None:
        if isinstance(rules, Rule):
            raise UnsupportedConfig(f"rules= takes a tuple of rules, got {rules.name!r} alone. Write (rule,).")
        if any(rule.side not in SIDES for rule in rules or ()):
            raise UnsupportedConfig(
                "rules= takes Forward(rule), Backward(rule) or Joint(rule), got a rule without a side."
            )
        for rule in rules or ():
            check_name(rule)
        self._edits = self._depth = 0
        self._kept: tuple[Any, Layout | None] = ((), None)
        if len(modules) == 1 and isinstance(modules[0], dict):
            super().__init__()
            for name, module in modules[0].items():
                self.add_module(name, module)
        else:
            super().__init__(*modules)  # type: ignore[arg-type]
        self.rules = None if rules is None else tuple(rules)
        self.require = (require,) if isinstance(require, str) else tuple(require)
        self._edits += 1
        self._layout()

    def _flattens(self) -> bool:
        """Whether a Sequential around this one flattens it: not if it has rules of its own, hooks, or a forward that
        does more than call the modules."""
        hooked = has_hooks(self) or self.__dict__.get("op_hooked", False)  # `explain` removes the hooks of its copy
        return self.rules == () and type(self).forward is self._plain_forward() and not hooked

    @classmethod
    def _plain_forward(cls) -> Any:
        """Return the forward that does nothing but call the modules."""
        return Sequential.forward

    # -- a list ----------------------------------------------------------------------------------------------------

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Sequential(dict(list(self._modules.items())[index]), rules=self.rules)
        return super().__getitem__(index)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_modules", ()):
            check_there(name, value)
        super().__setattr__(name, value)
        if isinstance(value, nn.Module):
            self.__dict__["_edits"] += 1

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        self.__dict__["_edits"] += 1

    def __setitem__(self, index: int, module: nn.Module) -> None:
        with self._editing():
            super().__setitem__(index, module)

    def __delitem__(self, index: Any) -> None:
        with self._editing():
            super().__delitem__(index)

    def append(self, module: nn.Module) -> Self:
        with self._editing():
            super().append(module)
        return self

    def insert(self, index: int, module: nn.Module) -> Self:
        items = list(self._modules.items())
        numbered = all(name.isdigit() for name, _ in items)
        name = next(str(n) for n in itertools.count(len(items)) if str(n) not in self._modules)
        with self._editing():
            self.add_module(name, module)  # raises if it is no module
            items.insert(index, (name, module))
            named = {str(i): m for i, (_, m) in enumerate(items)} if numbered else dict(items)
            self._modules.clear()
            self._modules.update(named)
        return self

    def extend(self, modules: Iterable[nn.Module]) -> Self:
        with self._editing():
            for module in list(modules):
                nn.Sequential.append(self, module)
        return self

    def pop(self, key: int | slice) -> nn.Module:
        found = self[key]
        del self[key]
        return found  # type: ignore[no-any-return]

    def __add__(self, other: nn.Sequential) -> "Sequential":  # type: ignore[override]
        return Sequential(*self, *other, rules=self.rules)

    def __iadd__(self, other: nn.Sequential) -> Self:  # type: ignore[override]
        return self.extend(other)

    @contextmanager
    def _editing(self) -> Iterator[None]:
        """Undo an edit that raises, or that leaves a Sequential without a valid layout."""
        before = dict(self._modules)
        self._depth += 1
        try:
            yield
            self._edits += 1
            if self._depth == 1 and "rules" in self.__dict__:
                self._layout()
        except BaseException:
            self._modules.clear()
            self._modules.update(before)
            self._edits += 1
            raise
        finally:
            self._depth -= 1

    def add_module(self, name: str, module: nn.Module | None) -> None:
        check_there(name, module)
        with self._editing():
            super().add_module(name, module)

    # -- layout ----------------------------------------------------------------------------------------------------

    def _stamp(self) -> tuple[Any, ...]:
        """Return a tuple that changes with every edit, here or in a Sequential inside."""
        return (
            self._edits,
            self.__dict__.get("rules"),
            self.__dict__.get("require"),
            *self._modules.values(),  # a module may be replaced in this dict without a method of this class
            *[isinstance(m, FusibleOperation) for m in self._modules.values()],  # `octavo.convert` changes classes
            *[(m._flattens(), *m._stamp()) for m in self._modules.values() if isinstance(m, Sequential)],
        )

    def _layout(self) -> Layout:
        stamp = self._stamp()
        if torch.compiler.is_compiling():
            self._update_now()
            if self._kept[0] != stamp:  # never true: the comparison makes the tracer guard on the stamp
                raise RuntimeError("A Sequential changed while it was flattened.")
        elif self._kept[0] != stamp:
            self._update()
        found = self._kept[1]
        assert found is not None
        return found

    def _update(self) -> None:
        stamp = self._stamp()
        if self._kept[1] is None or self._kept[0] != stamp:
            self._kept = (stamp, taken_apart(self))

    @while_tracing
    def _update_now(self) -> None:
        """Update outside of the tracer, which cannot make objects that outlive the call."""
        self._update()

    @property
    def groups(self) -> tuple[Any, ...]:
        """An OperationFuser for each group of consecutive operations, and the modules between them."""
        return self._layout().groups

    # -- forward ---------------------------------------------------------------------------------------------------

    def forward(  # type: ignore[override]
        self,
        input: Tensor | QTensor,
        *extra_inputs: Tensor,
        op_kwargs: Mapping[nn.Module | int, dict[str, Any]] | None = None,
    ) -> "Tensor | QTensor | tuple[Tensor | QTensor, ...]":
        """Calls the modules in order, consecutive operations together.

        Args:
            input: x, the input of the first module.
            *extra_inputs: extra inputs of the operations that take some, in order: the other summand of an
                `ops.AddExtraInput`, the sizes of a `GroupedLinear`. An extra input with a channel is not passed here.
            op_kwargs: keywords of single operations for this call, as a dict from an operation, or its index, to its
                keywords: `{2: {"is_first_microbatch": True}}`.

        Returns:
            y; or, if operations give extra outputs to the caller, a tuple of y and these, in order.

        Raises:
            UnsupportedConfig: the number of extra inputs is wrong; a required fusion does not apply; or `op_kwargs`
                names a module that is no operation of this Sequential, or is in it twice.
            IndexError: `op_kwargs` names an index that does not exist.
            TypeError: `op_kwargs` has a keyword that its operation does not take.

        Example:
            >>> from octavo import ops
            >>> model = octavo.Sequential(ops.MakeExtraOutput(), ops.Linear(16, 16), ops.AddExtraInput())
            >>> y, x = model(torch.ones(4, 16), torch.zeros(4, 16), op_kwargs={1: {"is_first_microbatch": True}})
            >>> y.shape
            torch.Size([4, 16])
        """
        if type(input) is not Tensor and isinstance(input, Proxy):
            refuse_symbol(type(self).__name__)
        call, x = self._begun(extra_inputs, op_kwargs), input
        # the loop is inline, not in a function of its own, so that a graph break in it is a single break
        for part in call.layout.parts:
            if part.legacy is None:
                x = _through(part, call, x)
            elif torch.compiler.is_compiling() and not part.legacy.strict:
                x = outside.call(part.legacy, x, call.kwargs[part.first])
            else:
                x = part.legacy(x, **call.kwargs[part.first])
        if call.told is not None:
            self._check_required(call.layout, call.told)
        return (x, *call.public) if call.public else x

    def _begun(self, extra_inputs: tuple[Any, ...], op_kwargs: Any, told: list[Any] | None = None) -> "_Call":
        layout = self._layout()
        if told is None and layout.require:
            told = []
        if len(extra_inputs) != layout.inputs:
            raise UnsupportedConfig(
                f"This Sequential takes {plural(layout.inputs, 'extra input')} besides x, got {len(extra_inputs)}. "
                "They are given in order of the operations that take them."
            )
        return _Call(layout, extra_inputs, routed(self, layout, op_kwargs), {}, [], told)

    def _check_required(self, layout: Layout, told: list[Any]) -> None:
        plans = [plan for _, plan, _ in told if isinstance(plan, Planned)]
        fired = [name for plan in plans for name in plan.fired]
        refused = [r for plan in plans for r in plan.refused]
        excused = [r[0] for r in refused if r[2] in layout.excused or r[4] in fired]
        alone = [(type(steps[0].op).__name__, plan) for steps, plan, _ in told if _is_reason(plan)]
        for name in layout.require:
            own = [r[3] for r in refused if r[0] == name and r[2] not in (*layout.excused, FREE)]
            if own or (name not in fired and name not in excused):
                if not own and any([why in layout.excused for _, why in alone]):
                    continue
                taken = [r[3] for r in refused if r[0] == name and r[2] == FREE]
                by_itself = [f"{op} runs by itself: {why}" for op, why in alone]
                self._refuse(layout, name, tuple(own or taken or by_itself))

    def _refuse(self, layout: Layout, name: str, reasons: tuple[str, ...]) -> None:
        rules = [*(self.rules or ()), *global_rules()]
        why = "; ".join(reasons)
        if not reasons:
            why = _is_not_there(name, rules, layout)
        text = f"The fusion {name!r} is required and was refused: {why}. {self._way_out}"
        if torch.compiler.is_compiling():
            torch._dynamo.graph_break(msg=text)  # under fullgraph=True this is the error
            _raise_outside.call(text)
        raise UnsupportedConfig(text)

    # -- explain ---------------------------------------------------------------------------------------------------

    def explain(
        self,
        x: Tensor | QTensor,
        *extra_inputs: Tensor,
        op_kwargs: Mapping[nn.Module | int, dict[str, Any]] | None = None,
    ) -> Explanation:
        """Runs forward on a copy of this Sequential and reports which operations run together, and which rules apply.

        The result depends on the inputs: a call without gradients has another plan than one with them.

        Args:
            x: the input of the call to explain.
            *extra_inputs: its extra inputs.
            op_kwargs: its keywords for single operations.

        Returns:
            The runs, the rules that apply, and the rules that do not with the reason. Print it, or read its fields.

        Example:
            >>> from octavo import ops
            >>> model = octavo.Sequential(ops.Linear(16, 8), ops.GELU())
            >>> print(model.explain(torch.ones(4, 16)))
            run of Linear, GELU
              forward   linear | activation
              backward  activation | linear
            refused: activation-bias on Linear, Activation: a backward GEMM in high precision needs dy itself, ...
        """
        subject = copy.deepcopy(self)
        told: list[Any] = []
        args = [t.detach().clone().requires_grad_(t.requires_grad) if isinstance(t, Tensor) else t
                for t in (x, *extra_inputs)]  # fmt: skip
        pairs = dict(zip(self._layout().leaves, subject._layout().leaves, strict=True))
        given = {
            pairs.get(k, k) if isinstance(k, nn.Module) else k: tree_map(_own_copy, v)
            for k, v in (op_kwargs or {}).items()
        }
        for module in subject.modules():
            _take_hooks(module)
        for fuser in [p.fuser for m in subject.modules() if isinstance(m, Sequential) for p in m._layout().parts]:
            if fuser is not None:
                fuser._keep_quiet()
        gpus = {t.device for t in args if isinstance(t, Tensor) and t.device.type == "cuda"}
        with torch.random.fork_rng(devices=list(gpus)):
            subject._tell(args[0], tuple(args[1:]), given or None, told)
        runs = tuple(
            told_run(steps, plan) for steps, plan, _ in told if isinstance(plan, Planned) or _makes_node(steps)
        )
        alone = tuple(f"{type(steps[0].op).__name__}: {plan}" for steps, plan, _ in told if _is_reason(plan))
        plans = [plan for _, plan, _ in told if isinstance(plan, Planned)]
        fired = dict.fromkeys(name for plan in plans for name in plan.fired)
        refused = tuple(dict.fromkeys(r for plan in plans for r in plan.refused))
        saved_tensors = SavedTensorReport(entry for one in told for entry in one.saved_tensors)
        return Explanation(runs, tuple(fired), refused, alone, saved_tensors)

    def _tell(self, x: Any, extra_inputs: tuple[Any, ...], op_kwargs: Any, told: list[Any]) -> Any:
        """Run forward and record in `told` everything that is called, also in Sequentials inside."""
        call = self._begun(extra_inputs, op_kwargs, told)
        for part in call.layout.parts:
            if part.legacy is not None:
                told.append(Told([Step(part.legacy, (), {}, part.first, ())], part.legacy.why_not_fusible(x)))
                x = run_legacy(part.legacy, x, call.kwargs[part.first])
            elif isinstance(part.module, Sequential):
                made = part.module._tell(x, _extras_of(part, call), call.kwargs[part.first] or None, told)
                x = _published(part, call, made)
            else:
                if part.fuser is None:
                    told.append(Told([Step(part.module, (), {}, part.first, ())], NO_OPERATION))
                x = _through(part, call, x)
        return (x, *call.public) if call.public else x

    def __getstate__(self) -> dict[str, Any]:
        # no __deepcopy__: it would be found through torch.compile(self) too, whose copy would be the plain Sequential
        return {**self.__dict__, "_kept": ((), None)}


def _is_not_there(name: str, rules: list[Rule], layout: Layout) -> str:
    """Return why a rule neither fired nor was refused."""
    known = [rule for rule in rules if rule.name == name]
    if not known:
        return f"no rule has that name, and these are known: {', '.join(dict.fromkeys([rule.name for rule in rules]))}"
    pattern = ", ".join([kind.__name__ for kind in known[0].pattern])
    there = [
        type(m).__name__ if isinstance(m, FusibleOperation) else f"{type(m).__name__}, called as it is"
        for m in layout.leaves
    ]
    return f"its pattern, {pattern}, is not among {'; '.join(there)}"


def _raise(text: str) -> None:
    raise UnsupportedConfig(text)


_raise_outside = Untraced(_raise, "octavo: a required fusion was refused")


def _is_reason(plan: Any) -> bool:
    """Whether the record of an operation is the reason why it runs by itself, not a plan."""
    return isinstance(plan, str) and plan != ""


def _own_copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _take_hooks(module: nn.Module) -> None:
    """Remove a module's hooks, and mark it, so that `explain` calls none of them."""
    if has_hooks(module):
        module.__dict__["op_hooked"] = True
        for hooks in (
            module._forward_hooks,
            module._forward_pre_hooks,
            module._backward_hooks,
            module._backward_pre_hooks,
        ):
            hooks.clear()


def _makes_node(steps: Any) -> bool:
    op = steps[0].op
    return isinstance(op, FusibleOperation) and bool(op.op_makes_node())


class _Call(NamedTuple):
    """The arguments and the state of one call."""

    layout: Layout
    extra_inputs: tuple[Any, ...]
    kwargs: list[dict[str, Any]]  # per leaf
    channels: dict[str, Any]
    public: list[Any]
    told: list[Any] | None


def _called(part: Part, call: _Call, x: Any) -> Any:
    """Call an ordinary module, or a Sequential that is not flattened, with its share of the caller's extra inputs."""
    extras, kwargs = _extras_of(part, call), call.kwargs[part.first]
    made = part.module(x, *extras, op_kwargs=kwargs) if kwargs else part.module(x, *extras)
    return _published(part, call, made)


def _extras_of(part: Part, call: _Call) -> tuple[Any, ...]:
    return tuple([call.extra_inputs[s.place] for s in call.layout.sources[part.first]])


def _published(part: Part, call: _Call, made: Any) -> Any:
    """Return x from the result of a module. Extra outputs, if it has any, go to the caller."""
    if not call.layout.shown[part.first]:
        return made
    call.public.extend(made[1:])
    return made[0]


def _through(part: Part, call: _Call, x: Any) -> Any:
    """Run one part of a call and return its y."""
    if part.fuser is None:
        return _called(part, call, x)
    layout, steps = call.layout, []
    for i, op in enumerate(part.fuser.ops, part.first):
        extras = tuple([Wire(s.channel) if s.channel else call.extra_inputs[s.place] for s in layout.sources[i]])
        steps.append(Step(op, extras, call.kwargs[i], i, layout.drains[i]))
    x, given = part.fuser._run_steps(x, steps, call.channels, call.told)
    for i, own in enumerate(given, part.first):
        for t, shown in zip(own, layout.shown[i], strict=True):
            if shown:
                call.public.append(t)
    return x
