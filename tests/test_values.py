"""Strings of settings that no one would write: refused in a sentence, in linear work, whatever they hold."""

import string
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import octavo
from octavo import recipes, values
from octavo.errors import Unsupported, UnsupportedConfig

MANY = 10**6


@values.register("tests-holder")
class Holder(values.Value):
    item: object = None
    ratio: float = 0.5


@values.register("tests-holding-recipe")
class HoldingRecipe(recipes.Recipe):
    item: object = None

    def gemms(self):
        return recipes.Block().gemms()


HOSTILE = {
    "parentheses": "(" * MANY,
    "parentheses after a name": "fp8-block" + "(" * MANY,
    "closing parentheses": "fp8-block" + ")" * MANY,
    "a deep tuple": "fp8-current(fast=" + "(" * MANY + ")" * MANY + ")",
    "a tuple somewhat deep": "fp8-current(fast=" + "(" * 500 + ")" * 500 + ")",
    "values in values": "fp8-block(scale=" * 200 + "1" + ")" * 200,
    "settings": "fp8-block(" + ",".join(f"a{i}=1" for i in range(MANY)) + ")",
    "one setting again and again": "fp8-block(" + "scale='fp32'," * MANY + ")",
    "a hundred settings": "fp8-block(" + ",".join(f"a{i}=1" for i in range(100)) + ")",
    "a long integer": "fp8-delayed(history=" + "9" * 10**5 + ")",
    "an integer of 4000 digits": "fp8-delayed(history=" + "9" * 4000 + ")",
    "an integer of 400 digits": "fp8-current(eps=" + "9" * 400 + ")",
    "a float beyond float64": "fp8-current(eps=1e999)",
    "a long exponent": "fp8-current(eps=1e" + "9" * 3000 + ")",
    "a long string": "fp8-block(scale='" + "x" * MANY + "')",
    "an open quote": "fp8-block(scale='fp32)",
    "an open quote, escapes": "fp8-block(scale='" + "\\'" * 2000,
    "an open double quote": 'fp8-block(scale="fp32)',
    "a backslash at the end": "fp8-block(scale='\\",
    "NUL": "fp8-block(scale='\0')",
    "NUL in a name": "fp8-block\0",
    "a lone surrogate": "fp8-block(scale='\ud800')",
    "digits that are not ASCII": "fp8-delayed(history=١٢)",
    "a name that is not ASCII": "fp８-block",
    "a field that is not ASCII": "fp8-block(größe=1)",
    "junk at the end": "fp8-block(scale='fp32') and more",
    "junk at the end, long": "fp8-block" + " x" * 1000,
    "a second value": "fp8-block()fp8-block()",
    "a setting twice": "fp8-block(scale='fp32',scale='fp32')",
    "a long field": "fp8-block(" + "a" * 3000 + "=1)",
    "a long field twice": "fp8-block(" + ("a" * 1900 + "=1,") * 2 + ")",
    "a long name": "fp8-block(scale=" + "a" * 3000 + ")",
    "a comma alone": "fp8-block(,)",
    "spaces alone": " " * MANY,
    "nothing": "",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_recipe_is_refused_in_a_short_sentence(text):
    with pytest.raises(UnsupportedConfig) as unsupported_reason:
        octavo.recipe(text)
    # it lists the names that are known, to which other tests add theirs
    assert len(str(unsupported_reason.value)) < 2000
    assert str(unsupported_reason.value).endswith((".", ")", "?"))


@pytest.mark.parametrize("text", [t for t in HOSTILE.values() if len(t) < 10**5], ids=lambda t: t[:30])
def test_so_is_the_same_by_the_parser_alone(text):
    with pytest.raises(UnsupportedConfig):
        values.parse(text)


def test_a_deep_string_is_refused_by_the_parser_alone():
    """Strings of layers' own settings have no limit of length, and the same limit of depth."""
    for text in ("(" * MANY, "(" * MANY + ")" * MANY, "tests-holder(item=" * 10**4):
        with pytest.raises(UnsupportedConfig, match=rf"at most {values.DEEPEST} deep.*Flatten"):
            values.parse(text)


def test_the_limits_are_stated_with_the_value_and_a_way_out():
    long = "fp8-block(scale='" + "x" * recipes.LONGEST + "')"
    with pytest.raises(UnsupportedConfig, match=rf"at most {recipes.LONGEST} characters, got {len(long)}: .*Leave out"):
        octavo.recipe(long)
    with pytest.raises(UnsupportedConfig, match=rf"number has at most {values.DIGITS} characters, got 400.*[Ww]rite"):
        octavo.recipe("fp8-delayed(history=" + "9" * 400 + ")")


# -- just inside, just outside ------------------------------------------------------------------------------------


def nest(depth, item=()):
    """Tuples, `depth` of them around one another."""
    for _ in range(depth - 1):
        item = (item,)
    return item


def test_the_deepest_setting_that_can_be_made_is_the_deepest_that_can_be_read():
    holder = Holder(item=nest(values.DEEPEST - 1))
    assert values.parse(holder.key) == holder
    with pytest.raises(UnsupportedConfig, match=rf"at most {values.DEEPEST} deep"):
        Holder(item=nest(values.DEEPEST))
    with pytest.raises(UnsupportedConfig, match=rf"at most {values.DEEPEST} deep"):
        Holder(item=nest(10**4))


def test_values_in_values_are_counted_alike():
    holder = Holder()
    for _ in range(values.DEEPEST):
        holder = Holder(item=holder)
        assert values.parse(holder.key) == holder
    with pytest.raises(UnsupportedConfig, match=rf"at most {values.DEEPEST} deep"):
        Holder(item=holder)


def test_parentheses_in_strings_and_beside_one_another_are_not_depth():
    holder = Holder(item=("(" * 500, "\\'" * 50, '"(' * 90, *[()] * 500))
    assert values.parse(holder.key) == holder


def test_the_longest_recipe_that_can_be_made_is_the_longest_that_can_be_read():
    room = recipes.LONGEST - len(HoldingRecipe(item="").key)
    longest = HoldingRecipe(item="x" * room)
    assert len(longest.key) == recipes.LONGEST
    assert octavo.recipe(longest.key) == longest
    with pytest.raises(UnsupportedConfig, match=f"at most {recipes.LONGEST} characters"):
        HoldingRecipe(item="x" * (room + 1))


def test_the_longest_number_that_can_be_made_is_the_longest_that_can_be_read():
    for number in (10**values.DIGITS - 1, 1 - 10 ** (values.DIGITS - 1)):
        assert values.parse(Holder(item=number).key).item == number
    for number in (10**values.DIGITS, -(10**values.DIGITS), 10**5000):
        with pytest.raises(UnsupportedConfig, match=f"at most {values.DIGITS} "):
            Holder(item=number)
        with pytest.raises(UnsupportedConfig, match=f"at most {values.DIGITS} "):
            Holder(item=((number,),))
        with pytest.raises(UnsupportedConfig, match=f"at most {values.DIGITS} "):
            recipes.Delayed(history=number)


def test_an_integer_beyond_float64_is_no_float():
    for make in (lambda n: Holder(ratio=n), lambda n: values.parse(f"tests-holder(ratio={n})")):
        with pytest.raises(UnsupportedConfig):
            make(10**400)


# -- work ---------------------------------------------------------------------------------------------------------


class Counted(str):
    """A string that counts the characters of every copy of a part of it."""

    __slots__ = ("copied",)

    def __new__(cls, text, copied=None):
        made = super().__new__(cls, text)
        made.copied = [0] if copied is None else copied
        return made

    def _part(self, part):
        self.copied[0] += len(part)
        return Counted(part, self.copied)

    def __getitem__(self, where):
        return self._part(super().__getitem__(where))

    def strip(self, *args):
        return self._part(super().strip(*args))

    def lstrip(self, *args):
        return self._part(super().lstrip(*args))

    def removeprefix(self, prefix):
        return self._part(super().removeprefix(prefix))

    def split(self, *args):
        return [self._part(part) for part in super().split(*args)]


SHAPES = {
    "a tuple": lambda n: "(" + "1," * n + ")",
    "tuples": lambda n: "(" + "(1,)," * n + ")",
    "values": lambda n: "(" + "mx(square=True)," * n + ")",
    "strings": lambda n: "(" + "'(\\'(', " * n + ")",
    "one string": lambda n: "'" + "\\'" * n + "'",
    "spaces": lambda n: "(" + " " * n + "1 , 2" + " " * n + ")",
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_parsing_copies_no_more_than_it_reads(shape):
    for n in (100, 1000):
        text = Counted(shape(n))
        values.parse(text)
        assert text.copied[0] <= 2 * len(text)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_calls_grow_with_the_length(shape):
    """Ten times the text, ten times the calls: with a square it would be a hundred."""
    few, many = (calls_of(lambda n=n: values.parse(shape(n))) for n in (200, 2000))
    assert many < 15 * few


def calls_of(function):
    counted = [0]

    def count(frame, event, arg):
        counted[0] += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return counted[0]


# -- any text -----------------------------------------------------------------------------------------------------

PIECES = [
    *recipes.SHIPPED, *values.names(values.Value), "(", ")", ",", "=", "'", '"', "\\", " ", "\n", "\0", "-", "+", "1",
    "0", ".", "e", "9" * 120, "None", "True", "E4M3", "E5M2", "'bf16'", "'fp32'", "'fprop'", "scale", "fast", "history",
    "margin", "eps", "wgrad", "backward", "stochastic", "é", "🙂", "١", "\ud800",
]  # fmt: skip
pieces = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)
named = st.tuples(st.sampled_from(recipes.SHIPPED), st.sampled_from(["", "("]), pieces | st.text()).map("".join)
fields = st.sampled_from(["scale", "fast", "history", "margin", "eps", "pow2", "grad_format", "wgrad", "rounding"])
items = st.sampled_from(["1", "-1", "1e9", "9" * 60, "1e400", "None", "True", "E2M1", "E5M2", "'bf16'", "'x'", "()",
                         "('fprop',)", "((),)", "mx", "nv(rht=True)", "fp8-block"])  # fmt: skip
formed = st.builds(
    lambda name, pairs: f"{name}({','.join(f'{field}={item}' for field, item in pairs)})",
    st.sampled_from(recipes.SHIPPED),
    st.lists(st.tuples(fields, items), max_size=3),
)


@settings(max_examples=200, database=None)
@given(st.text() | st.text(alphabet=string.printable) | pieces | named | formed)
def test_any_text_is_a_recipe_or_refused(text):
    try:
        found = octavo.recipe(text)
    except Unsupported:
        return
    assert isinstance(found, recipes.Recipe)
    assert octavo.recipe(found.key) == found


@settings(max_examples=200, database=None)
@given(st.text() | pieces | formed)
def test_any_text_is_a_value_or_refused(text):
    try:
        found = values.parse(text)
    except Unsupported:
        return
    if isinstance(found, values.Value):
        assert values.parse(found.key) == found
