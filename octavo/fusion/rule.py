"""Fusion rules as data: a pattern of operations, named conditions, and the operation that takes their place.

    Rule("double-add", (Double, octavo.ops.AddExtraInput), DoubleAdd, conditions=(FITS,))

Rules look at the configs of stages, which are values, so a plan (`octavo.fusion.plan`) is a function of values and is
cached by them.
"""

import inspect
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

from octavo.errors import UnsupportedConfig
from octavo.fusion.custom.basic_operation import BasicOperation
from octavo.fusion.custom.class_functions import FUSER, check_backward, check_static, forward_of, name_of
from octavo.fusion.custom.user_layer import Functions, UserFusion
from octavo.ops.operation import FusibleOperation
from octavo.runtime.contract import LAYERS
from octavo.values import Value

SIDES = ("forward", "backward", "both")
FREE = "no other rule has them"
KNOWN_SCALE = "scales do not wait for data"  # false in delayed scaling's first step, which no required rule can avoid


class Condition(NamedTuple):
    """A condition of a rule. The planner of a run asks it, and sees settings alone: no tensors, no shapes.

    Args:
        name: what must hold, in a few words; `explain` shows it.
        holds: a function that gets a sequence of settings, one for each operation of the pattern, and returns whether
            the rule may fire. The settings of an operation of yours are what its `op_config` returned.
        sentence: why the rule does not fire if the condition does not hold; `explain` and errors show it.

    Example:
        >>> holds = lambda configs: configs[0].function.alpha < 100
        >>> octavo.ops.Condition("scale is small", holds, "the kernel overflows at a scale of 100").name
        'scale is small'
    """

    name: str
    holds: Callable[[Sequence[Any]], bool]  # takes the configs of the pattern's stages
    sentence: str  # why the rule does not fire if the condition does not hold


class FusedOperation:
    """Base class for a fused operation of your own: static functions that run several operations at once.

    A subclass defines forward, backward or both. It is never constructed: a `Rule` names it.

        fuser_forward_compute(configs, inputs)                     returns y, the extra outputs of each operation, and
                                                                   the intermediates of each
        fuser_forward_save_ctx(configs, inputs, outputs, intermediates)
                                                                   returns the tensors to save, for each operation
        fuser_backward(configs, saved, grads, wants)               returns the gradients, for each operation

    `configs` and `inputs` have an entry for each operation; only the first one's inputs have x, the others have None.
    `grads` has dy, then the gradient of every extra output. The gradients of an operation are a dict by the names of
    its inputs, the fields of `inputs[i]` and `wants[i]`; a name that is left out stands for None. A tuple with a
    gradient for each input, dx first, is taken too. x of the operations after the first is inside, and its gradient is
    not used. If a class defines forward alone, the operations' own backward runs, so its forward saves what they would
    save.

    A forward in one piece is fuser_forward(ctxs, inputs), which returns y, or y and the extra outputs of each
    operation, with fuser_backward(ctxs, dy, ...). It runs in eager mode only.

    Octavo's own classes are written one level below (`octavo.runtime.contract.FusedStep`), as a step of a chain, which
    sees the buffers of the layers and lets the layers choose the values to save: step_forward(configs, inputs) returns
    a ForwardResult for each operation, and step_backward(configs, saved, buffers, grads, writes) the gradients of each.

    Raises:
        TypeError: the class is called, or a subclass lacks a function that it needs.

    Example:
        >>> from octavo import ops
        >>> class TwoScales(ops.FusedOperation):
        ...     @staticmethod
        ...     def fuser_forward_compute(configs, inputs):
        ...         scale = configs[0].function.alpha * configs[1].function.alpha
        ...         return inputs[0].x * scale, ((), ()), ((), ())
        ...     @staticmethod
        ...     def fuser_forward_save_ctx(configs, inputs, outputs, intermediates):
        ...         return (), ()
        ...     @staticmethod
        ...     def fuser_backward(configs, saved, grads, wants):
        ...         scale = configs[0].function.alpha * configs[1].function.alpha
        ...         return {"x": grads[0] * scale}, {}
        >>> rule = ops.Rule("two-scales", (ops.ConstantScale, ops.ConstantScale), TwoScales)
        >>> model = octavo.Sequential(ops.ConstantScale(2.0), ops.ConstantScale(3.0), rules=(ops.Joint(rule),))
        >>> x = torch.ones(2, requires_grad=True)
        >>> model(x).sum().backward()
        >>> x.grad
        tensor([6., 6.])
    """

    op_name: ClassVar[str] = ""  # the name in graphs; a step may set one, which reports show too
    op_is_legacy: ClassVar[bool] = False
    op_is_step: ClassVar[bool] = False
    step_forward: ClassVar[Any] = None
    step_backward: ClassVar[Any] = None
    title: ClassVar[str] = ""

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        cls.op_is_step = cls.step_forward is not None or cls.step_backward is not None
        forward = forward_of(cls, (FUSER,), "fuser_forward")
        backward = getattr(cls, FUSER[2], None)
        cls.op_is_legacy = legacy = forward == "fuser_forward"
        if not (forward or backward or cls.op_is_step):
            raise TypeError(f"{cls.__name__} defines neither forward nor backward. Define {FUSER[0]} and {FUSER[1]}.")
        if cls.op_is_step and (forward or backward):
            raise TypeError(f"{cls.__name__} defines step_* and fuser_* functions. Define one kind.")
        if legacy:
            check_static(cls, "fuser_forward", "the class is never constructed")
        if legacy or (forward and backward):
            check_backward(cls, FUSER[2], forward, legacy)
        if backward:
            check_static(cls, FUSER[2], "it sees what was saved")
        if not legacy:
            cls._enter()

    @classmethod
    def _enter(cls) -> None:
        """Enter the class into the registry (`octavo.runtime.contract.LAYERS`)."""
        given = cls.__dict__.get("op_name", "") if cls.op_is_step else ""
        cls.op_name, cls.title = given or name_of(cls, "fused"), given or cls.__name__
        if not cls.op_is_step:
            functions, where = ([getattr(cls, name, None) for name in FUSER], [f"{cls.title}.{name}" for name in FUSER])
            UserFusion(cls.op_name, cls.title, Functions(*functions), Functions(*where))
            return
        holder: Any = LAYERS.get(cls.op_name, cls)
        if (holder.__module__, getattr(holder, "__qualname__", "")) != (cls.__module__, cls.__qualname__):
            raise TypeError(f"{cls.__name__}.op_name is {cls.op_name!r}, which belongs to another. Choose another.")
        LAYERS[cls.op_name] = cls  # a module that is loaded again replaces its own class

    def __new__(cls, *_: Any, **__: Any) -> "FusedOperation":
        raise TypeError(f"{cls.__name__} is not constructed: a rule names the class, and a plan calls its functions.")


def step(name: str, forward: Any = None, backward: Any = None) -> type[FusedOperation]:
    """Return a fused operation that Octavo ships: the functions of a `octavo.runtime.contract.FusedStep`, by a name for
    graphs and reports."""
    functions = {"step_forward": forward, "step_backward": backward}
    own = {key: staticmethod(function) for key, function in functions.items() if function is not None}
    return type(name, (FusedOperation,), {"op_name": name, "__module__": (forward or backward).__module__, **own})


@dataclass(frozen=True)
class Rule:
    """A fusion rule: where a pattern of operations occurs and all conditions hold, a fused operation takes their place.

    Pass it through `Forward`, `Backward` or `Joint` to `Sequential(rules=...)`, or register it for every Sequential.

    Args:
        name: the rule's name in `explain` and `require`.
        pattern: the classes of consecutive operations. A class of yours matches operations of exactly that class;
            `octavo.ops.Activation` stands for every activation but ConstantScale.
        op: the class derived from `FusedOperation` that takes their place.
        conditions: a tuple of `Condition`; all of them must hold.
        side: "forward", "backward" or "both". Leave it: Forward, Backward, Joint and the register functions set it.
        forward_from: for Octavo's own rules of both sides: the first operation of the pattern that forward covers.
        changes: for Octavo's own rules: a function that returns new configs of the operations if the rule fires.

    Raises:
        UnsupportedConfig: the name is empty, the pattern is no tuple of operations' classes, op is no class derived
            from FusedOperation, or conditions is no tuple of Conditions.

    Example:
        >>> from octavo import ops
        >>> class TwoScales(ops.FusedOperation):
        ...     @staticmethod
        ...     def fuser_backward(configs, saved, grads, wants):
        ...         scale = configs[0].function.alpha * configs[1].function.alpha
        ...         return {"x": grads[0] * scale}, {}
        >>> rule = ops.Rule("two-scales", (ops.ConstantScale, ops.ConstantScale), TwoScales)
        >>> model = octavo.Sequential(ops.ConstantScale(2.0), ops.ConstantScale(3.0), rules=(ops.Backward(rule),))
        >>> model.explain(torch.ones(2, requires_grad=True)).fired
        ('two-scales',)
        >>> unregister = ops.register_backward_fusion(rule)
        >>> model = octavo.Sequential(ops.ConstantScale(2.0), ops.ConstantScale(3.0))
        >>> model.explain(torch.ones(2, requires_grad=True)).fired
        ('two-scales',)
        >>> unregister()
    """

    name: str
    pattern: tuple[type[FusibleOperation], ...]  # classes of operations
    op: type[FusedOperation]
    conditions: tuple[Condition, ...] = ()
    side: str = ""  # set by Forward, Backward, Joint or by registering the rule
    forward_from: int = 0  # for rules of both sides: the first stage that forward covers
    changes: Callable[[Sequence[Any]], Sequence[Any]] | None = None  # new configs if the rule fires

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise UnsupportedConfig(f"A rule's name is a string that is not empty, got {self.name!r}.")
        op: Any = self.op
        if not isinstance(op, type) or not issubclass(op, FusedOperation) or op is FusedOperation:
            raise UnsupportedConfig(
                f"{self.name!r} puts a class derived from FusedOperation in the place of its pattern, got {self.op!r}."
            )
        if not isinstance(self.conditions, tuple) or any(not isinstance(c, Condition) for c in self.conditions):
            raise UnsupportedConfig(f"conditions of {self.name!r} is a tuple of Conditions, got {self.conditions!r}.")
        kinds: Any = self.pattern
        fits = isinstance(kinds, tuple) and len(kinds) > 0
        if not fits or not all(isinstance(kind, type) and hasattr(kind, "op_matches") for kind in kinds):
            raise UnsupportedConfig(f"The pattern of {self.name!r} is a tuple of operations' classes, got {kinds}.")
        for kind in kinds:
            self._check_kind(kind)

    def _check_kind(self, kind: Any) -> None:
        """Refuse a class that the rule cannot tell from its parent."""
        matchers = {"op_matches", "op_layer_config"}
        matcher = next(parent for parent in kind.__mro__ if not matchers.isdisjoint(parent.__dict__))
        if not (matcher is kind or kind.__module__.startswith("octavo.") or issubclass(kind, BasicOperation)):
            raise UnsupportedConfig(
                f"Rules look at configs, and a {kind.__name__}'s is that of its parent {matcher.__name__}, so that "
                f"{self.name!r} would fire on both. Name the parent."
            )

    @property
    def is_octavos(self) -> bool:
        """Whether the rule belongs to this package."""
        return bool(self.op.__module__.startswith("octavo."))

    def on(self, side: str) -> "Rule":
        """Return the rule for one side. `Forward`, `Backward` and `Joint` call it.

        Args:
            side: "forward", "backward" or "both".

        Returns:
            A copy of the rule.

        Raises:
            TypeError: its operation defines functions of another side, or lacks one.
        """
        names = ("step_forward", "step_backward") if self.op.op_is_step else (FUSER[0], FUSER[2])
        functions = dict(zip(("forward", "backward"), names, strict=True))
        for one in sorted(functions, key=lambda one: one != side):  # the required side first
            is_asked, has = side in (one, "both"), getattr(self.op, functions[one], None) is not None
            if is_asked != has and not self.op.op_is_legacy:
                also = f"defines a {one} too, which would never run. Register it for both."
                why = also if has else f"defines no {functions[one]}."
                raise TypeError(f"Rule {self.name!r} is for {side}, and {self.op.__name__} {why}")
        return replace(self, side=side)

    def _matches(self, configs: Sequence[Value]) -> bool:
        """Return whether stages with these configs are those of the pattern."""
        if self.op.op_is_legacy:
            return False  # a run never contains it: `octavo.fusion.custom.legacy` finds its operations
        kinds: Sequence[Any] = self.pattern
        return len(configs) == len(kinds) and all(
            kind.op_matches(config) for kind, config in zip(kinds, configs, strict=True)
        )


def Forward(rule: Rule) -> Rule:
    """Return the rule for forward, to pass to `Sequential(rules=...)`.

    Args:
        rule: a rule whose operation defines fuser_forward_compute and fuser_forward_save_ctx, and nothing else.

    Returns:
        A copy of the rule, `rule.on("forward")`.

    Example:
        See `octavo.ops.Rule`.
    """
    return rule.on("forward")


def Backward(rule: Rule) -> Rule:
    """Return the rule for backward, to pass to `Sequential(rules=...)`.

    Args:
        rule: a rule whose operation defines fuser_backward, and nothing else.

    Returns:
        A copy of the rule, `rule.on("backward")`.

    Example:
        See `octavo.ops.Rule`.
    """
    return rule.on("backward")


def Joint(rule: Rule) -> Rule:
    """Return the rule for forward and backward together, to pass to `Sequential(rules=...)`.

    Args:
        rule: a rule whose operation defines fuser_forward_compute, fuser_forward_save_ctx and fuser_backward.

    Returns:
        A copy of the rule, `rule.on("both")`.

    Example:
        See `octavo.ops.Rule`.
    """
    return rule.on("both")


_global_rules: tuple[Rule, ...] = ()
_edition = "0"  # changes with the rules; a string, because the compiler would make a number a symbol


def global_rules() -> tuple[Rule, ...]:
    """Return the rules that every Sequential tries after its own: one tuple object until the rules change."""
    return _global_rules


def edition() -> str:
    """Return a string that changes with every change of the global rules."""
    return _edition


def replace_global_rules(rules: tuple[Rule, ...]) -> None:
    global _global_rules, _edition
    _global_rules, _edition = rules, str(int(_edition) + 1)


def offer(rules: Iterable[Rule]) -> None:
    """Add rules to the global ones."""
    replace_global_rules((*_global_rules, *rules))


Groups = tuple[tuple[Rule, ...], ...]  # a Sequential's own rules, then the global ones
_numbers: dict[Groups, int] = {(): 0}  # numbers the rules in force: a compiler can hold a number
_lock = threading.Lock()


def rule_set(rules: Groups) -> int:
    with _lock:
        return _numbers.setdefault(rules, len(_numbers))


def rules_of(number: int) -> Groups:
    with _lock:
        return list(_numbers)[number]


def check_name(rule: Rule) -> None:
    """Refuse a name that another rule has: `explain` and `require` tell rules apart by name."""
    if not rule.is_octavos and any(known.is_octavos and known.name == rule.name for known in global_rules()):
        raise UnsupportedConfig(f"{rule.name!r} is the name of one of Octavo's own rules. Give yours another.")


def _registered(rule: Rule, side: str, prepend: bool) -> Callable[[], None]:
    if not isinstance(rule, Rule):
        got = f"the function {rule.__qualname__}" if inspect.isfunction(rule) else repr(rule)
        name = {"both": "forward_backward"}.get(side, side)
        raise TypeError(
            f"register_{name}_fusion takes a Rule, got {got}. A rule is data: plans are cached by it, explain names "
            "what did not hold. In place of a function that rewrites a list of operations, write the pattern that it "
            "looks for: octavo.ops.Rule('a-name', (octavo.Linear, MyOperation), MyFusedOperation, conditions=(...))."
        )
    check_name(rule)
    made = rule.on(side)
    replace_global_rules((made, *_global_rules) if prepend else (*_global_rules, made))

    def unregister() -> None:
        replace_global_rules(tuple(known for known in _global_rules if known is not made))

    return unregister


def register_forward_fusion(rule: Rule, prepend: bool = False) -> Callable[[], None]:
    """Register a rule for forward of every Sequential, those that exist included.

    Args:
        rule: a rule for `Forward`. Its name must differ from those of Octavo's own rules.
        prepend: False by default: the rule is tried after the registered ones of its side and length. True puts it
            before them.

    Returns:
        A function without arguments that unregisters the rule.

    Raises:
        TypeError: it is no Rule, or its operation defines functions of another side, or lacks one.
        UnsupportedConfig: one of Octavo's own rules has that name.

    Example:
        See `octavo.ops.Rule`.
    """
    return _registered(rule, "forward", prepend)


def register_backward_fusion(rule: Rule, prepend: bool = False) -> Callable[[], None]:
    """Register a rule for backward of every Sequential, as `register_forward_fusion` does for forward.

    Args:
        rule: a rule for `Backward`.
        prepend: whether the rule is tried before the registered ones.

    Returns:
        A function without arguments that unregisters the rule.

    Example:
        See `octavo.ops.Rule`.
    """
    return _registered(rule, "backward", prepend)


def register_forward_backward_fusion(rule: Rule, prepend: bool = False) -> Callable[[], None]:
    """Register a rule for forward and backward of every Sequential, as `register_forward_fusion` does for forward.

    Args:
        rule: a rule for `Joint`.
        prepend: whether the rule is tried before the registered ones.

    Returns:
        A function without arguments that unregisters the rule.

    Example:
        See `octavo.ops.Rule`.
    """
    return _registered(rule, "both", prepend)


class NotFired(NamedTuple):
    """A rule whose pattern is present and that does not apply, as `Sequential.explain` reports it.

    Attributes:
        rule: the name of the rule.
        ops: the names of the operations' classes in its pattern.
        condition: the name of the first condition that does not hold.
        sentence: why the rule does not apply.
        by: the rule that has taken all of these operations; empty if none has.
    """

    rule: str
    ops: tuple[str, ...]
    condition: str
    sentence: str
    by: str = ""
