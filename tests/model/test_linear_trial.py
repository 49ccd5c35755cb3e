"""octavo.convert on subclasses of nn.Linear with a forward of their own: one that is F.linear is converted."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import octavo
from octavo.errors import UnsupportedConfig


class Casts(nn.Linear):
    """nanochat's."""

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype))


class Product(nn.Linear):
    """Falcon's."""

    def forward(self, input):
        y = input @ self.weight.T
        return y if self.bias is None else y + self.bias


class Helped(nn.Linear):
    def forward(self, x):
        return self._product(x)

    def _product(self, x):
        return super().forward(x)


class Scaled(nn.Linear):
    """torchtitan's ScaledBiasRowwiseLinear."""

    ranks = 1

    def forward(self, input):
        return F.linear(input, self.weight, self.bias / self.ranks)


class Float32(nn.Linear):
    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return F.linear(x, self.weight, self.bias)


class Clamps(nn.Linear):
    def forward(self, x):
        return super().forward(x).clamp(max=2.0)


class Drops(nn.Linear):
    def forward(self, x):
        return F.dropout(super().forward(x), training=self.training)


class Detaches(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight.detach(), self.bias)


class Widens(nn.Linear):
    def forward(self, x):
        return super().forward(x).float()


class TakesTwo(nn.Linear):
    def forward(self, x, scale=None):
        return super().forward(x)


class Counts(nn.Linear):
    def forward(self, x):
        self.calls = 1
        return super().forward(x)


@pytest.mark.parametrize(
    ("kind", "bias"), [(Casts, False), (Product, True), (Product, False), (Helped, True), (Helped, False)]
)
def test_a_forward_that_is_linear_is_converted(kind, bias):
    torch.manual_seed(0)
    model = nn.Sequential(kind(32, 16, bias=bias))
    twin = octavo.Linear(32, 16, bias=bias, recipe="fp8-block")
    twin.load_state_dict(model[0].state_dict())
    octavo.convert(model, "fp8-block")
    assert isinstance(model[0], kind) and isinstance(model[0], octavo.Linear)
    x = torch.randn(8, 32)
    assert torch.equal(model(x), twin(x))
    octavo.revert(model)
    assert type(model[0]) is kind


REFUSED = {
    Scaled: "reads self.ranks",
    Float32: "computes in float32 under torch.autocast",
    Clamps: "computes another y",
    Drops: "computes another y",
    Detaches: "makes dw of another shape",
    Widens: "returns torch.float32 for torch.bfloat16",
    TakesTwo: "takes more than x",
    Counts: "writes self.calls",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_forward_that_does_more_is_named_and_can_be_replaced(kind):
    model = nn.Sequential(kind(32, 16), nn.Linear(16, 16))
    said = rf"{kind.__name__}, whose own forward would be lost, and which is not F\.linear: it {REFUSED[kind]}"
    with pytest.raises(UnsupportedConfig, match=rf"{said}\. replace_forward={kind.__name__} replaces"):
        octavo.convert(model, "fp8-block")
    octavo.convert(model, "fp8-block", replace_forward=kind)
    assert isinstance(model[0], octavo.Linear)


def test_a_rule_that_names_the_layer_replaces_its_forward():
    model = nn.ModuleDict({"block": nn.ModuleDict({"out": Scaled(32, 16)})})
    octavo.convert(model, octavo.Policy([("*.out", "fp8-block")]))
    assert str(model["block"]["out"].recipe) == "fp8-block"
    other = nn.ModuleDict({"block": nn.ModuleDict({"out": Scaled(32, 16)})})
    with pytest.raises(UnsupportedConfig, match=r"reads self\.ranks"):
        octavo.convert(other, octavo.Policy([("*", "fp8-block")]))


def test_the_trial_leaves_no_trace_and_needs_no_default():
    torch.manual_seed(0)
    state = torch.get_rng_state()
    with torch.device("meta"):
        model = nn.Sequential(Casts(32, 16, bias=False))
    before = torch.get_rng_state()
    with torch.device("meta"), torch.no_grad():
        octavo.convert(model, "fp8-block")
    assert torch.equal(torch.get_rng_state(), before) and state is not None


def test_replace_forward_takes_classes():
    with pytest.raises(UnsupportedConfig, match=r"replace_forward takes subclasses of nn\.Linear, got 'Casts'"):
        octavo.convert(nn.Linear(4, 4), "bf16", replace_forward=["Casts"])
