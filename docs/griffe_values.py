"""An extension of griffe, which reads the package for the API reference without importing it.

A class under `@values.register(name)` is a frozen dataclass, and so is a NamedTuple: its fields are the parameters of
its constructor. The section `Example:` of a docstring is what griffe calls `Examples:`. `octavo.recipe` is a function
of the package `octavo.recipes`, where griffe finds only the file of that name. Names that a package resolves when they
are asked for, by its `__getattr__`, are aliases. Docstrings of commands are the texts of `--help`, laid out for a
terminal.
"""

import ast
import re
import textwrap

import griffe


class Extension(griffe.Extension):
    def on_instance(self, *, obj, **_):
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
            if obj.is_module and obj.path.startswith("octavo.cli."):
                obj.docstring.value = "\n\n".join(map(_help, obj.docstring.value.split("\n\n")))

    def on_function_instance(self, *, func, **_):
        if func.path == "octavo.recipes.recipe":
            self.recipe = func

    def on_package(self, *, pkg, **_):
        pkg.set_member("recipe", self.recipe)
        _alias(pkg["quant"], "DelayedState", "octavo.scaling.delayed_state")
        for name, file in ast.literal_eval(str(pkg["ops._FROM_FUSION"].value)).items():
            _alias(pkg["ops"], name, f"octavo.fusion.{file}")
        for cls in _classes(pkg):
            parameters = _parameters(cls)
            if parameters is not None and "__init__" not in cls.members:
                own = griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword)
                init = griffe.Function("__init__", parameters=griffe.Parameters(own, *parameters))
                init.lineno, init.endlineno = cls.lineno, cls.endlineno
                cls.set_member("__init__", init)


def _alias(package, name, module):
    package.set_member(name, griffe.Alias(name, f"{module}.{name}", parent=package))


def _help(part):
    """Returns a part of a help text as Markdown: columns and examples become blocks of text."""
    if part.startswith("example: "):
        return f"```bash\n{part.removeprefix('example: ')}\n```"
    return f"```text\n{textwrap.dedent(part)}\n```" if "   " in part else part


def _classes(scope):
    for member in scope.members.values():
        if not member.is_alias and (member.is_module or member.is_class):
            if member.is_class:
                yield member
            yield from _classes(member)


def _parameters(cls):
    """Returns the parameters of a constructor that the class does not spell out; None for any other class."""
    if _registered(cls) or any(str(base) == "NamedTuple" for base in cls.bases):
        return _fields(cls)
    for owner in (cls, *cls.mro()):
        if owner.path == "octavo.values.Value":  # a base class, whose constructor takes the fields of its subclasses
            return list(owner.members["__new__"].parameters)[1:]
    return None


def _registered(cls):
    return any(str(decorator.value).startswith(("register(", "values.register(")) for decorator in cls.decorators)


def _fields(cls):
    """Parameters for the annotated attributes of a class and of its registered parents, class variables left out."""
    fields = {}
    for owner in (*reversed([base for base in cls.mro() if _registered(base)]), cls):
        for name, member in owner.members.items():
            if member.is_attribute and member.annotation is not None and "ClassVar" not in str(member.annotation):
                kind = griffe.ParameterKind.positional_or_keyword
                fields[name] = griffe.Parameter(name, annotation=member.annotation, kind=kind, default=member.value)
    return list(fields.values())
