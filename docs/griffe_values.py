"""An extension of griffe, which reads the package for the API reference without importing it.

A class under `@values.register(name)` is a frozen dataclass: its fields are the parameters of its constructor. The
section `Example:` of a docstring is what griffe calls `Examples:`.
"""

import re

import griffe


class Extension(griffe.Extension):
    def on_object(self, *, obj, **_):
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)

    def on_package(self, *, pkg, **_):
        for cls in _classes(pkg):
            if _registered(cls) and "__init__" not in cls.members:
                self_ = griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword)
                init = griffe.Function("__init__", parameters=griffe.Parameters(self_, *_fields(cls)))
                init.lineno, init.endlineno = cls.lineno, cls.endlineno
                cls.set_member("__init__", init)


def _classes(scope):
    for member in scope.members.values():
        if not member.is_alias and (member.is_module or member.is_class):
            if member.is_class:
                yield member
            yield from _classes(member)


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
    return fields.values()
