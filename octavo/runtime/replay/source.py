"""The lines of a recorded call, and the passes over them before they become a function: unused lines are left out, and
detached tensors replaced by the tensors themselves; a tensor that is only used in another form is allocated in that
form; views are made without torch's dispatcher; small zeros that kernels get are one allocation, filled at once, an
address is asked for once, and every tensor is allocated right before its first use and deleted after its last."""

import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

APART = 256  # bytes: tensors that are one allocation begin at multiples of it
SMALL = 2**20  # bytes of zeros that may live longer than they are used

ADDRESS = re.compile(r"\b(\w+)\.data_ptr\(\)")


class Line(NamedTuple):
    text: str
    uses: tuple[str, ...]
    makes: tuple[str, ...]
    addresses: tuple[str, ...] = ()  # used too, but only for their addresses
    idle: bool = False  # allocates, or makes a view: not needed where its result is not used
    zeros: int = 0  # how many bytes it allocates and fills with zeros
    writes: bool = False  # an operator writes to what it uses, and counts their versions
    detached: bool = False  # makes the same tensor without its gradient: not needed where nothing records gradients


def address(name: str) -> str:
    return f"{name}.data_ptr()"


def needed(lines: list[Line], returned: set[str]) -> list[Line]:
    """Return the lines, without idle ones whose results are not used."""
    used, kept = set(returned), list[Line]()
    for line in reversed(lines):
        if not line.idle or used.intersection(line.makes):
            used.update(line.uses, line.addresses)
            kept.append(line)
    return kept[::-1]


def without_detached(lines: list[Line], returned: set[str]) -> list[Line]:
    """Replace detached tensors by the tensors that they were made of. A detached tensor that is returned, itself or as
    a view, stays: autograd would take the other for it."""
    leaving = set(returned)
    for line in reversed(lines):
        if line.idle and leaving.intersection(line.makes):
            leaving.update(line.uses)
    own: dict[str, str] = {}
    kept: list[Line] = []
    for line in lines:
        line = renamed(line, own)
        if line.detached and not leaving.intersection(line.makes):
            own[line.makes[0]] = line.uses[0]
        else:
            kept.append(line)
    return kept


def renamed(line: Line, names: dict[str, str]) -> Line:
    """Return the line, with other names for the tensors that it uses."""
    used = [name for name in (*line.uses, *line.addresses) if name in names]
    if not used:
        return line
    pattern = "|".join(rf"\b{re.escape(name)}\b" for name in used)
    return line._replace(
        text=re.sub(pattern, lambda found: names[found.group()], line.text),
        uses=tuple(names.get(name, name) for name in line.uses),
        addresses=tuple(names.get(name, name) for name in line.addresses),
    )


def in_form(lines: list[Line], forms: dict[str, str], returned: set[str]) -> list[Line]:
    """Return the lines, where a tensor that is used only in one other form is allocated in that form: one view less."""
    for i, line in enumerate(lines):
        first, one = line.uses[:1], line.makes[:1]
        if not (line.idle and first and one and one[0] in forms and len(line.makes) == 1) or first[0] in returned:
            continue
        at = next((n for n, other in enumerate(lines) if first[0] in other.makes), -1)
        if at < 0 or lines[at].uses or any(first[0] in other.uses for other in lines if other is not line):
            continue  # not allocated here, or another line uses it as it is
        lines = [*lines[:i], *lines[i + 1 :]]
        lines[at] = Line(f"{one[0]} = {forms[one[0]]}", (), one, idle=True)
        return in_form([readdressed(other, {first[0]: (one[0], 0)}) for other in lines], forms, returned)
    return lines


def with_aliases(
    lines: list[Line], aliases: dict[str, tuple[str, str]], inputs: set[str], returned: set[str]
) -> list[Line]:
    """Return the lines, with views made straight from the tensor that they are views of, and none where a view of a
    view is that tensor again. `aliases` has this tensor for each view, and what makes the view. One that is returned or
    written to stays, with all that it is a view of: it shares a gradient and a version."""
    shared = set(returned)
    for line in reversed(lines):
        if line.writes or (line.idle and shared.intersection(line.makes)):
            shared.update(line.uses)
    own: dict[str, str] = {}
    there, kept = set(inputs), list[Line]()
    for line in lines:
        line = renamed(line, own)
        name = line.makes[0] if len(line.makes) == 1 else ""
        root, make = aliases.get(name, ("", ""))
        if line.idle and not shared.intersection(line.makes) and root in there:
            if not make:
                own[name] = root
                continue
            line = Line(f"{name} = {make}", (root,), (name,), idle=True)
        there.update(line.makes)
        kept.append(line)
    return needed(kept, returned)


def with_late_allocations(lines: list[Line]) -> list[Line]:
    """Return the lines, with each allocation right before the first line that uses its tensor: what is let go in
    between makes room for it."""
    waiting: dict[str, Line] = {}
    kept: list[Line] = []
    for line in lines:
        kept += [waiting.pop(name) for name in dict.fromkeys((*line.uses, *line.addresses)) if name in waiting]
        if line.idle and not line.uses and len(line.makes) == 1:
            waiting[line.makes[0]] = line
        else:
            kept.append(line)
    return [*kept, *waiting.values()]


def with_one_fill(lines: list[Line], returned: set[str], zeros: Callable[[int], str]) -> list[Line]:
    """Return the lines, with one allocation for all small zeros that are used by their addresses alone. `zeros` writes
    an allocation of so many bytes."""
    used = returned.union(*[line.uses for line in lines])
    starts: dict[str, int] = {}
    total = 0
    for line in lines:
        if 0 < line.zeros <= SMALL and not used.intersection(line.makes):
            starts[line.makes[0]] = total
            total += -(-line.zeros // APART) * APART
    if len(starts) < 2:
        return lines
    one = next(iter(starts))
    kept: list[Line] = []
    for line in lines:
        if one in line.makes:
            kept.append(Line(f"{one} = {zeros(total)}", (), (one,)))
        elif not starts.keys() & set(line.makes):
            kept.append(readdressed(line, {name: (one, start) for name, start in starts.items()}))
    return kept


def readdressed(line: Line, places: dict[str, tuple[str, int]]) -> Line:
    """Return the line, with the addresses of some tensors replaced by places in others: so many bytes from where these
    begin."""
    text = line.text
    for name in places.keys() & set(line.addresses):
        root, offset = places[name]
        text = re.sub(rf"\b{re.escape(address(name))}", address(root) + (f" + {offset}" if offset else ""), text)
    addresses = dict.fromkeys(places[name][0] if name in places else name for name in line.addresses)
    return line._replace(text=text, addresses=tuple(addresses))


def with_addresses_once(lines: list[Line], inputs: set[str]) -> list[Line]:
    """Return the lines, with a name for each address that is used more than once."""
    often = Counter(found for line in lines for found in ADDRESS.findall(line.text))
    names = {name: f"{name}_at" for name, count in often.items() if count > 1}
    kept = [_asked(name, names) for name in names if name in inputs]
    for line in lines:
        kept.append(line._replace(text=ADDRESS.sub(lambda found: names.get(found[1], found[0]), line.text)))
        kept += [_asked(name, names) for name in line.makes if name in names]
    return kept


def _asked(name: str, names: dict[str, str]) -> Line:
    return Line(f"{names[name]} = {address(name)}", (), (), (name,))


def with_deletions(lines: list[Line], returned: set[str]) -> Iterable[str]:
    """Return the lines, each followed by a deletion of the tensors that no later one uses."""
    last: dict[str, int] = {}
    own = {name for line in lines for name in line.makes}
    for n, line in enumerate(lines):
        for name in (*line.uses, *line.addresses, *line.makes):
            last[name] = n
    for n, line in enumerate(lines):
        yield line.text
        done = [name for name in last if last[name] == n and name in own and name not in returned]
        if done:
            yield f"del {', '.join(done)}"
