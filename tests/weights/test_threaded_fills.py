"""The weight cache when several threads fill it at once."""

import copy
import pickle
import threading
import time

import pytest
import torch
from torch import nn

import octavo
from octavo.weights import cache

N = 4


@pytest.fixture
def slow_casts(monkeypatch):
    """Casts that take long enough for the other threads to arrive meanwhile. Returns the list of casts."""
    quantize_into, casts = cache.quantize_into, []

    def slow(*arguments):
        casts.append(threading.get_ident())
        time.sleep(0.03)
        quantize_into(*arguments)

    monkeypatch.setattr(cache, "quantize_into", slow)
    return casts


def results(call):
    """What N threads return that call at about the same time, or raise."""
    found, gate = {}, threading.Barrier(N)

    def run(i):
        gate.wait()
        time.sleep(0.005 * i)
        try:
            found[i] = call()
        except Exception as error:
            found[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(N)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[i] for i in range(N)]


def model_of(recipe):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
    octavo.convert(model, recipe)
    return model


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-block", "mxfp8", "nvfp4"])
def test_all_threads_of_a_first_fill_get_whole_codes(recipe, slow_casts):
    layer, x = model_of(recipe)[0].eval(), torch.randn(8, 64)
    want = layer(x).detach()
    with torch.no_grad():
        found = results(lambda: layer(x, is_first_microbatch=True))
        assert all(isinstance(y, torch.Tensor) and torch.equal(y, want) for y in found), found
        assert torch.equal(layer(x, is_first_microbatch=False), want)


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-block"])
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_threads_train_in_blocks_of_their_own(recipe, warm, slow_casts):
    model, twin, x = model_of(recipe), model_of(recipe), torch.randn(8, 64)
    weights = [model[0].weight, model[2].weight]
    if warm:
        with octavo.microbatch(first=True):
            model(x)

    def step():
        with octavo.microbatch(first=True):
            y = model(x)
        time.sleep(0.02)  # another thread fills the cache between this forward and its backward
        return y, *torch.autograd.grad(y.sum(), weights)

    y = twin(x)
    want = y, *torch.autograd.grad(y.sum(), [twin[0].weight, twin[2].weight])
    for found in results(step):
        assert not isinstance(found, Exception), found
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


def test_a_thread_that_reads_the_cache_waits_for_one_that_fills_it(slow_casts):
    layer, x = model_of("fp8-block")[0], torch.randn(8, 64)
    want = layer(x).detach()
    with torch.no_grad():
        for _ in range(2):  # the second time the codes are there, and are made again
            flags = [False, False, False, True]
            found = results(lambda flags=flags: layer(x, is_first_microbatch=flags.pop()))
            assert all(isinstance(y, torch.Tensor) and torch.equal(y, want) for y in found), found


def test_one_thread_fills_as_often_as_it_asks(slow_casts):
    """A write that no version tells of is seen, and codes stay where they are."""
    layer, x = model_of("fp8-block")[0].eval(), torch.randn(8, 64)
    with torch.no_grad():
        layer(x, is_first_microbatch=True)
        places = [t.data_ptr() for t in layer._codes.parts(layer, "row")]
        layer.weight.data.mul_(2)
        assert torch.equal(layer(x, is_first_microbatch=True), layer(x))
    assert len(slow_casts) == 2 and places == [t.data_ptr() for t in layer._codes.parts(layer, "row")]


def test_layers_with_a_cache_are_copied_and_pickled():
    layer, x = model_of("fp8-block")[0], torch.randn(8, 64)
    want = layer(x, is_first_microbatch=True)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x, is_first_microbatch=True), want)
