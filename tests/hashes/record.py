"""The record of a device: one line a case, in sections that say where its hashes hold.

Section "any" holds on every CPU. The others are named after a version of torch and a probe of the machine, or after a
GPU: they have the cases whose last bits these decide, and are skipped where there is none for the machine at hand.
"""

import json
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent
ANY = "any"
NODES = "nodes"  # the part that eager mode does not have
Sections = dict[str, dict[str, str]]  # section -> case -> its line


def path_of(device: str) -> Path:
    return FOLDER / f"{device}.json"


def read(path: Path) -> Sections:
    return json.loads(path.read_text()) if path.exists() else {}


def write(path: Path, sections: Sections) -> None:
    path.write_text(json.dumps({s: sections[s] for s in sorted(sections)}, indent=0, sort_keys=True) + "\n")


def merged(sections: Sections, found: Sections, known: set[str]) -> Sections:
    """The record with the lines that were found, without cases that are gone, or belong to another section now."""
    result: Sections = {}
    for section, lines in sections.items():
        # what holds anywhere is in no section of a machine, and the other way round
        moved = {name for other, new in found.items() for name in new if (other == ANY) != (section == ANY)}
        kept = {name: line for name, line in lines.items() if name in known and name not in moved}
        if kept:
            result[section] = kept
    for section, lines in found.items():
        result.setdefault(section, {}).update(lines)
    return result


class Comparison(NamedTuple):
    """The outcome of the cases that were run, and of those on record that were not."""

    changed: dict[str, str]  # case -> the parts that differ
    new: list[str]
    gone: list[str]
    elsewhere: list[str]  # on record for other machines only

    @property
    def is_clean(self) -> bool:
        return not (self.changed or self.new or self.gone)


def compare(sections: Sections, found: Sections, known: set[str], graphs: bool = True) -> Comparison:
    """Lines that were found against those on record. `known`: the names of all cases, run or not. `graphs`: whether
    they were compiled too."""
    changed, new, elsewhere = {}, [], []
    on_record = {name for lines in sections.values() for name in lines}
    for section, lines in found.items():
        own = sections.get(section, {})
        for name, line in lines.items():
            if name in own:
                recorded = own[name] if graphs else without_nodes(own[name])
                if recorded != line:
                    changed[name] = difference(recorded, line)
            elif section != ANY and name in on_record and name not in sections.get(ANY, {}):
                elsewhere.append(name)
            else:
                new.append(name)
    return Comparison(changed, new, sorted(on_record - known), elsewhere)


def parts(line: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in line.split()[1:])


def without_nodes(line: str) -> str:
    return " ".join(word for word in line.split() if not word.startswith(f"{NODES}="))


def difference(old: str, new: str) -> str:
    """The names of the parts in which two lines differ, with both values."""
    before, after = parts(old), parts(new)
    differs = [
        f"{name} {before.get(name, 'none')} -> {after.get(name, 'none')}"
        for name in dict.fromkeys((*before, *after))
        if before.get(name) != after.get(name)
    ]
    return ", ".join(differs) or f"{old.split()[0]} -> {new.split()[0]}"
