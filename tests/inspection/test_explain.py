"""octavo.explain: each thing it counts is seen to happen, and the model it was shown is left as it was."""

import copy
import json
import re
import shutil

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.cudagraph_utils import log_cudagraph_skip_and_bump_counter
from torch.utils.checkpoint import checkpoint

import octavo
from octavo.errors import Unsupported, UnsupportedConfig
from octavo.recipes import SHIPPED
from tests.support.inspected import only
from tests.support.linear_oracle import make, spiky
from tests.support.state_tensors import named_state

compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs g++ on a CPU")


class Broken(nn.Module):
    """Two layers with something between them."""

    def __init__(self, between):
        super().__init__()
        self.first, self.second = make("fp8-current", 48, 40), make("fp8-current", 40, 32)
        self.between = between

    def forward(self, x):
        x = self.first(x)
        self.between(x)
        return self.second(x)


class Looping(Broken):
    def forward(self, x):
        for _ in range(2):
            torch._dynamo.graph_break()
        return self.second(self.first(x))


class Refusing(nn.Module):
    """One layer that a graph takes, and one that says that it cannot be in one."""

    def __init__(self):
        super().__init__()
        self.taken = make("fp8-current", 48, 48)
        self.refused = make("fp8-current", 48, 48, delay_wgrad_compute=True)

    def forward(self, x):
        return checkpoint(self.refused, self.taken(x), use_reentrant=False)


@torch.compiler.disable
def skip(x):
    log_cudagraph_skip_and_bump_counter("skipping cudagraphs due to a test")


def mlp(recipe="fp8-delayed", depth=2):
    model = nn.Sequential(*[nn.Linear(48, 48) for _ in range(depth)])
    octavo.convert(model, recipe)
    return model


# -- what is counted -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", SHIPPED)
def test_a_clean_model_is_one_graph_with_a_node_a_layer_each_way(recipe):
    report = octavo.explain(mlp(recipe, depth=3), spiky(8, 48))
    assert (report.graphs, report.breaks, report.recompiles, report.skips) == (1, (), (), ())
    assert [graph.direction for graph in report.captured] == ["forward", "backward"]
    assert report.count("octavo::run", "forward") == report.count("octavo::run_bwd", "backward") == 3
    assert report.count("octavo::run", "backward") == report.count("octavo::run_bwd", "forward") == 0
    for layer in report.layers:
        assert layer.recipe == octavo.recipe(recipe).key
        assert dict(layer.routes) == {"fprop": "reference", "dgrad": "reference", "wgrad": "reference"}
        assert (layer.why, layer.uncompiled) == ("", "")
    assert [layer.path for layer in report.layers] == ["0", "1", "2"]


def test_delayed_scaling_adds_no_node():
    """The layers raise the amaxes themselves: a kernel more for each would take the host as long as a small GEMM."""
    report = octavo.explain(mlp("fp8-delayed", depth=2), spiky(8, 48))
    assert {name for name, _ in report.captured[0].others} == {"aten.view.default", "aten.unbind.int"}, "no kernels"


def test_a_weight_cache_is_a_node_more():
    report = octavo.explain(make("fp8-block"), spiky(8, 48), True, then=[(spiky(8, 48), False)])
    assert [report.count(f"octavo::{name}") for name in ("run", "refresh", "run_bwd")] == [2, 1, 2]
    assert report.graphs == 2
    assert "is_first_microbatch" in only(report.recompiles).guard


@pytest.mark.parametrize("between", [print, lambda x: torch._dynamo.graph_break(), skip], ids=["print", "break", "off"])
def test_a_break_has_its_reason_and_its_place(between):
    report = octavo.explain(Broken(between), spiky(8, 48))
    assert report.graphs == 2
    found = only(report.breaks)
    assert re.search(r"(^|/)tests/inspection/test_explain\.py:", found.where)
    assert found.uncompiled == ""
    assert any(word in found.reason for word in ("print", "graph_break()", "torch.compiler.disable"))
    assert "\n" not in found.reason
    assert [layer.uncompiled for layer in report.layers] == ["", ""]
    assert report.count("octavo::run", "forward") == 2


def test_a_break_on_every_call_is_one_break():
    report = octavo.explain(Broken(print), spiky(8, 48), then=[(spiky(9, 48),)])
    only(report.breaks)
    assert len(report.recompiles) == 2  # before it and after it


def test_a_function_that_is_given_up_on_is_a_break():
    """Breaks in a loop leave no graph of the function, and nothing in the list of breaks either."""
    report = octavo.explain(Looping(print), spiky(8, 48))
    found = only(report.breaks)
    assert found.uncompiled == "forward"
    assert "graph_break()" in found.reason
    assert "test_explain.py:" in found.where
    assert [layer.uncompiled for layer in report.layers] == ["", ""]  # each is a graph of its own


def test_layers_that_share_a_graph_are_all_in_it():
    model = Looping(print)
    model.first, model.second = (make("fp8-current", 48, 48, seed=seed) for seed in (1, 2))
    report = octavo.explain(model.requires_grad_(False), spiky(8, 48))
    assert report.graphs == 1
    assert [layer.uncompiled for layer in report.layers] == ["", ""]


def test_a_recompile_names_its_guard():
    report = octavo.explain(mlp(), spiky(8, 48), then=[(spiky(9, 48),), (spiky(10, 48),)], dynamic=None)
    assert report.graphs == 2  # the second takes any size
    assert "expected 8, actual 9" in only(report.recompiles).guard
    assert report.breaks == ()


def test_a_dynamic_graph_serves_every_size():
    report = octavo.explain(mlp(), spiky(8, 48), then=[(spiky(9, 48),), (spiky(10, 48),)], dynamic=True)
    assert (report.graphs, report.recompiles) == (1, ())


def test_too_many_recompiles_end_in_a_break():
    sizes = [(spiky(m, 48),) for m in range(9, 19)]
    report = octavo.explain(mlp(), spiky(8, 48), then=sizes, dynamic=False)
    assert len(report.recompiles) == 7 == report.graphs - 1
    found = only(report.breaks)
    assert "recompile limit" in found.reason
    assert found.uncompiled
    assert len(str(report).splitlines()) < 25


def test_more_compilations_than_torch_remembers():
    """It keeps the last 64 of a process."""
    with torch._dynamo.config.patch(recompile_limit=100):
        report = octavo.explain(nn.ReLU(), spiky(8, 1), then=[(spiky(m, 1),) for m in range(9, 80)], dynamic=False)
    assert len(report.recompiles) == 71


def test_a_model_that_is_not_compiled_at_all_does_not_pass_for_a_clean_one():
    with torch.compiler.set_stance("force_eager"):
        report = octavo.explain(mlp(), spiky(8, 48))
    assert report.graphs == 0
    assert "no graph was made" in only(report.breaks).reason
    assert all(layer.uncompiled for layer in report.layers)


@pytest.mark.filterwarnings("ignore:Running outside")
def test_a_layer_that_refuses_says_why():
    report = octavo.explain(Refusing(), spiky(8, 48))
    taken, refused = report.layers
    assert (taken.path, taken.uncompiled) == ("taken", "")
    assert "delay_wgrad_compute=True inside torch.utils.checkpoint" in refused.uncompiled
    assert refused.uncompiled in [found.reason for found in report.breaks]
    assert f"refused: not compiled: {refused.uncompiled}" in str(report)


def test_what_is_raised_while_a_graph_is_traced_is_quoted():
    class Raising(nn.Module):
        def forward(self, x):
            if torch.compiler.is_compiling():
                raise UnsupportedConfig("It's not for a graph. Run it in eager mode.")
            return x + 1

    found = only(octavo.explain(Raising(), spiky(8, 48)).breaks)
    assert found.reason == "It's not for a graph. Run it in eager mode."
    assert found.uncompiled


def test_a_break_with_a_message_is_quoted():
    model = Broken(lambda x: torch._dynamo.graph_break(msg="to look at x"))
    assert only(octavo.explain(model, spiky(8, 48)).breaks).reason == "to look at x"


def test_a_layer_that_is_not_called_is_said():
    model = Broken(lambda x: None)
    model.third = make("nvfp4")
    report = octavo.explain(model, spiky(8, 48))
    assert [bool(layer.uncompiled) for layer in report.layers] == [False, False, True]
    assert "not called" in report.layers[2].uncompiled


# -- skips -----------------------------------------------------------------------------------------------------------


@compiler
def test_skips_are_counted_with_their_reasons():
    """Nothing on a CPU runs as a CUDA graph; once forward does not, backward is not tried."""
    report = octavo.explain(make("fp8-current"), spiky(8, 48), mode="reduce-overhead")
    assert report.cudagraphs
    assert "skipping cudagraphs due to" in only(report.skips) or "cpu" in only(report.skips)
    assert report.count("octavo::run", "forward") == report.count("octavo::run_bwd", "backward") == 1
    assert "1 cudagraph skip\n" in str(report)


def test_a_skip_while_it_runs_has_its_reason():
    report = octavo.explain(Broken(skip), spiky(8, 48))
    assert report.skips == ("skipping cudagraphs due to a test",)


@compiler
def test_inductor_shows_the_same_nodes():
    model, call = Broken(print), spiky(8, 48)
    generated, traced = octavo.explain(model, call, mode="default"), octavo.explain(model, call)
    assert not generated.cudagraphs
    assert generated.breaks == traced.breaks
    for name in ("octavo::run", "octavo::run_bwd"):
        assert generated.count(name) == traced.count(name) == 2
    again = octavo.explain(model, call, mode="default")  # caches of the first would hide the graphs
    assert again.count("octavo::run") == 2


@pytest.mark.gpu
def test_reduce_overhead_skips_nothing_on_a_gpu():
    layer = make("fp8-current", 256, 128, dtype=torch.bfloat16).cuda()
    x = spiky(64, 256, dtype=torch.bfloat16).cuda()
    for settings in ({}, {"mode": "reduce-overhead"}):
        report = octavo.explain(layer, x, **settings)
        assert report.cudagraphs
        assert (report.graphs, report.breaks, report.recompiles, report.skips) == (1, (), (), ())
        assert report.count("octavo::run", "forward") == report.count("octavo::run_bwd", "backward") == 1
        assert set(dict(only(report.layers).routes).values()) <= {"native", "emulated"}


# -- recipes ---------------------------------------------------------------------------------------------------------


def test_a_layer_that_follows_autocast_has_the_recipe_it_ran_in():
    class Inside(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.free = octavo.Linear(48, 40), octavo.Linear(40, 40)

        def forward(self, x):
            with octavo.autocast("mxfp8"):
                x = self.layer(x)
            return self.free(x)

    found = {layer.path: layer.recipe for layer in octavo.explain(Inside(), spiky(8, 48)).layers}
    assert found == {"layer": "from octavo.autocast: mxfp8", "free": "from octavo.autocast: bf16"}
    with octavo.autocast("fp8-block"):
        found = {layer.path: layer.recipe for layer in octavo.explain(Inside(), spiky(8, 48)).layers}
    assert found == {"layer": "from octavo.autocast: mxfp8", "free": "from octavo.autocast: fp8-block"}


def test_no_backward_where_none_is_wanted():
    report = octavo.explain(mlp(), spiky(8, 48), backward=False)
    assert [graph.direction for graph in report.captured] == ["forward"]
    with torch.no_grad():
        report = octavo.explain(mlp(), spiky(8, 48))
    assert [graph.direction for graph in report.captured] == ["inference"]
    assert report.count("octavo::run") == 2


# -- what stays as it was ----------------------------------------------------------------------------------------------


class Everything(nn.Module):
    """Layers with every kind of state, some dropout, and a count of its calls."""

    def __init__(self):
        super().__init__()
        self.delayed, self.drawn = make("fp8-delayed", 48, 48), make("nvfp4", 48, 48)
        self.cached, self.quantized = make("fp8-block", 48, 48), make("fp8-current", 48, 48)
        self.fused = make("fp8-current", 48, 48, fuse_wgrad_accumulation=True)
        self.fused.weight.main_grad = spiky(48, 48)
        self.follows = octavo.Linear(48, 48)
        self.dropout, self.norm = nn.Dropout(0.5), nn.BatchNorm1d(48)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        x = self.norm(self.dropout(self.drawn(self.delayed(x))))
        return self.fused(self.quantized(self.follows(self.cached(x, True))))


def everything():
    model = Everything()
    octavo.quantize_weights(nn.Sequential(model.quantized))
    model(spiky(8, 48)).sum().backward()
    octavo.step(model)
    return model


def facts(model):
    """All that a call may change, as it is now: values, identities and versions."""
    tensors = {**dict(model.named_parameters()), **dict(named_state(model))}
    tensors["main_grad"] = model.fused.weight.main_grad
    tensors |= {f"{name}.grad": p.grad for name, p in model.named_parameters() if p.grad is not None}
    found = {name: (id(t), t._version, t.detach().clone()) for name, t in tensors.items()}
    layers = [module for module in model.modules() if isinstance(module, octavo.Linear)]
    codes = [dict(vars(layer._codes)) for layer in layers]
    rest = [dict(vars(layer._scaling)) for layer in layers] + [layer._follows for layer in layers]
    modes = [module.training for module in model.modules()]
    return found, [*codes, *rest, modes, model.calls, dict(vars(model.fused.weight)).keys()]


def assert_untouched(before, after):
    assert before[0].keys() == after[0].keys()
    for name, (identity, version, value) in before[0].items():
        assert after[0][name][:2] == (identity, version), name
        assert torch.equal(after[0][name][2], value), name
    assert before[1] == after[1]


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_the_model_is_left_as_it_was(training):
    model, x = everything().train(training), spiky(8, 48).requires_grad_()
    x.grad = spiky(8, 48, seed=3)
    kept, before = x.grad.clone(), facts(model)
    state = torch.get_rng_state()
    with octavo.autocast("mxfp8"):
        report = octavo.explain(model, x, then=[(spiky(9, 48),)])
    assert report.breaks == ()
    assert report.count("octavo::run", "forward") == 12
    assert_untouched(before, facts(model))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(x.grad, kept)


def test_main_grad_is_seen_and_not_written():
    """A copied parameter has no attributes of its own: without main_grad the layer would refuse."""
    layer = make("fp8-current", fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.zeros(40, 48)
    report = octavo.explain(layer, spiky(8, 48))
    assert report.breaks == ()
    assert not layer.weight.main_grad.any()


def test_a_buffer_that_is_asked_for_is_not_asked_for():
    layer = make("fp8-current", fuse_wgrad_accumulation=True)
    asked = []
    layer.weight.get_main_grad = lambda: asked.append(1)
    octavo.explain(layer, spiky(8, 48))
    assert asked == []


def test_parameter_hooks_do_not_fire():
    model, fired = mlp(), []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: fired.append(p))
    octavo.explain(model, spiky(8, 48))
    assert fired == []


def test_the_counters_of_the_compiler_are_put_back():
    torch._dynamo.reset()
    counters.clear()
    counters["inductor"]["cudagraph_skips"] = 7
    assert octavo.explain(mlp(), spiky(8, 48)).skips == ()
    assert {name: dict(found) for name, found in counters.items()} == {"inductor": {"cudagraph_skips": 7}}
    counters.clear()


def test_a_call_that_raises_leaves_nothing_behind():
    counters.clear()
    with pytest.raises(Unsupported, match=r"takes inputs \[\.\.\., 48\]"):
        octavo.explain(mlp(), spiky(8, 47))
    assert not counters
    assert octavo.explain(mlp(), spiky(8, 48)).graphs == 1


# -- input and output --------------------------------------------------------------------------------------------------


def test_the_text_groups_equal_layers():
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks, self.head = mlp("fp8-current", depth=12), make("mxfp8", 48, 40)

        def forward(self, x):
            return self.head(self.blocks(x))

    text = str(octavo.explain(Whole(), spiky(8, 48)))
    rows = [line.split() for line in text.splitlines()]
    assert ["blocks.*", "12", "fp8-current", "reference", "reference", "reference"] in rows
    assert ["head", "1", "mxfp8", "reference", "reference", "reference"] in rows
    assert "1 graph, 0 breaks, 0 recompiles, no CUDA graphs asked for" in text
    assert "octavo::run 13" in text and "octavo::run_bwd 13" in text
    assert len(rows) <= 25


def test_the_report_is_plain_data():
    report = octavo.explain(Broken(print), spiky(8, 48), then=[(spiky(9, 48),)])
    data = json.loads(json.dumps(report.as_dict()))
    assert data["graphs"] == 4
    assert data["captured"][0] == {"direction": "forward", "nodes": {"octavo::run": 1}, "others": {}}
    assert data["breaks"][0].keys() == {"reason", "where", "uncompiled"}
    assert "expected 8, actual 9" in data["recompiles"][0]["guard"]
    assert data["layers"][0]["routes"] == {"fprop": "reference", "dgrad": "reference", "wgrad": "reference"}
    assert data["skips"] == []
    assert hash(report) == hash(copy.deepcopy(report))


def test_a_compiled_model_is_taken_too():
    assert octavo.explain(torch.compile(mlp(), backend="eager"), spiky(8, 48)).count("octavo::run") == 2


def test_a_model_without_our_layers_is_said():
    assert "There is no layer of Octavo's in this model." in str(octavo.explain(nn.Linear(48, 40), spiky(8, 48)))


class Uncopied(nn.Module):
    def __deepcopy__(self, memo):
        raise RuntimeError("it holds a process group")


@pytest.mark.parametrize(
    ("model", "settings", "sentence"),
    [
        (len, {}, r"explain takes a model \(an nn.Module\), got builtin_function_or_method."),
        (
            Uncopied(),
            {},
            r"has none \(RuntimeError: it holds a process group\). Explain the module before it is wrapped",
        ),
        (nn.Linear(2, 2), {"mode": "fast"}, "mode must be one of 'default', .*'reduce-overhead'.*, got 'fast'"),
    ],
    ids=["function", "uncopied", "mode"],
)
def test_a_refusal_is_a_sentence(model, settings, sentence):
    with pytest.raises(UnsupportedConfig, match=sentence):
        octavo.explain(model, torch.ones(2, 2), **settings)


def test_a_block_that_runs_forward_again_is_seen():
    model = octavo.Sequential(octavo.LayerNormMLP(32, 32, recipe="fp8-current", activation_recompute=True), nn.Tanh())
    report = octavo.explain(model, torch.randn(4, 32, requires_grad=True))
    assert [run.stages for run in report.runs] == [("norm", "linear", "activation", "linear")]
    assert [layer.uncompiled for layer in report.layers] == ["", ""]
