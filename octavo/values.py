"""Settings as values: frozen, comparable, hashable, and equal to what their canonical string parses back to.

A quantizer or a recipe is a `Value`. Its `key` is a short string such as

    fp8-block(scale='fp32',wgrad='bf16')

with the registered name and the fields that differ from their defaults, in field order. Custom ops take this string,
and graphs, disk caches and logs store it, so it must mean the same in every process: a class takes part only under a
name of its own.

    @register("my-recipe")
    class MyRecipe(Recipe):
        strength: int = 3

`register` makes the class a frozen dataclass. A class that was never registered cannot be constructed: it would have no
string, and an unregistered subclass would silently borrow its parent's.

Brackets nest at most DEEPEST deep and a number has at most DIGITS characters, in strings and in values alike, so that
every value has a string that parses. Parsing reads a string once, from left to right: its work grows with the length.
"""

import ast
import dataclasses
import math
import re
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any, ClassVar, NoReturn, Self, TypeVar, dataclass_transform

from octavo.errors import UnknownSetting, UnsupportedConfig, nearest
from octavo.foreign_keywords import OF_RECIPES
from octavo.formats import FORMATS, Format, format_named

__all__ = ["Value", "names", "parse", "register"]


def __dir__() -> list[str]:
    return __all__


_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")
_LITERAL = re.compile(r"-?\d+(\.\d+)?([eE][+-]?\d+)?|'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"")
_SPACE = re.compile(r"\s*")
_FIELD = re.compile(r"\s*([A-Za-z_]\w*)\s*=\s*")
_BRACKET = re.compile(r"[()]|'(?:[^'\\]|\\.)*'?|\"(?:[^\"\\]|\\.)*\"?")  # or a quoted string, whose brackets are text
DEEPEST, DIGITS = 32, 100  # nested brackets; characters of a number
_DEPTH_RULE = f"too many brackets: they go at most {DEEPEST} deep. Flatten it."
_SHOWN = 200  # characters of a long string that an error quotes
_BARE = re.compile(r"([=(,]\s*)([A-Za-z][A-Za-z0-9_.-]*)(?=\s*[,)])")  # a value that is a word without quotes
_WORDS = {"None": None, "True": True, "False": False}
_BY_NAME: dict[str, "type[Value]"] = {}

T = TypeVar("T", bound="type[Value]")


class Value:
    """Base class of settings: a recipe, a quantizer, the config of an operation.

    A subclass declares fields with defaults and takes a name by `register`. Its objects are frozen. Two of them are
    equal if they have the same class and the same `key`: a string of the registered name and of the fields that differ
    from their defaults, which `parse` reads back.

    A field may hold a bool, an int, a finite float, a str, None, a Format, another registered value, or a tuple of
    these.

    Args:
        *args: the subclass's fields, in order.
        **settings: the subclass's fields, by name.

    Raises:
        UnsupportedConfig: the class is not registered, or a field has a value that it cannot hold.
        UnknownSetting: there is no field of that name.

    Example:
        >>> @octavo.values.register("doc-cap")
        ... class Cap(octavo.values.Value):
        ...     cap: float = 30.0
        ...     name: str = "tanh"
        >>> Cap(cap=5)
        doc-cap(cap=5.0)
        >>> Cap(5.0) == octavo.values.parse("doc-cap(cap=5.0)")
        True
    """

    registered_name: str = ""
    is_listed: ClassVar[bool] = True  # the error for an unknown name lists this one
    key: str  # the canonical string, made once at construction so that traced code only reads it

    def __new__(cls, *args: object, **settings: object) -> Self:
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
        for field in _fields(self):
            item = getattr(self, field.name)
            if type(item) is int:
                _check_digits(item, f"{type(self).__name__}.{field.name}")
                if type(field.default) is float:
                    object.__setattr__(self, field.name, float(item))
        self.validate()
        key = _format(self)
        _check_depth(key)
        object.__setattr__(self, "key", key)

    def validate(self) -> None:
        """Check the fields. The constructor calls it; a subclass overrides it if its fields have rules.

        Raises:
            UnsupportedConfig: a field has a value without a meaning. The message lists the allowed ones.

        Example:
            >>> @octavo.values.register("doc-window")
            ... class Window(octavo.values.Value):
            ...     steps: int = 16
            ...     def validate(self):
            ...         if self.steps < 1:
            ...             raise octavo.errors.UnsupportedConfig(f"steps is at least 1, got {self.steps}.")
            >>> Window(steps=0)
            Traceback (most recent call last):
            ...
            octavo.errors.UnsupportedConfig: steps is at least 1, got 0.
        """

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.key == other.key  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash(self.key)

    def __str__(self) -> str:
        return self.key

    def __repr__(self) -> str:
        return self.key


@dataclass_transform(frozen_default=True, kw_only_default=False, field_specifiers=(dataclasses.field,))
def register(name: str) -> Callable[[T], T]:
    """Register a subclass of `Value` under a name, and make it a frozen dataclass.

    Recipes, quantizers and configs of operations need a name, because graphs, caches and logs store them as strings. A
    class that has no name of its own cannot be constructed.

    Args:
        name: the name in strings: letters, digits and _ . - after a letter. It must be the class's own: a second class
            cannot take it, unless it is the same class from a module that is loaded again.

    Returns:
        A decorator for the class.

    Raises:
        UnsupportedConfig: the name has other characters, belongs to another class, or stands for a format.

    Example:
        >>> from octavo.quant import Rowwise
        >>> from octavo.recipes import LinearQuant, Recipe, register
        >>> @register("doc-rows")
        ... class Rows(Recipe):
        ...     pow2: bool = True
        ...     def gemms(self):
        ...         q = Rowwise(pow2=self.pow2)
        ...         return LinearQuant.of(x=(q, q), w=(q, q), dy=(q, q))
        >>> octavo.recipe("doc-rows(pow2=False)")
        doc-rows(pow2=False)
    """
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
    """Return the value that a string describes.

    `octavo.recipe` does the same for recipes alone.

    Args:
        text: a registered name, with the fields that differ from their defaults in brackets: `fp8-block` or
            `fp8-block(scale='fp32',grad_format=E5M2)`. Strings take quotes, formats do not.

    Returns:
        The value whose `key` is `text`, up to spaces and the order of fields.

    Raises:
        UnsupportedConfig: the text cannot be read, no class has that name, or a field has a value that it cannot hold.
        UnknownSetting: there is no field of that name.

    Example:
        >>> octavo.values.parse("block-1d(scale='fp32')") == octavo.quant.Block1D(scale="fp32")
        True
        >>> octavo.values.parse("nv(square=True)").block
        (16, 16)
    """
    try:
        return _parse(text)
    except UnsupportedConfig as error:
        right = _with_quotes(text)
        if right is None:
            raise
        raise UnsupportedConfig(f"{error} Text takes quotes: write {excerpt(right)!r}.") from None


def _parse(text: str) -> Any:
    _check_depth(text)
    whole = excerpt(text)
    value, at = _parse_value(text, _skip(text, 0), whole)
    at = _skip(text, at)
    if at < len(text):
        raise UnsupportedConfig(f"Cannot read {whole!r}: {_rest(text, at)} is left over after the first value.")
    return value


def _with_quotes(text: str) -> str | None:
    """Return `text` with quotes around bare words, if that can be parsed; else None."""
    for known in (_BY_NAME, ()):  # first leaves registered names unquoted, then quotes them too

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


def excerpt(text: str) -> str:
    """Return the text as an error quotes it: only the beginning of a long one."""
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def names(kind: type[Value]) -> tuple[str, ...]:
    """Return the registered names of one kind of value, in order of registration.

    Args:
        kind: the base class, such as `octavo.recipes.Recipe` or `octavo.quant.Quantizer`.

    Returns:
        The names of all its registered subclasses, yours included.

    Example:
        >>> octavo.values.names(octavo.recipes.Recipe)[:3]
        ('bf16', 'fp8-block', 'fp8-current')
    """
    return tuple(name for name, cls in _BY_NAME.items() if issubclass(cls, kind))


def _fields(value: Value | type[Value]) -> list[Field[Any]]:
    """Return the fields in the order of the constructor: those that it takes by name alone come last."""
    return sorted(fields(value), key=lambda field: field.kw_only is True)  # type: ignore[arg-type]


def _format(value: Value) -> str:
    changed = []
    for field in _fields(value):
        item = getattr(value, field.name)
        text = _format_item(item, f"{type(value).__name__}.{field.name}")
        if field.default is MISSING or item != field.default or type(item) is not type(field.default):
            changed.append(f"{field.name}={text}")
    return value.registered_name + (f"({','.join(changed)})" if changed else "")


def _format_item(item: object, where: str, depth: int = 2) -> str:
    if isinstance(item, Value):
        return item.key
    if isinstance(item, Format):
        return item.name
    if isinstance(item, tuple):
        if depth > DEEPEST:
            raise UnsupportedConfig(f"{where} nests {_DEPTH_RULE}")
        return "(" + "".join(_format_item(i, where, depth + 1) + "," for i in item) + ")"
    if type(item) is int:
        _check_digits(item, where)
    if item is None or type(item) in (bool, int, str) or (type(item) is float and math.isfinite(item)):
        return repr(item)
    raise UnsupportedConfig(
        f"{where} is {item!r}; a setting may hold a bool, int, finite float, str, None, a Format, another registered "
        "value, or a tuple of these, because it must print and parse back to an equal value."
    )


def written(item: object, where: str) -> str:
    """Return a value of a setting as canonical strings have it, which `parse` reads back; `where` names it in errors.
    Raise UnsupportedConfig if a setting cannot hold it."""
    return _format_item(item, where)


def _check_digits(number: int, where: str) -> None:
    """Raise for an int that is too long to print; Python itself raises beyond some thousand digits."""
    if not -(10 ** (DIGITS - 1)) < number < 10**DIGITS:
        raise UnsupportedConfig(
            f"{where} is an int of at most {DIGITS} characters, got a longer one. Use a smaller one."
        )


def _check_depth(text: str) -> None:
    """Raise for deep nesting before a recursive parser reads it."""
    if text.count("(") <= DEEPEST:
        return
    depth = 0
    for bracket in _BRACKET.finditer(text):
        depth += {"(": 1, ")": -1}.get(bracket.group(), 0)
        if depth > DEEPEST:
            raise UnsupportedConfig(f"{excerpt(text)!r} nests {_DEPTH_RULE}")


def _skip(text: str, at: int) -> int:
    """Return the position of the next character that is not a space."""
    space = _SPACE.match(text, at)
    assert space is not None
    return space.end()


def _rest(text: str, at: int) -> str:
    return repr(excerpt(text[at : at + _SHOWN + 1]))


def _parse_value(text: str, at: int, whole: str) -> tuple[Any, int]:
    """Return the value that begins at a position of `text`, and the position after it. Errors quote `whole`."""
    if text.startswith("(", at):
        return _parse_tuple(text, at + 1, whole)
    if literal := _LITERAL.match(text, at):
        return _parse_literal(literal.group(), whole), literal.end()
    name = _NAME.match(text, at)
    if name is None:
        raise UnsupportedConfig(f"Cannot read {whole!r}: expected a value at {_rest(text, at)}.")
    word, at = name.group(), name.end()
    if word in _WORDS:
        return _WORDS[word], at
    if word in FORMATS:
        return FORMATS[word], at
    return _parse_fields(word, text, at, whole)


def _parse_literal(literal: str, whole: str) -> Any:
    if literal[0] not in "'\"" and len(literal) > DIGITS:
        raise UnsupportedConfig(
            f"Cannot read {whole!r}: a number has at most {DIGITS} characters, got {len(literal)}. Write a shorter one."
        )
    try:
        return ast.literal_eval(literal)
    except (SyntaxError, ValueError):
        raise UnsupportedConfig(f"Cannot read {whole!r}: {excerpt(literal)} is no number or string.") from None


def _parse_tuple(text: str, at: int, whole: str) -> tuple[tuple[Any, ...], int]:
    items = []
    at = _skip(text, at)
    while not text.startswith(")", at):
        item, at = _parse_value(text, at, whole)
        items.append(item)
        at = _after_item(text, at, whole)
    return tuple(items), at + 1


def _after_item(text: str, at: int, whole: str) -> int:
    """Return the position after an item of a list: past the comma, or at the bracket that closes it."""
    at = _skip(text, at)
    if not text.startswith((",", ")"), at):
        raise UnsupportedConfig(f"Cannot read {whole!r}: expected , or ) at {_rest(text, at)}.")
    return _skip(text, at + 1) if text.startswith(",", at) else at


def _parse_fields(word: str, text: str, at: int, whole: str) -> tuple[Value, int]:
    cls = _BY_NAME.get(word)
    if cls is None:
        known = ", ".join(name for name, kind in _BY_NAME.items() if kind.is_listed)
        meant = format_named(word)
        hint = "" if meant is None else f" Did you mean {meant}?"
        raise UnsupportedConfig(
            f"Cannot read {whole!r}: no value is registered as {excerpt(word)!r}. Registered: {known}.{hint}"
        )
    settings: dict[str, Any] = {}
    if text.startswith("(", at):
        at = _skip(text, at + 1)
        while not text.startswith(")", at):
            field = _FIELD.match(text, at)
            if field is None:
                raise UnsupportedConfig(f"Cannot read {whole!r}: expected field=value at {_rest(text, at)}.")
            if field.group(1) in settings:
                raise UnsupportedConfig(f"Cannot read {whole!r}: {excerpt(field.group(1))!r} is given twice.")
            settings[field.group(1)], at = _parse_value(text, field.end(), whole)
            at = _after_item(text, at, whole)
        at += 1
    try:
        return cls(**settings), at
    except UnknownSetting:
        raise
    except TypeError as error:  # a required field is missing, or one has a type that cannot be compared
        allowed = ", ".join(f.name for f in _fields(cls)) or "none"
        raise UnsupportedConfig(f"Cannot read {whole!r}: {excerpt(str(error))}. Fields of {word}: {allowed}.") from None


def _refuse_setting(cls: type[Value], setting: str) -> NoReturn:
    name, known = cls.registered_name, [f.name for f in _fields(cls)]
    near = f" {OF_RECIPES[setting]}" if setting in OF_RECIPES else nearest(setting, known)
    fields_known = ", ".join(known) or "none"
    raise UnknownSetting(f"{name} has no setting {excerpt(setting)!r}.{near} Fields of {name}: {fields_known}.")
