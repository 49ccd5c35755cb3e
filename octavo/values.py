"""Settings as values: frozen, comparable, hashable, and equal to what their canonical string parses back to.

A quantizer or a recipe is a `Value`. Its `key` is a short string such as

    fp8-block(scale='fp32',wgrad='bf16')

with the registered name and the fields that differ from their defaults, in field order. The string is what crosses a
custom-op boundary and lands in a graph, in a disk cache and in a log, so it must mean the same in every process: a
class takes part only under a name of its own.

    @register("my-recipe")
    class MyRecipe(Recipe):
        strength: int = 3

`register` makes the class a frozen dataclass. A class that was never registered cannot be constructed: it would have no
string, and an unregistered subclass would silently borrow its parent's.
"""

import ast
import math
import re
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from typing import Any, NoReturn, Self, TypeVar, dataclass_transform

from octavo.errors import UnknownSetting, UnsupportedConfig, nearest
from octavo.formats import FORMATS, Format, format_named

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")
_LITERAL = re.compile(r"-?\d+(\.\d+)?([eE][+-]?\d+)?|'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"")
_BARE = re.compile(r"([=(,]\s*)([A-Za-z][A-Za-z0-9_.-]*)(?=\s*[,)])")  # a value that is a word without quotes
_WORDS = {"None": None, "True": True, "False": False}
_BY_NAME: dict[str, "type[Value]"] = {}

T = TypeVar("T", bound="type[Value]")


class Value:
    """A named, frozen setting. Subclasses declare fields and may override `validate`. Equal means: the same key."""

    registered_name: str = ""
    key: str  # the canonical string, made once at construction so that traced code only reads it

    def __new__(cls, *args: Any, **settings: Any) -> Self:
        if cls.__dict__.get("registered_name", "") == "":
            raise UnsupportedConfig(
                f"{cls.__qualname__} has no registered name, so it has no canonical string and could be mistaken for "
                f"its parent. Decorate it with @octavo.values.register('a-name-of-its-own')."
            )
        known = cls.__dataclass_fields__  # type: ignore[attr-defined]
        if not settings.keys() <= known.keys():
            _refuse_setting(cls, next(name for name in settings if name not in known))
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for field in fields(self):  # type: ignore[arg-type]
            if type(field.default) is float and type(getattr(self, field.name)) is int:
                object.__setattr__(self, field.name, float(getattr(self, field.name)))
        self.validate()
        object.__setattr__(self, "key", _format(self))

    def validate(self) -> None:
        """Refuse settings that have no meaning, naming what is allowed."""

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.key == other.key  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash(self.key)

    def __str__(self) -> str:
        return self.key

    def __repr__(self) -> str:
        return self.key


@dataclass_transform(frozen_default=True, kw_only_default=False)
def register(name: str) -> Callable[[T], T]:
    """Give a `Value` class its name in canonical strings, and make it a frozen dataclass."""
    if not _NAME.fullmatch(name):
        raise UnsupportedConfig(f"A registered name is letters, digits and _ . - after a letter, got {name!r}.")
    if name in FORMATS or name in _WORDS:
        raise UnsupportedConfig(f"The name {name!r} already stands for itself in canonical strings. Choose another.")

    def bind(cls: T) -> T:
        holder = _BY_NAME.get(name)
        # a module may be loaded again, but a function that is called again makes another class
        reloaded = holder is not None and (holder.__module__, holder.__qualname__) == (cls.__module__, cls.__qualname__)
        if holder is not None and (not reloaded or "<locals>" in cls.__qualname__):
            raise UnsupportedConfig(f"The name {name!r} already belongs to {holder.__qualname__}. Choose another.")
        frozen = dataclass(frozen=True, repr=False, eq=False)(cls)
        frozen.registered_name = name
        _BY_NAME[name] = frozen
        return frozen  # type: ignore[return-value]

    return bind


def parse(text: str) -> Any:
    """The value whose `key` is `text`. Names alone stand for their defaults: `fp8-block`."""
    try:
        return _parse(text)
    except UnsupportedConfig as error:
        right = _with_quotes(text)
        if right is None:
            raise
        raise UnsupportedConfig(f"{error} Text takes quotes: write {right!r}.") from None


def _parse(text: str) -> Any:
    value, rest = _parse_value(text.strip(), text)
    if rest.strip():
        raise UnsupportedConfig(f"Cannot read {text!r}: {rest.strip()!r} is left over after the first value.")
    return value


def _with_quotes(text: str) -> str | None:
    """The string that is meant by one whose words lack their quotes, if that can be read."""
    for known in (_BY_NAME, ()):  # first without those that have a meaning as they are

        def quoted(found: re.Match[str], known: Any = known) -> str:
            word = found[2]
            return found[0] if word in FORMATS or word in _WORDS or word in known else f"{found[1]}'{word}'"

        right = _BARE.sub(quoted, text)
        try:
            if right != text:
                _parse(right)
                return right
        except UnsupportedConfig:
            pass
    return None


def names(kind: type[Value]) -> tuple[str, ...]:
    """Registered names of one kind of value, in order of registration."""
    return tuple(name for name, cls in _BY_NAME.items() if issubclass(cls, kind))


def _format(value: Value) -> str:
    changed = []
    for field in fields(value):  # type: ignore[arg-type]
        item = getattr(value, field.name)
        text = _format_item(item, f"{type(value).__name__}.{field.name}")
        if field.default is MISSING or item != field.default or type(item) is not type(field.default):
            changed.append(f"{field.name}={text}")
    return value.registered_name + (f"({','.join(changed)})" if changed else "")


def _format_item(item: object, where: str) -> str:
    if isinstance(item, Value):
        return item.key
    if isinstance(item, Format):
        return item.name
    if isinstance(item, tuple):
        return "(" + "".join(_format_item(i, where) + "," for i in item) + ")"
    if item is None or type(item) in (bool, int, str) or (type(item) is float and math.isfinite(item)):
        return repr(item)
    raise UnsupportedConfig(
        f"{where} is {item!r}; a setting may hold a bool, int, finite float, str, None, a Format, another registered "
        "value, or a tuple of these, because it must print and parse back to an equal value."
    )


def _parse_value(text: str, whole: str) -> tuple[Any, str]:
    """One value at the head of `text`, and what follows it."""
    if text.startswith("("):
        return _parse_tuple(text[1:], whole)
    if literal := _LITERAL.match(text):
        try:
            return ast.literal_eval(literal.group()), text[literal.end() :]
        except (SyntaxError, ValueError):
            raise UnsupportedConfig(f"Cannot read {whole!r}: {literal.group()} is no number or string.") from None
    name = _NAME.match(text)
    if name is None:
        raise UnsupportedConfig(f"Cannot read {whole!r}: expected a value at {text!r}.")
    word, rest = name.group(), text[name.end() :]
    if word in _WORDS:
        return _WORDS[word], rest
    if word in FORMATS:
        return FORMATS[word], rest
    return _parse_fields(word, rest, whole)


def _parse_tuple(text: str, whole: str) -> tuple[tuple[Any, ...], str]:
    items = []
    text = text.lstrip()
    while not text.startswith(")"):
        item, text = _parse_value(text, whole)
        items.append(item)
        text = _after_item(text, whole)
    return tuple(items), text[1:]


def _after_item(text: str, whole: str) -> str:
    """What follows an item of a list: past the comma, or at the bracket that closes it."""
    text = text.lstrip()
    if not text.startswith((",", ")")):
        raise UnsupportedConfig(f"Cannot read {whole!r}: expected , or ) at {text!r}.")
    return text.removeprefix(",").lstrip()


def _parse_fields(word: str, rest: str, whole: str) -> tuple[Value, str]:
    cls = _BY_NAME.get(word)
    if cls is None:
        known = ", ".join(_BY_NAME)
        meant = format_named(word)
        hint = "" if meant is None else f" Did you mean {meant}?"
        raise UnsupportedConfig(
            f"Cannot read {whole!r}: no value is registered as {word!r}. Registered: {known}.{hint}"
        )
    settings: dict[str, Any] = {}
    if rest.startswith("("):
        rest = rest[1:].lstrip()
        while not rest.startswith(")"):
            field = re.match(r"\s*([A-Za-z_]\w*)\s*=\s*", rest)
            if field is None:
                raise UnsupportedConfig(f"Cannot read {whole!r}: expected field=value at {rest!r}.")
            if field.group(1) in settings:
                raise UnsupportedConfig(f"Cannot read {whole!r}: {field.group(1)!r} is given twice.")
            settings[field.group(1)], rest = _parse_value(rest[field.end() :], whole)
            rest = _after_item(rest, whole)
        rest = rest[1:]
    try:
        return cls(**settings), rest
    except UnknownSetting:
        raise
    except TypeError as error:  # one that it cannot do without, or of a kind that it cannot compare
        allowed = ", ".join(f.name for f in fields(cls)) or "none"  # type: ignore[arg-type]
        raise UnsupportedConfig(f"Cannot read {whole!r}: {error}. Fields of {word}: {allowed}.") from None


def _refuse_setting(cls: type[Value], setting: str) -> NoReturn:
    name, known = cls.registered_name, [f.name for f in fields(cls)]  # type: ignore[arg-type]
    raise UnknownSetting(
        f"{name} has no setting {setting!r}.{nearest(setting, known)} Fields of {name}: {', '.join(known) or 'none'}."
    )
