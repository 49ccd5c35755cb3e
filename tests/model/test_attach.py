"""octavo.attach: which optimizer it hooks, through which wrappers, which layers it steps, and what it refuses."""

import gc
import sys
import weakref
from collections import Counter

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel

import octavo
from octavo.errors import Unsupported, UnsupportedConfig, UnsupportedDtype
from tests.support.linear_oracle import make, spiky

RECIPE = "fp8-delayed(history=4)"
unstepped = pytest.mark.filterwarnings("ignore:fp8-delayed. parameters were updated")  # steps here may end none of ours


class Accelerated(Optimizer):
    """As accelerate wraps an optimizer: a torch optimizer by class, whose constructor calls no other, and whose step
    may be skipped while gradients accumulate, or go through a GradScaler."""

    def __init__(self, optimizer, scaler=None):
        self.optimizer, self.scaler, self.sync_gradients = optimizer, scaler, True

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)
    defaults = property(lambda self: self.optimizer.defaults)

    def zero_grad(self, set_to_none=True):
        if self.sync_gradients:
            self.optimizer.zero_grad(set_to_none)

    def step(self, closure=None):
        if self.sync_gradients and self.scaler is None:
            self.optimizer.step(closure)
        elif self.sync_gradients:
            self.scaler.step(self.optimizer)
            self.scaler.update()


class Lightninged:
    """As Lightning wraps one: it takes over the optimizer's class, and always passes a closure."""

    def __init__(self, optimizer):
        self._optimizer = optimizer
        self.__class__ = type("Lightning" + type(optimizer).__name__, (type(self), type(optimizer)), {})

    @property
    def optimizer(self):
        return self._optimizer

    def step(self, closure=None, **kwargs):
        return self._optimizer.step(closure=closure or (lambda: None), **kwargs)

    def __getattr__(self, name):
        return getattr(self._optimizer, name)


class Copied(Lightninged):
    """As earlier versions of it did: with the attributes of the optimizer, so that hooks seem to be its own."""

    def __init__(self, optimizer):
        self.__dict__.update({k: v for k, v in vars(optimizer).items() if k != "step"})
        super().__init__(optimizer)


class Duck:
    """A wrapper that is no torch optimizer in any way."""

    def __init__(self, optimizer):
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups

    def step(self):
        self.optimizer.step()

    def zero_grad(self):
        self.optimizer.zero_grad()


class Bare:
    """A wrapper with nothing but the optimizer and the calls of a training loop."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.step, self.zero_grad = optimizer.step, optimizer.zero_grad


WRAPPERS = {
    "none": lambda o: o,
    "accelerate": Accelerated,
    "accelerate with a scaler": lambda o: Accelerated(o, torch.amp.GradScaler("cpu", init_scale=1.0)),
    "lightning": Lightninged,
    "lightning, with copied attributes": Copied,
    "a duck": Duck,
    "without param_groups": Bare,
    "without param_groups, twice": lambda o: Bare(Bare(o)),
    "both": lambda o: Accelerated(Lightninged(o)),
    "scheduled": lambda o: (LambdaLR(o, lambda step: 1.0), o)[1],
}


def x_of(i, width=48):
    return spiky(21, width, seed=10 + i)


def newest(model, path=""):
    """Amaxes that ever entered x's window, and dy's."""
    state, where = octavo.state_dict(model), f"{path}." if path else ""
    return state[f"{where}scaling.forward.head"].tolist()[0], state[f"{where}scaling.backward.head"].item()


def train(model, optimizers, steps, **given):
    for i in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = model(x_of(i), **given).square().mean()
        scaler = getattr(optimizers[0], "scaler", None)
        (loss if scaler is None else scaler.scale(loss)).backward()
        for optimizer in optimizers:
            optimizer.step()


# -- wrappers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_a_wrapped_optimizer_steps_once_a_step_and_refreshes(wrap):
    layer, twin = make(RECIPE), make(RECIPE)
    optimizer, plain = wrap(SGD(layer.parameters(), 0.01)), SGD(twin.parameters(), 0.01)
    octavo.attach(layer, optimizer)
    octavo.attach(twin, plain)
    for i in range(3):
        for model, stepped in ((layer, optimizer), (twin, plain)):
            train(model, [stepped], 1, is_first_microbatch=i == 0)
        assert newest(layer) == (i + 1, i + 1)
    for name, want in octavo.state_dict(twin).items():
        assert torch.equal(octavo.state_dict(layer)[name], want), name
    assert torch.equal(layer(x_of(9), is_first_microbatch=False), layer(x_of(9)))


@unstepped
@pytest.mark.parametrize("wrap", [Accelerated, Lightninged])
def test_a_handle_removes_what_was_hooked(wrap):
    layer = make(RECIPE)
    optimizer = wrap(SGD(layer.parameters(), 0.01))
    handle = octavo.attach(layer, optimizer)
    train(layer, [optimizer], 1)
    handle.remove()
    handle.remove()  # a second time is nothing
    train(layer, [optimizer], 1)
    assert newest(layer) == (1, 1)
    octavo.attach(layer, optimizer)
    train(layer, [optimizer], 1)
    assert newest(layer) == (2, 2)


@unstepped
def test_a_handle_ends_with_its_block():
    layer = make(RECIPE)
    optimizer = SGD(layer.parameters(), 0.01)
    with octavo.attach(layer, optimizer):
        train(layer, [optimizer], 1)
    train(layer, [optimizer], 1)
    assert newest(layer) == (1, 1)


def test_steps_that_a_wrapper_skips_are_no_steps():
    layer = make(RECIPE)
    optimizer = Accelerated(SGD(layer.parameters(), 0.01))
    octavo.attach(layer, optimizer)
    for i in range(6):  # gradients accumulate over three
        optimizer.sync_gradients = i % 3 == 2
        train(layer, [optimizer], 1)
    assert newest(layer) == (2, 2)


def test_an_optimizer_may_be_wrapped_after_it_was_attached():
    layer = make(RECIPE)
    optimizer = SGD(layer.parameters(), 0.01)
    octavo.attach(layer, optimizer)
    wrapped = Accelerated(optimizer)
    train(layer, [wrapped], 2)
    assert newest(layer) == (2, 2)
    with pytest.raises(UnsupportedConfig, match="attached already"):
        octavo.attach(layer, wrapped)


class Lookahead(Optimizer):
    """One that steps another and then writes to the weights itself: its own hooks come last."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        super().__init__(optimizer.param_groups, {})

    def step(self, closure=None):
        self.optimizer.step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.mul_(0.5)


def test_an_optimizer_with_hooks_of_its_own_is_hooked_itself_though_it_has_another_inside():
    layer = make("fp8-current")
    optimizer = Lookahead(SGD(layer.parameters(), 0.01))
    octavo.attach(layer, optimizer)
    for i in range(2):
        train(layer, [optimizer], 1, is_first_microbatch=i == 0)
    assert torch.equal(layer(x_of(9), is_first_microbatch=False), layer(x_of(9)))


# -- models ------------------------------------------------------------------------------------------------------------


def converted(recipe=RECIPE):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 32), nn.GELU(), nn.Linear(32, 24))
    octavo.convert(model, recipe)
    return model


def test_layers_that_follow_autocast_are_stepped_once_they_have_run():
    model = nn.Sequential(octavo.Linear(48, 32), octavo.Linear(32, 24))
    optimizer = SGD(model.parameters(), 0.01)
    octavo.attach(model, optimizer)
    train(model, [optimizer], 1)
    assert not octavo.state_dict(model)
    for i in range(2):
        with octavo.autocast(RECIPE):
            train(model, [optimizer], 1)
        assert newest(model, "1") == (i + 1, i + 1)


def test_compiled_models_and_their_originals_are_one():
    model = converted()
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = SGD(model.parameters(), 0.01)
    octavo.attach(compiled, optimizer)
    with pytest.raises(UnsupportedConfig, match="attached already"):
        octavo.attach(model, optimizer)
    train(model, [optimizer], 2)
    assert newest(model, "2") == (2, 2)


def test_tied_weights_belong_to_both_layers():
    model = nn.Sequential(octavo.Linear(48, 48, recipe=RECIPE), octavo.Linear(48, 48, recipe=RECIPE))
    model[1].weight = model[0].weight
    optimizer = SGD([model[0].weight], 0.01)
    octavo.attach(model, optimizer)
    train(model, [optimizer], 2)
    assert newest(model, "0") == newest(model, "1") == (2, 2)


def test_an_optimizer_of_adapters_alone_steps_frozen_layers():
    """It holds none of our layers' parameters, and they remember amaxes all the same."""
    model = nn.Sequential(nn.Linear(48, 48), make(RECIPE))
    model[1].requires_grad_(False)
    optimizer = SGD(model[0].parameters(), 0.01)
    octavo.attach(model, optimizer)
    train(model, [optimizer], 3)
    assert newest(model, "1") == (3, 3)


# -- several optimizers ------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("error")  # nor does either take the other's step for one that was forgotten
def test_two_optimizers_of_one_model_step_each_layer_once():
    """Weights in one, biases and the rest in the other, as with an optimizer that takes matrices alone."""
    model, twin = converted(), converted()
    both = [SGD([model[0].weight], 0.01), AdamW([model[0].bias, *model[2].parameters()], 0.01)]
    pair = [SGD([twin[0].weight], 0.01), AdamW([twin[0].bias, *twin[2].parameters()], 0.01)]
    for optimizer in both:
        octavo.attach(model, optimizer)
    for i in range(3):
        train(model, both, 1)
        train(twin, pair, 1)
        octavo.step(twin)
        assert newest(model, "0") == newest(model, "2") == (i + 1, i + 1)
    for name, want in octavo.state_dict(twin).items():
        assert torch.equal(octavo.state_dict(model)[name], want), name


def test_two_optimizers_in_turn_step_their_own_layers():
    """One half trains while the other does not. Its step may come between the other's forward and backward."""
    model = converted()
    halves = [SGD(model[i].parameters(), 0.01) for i in (0, 2)]
    for optimizer in halves:
        octavo.attach(model, optimizer)
    train(model, halves, 1)
    train(model[0], halves[:1], 2)
    assert newest(model, "0") == (3, 3) and newest(model, "2") == (1, 1)
    y = model[2](spiky(21, 32, seed=3))
    train(model[0], halves[:1], 1)
    y.sum().backward()  # its multipliers are what they were


def test_two_optimizers_that_exchange_their_parameters():
    """As many as before: each serves the layer that it holds now."""
    model = converted()
    halves = [SGD(model[i].parameters(), 0.01) for i in (0, 2)]
    for optimizer in halves:
        octavo.attach(model, optimizer)
    train(model, halves, 1)
    first, second = [optimizer.param_groups[0] for optimizer in halves]
    first["params"], second["params"] = second["params"], first["params"]
    train(model[0], halves[1:], 2)
    assert newest(model, "0") == (3, 3) and newest(model, "2") == (1, 1)


def test_two_optimizers_refresh_the_codes_of_the_weights_that_each_wrote():
    model = converted("fp8-block")
    both = [SGD([model[0].weight], 0.1), SGD([model[2].weight], 0.1)]
    for optimizer in both:
        octavo.attach(model, optimizer)
    for i in range(2):
        h = model[0](x_of(i), is_first_microbatch=i == 0)
        model[2](h, is_first_microbatch=i == 0).square().mean().backward()
        for optimizer in both:
            optimizer.step()
    assert torch.equal(model[0](x_of(9), is_first_microbatch=False), model[0](x_of(9)))


def test_one_attached_of_two_serves_the_whole_model():
    """The other's layers are stepped with it, and their caches refreshed: in a graph nothing else would."""
    model = converted()
    other, last = SGD(model[0].parameters(), 0.1), SGD(model[2].parameters(), 0.1)
    octavo.attach(model, last)
    for i in range(2):
        h = model[0](x_of(i), is_first_microbatch=i == 0)
        model[2](h, is_first_microbatch=i == 0).square().mean().backward()
        other.step(), last.step()
    assert newest(model, "0") == newest(model, "2") == (2, 2)
    assert torch.equal(model[0](x_of(9), is_first_microbatch=False), model[0](x_of(9)))


def test_weights_that_are_copied_back_later_are_not_trusted():
    """An optimizer of master copies of some weights, which are written to them after its step, past torch's counter."""
    model = converted("fp8-block")
    master = nn.Parameter(model[0].weight.detach().clone())
    optimizer = SGD([master, *model[2].parameters()], 0.1)
    octavo.attach(model, optimizer)
    h = model[0](x_of(0), is_first_microbatch=True)
    model[2](h, is_first_microbatch=True).square().mean().backward()
    master.grad = model[0].weight.grad
    optimizer.step()
    model[0].weight.data.copy_(master)
    with pytest.raises(UnsupportedConfig, match="no torch optimizer holds this weight"):
        model[0](x_of(1), is_first_microbatch=False)


def test_an_optimizer_that_was_given_up_takes_nothing_along():
    model = converted()
    abandoned = SGD(model.parameters(), 0.01)
    octavo.attach(model, abandoned)
    optimizer = SGD(model.parameters(), 0.01)
    octavo.attach(model, optimizer)
    train(model, [optimizer], 2)
    assert newest(model, "0") == newest(model, "2") == (2, 2)
    del abandoned
    gc.collect()
    train(model, [optimizer], 1)
    assert newest(model, "0") == (3, 3)


def test_one_optimizer_may_serve_two_models():
    first, second = make(RECIPE), make(RECIPE)
    optimizer = SGD([*first.parameters(), *second.parameters()], 0.01)
    octavo.attach(first, optimizer)
    octavo.attach(second, optimizer)
    (first(x_of(0)).sum() + second(x_of(1)).sum()).backward()
    optimizer.step()
    assert newest(first) == newest(second) == (1, 1)


# -- refused -----------------------------------------------------------------------------------------------------------


def refused(*args, match, error=UnsupportedConfig):
    with pytest.raises(error, match=match) as found:
        octavo.attach(*args)
    assert isinstance(found.value, Unsupported)
    return str(found.value)


def test_an_optimizer_of_other_parameters_is_refused():
    model, other = converted(), converted()
    said = refused(model, SGD(other.parameters(), 0.1), match="holds none of the model's 4 parameters")
    assert "model.parameters()" in said and "octavo.step(model)" in said and "refresh_weights" in said
    copies = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    refused(model, Accelerated(SGD(copies, 0.1)), match="holds none")
    stale = SGD(model.parameters(), 0.1)
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    refused(model, stale, match="holds none")


def test_swapped_arguments_are_refused():
    model = converted()
    optimizer = SGD(model.parameters(), 0.1)
    for wrap in WRAPPERS.values():
        refused(
            wrap(optimizer), model, match="takes a model .* first, got .*Swap the arguments", error=UnsupportedDtype
        )


def test_a_model_without_our_layers_is_refused():
    model = nn.Sequential(nn.Linear(48, 32), nn.GELU())
    said = refused(model, SGD(model.parameters(), 0.1), match="no layer of Octavo's")
    assert "octavo.convert(model, recipe)" in said and "Sequential" in said


def test_what_is_no_model_is_refused():
    layer = make(RECIPE)
    optimizer = SGD(layer.parameters(), 0.1)
    refused([layer], optimizer, match="takes a model .*got list", error=UnsupportedDtype)
    refused(None, optimizer, match="got None", error=UnsupportedDtype)


class Own:
    """An optimizer that torch knows nothing of."""

    def __init__(self, params):
        self.param_groups = [{"params": list(params)}]

    def step(self):
        pass


class Unmade(Optimizer):
    """One whose constructor does not call torch's, and has no other inside."""

    def __init__(self, params):
        self.param_groups = [{"params": list(params)}]

    def step(self, closure=None):
        pass


@pytest.mark.parametrize("kind", [Own, Unmade])
def test_an_optimizer_without_hooks_is_refused_with_the_calls_to_make(kind):
    layer = make(RECIPE)
    said = refused(layer, kind(layer.parameters()), match=kind.__name__, error=UnsupportedDtype)
    assert "octavo.step(model)" in said and "octavo.refresh_weights(model)" in said


def test_what_only_points_at_an_optimizer_is_no_wrapper_of_it():
    layer = make(RECIPE)
    optimizer = SGD(layer.parameters(), 0.1)
    refused(layer, LambdaLR(optimizer, lambda step: 1.0), match="LambdaLR", error=UnsupportedDtype)
    refused(layer, optimizer.step, match="function", error=UnsupportedDtype)
    refused(layer, SGD, match="SGD", error=UnsupportedDtype)
    refused(layer, None, match="NoneType", error=UnsupportedDtype)
    refused(layer, [optimizer], match="list", error=UnsupportedDtype)
    loop = Duck(optimizer)
    loop.optimizer = loop
    refused(layer, loop, match="Duck", error=UnsupportedDtype)


def test_a_second_attachment_of_the_same_is_refused_until_the_first_is_removed():
    model = converted()
    optimizer = SGD(model.parameters(), 0.01)
    handle = octavo.attach(model, optimizer)
    for second in (model, model[2], nn.ModuleList([nn.Linear(2, 2), model])):
        said = refused(second, optimizer, match="attached already")
    assert ".remove()" in said
    refused(model, Lightninged(optimizer), match="attached already")
    handle.remove()
    octavo.attach(model, optimizer)


def test_a_refusal_hooks_nothing():
    model, other = converted(), converted()
    optimizer = SGD(other.parameters(), 0.01)
    refused(model, optimizer, match="none")
    octavo.attach(other, optimizer)
    train(other, [optimizer], 1)
    assert newest(other, "0") == (1, 1) and newest(model, "0") == (0, 0)


def test_averaged_copies_of_a_model_are_another_model():
    model = converted()
    refused(AveragedModel(model), SGD(model.parameters(), 0.1), match="holds none")


def test_the_work_of_a_step_does_not_grow_with_other_attachments():
    """An optimizer for each parameter, as where steps are taken during backward: calls of Octavo's functions."""

    def calls(number):
        model = nn.Sequential(*[octavo.Linear(8, 8, recipe="fp8-current") for _ in range(number)])
        optimizers = [torch.optim.SGD([p], lr=0.1) for p in model.parameters()]
        handles = [octavo.attach(model, optimizer) for optimizer in optimizers]
        model(torch.ones(2, 8)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        found = Counter()
        sys.setprofile(lambda frame, event, _: found.update([event == "call" and "octavo" in frame.f_code.co_filename]))
        try:
            optimizers[0].step()
        finally:
            sys.setprofile(None)
        for handle in handles:
            handle.remove()
        return found[True]

    assert calls(40) < 6 * calls(10)  # four times as many layers, and not four times four


def test_a_model_that_was_trained_is_freed_with_its_optimizer():
    def trained():
        model = nn.Sequential(octavo.Linear(16, 8, recipe="fp8-delayed"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        octavo.attach(model, optimizer)
        for _ in range(2):
            model(torch.randn(4, 16)).sum().backward()
            optimizer.step()
        return weakref.ref(model[0].weight)

    weights = [trained() for _ in range(3)]  # a later model may take the ids of an earlier one
    gc.collect()
    assert [weight() for weight in weights] == [None] * 3


def test_an_attachment_takes_the_place_of_one_that_is_gone(monkeypatch):
    """Even if it has the same id, and its optimizer as many parameters."""
    monkeypatch.setattr("octavo.model.attach.id", lambda _: 7, raising=False)
    for _ in range(2):
        model = nn.Sequential(octavo.Linear(16, 8, bias=False, recipe="fp8-delayed"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        octavo.attach(model, optimizer)
        model(torch.ones(4, 16)).sum().backward()
        optimizer.step()
        assert not model[0]._hidden.scaling_forward_running_amax.any() and model[0]._hidden.scaling_forward_head.all()
        del model, optimizer
        gc.collect()
