"""`octavo.Sequential`: modules in a row, in which operations that follow each other run together.

Ordinary modules are called as `nn.Sequential` would call them. Between them, operations form groups, one
`OperationFuser` each. Sequentials inside are taken apart: their operations fuse with their neighbours'.

Operations may take extra inputs and give extra outputs. Those of the caller are given, and come back, in order of
operation and slot. Those that have a channel's name connect within the Sequential, past ordinary modules too.
"""

import copy
import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from octavo.errors import UnsupportedConfig
from octavo.fuser.legacy import outside, run_legacy
from octavo.fuser.operation import FusibleOperation
from octavo.fuser.pattern import FREE, SIDES, Refused, Rule
from octavo.fuser.plan import OperationFuser, Planned, Run, Step, Wire, told_run
from octavo.lower import while_tracing

OUTPUT_BUFFER_KEY = "out"
GRAD_INPUT_BUFFER_KEY = "dgrad_out"


class Source(NamedTuple):
    """Where an extra input comes from: a place among the caller's, or a channel."""

    place: int
    channel: str = ""


class Part(NamedTuple):
    """What is called at once: operations, an ordinary module, or an operation whose forward is in one piece."""

    first: int  # leaf
    fuser: OperationFuser | None
    module: Any
    legacy: Any


class Layout(NamedTuple):
    """A Sequential taken apart."""

    leaves: tuple[nn.Module, ...]
    groups: tuple[Any, ...]  # OperationFuser or module
    parts: tuple[Part, ...]  # the same, cut further
    sources: tuple[tuple[Source, ...], ...]  # of each leaf's extra inputs
    drains: tuple[
        tuple[tuple[str, bool], ...], ...
    ]  # of each leaf's extra outputs: channel, whether it leaves its group
    shown: tuple[tuple[bool, ...], ...]  # of the same: whether the caller gets it
    inputs: int  # that the caller gives
    places: tuple[tuple[int, int], ...]  # leaves that each entry of the Sequential stands for
    require: tuple[str, ...]  # of this Sequential and those inside that it took apart
    excused: tuple[str, ...]


class Explanation(NamedTuple):
    runs: tuple[Run, ...]
    fired: tuple[str, ...]
    refused: tuple[Refused, ...]
    alone: tuple[str, ...] = ()  # operations that join no others, and why

    def __str__(self) -> str:
        lines = []
        for run in self.runs:
            lines.append(f"run of {', '.join(run.ops)}")
            lines.append(f"  forward   {' | '.join(run.forward)}")
            lines.append(f"  backward  {' | '.join(run.backward) or 'nothing'}")
        lines += [f"refused: {r.rule} on {', '.join(r.ops)}: {r.sentence} ({r.condition})" for r in self.refused]
        return "\n".join([*lines, *[f"by itself: {text}" for text in self.alone]])


class Sequential(nn.Sequential):
    """Modules in a row; operations among them run together.

    rules      of this Sequential's own, before everybody's: Forward(rule), Backward(rule), Joint(rule); None: no
               fusion at all
    require    names of rules that must fire; a call in which one does not is an error that says why
    """

    _excused: tuple[str, ...] = ()  # conditions that may keep a required rule from firing

    def __init__(self, *modules: Any, rules: tuple[Rule, ...] | None = (), require: Iterable[str] = ()) -> None:
        if any(rule.side not in SIDES for rule in rules or ()):
            raise UnsupportedConfig(
                "rules= takes Forward(rule), Backward(rule) or Joint(rule), got a rule without a side."
            )
        self._edits = self._depth = 0
        self._kept: tuple[Any, Layout | None] = ((), None)
        if len(modules) == 1 and isinstance(modules[0], dict):
            super().__init__()
            for name, module in modules[0].items():
                self.add_module(name, module)
        else:
            super().__init__(*modules)
        self.rules = None if rules is None else tuple(rules)
        self.require = (require,) if isinstance(require, str) else tuple(require)
        self._edits += 1
        self._layout()

    def flattens(self) -> bool:
        """Whether a Sequential around this one takes it apart: not if it has rules of its own, or is more than its
        modules."""
        hooked = self._forward_hooks or self._forward_pre_hooks or self._backward_hooks or self._backward_pre_hooks
        return self.rules == () and not hooked and type(self).forward is Sequential.forward

    # -- a list ----------------------------------------------------------------------------------------------------

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Sequential(dict(list(self._modules.items())[index]), rules=self.rules)
        return super().__getitem__(index)

    def __setattr__(self, name: str, value: Any) -> None:
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
            self.add_module(name, module)  # checks it
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
        """What is no Sequential that works is taken back."""
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
        with self._editing():
            super().add_module(name, module)

    # -- taken apart -----------------------------------------------------------------------------------------------

    def _stamp(self) -> tuple[Any, ...]:
        """Changes with every edit, here or in a Sequential inside."""
        return (
            self._edits,
            self.__dict__.get("rules"),
            self.__dict__.get("require"),
            *[(m.flattens(), *m._stamp()) for m in self._modules.values() if isinstance(m, Sequential)],
        )

    def _layout(self) -> Layout:
        stamp = self._stamp()
        if self._kept[1] is None or self._kept[0] != stamp:
            self._kept = (stamp, _taken_apart(self))
        found = self._kept[1]
        assert found is not None
        return found

    @property
    def groups(self) -> tuple[Any, ...]:
        """An OperationFuser for operations that follow each other, and the modules between them."""
        return self._layout().groups

    # -- forward ---------------------------------------------------------------------------------------------------

    def forward(self, x: Any, *extra_inputs: Any, op_kwargs: dict[Any, dict[str, Any]] | None = None) -> Any:  # type: ignore[override]
        told: list[Any] | None = [] if self._layout().require else None
        call = self._begun(extra_inputs, op_kwargs, told)
        # the loop is here, and not a function of its own: a graph that breaks in it breaks once
        for part in call.layout.parts:
            if part.legacy is None:
                x = _through(part, call, x)
            elif torch.compiler.is_compiling() and not part.legacy.strict:
                x = outside(part.legacy, x, call.kwargs[part.first])
            else:
                x = part.legacy(x, **call.kwargs[part.first])
        if told is not None:
            self._check_required(told)
        return (x, *call.public) if call.public else x

    def _begun(self, extra_inputs: tuple[Any, ...], op_kwargs: Any, told: list[Any] | None) -> "_Call":
        layout = self._layout()
        if len(extra_inputs) != layout.inputs:
            raise UnsupportedConfig(
                f"This Sequential takes {layout.inputs} extra inputs besides x, got {len(extra_inputs)}. They are "
                "given in order of the operations that take them."
            )
        return _Call(layout, extra_inputs, _routed(self, layout, op_kwargs), {}, [], told)

    def _check_required(self, told: list[Any]) -> None:
        plans = [plan for _, plan in told if isinstance(plan, Planned)]
        fired = [name for plan in plans for name in plan.fired]
        refused = [r for plan in plans for r in plan.refused]
        layout = self._layout()
        excused = [r[0] for r in refused if r[2] in layout.excused]
        alone = [(type(steps[0].op).__name__, plan) for steps, plan in told if _is_reason(plan)]
        for name in layout.require:
            own = [r[3] for r in refused if r[0] == name and r[2] not in (*layout.excused, FREE)]
            if own or (name not in fired and name not in excused):
                if not own and any([why in layout.excused for _, why in alone]):
                    continue
                self._refuse(name, tuple(own or [f"{op} runs by itself: {why}" for op, why in alone]))

    def _refuse(self, name: str, reasons: tuple[str, ...]) -> None:
        if torch.compiler.is_compiling():
            self._refuse_now(name, reasons)
        _raise_missing(name, reasons)

    @while_tracing
    def _refuse_now(self, name: str, reasons: tuple[str, ...]) -> None:
        _raise_missing(name, reasons)

    # -- telling ---------------------------------------------------------------------------------------------------

    def explain(self, x: Any, *extra_inputs: Any, op_kwargs: dict[Any, dict[str, Any]] | None = None) -> Explanation:
        """Which runs a call with these inputs consists of, which rules fire in them, and why others do not. A copy is
        run: this Sequential stays as it is."""
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
        call = subject._begun(tuple(args[1:]), given or None, told)
        y = args[0]
        gpus = {t.device for t in args if isinstance(t, Tensor) and t.device.type == "cuda"}
        with torch.random.fork_rng(devices=list(gpus)):
            for part in call.layout.parts:
                legacy = part.legacy
                y = _through(part, call, y) if legacy is None else run_legacy(legacy, y, call.kwargs[part.first])
        runs = tuple(told_run(steps, plan) for steps, plan in told if isinstance(plan, Planned) or _makes_node(steps))
        alone = tuple(f"{type(steps[0].op).__name__}: {plan}" for steps, plan in told if _is_reason(plan))
        plans = [plan for _, plan in told if isinstance(plan, Planned)]
        fired = dict.fromkeys(name for plan in plans for name in plan.fired)
        return Explanation(runs, tuple(fired), tuple(dict.fromkeys(r for plan in plans for r in plan.refused)), alone)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Sequential":
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        state = {k: v for k, v in self.__dict__.items() if k != "_kept"}
        new.__dict__.update(copy.deepcopy(state, memo))
        new._kept = ((), None)
        new._layout()
        return new

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": ((), None)}


def _raise_missing(name: str, reasons: Sequence[str]) -> None:
    why = "; ".join(reasons) or "its pattern is not among these operations"
    raise UnsupportedConfig(f"The fusion {name!r} is required and was refused: {why}. Leave it out of require=.")


def _is_reason(plan: Any) -> bool:
    """Whether what was told of an operation is why it runs by itself."""
    return isinstance(plan, str) and plan != ""


def _own_copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _take_hooks(module: nn.Module) -> None:
    """Nobody's hooks are called for an explanation."""
    for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks):
        if hooks:
            module.__dict__["op_hooked"] = True
            hooks.clear()


def _makes_node(steps: Any) -> bool:
    return bool(steps[0].op.op_makes_node())


class _Call(NamedTuple):
    """What a call brings along."""

    layout: Layout
    extra_inputs: tuple[Any, ...]
    kwargs: list[dict[str, Any]]  # of each leaf
    channels: dict[str, Any]
    public: list[Any]
    told: list[Any] | None


def _through(part: Part, call: _Call, x: Any) -> Any:
    """One part of a call."""
    if part.fuser is None:
        return part.module(x)
    layout, steps = call.layout, []
    for i, op in enumerate(part.fuser.ops, part.first):
        extras = tuple([Wire(s.channel) if s.channel else call.extra_inputs[s.place] for s in layout.sources[i]])
        steps.append(Step(op, extras, call.kwargs[i], i, layout.drains[i]))
    x, given = part.fuser.run(x, steps, call.channels, call.told)
    for i, own in enumerate(given, part.first):
        for t, shown in zip(own, layout.shown[i], strict=True):
            if shown:
                call.public.append(t)
    return x


# -- taking apart ------------------------------------------------------------------------------------------------------


def _leaves(sequential: nn.Sequential) -> Iterator[nn.Module]:
    for module in sequential._modules.values():
        if isinstance(module, Sequential) and module.flattens():
            yield from _leaves(module)
        elif module is not None:
            yield module


def _taken_apart(sequential: Sequential) -> Layout:
    leaves = tuple(_leaves(sequential))
    groups: list[Any] = []
    sizes: list[int] = []
    for module in leaves:
        fusible = isinstance(module, FusibleOperation)
        if fusible and groups and isinstance(groups[-1], list):
            groups[-1].append(module)
            sizes[-1] += 1
        else:
            groups.append([module] if fusible else module)
            sizes.append(1)
    rules = sequential.__dict__.get("rules", ())
    made = tuple(OperationFuser(g, rules) if isinstance(g, list) else g for g in groups)
    sources, outputs, count = _wired(leaves)
    drains = _drained(outputs, sources, sizes)
    places: list[tuple[int, int]] = []
    at = 0
    for module in sequential._modules.values():
        if module is None:
            places.append((at, at))
            continue
        size = len(list(_leaves(module))) if isinstance(module, Sequential) and module.flattens() else 1
        places.append((at, at + size))
        at += size
    shown = tuple(tuple(to_caller for _, to_caller in own) for own in outputs)
    return Layout(
        leaves, made, _parts(made, sizes, rules), sources, drains, shown, count, tuple(places), *_demands(sequential)
    )


def _demands(sequential: Sequential) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What must fire, and what excuses it, here and in what was taken apart."""
    require, excused = list(sequential.__dict__.get("require", ())), list(sequential._excused)
    for module in sequential._modules.values():
        if isinstance(module, Sequential) and module.flattens():
            inner = _demands(module)
            require += inner[0]
            excused += inner[1]
    return tuple(dict.fromkeys(require)), tuple(dict.fromkeys(excused))


def _parts(groups: Sequence[Any], sizes: Sequence[int], rules: Any) -> tuple[Part, ...]:
    """Groups, cut at operations whose forward is in one piece."""
    found: list[Part] = []
    at = 0
    for group, size in zip(groups, sizes, strict=True):
        if not isinstance(group, OperationFuser):
            found.append(Part(at, None, group, None))
        elif not any(op.op_is_legacy for op in group.ops):
            found.append(Part(at, group, None, None))
        else:
            for legacy, own in itertools.groupby(enumerate(group.ops, at), lambda pair: pair[1].op_is_legacy):
                pairs = list(own)
                if legacy:
                    found += [Part(i, None, None, op) for i, op in pairs]
                else:
                    found.append(Part(pairs[0][0], OperationFuser([op for _, op in pairs], rules), None, None))
        at += size
    return tuple(found)


def _drained(outputs: Any, sources: Any, sizes: list[int]) -> Any:
    """Of each extra output its channel, and whether anybody has it who may run apart from whoever makes it: the caller,
    another group, or an operation that takes it otherwise than by adding."""
    group = [g for g, size in enumerate(sizes) for _ in range(size)]
    users: dict[str, list[int]] = {}
    for i, own in enumerate(sources):
        for source in own:
            users.setdefault(source.channel, []).append(i)
    return tuple(
        tuple((name, to_caller or any(group[u] != group[i] for u in users.get(name, ()))) for name, to_caller in own)
        for i, own in enumerate(outputs)
    )


def _wired(leaves: Sequence[nn.Module]) -> tuple[Any, Any, int]:
    """Where extra inputs come from and extra outputs go to, once every channel has one producer, before its users."""
    filled: dict[str, int] = {}
    names = {
        channel.name
        for op in leaves
        if isinstance(op, FusibleOperation)
        for channel in op._channels("_output_channels").values()
    }
    sources: list[tuple[Source, ...]] = []
    drains: list[tuple[tuple[str, bool], ...]] = []
    count = 0
    for i, op in enumerate(leaves):
        own: list[Source] = []
        out: list[tuple[str, bool]] = []
        if isinstance(op, FusibleOperation):
            for slot in range(op.num_extra_inputs):
                channel = op._channels("_input_channels").get(slot)
                if channel is not None and op.op_writes_extra:
                    raise UnsupportedConfig(
                        f"Operation {i} ({type(op).__name__}) writes to its extra input, which is the channel "
                        f"{channel.name!r}: a value that others have. Leave in_place out."
                    )
                if channel is None:
                    own.append(Source(count))
                    count += 1
                elif channel.name not in filled:
                    where = "a later operation fills it" if channel.name in names else "no operation fills it"
                    raise UnsupportedConfig(
                        f"Operation {i} ({type(op).__name__}) takes the channel {channel.name!r}, and {where}. A "
                        "channel is filled by an extra output before it: MakeExtraOutput(channel=...)."
                    )
                else:
                    own.append(Source(-1, channel.name))
            for slot in range(op.num_extra_outputs):
                channel = op._channels("_output_channels").get(slot)
                if channel is not None and channel.name in filled:
                    raise UnsupportedConfig(
                        f"The channel {channel.name!r} has multiple producers: operations {filled[channel.name]} and "
                        f"{i}. Name one of them otherwise."
                    )
                if channel is not None:
                    filled[channel.name] = i
                out.append(("", True) if channel is None else (channel.name, channel.output_to_caller))
            op.__dict__["_channels_locked"] = True
        sources.append(tuple(own))
        drains.append(tuple(out))
    return tuple(sources), tuple(drains), count


# -- keywords of operations --------------------------------------------------------------------------------------------


def _routed(
    sequential: Sequential, layout: Layout, op_kwargs: dict[Any, dict[str, Any]] | None
) -> list[dict[str, Any]]:
    """The keywords of each leaf."""
    found: list[dict[str, Any]] = [{} for _ in layout.leaves]
    if op_kwargs is not None and not isinstance(op_kwargs, dict):
        raise TypeError(f"op_kwargs maps operations to dicts of their keywords, got {type(op_kwargs).__name__}.")
    for target, own in (op_kwargs or {}).items():
        leaves = _targets(sequential, layout, target)
        if not isinstance(own, dict):
            raise TypeError(f"op_kwargs maps an operation to a dict of its keywords, got {type(own).__name__}.")
        for name, value in own.items():
            found[_taker(layout, leaves, name, target)][name] = value
    return found


def _targets(sequential: Sequential, layout: Layout, target: Any) -> range:
    if isinstance(target, bool) or not isinstance(target, int | nn.Module):
        raise TypeError(f"op_kwargs is keyed by a module or an index, got {target!r}.")
    if isinstance(target, int):
        number = len(layout.places)
        if not -number <= target < number:
            raise IndexError(f"op_kwargs has the index {target}, and this Sequential {number} modules.")
        leaves = range(*layout.places[target])
    elif isinstance(target, Sequential):
        own = list(sequential._modules.values())
        where = [i for i, m in enumerate(own) if m is target]
        if len(where) != 1:
            raise UnsupportedConfig(
                f"op_kwargs has a Sequential that is {len(where)} times among the modules of this one. Use its index."
            )
        leaves = range(*layout.places[where[0]])
    else:
        where = [i for i, leaf in enumerate(layout.leaves) if leaf is target]
        if not where:
            raise UnsupportedConfig(f"op_kwargs has a {type(target).__name__} that is not in this Sequential.")
        if len(where) > 1:
            raise UnsupportedConfig(
                f"op_kwargs has a {type(target).__name__} that is {len(where)} times in this Sequential. Use its index."
            )
        leaves = range(where[0], where[0] + 1)
    if not any(isinstance(layout.leaves[i], FusibleOperation) for i in leaves):
        named = type(layout.leaves[leaves[0]]).__name__ if len(leaves) else "an empty Sequential"
        raise UnsupportedConfig(f"op_kwargs are for operations of octavo, and {named} is none. Call it outside.")
    return leaves


def _taker(layout: Layout, leaves: range, name: str, target: Any) -> int:
    """The one operation among these that takes a keyword."""
    takers = [i for i in leaves if name in getattr(layout.leaves[i], "op_keywords", ())]
    if len(takers) == 1:
        return takers[0]
    titles = ", ".join(
        f"{type(layout.leaves[i]).__name__} ({', '.join(getattr(layout.leaves[i], 'op_keywords', ())) or 'none'})"
        for i in leaves
    )
    if not takers:
        raise TypeError(f"No operation there takes the keyword {name!r}. Keywords: {titles}.")
    raise UnsupportedConfig(f"{len(takers)} operations there take the keyword {name!r}: {titles}. Name one of them.")
