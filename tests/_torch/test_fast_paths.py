"""Fast paths: each proves itself once in a process, and is off with a reason where it does not."""

import json
import logging

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import octavo
from octavo._torch import inductor, tensors
from octavo._torch.fast_paths import FAST_PATHS, FastPath, Undecided, off
from octavo._torch.tensors import GUARDS, WITHOUT_DISPATCHER
from octavo.cli import doctor, main
from octavo.launch import DIRECT_LAUNCHES
from octavo.runtime import call_cache as calls


@pytest.fixture
def made(monkeypatch):
    """Makes fast paths that no other test sees."""
    monkeypatch.setattr("octavo._torch.fast_paths.FAST_PATHS", [])

    def make(check, **settings):
        return FastPath("a path", "It is slower.", check, lambda: "3.9.1", **settings)

    return make


def test_a_path_that_gives_the_same_is_on_and_checked_once(made):
    runs = []
    path = made(lambda: runs.append(1) or "")
    assert path.is_on() and path.is_on() and path.reason() == "" and runs == [1]


def test_a_path_that_differs_is_off_and_says_so_once(made, caplog):
    path = made(lambda: "it gives 2 in place of 1")
    with caplog.at_level(logging.WARNING, "octavo"):
        assert not path.is_on() and not path.is_on()
    assert path.reason() == "it gives 2 in place of 1"
    assert [r.getMessage() for r in caplog.records] == ["a path: off, because it gives 2 in place of 1. It is slower."]


@pytest.mark.parametrize(
    "error", [AttributeError("no _x"), TypeError("takes 3"), RuntimeError("lowering"), ImportError()]
)
def test_a_check_that_raises_turns_its_path_off(made, error):
    def check():
        raise error

    path = made(check)
    assert not path.is_on()
    assert type(error).__name__ in path.reason() and str(error) in path.reason()


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), MemoryError()])
def test_memory_that_is_used_up_is_no_verdict(made, error):
    """Nor does it end the call, which the plain way serves."""
    answers = [error, ""]

    def check():
        answer = answers.pop(0)
        if answer:
            raise answer
        return ""

    path = made(check)
    assert not path.is_on() and not path.is_decided()
    assert path.is_on()


def test_a_check_that_is_interrupted_is_no_verdict(made):
    def check():
        raise KeyboardInterrupt

    path = made(check)
    with pytest.raises(KeyboardInterrupt):
        path.is_on()
    assert not path.is_decided()


def test_a_check_that_comes_to_its_own_path_takes_the_plain_way(made):
    asked = []
    path = made(lambda: asked.append(path.is_on()) or "")
    assert path.is_on() and asked == [False]


def test_a_check_that_cannot_run_now_runs_later(made):
    answers = [Undecided(), Undecided(), ""]

    def check():
        answer = answers.pop(0)
        if answer:
            raise answer
        return ""

    path = made(check)
    assert [path.is_on() for _ in range(4)] == [False, False, True, True]


def test_a_version_that_is_known_to_be_bad_is_off_without_a_check(made):
    path = made(lambda: pytest.fail("it was checked"), known_bad={"3.9": "it loses the last byte"})
    assert not path.is_on() and path.reason() == "it loses the last byte (version 3.9.1)"
    assert made(lambda: "", known_bad={"3.8": "it loses the last byte", "3.9.10": "it too"}).is_on()


def test_a_report_names_each_path_that_is_off(monkeypatch):
    monkeypatch.setattr(GUARDS, "_reason", "this test says so")
    sentence = "torch's guards for repeated calls: off, because this test says so. Calls are compared in Python"
    assert [text[: len(sentence)] for text in off()] == [sentence]
    report = octavo.explain(octavo.Linear(16, 16, recipe="fp8-current"), torch.randn(4, 16))
    assert report.off == off() and report.as_dict()["off"] == list(off()) and sentence in str(report)


def test_the_doctor_names_each_path_that_is_off(monkeypatch, capsys):
    monkeypatch.setattr(GUARDS, "_reason", "this test says so")
    monkeypatch.setattr(doctor, "SHIPPED", ("bf16",))
    assert main(["doctor", "--device", "cpu"]) == 0
    assert "torch's guards for repeated calls: off, because this test says so." in capsys.readouterr().out
    assert main(["doctor", "--device", "cpu", "--json"]) == 0
    found = {path["name"]: path for path in json.loads(capsys.readouterr().out)["fast_paths"]}
    assert found[GUARDS.name]["on"] is False and found[GUARDS.name]["why"] == "this test says so"
    assert found[inductor.DIRECT_CALLS.name]["on"] is True
    assert found[DIRECT_LAUNCHES.name]["on"] is (None if not torch.cuda.is_available() else True)


def test_every_path_has_a_name_of_its_own():
    names = [path.name for path in FAST_PATHS]
    assert {"torch's guards for repeated calls", "launches of kernels without Triton's Python"} < set(names)
    assert len(names) == len(set(names))


@pytest.mark.parametrize("path", [GUARDS, WITHOUT_DISPATCHER, inductor.DIRECT_CALLS], ids=lambda path: path.name)
def test_a_check_needs_nothing_of_its_surroundings(path):
    """Modes, a default device, inference mode and transforms of the call that happens to be first."""
    import torch._inductor.lowering

    def asked():
        path.forget()
        assert path.is_on(), path.reason()

    with FakeTensorMode(), torch.device("meta"), torch.inference_mode():
        asked()
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        asked()
    torch.vmap(lambda x: (asked(), x)[1])(torch.ones(2, 3))
    torch.func.grad(lambda x: (asked(), x.sum())[1])(torch.ones(3))


def test_guards_that_miss_a_difference_are_off(monkeypatch):
    monkeypatch.setattr(tensors, "same_layouts", lambda tensors: lambda *others: True)
    GUARDS.forget()
    try:
        assert not GUARDS.is_on()
        assert "another size" in GUARDS.reason() and "another dtype" in GUARDS.reason()
    finally:
        GUARDS.forget()


@pytest.mark.parametrize("made", [None, lambda t, size, stride, start: t.clone().as_strided(size, stride, start)])
def test_views_that_are_copies_or_gone_are_off(made, monkeypatch):
    monkeypatch.setattr(tensors, "reinterpret", made)
    WITHOUT_DISPATCHER.forget()
    try:
        assert not WITHOUT_DISPATCHER.is_on()
        assert WITHOUT_DISPATCHER.reason() in ("this torch does not have them", "they differ from torch's own")
    finally:
        WITHOUT_DISPATCHER.forget()


def test_while_views_are_off_no_call_is_recorded(monkeypatch):
    monkeypatch.setattr(calls, "DEVICES", {"cpu"})
    monkeypatch.setattr(WITHOUT_DISPATCHER, "_reason", "this test says so")
    layer, x = octavo.Linear(16, 16, recipe="fp8-current"), torch.randn(4, 16)
    found = [layer(x) for _ in range(4)]
    assert calls.sources() == [] and all(torch.equal(y, found[0]) for y in found)


def test_code_that_does_not_call_the_function_is_off(monkeypatch):
    monkeypatch.setattr(inductor, "call_directly", lambda *_: None)
    inductor._asked.clear()
    monkeypatch.setattr(inductor, "_asked", _Deaf())
    inductor.DIRECT_CALLS.forget()
    try:
        assert not inductor.DIRECT_CALLS.is_on()
        assert inductor.DIRECT_CALLS.reason() == "Inductor's code does not call the function"
    finally:
        inductor.DIRECT_CALLS.forget()


class _Deaf(list):
    """A list that takes nothing: as if the function had never been asked for."""

    def append(self, _):
        pass


def test_the_check_of_inductor_leaves_the_counters_alone():
    from torch._dynamo.utils import counters

    counters["inductor"]["a counter of this test"] += 3
    before = {name: dict(values) for name, values in counters.items() if values}
    inductor.DIRECT_CALLS.forget()
    assert inductor.DIRECT_CALLS.is_on()
    assert {name: dict(values) for name, values in counters.items() if values} == before
