"""One call of a Sequential: its arguments and state, and how each part of the layout takes them."""

from typing import Any, NamedTuple

from octavo.fusion.layout import Layout, Part
from octavo.fusion.stages import Record, Step, Wire


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
    extras, kwargs = extras_of(part, call), call.kwargs[part.first]
    made = part.module(x, *extras, op_kwargs=kwargs) if kwargs else part.module(x, *extras)
    return published(part, call, made)


def extras_of(part: Part, call: Call) -> tuple[Any, ...]:
    return tuple([call.extra_inputs[s.place] for s in call.layout.sources[part.first]])


def published(part: Part, call: Call, made: Any) -> Any:
    """Return x from the result of a module. Extra outputs, if it has any, go to the caller."""
    if not call.layout.shown[part.first]:
        return made
    call.public.extend(made[1:])
    return made[0]


def through(part: Part, call: Call, x: Any) -> Any:
    """Run one part of a call and return its y."""
    if part.fuser is None:
        return called(part, call, x)
    layout, steps = call.layout, []
    for i, op in enumerate(part.fuser.ops, part.first):
        extras = tuple([Wire(s.channel) if s.channel else call.extra_inputs[s.place] for s in layout.sources[i]])
        steps.append(Step(op, extras, call.kwargs[i], i, layout.drains[i]))
    x, given = part.fuser._run_steps(x, steps, call.channels, call.records)
    for i, own in enumerate(given, part.first):
        for t, shown in zip(own, layout.shown[i], strict=True):
            if shown:
                call.public.append(t)
    return x
