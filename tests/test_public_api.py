"""Every public name is documented: a docstring, its arguments, its result and its errors. Every public class and
function has one example that runs; what belongs to it refers to that example.

`public()` finds the names: the classes and functions in the `__all__` of `MODULES`, the methods of these classes, and
the classes that public functions return. One case checks one name. These are the only exceptions:

- A method of the contract of operations, which Octavo calls and the author of an operation may define, needs no more
  than a docstring, and a line of docs/operation-reference.md or docs/fused-operation-reference.md. Its name starts
  with a prefix of `CONTRACT`.
- A method without a docstring that overrides another one has that one's documentation. So has a method that overrides
  one of torch's (`append`, `extra_repr`); `forward` needs its own.
- A method needs no example of its own if its class has one, or a public class that inherits it.
- A class that takes the arguments of its parent, such as `GELU`, has the parent's example. The Args of a class may
  leave out an argument that the docstring of a parent describes.
- The Example of a function may name another public name, whose example shows both: "See `octavo.ops.Rule`."
- A class that users only receive from a function needs no example, and a property no more than a docstring.
"""

import dataclasses
import doctest
import functools
import importlib
import inspect
import pkgutil
import pydoc
import re
import sys
import types
import typing
from pathlib import Path

import pytest
import torch
from torch import nn

import octavo

MODULES = (
    "octavo", "octavo.backend", "octavo.errors", "octavo.formats", "octavo.moe", "octavo.ops", "octavo.quant",
    "octavo.recipes",
)  # fmt: skip
CONTRACT = ("op_", "fuser_", "step_", "why_not_")
PROPERTIES = property | functools.cached_property
SECTIONS = ("Args", "Attributes", "Returns", "Yields", "Raises", "Example", "Examples")


# -- the public names --------------------------------------------------------------------------------------------------


class Name(typing.NamedTuple):
    """A public class, function, method or property."""

    path: str
    thing: typing.Any  # the class, function or property
    owner: type | None = None  # the class of a method
    received: bool = False  # a class that users receive from a function and do not construct


def is_ours(thing):
    return getattr(thing, "__module__", "").split(".")[0] == "octavo"


def members(cls):
    """The public methods and properties of a class and of its parents in Octavo, each once, by their owner."""
    for owner in cls.__mro__:
        for name, member in vars(owner).items() if is_ours(owner) else ():
            member = member.__func__ if isinstance(member, classmethod | staticmethod) else member
            if isinstance(member, PROPERTIES | types.FunctionType) and not name.startswith("_"):
                yield Name(f"{owner.__module__}.{owner.__qualname__}.{name}", member, owner)


def exported():
    """The classes and functions that the public modules export, under their first public path."""
    found = {}
    for module in MODULES:
        for name in getattr(importlib.import_module(module), "__all__", ()):
            thing = getattr(sys.modules[module], name)
            if inspect.isclass(thing) or inspect.isfunction(thing):
                found.setdefault(id(thing), Name(f"{module}.{name}", thing))
    return list(found.values())


def named_classes(annotation, module):
    """Octavo's classes in an annotation, a string's too."""
    if isinstance(annotation, str):
        try:
            annotation = eval(annotation, dict(vars(sys.modules[module])))
        except NameError:  # imported only for type checkers
            return
    for part in (annotation, *typing.get_args(annotation)):
        if inspect.isclass(part) and is_ours(part) and not isinstance(part, types.GenericAlias):
            yield part
        elif part is not annotation:
            yield from named_classes(part, module)


def results(names):
    """Octavo's classes in the results of these functions and methods."""
    for name in names:
        if inspect.isfunction(name.thing) and not is_contract(name):
            yield from named_classes(name.thing.__annotations__.get("return"), name.thing.__module__)


def fields(cls):
    """Octavo's classes in the fields of a class."""
    for owner in filter(is_ours, cls.__mro__ if is_value(cls) else ()):
        for annotation in vars(owner).get("__annotations__", {}).values():
            yield from named_classes(annotation, owner.__module__)


def received(names):
    """Classes that users receive: as a result of these functions, in a field of another one, or from its methods."""
    found, queue = {}, list(results(names))
    while queue:
        cls = queue.pop()
        if cls not in found and not cls.__name__.startswith("_"):
            found[cls] = Name(f"{cls.__module__}.{cls.__qualname__}", cls, received=True)
            queue += [*fields(cls), *results(members(cls))]
    return list(found.values())


def is_value(cls):
    """Whether a class's constructor takes its fields."""
    return dataclasses.is_dataclass(cls) or hasattr(cls, "_fields")


def public():
    names = exported()
    names += [member for name in names if inspect.isclass(name.thing) for member in members(name.thing)]
    names += received(names)
    names += [member for name in names if name.received for member in members(name.thing)]
    known = {}
    for name in names:
        known.setdefault(id(name.thing), name)
    return [name for name in known.values() if not has_documentation_of_another(name)]


# -- the exceptions ----------------------------------------------------------------------------------------------------


def last(name):
    return name.path.rpartition(".")[2]


def documentation(name):
    """The docstring, or that of the method that it overrides."""
    return inspect.getdoc(name.thing if name.owner is None else getattr(name.owner, last(name))) or ""


def is_contract(name):
    return name.owner is not None and last(name).startswith(CONTRACT)


def has_documentation_of_another(name):
    """Whether a method overrides one that is documented: another name of this list, or one of torch's."""
    parents = [parent for parent in getattr(name.owner, "__mro__", ())[1:] if last(name) in vars(parent)]
    if last(name) != "forward" and any(parent.__module__.startswith("torch.") for parent in parents):
        return True
    return not name.thing.__doc__ and any(is_ours(parent) for parent in parents)


# -- the parts of a docstring ------------------------------------------------------------------------------------------


def sections(doc):
    """The text of each section by its title; that before the first one is ""."""
    found = {"": ""}
    title = ""
    for line in doc.splitlines():
        if line.endswith(":") and line[:-1] in SECTIONS:
            title = line[:-1]
            found[title] = ""
        elif title and line and not line.startswith(" "):
            title = ""
        else:
            found[title] += line + "\n"
    return found


def entries(text):
    """The names that entries of a section begin with: one name, a colon, the description."""
    return [match.lstrip("*") for match in re.findall(r"^    (\*{0,2}\w+)(?: \(.*\))?:", text, re.MULTILINE)]


def constructor(cls):
    """The function of Octavo's that takes the arguments of a class; None if another library defines it, and for a
    protocol, which is not constructed."""
    if getattr(cls, "_is_protocol", False):
        return None
    for owner in cls.__mro__:
        for name in ("__init__", "__new__"):
            if name in vars(owner):
                return vars(owner)[name] if is_ours(owner) else None
    return None


def parameters(thing):
    function = constructor(thing) if inspect.isclass(thing) else thing
    if function is None:
        return []
    names = [name for name in inspect.signature(function).parameters if not is_inherited(thing, name)]
    first = names[:1] if names[:1] in (["self"], ["cls"], ["_cls"]) else []
    return [name for name in names if name not in first and not name.startswith("_")]


def is_inherited(thing, name):
    """Whether a setting is a field of a class above, whose documentation describes it."""
    parents = thing.__mro__[1:] if inspect.isclass(thing) else ()
    return any(name in getattr(parent, "__dataclass_fields__", ()) for parent in parents)


def raises(thing):
    function = constructor(thing) if inspect.isclass(thing) else thing
    try:
        return function is not None and re.search(r"^\s+raise \w", inspect.getsource(function), re.MULTILINE)
    except OSError:  # a constructor that dataclass wrote
        return False


def complaints(name):
    """What the docstring of a name lacks, a sentence each."""
    if isinstance(name.thing, PROPERTIES) or is_contract(name):
        return [] if documentation(name) else ["It has no docstring."]
    doc = (name.thing.__doc__ or "") and documentation(name)
    if not doc or doc.startswith(f"{name.thing.__name__}("):  # a dataclass without one has its signature
        return ["It has no docstring."]
    found, wrong = sections(doc), []
    asked, documented = parameters(name.thing), entries(found.get("Args", ""))
    if is_value(name.thing):
        documented += entries(found.get("Attributes", ""))
    of_parents = [each for parent in parents_of(name.thing) for each in entries(sections(parent).get("Args", ""))]
    wrong += [f"Args lacks {each}." for each in asked if each not in (*documented, *of_parents)]
    wrong += [f"Args has {each}, which the signature has not." for each in documented if each not in asked]
    result = None if inspect.isclass(name.thing) else name.thing.__annotations__.get("return")
    if result not in (None, "None") and not {"Returns", "Yields"} & set(found):
        wrong.append(f"It returns {result}, and has no Returns.")
    if raises(name.thing) and "Raises" not in found:
        wrong.append("It raises, and has no Raises.")
    if not (name.received or name.owner in RECEIVED or has_example(name)):
        wrong.append("It has no Example.")
    return wrong


def parents_of(thing):
    """The docstrings of a class's parents in Octavo."""
    return [inspect.cleandoc(parent.__doc__ or "") for parent in getattr(thing, "__mro__", ())[1:] if is_ours(parent)]


def example(thing):
    """The text of the Example of a class or function, if it has code to run."""
    doc = inspect.cleandoc(thing.__doc__ or "")
    return "".join(text for title, text in sections(doc).items() if title.startswith("Example") and ">>>" in text)


def has_example(name):
    if name.owner is not None:
        heirs = [each.thing for each in PUBLIC if name.owner in getattr(each.thing, "__mro__", ())]
        return any(map(example, (name.thing, name.owner, *heirs)))
    if inspect.isclass(name.thing):
        takes = constructor(name.thing)
        return any(map(example, [cls for cls in name.thing.__mro__ if is_ours(cls) and constructor(cls) is takes]))
    named = re.search(r"^    See `(\S+)`\.$", sections(documentation(name)).get("Example", ""), re.MULTILINE)
    return bool(example(name.thing) or (named and example(pkgutil.resolve_name(named[1]))))


PUBLIC = public()
RECEIVED = {name.thing for name in PUBLIC if name.received}


# -- tests -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLIC, ids=lambda name: name.path)
def test_a_public_name_is_documented(name):
    assert complaints(name) == []


@pytest.mark.parametrize("name", sorted({last(name) for name in PUBLIC if is_contract(name)}))
def test_a_method_of_the_contract_of_operations_is_on_its_page(name):
    docs = Path(octavo.__file__).parents[1] / "docs"
    pages = ("operation-reference.md", "fused-operation-reference.md")
    assert any(f"`{name}(" in (docs / page).read_text() for page in pages)


def examples():
    """The examples in the docstrings of public names, methods that need none included."""
    globs = {"octavo": octavo, "torch": torch, "nn": nn}
    finder = doctest.DocTestFinder(recurse=False)
    found = {name.path: finder.find(name.thing, name.path, globs=globs) for name in PUBLIC}
    return [test for tests in found.values() for test in tests if test.examples]


@pytest.mark.parametrize("test", examples(), ids=lambda test: test.name)
def test_an_example_runs(test, recwarn):
    failed, tried = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test)
    assert tried and not failed


@pytest.mark.parametrize("module", MODULES)
def test_a_public_module_lists_its_names(module):
    module = importlib.import_module(module)
    assert module.__doc__
    assert all(hasattr(module, name) for name in module.__all__)


@pytest.mark.parametrize("module", ["octavo", "octavo.backend", "octavo.errors"])
def test_dir_shows_the_public_names(module):
    module = importlib.import_module(module)
    assert dir(module) == sorted(module.__all__)


@pytest.mark.parametrize("name", PUBLIC, ids=lambda name: name.path)
def test_a_signature_has_types(name):
    """A user who hovers over a public name sees types: none of its parameters is a bare Any, nor is its result."""
    function = constructor(name.thing) if inspect.isclass(name.thing) else name.thing
    if not inspect.isfunction(function) or is_contract(name):
        return
    bare = [each for each, kind in function.__annotations__.items() if kind in (typing.Any, "Any")]
    assert [each for each in bare if not each.startswith("_")] == []


def test_help_of_a_layer_begins_with_what_users_need():
    """help() prints the signature, then the docstring: the purpose, the arguments, an example."""
    lines = pydoc.plain(pydoc.render_doc(octavo.Linear)).splitlines()
    begin = next(i for i, line in enumerate(lines) if "in_features: int" in line)  # from Python 3.13 on a line each
    text = "\n".join(lines[begin : begin + 80])
    assert text.index("A linear layer") < text.index("Args:") < text.index("Example:") < text.index("Method resolution")


def test_the_rule_sees_what_is_missing():
    def undocumented(x: int) -> int: ...

    def documented(x: int) -> int:
        """Returns x.

        Args:
            y: nothing.
        """
        raise ValueError

    assert complaints(Name("undocumented", undocumented)) == ["It has no docstring."]
    assert complaints(Name("documented", documented)) == [
        "Args lacks x.",
        "Args has y, which the signature has not.",
        "It returns <class 'int'>, and has no Returns.",
        "It raises, and has no Raises.",
        "It has no Example.",
    ]


PATHS = Path(__file__).with_name("public_paths.txt").read_text().split()  # as of the last move of files


@pytest.mark.parametrize("path", PATHS)
def test_a_public_path_is_found_wherever_its_file_lies(path):
    found = pkgutil.resolve_name(path)
    assert inspect.ismodule(found) or found is not None
