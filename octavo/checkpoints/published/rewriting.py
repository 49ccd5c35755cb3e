"""From one folder to another, in another layout, without a model: `octavo convert-checkpoint`."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.checkpoints.published import shards
from octavo.checkpoints.published.layout_choice import Choice, choose, config_of, entry_for, matches
from octavo.checkpoints.published.layouts import FLOATS, LAYOUTS, Layout, warn_of_static_scales
from octavo.checkpoints.published.loading import decoded
from octavo.checkpoints.published.loading_plan import CODES
from octavo.checkpoints.published.shards import Planned
from octavo.checkpoints.published.tensor_parts import (
    BLOCK,
    PAIR,
    check_scales,
    expected,
    in_file,
    in_memory,
    refined,
    unsupported_columns,
    unsupported_refinement,
)
from octavo.checkpoints.tensor_file import NAMES, Entry, read_entry
from octavo.errors import InvalidCheckpoint, UnsupportedConfig, check_choice
from octavo.formats import E2M1
from octavo.text import plural

VALUES = "bf16"  # the name of a folder without codes
NEVER = ("*embed*", "*wte*", "*wpe*", "*norm*", "lm_head", "*.lm_head", "output", "*router*", "*.gate", "*conv*")
SCALES_OF_X = (".input_scale", ".activation_scale", ".input_global_scale")


@dataclass
class Rewritten:
    """The report of `rewrite`: the tensors of a folder, by name."""

    same: list[str] = field(default_factory=list)  # bytes
    regrouped: list[str] = field(default_factory=list)  # weights whose codes stay, and whose scales are repeated
    quantized: list[str] = field(default_factory=list)  # values that became codes
    requantized: list[str] = field(default_factory=list)  # codes that became other codes: values changed
    dequantized: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)  # matrices that stay values
    dropped: list[str] = field(default_factory=list)  # static scales of activations

    def __str__(self) -> str:
        what = {
            "copied": self.same, "with repeated scales and the same values": self.regrouped,
            "quantized": self.quantized, "quantized again, with other values": self.requantized,
            "dequantized": self.dequantized, "left as values": self.left,
            "static scales of activations dropped": self.dropped,
        }  # fmt: skip
        return "\n".join(f"{plural(len(names), 'tensor')} {how}" for how, names in what.items() if names)


class Weight(NamedTuple):
    """A weight of codes in a folder."""

    name: str
    layout: Layout
    shape: tuple[int, ...]


def rewrite(
    source: Path | str, target: Path | str, layout: str, *, from_layout: str | None = None, ignore: Sequence[str] = (),
    device: torch.device | None = None, shard_bytes: int = shards.SHARD_BYTES,
    begun: Callable[[int], Callable[[int], None]] = lambda total: lambda done: None,
) -> Rewritten:  # fmt: skip
    """Write a folder in a layout, or "bf16" for values. Codes of the same layout are copied; other codes become values
    and are quantized again, unless repeated scales say the same. Matrices of values are quantized, but for embeddings,
    norms, routers, heads and those that `ignore` matches. `begun` is told the number of tensors, and returns what is
    told how many are written."""
    check_choice(layout, (VALUES, *LAYOUTS), what="layout")
    wanted = LAYOUTS.get(layout)
    if wanted is not None and wanted.unpacks:
        raise UnsupportedConfig(f"Octavo reads {layout}, and does not write it. Choose another layout.")
    folder, place = shards.folder_of(source, "convert-checkpoint"), device or torch.device("cpu")
    made = _Rewriter(folder, wanted, from_layout, tuple(ignore), place)
    planned = dict(made.planned())
    if wanted is not None and made.writes_codes:
        warn_of_static_scales(wanted)
    config = config_of(folder)
    entry = None if wanted is None else entry_for(wanted, made.left_out)
    destination = shards.path_of(target, "convert-checkpoint")
    others = shards.other_files(folder)
    shards.write_folder(
        destination, planned, shards.config_with(config, entry), others, shard_bytes, begun(len(planned))
    )
    return made.report


class _Rewriter:
    def __init__(
        self, folder: Path, wanted: Layout | None, from_layout: str | None, ignore: tuple[str, ...],
        device: torch.device,
    ) -> None:  # fmt: skip
        self.entries, self.wanted, self.device, self.ignore = shards.read_entries(folder), wanted, device, ignore
        self.report, self.left_out = Rewritten(), list[str]()
        has_codes = any(entry.dtype in CODES for entry in self.entries.values())
        self.choice = choose(folder, from_layout) if has_codes or from_layout else Choice((), ())
        self.weights = {weight.name: weight for weight in self._weights(folder)}

    def _weights(self, folder: Path) -> Iterator[Weight]:
        """Yield the weights of codes. Raise for one that is not whole."""
        for row, _ in self.choice.groups:
            for name, entry in self.entries.items():
                base = name.removesuffix(row.codes)
                if not name.endswith(row.codes) or base + row.scale not in self.entries or entry.dtype not in CODES:
                    continue
                if self.choice.of(base.removesuffix(".weight")) != row:
                    continue
                yield self._checked(folder, Weight(base, row, shape_of(row, entry)))

    def _checked(self, folder: Path, weight: Weight) -> Weight:
        for each in expected(weight.layout, weight.shape):
            entry = self.entries.get(weight.name + each.suffix)
            if entry is None or entry.dtype not in each.dtypes or entry.shape not in each.shapes:
                found = "not there" if entry is None else f"{entry.dtype} {list(entry.shape)}"
                raise InvalidCheckpoint(
                    f"{weight.name}{each.suffix} of {folder} is {found}, and {weight.layout.name} has "
                    f"{' or '.join(each.dtypes)} {list(each.shapes[0])} there. Name the layout that it has: --from."
                )
        check_scales(weight.layout, weight.name, read_entry(self.entries[weight.name + weight.layout.scale]))
        return weight

    def planned(self) -> Iterator[tuple[str, Planned]]:
        """Yield the tensors of the new folder."""
        of_weights = {w.name + e.suffix: w for w in self.weights.values() for e in expected(w.layout, w.shape)}
        for name, entry in self.entries.items():
            weight = of_weights.get(name)
            if weight is not None:
                if name == weight.name + weight.layout.codes:
                    yield from self._from_codes(weight)
            elif self.wanted is not None and self._becomes_codes(name, entry):
                self.report.quantized.append(name)
                yield from self._coded(name, entry.shape, partial(self._values, entry), self.wanted)
            elif name.endswith(SCALES_OF_X) and self.choice.groups and self._changes():
                self.report.dropped.append(name)
            else:
                yield name, self._copied(name, entry)

    @property
    def writes_codes(self) -> bool:
        report = self.report
        return bool(report.quantized or report.requantized or report.regrouped)

    def _changes(self) -> bool:
        return any(row != self.wanted for row, _ in self.choice.groups)

    def _copied(self, name: str, entry: Entry) -> Planned:
        is_matrix = len(entry.shape) >= 2 and name.endswith(".weight") and entry.dtype in FLOATS
        module = name.removesuffix(".weight")
        if is_matrix and not any(matches(p, module) for p in NEVER[:4]):
            self.left_out.append(module)
        (self.report.left if is_matrix else self.report.same).append(name)
        return Planned.copy_of(entry)

    def _becomes_codes(self, name: str, entry: Entry) -> bool:
        assert self.wanted is not None
        module = name.removesuffix(".weight")
        if len(entry.shape) != 2 or not name.endswith(".weight") or entry.dtype not in FLOATS:
            return False
        left = (*NEVER, *self.ignore, *self.choice.left_out)
        return not any(matches(p, module) for p in left) and not unsupported_columns(self.wanted, entry.shape[-1])

    def _from_codes(self, weight: Weight) -> Iterator[tuple[str, Planned]]:
        wanted = self.wanted
        if wanted == weight.layout:
            for each in expected(weight.layout, weight.shape):
                name = weight.name + each.suffix
                self.report.same.append(name)
                yield name, Planned.copy_of(self.entries[name])
        elif wanted is None:
            self.report.dequantized.append(weight.name)
            make = partial(self._decoded, weight, torch.bfloat16)
            yield weight.name, Planned(NAMES[torch.bfloat16], weight.shape, make)
        elif not weight.layout.unpacks and not unsupported_refinement(weight.layout.quantizer, wanted):
            self.report.regrouped.append(weight.name)
            for each in expected(wanted, weight.shape):
                make = partial(self._regrouped, weight, each.suffix)
                yield weight.name + each.suffix, Planned(each.dtypes[0], each.shapes[0], make)
        else:
            self.report.requantized.append(weight.name)
            yield from self._coded(weight.name, weight.shape, partial(self._decoded, weight, torch.float32), wanted)

    def _coded(
        self, name: str, shape: tuple[int, ...], values: Callable[[], Tensor], layout: Layout
    ) -> Iterator[tuple[str, Planned]]:
        if why := unsupported_columns(layout, shape[-1]):
            raise UnsupportedConfig(f"{name} cannot be in {layout.name}: {why}. Choose another layout.")
        for each in expected(layout, shape):
            make = partial(quantized, values, layout, each.suffix)
            yield name + each.suffix, Planned(each.dtypes[0], each.shapes[0], make)

    def _values(self, entry: Entry) -> Tensor:
        return read_entry(entry).to(self.device)

    def _parts(self, weight: Weight) -> list[Tensor]:
        names = [weight.name + each.suffix for each in expected(weight.layout, weight.shape)]
        tensors = [read_entry(self.entries[name]).to(self.device) for name in names]
        return in_memory(weight.layout, tensors, weight.shape)

    def _decoded(self, weight: Weight, dtype: torch.dtype) -> Tensor:
        return decoded(weight.layout, self._parts(weight), weight.shape, dtype)

    def _regrouped(self, weight: Weight, suffix: str) -> Tensor:
        assert self.wanted is not None
        parts = refined(self._parts(weight), weight.layout.quantizer, self.wanted, weight.shape)
        return in_file(self.wanted, parts, weight.shape)[suffix]


def quantized(values: Callable[[], Tensor], layout: Layout, suffix: str) -> Tensor:
    """Return one tensor of a weight that is quantized."""
    whole = values()
    each = [list(layout.quantizer.quantize(m).tensors()) for m in (whole if whole.dim() == 3 else [whole])]
    parts = [torch.stack(list(same)) if whole.dim() == 3 else same[0] for same in zip(*each, strict=True)]
    parts[0] = parts[0].view(torch.uint8)
    return in_file(layout, parts, tuple(whole.shape))[suffix]


def shape_of(layout: Layout, codes: Entry) -> tuple[int, ...]:
    """Return the shape of a weight from that of its codes."""
    *lead, last = codes.shape
    if layout.unpacks:
        return (*lead[:-1], lead[-1] * BLOCK)
    return (*lead, last * PAIR if layout.quantizer.fmt is E2M1 else last)
