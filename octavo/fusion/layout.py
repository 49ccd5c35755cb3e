"""The layout of a flattened Sequential: its groups of consecutive operations, the sources of extra inputs, the
destinations of extra outputs, and the operations that the keywords of a call go to; and one call, part by part.

A container is flattened if its `_flattens()` returns True; any other module that is no operation is simply called."""

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

from torch import nn

from octavo.errors import UnsupportedConfig
from octavo.fusion.runs import OperationFuser
from octavo.fusion.stages import Record, Step, Wire
from octavo.ops.operation import FusibleOperation


class Source(NamedTuple):
    """The source of an extra input: an index into the caller's extra inputs, or a channel."""

    place: int
    channel: str = ""


class Part(NamedTuple):
    """A unit of a call: a group of operations, an ordinary module, or a legacy operation."""

    first: int  # index of its first leaf
    fuser: OperationFuser | None
    module: Any
    legacy: Any


class Layout(NamedTuple):
    """The layout of a flattened Sequential."""

    leaves: tuple[nn.Module, ...]
    groups: tuple[Any, ...]  # OperationFuser or module
    parts: tuple[Part, ...]  # the groups, cut at legacy operations
    sources: tuple[tuple[Source, ...], ...]  # per leaf and extra input
    drains: tuple[tuple[tuple[str, bool], ...], ...]  # per leaf and extra output: channel, whether it leaves its part
    returned: tuple[tuple[bool, ...], ...]  # per leaf and extra output: whether the caller gets it
    inputs: int  # number of the caller's extra inputs
    places: tuple[tuple[int, int], ...]  # per entry of the Sequential: the span of its leaves
    require: tuple[str, ...]  # rules required by this Sequential and by those flattened into it
    excused: tuple[str, ...]


def is_container(module: Any) -> bool:
    """Return whether a module is a container that may be flattened."""
    return hasattr(type(module), "_flattens")


def opens(module: Any) -> bool:
    """Return whether a module is a container that is to be flattened now."""
    return is_container(module) and bool(module._flattens())


# -- flattening --------------------------------------------------------------------------------------------------------


def leaves_of(sequential: Any) -> Iterator[nn.Module]:
    for name, module in sequential._modules.items():
        check_there(name, module)
        if opens(module):
            yield from leaves_of(module)
        else:
            yield module


def check_there(name: str, module: Any) -> None:
    """Refuse an entry of a Sequential that is None."""
    if module is None:
        raise TypeError(
            f"{name!r} of a Sequential is None. Leave it out, or put octavo.ops.Identity() where nothing is to be done."
        )


def taken_apart(sequential: Any) -> Layout:
    leaves = tuple(leaves_of(sequential))
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
    parts = _parts(made, sizes, rules)
    sources, outputs, count = _wired(leaves)
    drains = _drained(outputs, sources, [part.first for part in parts])
    places: list[tuple[int, int]] = []
    at = 0
    for module in sequential._modules.values():
        size = len(list(leaves_of(module))) if opens(module) else 1
        places.append((at, at + size))
        at += size
    returned = tuple(tuple(to_caller for _, to_caller in own) for own in outputs)
    return Layout(leaves, made, parts, sources, drains, returned, count, tuple(places), *_demands(sequential))


def _demands(sequential: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the required rules and the reasons that excuse one, of this Sequential and of those flattened into it."""
    require, excused = list(sequential.__dict__.get("require", ())), list(sequential._allowed_unsupported)
    for module in sequential._modules.values():
        if opens(module):
            inner = _demands(module)
            require += inner[0]
            excused += inner[1]
    return tuple(dict.fromkeys(require)), tuple(dict.fromkeys(excused))


def _parts(groups: Sequence[Any], sizes: Sequence[int], rules: Any) -> tuple[Part, ...]:
    """Return the groups, cut at legacy operations."""
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


def _drained(outputs: Any, sources: Any, firsts: list[int]) -> Any:
    """Return, for each extra output, its channel and whether it leaves its part: to the caller or to an operation of
    another part. `firsts` are the parts' first leaves."""
    group = [bisect_right(firsts, i) for i in range(len(outputs))]
    users: dict[str, list[int]] = {}
    for i, own in enumerate(sources):
        for source in own:
            users.setdefault(source.channel, []).append(i)
    return tuple(
        tuple((name, to_caller or any(group[u] != group[i] for u in users.get(name, ()))) for name, to_caller in own)
        for i, own in enumerate(outputs)
    )


def _wired(leaves: Sequence[nn.Module]) -> tuple[Any, Any, int]:
    """Return the sources of extra inputs, the destinations of extra outputs and the number of the caller's extra
    inputs. Refuse a channel that does not have exactly one producer, before its users."""
    filled: dict[str, int] = {}
    sources: list[tuple[Source, ...]] = []
    drains: list[tuple[tuple[str, bool], ...]] = []
    count = 0
    for i, op in enumerate(leaves):
        own: list[Source] = []
        out: list[tuple[str, bool]] = []
        if isinstance(op, FusibleOperation):
            for k in range(op.num_extra_inputs):
                channel = op._channels("_input_channels").get(k)
                if channel is not None and op.op_writes_extra:
                    raise UnsupportedConfig(
                        f"Operation {i} ({type(op).__name__}) writes to its extra input, which is the channel "
                        f"{channel.name!r}, a value that other operations read. Leave in_place out."
                    )
                if channel is None:
                    own.append(Source(count))
                    count += 1
                elif channel.name not in filled:
                    _refuse_unfilled(leaves, i, channel.name)
                else:
                    own.append(Source(-1, channel.name))
            for k in range(op.num_extra_outputs):
                channel = op._channels("_output_channels").get(k)
                if channel is not None and channel.name in filled:
                    raise UnsupportedConfig(
                        f"The channel {channel.name!r} has multiple producers: operations {filled[channel.name]} and "
                        f"{i}. Name one of them otherwise."
                    )
                if channel is not None:
                    filled[channel.name] = i
                out.append(("", True) if channel is None else (channel.name, channel.output_to_caller))
            op.__dict__["_channels_locked"] = True
        elif is_container(op):
            container: Any = op
            if container.refuses_nesting:
                raise UnsupportedConfig(container.refuses_nesting)
            inner: Layout = container._layout()
            own = [Source(count + n) for n in range(inner.inputs)]
            count += inner.inputs
            out = [("", True) for flags in inner.returned for to_caller in flags if to_caller]
        sources.append(tuple(own))
        drains.append(tuple(out))
    return tuple(sources), tuple(drains), count


def _refuse_unfilled(leaves: Sequence[nn.Module], i: int, name: str) -> NoReturn:
    """Raise the error for an operation that takes a channel that no operation before it fills."""
    after = [op._channels("_output_channels").values() for op in leaves[i:] if isinstance(op, FusibleOperation)]
    is_later = any(channel.name == name for own in after for channel in own)
    where = "a later operation fills it" if is_later else "no operation fills it"
    if any(is_container(leaf) for leaf in leaves[:i]):
        where += " (those of a Sequential with rules or hooks of its own, or that recomputes, stay in it)"
    raise UnsupportedConfig(
        f"Operation {i} ({type(leaves[i]).__name__}) takes the channel {name!r}, and {where}. A channel is filled by "
        "an extra output before it: MakeExtraOutput(channel=...)."
    )


# -- keywords of operations --------------------------------------------------------------------------------------------


def routed(sequential: Any, layout: Layout, op_kwargs: dict[Any, dict[str, Any]] | None) -> list[dict[Any, Any]]:
    """Return the keywords of each leaf. For a Sequential that is not flattened, they are the op_kwargs of its call."""
    found: list[dict[Any, Any]] = [{} for _ in layout.leaves]
    if op_kwargs is not None and not isinstance(op_kwargs, dict):
        raise TypeError(f"op_kwargs maps operations to dicts of their keywords, got {type(op_kwargs).__name__}.")
    for target, own in (op_kwargs or {}).items():
        inside = _container_of(layout, target)
        if inside is not None:
            found[inside][layout.leaves[inside] if isinstance(target, int) else target] = own
            continue
        leaves = _targets(sequential, layout, target)
        if not isinstance(own, dict):
            raise TypeError(f"op_kwargs maps an operation to a dict of its keywords, got {type(own).__name__}.")
        for name, value in own.items():
            taker, name = _taker(layout, leaves, name)
            found[taker][name] = value
    return found


def _container_of(layout: Layout, target: Any) -> int | None:
    """Return the index of the leaf that is a Sequential and is or contains the target; None if there is none."""
    if isinstance(target, int) and not isinstance(target, bool) and -len(layout.places) <= target < len(layout.places):
        first, end = layout.places[target]
        return first if end == first + 1 and is_container(layout.leaves[first]) else None
    for i, leaf in enumerate(layout.leaves):
        if is_container(leaf) and any([m is target for m in leaf.modules()]):
            return i
    return None


def _targets(sequential: Any, layout: Layout, target: Any) -> range:
    if isinstance(target, bool) or not isinstance(target, int | nn.Module):
        raise TypeError(f"op_kwargs is keyed by a module (sequential.name, sequential[0]) or an index, got {target!r}.")
    if target is sequential:
        return range(len(layout.leaves))
    if isinstance(target, int):
        number = len(layout.places)
        if not -number <= target < number:
            raise IndexError(f"op_kwargs has the index {target}, and this Sequential has {number} modules.")
        leaves = range(*layout.places[target])
    else:
        flattened = is_container(target)
        modules = list(sequential._modules.values()) if flattened else layout.leaves
        where = [i for i, module in enumerate(modules) if module is target]
        if len(where) != 1:
            often = f"{len(where)} times in this Sequential. Use its index" if where else "not in this Sequential"
            raise UnsupportedConfig(f"op_kwargs has a {type(target).__name__} that is {often}.")
        leaves = range(*layout.places[where[0]]) if flattened else range(where[0], where[0] + 1)
    if not any(isinstance(layout.leaves[i], FusibleOperation) for i in leaves):
        named = type(layout.leaves[leaves[0]]).__name__ if len(leaves) else "an empty Sequential"
        raise UnsupportedConfig(f"op_kwargs are for Octavo's operations, and {named} is not one. Call it outside.")
    return leaves


ALSO = {"output": "out", "grad_input": "dgrad_out"}  # what Transformer Engine calls the keywords for memory


def _taker(layout: Layout, leaves: range, name: str) -> tuple[int, str]:
    """Return the index of the one operation among these leaves that takes a keyword, and its name for the keyword."""
    if name in ALSO and not any(name in getattr(layout.leaves[i], "op_keywords", ()) for i in leaves):
        name = ALSO[name]
    takers = [i for i in leaves if name in getattr(layout.leaves[i], "op_keywords", ())]
    if len(takers) == 1:
        return takers[0], name
    titles = ", ".join(
        f"{type(layout.leaves[i]).__name__} ({', '.join(getattr(layout.leaves[i], 'op_keywords', ())) or 'none'})"
        for i in leaves
    )
    if not takers:
        raise TypeError(f"No operation there takes the keyword {name!r}. Keywords: {titles}.")
    raise UnsupportedConfig(f"{len(takers)} operations there take the keyword {name!r}: {titles}. Name one of them.")


# -- one call ----------------------------------------------------------------------------------------------------------


class Call(NamedTuple):
    """The arguments and the state of one call."""

    layout: Layout
    extra_inputs: tuple[Any, ...]
    kwargs: list[dict[str, Any]]  # per leaf
    channels: dict[str, Any]
    public: list[Any]
    records: list[Record] | None


def called(part: Part, call: Call, x: Any) -> Any:
    """Call an ordinary module, or a Sequential that is not flattened, with its share of the caller's extra inputs."""
    extra_inputs, kwargs = inputs_of(part, call), call.kwargs[part.first]
    made = part.module(x, *extra_inputs, op_kwargs=kwargs) if kwargs else part.module(x, *extra_inputs)
    return passed_on(part, call, made)


def inputs_of(part: Part, call: Call) -> tuple[Any, ...]:
    """Return the extra inputs of a module or a legacy operation: the caller's, or those of channels."""
    own = call.layout.sources[part.first]
    return tuple([call.channels[s.channel] if s.channel else call.extra_inputs[s.place] for s in own])


def passed_on(part: Part, call: Call, made: Any) -> Any:
    """Return y of a module or a legacy operation. Its extra outputs go to channels and to the caller."""
    flags = call.layout.returned[part.first]
    if not flags:
        return made
    for t, (name, _), is_returned in zip(made[1:], call.layout.drains[part.first], flags, strict=True):
        if name:
            call.channels[name] = t
        if is_returned:
            call.public.append(t)
    return made[0]


def through(part: Part, call: Call, x: Any) -> Any:
    """Run one part of a call and return its y."""
    if part.fuser is None:
        return called(part, call, x)
    layout, steps = call.layout, []
    for i, op in enumerate(part.fuser.ops, part.first):
        extra_inputs = tuple([Wire(s.channel) if s.channel else call.extra_inputs[s.place] for s in layout.sources[i]])
        steps.append(Step(op, extra_inputs, call.kwargs[i], i, layout.drains[i]))
    x, given = part.fuser._run_steps(x, steps, call.channels, call.records)
    for i, own in enumerate(given, part.first):
        for t, is_returned in zip(own, layout.returned[i], strict=True):
            if is_returned:
                call.public.append(t)
    return x
