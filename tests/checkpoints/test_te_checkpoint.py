"""Checkpoints of Transformer Engine: names of parameters, delayed scales out of pickles, and what is refused."""

import io
import pickle
import sys
import types

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import octavo
from octavo.checkpoints.inert_pickle import Inert, read
from octavo.errors import UnsupportedConfig, UnsupportedDtype
from tests.support.linear_oracle import spiky

HISTORY = 8


def foreign_recipe():
    """An object of a class that this process cannot import when the pickle is read."""
    module = types.ModuleType("transformer_engine.common.recipe")

    class DelayedScaling:
        def __init__(self):
            self.margin = 0

    DelayedScaling.__module__, DelayedScaling.__qualname__ = module.__name__, "DelayedScaling"
    module.DelayedScaling = DelayedScaling
    return module, DelayedScaling()


def extra_state(gemms, seed=0, form="bytes"):
    """A module's state as upstream writes it: three tensors a GEMM in forward, two in backward."""
    torch.manual_seed(seed)
    amaxes = {"fwd": torch.rand(HISTORY, 3 * gemms) + 0.5, "bwd": torch.rand(HISTORY, 2 * gemms) + 0.5}
    for window in amaxes.values():
        window[0] = 0.0  # the running step
    limits = {"fwd": 448.0, "bwd": 57344.0}
    module, recipe = foreign_recipe()
    state = {"recipe": recipe, "extra_fp8_variables": {"num_gemms": gemms, "name": "x"}}
    for key, window in amaxes.items():
        state |= {f"scale_{key}": limits[key] / window.amax(0), f"amax_history_{key}": window}
    sys.modules.update({name: module for name in (module.__name__, "transformer_engine.common", "transformer_engine")})
    try:
        if form == "bytes":
            content = torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)
        else:
            content = io.BytesIO()
            torch.save(state, content)
    finally:
        for name in (module.__name__, "transformer_engine.common", "transformer_engine"):
            del sys.modules[name]
    return content, state


def model(recipe=f"fp8-delayed(history={HISTORY})"):
    torch.manual_seed(3)
    return nn.ModuleDict({
        "qkv": octavo.LayerNormLinear(16, 48, normalization="LayerNorm", recipe=recipe),
        "proj": octavo.Linear(16, 16, recipe=recipe),
        "mlp": octavo.LayerNormMLP(16, 24, normalization="RMSNorm", activation="swiglu", recipe=recipe),
        "experts": octavo.GroupedLinear(2, 16, 16, recipe=recipe),
    })  # fmt: skip


def saved(form="bytes"):
    """A checkpoint of such a model, by upstream's names."""
    t = iter(range(100))

    def of(*shape):
        return spiky(*shape, seed=next(t)) if len(shape) > 1 else spiky(1, *shape, seed=next(t)).view(-1)

    state = {
        "qkv.layer_norm_weight": of(16), "qkv.layer_norm_bias": of(16), "qkv.weight": of(48, 16), "qkv.bias": of(48),
        "proj.weight": of(16, 16), "proj.bias": of(16),
        "mlp.layer_norm_weight": of(16), "mlp.fc1_weight": of(48, 16), "mlp.fc1_bias": of(48),
        "mlp.fc2_weight": of(16, 24), "mlp.fc2_bias": of(16),
        "experts.weight0": of(16, 16), "experts.weight1": of(16, 16), "experts.bias0": of(16), "experts.bias1": of(16),
    }  # fmt: skip
    gemms = {"qkv": 1, "proj": 1, "mlp": 2, "experts": 2}
    extras = {name: extra_state(count, seed=i, form=form) for i, (name, count) in enumerate(gemms.items())}
    state |= {f"{name}._extra_state": content for name, (content, _) in extras.items()}
    return state, {name: known for name, (_, known) in extras.items()}


OURS = {
    "qkv.norm.weight": "qkv.layer_norm_weight", "qkv.norm.bias": "qkv.layer_norm_bias",
    "qkv.linear.weight": "qkv.weight", "qkv.linear.bias": "qkv.bias", "proj.weight": "proj.weight",
    "mlp.norm.weight": "mlp.layer_norm_weight", "mlp.fc1.weight": "mlp.fc1_weight", "mlp.fc2.bias": "mlp.fc2_bias",
}  # fmt: skip
# of a layer: its module, and the places of x, w and dy among the module's scales
PLACES = {
    "qkv.linear": ("qkv", [0], [1], [0]), "proj": ("proj", [0], [1], [0]), "mlp.fc1": ("mlp", [0], [1], [0]),
    "mlp.fc2": ("mlp", [3], [4], [2]), "experts": ("experts", [0, 3], [1, 4], [0, 2]),
}  # fmt: skip


@pytest.mark.parametrize("form", ["bytes", "file"])
def test_weights_and_scales_arrive(form):
    state, known = saved(form)
    loaded = model()
    report = octavo.load_te_checkpoint(loaded, state)
    own = loaded.state_dict()
    for ours, theirs in OURS.items():
        assert torch.equal(own[ours], state[theirs]), ours
    assert torch.equal(own["experts.weight"], torch.stack([state["experts.weight0"], state["experts.weight1"]]))
    assert (report.parameters, report.measured_anew, report.ignored) == (15, (), ())
    assert set(report.scales) == set(PLACES)
    scaling = octavo.state_dict(loaded)
    for path, (module, x, w, dy) in PLACES.items():
        forward, backward = known[module]["scale_fwd"], known[module]["scale_bwd"]
        assert torch.equal(scaling[f"{path}.scaling.forward.encode"], forward[x + w])
        assert torch.equal(scaling[f"{path}.scaling.backward.encode"], backward[dy])
        history = scaling[f"{path}.scaling.forward.history"]
        assert torch.equal(history[:, : HISTORY - 1], known[module]["amax_history_fwd"][1:, x + w].T)


def test_training_goes_on_with_the_scales():
    """The next scale follows from the loaded window, as it would have there."""
    state, known = saved()
    loaded = model()
    octavo.load_te_checkpoint(loaded, state)
    x = 0.01 * torch.randn(8, 16)  # below every amax of the window
    proj = loaded["proj"]
    quant = octavo.quant.Tensorwise()
    codes = quant.quantize(x, inverse_scale=known["proj"]["scale_fwd"][:1])
    w = quant.quantize(proj.weight.detach(), inverse_scale=known["proj"]["scale_fwd"][1:2])
    want = codes.dequantize() @ w.dequantize().T + proj.bias
    torch.testing.assert_close(proj(x), want)
    proj(x).sum().backward()
    octavo.step(loaded)
    scale = octavo.state_dict(loaded)["proj.scaling.forward.encode"]
    torch.testing.assert_close(scale[0], known["proj"]["scale_fwd"][0])


def test_a_shorter_window_keeps_the_newest_amaxes():
    state, known = saved()
    loaded = model("fp8-delayed(history=3)")
    octavo.load_te_checkpoint(loaded, state)
    found = octavo.state_dict(loaded)["proj.scaling.forward.history"]
    assert torch.equal(found, known["proj"]["amax_history_fwd"][-3:, :2].T)


def test_other_recipes_take_the_weights_alone():
    state, _ = saved()
    loaded = model("fp8-block")
    report = octavo.load_te_checkpoint(loaded, state)
    assert report.scales == () and len(report.ignored) == 4
    assert torch.equal(loaded["proj"].weight, state["proj.weight"])


def test_a_part_of_a_state_that_no_layer_takes_is_told():
    state, _ = saved()
    loaded = model()
    loaded["mlp"].fc1.recipe = "fp8-current"
    report = octavo.load_te_checkpoint(loaded, state)
    assert report.ignored == ("mlp._extra_state: mlp.fc1",) and "mlp.fc2" in report.scales


@pytest.mark.parametrize("history", [HISTORY, 3])
def test_layers_that_follow_an_autocast_take_their_scales_in_their_first_call(history):
    state, _ = saved()
    recipe = f"fp8-delayed(history={history})"
    follows, has_it = model(None)["mlp"], model(recipe)["mlp"]
    of_mlp = {name: t for name, t in state.items() if name.startswith("mlp.")}
    for loaded in (follows, has_it):
        report = octavo.load_te_checkpoint(nn.ModuleDict({"mlp": loaded}), of_mlp)
        assert (report.scales, report.measured_anew, report.ignored) == (("mlp.fc1", "mlp.fc2"), (), ())
    x = torch.randn(4, 16)
    with octavo.autocast(recipe):
        assert torch.equal(follows(x), has_it(x))
    first, second = octavo.state_dict(follows), octavo.state_dict(has_it)
    assert first.keys() == second.keys()
    for name in ("fc1.scaling.forward.encode", "fc2.scaling.backward.encode"):
        assert torch.equal(first[name], second[name])


def test_the_state_of_an_operation_lies_one_level_deeper():
    """te.ops writes forward and backward apart: of x and w, and of dy."""
    _, known = extra_state(1)
    deep = {
        way: {key: known[key][..., :count] for key in (f"scale_{suffix}", f"amax_history_{suffix}")}
        for way, suffix, count in (("forward", "fwd", 2), ("backward", "bwd", 1))
    }
    content = torch.frombuffer(bytearray(pickle.dumps(deep)), dtype=torch.uint8)
    loaded = nn.Sequential(octavo.Linear(16, 16, bias=False, recipe="fp8-delayed"))
    state = {"0.basic_ops.0.weight": torch.ones(16, 16), "0.basic_ops.0._extra_state": content}
    report = octavo.load_te_checkpoint(loaded, state)
    assert (report.scales, report.measured_anew, report.ignored) == (("0",), (), ())
    scaling = octavo.state_dict(loaded)
    assert torch.equal(scaling["0.scaling.forward.encode"], known["scale_fwd"][:2])
    assert torch.equal(scaling["0.scaling.backward.encode"], known["scale_bwd"][:1])


def test_a_state_without_scales_is_none():
    """Of stateless recipes upstream writes an empty tensor; of modules that never ran in FP8 None."""
    state, _ = saved()
    empty = {"qkv": torch.empty(0, dtype=torch.uint8), "proj": None, "mlp": io.BytesIO()}
    state |= {f"{name}._extra_state": content for name, content in empty.items()}
    report = octavo.load_te_checkpoint(model(), state)
    assert report.scales == ("experts",) and set(report.measured_anew) == {"qkv.linear", "proj", "mlp.fc1", "mlp.fc2"}


def test_operations_by_their_names_there():
    loaded = octavo.Sequential(octavo.Linear(16, 8), octavo.ops.RMSNorm(8))
    state = {"0.basic_ops.0.weight": spiky(8, 16), "0.basic_ops.1.bias": spiky(1, 8)[0], "1.weight": torch.ones(8)}
    octavo.load_te_checkpoint(loaded, state)
    assert torch.equal(loaded[0].weight, state["0.basic_ops.0.weight"])


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_both_kinds_of_files_load(tmp_path, suffix):
    state, _ = saved()
    path = tmp_path / f"model.{suffix}"
    torch.save(state, path) if suffix == "pt" else save_file(state, path)
    report = octavo.load_te_checkpoint(model(), path)
    assert report.parameters == 15 and len(report.scales) == 5


def test_a_file_with_states_as_files_in_it_loads(tmp_path):
    """Versions before 2 wrote each state as an io.BytesIO."""
    state, _ = saved("file")
    torch.save(state, tmp_path / "model.pt")
    allowed = set(torch.serialization.get_safe_globals())
    report = octavo.load_te_checkpoint(model(), tmp_path / "model.pt")
    assert report.parameters == 15 and len(report.scales) == 5
    assert set(torch.serialization.get_safe_globals()) == allowed


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_names_that_differ_are_told():
    state, _ = saved()
    del state["qkv.layer_norm_weight"]
    with pytest.raises(RuntimeError, match=r"Missing key.*qkv\.norm\.weight"):
        octavo.load_te_checkpoint(model(), state)
    assert octavo.load_te_checkpoint(model(), state, strict=False).parameters == 14
    more = state | {"other.weight": torch.ones(1)}  # which is not loaded
    assert octavo.load_te_checkpoint(model(), more, strict=False).parameters == 14


def test_a_prefix_of_all_names_is_told():
    state, _ = saved()
    with pytest.raises(UnsupportedConfig, match=r"'module\.' before .*removeprefix\('module\.'\)"):
        octavo.load_te_checkpoint(model(), {f"module.{name}": t for name, t in state.items()})


def test_weights_in_parts_are_refused_because_their_order_is_not_told():
    state, _ = saved()
    weight = state.pop("qkv.weight")
    state |= {f"qkv.{name}_weight": part for name, part in zip(("query", "key", "value"), weight.chunk(3), strict=True)}
    with pytest.raises(UnsupportedConfig, match=r"parts of one weight .*torch\.cat"):
        octavo.load_te_checkpoint(model(), state)


class Bomb:
    def __reduce__(self):
        return exec, ("import sys; sys.modules['octavo'].exploded = True",)


def test_nothing_of_a_state_is_executed(tmp_path):
    state, _ = saved()
    state["proj._extra_state"] = torch.frombuffer(bytearray(pickle.dumps({"scale_fwd": Bomb()})), dtype=torch.uint8)
    report = octavo.load_te_checkpoint(model(), state)
    assert not hasattr(octavo, "exploded") and "proj" in report.measured_anew
    assert isinstance(read(pickle.dumps([Bomb(), print, foreign_recipe]))[0], Inert)
    torch.save({"proj.weight": Bomb()}, tmp_path / "bomb.pt")
    with pytest.raises(UnsupportedConfig, match="holds objects other than tensors"):
        octavo.load_te_checkpoint(model(), tmp_path / "bomb.pt")
    assert not hasattr(octavo, "exploded")


def test_a_pickle_cannot_change_the_functions_that_read_it():
    name = b"X\x0c\x00\x00\x00__defaults__"
    state = b"N}" + name + b"K\x01s\x86"  # (None, {"__defaults__": 1}), which BUILD sets as attributes
    with pytest.raises(ValueError, match="sets __defaults__ of a function"):
        read(b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n" + state + b"b.")


def test_a_tensor_of_one_element_and_many_names_is_refused():
    content = io.BytesIO()
    torch.save(torch.ones(1).expand(1 << 40), content)
    with pytest.raises(ValueError, match="a tensor of"):
        read(content.getvalue())


@pytest.mark.parametrize("content", [b"not a pickle", pickle.dumps({"scale_fwd": torch.ones(3)})[:-40], b"\x80\x04."])
def test_a_damaged_state_is_refused_before_anything_is_written(content):
    state, _ = saved()
    state["proj._extra_state"] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    loaded = model()
    before = loaded["proj"].weight.detach().clone()
    with pytest.raises(UnsupportedConfig, match=r"proj\._extra_state is no state"):
        octavo.load_te_checkpoint(loaded, state)
    assert torch.equal(loaded["proj"].weight, before)


def test_a_state_of_too_few_tensors_is_refused():
    state, _ = saved()
    state["mlp._extra_state"] = extra_state(1)[0]
    with pytest.raises(UnsupportedConfig, match=r"mlp\._extra_state has no scales for 5 tensors of forward"):
        octavo.load_te_checkpoint(model(), state)


def test_what_is_no_state_dict_is_refused():
    state, _ = saved()
    with pytest.raises(UnsupportedConfig, match=r"checkpoint\['model'\]"):
        octavo.load_te_checkpoint(model(), {"model": state})
    with pytest.raises(UnsupportedDtype):
        octavo.load_te_checkpoint(model(), [1])
    with pytest.raises(UnsupportedDtype):
        octavo.load_te_checkpoint(state, model())
