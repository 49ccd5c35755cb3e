"""How an inspection ends: while another thread is in a forward, never, and for copies that were made in its block."""

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
from torch import nn

import octavo
from octavo.errors import UnsupportedConfig
from octavo.inspection.inspected_layer import Inspected
from octavo.ops.quantized import Quantized
from tests.support.linear_oracle import assert_same

X = torch.ones(4, 16)


def small(recipe="fp8-block"):
    torch.manual_seed(0)
    return nn.Sequential(octavo.Linear(16, 16, recipe=recipe), octavo.Linear(16, 16, recipe=recipe))


def is_plain(model):
    layers = [m for m in model.modules() if isinstance(m, Quantized)]
    assert layers
    return all(
        not isinstance(m, Inspected) and not {"inspection", "inspected_recipe"} & vars(m).keys()
        and "inspection_stats" not in m._buffers
        for m in layers
    )  # fmt: skip


# -- another thread ----------------------------------------------------------------------------------------------------


class Pauses:
    """A method of a class that waits, at one of its calls, until the test goes on."""

    def __init__(self, monkeypatch, owner, name, before):
        self.reached, self.go = threading.Event(), threading.Event()
        method = getattr(owner, name)

        def paused(*arguments, **settings):
            made = None if before else method(*arguments, **settings)
            if threading.current_thread() is not threading.main_thread():
                self.reached.set()
                assert self.go.wait(30)
            return method(*arguments, **settings) if before else made

        monkeypatch.setattr(owner, name, paused)


def in_thread(call):
    found = []

    def run():
        try:
            found.append(call())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, found


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize(
    ("owner", "name"),
    [(Inspected, "_run_node"), (Quantized, "_run_node"), (Inspected, "_split_over_ranks"),
     (Quantized, "_split_over_ranks"),
     (Inspected, "why_not_fusible")],
    ids=["entry", "node", "split", "own-split", "why_not_fusible"],
)  # fmt: skip
def test_a_block_that_ends_while_another_thread_is_in_a_forward(owner, name, before, monkeypatch):
    model = nn.Sequential(octavo.Sequential(*small()))
    want = model(X)
    pauses = Pauses(monkeypatch, owner, name, before)
    with octavo.inspect(model):
        thread, found = in_thread(lambda: model(X))
        assert pauses.reached.wait(30)
    pauses.go.set()
    thread.join()
    assert_same(found[0].detach(), want.detach())
    found[0].sum().backward()
    assert is_plain(model)


# -- never -------------------------------------------------------------------------------------------------------------


def test_an_inspection_that_is_never_left_keeps_no_model_alive():
    model = small()
    gone, inspection = weakref.ref(model), octavo.inspect(model)
    inspection.__enter__()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(X).sum().backward()
    optimizer.step()
    del model, optimizer
    gc.collect()
    assert gone() is None
    assert inspection.rows() == []
    other = small()
    other(X).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()  # its hook finds no model
    inspection.__exit__(None, None, None)


def test_an_inspection_that_is_dropped_is_left():
    model = small()
    octavo.inspect(model).__enter__()
    gc.collect()
    assert is_plain(model)
    with octavo.inspect(model) as report:
        model(X)
    assert report.rows()


def test_a_report_keeps_no_model_alive_after_the_block():
    model = small()
    with octavo.inspect(model) as report:
        model(X)
    rows, gone = report.rows(), weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert report.rows() == rows
    with pytest.raises(UnsupportedConfig, match="was deleted"), report:
        pass


def test_the_inspection_holds_its_block_by_itself():
    """A block without a name for its report."""
    model = small()
    with octavo.inspect(model):
        gc.collect()
        assert not is_plain(model)
    assert is_plain(model)


# -- copies ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_a_copy_made_in_a_block_leaves_it_with_the_model(copied):
    model = small("fp8-delayed")
    with octavo.inspect(model) as report:
        model(X)
        twin = copied(model)
        assert_same(twin(X).detach(), model(X).detach())
        again = copied(twin)
    assert {row.calls for row in report.rows()} == {2}
    for one in (model, twin, again):
        assert is_plain(one) and type(one[0]) is octavo.Linear
    with octavo.inspect(twin) as other:
        twin(X)
    assert {row.calls for row in other.rows()} == {1}


class Ends(nn.Identity):
    """A module whose copy ends a block."""

    def __deepcopy__(self, memo):
        self.inspection.__exit__(None, None, None)
        return self


def test_a_block_that_ends_while_the_model_is_copied():
    ends = Ends()
    first, last = small()
    model = nn.Sequential(first, ends, last)
    ends.inspection = octavo.inspect(model)
    ends.inspection.__enter__()
    twin = copy.deepcopy(model)
    assert is_plain(twin) and is_plain(model)
    assert_same(twin(X).detach(), model(X).detach())
