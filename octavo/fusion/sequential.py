"""`octavo.Sequential`: an `nn.Sequential` that runs consecutive operations together.

It calls ordinary modules as `nn.Sequential` does. The operations between them form groups, one `OperationFuser` each.
Sequentials inside are flattened: their operations fuse with their neighbours'.

Operations may take extra inputs and return extra outputs. The caller passes and receives them in the order of the
operations. Those with a channel connect within the Sequential, also across ordinary modules.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from octavo._torch.modules import GLOBAL_HOOKS, see_operations
from octavo._torch.tracing import while_tracing
from octavo.errors import UnsupportedConfig
from octavo.fusion.custom.legacy import outside, run_legacy
from octavo.fusion.explanation import Explanation, explained, run_by_themselves
from octavo.fusion.layout import (
    Call,
    Layout,
    check_there,
    inputs_of,
    passed_on,
    routed,
    taken_apart,
    through,
)
from octavo.fusion.plan import Planned
from octavo.fusion.rule import FREE, KNOWN_SCALE, SIDES, Rule, check_name, global_rules
from octavo.fusion.stages import Record
from octavo.ops.inputs import refuse_symbol
from octavo.ops.operation import CHANGED, HOOKS_OF_ALL, WATCHED, FusibleOperation, NoTorchScript, has_hooks
from octavo.quant import QTensor
from octavo.text import plural

OUTPUT_BUFFER_KEY = "out"
"""The keyword of a GroupedLinear for the tensor that receives y: `model(x, op_kwargs={0: {OUTPUT_BUFFER_KEY: y}})`."""

GRAD_INPUT_BUFFER_KEY = "dgrad_out"
"""The keyword of a GroupedLinear for the tensor that receives dx, in `op_kwargs` too."""


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
        >>> model = octavo.Sequential(ops.MakeExtraOutput(), ops.Linear(16, 16), ops.AddExtraInput())
        >>> y, x = model(torch.ones(4, 16), torch.zeros(4, 16), op_kwargs={1: {"is_first_microbatch": True}})
        >>> y.shape
        torch.Size([4, 16])
    """

    _allowed_unsupported: tuple[str, ...] = (
        KNOWN_SCALE,
        CHANGED,
        WATCHED,
        HOOKS_OF_ALL,
    )  # what may keep a required rule from firing
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
        """Return whether a Sequential around this one flattens it: not if it has rules of its own, hooks, or a forward
        that does more than call the modules."""
        hooked = has_hooks(self) or self.__dict__.get("op_hooked", False)  # `explain` removes the hooks of its copy
        plain = self.rules == () and type(self).forward is self._plain_forward()
        return plain and not hooked and not (any(GLOBAL_HOOKS) and see_operations())

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
        return found

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
            self._update()
            if self._kept[0] != stamp:  # never true: the comparison makes the tracer guard on the stamp
                raise RuntimeError("A Sequential changed while it was flattened.")
        elif self._kept[0] != stamp:
            self._update()
        found = self._kept[1]
        assert found is not None
        return found

    @while_tracing
    def _update(self) -> None:
        """Flatten anew, outside of a tracer: it cannot make objects that outlive the call."""
        stamp = self._stamp()
        if self._kept[1] is None or self._kept[0] != stamp:
            self._kept = (stamp, taken_apart(self))

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
        """Call the modules in order, consecutive operations together.

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
        """
        if type(input) is not Tensor and isinstance(input, Proxy):
            refuse_symbol(type(self).__name__)
        call, x = self._begun(extra_inputs, op_kwargs), input
        # the loop is inline, not in a function of its own, so that a graph break in it is a single break
        for part in call.layout.parts:
            if part.legacy is None:
                x = through(part, call, x)
            elif torch.compiler.is_compiling() and not part.legacy.strict:
                made = outside.call("", run_legacy, part.legacy, x, inputs_of(part, call), call.kwargs[part.first])
                x = passed_on(part, call, made)
            else:
                x = passed_on(part, call, part.legacy(x, *inputs_of(part, call), **call.kwargs[part.first]))
        if call.records is not None:
            self._check_required(call.layout, call.records)
        return (x, *call.public) if call.public else x

    def _begun(self, extra_inputs: tuple[Any, ...], op_kwargs: Any, records: list[Record] | None = None) -> Call:
        layout = self._layout()
        if records is None and layout.require:
            records = []
        if len(extra_inputs) != layout.inputs:
            raise UnsupportedConfig(
                f"This Sequential takes {plural(layout.inputs, 'extra input')} besides x, got {len(extra_inputs)}. "
                "They are given in order of the operations that take them."
            )
        return Call(layout, extra_inputs, routed(self, layout, op_kwargs), {}, [], records)

    def _check_required(self, layout: Layout, records: list[Record]) -> None:
        plans = [plan for _, plan, _ in records if isinstance(plan, Planned)]
        fired = [name for plan in plans for name in plan.fired]
        refused = [r for plan in plans for r in plan.refused]
        excused = [r[0] for r in refused if r[2] in layout.excused or r[4] in fired]
        alone = run_by_themselves(records)
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
            outside.call(text, None)
        raise UnsupportedConfig(text)

    # -- explain ---------------------------------------------------------------------------------------------------

    def explain(
        self,
        x: Tensor | QTensor,
        *extra_inputs: Tensor,
        op_kwargs: Mapping[nn.Module | int, dict[str, Any]] | None = None,
    ) -> Explanation:
        """Run forward on a copy of this Sequential and report which operations run together, and which rules apply.

        The result depends on the inputs: a call without gradients has another plan than one with them.

        Args:
            x: the input of the call to explain.
            *extra_inputs: its extra inputs.
            op_kwargs: its keywords for single operations.

        Returns:
            The runs, the rules that apply, and the rules that do not with the reason. Print it, or read its fields.
        """
        return explained(self, (x, *extra_inputs), op_kwargs)

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
