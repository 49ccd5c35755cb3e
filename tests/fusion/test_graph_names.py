"""The name of a user's class in graphs holds a digest of the class's text and of its parents', so that a compiler's
disk cache never runs an edited class with its old functions."""

import importlib
import sys

import pytest

BASE = """
from octavo import ops


class Base(ops.BasicOperation):
    @staticmethod
    def op_forward_compute(config, inputs):
        return 2 * inputs.x, ()

    @staticmethod
    def op_forward_save_ctx(config, inputs, y, fresh):
        return ()

    @staticmethod
    def op_backward(config, saved, dy, wants):
        return (2 * dy,)


class FusedBase(ops.FusedOperation):
    @staticmethod
    def fuser_backward(configs, saved, grads, wants):
        return (4 * grads[0],), (None,)
"""
CHILD = """
from graph_names_base import Base, FusedBase


def helper(x):
    return x


class Child(Base):
    pass


class FusedChild(FusedBase):
    pass
"""


@pytest.fixture
def names(tmp_path, monkeypatch):
    """A function that writes the two modules, loads them anew, and returns the names of the children in graphs."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def load(base=BASE, child=CHILD):
        for name, text in (("graph_names_base", base), ("graph_names_child", child)):
            (tmp_path / f"{name}.py").write_text(text)
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        module = importlib.import_module("graph_names_child")
        # a class that is defined again gets a number at the end; the digest is before it
        return [".".join(cls.op_name.split(".")[:4]) for cls in (module.Child, module.FusedChild)]

    yield load
    for name in ("graph_names_base", "graph_names_child"):
        sys.modules.pop(name, None)


def test_the_digest_is_the_same_for_the_same_text(names):
    assert names() == names()


def test_an_edit_of_a_class_changes_its_digest(names):
    before, after = names(), names(child=CHILD.replace("pass", "title = 'edited'"))
    assert all(a != b for a, b in zip(before, after, strict=True))


def test_an_edit_of_a_parent_changes_the_digest(names):
    before, after = names(), names(base=BASE.replace("4 *", "5 *").replace("(2 * dy,)", "(3 * dy,)"))
    assert all(a != b for a, b in zip(before, after, strict=True))


def test_an_edit_of_a_function_that_a_class_calls_does_not(names):
    assert names() == names(child=CHILD.replace("return x", "return 2 * x"))
