"""octavo.convert on experts with other layouts: [in, out], interleaved, flat; biases; activations of their own."""

import copy
import pickle

import pytest
import torch

import octavo
from octavo.errors import UnsupportedConfig
from octavo.recipes import SHIPPED
from tests.support.expert_layouts import LAYOUTS, DbrxExperts, tokens
from tests.support.recipe_traits import by_bits

BOUNDS = by_bits(unquantized=1e-5, eight=0.1, four=0.4)  # relative error of y and of each gradient
pytestmark = pytest.mark.usefixtures("expert_registry")


def made(name, seed=0):
    torch.manual_seed(seed)
    return LAYOUTS[name][0]()


def gradients(module, arguments):
    arguments = tuple(a.to(next(module.parameters()).dtype) if a is arguments[0] else a for a in arguments)
    y = module(*arguments)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, [arguments[0], *module.parameters()], dy)]


@pytest.mark.parametrize("recipe", ["bf16", "fp8-delayed", "fp8-block", "nvfp4"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_results_are_near_the_modules_own_in_float64(name, recipe):
    module, arguments = made(name), LAYOUTS[name][1]()
    exact = gradients(copy.deepcopy(module).double(), arguments)
    octavo.convert(module, recipe)
    found = gradients(module, arguments)
    errors = [((a - b).norm() / b.norm()).item() for a, b in zip(found, exact, strict=True)]
    assert max(errors) < BOUNDS[recipe] and (recipe == "bf16" or max(errors) > 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", SHIPPED)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_recipe_trains(name, recipe):
    module, arguments = made(name), LAYOUTS[name][1]()
    octavo.convert(module, recipe)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    octavo.attach(module, optimizer)
    losses = []
    for _ in range(4):
        loss = module(*arguments).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", LAYOUTS)
def test_parameters_keep_name_storage_and_layout(name):
    module = made(name)
    before = {path: (p, p.data_ptr(), p.stride()) for path, p in module.named_parameters()}
    keys = list(module.state_dict())
    report = octavo.convert(module, "fp8-block")
    assert list(module.state_dict()) == keys
    module(*LAYOUTS[name][1]()).sum().backward()
    for path, p in module.named_parameters():
        assert (p, p.data_ptr(), p.stride()) == before[path]
        assert p.grad.stride() == p.stride() and p.grad.count_nonzero()
    matrices = sum(p.numel() for path, p in module.named_parameters() if not path.endswith("_bias"))
    assert [row.weights for row in report] == [matrices]
    buffers = [t for m in module.modules() for t in vars(m).values() if torch.is_tensor(t)]
    assert not buffers  # no second copy of a weight lives between steps


@pytest.mark.parametrize("name", LAYOUTS)
def test_copies_pickles_and_revert(name):
    module, arguments = made(name), LAYOUTS[name][1]()
    plain, kind = module(*arguments), type(module)
    octavo.convert(module, "fp8-block")
    y = module(*arguments)
    assert torch.equal(copy.deepcopy(module)(*arguments), y)
    if kind is not DbrxExperts and kind.__module__.startswith("tests"):  # a class that can be imported
        assert torch.equal(pickle.loads(pickle.dumps(module))(*arguments), y)
    octavo.revert(module)
    assert type(module) is kind and torch.equal(module(*arguments), plain)


@pytest.mark.parametrize("name", ["interleaved", "flat", "equal rows"])
def test_a_graph_of_converted_experts_computes_what_eager_does(name, fresh_compiler):
    eager, module = made(name), made(name)
    for one in (eager, module):
        octavo.convert(one, "fp8-current")
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    arguments = LAYOUTS[name][1]()
    assert torch.equal(compiled(*arguments), eager(*arguments))


def test_gpt_oss_activation_is_octavos():
    module = made("interleaved")
    octavo.convert(module, "fp8-block")
    activation = module.octavo.activation
    assert (activation.NAME, activation.glu_interleave_size, activation.limit) == ("clamped-swiglu", 1, 7.0)


def test_microbatches_multiply_weights_in_other_layouts_anew():
    module, arguments = made("interleaved"), tokens()
    octavo.convert(module, "fp8-block")
    expected = module(*arguments)
    for first in (True, False):
        with octavo.microbatch(first=first):
            assert torch.equal(module(*arguments), expected)


def test_main_grad_needs_a_weight_in_its_own_layout():
    module = made("interleaved")
    octavo.convert(module, "fp8-block", fuse_wgrad_accumulation=True)
    with pytest.raises(UnsupportedConfig, match="laid out anew for each, of gate_up_proj"):
        module(*tokens())
